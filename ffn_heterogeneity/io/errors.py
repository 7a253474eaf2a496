"""The one exception of the checkpoint readers and writers."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file, and the tensor.

    It is one line, whatever names of somebody else's stand in it.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))
