"""Token ids to evaluate on: windows of a text, rows of a .npy file, or documents of JSONL."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.packing import Encoder, encode
from ffn_heterogeneity.data.sources import DataError, read_each, read_jsonl, read_utf8
from ffn_heterogeneity.data.tasks.base import text_of
from ffn_heterogeneity.data.tasks.messages import Message, prompt_ids
from ffn_heterogeneity.data.windows import WINDOW_BOS, text_windows
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.generate import check_vocabulary
from ffn_heterogeneity.models.options import RunOptions, choose_dtype
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import check_choice, check_number, check_numbers, first_line

Settings = TypeVar("Settings")


def options_of(config: ConfigDict) -> RunOptions:
    """Run options of an evaluation."""
    return RunOptions(compute_dtype=choose_dtype(config.compute_dtype))


def settings_from(kind: type[Settings], source: Any, **given: Any) -> Settings:
    """The dataclass `kind` of the values given, and of those of a config or other settings."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in given]
    return kind(**{name: getattr(source, name) for name in names}, **given)


def check_inputs(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded.

    Raises:
      ValueError: a setting or a file is unusable; the message names it.
    """
    keys = [key for key in ("text", "jsonl", "token_ids") if key in config]
    if sum(bool(config[key]) for key in keys) != 1:
        given = " and ".join(f"--config.{key}=<file>" for key in keys)
        raise ValueError(f"give exactly one of {given}")
    check_numbers(config, batch_size="[1, inf)")
    if config.token_ids:
        read_token_ids(config.token_ids)
    elif config.text:
        read_utf8(config.text)
    else:
        _texts(config.jsonl, config.text_field, config.max_documents)


def input_rows(config: ConfigDict, model: Model) -> np.ndarray:
    """int [windows, length] of `config.text` (cut by `config.window`) or of `config.token_ids`.

    Raises:
      ValueError: as `check_inputs`; the model has no tokenizer; the text is too short.
    """
    if config.token_ids:
        return read_token_ids(config.token_ids)
    text, tokenizer = read_utf8(config.text), tokenizer_of(model)
    most = config.max_windows or None
    return text_windows(text, tokenizer, config.window, max_windows=most, bos=config.bos)


def input_documents(config: ConfigDict, model: Model) -> tuple[list[np.ndarray], int]:
    """Ids of the documents of `config.jsonl`, and how many of them were cut to `config.window`.

    A bos comes first in each, and does not count as one of the window's tokens, unless `config.bos`
    is "none".

    Raises:
      ValueError: as `check_inputs`; the model has no tokenizer, or that no bos.
    """
    texts = _texts(config.jsonl, config.text_field, config.max_documents)
    return _cut_documents(tokenizer_of(model), texts, config.bos, config.window)


def _cut_documents(
    tokenizer: Any, texts: Sequence[str], bos: str, window: int
) -> tuple[list[np.ndarray], int]:
    """Documents as those of `input_documents`, of texts."""
    check_choice("bos", bos, WINDOW_BOS)
    check_number("window", window, "[1, inf)")
    first = [] if bos == "none" else [tokenizer.bos_token_id]
    if None in first:
        raise ValueError('this tokenizer has no bos token: use --config.bos="none"')
    documents = [encode(tokenizer, text) for text in texts]
    cut = sum(len(ids) > window for ids in documents)
    if cut:
        print(f"{cut} of {len(documents)} documents cut to window={window}", file=sys.stderr)
    return [np.asarray(first + ids[:window], np.int32) for ids in documents], cut


def _texts(path: str, field: str, most: int) -> list[str]:
    """The first `most` texts of a JSONL file (0: all of them)."""
    source = read_jsonl([path])
    check_number("max_documents", most, "[0, inf), 0 for all")

    def read(row: Mapping[str, Any]) -> str:
        text = text_of(row, field)
        if not text.strip():
            raise DataError(f"no text in field {field!r}")
        return text

    return list(itertools.islice(read_each(source, read), most or None))


def prompt_rows(model: Model, texts: Sequence[str], chat: bool = False) -> list[list[int]]:
    """The ids of texts to be continued; `chat`: of questions, in the tokenizer's template.

    Raises:
      ValueError: the model has no tokenizer, or that no template.
    """
    tokenizer = tokenizer_of(model)
    if not chat:
        return [tokenizer.encode(text) for text in texts]
    encoder = Encoder(tokenizer, "auto")
    return [prompt_ids([Message("user", text)], encoder) for text in texts]


def text_rows(texts: str | Sequence[Any] | np.ndarray) -> list[tuple]:
    """Rows of one text or more each, of texts given in Python; one string is one text.

    Raises:
      ValueError: as `one_text`, of one string.
    """
    texts = texts.tolist() if isinstance(texts, np.ndarray) else texts
    listed = [one_text(texts)] if isinstance(texts, (str, os.PathLike)) else texts
    return [(text,) if isinstance(text, str) else tuple(text) for text in listed]


def one_text(text: Any) -> str:
    """The text itself.

    Raises:
      TypeError: no string.
      ValueError: the path of a file; says how to read it.
    """
    path = os.fspath(text)
    if path is not text or (len(path) < 1000 and os.path.isfile(os.path.expanduser(path))):
        way = f"pathlib.Path({path!r}).expanduser().read_text()"
        raise ValueError(f"{path!r} is the path of a file; expected its text: give {way}")
    return path


def tokenizer_of(
    model: Model, why: str = "no text can be read, add its files, or give --config.token_ids"
) -> Any:
    """The model's; a ValueError that says `why` one is needed where it has none."""
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer: {why}")
    return model.tokenizer


def check_rows(rows: Sequence[np.ndarray], vocab_size: int) -> None:
    """Refuses rows that are not integers of at least two columns within the vocabulary.

    Args:
      rows: one array [windows, length], or rows of unequal lengths.

    Raises:
      ValueError: says what they are.
    """
    if isinstance(rows, np.ndarray) and (rows.ndim != 2 or len(rows) < 1 or rows.shape[1] < 2):
        raise ValueError(f"token ids have shape {rows.shape}: [windows, length >= 2] is needed")
    ids = np.concatenate(rows)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids are {ids.dtype}: integers are needed")
    check_vocabulary(ids, vocab_size)


def padded_batches(
    rows: Sequence[np.ndarray], batch_size: int, progress: str | None
) -> Iterator[np.ndarray]:
    """int32 [batch_size, longest] of all rows; -1 is padding, so that one program does them all.

    Args:
      progress: label of the progress bar; None: no bar.
    """
    shape = min(batch_size, len(rows)), max(map(len, rows))
    for start in bar(progress, range(0, len(rows), shape[0])):
        batch = np.full(shape, -1, np.int32)
        for row, ids in zip(batch, rows[start : start + shape[0]], strict=False):
            row[: len(ids)] = ids
        yield batch


def read_token_ids(path: str) -> np.ndarray:
    """Integers [windows, length] of a .npy file; pickled objects are refused.

    Raises:
      ValueError: the file is not such an array.
    """
    try:
        with epath.Path(path).open("rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:  # of sizes that its header makes up
        said = first_line(error)
        raise ValueError(f"{path} is not a plain .npy array of integers: {said}") from None
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path} is not a plain .npy array of integers but a .npz archive")
    return ids
