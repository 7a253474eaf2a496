"""The exception that checkpoint readers and writers raise; errors of the operating system."""

import errno
import re
import socket

# Trouble of a disk, a network or a machine, which may have passed at the next start.
PASSING = frozenset(
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EBUSY", "EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOLCK", "ENOMEM", "ENOSPC"),
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH"),
        *("ENOTCONN", "EPIPE", "ESTALE", "ETIMEDOUT"),
    )
)
# Such trouble in the text of an error: of JAX's processes, and of a bucket (tensorstore).
_PASSING = re.compile(r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED)\b|response_code='(429|5\d\d)'")
# Those of libraries that fetch files are no errors of Python's own kinds.
_LOST = re.compile(r"(httpx|httpcore|requests|urllib3)\..*(Timeout|Connect|Network|Protocol)")


def passes(error: BaseException) -> bool:
    """True if what is behind an error may have passed at the next start."""
    if os_error_of(error) in PASSING:
        return True
    inner: BaseException | None = error
    while inner is not None:
        kind = f"{type(inner).__module__}.{type(inner).__name__}"
        status = getattr(getattr(inner, "response", None), "status_code", None) or 0
        lost = isinstance(inner, (ConnectionError, TimeoutError, socket.gaierror))
        if lost or _LOST.match(kind) or status == 429 or status >= 500:
            return True
        if _PASSING.search(str(inner)):
            return True
        inner = inner.__cause__ or inner.__context__
    return False


def os_error_of(error: BaseException) -> int | None:
    """Return the number of the operating system's error behind an error, if there is one.

    tensorstore's errors (of orbax) have it in their text.
    """
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno:
            return inner.errno
        if code := re.search(r"os_error_code='(\d+)'", str(inner)):
            return int(code[1])
        inner = inner.__cause__ or inner.__context__
    return None


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file and the tensor.

    The message is one line, even if names from the file contain line breaks.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))
