"""The empirical neural tangent kernel of one feed-forward block (MLP Fusion, III-B and Table I).

    K_adam = G sign(G)^T,   K_sgd = G G^T

Row n of G is the gradient of f(example n), the probability of the head's first label, with respect
to the block's kernels and biases, but not P. For factors and masked kernels, only trained weights
count: both factors, and the unmasked weights.

In a layer with experts the block is one expert, and its tokens are those that the router sends to
it; a token's gate is a factor of its gradient [ours].

The gradient of a leaf is a sum over tokens of products a_t b_t^T. One backward pass per batch gives
the block's inputs and the gradients of its outputs, token by token, from which a and b follow. The
kernels are summed over columns of the gradients, so no example's full gradient is in memory.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.adapters import KERNEL_LEAVES, neuron_factor
from ffn_heterogeneity.data.labelled import Encoded, in_order_of_length
from ffn_heterogeneity.heads import make_head
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import nudged
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.feed_forward import ACTIVATIONS
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.progress import bar

# Elements of the gradients in memory at the same time.
MOST = 1 << 26
# Leaves of a `Linear` whose gradients are supported: with a kernel, and with factors.
_MASKED, _THIN = {*KERNEL_LEAVES, "mask"}, {"bias", "low_rank_a", "low_rank_b"}


class Outer(NamedTuple):
    """A leaf's gradient for every example, sum_t a_t b_t^T: a [N, T, i], b [N, T, j].

    `mask` [i, j], or None, marks the trained entries.
    """

    a: jax.Array
    b: jax.Array
    mask: jax.Array | None = None


def token_states(
    model: Model,
    data: Encoded,
    layer: int,
    expert: int | None = None,
    *,
    batch_size: int = 32,
    options: RunOptions = RunOptions(),
    progress: str | None = "gradients",
) -> dict[str, np.ndarray]:
    """States around a layer's FFN, and gradients, of every row: [N, longest, D], 0 at padding.

    (`observe` has no gradients, and returns the states of all layers.)

    Args:
      expert: of a layer with experts, counted from 0.

    Returns:
      {"x": the FFN's input, "y": its output, "block": the residual stream after the block, "delta":
      the gradient of the row's f with respect to y, or to the expert's output; of an expert also
      "gate": its factor of each token, 0 if the token is not sent to it, [N, longest, 1]}.

    Raises:
      ValueError: non-finite values.
    """
    shape = (len(data), max(map(len, data.ids)), model.config.d_model)
    params, states = jax.device_put(model.params), {}
    lengths = sorted({*range(32, shape[1], 32), shape[1]})
    with bar(progress, total=len(data)) as shown:
        for rows, batch in in_order_of_length(data, min(batch_size, len(data)), lengths):
            seen = jax.device_get(_states(model.config, options, layer, expert, params, batch))
            for name, value in seen.items():
                value = np.where(batch["segment_ids"][..., None] > 0, value, 0)
                size = (*shape[:2], value.shape[-1])
                padded = states.setdefault(name, np.zeros(size, value.dtype))
                padded[rows, : value.shape[1]] = value[: len(rows)]
            shown.update(len(rows))
    for name, value in states.items():
        if not np.isfinite(value).all():
            raise ValueError(f"{model.source}, layer {layer}: {name} is not finite")
    return states


@functools.cache
def _seen_states(expert: int | None) -> Probe:
    def function(seen, batch, per_layer):
        states = {"x": seen.ffn_input, "y": seen.ffn_output, "block": seen.block_output}
        if expert is None:
            return states
        shape, gates = (*seen.ffn_input.shape[:2], 1), jnp.zeros(seen.ffn_input[..., 0].size)
        if seen.routing is not None:
            rows = seen.routing.rows
            gates = gates.at[rows.tokens].add(jnp.where(rows.experts == expert, rows.gates, 0))
        return states | {"gate": gates.reshape(shape)}

    return Probe("ffn_states", function, kind="example")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _states(
    config: ModelConfig,
    options: RunOptions,
    layer: int,
    expert: int | None,
    params: dict,
    batch: dict,
) -> dict[str, jax.Array]:
    head, probe = make_head(config, config.head), _seen_states(expert)
    stack, (first, _) = next(
        (name, span) for name, span in config.stacks.items() if span[0] <= layer < span[1]
    )

    def probability(nudge_btd: jax.Array) -> tuple[jax.Array, dict]:
        nudges = jnp.zeros((config.n_layers, *nudge_btd.shape), nudge_btd.dtype)
        nudges, probes = nudges.at[layer].set(nudge_btd), (probe, *head.probes)
        outputs = nudged(config, params, batch, nudges, options=options, probes=probes)
        logits = head.apply(params, outputs, batch, lambda x: x)
        seen = outputs["probes"][probe.name]
        seen = seen[stack] if len(config.stacks) > 1 else seen
        seen = jax.tree.map(lambda leaf: leaf[layer - first], seen)
        # The gradient of a sum over rows, which do not see each other.
        answers = jax.nn.softmax(logits) if logits.shape[-1] > 1 else logits
        return jnp.sum(answers[:, 0]), seen

    nudge = jnp.zeros((*batch["tokens"].shape, config.d_model), options.compute_dtype)
    delta, seen = jax.grad(probability, has_aux=True)(nudge)
    delta = delta if expert is None else delta * seen["gate"].astype(delta.dtype)
    return seen | {"delta": delta}


def outer_products(
    config: ModelConfig, ffn: Mapping[str, Any], x: jax.Array, delta: jax.Array
) -> Iterator[Outer]:
    """The gradients of all trained leaves of a block.

    Args:
      ffn: the leaves of one block.
      x, delta: see `token_states`.

    Raises:
      ValueError: leaves of adapters other than masks of kernels, or low-rank factors.
    """
    for name in ("gate", "up", "down"):
        leaves = ffn.get(name, {})
        for leaf in sorted(set(leaves) - (_MASKED if "kernel" in leaves else _THIN)):
            raise ValueError(f"ffn/{name}/{leaf} is not supported: fold the model first")
    pre = {name: _affine(ffn[name], x) for name in ("gate", "up") if name in ffn}
    act, scale = ACTIVATIONS[config.activation], neuron_factor(ffn)

    def neurons(pre: dict) -> jax.Array:
        state = act(pre["gate"]) * pre["up"] if "gate" in pre else act(pre["up"])
        return state if scale is None else state * jnp.asarray(scale, state.dtype)

    state, pull = jax.vjp(neurons, pre)
    (before,) = pull(delta @ effective_kernel(ffn["down"]).T.astype(delta.dtype))
    for name in pre:
        yield from _of_linear(ffn[name], x, before[name])
    yield from _of_linear(ffn["down"], state, delta)


def _affine(leaves: Mapping[str, Any], x: jax.Array) -> jax.Array:
    y = x @ effective_kernel(leaves).astype(x.dtype)
    return y + leaves["bias"].astype(y.dtype) if "bias" in leaves else y


def _of_linear(leaves: Mapping[str, Any], a: jax.Array, b: jax.Array) -> Iterator[Outer]:
    """The gradients of a `Linear`'s leaves from inputs a and gradients b of the outputs."""
    if "bias" in leaves:
        yield Outer(jnp.ones((*b.shape[:2], 1), b.dtype), b)
    if "kernel" in leaves:
        yield Outer(a, b, leaves.get("mask"))
        return
    yield Outer(a, b @ leaves["low_rank_b"].T.astype(b.dtype))
    yield Outer(a @ leaves["low_rank_a"].astype(a.dtype), b)


