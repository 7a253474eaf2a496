"""NTK-SAP's masks: the derivative, the rounds, every kind of model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_params, tiny_of

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.surgery import SURGERIES, ntk_sap
from ffn_heterogeneity.tree import flatten, unflatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def model_of(family: str, layers: int = 4) -> Model:
    config = tiny_of(family, layers)
    return Model(config, random_params(config), None, "")


def masked(model: Model, value) -> dict:
    """The tree with a mask of value(place, name, shape) next to each feed-forward kernel."""
    new = {}
    for place, ffn in ffn_blocks(model.config, model.params):
        shapes = {name: np.shape(leaves["kernel"]) for name, leaves in ffn.items()}
        new[place] = {
            name: leaves | {"mask": value(place, name, shapes[name]).astype(np.float32)}
            for name, leaves in ffn.items()
        }
    return restack(model.config, write(model.config, model.params, new))


def test_scores_are_the_derivative_by_finite_differences():
    """R from kernels that are multiplied by the mask in numpy; the noise is read off one call."""
    model, key = model_of("gpt2", 2), jax.random.key(5)
    tree = masked(model, lambda place, name, shape: np.ones(shape))
    scores = flatten(jax.jit(lambda p: ntk_sap.scores_of(model.config, p, key, 3, 5))(tree))
    paths = [path for path in flatten(tree) if path.endswith("/mask")]
    inputs, *noises = jax.random.split(key, len(paths) + 1)
    table = np.asarray(model.params["embed"]["embedding"])
    rows = table.std() * jax.random.normal(inputs, (30, table.shape[1]))
    batch = {"tokens": np.arange(15).reshape(3, 5)}

    def change(changed: str, at: tuple, value: float) -> float:
        states = []
        for scale in (0.0, ntk_sap.EPSILON):
            leaves = {path: x for path, x in flatten(tree).items() if not path.endswith("/mask")}
            leaves["embed/embedding"] = rows
            for noise, path in zip(noises, paths, strict=True):
                mask = np.ones(np.shape(flatten(tree)[path]), np.float32)
                if path == changed:
                    mask[at] = value
                name = path.replace("/mask", "/kernel")
                kernel = leaves[name] + scale * np.asarray(jax.random.normal(noise, mask.shape))
                leaves[name] = kernel * mask
            states.append(hidden(leaves, batch))
        return float(np.sum((states[1] - states[0]) ** 2))

    hidden = jax.jit(
        lambda leaves, batch: forward(model.config, unflatten(leaves), batch)["hidden"]
    )
    for path, at in ((paths[0], (0, 3, 2)), (paths[1], (1, 5, 7)), (paths[-1], (1, 0, 0))):
        slope = (change(path, at, 1.05) - change(path, at, 0.95)) / 0.1
        assert scores[path.removesuffix("/mask")][at] == pytest.approx(abs(slope), rel=0.03)


def test_rounds_remove_by_the_schedule_and_nothing_returns(monkeypatch):
    """Scores that turn around every round: what was removed stays removed."""
    model, left = model_of("llama", 2), []

    def scores(config, params, key, length):
        masks = {p: x for p, x in flatten(params).items() if p.endswith("/mask")}
        left.append(
            float(sum(x.sum() for x in masks.values()) / sum(x.size for x in masks.values()))
        )
        order = np.random.default_rng(0)
        sign = -1 if len(left) % 2 else 1
        return {
            p.removesuffix("/mask"): 9 + sign * order.normal(size=x.shape) for p, x in masks.items()
        }

    monkeypatch.setattr(ntk_sap, "scores_of", scores)
    monkeypatch.setattr(jax, "jit", lambda function: function)
    few, report = SURGERIES["fuse"](model, {"method": "ntk_sap", "ratio": 0.75})
    np.testing.assert_allclose(left, [0.25 ** (t / 20) for t in range(20)], atol=2e-3)
    assert report["kept_share"] == pytest.approx(0.25, abs=1e-3)
    assert len(left) == ntk_sap.ROUNDS
    assert few.config == model.config


@pytest.mark.parametrize("family", ["llama", "bert", "switch"])
def test_masks_of_every_kind_of_model(family):
    """Exactly the share that is asked for, the same for a seed, and no weight moves."""
    model = model_of(family)
    first, report = SURGERIES["fuse"](model, {"method": "ntk_sap", "ratio": 0.5})
    leaves, before = flatten(unstack(first.params)), flatten(unstack(model.params))
    masks = {path: np.asarray(x) for path, x in leaves.items() if path.endswith("/mask")}
    total = sum(x.size for x in masks.values())
    assert sum(x.sum() for x in masks.values()) == total - total // 2
    assert all(np.array_equal(leaves[path], x) for path, x in before.items())
    sizes = np.concatenate([np.abs(leaves[p.replace("/mask", "/kernel")]).ravel() for p in masks])
    kept = np.concatenate([x.ravel() for x in masks.values()])
    assert not np.array_equal(kept > 0, sizes >= np.median(sizes))  # not the largest weights


def test_kept_masks_depend_on_the_seed_alone():
    model = model_of("gpt2", 2)
    made = [
        flatten(
            SURGERIES["fuse"](model, {"method": "ntk_sap", "ratio": 0.5, "seed": seed})[0].params
        )
        for seed in (0, 0, 1)
    ]
    masks = [
        np.concatenate([x.ravel() for p, x in tree.items() if p.endswith("mask")]) for tree in made
    ]
    assert np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[0], masks[2])
    assert jnp.all((masks[0] == 0) | (masks[0] == 1))
