"""NTK-SAP: masks that keep a model's training dynamics, without data (arXiv 2304.02840).

A weight's score is |dR / dm| of its mask m, for the change of the output under noise on the weights

    R(m) = sum ||f(x; m W) - f(x; m (W + eps xi))||^2,   xi ~ N(0, 1)

which estimates the trace of the neural tangent kernel. In round t of T the weights with the highest
scores of all blocks stay, share^(t / T) of them; removed weights do not return.

MLP Fusion's code reads such masks from files whose program is not published. What we chose: x are
Gaussian embeddings with the deviation of the model's own, f is the last hidden state, and W is the
pre-trained one in every round, where the official code draws a new network.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.models.walk import ffn_blocks, write
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery.selection import highest_share
from ffn_heterogeneity.tree import nodes, replaced

ROUNDS, EPSILON = 20, 0.01
ROWS, LENGTH = 8, 64  # of Gaussian embeddings, new ones in every round


def scores_of(
    config: ModelConfig, params: dict, key: jax.Array, rows: int = ROWS, length: int = LENGTH
) -> dict[str, jax.Array]:
    """|dR / dm| of each mask in the tree, float32, by its kernel's path; 0 where m is 0.

    Args:
      params: a stacked tree with a `mask` of floats next to each kernel that is scored.
      key: of the embeddings and of the noise.
    """
    masked = dict(nodes(params, lambda node: "mask" in node))
    inputs, *keys = jax.random.split(key, len(masked) + 1)
    table = jnp.asarray(params["embed"]["embedding"])
    x_nd = jnp.std(table) * jax.random.normal(inputs, (2 * rows * length, config.d_model))
    params = replaced(params, "embed/embedding", x_nd.astype(table.dtype))
    tokens = np.arange(2 * rows * length).reshape(2, rows, length)
    batch = {"tokens": tokens[0]}
    if config.kind == "encoder_decoder":
        batch["encoder_tokens"] = tokens[1]

    def change(masks: Mapping[str, jax.Array]) -> jax.Array:
        def output(scale: jax.Array) -> jax.Array:
            tree = params
            for noise, (path, leaves) in zip(keys, masked.items(), strict=True):
                kernel = jnp.asarray(leaves["kernel"], jnp.float32)
                kernel = kernel + scale * jax.random.normal(noise, kernel.shape)
                tree = replaced(tree, path, {**leaves, "kernel": kernel, "mask": masks[path]})
            return forward(config, tree, batch, options=RunOptions())["hidden"]

        before, after = jax.lax.map(output, jnp.array([0.0, EPSILON]))  # compiled once
        return jnp.sum(jnp.square((after - before).astype(jnp.float32)))

    ones = {path: jnp.asarray(leaves["mask"], jnp.float32) for path, leaves in masked.items()}
    return jax.tree.map(jnp.abs, jax.grad(change)(ones))


def ntk_sap(blocks: Mapping[Place, dict], share: float, model: Model, seed: int) -> dict:
    """Put a fixed mask on every kernel that keeps this share of the weights of all blocks together.

    Experts that no Gaussian embedding reaches have scores of 0 and lose their weights first.
    """
    config = dataclasses.replace(model.config, head=None)
    length = min(LENGTH, config.max_position) if config.position_rows else LENGTH
    score = jax.jit(functools.partial(scores_of, config, length=length))
    named = [(place, name) for place, ffn in blocks.items() for name in ffn]
    masks = {at: np.ones(np.shape(blocks[at[0]][at[1]]["kernel"]), np.float32) for at in named}
    for t in bar("ntk_sap", range(1, ROUNDS + 1), unit="round"):
        new = _masked(blocks, masks)
        params = restack(config, write(config, model.params, new))
        found = score(params, jax.random.fold_in(jax.random.key(seed), t))
        for path, values in found.items():
            params = replaced(params, f"{path}/mask", values)
        scored = dict(ffn_blocks(config, jax.tree.map(np.asarray, params)))
        every = [scored[place][name]["mask"] for place, name in named]
        masks = dict(
            zip(named, _highest(every, masks.values(), share ** (t / ROUNDS)), strict=True)
        )
    return _masked(blocks, masks)


def _masked(blocks: Mapping[Place, dict], masks: Mapping[tuple[Place, str], np.ndarray]) -> dict:
    return {
        place: {
            name: leaves | {"mask": masks[place, name].astype(leaves["kernel"].dtype)}
            for name, leaves in ffn.items()
        }
        for place, ffn in blocks.items()
    }


def _highest(scores, masks, share: float) -> list[np.ndarray]:
    """Masks of the highest scores among the weights that are left."""
    left = [np.where(mask, score, -1) for score, mask in zip(scores, masks, strict=True)]
    return [stays.astype(np.float32) for stays in highest_share(left, share)]