def tangent_kernels(
    config: ModelConfig, ffn: Mapping[str, Any], x: np.ndarray, delta: np.ndarray
) -> dict[str, np.ndarray]:
    """{"adam": K, "sgd": K}, float64 [N, N]; arguments as in `outer_products`."""
    made = {name: np.zeros((len(x), len(x))) for name in ("adam", "sgd")}
    for outer in outer_products(config, ffn, jnp.asarray(x), jnp.asarray(delta)):
        # The narrower side completely, the other in chunks.
        if outer.a.shape[2] > outer.b.shape[2]:
            outer = Outer(outer.b, outer.a, None if outer.mask is None else outer.mask.T)
        columns = max(1, MOST // (len(x) * outer.a.shape[2]))
        for start in range(0, outer.b.shape[2], columns):
            chunk = slice(start, start + columns)
            mask = None if outer.mask is None else outer.mask[:, chunk]
            for name, added in _added(outer.a, outer.b[..., chunk], mask).items():
                made[name] += np.asarray(added, np.float64)
    return made


@jax.jit
def _added(a: jax.Array, b: jax.Array, mask: jax.Array | None) -> dict[str, jax.Array]:
    g_nij = jnp.einsum("nti,ntj->nij", a, b)
    g_nij = g_nij if mask is None else g_nij * mask.astype(g_nij.dtype)
    g = g_nij.reshape(len(g_nij), -1)
    return {"adam": g @ jnp.sign(g).T, "sgd": g @ g.T}
