"""Frozen leaves only cost their own memory: no gradient, optimiser state or float32 copy.

A tied embedding [V, D] is frozen, and all else but ffn/down. Both of its uses, looking tokens up
and making logits, would give it a gradient as soon as one is taken.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from tiny_models import LLAMA, batch_of

from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel.partition import trainable_mask
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.tree import flatten, unflatten

V, D, M, LAYERS = 16_384, 64, 48, 3
GRADIENT = 4 * V * D  # bytes of the embedding's, float32
WIDE = {"vocab_size": V, "d_model": D, "head_dim": 16, "layers": (LayerConfig(M),) * LAYERS}
CONFIG = dataclasses.replace(LLAMA, **WIDE)
TERMS = (nll_term(TermContext("nll", model=CONFIG)), nucl_term(TermContext("nucl", "alpha")))
ONLY_DOWN = ("ffn/down/kernel$",)


def params_of(storage, train_only=()) -> tuple[dict, dict[str, bool]]:
    """Random parameters, frozen ones in the storage dtype, and which train."""
    params = causal_lm.init(CONFIG, jax.random.key(0))
    mask, leaves = trainable_mask(declared(CONFIG, params), (), train_only), flatten(params)
    leaves = {p: leaf if mask[p] else leaf.astype(storage) for p, leaf in leaves.items()}
    return unflatten(leaves), mask


def optimizer_of(name, params, mask):
    return make_optimizer(OptimizerConfig(name), params, mask)


def inputs(accumulation: int) -> tuple[dict, dict]:
    batch = batch_of(V, rows=accumulation, length=10)
    batch = {name: leaf.reshape(accumulation, 1, -1) for name, leaf in batch.items()}
    hyper = {"learning_rate": 1e-2, "alpha": 1.0}
    return batch, {name: jnp.float32(value) for name, value in hyper.items()}


@functools.cache
def lowered(name, train_only=(), accumulation=1, dtype=jnp.bfloat16):
    """The train step that runs use: donated, NLL and NUCL; frozen leaves stored in `dtype`."""
    params, mask = params_of(dtype, train_only)
    optimizer = optimizer_of(name, params, mask)
    options = causal_lm.RunOptions(compute_dtype=dtype)

    forward = functools.partial(causal_lm.forward, CONFIG, options=options)
    step = make_train_step(forward, TERMS, optimizer, mask, accumulation=accumulation)
    return step.lower(abstract_state(params, optimizer, mask), *inputs(accumulation))


@functools.cache
def compiled(*args):
    return lowered(*args).compile()


def new_bytes(*args) -> int:
    """What a step allocates: temporaries, and outputs that are not the donated state's buffers."""
    memory = compiled(*args).memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert 0 <= outputs <= 4096
    return memory.temp_size_in_bytes + outputs


@pytest.mark.parametrize(
    "args",
    [
        # Not bfloat16: XLA for the CPU multiplies in float32, and converts the table before a loop.
        ("adamw", ONLY_DOWN, 1, jnp.float32),
        pytest.param(("sgd", ONLY_DOWN, 1, jnp.float32), marks=pytest.mark.slow),
        pytest.param(("adamw", ONLY_DOWN, 2, jnp.float32), marks=pytest.mark.slow),
    ],
)
def test_nothing_as_large_as_a_frozen_gradient_is_allocated(args):
    """No gradient, no sum over micro-batches, no update, no copy of the leaf in float32."""
    assert new_bytes(*args) < GRADIENT / 2, GRADIENT


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_frozen_leaf_is_used_as_it_is_stored(accumulation):
    """The program given to the compiler has [V, D] only in bfloat16."""
    text = lowered("adamw", ONLY_DOWN, accumulation).as_text()
    assert f"tensor<{V}x{D}xbf16>" in text and f"tensor<{V}x{D}xf32>" not in text


@pytest.mark.slow
def test_the_same_measures_see_the_gradient_of_a_leaf_that_trains():
    assert new_bytes("adamw") >= new_bytes("adamw", ONLY_DOWN) + GRADIENT
    assert f"tensor<{V}x{D}xf32>" in lowered("adamw").as_text()


def test_arguments_shrink_by_what_is_not_kept():
    """AdamW: 12 bytes per trained parameter (with two moments), 2 per frozen parameter."""
    _, mask = params_of(jnp.bfloat16, ONLY_DOWN)
    sizes = {path: leaf.size for path, leaf in flatten(causal_lm.abstract_params(CONFIG)).items()}
    frozen = sum(size for path, size in sizes.items() if not mask[path])
    assert frozen > 40 * (sum(sizes.values()) - frozen)
    everything, only = (
        compiled("adamw", *args).memory_analysis().argument_size_in_bytes
        for args in ((), (ONLY_DOWN,))
    )
    assert everything - only == pytest.approx(10 * frozen, abs=1024)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "sgd"])
def test_optimizer_state_is_of_trainable_leaves_only(name):
    params, mask = params_of(jnp.bfloat16, ONLY_DOWN)
    state = abstract_state(params, optimizer_of(name, params, mask), mask).opt_state
    leaves = {path: leaf for path, leaf in flatten(state).items() if leaf.ndim}
    trainable = [path for path in mask if mask[path]]
    assert trainable == ["stack/segment_0/slot_0/ffn/down/kernel"]
    assert all(any(f"/{path}" in leaf for path in trainable) for leaf in leaves), list(leaves)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves.values())
    master = 4 * LAYERS * M * D
    if name == "adamw":
        assert size == 2 * master
        assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype(jnp.float32)}
    elif name == "sgd":
        assert size == 0 and not leaves
    else:
        assert 0 < size <= 1.1 * master  # the kernels are too small to be factored
