"""The exception that checkpoint readers and writers raise; errors of the operating system."""

import re


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
