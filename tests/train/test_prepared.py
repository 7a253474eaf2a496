"""A run that begins with a surgery which changes the model's shape: planned, trained, exported."""

import dataclasses

import jax
import numpy as np
import pytest
from test_adapted import config_for
from tiny_models import LLAMA, TEXT, save_tiny

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES, Surgery
from ffn_heterogeneity.surgery.adapt import Nothing
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.train import fit
from ffn_heterogeneity.train.settings import read

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.mark.parametrize("widths", [(24, 24, 12, 12), (24, 24)], ids=["narrower", "shorter"])
def test_another_shape_from_a_surgery(tmp_path, monkeypatch, widths):
    def reshape(model, settings, data=None, key=None):
        config = dataclasses.replace(model.config, layers=model.config.layers[: len(widths)])
        config, tree = config.with_widths(widths), unstack(model.params)
        layers = zip(tree["layers"], widths, strict=False)
        layers = [one | {"ffn": take_neurons(one["ffn"], np.arange(m))} for one, m in layers]
        params = restack(config, tree | {"layers": layers})
        return dataclasses.replace(model, config=config, params=params), {}

    monkeypatch.setitem(SURGERIES, "own", Surgery("own", reshape, Nothing, abstract=True))
    (tmp_path / "text.txt").write_text(TEXT)
    config = config_for(save_tiny(tmp_path / "tiny"), tmp_path / "text.txt")
    with config.unlocked():
        config.prepare, config.own = ("own",), {}
    assert LLAMA.ffn_widths == (24,) * 4
    planned = fit.build_shapes(read(config), fit.partition.make_mesh(**config.mesh)).state.params
    results = training.run(config, tmp_path / "run")
    assert load_model(tmp_path / "run/model").config.ffn_widths == widths
    assert results["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(planned))
    assert results["final"]["validation/nll"] < results["first"]["validation/nll"]
