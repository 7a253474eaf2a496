"""The inside of the sandbox: a bare interpreter that restricts itself and runs one program.

    launcher    outside the new process namespace, waits
    `- keeper   process 1 of the namespace: when it ends, the kernel kills all other processes; it
       |        ends with the program, or when stdin ends because the caller ended
       `- the program, under limits

With bubblewrap, bwrap makes the namespaces and starts the keeper. Uses only the standard library;
started by `sandbox/programs.py`, which does not fork (its process has threads).
"""

import json
import os
import resource
import select
import signal
import sys
import traceback
import types
from collections.abc import Callable

import sandbox_kernel as kernel

# Exit status of the keeper and the launcher, which code inside the namespace cannot choose.
ENDED, FAILED, TIMEOUT, MEMORY, KILLED, BROKEN = range(6)
OUT_OF_MEMORY = 97  # exit status of the program, a label only
READY = b"R"  # then the token, if the last line was reached


def main() -> None:
    """Read the order (a line of JSON) from stdin, run it, and end with a status from above."""
    os.environ.clear()
    os.umask(0o022)
    order = json.loads(sys.stdin.buffer.readline())
    try:
        stay_tied()
        if order["mechanism"] == "namespaces":
            enter_namespaces(order)
        status = keep(order)
    except (OSError, ValueError) as error:
        os.write(order["status"], f"E{error}".encode())
        status = BROKEN
    os._exit(status)


def stay_tied() -> None:
    """Die with the parent, immediately if the other end of stdin is already closed."""
    kernel.die_with_parent()
    poll = select.poll()
    poll.register(0, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os._exit(BROKEN)


def enter_namespaces(order: dict) -> None:
    """Enter new namespaces; returns only in the keeper, in a new root directory.

    The launcher never returns.
    """
    write_maps = mapper(order["uid"])
    kernel.call("unshare", kernel.ALL_NAMESPACES)
    write_maps()
    stay_tied()
    keeper = os.fork()
    if keeper:
        os._exit(launcher(keeper, order["status"]))
    stay_tied()
    scratch = "size={disk_bytes},nr_inodes={files},mode=700,uid={uid},gid={uid}".format(**order)
    kernel.build_root(order["views"], order["devices"], scratch)


def mapper(inside: int) -> Callable[[], None]:
    """Return a function that sets this process's user ids once it is in a user namespace.

    Only a process outside may write them, so one is started before. Root keeps all ids, to become
    `inside` later; other users can have only one id and become `inside` immediately.
    """
    pid = os.getpid()
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(map_ids(pid, inside))
    os.close(read_end)

    def write_maps() -> None:
        os.close(write_end)
        number = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
        if number:
            raise OSError(number, f"user ids of the namespace: {os.strerror(abs(number))}")

    return write_maps


def map_ids(pid: int, inside: int) -> int:
    """Write /proc/<pid>/uid_map and gid_map; return the error number, or 0."""
    lines = {"setgroups": "deny"}
    lines |= {"uid_map": f"{inside} {os.geteuid()} 1", "gid_map": f"{inside} {os.getegid()} 1"}
    if os.geteuid() == 0:
        del lines["setgroups"]
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/self/{name}") as file:
                ranges = [line.split() for line in file]
            lines[name] = "\n".join(f"{start} {start} {count}" for start, _, count in ranges)
    try:
        for name, text in lines.items():
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return error.errno or 1
    return 0


def launcher(keeper: int, status: int) -> int:
    """Wait for the keeper; when this returns, all processes inside have ended."""
    for shared in (1, 2, status):  # the reader waits until all writers close
        os.close(shared)
    ended = os.waitpid(keeper, 0)[1]
    return os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else KILLED


def keep(order: dict) -> int:
    """Run the program in a child and return its end status; KILLED if stdin ends before."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 ignores unhandled signals
    if os.getpid() != os.getsid(0):
        os.setsid()
    kernel.drop_privileges(order["uid"])
    stay_tied()
    kernel.install_filter()
    program = os.fork()
    if program == 0:
        run_program(order)
    watch = select.poll()
    watch.register(0, 0)
    watch.register(os.pidfd_open(program), select.POLLIN)
    while True:
        if any(fd == 0 for fd, _ in watch.poll(100)):
            return KILLED
        pid = -1
        while pid and pid != program:  # orphans become children of process 1
            pid, status, usage = os.wait3(os.WNOHANG)
        if pid:
            return how_ended(status, usage.ru_utime + usage.ru_stime, order["cpu_seconds"])


def how_ended(status: int, seconds: float, cpu_seconds: int) -> int:
    if os.WIFEXITED(status):
        return {0: ENDED, OUT_OF_MEMORY: MEMORY}.get(os.WEXITSTATUS(status), FAILED)
    # The kernel counts the limit's time in ticks, which may differ from the reported usage.
    deaf = os.WTERMSIG(status) == signal.SIGKILL and seconds > cpu_seconds / 2
    return TIMEOUT if deaf or os.WTERMSIG(status) == signal.SIGXCPU else KILLED


def limit(order: dict) -> None:
    """Set limits that no child of this process can raise."""
    for what, soft, extra in (
        (resource.RLIMIT_AS, order["memory_bytes"], 0),
        (resource.RLIMIT_CPU, order["cpu_seconds"], 1),  # first SIGXCPU, a second later SIGKILL
        (resource.RLIMIT_FSIZE, order["file_bytes"], 0),
        (resource.RLIMIT_NPROC, order["processes"] + order["others"], 0),
        (resource.RLIMIT_NOFILE, order["open_files"], 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
    ):
        had = resource.getrlimit(what)[1]
        hard = soft + extra if had == resource.RLIM_INFINITY else min(soft + extra, had)
        resource.setrlimit(what, (min(soft, hard), hard))


def run_program(order: dict) -> None:
    """Run the program as module `program`, and write the token after its last line; never returns.

    The program shares its process with the token, so it could find it in the interpreter's frames;
    but a program that only ends early (os._exit, sys.exit) cannot pass.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    limit(order)
    status, text, token = order["status"], order.pop("program"), order.pop("token").encode()
    write, leave, getpid, me = os.write, os._exit, os.getpid, os.getpid()
    module = types.ModuleType("program")
    sys.modules["program"] = module
    sys.argv = ["program"]
    write(status, READY)
    code = FAILED
    try:
        exec(compile(text, "<program>", "exec", dont_inherit=True), module.__dict__)
        if getpid() == me:  # not a fork of the program
            write(status, token)
            code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException as error:  # SystemExit too: the last line was not reached
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            leave(code)
