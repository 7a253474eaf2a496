"""Labeled rows: read from JSONL, CSV or the hub, tokenized, and batched with few lengths.

A batch's length is the smallest of the run's lengths that holds its longest row (or its longest
packed row). The rows of a batch depend only on the seed and the step, not on lengths.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ffn_heterogeneity.data.glue import NUMBER, LabelTask, get_task, label_text
from ffn_heterogeneity.data.sources import DataError, Source, open_source, read_each
from ffn_heterogeneity.io.files import paths_in
from ffn_heterogeneity.wording import check_number, naming, settings_of

Batch = dict[str, np.ndarray]
# Seeds for drawing a part of the rows (with the run's seed), and a held-out part (without it).
_PART, _HELD_OUT = 0xF4AC, 0x4E1D


@dataclasses.dataclass(frozen=True)
class LabelSettings:
    """`config.data` of a run on labelled rows.

    Attributes:
      task: a name of `glue.TASKS`, "labels" or "regression".
      path: as for `open_source`, except text files; "": the task's data set.
      validation_path: held-out rows, or several sets, "<set>=<path>,<set>=<path>"; "": the task's
        if `path` is empty, else a part of the rows.
      test_path: rows that are evaluated once, at the end, with the exported weights; "": none.
      validation_fraction: share of the rows that is held out.
      fraction: share of the training rows that is used, drawn with the seed.
    """

    task: str
    path: str = ""
    validation_path: str = ""
    test_path: str = ""
    validation_fraction: float = 0.0
    fraction: float = 1.0

    def __post_init__(self):
        check_number("data.fraction", self.fraction, "(0, 1]", DataError)
        held_out = self.validation_fraction
        check_number("data.validation_fraction", held_out, "[0, 1)", DataError)
        if held_out and (self.validation_path or not self.path):
            why = "holds out rows of data.path: give a path, and no validation_path"
            raise DataError(f"data.validation_fraction={held_out} {why}")


@dataclasses.dataclass(frozen=True)
class Form:
    """The form in which a model reads a row.

    Attributes:
      encoder: whether the model is an encoder; see `encode_texts`.
      padding_id: id with which other libraries pad rows.
      most: maximum number of tokens of a row.
      as_made: use the tokenizer's output for a text or a pair unchanged, also for a decoder.
      eos_id: of an encoder-decoder, whose rows are one text that ends with it; None: another model.
      prompt: the form of that text, of `glue.PROMPTS`; "": the texts in lines.
    """

    encoder: bool
    padding_id: int | None
    most: int
    as_made: bool = False
    eos_id: int | None = None
    prompt: str = ""


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Tokenized rows.

    Attributes:
      ids, types: int32, one array per row; `types` is 1 for the second text of an encoder's row.
      targets: numbers of labels, or numbers; NaN without an answer.
      cut: whether the row was too long, bool per row.
    """

    ids: list[np.ndarray]
    types: list[np.ndarray]
    targets: np.ndarray
    cut: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def mean_length(self) -> float:
        """Mean number of tokens per row, including special ones."""
        return float(np.mean([len(row) for row in self.ids]))


def open_rows(path: str, split: str = "train") -> Source:
    """Open the records of a file or of a hub data set's split, with class names.

    Raises:
      DataError: as `open_source`; a plain text file.
    """
    source = open_source(path, split=split)
    if source.running_text:
        raise DataError(f"{path}: plain text has no fields; give .jsonl, .csv, .tsv or .parquet")
    source.by_name = True
    return source


def steps_of(data: Mapping[str, Any], epochs: float, batch_size: int) -> int:
    """Number of optimizer steps in `epochs` passes over the training rows.

    Raises:
      ValueError: an invalid number of epochs, or unreadable data.
    """
    settings = settings_of(LabelSettings, data)
    check_number("without --config.steps, epochs", epochs, "(0, inf)")
    rows = get_task(settings.task, ("text",), ("a", "b")).rows
    if settings.path or not rows:
        rows = len(open_rows(settings.path))
    if settings.validation_fraction:
        rows = len(held_out_part(rows, settings.validation_fraction)[0])
    return max(1, math.ceil(epochs * max(1, round(rows * settings.fraction)) / batch_size))


