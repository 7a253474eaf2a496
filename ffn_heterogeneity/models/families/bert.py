"""BERT (uncased base and large) and MiniLM: encoders with two token types and a pooler."""

from collections.abc import Mapping
from typing import Any

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import encoders


def _preset(*shape: int) -> ModelConfig:
    ids = {"bos_id": None, "eos_id": None, "pad_id": 0}
    more = {"vocab_size": 30_522, "token_types": 2, "norm_eps": 1e-12, "pooler": True}
    return encoders.published("bert", shape, **more, **ids)


PRESETS = {
    "bert_base_uncased": (_preset(12, 768, 12), "google-bert/bert-base-uncased"),
    "bert_large_uncased": (_preset(24, 1024, 16), "google-bert/bert-large-uncased"),
    "minilm_l6": (_preset(6, 384, 12), "sentence-transformers/all-MiniLM-L6-v2"),
}


def from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """config.json of a BertModel, or of a model with a head on one."""
    return encoders.from_hf("bert", values, {"pad_token_id": 0}, pooler=True)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json of a BertModel."""
    return encoders.to_hf(config, "BertModel")


_HEAD = {"out": "classifier"}
FAMILY = encoders.family("bert", "BertModel", PRESETS, from_hf, to_hf, r"cls\..*", _HEAD)
