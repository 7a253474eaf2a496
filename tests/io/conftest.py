"""Fixtures that several test files share."""

import pytest
from checkpoint_tools import random_params, tiny_config

from ffn_heterogeneity.io.hf.export import save_pretrained


@pytest.fixture
def saved(tmp_path):
    """(directory, config, params) of a small tied Llama in one file."""
    config = tiny_config()
    params = random_params(config)
    save_pretrained(config, params, tmp_path / "model")
    return tmp_path / "model", config, params
