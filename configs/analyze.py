"""What a model's weights say: one analysis by name.

Command:   python scripts/analyze.py --config=configs/analyze.py:connectivity --config.model=<any>
Hardware:  any CPU with the model's size in memory; no accelerator is used.
Hours:     seconds for SmolLM2-135M.

connectivity: entropy, gini and mstd of the outgoing weights, summed over each layer's neurons
(NUCL, section 3).
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(analysis: str = "connectivity") -> ConfigDict:
    return ConfigDict(
        {
            "analysis": analysis,
            # Model: a directory, a .gguf file, a hub id or the name of a preset.
            "model": "",
            "revision": placeholder(str),
        }
    )
