"""The settings of a run's data, as configs have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.data.passages import PASSAGE_CHARS
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.templates import DATE
from ffn_heterogeneity.wording import check_known


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data to read, and its layout in rows.

    Attributes:
      task: name of a task ("text", "tokens", "jsonl", "gsm8k", "mbpp", "superglue", ...).
      path: file, directory, several files, or hub name `name[:config]`; "" takes the task's own. Of
        a mixture (superglue): the root with a folder for every member, see `mixtures.open_task`.
      mixture: ((task, path, weight), ...): rows of several of these, in proportion to the weights;
        `task` is "mixture" then, and the other settings hold for every member.
      split, revision: of a hub data set ("" takes the task's split); a mixture's files are named
        after the split.
      prompt_field, response_field, text_field: record fields; "" leaves it to the task.
      validation_fraction: share of the records held out, in [0, 1); the same whatever the seed.
        Of running text the last stretch is taken, else records at random (whole rows where a row
        holds several; of a mixture the share of every member).
      validation_path, validation_split: held-out data of its own; the fraction is then 0.
      with_dpr: whether DPR, which is not one of SuperGLUE's eight, takes part in their mixture.
      shuffle: a new order of the records in every epoch; False keeps the file's.
      shuffle_seed: seed of that order; None takes the run's.
      packing: several documents in one row; False gives each its own, padded.
      bos: "auto", "segment", "document" or "none"; see `packing.Encoder`.
      eos: whether documents end with the tokenizer's eos (conversations end as written).
      chat_template: how conversations ("messages") are written: "tokenizer" (its own template),
        "tulu" (the built-in form), or "auto": the tokenizer's where it has one.
      template_date: the day (YYYY-MM-DD) that a chat template writes which asks for today's.
      append: a string that ends every example, training and validation alike, before the eos:
        "\\n[eod]" is NUCL's recipe for PaLM 2 (its Appendix C; predictions are cut off there). It
        counts as part of the response, and is the first to go where an example is too long.
      loss_on_prompt: whether the tokens of prompts are in the loss as well.
      skip_bad: a record that its task cannot read is dropped, counted and warned about, instead of
        an error naming its place.
      passage_chars: running text is shuffled in passages of at most this many characters, and no
        context reaches beyond its passage: raise it (T * 5 or so) for very long rows.
      prefetch: batches prepared ahead by the background thread; 0 for none.
      verify: of token shards: whether their SHA-256 is compared when they are opened; sizes always.
    """

    task: str = "text"
    path: str | Sequence[str] = ""
    mixture: Sequence[tuple[str, str, float]] = ()
    split: str = ""
    revision: str | None = None
    prompt_field: str = ""
    response_field: str = ""
    text_field: str = ""
    validation_fraction: float = 0.0
    validation_path: str | Sequence[str] = ""
    validation_split: str = ""
    with_dpr: bool = True
    shuffle: bool = True
    shuffle_seed: int | None = None
    packing: bool = True
    bos: str = "auto"
    eos: bool = True
    chat_template: str = "auto"
    template_date: str = DATE
    append: str = ""
    loss_on_prompt: bool = False
    skip_bad: bool = False
    passage_chars: int = PASSAGE_CHARS
    prefetch: int = 2
    verify: bool = True

    @classmethod
    def from_mapping(cls, config: Any) -> DataConfig:
        """Reads a dict or `ConfigDict` with these keys; an unknown key names the nearest one."""
        names = [field.name for field in dataclasses.fields(cls)]
        check_known(config, names, "data setting", DataError)
        return cls(**dict(config))
