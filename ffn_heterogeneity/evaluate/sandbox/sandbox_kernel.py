"""The sandbox's Linux calls: namespaces, mounts, privileges, a filter of system calls.

Uses only the standard library, nothing from this package, because a bare interpreter imports it,
also inside the sandbox (evaluate/sandbox/sandbox_child.py).
"""

import ctypes
import os
import struct

LIBC = ctypes.CDLL(None, use_errno=True)

NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000
NEW_MOUNT, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
ALL_NAMESPACES = NEW_USER | NEW_PID | NEW_NET | NEW_MOUNT | NEW_UTS | NEW_IPC
ANY_NAMESPACE = 0x7E020000  # those, and cgroup namespaces

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
DETACH = 2
RECURSIVE = 0x8000
READ_ONLY, NO_SUID, NO_DEVICES = 1, 2, 4

# Numbers of system calls on (x86_64, aarch64); the newest have the same number everywhere.
SYSCALLS = {
    "pivot_root": (155, 41),
    "clone": (56, 220),
    "clone3": (435, 435),
    "mount_setattr": (442, 442),
}
# System calls that the program may not use, with the reasons.
DENIED = {
    # A new namespace would give it capabilities: mounts without a size limit, more processes.
    "unshare": (272, 97),
    "setns": (308, 268),
    # Connections; some address kinds (the host of a virtual machine) ignore namespaces.
    "socket": (41, 198),
    # Could perform a forbidden operation for the sandboxed process.
    "io_uring_setup": (425, 425),
    # Memory outside the address-space limit.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Other processes' memory and files.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    # Large parts of the kernel that such programs do not need.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "personality": (135, 92),
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, kernel's name


def machine() -> tuple[int, int]:
    """Column of the tables above, and the kernel's number of this architecture."""
    name = os.uname().machine
    if name not in MACHINES:
        raise ValueError(f"no table of system calls for {name} processors")
    return MACHINES[name]


def call(name: str, *args, what: str = "", place: str = "") -> None:
    """Call a function of the C library.

    Raises:
      OSError: it failed; the message has `what` (default: its name), the reason and `place`.
    """
    if getattr(LIBC, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{what or name}: {os.strerror(number)}{place}")


def syscall(name: str, *args) -> None:
    """Make a system call for which the C library has no function."""
    call("syscall", ctypes.c_long(SYSCALLS[name][machine()[0]]), *args, what=name)


def prctl(option: int, *args: int) -> None:
    full = (*args, 0, 0, 0, 0)[:4]
    call("prctl", option, *(ctypes.c_ulong(arg) for arg in full))


def die_with_parent() -> None:
    """Receive SIGKILL when the parent dies; a change of privileges resets this."""
    prctl(1, 9)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    args = [text.encode() for text in (source, target, kind)]
    call("mount", *args, ctypes.c_ulong(flags), options.encode(), place=f" ({target})")


def restrict_mount(path: str, flags: int, recursive: bool) -> None:
    """Set flags on the mount at `path`, with `recursive` also on all below it (Linux 5.12)."""
    attributes = struct.pack("4Q", flags, 0, 0, 0)
    depth = ctypes.c_uint(RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(len(attributes))
    syscall("mount_setattr", ctypes.c_int(-100), path.encode(), depth, attributes, size)


def build_root(views: list[tuple[str, str]], devices: list[str], scratch: str) -> None:
    """Replace the root directory by one with `views` and `devices`, read-only, and a /tmp.

    Args:
      views: (real path, path in the new root) of the visible files.
      scratch: mount options of /tmp, the only writable directory.
    """
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    # /tmp is free for the new root: it moves away together with the old root.
    mount("root", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    os.chdir("/tmp")
    syscall("pivot_root", b".", b"old")
    os.chdir("/")
    mount("/new", "/new", "", MS_BIND)
    os.mkdir("/new/tmp")
    mount("tmp", "/new/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, scratch)
    for source, target in views:
        _bind(source, target)
        restrict_mount(f"/new{target}", READ_ONLY | NO_SUID | NO_DEVICES, recursive=True)
    for device in devices:
        _bind(device, device)
    restrict_mount("/new", READ_ONLY | NO_SUID | NO_DEVICES, recursive=False)
    os.chdir("/new")
    syscall("pivot_root", b".", b".")
    call("umount2", b".", DETACH)
    os.chdir("/tmp")


def _bind(source: str, target: str) -> None:
    source, target = f"/old{source}", f"/new{target}"
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        os.close(os.open(target, os.O_CREAT))
    mount(source, target, "", MS_BIND | MS_REC)


def drop_privileges(uid: int) -> None:
    """Become `uid` if root, and permanently drop all capabilities, also for children.

    The user changes because limits on processes do not apply to root.
    """
    for capability in range(64):
        try:
            prctl(24, capability)  # out of the bounding set
        except OSError:
            break  # no more capabilities, or no right to drop any (then there are none)
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    prctl(38, 1)  # no new privileges
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call("capset", header, none)


def filter_program() -> bytes:
    """The filter of system calls, as instructions that the kernel runs before each call.

    Calls of another architecture (32-bit ones have other numbers) kill the process. Filters cannot
    see the flags of clone3: "not implemented" makes the C library use clone instead.
    """
    column, architecture = machine()
    load, equal, at_least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, permit, refuse, missing = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
    code = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, kill),
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),
        (give, 0, 0, kill),
        (equal, 0, 1, SYSCALLS["clone3"][column]),
        (give, 0, 0, missing),
    ]
    for numbers in DENIED.values():
        code += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    code += [
        (equal, 0, 3, SYSCALLS["clone"][column]),
        (load, 0, 0, 16),
        (bits, 0, 1, ANY_NAMESPACE),
        (give, 0, 0, refuse),
        (give, 0, 0, permit),
    ]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install_filter() -> None:
    """Install the filter for this process and its children; needs `prctl(38, 1)` before."""
    code = ctypes.create_string_buffer(filter_program())
    length = struct.pack("HP", (len(code) - 1) // 8, ctypes.addressof(code))
    program = ctypes.create_string_buffer(length)
    prctl(22, 2, ctypes.addressof(program))
