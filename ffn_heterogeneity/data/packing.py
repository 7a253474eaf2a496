"""Packing of examples into rows: tokens, shifted targets, loss mask, segments and positions.

One example becomes token ids `[bos] prompt target [eos]` and then three arrays of equal length:
`tokens = ids[:-1]`, `targets = ids[1:]`, and `loss_mask`, which is true if the TARGET belongs to
the response (including its eos); in a conversation, to one of the assistant's turns. The shift is
done here, inside one document, so packing cannot make a target cross documents. The last id of a
document is only a target, never an input, so no position is wasted.

Prompt and target are tokenized separately, so no token spans the boundary and the mask is exact.
The target is encoded as a continuation: a tokenizer that adds a space before every text
(SentencePiece with a dummy prefix: Llama 1 and 2) would otherwise insert one inside the example.

Rows are packed by grain: running text by `ConcatThenSplitIterDataset` (documents are concatenated
and may continue in the next row), examples by `FirstFitPackIterDataset` (each within one row).
"""

import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ffn_heterogeneity.data.sources import DataError, Source, named_place
from ffn_heterogeneity.data.tasks.base import Example, Fields, Task
from ffn_heterogeneity.data.templates import DATE
from ffn_heterogeneity.wording import check_choice, naming

BOS_POLICIES = ("auto", "segment", "document", "none")
CHAT_TEMPLATES = ("auto", "tokenizer", "tulu")
# With more open rows than a batch has, small examples fill the gaps: the used share of GSM8K's
# positions at T = 512 increases from 82% (16 rows) to 87% (64) and 89% (256).
MIN_OPEN_ROWS = 64

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Counts:
    """Counts of the documents read so far (by the reader, which runs ahead of training)."""

    documents: int = 0
    kept: int = 0
    empty: int = 0
    no_response: int = 0
    truncated: int = 0
    bad: int = 0
    input_tokens: int = 0
    loss_tokens: int = 0

    def add_problem(self, source: str, name: str, meaning: str) -> None:
        """Count a problem, and log it at counts 1, 10, 100, ..."""
        count = getattr(self, name) + 1
        setattr(self, name, count)
        if str(count).rstrip("0") == "1":
            _log.warning(
                "%s: %d of %d documents so far: %s", source, count, self.documents, meaning
            )


