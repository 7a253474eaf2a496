"""RoBERTa and DistilRoBERTa: BERT's encoder with another vocabulary, and positions from 2 on.

Its table of positions begins with padding id + 1 rows that no token uses. Its classifiers read the
first token directly, so models saved with a head have no pooler.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import encoders

_PAD = 1
_DEFAULTS = {"pad_token_id": _PAD, "bos_token_id": 0, "eos_token_id": 2}


def _preset(layers: int) -> ModelConfig:
    ids = {"bos_id": 0, "eos_id": 2, "pad_id": _PAD, "first_position": _PAD + 1}
    more = {"vocab_size": 50_265, "token_types": 1, "norm_eps": 1e-5}
    return encoders.published("roberta", (layers, 768, 12), **more, **ids)


PRESETS = {
    "roberta_base": (_preset(12), "FacebookAI/roberta-base"),
    "distilroberta_base": (_preset(6), "distilbert/distilroberta-base"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a RobertaModel, or of a model with a head on one."""
    config = encoders.from_hf("roberta", values, _DEFAULTS, pooler=False)
    first = (_PAD if config.pad_id is None else config.pad_id) + 1
    tokens = config.max_position - first
    return dataclasses.replace(config, first_position=first, max_position=tokens)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json of a RobertaModel."""
    return encoders.to_hf(config, "RobertaModel")


_HEAD = {"dense": "classifier.dense", "out": "classifier.out_proj"}
FAMILY = encoders.family("roberta", "RobertaModel", PRESETS, from_hf, to_hf, r"lm_head\..*", _HEAD)