def constant_loss(task: LabelTask, targets: np.ndarray) -> float:
    """Smallest loss of a constant prediction.

    It is the entropy of the label frequencies (ln 3 for three equally frequent labels), or the
    variance of the numbers.
    """
    if task.regression:
        return float(np.var(targets))
    shares = np.unique(targets, return_counts=True)[1] / len(targets)
    return float(-np.sum(shares * np.log(shares)))


def found_labels(source: Source, field: str = "label") -> tuple[str, ...]:
    """Labels of a file: its class names in order, or the sorted texts of the field.

    Numbers are sorted by value and come before other texts.
    """
    if field in source.class_names:
        return source.class_names[field]
    values = {*read_each(source, lambda row: label_text(row.get(field)))} - {""}
    if len(values) > 1_000:
        raise DataError(f"{source.name}: {len(values)} different labels: is it a regression?")
    sizes = {text: float(text) if NUMBER.fullmatch(text) else math.inf for text in values}
    return tuple(sorted(values, key=lambda text: (sizes[text], text)))


def encode_rows(
    task: LabelTask, source: Source, tokenizer: Any, form: Form, labelled: bool = True
) -> Encoded:
    """Tokenize all rows of a source.

    Args:
      form: see `encode_texts`.
      labelled: whether to read answers.

    Raises:
      DataError: an invalid row; the message names the file and row.
    """
    texts = list(read_each(source, task.texts))
    targets = list(read_each(source, task.target)) if labelled else [math.nan] * len(texts)
    with naming(source.name, DataError, DataError):
        ids, types, cut = encode_texts(tokenizer, texts, form)
    return Encoded(ids, types, np.asarray(targets, np.float64), cut)


