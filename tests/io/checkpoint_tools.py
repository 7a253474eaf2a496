"""Helpers that write and change tiny checkpoints, and check that they are rejected."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.models import families
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.tree import unflatten

DOWN = "model.layers.1.mlp.down_proj.weight"


def tiny_config(name="llama3_2_1b", widths=(5, 5, 5), **changes):
    config, _ = families.preset(name)
    sizes = {"vocab_size": 13, "d_model": 8, "n_heads": 2, "n_kv_heads": 1, "head_dim": 4}
    config = dataclasses.replace(config, layers=config.layers[: len(widths)], **sizes | changes)
    if config.norm_offset:
        config = dataclasses.replace(config, embedding_multiplier=8**0.5)
    return config.with_widths(widths)


def random_params(config, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    leaves = {
        path: rng.normal(size=shape).astype(dtype)
        for path, shape in families.expected_shapes(config).items()
    }
    return restack(config, unflatten(leaves))


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), a, b)


def edit(directory, change):
    """Applies `change` to the dict of tensors in model.safetensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refused(path, *words, read=read_pretrained, **options):
    """Checks that `read` rejects `path` in one line with its name and the given words."""
    with pytest.raises(CheckpointError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message, message
