"""The contract of every adapter: a table of leaves; an adapter that is not in it fails."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import WIDE, batch_of, mask_neurons, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.adapters import ADAPTERS, nf4
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.dispatch import DISPATCHES, grouped_product, grouping
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.linear import Linear, effective_kernel, product
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.unused import unused_leaves
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LLAMA = tiny_of("llama", layers=3)


def quantised(kernel):
    return jax.vmap(nf4.quantise)(kernel) if kernel.ndim > 2 else nf4.quantise(kernel)


# name -> (rng, kernel [..., in, out]) -> leaves, for those that are not just numbers.
ADAPTER_LEAVES = {
    "nf4": lambda rng, kernel: jax.tree.map(np.asarray, quantised(kernel)),
    "low_rank": lambda rng, kernel: {
        "low_rank_a": rng.normal(size=(*kernel.shape[:-1], 3)).astype(np.float32) / 8,
        "low_rank_b": rng.normal(size=(*kernel.shape[:-2], 3, kernel.shape[-1])).astype(np.float32),
    },
    "gates": lambda rng, kernel: {
        "gates_a": rng.normal(size=(*kernel.shape[:-1], 3)).astype(np.float32) / 8,
        "gates_b": rng.normal(size=(*kernel.shape[:-2], 3, kernel.shape[-1])).astype(np.float32),
        "gates_log_alpha": rng.normal(size=(*kernel.shape[:-2], 3)).astype(np.float32),
        "gates_draw": rng.choice([0.0, 0.3], (*kernel.shape[:-2], 3)).astype(np.float32),
        "gates_multipliers": np.zeros((*kernel.shape[:-2], 2), np.float32),
    },
    "score": lambda rng, kernel: {"score": rng.random(kernel.shape).astype(np.float32)},
    "mask": lambda rng, kernel: {"mask": (rng.random(kernel.shape) < 0.5).astype(np.float32)},
    "macdrop": lambda rng, kernel: {
        # Only expert 1 has masks.
        "macdrop_rows": np.array([[5, 6], [1, 3], [5, 6]] if kernel.ndim > 2 else [1, 3], np.int32),
        "macdrop_keep": (rng.random((*kernel.shape[:-1], 2)) < 0.5).astype(np.float32),
    },
}


def leaves_of(adapter, rng, kernel) -> dict:
    """Leaves of the table, or numbers from 0.5 to 1.5 with the shape of the axes."""
    if adapter.name in ADAPTER_LEAVES:
        return ADAPTER_LEAVES[adapter.name](rng, kernel)
    sizes = {"in": kernel.shape[-2], "out": kernel.shape[-1], "rank": 2, "one": 1}
    shapes = {k: [*kernel.shape[:-2], *map(sizes.get, v.axes)] for k, v in adapter.leaves.items()}
    return {k: (rng.random(shape) + 0.5).astype(np.float32) for k, shape in shapes.items()}


def test_leaves_belong_to_one_adapter():
    owned = [leaf for adapter in ADAPTERS.values() for leaf in adapter.leaves]
    assert len(set(owned)) == len(owned) and not {"kernel", "bias"} & set(owned)


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=lambda adapter: adapter.name)
def test_adapter(adapter):
    rng = np.random.default_rng(0)
    n = 64 if adapter.base else 7
    for shape in ((n, 5), (3, n, 5)):
        kernel = rng.normal(size=shape).astype(np.float32)
        kernel[..., 2, :] = 0
        leaves = leaves_of(adapter, rng, kernel)
        assert set(leaves) == set(adapter.leaves)
        tree = leaves if adapter.base else {"kernel": kernel, **leaves}
        effective = effective_kernel(tree)
        assert effective.shape == shape and effective.dtype == np.float32
        assert np.isfinite(effective).all() and not np.array_equal(effective, kernel)
        if len(shape) == 2:
            x, linear = rng.normal(size=(4, n)).astype(np.float32), Linear(5)
            np.testing.assert_allclose(linear.apply({"params": tree}, x), x @ effective, atol=1e-5)
        else:
            one = effective_kernel(jax.tree.map(lambda leaf: leaf[1], tree))
            np.testing.assert_allclose(effective[1], one, rtol=1e-6, atol=1e-7)
            x, groups = (
                rng.normal(size=(4, n)).astype(np.float32),
                grouping(jnp.array([2, 0, 2, 2]), 3),
            )
            wanted = [row @ effective[expert] for row, expert in zip(x, (2, 0, 2, 2), strict=True)]
            for dispatch in DISPATCHES:  # of rows to the kernels of experts
                dot = functools.partial(grouped_product, groups=groups, dispatch=dispatch)
                got = product(tree, x[groups.order], dot)[groups.inverse]
                np.testing.assert_allclose(got, wanted, atol=1e-5)

        def total(tree):
            return jnp.sum(effective_kernel(tree) ** 2)

        gradient = jax.grad(total, allow_int=True)(tree)
        slopes = [leaf for leaf in jax.tree.leaves(gradient) if leaf.dtype == np.float32]
        assert all(np.isfinite(leaf).all() for leaf in slopes)
        assert adapter.base or np.any(gradient["kernel"])
        for missing in adapter.leaves if len(adapter.leaves) > 1 else ():
            refused(adapter.name, effective_kernel, {k: v for k, v in tree.items() if k != missing})


@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=lambda adapter: adapter.name)
def test_adapter_in_a_model(adapter):
    """Its leaves are read in every kernel and have rules; surgeries support or reject them."""
    config = WIDE if adapter.base else LLAMA
    rng, tree = np.random.default_rng(0), unstack(random_params(config))
    for layer in tree["layers"]:
        for linear in (*layer["ffn"].values(), *layer["attention"].values()):
            linear.update(leaves_of(adapter, rng, linear["kernel"]))
            if adapter.base:
                del linear["kernel"]
    params = restack(config, tree)
    unread = {path.split("/")[-1] for path in unused_leaves(config, params)}
    assert unread == set(adapter.for_losses)
    trains = {p.split("/")[-1] for p, leaf in declared(config, params).items() if leaf.trains}
    assert trains & set(adapter.leaves) == {k for k, v in adapter.leaves.items() if v.trains}
    try:
        config, smaller, removed, _ = reduce_model(config, params, RemovalPlan("random", count=2))
    except ValueError as error:
        assert "fold the model first" in str(error) or any(x in str(error) for x in adapter.leaves)
        return
    tokens = {"tokens": batch_of(29)["tokens"]}
    masked = restack(LLAMA, mask_neurons(params, removed))
    full = causal_lm.forward(LLAMA, masked, tokens)["hidden"]
    pruned = causal_lm.forward(config, restack(config, smaller), tokens)["hidden"]
    assert np.abs(pruned - full).max() <= 5e-6 * np.abs(full).max()