def encode_texts(
    tokenizer: Any, texts: Sequence[tuple[str, ...]], form: Form
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Tokenize rows of one or two texts: (ids, token types, whether each row was cut).

    For an encoder the tokenizer joins them, e.g. [CLS] a [SEP] b [SEP] for BERT. A decoder reads
    [ours] bos (if there is one), a, a newline and b, without eos: its last token is pooled. With
    `form.as_made`, the tokenizer's output is used. An encoder-decoder reads the prompt with an eos,
    and its end is cut before the eos. In a row that is too long the longer text is cut
    first, like `longest_first` of the tokenizers library.

    Raises:
      DataError: a decoder's row that ends with the padding token, which other libraries would
        ignore as padding; an empty row.
    """
    if form.eos_id is not None:
        return _prompts(tokenizer, texts, form, form.eos_id)
    rows, kinds, cut, encoder = [], [], [], form.encoder
    as_made = encoder or form.as_made
    first = [] if as_made or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for number, one in enumerate(_encodings(tokenizer, texts, as_made)):
        ids, types, parts = one
        keep = kept_places(parts, form.most - len(first))
        cut.append(not keep.all())
        ids, types = np.concatenate([first, ids[keep]]).astype(np.int32), types[keep]
        if form.as_made and not encoder:  # transformers pools the last token before padding
            real = np.flatnonzero(ids != form.padding_id)
            ids, types = (values[: real[-1] + 1 if len(real) else 0] for values in (ids, types))
        if not len(ids) or (not encoder and ids[-1] == form.padding_id):
            what = "ends with the padding token" if len(ids) else "is empty"
            raise DataError(f"row {number + 1} {what}: {texts[number]!r:.80}")
        rows.append(ids)
        kinds.append(np.concatenate([np.zeros(len(first)), types]).astype(np.int32))
    return rows, kinds, np.asarray(cut, bool)


def _prompts(
    tokenizer: Any, texts: Sequence[tuple[str, ...]], form: Form, eos_id: int
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    needs = form.prompt.count("{}")
    for text in texts:
        if needs not in (0, len(text)):
            raise DataError(f"{text!r:.80}: the prompt {form.prompt!r} needs {needs} texts")
    asked = [form.prompt.format(*text) if form.prompt else "\n".join(text) for text in texts]
    made = tokenizer(asked, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    for ids, text in zip(made, asked, strict=True):
        if eos_id in ids:
            raise DataError(f"{text!r:.80} holds the eos {eos_id}: it ends a row, so remove it")
    rows = [np.array([*ids[: form.most - 1], eos_id], np.int32) for ids in made]
    cut = np.asarray([len(ids) >= form.most for ids in made])
    return rows, [np.zeros_like(row) for row in rows], cut


def _encodings(tokenizer: Any, texts: Sequence[tuple[str, ...]], as_made: bool) -> Iterator[tuple]:
    """(ids, types, text index of each token: 0, 1, or -1 for special tokens) of every row."""
    plain = {"padding": False, "truncation": False, "return_attention_mask": False}
    if as_made:
        pairs = [text[1] for text in texts] if texts and len(texts[0]) > 1 else None
        made = tokenizer([text[0] for text in texts], pairs, return_token_type_ids=True, **plain)
        typed = getattr(tokenizer, "makes_types", True)
        for i, types in enumerate(made["token_type_ids"]):
            parts = [-1 if sequence is None else sequence for sequence in made.sequence_ids(i)]
            yield np.array(made["input_ids"][i]), np.array(types) * typed, np.array(parts)
        return
    joined = ["\n".join(text) for text in texts]
    made = tokenizer(joined, add_special_tokens=False, return_offsets_mapping=True, **plain)
    for ids, spans, text in zip(made["input_ids"], made["offset_mapping"], texts, strict=True):
        starts = np.array([span[0] for span in spans], int)
        parts = (starts > len(text[0])).astype(int) - (starts == len(text[0]))
        yield np.array(ids, int), np.zeros(len(ids)), parts


def kept_places(parts: np.ndarray, most: int) -> np.ndarray:
    """Mask of the tokens of a row to keep: at most `most`, the longer text's end is cut first."""
    lengths = [int(np.sum(parts == text_number)) for text_number in (0, 1)]
    room = max(most - int(np.sum(parts < 0)), 0)
    short, long = sorted(lengths)
    if short + long > room:
        long = max(short, room - short)
        if short + long > room:
            short, long = room // 2, room - room // 2
    limits = (short, long) if lengths[0] <= lengths[1] else (long, short)
    keep = parts < 0
    for text_number, limit in enumerate(limits):
        keep[np.flatnonzero(parts == text_number)[:limit]] = True
    return keep


def length_for(lengths: Sequence[int], longest: int) -> int:
    """Smallest length that holds the longest row; the last length if rows were cut."""
    return next((length for length in sorted(lengths) if longest <= length), max(lengths))


def batch_of(
    data: Encoded, chosen: Sequence[int], lengths: Sequence[int], size: int, together: int = 1
) -> Batch:
    """Batch [size, length] of the chosen rows; unused positions are 0 and have no effect.

    Args:
      together: maximum number of packed rows per row of the batch, in segments 1, 2, ...; "target"
        and "valid" [size] are in the order of rows and segments.
    """
    groups = shared_rows([len(data.ids[row]) for row in chosen], size // together, together)
    fullest = max(sum(len(data.ids[chosen[place]]) for place in group) for group in groups)
    shape = size // together, together * length_for(lengths, -(-fullest // together))
    batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "token_types")}
    batch |= {"target": np.zeros(size, np.float32), "valid": np.zeros(size, bool)}
    for at, group in enumerate(groups):
        start = 0
        for segment, place in enumerate(group):
            row = chosen[place]
            stop = start + len(data.ids[row])
            batch["tokens"][at, start:stop] = data.ids[row]
            batch["segment_ids"][at, start:stop] = segment + 1
            batch["token_types"][at, start:stop] = data.types[row]
            batch["target"][at * together + segment] = np.nan_to_num(data.targets[row])
            batch["valid"][at * together + segment] = True
            start = stop
    return {name: leaf.reshape(size, -1) if leaf.ndim > 1 else leaf for name, leaf in batch.items()}


