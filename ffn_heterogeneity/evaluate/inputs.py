"""Inputs of evaluations: windows of a text, rows of a .npy file, or documents of JSONL."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from etils import epath

from ffn_heterogeneity.data.glue import PROMPTS
from ffn_heterogeneity.data.labelled import Form
from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.sources import TEXT_SUFFIXES, is_data, read_utf8
from ffn_heterogeneity.data.tasks.base import Example
from ffn_heterogeneity.data.tasks.messages import Message, prompt_ids
from ffn_heterogeneity.data.windows import document_starts, text_windows, window_documents
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.generate import check_vocabulary
from ffn_heterogeneity.models.options import COMPUTE_DTYPES, RunOptions, choose_dtype
from ffn_heterogeneity.wording import check_choice, check_numbers, first_line

Rows = TypeVar("Rows", bound=Sequence[np.ndarray])
# Part of the message for NaN or infinity.
OVERFLOW = (
    "the weights or the computation overflow; try compute_dtype=float32, or check the checkpoint"
)
FILES = ("text", "jsonl", "token_ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The measured model, and run options.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of a preset.
      revision: branch, tag or commit of a hub id.
      compute_dtype: a name of `COMPUTE_DTYPES`.
      batch_size: rows per batch.
    """

    model: str
    revision: str | None = None
    compute_dtype: str = "auto"
    batch_size: int = 1

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
        check_choice("compute_dtype", self.compute_dtype, COMPUTE_DTYPES)
        check_numbers(self, batch_size="[1, inf)")

    @property
    def options(self) -> RunOptions:
        return RunOptions(compute_dtype=choose_dtype(self.compute_dtype))

    @property
    def how(self) -> dict[str, Any]:
        """Keyword arguments of functions that compute batches of rows."""
        return {"options": self.options, "batch_size": self.batch_size}

    def read(self) -> Any:
        """Read the measurement's inputs from their files.

        `run.check_config` also calls it, so that an invalid file is an error before a model is
        loaded.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings(ModelSettings):
    """Windows of `text`, a UTF-8 file, or the rows of `token_ids`, a .npy file.

    Attributes:
      window, max_windows, bos: as of `text_windows`; 0 windows: all.
      window_every: its `every`.
    """

    text: str
    token_ids: str
    window: int
    max_windows: int
    bos: str
    window_every: int = 1

    def read(self) -> Any:
        """Read the text, or the ids [windows, length].

        Raises:
          ValueError: not exactly one file is given, or it cannot be read.
        """
        files = {key: getattr(self, key) for key in FILES if hasattr(self, key)}
        if sum(map(bool, files.values())) != 1:
            given = " and ".join(f"--config.{key}=<file>" for key in files)
            raise ValueError(f"give exactly one of {given}")
        return read_token_ids(self.token_ids) if self.token_ids else read_utf8(self.text)

    def rows(self, model: Model) -> np.ndarray:
        """Return the windows' ids, int [windows, length].

        Raises:
          ValueError: as `read`; the model has no tokenizer; the text is too short.
        """
        content = self.read()
        if self.token_ids:
            return content
        cut = (self.window, self.max_windows or None, self.bos, self.window_every)
        return text_windows(content, tokenizer_of(model), *cut)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerplexitySettings(TextSettings):
    """Windows whose perplexity is measured; `text` may be a directory of text files.

    Attributes:
      document: regular expression of the lines of `text` that begin a document; "": none do.
    """

    document: str = ""

    def read(self) -> Any:
        """The text or the ids of `TextSettings.read`; `document` must match a line.

        Raises:
          ValueError: as `TextSettings.read` and `document_starts`; a directory without texts.
        """
        if "" not in (files := self.files()):
            return [one.read() for one in files.values()]
        content = super().read()
        if self.document:
            if self.token_ids:
                raise ValueError(f"document={self.document!r} needs text, got token_ids")
            document_starts(content, self.document)
        return content

    def files(self) -> Mapping[str, "PerplexitySettings"]:
        """Settings of each text file of a directory, by its name; else {"": these settings}.

        Raises:
          ValueError: the directory has no text file, or two of one name.
        """
        folder = epath.Path(self.text or os.devnull)
        if not folder.is_dir():
            return {"": self}
        paths = sorted(path for path in folder.iterdir() if is_data(path.name, TEXT_SUFFIXES))
        files = {path.stem: dataclasses.replace(self, text=os.fspath(path)) for path in paths}
        if not files or len(files) < len(paths):
            raise ValueError(
                f"text={self.text} is a directory with {len(paths)} text files "
                f"({', '.join(TEXT_SUFFIXES)}) of {len(files)} names: give each its own name"
            )
        return files

    def documents(self, model: Model, count: int) -> list[int]:
        """`window_documents` of the first `count` windows."""
        cut = (self.document, self.window, count, self.window_every)
        return window_documents(self.read(), tokenizer_of(model), *cut)


def row_form(config: ModelConfig, task: str, most: int, foreign: bool = False) -> Form:
    """Form in which a classifier reads its rows.

    Args:
      task: name of its task, for an encoder-decoder's prompt.
      most: maximum number of tokens.
      foreign: a classifier of another library reads its tokenizer's output unchanged; one that is
        an encoder-decoder reads a text, or two in lines, with one eos [ours].

    Raises:
      ValueError: an encoder-decoder without eos, or without a first token for its decoder.
    """
    pad = config.pad_id if foreign else config.padding_id
    if config.kind != "encoder_decoder":
        return Form(config.is_encoder, pad, most, foreign)
    eos = config.eos_id[0] if isinstance(config.eos_id, tuple) else config.eos_id
    if eos is None or config.bos_id is None:
        raise ValueError(f"eos_id={eos}, bos_id={config.bos_id}: a head on both stacks needs them")
    return Form(False, pad, most, eos_id=eos, prompt=PROMPTS.get(task, ""))


def prompt_rows(model: Model, texts: Sequence[str], chat: bool = False) -> list[list[int]]:
    """Return the ids of prompts; with `chat`, of questions in the tokenizer's chat template.

    An encoder-decoder's end with an eos, as in its training.

    Raises:
      ValueError: the model has no tokenizer, or the tokenizer no template.
    """
    tokenizer = tokenizer_of(model)
    if model.config.kind == "encoder_decoder" and not chat:
        encoder = Encoder(tokenizer, "none")
        return [encoder.pair(Example(text, ""))[0] for text in texts]
    if not chat:
        return [tokenizer.encode(text) for text in texts]
    encoder = Encoder(tokenizer, "auto")
    return [prompt_ids([Message("user", text)], encoder) for text in texts]


def text_rows(texts: str | Sequence[Any] | np.ndarray) -> list[tuple]:
    """Convert texts given in Python to rows of one or more texts; one string is one text.

    Raises:
      ValueError: as `one_text`, for one string.
    """
    texts = texts.tolist() if isinstance(texts, np.ndarray) else texts
    listed = [one_text(texts)] if isinstance(texts, (str, os.PathLike)) else texts
    return [(text,) if isinstance(text, str) else tuple(text) for text in listed]


def one_text(text: Any) -> str:
    """Return the text after checking it.

    Raises:
      TypeError: not a string.
      ValueError: the path of a file; the message shows how to read it.
    """
    path = os.fspath(text)
    if path is not text or (len(path) < 1000 and os.path.isfile(os.path.expanduser(path))):
        way = f"pathlib.Path({path!r}).expanduser().read_text()"
        raise ValueError(f"{path!r} is the path of a file; expected its text: give {way}")
    return path


def tokenizer_of(
    model: Model, why: str = "no text can be read, add its files, or give --config.token_ids"
) -> Any:
    """Return the model's tokenizer; raise ValueError with the reason `why` if it has none."""
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer: {why}")
    return model.tokenizer


def checked_rows(rows: Rows, vocab_size: int) -> Rows:
    """Check that rows are integers of at least two columns within the vocabulary.

    Args:
      rows: one array [windows, length], or rows of unequal lengths.

    Raises:
      ValueError: invalid rows.
    """
    if isinstance(rows, np.ndarray) and (rows.ndim != 2 or len(rows) < 1 or rows.shape[1] < 2):
        raise ValueError(f"token ids have shape {rows.shape}; expected [windows, length >= 2]")
    ids = np.concatenate(rows)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"token ids are {ids.dtype}; expected integers")
    check_vocabulary(ids, vocab_size)
    return rows


def read_token_ids(path: str) -> np.ndarray:
    """Read integers [windows, length] from a .npy file; pickled objects are rejected.

    Raises:
      ValueError: the file is not such an array.
    """
    try:
        with epath.Path(path).open("rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:  # for sizes in a malicious header
        said = first_line(error)
        raise ValueError(f"{path} is not a plain .npy array of integers: {said}") from None
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path} is not a plain .npy array of integers but a .npz archive")
    return ids
