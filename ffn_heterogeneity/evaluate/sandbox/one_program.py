"""One program in one sandbox: start, supervision within limits, end and outcome."""

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).parent
CHILD, KERNEL = HERE / "sandbox_child.py", HERE / "sandbox_kernel.py"
# The directory is last, so that our modules do not shadow the standard library.
BOOT = (
    "import sys; sys.path.append(sys.argv[1]); import sandbox_child; "
    "sys.path.pop(); sandbox_child.main()"
)
# Meaning of the keeper's exit status (sandbox_child.py), if the token does not show "passed".
STATUSES = ("failed", "failed", "timeout", "memory", "killed")
NOT_SET_UP = "the sandbox could not be set up: "
SETUP_SECONDS = 60.0
STOP_SECONDS = 10.0
NOBODY = 65534
TAIL = 2000
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class SandboxError(ValueError):
    """The program was not run: it was not allowed, or no sandbox is available."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program, including its children unless stated otherwise.

    Attributes:
      wall_seconds: time from its first line on; generous, so that a busy machine changes no score.
      cpu_seconds: CPU time of each process (MBPP's slowest reference solution takes 4 s).
      memory_bytes: address space of each process.
      file_bytes: size of each file that it writes.
      disk_bytes, files: total size and number of files in its /tmp (in memory).
      processes: simultaneous processes and threads.
      open_files: open files of each process.
      output_bytes: output to stdout and stderr; the program is ended beyond it.
    """

    wall_seconds: float = 30.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    files: int = 1024
    processes: int = 8
    open_files: int = 64
    output_bytes: int = 1 << 20

    def __post_init__(self):
        for name, value in vars(self).items():
            fits_type = name == "wall_seconds" or isinstance(value, int)
            if not (fits_type and 0 < value < float("inf")):
                raise ValueError(f"Limits: {name}={value!r} must be a positive number")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
      passed: whether it ran to its last line, within its limits.
      status: "passed", "failed" (an exception, or an end before the last line), "timeout",
        "memory" (a MemoryError), "output" (printed too much), "killed" (by a signal).
      stdout, stderr: the last TAIL bytes of each, as text.
      seconds: wall time from its first line.
    """

    passed: bool
    status: str
    stdout: str
    stderr: str
    seconds: float


def views() -> list[tuple[str, str]]:
    """(real path, path inside) of the files that a program sees: Python and system libraries."""
    prefix, config = sys.base_prefix, sysconfig.get_config_vars()
    wanted = [os.path.dirname(os.__file__), config.get("DESTSHARED"), config.get("LIBDIR")]
    wanted += [f"{prefix}/lib", f"{prefix}/lib64", "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    wanted += ["/etc/ld.so.cache", "/usr/share/zoneinfo"]
    roots: list[str] = []
    for path in sorted({path for path in wanted if path and os.path.exists(path)}):
        if not any(path.startswith(f"{seen}/") for seen in roots):
            roots.append(path)
    return [(os.path.realpath(path), path) for path in roots]


def _command(mechanism: str, order: dict) -> list[str]:
    python = os.path.realpath(sys.executable)
    run = [python, "-X", "utf8", "-s", "-P", "-S", "-c", BOOT]
    if mechanism == "namespaces":
        return [*run, str(HERE)]
    bwrap = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"]
    bwrap += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    if os.geteuid() != 0:  # root becomes another user, unknown in a new user namespace
        bwrap += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    bwrap += ["--perms", "1777", "--size", str(order["disk_bytes"]), "--tmpfs", "/tmp"]
    bound = [("--ro-bind", *view) for view in [*order["views"], (python, python)]]
    bound += [("--ro-bind", str(file), f"/sandbox/{file.name}") for file in (CHILD, KERNEL)]
    bound += [("--dev-bind", device, device) for device in DEVICES]
    # By default, it creates directories that only its user can read.
    for directory in sorted({str(up) for _, _, path in bound for up in Path(path).parents} - {"/"}):
        bwrap += ["--perms", "0755", "--dir", directory]
    bwrap += [word for words in bound for word in words]
    return [*bwrap, "--remount-ro", "/", "--chdir", "/tmp", "--", *run, "/sandbox"]


def run_once(mechanism: str, program: str, limits: Limits) -> Outcome:
    """Run a program and return its outcome; none of its processes remain.

    Raises:
      SandboxError: the sandbox could not be set up; the program did not start.
    """
    order = dataclasses.asdict(limits) | {
        "mechanism": mechanism,
        "program": program,
        "token": secrets.token_hex(16),
        "views": views(),
        "devices": DEVICES,
        # Processes of the same user and namespace: the keeper and, unless root, the launcher.
        "others": 2 if mechanism == "namespaces" and os.geteuid() != 0 else 1,
        # If processes are not counted per namespace, programs must not share a user.
        "uid": 10**9 + secrets.randbelow(10**9) if mechanism == "bwrap" else NOBODY,
    }
    environment = {"PYTHONHASHSEED": "0"}
    if "LD_LIBRARY_PATH" in os.environ:  # the interpreter may need it; removed inside
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    reader, writer = os.pipe()
    order["status"] = writer
    try:
        process = subprocess.Popen(
            _command(mechanism, order),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment,
            pass_fds=(writer,),
            start_new_session=True,
        )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    watch = _Supervisor(process, reader, limits)
    try:
        with contextlib.suppress(OSError):  # so that this process is killed first without memory
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
        with contextlib.suppress(BrokenPipeError):  # the reason comes through other channels
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        cut = watch.until_end()
    finally:
        watch.stop()
    return watch.outcome(cut, order["token"])


class _Supervisor:
    """Reader of a sandbox's output, with limits; ends the sandbox at its limits."""

    def __init__(self, process: subprocess.Popen, reader: int, limits: Limits):
        self.process, self.reader, self.limits = process, reader, limits
        self.selector = selectors.DefaultSelector()
        pipes = {"status": reader, "stdout": process.stdout, "stderr": process.stderr}
        self.tails = dict.fromkeys(pipes, b"")
        for name, pipe in pipes.items():
            self.selector.register(pipe, selectors.EVENT_READ, name)
        self.printed, self.seconds = 0, 0.0
        self.started: float | None = None

    def until_end(self) -> str | None:
        """Wait until the sandbox closes its pipes, or return the name of the exceeded limit."""
        deadline = time.monotonic() + SETUP_SECONDS
        while self.selector.get_map():
            self.read(deadline)
            if self.started is not None:
                deadline = self.started + self.limits.wall_seconds
            if self.printed > self.limits.output_bytes:
                return "output"
            if time.monotonic() >= deadline:
                return "timeout"
        return None

    def read(self, deadline: float) -> None:
        for key, _ in self.selector.select(max(0.0, deadline - time.monotonic())):
            chunk = os.read(key.fd, 1 << 16)
            if not chunk:
                self.selector.unregister(key.fd)
            self.printed += len(chunk)
            self.tails[key.data] = (self.tails[key.data] + chunk)[-TAIL:]
            if key.data == "status" and self.started is None and chunk[:1] == b"R":
                self.started = time.monotonic()
        if self.started is not None:
            self.seconds = time.monotonic() - self.started

    def stop(self) -> None:
        """End the sandbox; return when none of its processes are left."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()  # signals the keeper to end
        ends = time.monotonic() + STOP_SECONDS
        # Its pipes close with its last process that has them open.
        while self.selector.get_map() and time.monotonic() < ends:
            for key, _ in self.selector.select(max(0.0, ends - time.monotonic())):
                if not os.read(key.fd, 1 << 16):
                    self.selector.unregister(key.fd)
        try:
            self.process.wait(max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.selector.close()
        os.close(self.reader)
        for pipe in (self.process.stdout, self.process.stderr):
            pipe.close()

    def outcome(self, cut: str | None, token: str) -> Outcome:
        """Return the outcome; raise SandboxError if the program never started."""
        status, code = self.tails["status"], self.process.returncode
        stdout = self.tails["stdout"].decode(errors="replace")
        stderr = self.tails["stderr"].decode(errors="replace")
        if self.started is None:
            why = status[1:].decode(errors="replace") or stderr.strip() or f"exit status {code}"
            if cut:
                why = f"not ready after {SETUP_SECONDS:.0f} s"
            raise SandboxError(NOT_SET_UP + " ".join(why.split()))
        if cut:
            name = cut
        elif code == 0 and status == f"R{token}".encode():
            name = "passed"
        else:
            name = STATUSES[code] if 0 <= code < len(STATUSES) else "killed"
        return Outcome(name == "passed", name, stdout, stderr, self.seconds)
