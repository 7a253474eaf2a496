"""The one exception of the checkpoint readers and writers."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file, and the tensor."""
