"""Programs that try to get out of the sandbox, or to pass without a right answer.

None would do lasting harm if it succeeded.
"""

# Allowed exit status -> name -> program.
_ENDINGS = {
    "failed": {
        "fork bomb": "import os\nwhile True: os.fork()",
        "thread bomb": "import threading, time\n"
        "while True: threading.Thread(target=time.sleep, args=(60,)).start()",
        "memory files": "import os\nfd = os.memfd_create('x')\n"
        "while True: os.write(fd, bytes(10**6))",
        "10 GB in a file": "with open('a', 'wb') as f:\n"
        "  for _ in range(10**4): f.write(bytes(10**6))",
        "10 GB in a sparse file": "open('a', 'wb').truncate(10**10)",
        "10 GB in many files": "for i in range(10**4):\n"
        "  with open(f'{i}', 'wb') as f: f.write(bytes(10**6))",
        "kills its parent": "import os, signal\n"
        "for s in signal.Signals: os.kill(os.getppid(), s)\nassert False",
        "reaches all": "import os\nos.kill(-1, 0)",  # Signal 0 reaches those of SIGKILL.
        "writes the library": "import os\n"
        "open(os.path.join(os.path.dirname(os.__file__), 'sandbox-was-here'), 'w')",
        "writes the root": "open('/sandbox-was-here', 'w')",
        "os._exit": "import os\nos._exit(0)\nassert False",
        "sys.exit": "import sys\nsys.exit(0)\nassert False",
        "other exits": "import os\nif os.fork(): os._exit(0)\nassert False",
        "a copy passes": "import os\nif os.fork(): os.wait(); os._exit(0)",
        "another program": "import os\nos.execv('/bin/true', ['true'])",
        "guesses the token": "import os\nfor fd in range(64):\n"
        "  try: os.write(fd, b'R' + b'0' * 32)\n  except OSError: pass\nos._exit(0)",
        "asserts caught": "AssertionError = None\nassert False",
        "not Python": "def f(:\n  '''",
        "not text": "x = '\ud800\0'",
        "asks": "input()",
    },
    "timeout": {
        "stubborn fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        "endless loop": "while True: pass",
        "deaf to signals": "import signal\n"
        "for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
        "  signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        "silent": "import os\nos.closerange(0, 4096)\nwhile True: pass",
    },
    "memory": {
        "100 GB": "x = bytearray(10**11)",
        "100 GB bit by bit": "x = []\nwhile True: x.append(bytearray(10**7))",
    },
    "output": {
        "printing": "while True: print('x' * 1000)",
        "printing errors": "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "printing to all files": "import os\nwhile True:\n  for fd in range(64):\n"
        "    try: os.write(fd, b'R' * 1000)\n    except OSError: pass",
    },
    "killed": {
        "kills itself": "import os\nos.kill(os.getpid(), 9)",
        "crashes": "import ctypes\nctypes.string_at(0)",
    },
    "memory failed": {
        "100 GB shared": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 10**8))"
    },
    "memory killed timeout": {
        "recursion": "def f(): f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()"
    },
}
# name -> (program, allowed exit status)
HOSTILE = {
    name: (program, set(endings.split()))
    for endings, programs in _ENDINGS.items()
    for name, program in programs.items()
}
# Forbidden actions; the program tries each and raises an error if one works.
PRIVILEGES = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *args):
    assert libc[name](*args) == -1 and ctypes.get_errno() == errno.EPERM, name
refused("mount", b"x", b"/tmp", b"tmpfs", 0, None)
refused("umount2", b"/tmp", 2)
refused("chroot", b"/tmp")
refused("sethostname", b"x", 1)
refused("unshare", 0x10000000)
refused("setns", 0, 0)
refused("ptrace", 0, 0, 0, 0)
refused("setgroups", 0, None)
refused("shmget", 0, 4096, 0o1600)
if os.uname().machine == "x86_64":
    refused("syscall", 56, 0x10000000 | 17, 0, 0, 0, 0)
    assert libc.syscall(435, 0, 0) == -1 and ctypes.get_errno() == errno.ENOSYS
for args in ((), (2, 2), (1, 1), (40, 1), (16, 3)):
    refused("socket", *(*args, 0, 0, 0)[:3])
assert libc.setuid(0) == -1  # not permitted, or no such user in there
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[7] * 6)
assert libc.capget(header, sets) == 0 and list(sets) == [0] * 6, list(sets)
assert 0 not in os.getresuid() and 0 not in os.getresgid() and not os.environ
assert not os.path.exists("/proc") and not os.path.exists("/home")
assert sorted(os.listdir("/dev")) == ["null", "urandom", "zero"]
with open("/tmp/mine", "w") as file: file.write("x")
with open("/dev/null", "w") as file: file.write("x")
"""
# Moves itself into the background twice, opens no file, and sets its name for ps.
DAEMON = """
import ctypes, os, time
def rename(): ctypes.CDLL(None).prctl(15, b"{tag}", 0, 0, 0)
if not os.fork():
    os.setsid()
    if not os.fork():
        rename()
        os.closerange(0, 4096)
        time.sleep(100)
    os._exit(0)
time.sleep(0.2)
"""