class Encoder:
    """Encoder of examples to ids with a bos and eos policy.

    Args:
      tokenizer: `transformers`-like (`encode(text, add_special_tokens=False)`, `bos_token_id`,
        `eos_token_id`).
      bos: "segment": first in every segment of a row, also if a document continues after a cut
        (there it replaces the input whose target was the last of the previous row, so every token
        is still predicted exactly once); "document": only at the start of a document; "none";
        "auto": "segment" if the tokenizer has a bos, else "none"; conversations have what their
        tokenizer's chat template writes, as in transformers.
      eos: whether the tokenizer's eos, if it has one, ends every document.
      chat_template: form of conversations, see `tasks/messages.py`.
      append: a string that ends every document, before its eos; part of the response.
      loss_on_prompt: whether prompts are in the loss too.
      template_date: see `templates.render_template`.

    Attributes:
      invites: whether the template supports `add_generation_prompt`; None: not known yet
        (`tasks/messages.py`).

    Raises:
      DataError: unknown policy, an invalid date, or a bos policy for a tokenizer without bos.
    """

    def __init__(
        self,
        tokenizer: Any,
        bos: str = "auto",
        eos: bool = True,
        chat_template: str = "auto",
        append: str = "",
        loss_on_prompt: bool = False,
        template_date: str = DATE,
    ):
        with naming("template_date, YYYY-MM-DD", (TypeError, ValueError), DataError):
            datetime.date.fromisoformat(template_date)
        self.template_date, self.invites = template_date, None
        check_choice("chat_template", chat_template, CHAT_TEMPLATES, DataError)
        check_choice("bos", bos, BOS_POLICIES, DataError)
        self.auto_bos = bos == "auto"
        if self.auto_bos:
            bos = "none" if tokenizer.bos_token_id is None else "segment"
        if bos != "none" and tokenizer.bos_token_id is None:
            raise DataError(f'bos is {bos!r}, but this tokenizer has no bos token; use "none"')
        self.bos = bos
        self.bos_id = None if bos == "none" else int(tokenizer.bos_token_id)
        last = getattr(tokenizer, "eos_token_id", None) if eos else None
        self.eos_id = None if last is None else int(last)
        self.tokenizer, self.chat_template = tokenizer, chat_template
        self.append, self.loss_on_prompt = append, loss_on_prompt
        self._newline = encode(tokenizer, "\n")
        after_newline = encode(tokenizer, "\na")[len(self._newline) :]
        self._adds_space = after_newline != encode(tokenizer, "a")

    def ids(self, example: Example) -> tuple[list[int], int]:
        """Return the ids of a whole example, and the number of ids before the response."""
        before = encode(self.tokenizer, example.prompt)
        if self.bos_id is not None and (example.starts or self.bos == "segment"):
            before = [self.bos_id, *before]
        target = example.target + self.append if example.ends else example.target
        continues = bool(example.prompt) or not example.starts
        response = self.continuation(target) if continues else None
        if response is None:
            response = encode(self.tokenizer, target)
        if self.eos_id is not None and example.ends:
            response = [*response, self.eos_id]
        return before + response, len(before)

    def pair(self, example: Example) -> tuple[list[int], list[int]]:
        """Ids of a prompt and of its response for an encoder-decoder, each with bos and eos.

        They are separate texts, so whitespace at their border is left out. The response has no bos.
        """
        begin = [] if self.bos_id is None else [self.bos_id]
        end = [] if self.eos_id is None else [self.eos_id]
        texts = example.prompt.rstrip(), example.target.strip() + self.append
        prompt, response = (encode(self.tokenizer, text) for text in texts)
        return [*begin, *prompt, *end], [*response, *end]

    def continuation(self, text: str) -> list[int] | None:
        """Ids of a text that follows another one: encoded after a newline, which is removed.

        None if that is the same as encoding it alone, or cannot be determined.
        """
        if not self._adds_space:
            return None
        ids, prefix = encode(self.tokenizer, "\n" + text), self._newline
        return ids[len(prefix) :] if ids[: len(prefix)] == prefix else None


