"""Surgeries before a training (`config.prepare`), one group each, and what then trains."""

from collections.abc import Sequence

from ml_collections import ConfigDict


def lora() -> ConfigDict:
    return ConfigDict(
        {
            "rank": 16,  # columns of A, rows of B
            "alpha": 16.0,  # K + (alpha / rank) A B
            # Found in the paths of kernels, layers/<i>/attention/(q|k|v|out), .../ffn/(gate|...).
            "targets": "attention/|ffn/",
        }
    )


def add(config: ConfigDict, names: Sequence[str]) -> list[str]:
    """Adds the groups of the adapters among `names`, which alone train then; returns the others."""
    if "lora" in names:
        # Surgeries before it trains, each with a group of its own.
        config.prepare = (*config.get("prepare", ()), "lora")
        config.lora = lora()
        config.train_only = (r"/lora_[ab]$",)
    return [name for name in names if name != "lora"]
