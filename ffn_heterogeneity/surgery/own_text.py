"""Calibration text that needs no data: what the model itself writes."""

import math

import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.generate import Generator
from ffn_heterogeneity.models.sampling import Sampling

ANSWER = 256  # tokens of an answer at most
BATCH = 48  # answers at once, at most
MORE = 1.25  # as many are begun, since some end early


def own_rows(model: Model, tokens: int, seed: int = 0) -> list[np.ndarray]:
    """Rows of token ids, bos first, of which `tokens` are the model's own at temperature 1.

    An answer ends with eos or after 256 tokens; the last is cut where the number is reached. The
    same seed gives the same text on the same kind of machine. (Self-calibration of Williams and
    others, 2024, for quantisation and for pruning weights.)

    Raises:
      ValueError: an encoder, a model without bos, or one that ends every answer at once.
    """
    config = model.config
    if config.is_encoder:
        raise ValueError(
            f"calibration='own': {model.source} is an encoder and writes nothing: give a text file"
        )
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
        # Each round draws anew.
        own_seed = int(np.random.default_rng([seed, len(rows)]).integers(1 << 31))
        drawn = Sampling(max_new_tokens=length, temperature=1.0, seed=own_seed)
        prompts = [[config.bos_id]] * write.batch_size
        round_ = [one.tokens for one in write(prompts, drawn, progress="the model's own text")]
        if not any(round_):
            raise ValueError(
                f"calibration='own': {model.source} ends every answer at once: give a text file"
            )
        for answer in round_:
            own = np.asarray([config.bos_id, *answer[:left]], np.int32)
            if left > 0 and len(own) > 1:
                rows.append(own)
                left -= len(own) - 1
    return rows
