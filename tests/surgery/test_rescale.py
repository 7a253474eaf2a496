"""Leaves times constants: which ones, and that Adam trains them as if the forward pass scaled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, REPOSITORY, config_of, random_params
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.launch import sweep_run
from ffn_heterogeneity.models.causal_lm import RunOptions, forward
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.parallel.partition import RuleError
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.tree import flatten, unflatten

FACTORS = ((r"layers/1/\w+_norm/", 0.5), (r"layers/3/ffn/down/", -2.0))
TOKENS = np.random.default_rng(0).integers(2, 29, (2, 8))


def rescaled(factors=FACTORS, dtype=np.float32):
    model = Model(LLAMA, random_params(LLAMA, dtype=dtype), None, "tiny")
    return model, SURGERIES["rescale"](model, {"factors": factors})[0]


def by_hand(params, apply):
    tree = unstack(params)
    for name in ("attention_norm", "ffn_norm"):
        apply(tree["layers"][1][name], "scale", 0.5)
    apply(tree["layers"][3]["ffn"]["down"], "kernel", -2.0)
    return restack(LLAMA, tree)


def multiply(leaves, name, factor):
    leaves[name] = leaves[name] * factor


def test_those_leaves_alone_are_multiplied():
    model, changed = rescaled()
    expected = flatten(by_hand(model.params, multiply))
    for path, leaf in flatten(changed.params).items():
        np.testing.assert_array_equal(leaf, expected[path])
        assert leaf.dtype == expected[path].dtype
    (half, rounded), factor = (
        rescaled(((r"ffn/down/", 3**-0.5),), jnp.bfloat16),
        np.float32(3**-0.5),
    )
    for path, leaf in flatten(half.params).items():
        if path.endswith("ffn/down/kernel"):
            once = (leaf.astype(np.float32) * factor).astype(jnp.bfloat16)  # not the factor, too
            np.testing.assert_array_equal(flatten(rounded.params)[path], once)
    refused("rule 'layers/9/' ", rescaled, (("layers/9/", 2.0),), error=RuleError)
    gemma = dataclasses.replace(LLAMA, norm_offset=1.0)
    with_offset = Model(gemma, random_params(gemma), None, "tiny")
    refused("attention_norm/scale: norms", SURGERIES["rescale"], with_offset, {"factors": FACTORS})
    refused("rescale.factors: embed", rescaled, (("embed", np.nan),))


def trained(params, factors, function):
    """Five steps of Adam on the mean logit of some tokens, through `function` of the leaves."""
    tree = flatten(params)
    config = OptimizerConfig("adamw", eps=1e-30, rates=factors)
    optimizer = make_optimizer(config, params, dict.fromkeys(tree, True))
    state = optimizer.init(tree)

    @jax.jit
    @jax.grad
    def gradient(tree):
        made = function(unflatten(tree))
        hidden = forward(LLAMA, made, {"tokens": TOKENS}, options=RunOptions(jnp.float64))
        return jnp.mean(jnp.sin(3 * hidden["hidden"]))

    for _ in range(5):
        step, state = optimizer.update(gradient(tree), state, tree, learning_rate=0.01)
        tree = {path: leaf + step[path] for path, leaf in tree.items()}
    return tree


def test_adam_trains_them_as_if_the_forward_pass_multiplied():
    with jax.enable_x64(True):
        model, changed = rescaled(dtype=np.float64)
        ours = trained(changed.params, tuple((name, abs(x)) for name, x in FACTORS), lambda x: x)
        theirs = trained(model.params, (), lambda tree: by_hand(tree, multiply))
        theirs = flatten(by_hand(unflatten(theirs), multiply))
        start = flatten(changed.params)
        for path, leaf in ours.items():
            moved = np.abs(theirs[path] - start[path]).max()
            assert np.abs(leaf - theirs[path]).max() <= 1e-6 * moved, path


@pytest.mark.parametrize("size", ["local", "170m"])
def test_controls_of_jump_suppression(size):
    """Norms over sqrt(l), and the last block's outputs, with rates to match."""
    config = config_of("jreg_pretrain", f"{size},rescale")
    spec = str(REPOSITORY / "configs/jreg_pretrain.py")
    _, points = sweep_run.points_of(spec, "controls", config)
    made = {one.name: sweep_run.apply(config, one) for one in points}
    assert list(made) == ["baseline", "jreg", "norm_scaling", "small_last_block"]
    assert [one.losses.jreg.weight for one in made.values()] == [0, 1, 0, 0]
    norms, last = (made[name].rescale.factors for name in ("norm_scaling", "small_last_block"))
    assert [made[name].optimizer.rates for name in ("norm_scaling", "small_last_block")] == [
        norms,
        last,
    ]
    assert len(norms) == config.shape.layers - 1
    assert norms[2] == (r"layers/3/\w+_norm/", 0.5)
    plain = config_of("jreg_pretrain", size)
    refused("write --config=.*rescale", sweep_run.points_of, spec, "controls", plain)
