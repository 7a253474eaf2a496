"""Self-generated calibration text, which needs no data."""

import logging
import math
from collections.abc import Sequence

import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.models.generate import Generator
from ffn_heterogeneity.models.sampling import Sampling

ANSWER = 256  # maximum tokens per answer
BATCH = 48  # maximum answers per batch
RUN, REPEATS = 4, 0.2  # tokens; the share of repeated runs from which on there is a warning
MORE = 1.25  # start this many times the needed answers, since some end early
_log = logging.getLogger(__name__)


def own_rows(model: Model, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Sample rows of token ids at temperature 1, bos first, with `tokens` generated tokens in all.

    An answer ends with eos or after 256 tokens; the last one is cut to reach the exact number. The
    same seed gives the same text on the same kind of machine. (Self-calibration: Williams et al.,
    2024, for quantization and for pruning weights.) A text that repeats itself is a poor sample
    [ours]: a warning says so.

    Raises:
      ValueError: an encoder, a model without bos, or a model that ends every answer immediately.
    """
    config = model.config
    if config.is_encoder:
        raise ValueError(
            f"calibration='own': {model.source} is an encoder and writes nothing: give a text file"
        )
    require_one_stack(config, "self-generated calibration text")
    if config.bos_id is None:
        raise ValueError(
            f"calibration='own': {model.source} has no bos token to begin with: give a text file"
        )
    length = min(ANSWER, config.max_position - 1)
    write = Generator(
        config, model.params, batch_size=min(BATCH, math.ceil(MORE * tokens / length))
    )
    rows, left = [], tokens
    while left > 0:
        # Each round uses new random numbers.
        own_seed = int(np.random.default_rng([seed, len(rows)]).integers(1 << 31))
        drawn = Sampling(max_new_tokens=length, temperature=1.0, seed=own_seed)
        prompts = [[config.bos_id]] * write.batch_size
        round_ = [one.tokens for one in write(prompts, drawn, progress="the model's own text")]
        if not any(round_):
            raise ValueError(
                f"calibration='own': {model.source} ends every answer at once: give a text file"
            )
        for answer in round_:
            row = np.asarray([config.bos_id, *answer[:left]], np.int32)
            if left > 0 and len(row) > 1:
                rows.append(row)
                left -= len(row) - 1
    if (share := repeated(rows)) > REPEATS:
        _log.warning(
            "%s repeats itself: %.0f%% of the runs of %d tokens occurred before in the same "
            "answer (SmolLM2 2%%, Gemma 3 7%%). Rules that read this text may be worse than those "
            "that read none; give calibration=<text>",
            model.source,
            100 * share,
            RUN,
        )
    return rows


def repeated(rows: Sequence[np.ndarray]) -> float:
    """Share of the runs of `RUN` tokens that occurred before in their row (bos left out)."""
    runs, distinct = 0, 0
    for row in rows:
        found = [tuple(row[i : i + RUN].tolist()) for i in range(1, len(row) - RUN + 1)]
        runs, distinct = runs + len(found), distinct + len({*found})
    return 1 - distinct / runs if runs else 0.0
