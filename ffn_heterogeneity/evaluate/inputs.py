"""Token ids to evaluate on: windows of a text file, or rows of a .npy file."""

from __future__ import annotations

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.io.load import Model

DTYPES = ("float32", "bfloat16")


def check_inputs(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded.

    Raises:
      ValueError: a setting or a file is unusable; the message names it.
    """
    if bool(config.text) == bool(config.token_ids):
        raise ValueError("give exactly one of --config.text=<file> and --config.token_ids=<file>")
    if config.batch_size < 1:
        raise ValueError(f"batch_size={config.batch_size} must be at least 1")
    if config.token_ids:
        read_token_ids(config.token_ids)
    else:
        read_utf8(config.text)


def input_rows(config: ConfigDict, model: Model) -> np.ndarray:
    """int [windows, length] of `config.text` (cut by `config.window`) or of `config.token_ids`.

    Raises:
      ValueError: as `check_inputs`; the model has no tokenizer; the text is too short.
    """
    if config.token_ids:
        return read_token_ids(config.token_ids)
    if model.tokenizer is None:
        raise ValueError(
            f"{model.source} has no tokenizer, so no text can be read: add its files, or give "
            "--config.token_ids"
        )
    return text_windows(
        read_utf8(config.text), model.tokenizer, config.window,
        max_windows=config.max_windows or None, bos=config.bos,
    )  # fmt: skip


def check_rows(rows: np.ndarray, vocab_size: int) -> None:
    """Refuses rows that are not 2-D integers of at least two columns within the vocabulary.

    Raises:
      ValueError: says what they are.
    """
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
        raise ValueError(f"token ids have shape {rows.shape}: [windows, length >= 2] is needed")
    if not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(f"token ids are {rows.dtype}: integers are needed")
    if rows.min() < 0 or rows.max() >= vocab_size:
        bad = rows.min() if rows.min() < 0 else rows.max()
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")


def read_token_ids(path: str) -> np.ndarray:
    """Integers [windows, length] of a .npy file; pickled objects are refused.

    Raises:
      ValueError: the file is not such an array.
    """
    try:
        with epath.Path(path).open("rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a plain .npy array of integers: {error}") from None
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path} is not a plain .npy array of integers but a .npz archive")
    return ids
