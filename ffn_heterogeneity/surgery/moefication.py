"""Moefication's router (arXiv 2110.01786): two layers that predict the experts' activations.

    scores = tanh(x A / |x|) R,    A [d, E] starts with the experts' centroids, R [E, E] with I.

The target of an expert is the sum of |h| over its neurons, divided by the largest sum in the batch
(the paper: of ReLU outputs, which are |h|). The loss is binary cross-entropy of sigmoid(scores).
As in the authors' code: Adam at 0.01, 30 epochs, batches of 512, the last tenth of the tokens held
out. The authors save the second-best epoch; here it is the best one: that whose top_k experts have
the largest share of the sums on held-out tokens.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ffn_heterogeneity.models.causal_lm import require_one_stack
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.surgery.seen import BATCH

EPOCHS, RATE, ROWS = 30, 0.01, 512
LEAST = 20  # tokens: fewer cannot be divided into training and held-out ones


def routed_sums(
    config: ModelConfig, params: dict, rows: Sequence[np.ndarray], experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs of the FFNs [L, N, d], sums of |h| per expert [L, N, E]) of N tokens.

    The first token of each row is left out. Takes 4 L N (d + E) bytes.

    Args:
      params: stacked tree of a dense model, in which each m / E consecutive neurons are one expert.
        Layers whose width E does not divide have sums of 0.
    """
    require_one_stack(config, "splitting by the states of a text")
    batches = list(token_batches(rows, BATCH))
    seen = observe(config, params, batches, _sums_of(experts))["routed_sums"]
    real = np.concatenate([batch["segment_ids"] for batch in batches])[:, 1:] > 0
    inputs, sums = seen["inputs"][:, real], seen["sums"][:, real]
    if not (np.isfinite(inputs).all() and np.isfinite(sums).all()):
        raise ValueError("the states of the FFNs are not finite: check the checkpoint")
    return inputs, sums


@functools.cache
def _sums_of(experts: int) -> Probe:
    def function(seen, batch, per_layer):
        inputs = seen.ffn_input[:, 1:].astype(jnp.float32)
        sums = jnp.zeros((*inputs.shape[:2], experts), jnp.float32)
        if seen.ffn_state is None:  # a layer with experts, which the caller did not choose
            return {"inputs": inputs, "sums": sums}
        state = jnp.abs(seen.require_state()[:, 1:].astype(jnp.float32))
        if state.shape[-1] % experts == 0:
            sums = state.reshape(*state.shape[:2], experts, -1).sum(-1)
        return {"inputs": inputs, "sums": sums}

    return Probe("routed_sums", function, kind="example")


def train_router(
    inputs: np.ndarray, sums: np.ndarray, centroids: np.ndarray, top_k: int, seed: int = 0
) -> tuple[dict, dict[str, float]]:
    """Train the router of one layer.

    Args:
      inputs: [N, d]; sums: [N, E], not negative; centroids: [E, d].

    Returns:
      (leaves of `ffn/router`, float32; facts on the last twentieth of the tokens, while the
      twentieth before it chooses the epoch: "router_loss_start" and "router_loss", before training
      and in the chosen epoch; "captured_start" and "captured", the share of the sums in the top_k
      chosen experts; "captured_most", that of the best choice; "epoch", from 1).

    Raises:
      ValueError: fewer than 20 tokens.
    """
    if len(inputs) < LEAST:
        raise ValueError(f"{len(inputs)} tokens: a router needs at least {LEAST}")
    norms = np.linalg.norm(inputs, axis=1, keepdims=True)
    x, s = jnp.asarray(inputs / np.where(norms > 0, norms, 1), jnp.float32), jnp.asarray(sums)
    count = len(x) * 9 // 10
    size, draw = min(ROWS, count), np.random.default_rng(seed)
    identity = jnp.eye(len(centroids), dtype=jnp.float32)
    router = {"hidden": {"kernel": jnp.asarray(centroids.T, jnp.float32)}, "kernel": identity}
    middle = (count + len(x)) // 2
    choosing, facts_of = (
        functools.partial(_measured, x=x[part], s=s[part], top_k=top_k)
        for part in (slice(count, middle), slice(middle, None))
    )
    state, best, start = optax.adam(RATE).init(router), None, facts_of(router)
    for epoch in range(1, EPOCHS + 1):
        order = draw.permutation(count)[: count // size * size].reshape(-1, size)
        router, state = _epoch(router, state, x, s, jnp.asarray(order))
        captured = choosing(router)[1]
        if best is None or captured > best[0]:
            best = (captured, router, epoch)
    assert best is not None
    _, router, epoch = best
    loss, captured, most = facts_of(router)
    facts = {"router_loss_start": start[0], "router_loss": loss, "captured_start": start[1]}
    facts |= {"captured": captured, "captured_most": most, "epoch": epoch}
    return jax.device_get(router), {name: float(value) for name, value in facts.items()}


def _scores(router: dict, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ router["hidden"]["kernel"]) @ router["kernel"]


def _loss(router: dict, x: jax.Array, s: jax.Array) -> jax.Array:
    target = s / jnp.maximum(jnp.max(s), jnp.finfo(s.dtype).tiny)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(_scores(router, x), target))


@jax.jit
def _epoch(router: dict, state, x: jax.Array, s: jax.Array, order: jax.Array) -> tuple:
    """One pass over the batches, whose rows `order` [batches, size] has."""

    def step(carry, rows):
        router, state = carry
        gradient = jax.grad(_loss)(router, x[rows], s[rows])
        updates, state = optax.adam(RATE).update(gradient, state)
        return (optax.apply_updates(router, updates), state), None

    return jax.lax.scan(step, (router, state), order)[0]


@functools.partial(jax.jit, static_argnames="top_k")
def _measured(router: dict, x: jax.Array, s: jax.Array, top_k: int) -> tuple:
    """(loss, captured share, that of the best choice): means over the rows."""
    total = jnp.maximum(jnp.sum(s, axis=1), jnp.finfo(s.dtype).tiny)
    chosen = jax.lax.top_k(_scores(router, x), top_k)[1]
    captured = jnp.take_along_axis(s, chosen, axis=1).sum(1) / total
    most = jax.lax.top_k(s, top_k)[0].sum(1) / total
    return _loss(router, x, s), jnp.mean(captured), jnp.mean(most)
