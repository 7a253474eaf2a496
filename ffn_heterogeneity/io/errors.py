"""The exception that checkpoint readers and writers raise."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written; the message names the file and the tensor.

    The message is one line, even if names from the file contain line breaks.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))
