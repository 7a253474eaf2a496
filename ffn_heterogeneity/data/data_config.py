"""Settings of a run's data."""

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
      path: file, directory, several files, or hub name `name[:config]`; "" takes the task's
        default. For a task mixture (superglue): the root with a folder for every member, see
        `mixtures.open_task`.
      mixture: ((task, path, weight), ...): rows of several of these, in proportion to the weights;
        `task` must be "mixture", and the other settings apply to every member.
      split, revision: for a hub data set ("" takes the task's split); a task mixture's files are
        named after the split.
      prompt_field, response_field, text_field: record fields; "" leaves it to the task.
      validation_fraction: share of the records held out, in [0, 1); independent of the seed. For
        running text it is the last part, otherwise random records (whole rows if a row holds
        several records; for a mixture the share of every member).
      validation_path, validation_split: separate held-out data; the fraction is then 0. The split
        of a validation_path is "validation" by default.
      with_dpr: whether DPR, which is not one of SuperGLUE's eight tasks, is in their mixture.
      shuffle: a new order of the records in every epoch; False keeps the file's.
      shuffle_seed: seed of that order; None takes the run's.
      packing: several documents in one row; False gives each a separate, padded row.
      bos: "auto", "segment", "document" or "none"; see `packing.Encoder`.
      eos: whether documents end with the tokenizer's eos (conversations end as written).
      chat_template: form of conversations ("messages"): "tokenizer" (its chat template), "tulu"
        (the built-in form), or "auto": the tokenizer's if it has one.
      template_date: date (YYYY-MM-DD) for chat templates that write the current date.
      append: a string that ends every example, training and validation alike, before the eos:
        "\\n[eod]" is NUCL's recipe for PaLM 2 (its Appendix C; predictions are cut off there). It
        counts as part of the response, and is cut off first if an example is too long.
      loss_on_prompt: whether the tokens of prompts are in the loss too.
      skip_bad: drop, count and warn about records that the task cannot read, instead of raising an
        error with their place.
      passage_chars: running text is shuffled in passages of at most this many characters, and
        context does not cross passages: raise it (to about T * 5) for very long rows.
      prefetch: number of batches that the background thread prepares ahead.
      verify: for token shards: compare their SHA-256 on opening; sizes are always compared.
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
        """Create from a dict or `ConfigDict` with these keys; errors name the nearest known key."""
        names = [field.name for field in dataclasses.fields(cls)]
        check_known(config, names, "data setting", DataError)
        return cls(**dict(config))