@dataclasses.dataclass
class ExampleReader:
    """Grain flat map: one record -> zero or more elements `{tokens, targets, loss_mask}`.

    For a record that the task cannot read it raises an error with the place, or with `skip_bad`
    drops and counts it with a warning. Empty documents, and examples whose prompt fills the row
    without a response token, are also dropped and counted with a warning. If nothing remains of all
    `total` records, that is an error.

    Attributes:
      decoder: (longest response, id before its first), for an encoder-decoder: elements then also
        have "encoder_tokens", the prompt of at most `seq_len` tokens. None: one stack.
    """

    task: Task
    fields: Fields
    source: Source
    encoder: Encoder
    seq_len: int
    total: int
    packing: bool
    skip_bad: bool = False
    vocab_size: int | None = None
    decoder: tuple[int, int] | None = None
    counts: Counts = dataclasses.field(default_factory=Counts)
    # Row numbers, so that a row is not counted twice if it is read again.
    _dropped: set[int] = dataclasses.field(default_factory=set)
    _where: str = ""  # the current record

    max_fan_out: ClassVar[int] = 1  # needed only by grain's random-access form

    def __post_init__(self):
        if self.decoder and self.encoder.eos_id is None:
            raise DataError(
                "an encoder-decoder's texts end with an eos: set eos=True, for a tokenizer with one"
            )

    def flat_map(self, item: Mapping[str, Any]) -> Sequence[dict[str, np.ndarray]]:
        self.counts.documents += 1
        element = self._read(item["row"], item["record"])
        if element is None:
            if not self.counts.kept:
                self._dropped.add(item["row"])
            # Otherwise an infinite stream would search for a first token forever.
            if len(self._dropped) >= self.total:
                raise self._nothing_left()
            return []
        self.counts.kept += 1
        self.counts.input_tokens += len(element["tokens"])
        self.counts.loss_tokens += int(element["loss_mask"].sum())
        if self.task.split_long and not self.packing:
            return split_pieces(element, self.seq_len, self.encoder)
        return [element]

    def _nothing_left(self) -> DataError:
        return DataError(
            f"{self.source.name}: none of its {self.total} records leaves a token to predict "
            f"in rows of {self.seq_len} ({self.counts.empty} empty, {self.counts.no_response} "
            f"with a prompt that fills the row, {self.counts.bad} unreadable; the last is "
            f"{self._where}); check the fields, or use longer rows"
        )

    def _problem(self, name: str, meaning: str) -> None:
        self.counts.add_problem(self.source.name, name, f"{meaning}; the last is {self._where}")

    def _read(self, row: int, record: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        self._where = self.source.where(row)
        try:
            example = read_example(self.task, self.fields, self.source, row, record)
            with named_place(self.source, row):
                return self._element(example)
        except DataError as error:
            if not self.skip_bad:
                raise
            meaning = f"dropped, unreadable, the last one: {error}"
            return self.counts.add_problem(self.source.name, "bad", meaning)

    def _pair(self, example: Example, longest: int, start_id: int) -> dict[str, np.ndarray] | None:
        if not example.target.strip():
            return self._problem("empty", "dropped, nothing to predict in them")
        rows = []
        for ids, limit in zip(self.encoder.pair(example), (self.seq_len, longest), strict=True):
            if len(ids) > limit:
                self._problem("truncated", f"a text cut to {limit} tokens, with its eos")
                ids = [*ids[: limit - 1], ids[-1]]
            if problem := unknown_token(ids, self.vocab_size, self.encoder.tokenizer):
                raise DataError(problem)
            rows.append(np.asarray(ids, np.int32))
        prompt, response = rows
        return {
            "encoder_tokens": prompt,
            "tokens": np.concatenate([np.asarray([start_id], np.int32), response[:-1]]),
            "targets": response,
            "loss_mask": np.ones(len(response), bool),
        }

    def _element(self, example: Any) -> dict[str, np.ndarray] | None:
        if self.decoder:
            return self._pair(example, *self.decoder)
        if self.task.encode:
            ids, scored = self.task.encode(example, self.encoder)
            end = last_scored(scored)  # what follows it predicts nothing
            ids, scored = ids[:end], np.asarray(scored[:end], bool)
        elif not example.target.strip():
            ids, scored = [], np.zeros(0, bool)
        else:
            ids, before = self.encoder.ids(example)
            scored = np.arange(len(ids)) >= (0 if self.encoder.loss_on_prompt else before)
        if len(ids) < 2:
            return self._problem("empty", "dropped, nothing to predict in them")
        if not self.task.split_long and len(ids) > self.seq_len + 1:
            end = last_scored(scored[: self.seq_len + 1])
            if not end:
                meaning = f"dropped, the prompt alone fills seq_len = {self.seq_len}"
                return self._problem("no_response", meaning)
            meaning = f"end of the response cut off to fit seq_len = {self.seq_len}"
            self._problem("truncated", meaning)
            ids, scored = ids[:end], scored[:end]
        if problem := unknown_token(ids, self.vocab_size, self.encoder.tokenizer):
            raise DataError(problem)
        return shift(ids, scored)


def unknown_token(ids: Any, vocab_size: int | None, tokenizer: Any) -> str | None:
    """Describe a token of ids [...] that the model has no embedding for; None if it has all.

    Args:
      vocab_size: the model's vocabulary size; None: unlimited.
    """
    largest = int(np.max(ids))
    if vocab_size is None or largest < vocab_size:
        return None
    return (
        f"token {tokenizer.decode([largest])!r}, id {largest}, beyond the model's vocabulary "
        f"of {vocab_size}: take it out of the text, or use a tokenizer without it"
    )


def read_example(
    task: Task, fields: Fields, source: Source, row: int, record: Mapping[str, Any]
) -> Any:
    """Call `task.example`; its errors then name the file and row."""
    with named_place(source, row):
        return task.example(record, fields)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without special tokens, and without the length warning (rows cut texts)."""
    if not text:
        return []
    quiet = {"verbose": False} if hasattr(tokenizer, "model_max_length") else {}
    return tokenizer.encode(text, add_special_tokens=False, **quiet)


def shift(ids: Sequence[int], scored: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs and targets of one document, [len(ids) - 1] each.

    `loss_mask[i]` is true where `targets[i] = ids[i + 1]` is in the loss: `scored[i + 1]`.
    """
    stream = np.asarray(ids, np.int32)
    return {"tokens": stream[:-1], "targets": stream[1:], "loss_mask": scored[1:]}


def last_scored(scored: Sequence[bool]) -> int:
    """Number of ids up to the last one in the loss; 0 if none is."""
    places = np.flatnonzero(scored[1:])  # the first id is never predicted
    return int(places[-1]) + 2 if len(places) else 0


def split_pieces(
    element: Mapping[str, np.ndarray], seq_len: int, encoder: Encoder
) -> list[dict[str, np.ndarray]]:
    """Split a long document into separate rows (packing off), with the same bos rule as grain."""
    pieces = []
    for start in range(0, len(element["tokens"]), seq_len):
        piece = {key: value[start : start + seq_len] for key, value in element.items()}
        if encoder.bos == "segment":
            piece["tokens"] = piece["tokens"].copy()
            piece["tokens"][0] = encoder.bos_id
        pieces.append(piece)
    return pieces


def pack(
    dataset: Any,
    task: Task,
    encoder: Encoder,
    seq_len: int,
    decoder: tuple[int, int] | None = None,
    **first_fit: Any,
) -> Any:
    """Pack a grain `IterDataset` of elements into one of rows with the five batch keys, [T] each.

    Args:
      decoder: as in `ExampleReader`; rows then have no positions, and the encoder's two keys too.
      first_fit: `packing` (off: one segment per row), `open_rows`, and `seed` (shuffles the rows of
        a round, because first fit returns the emptiest last; None keeps the order).
    """
    import grain

    longest = decoder[0] if decoder else seq_len
    lengths = dict.fromkeys(("tokens", "targets", "loss_mask"), longest)
    if decoder:
        lengths["encoder_tokens"] = seq_len
    if task.split_long and first_fit["packing"]:
        bos = {}
        if encoder.bos == "segment":
            handling = grain.experimental.BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS
            bos = {"bos_handling": handling, "bos_features": ("tokens",)}
            bos["bos_token_id"] = encoder.bos_id
        dataset = grain.experimental.ConcatThenSplitIterDataset(
            dataset, length_struct=lengths, **bos
        )
    else:
        seed = first_fit["seed"]
        dataset = grain.experimental.FirstFitPackIterDataset(
            dataset,
            length_struct=lengths,
            num_packing_bins=first_fit["open_rows"],
            seed=seed or 0,
            shuffle_bins=seed is not None,
            max_sequences_per_bin=None if first_fit["packing"] else 1,
        )
    return dataset.map(_finish_row)


def _finish_row(row: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {name: name for name in ("tokens", "targets", "loss_mask")}
    names["segment_ids"] = "tokens_segment_ids"
    if "encoder_tokens" in row:
        names["encoder_tokens"] = "encoder_tokens"
        names["encoder_segment_ids"] = "encoder_tokens_segment_ids"
    else:
        names["positions"] = "tokens_positions"
    return {name: row[other] for name, other in names.items()}