def shared_rows(lengths: Sequence[int], groups: int, together: int) -> list[list[int]]:
    """Groups of packed rows (their indices), at most `together` each, with balanced lengths.

    Each row, longest first, goes to the group with the fewest tokens that has room.
    """
    if together == 1:
        return [[place] for place in range(len(lengths))]
    made: list[list[int]] = [[] for _ in range(groups)]
    tokens = [0] * groups
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        open_groups = (at for at in range(groups) if len(made[at]) < together)
        least = min(open_groups, key=tokens.__getitem__)
        made[least].append(place)
        tokens[least] += lengths[place]
    return made


@dataclasses.dataclass(eq=False)
class Shuffled:
    """Iterator over training batches in a new order every epoch; batches may span two epochs.

    The order depends on (seed, epoch) and is the same in every process; `rows` are the rows of a
    global batch that this process feeds. The state is the step.
    """

    data: Encoded
    size: int
    rows: Sequence[int]
    seed: int
    lengths: Sequence[int]
    together: int = 1
    step: int = 0

    def __next__(self) -> Batch:
        places = np.arange(self.step * self.size, (self.step + 1) * self.size)
        epochs = places // len(self.data)
        chosen: list[int] = []
        for epoch in np.unique(epochs):
            order = np.random.default_rng([self.seed, int(epoch)]).permutation(len(self.data))
            chosen += order[places[epochs == epoch] % len(self.data)].tolist()
        self.step += 1
        batch = batch_of(self.data, chosen, self.lengths, self.size, self.together)
        return {name: leaf[np.asarray(self.rows)] for name, leaf in batch.items()}

    def get_state(self) -> dict[str, Any]:
        return {"step": self.step}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])

    def close(self) -> None:
        """Do nothing: no files or threads are open."""


def in_order_of_length(
    data: Encoded, size: int, lengths: Sequence[int], together: int = 1
) -> Iterator[tuple[list[int], Batch]]:
    """Iterate once over all rows as (row numbers, batch), sorted by length to reduce padding."""
    order = np.argsort([len(row) for row in data.ids], kind="stable").tolist()
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        yield chosen, batch_of(data, chosen, lengths, size, together)


def part_of(count: int, fraction: float, seed: int) -> np.ndarray:
    """Sorted row numbers of a random part of the rows."""
    if fraction == 1:
        return np.arange(count)
    order = np.random.default_rng([seed, _PART]).permutation(count)
    return np.sort(order[: max(1, round(count * fraction))])


def held_out_part(count: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, held-out rows), independent of the seed; at least one of each."""
    if count < 2:
        raise DataError(f"validation_fraction={fraction}: {count} row cannot be split: add rows")
    order = np.random.default_rng(_HELD_OUT).permutation(count)
    many = min(max(1, round(count * fraction)), count - 1)
    return np.sort(order[many:]), np.sort(order[:many])


def chosen_rows(data: Encoded, rows: Sequence[int]) -> Encoded:
    """Select rows by their numbers."""
    ids, types = ([kind[row] for row in rows] for kind in (data.ids, data.types))
    targets, cut = (values[np.asarray(rows)] for values in (data.targets, data.cut))
    return Encoded(ids, types, targets, cut)


def named_paths(text: str, name: str = "validation") -> dict[str, str]:
    """Parse "<set>=<path>,<set>=<path>" or one path to `{set: path}`; an existing path is one."""
    parts = paths_in(text)
    if "" in dict(parts):
        return {name: parts[0][1]}
    labels = ["train", "test", *(label for label, _ in parts)]
    if taken := [label for i, label in enumerate(labels) if label in labels[:i]]:
        raise DataError(f"{text}: no held-out set can be called {taken[0]!r}: this name is taken")
    return dict(parts)
