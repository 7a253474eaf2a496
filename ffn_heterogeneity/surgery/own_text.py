"""Self-generated calibration text, which needs no data."""

import math

import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.models.generate import Generator
from ffn_heterogeneity.models.sampling import Sampling

ANSWER = 256  # maximum tokens per answer
BATCH = 48  # maximum answers per batch
MORE = 1.25  # start this many times the needed answers, since some end early


def own_rows(model: Model, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Sample rows of token ids at temperature 1, bos first, with `tokens` generated tokens in all.

    An answer ends with eos or after 256 tokens; the last one is cut to reach the exact number. The
    same seed gives the same text on the same kind of machine. (Self-calibration: Williams et al.,
    2024, for quantization and for pruning weights.)

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
    return rows
