"""A toy language model, its loss terms and its data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import LLAMA

from ffn_heterogeneity.losses.terms import LossTerm, TermValue

V, D, L = 11, 6, 2
TOY = dataclasses.replace(LLAMA, ffn_bias=True)  # which declares its leaves


def toy_params(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (0.3 * rng.standard_normal(shape)).astype(np.float32)

    layer = {"down": {"kernel": draw(L, D, D), "bias": draw(L, D)}}
    return {
        "embed": {"embedding": draw(V, D)},
        "stack": {"segment_0": {"slot_0": {"ffn_norm": {"scale": draw(L, D)}, "ffn": layer}}},
        "final_norm": {"scale": 1 + draw(D)},
    }


def toy_forward(params, batch, *, probes=(), dropout=None):
    x = params["embed"]["embedding"][batch["tokens"]]
    slot = params["stack"]["segment_0"]["slot_0"]
    for i in range(L):
        h = jnp.tanh((x * slot["ffn_norm"]["scale"][i]) @ slot["ffn"]["down"]["kernel"][i])
        h = h + slot["ffn"]["down"]["bias"][i]
        if dropout is not None:
            key, rate = dropout
            keep = jax.random.uniform(jax.random.fold_in(key, i), h.shape) >= rate
            h = jnp.where(keep, h / (1 - rate), 0)
        x = x + h
    return {"hidden": x * params["final_norm"]["scale"]}


def _nll(params, outputs, batch):
    logits = outputs["hidden"] @ params["embed"]["embedding"].T
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, batch["targets"][..., None], axis=-1)[..., 0]
    mask = batch["loss_mask"].astype(jnp.float32)
    right = (jnp.argmax(logits, -1) == batch["targets"]) * mask
    return TermValue(-jnp.sum(picked * mask), jnp.sum(mask), {"accuracy": jnp.sum(right)})


def _norm(params, outputs, batch):
    live = (batch["segment_ids"] > 0).astype(jnp.float32)
    return TermValue(jnp.sum(outputs["hidden"] ** 2 * live[..., None]), jnp.sum(live))


def _l1(params):
    w = params["stack"]["segment_0"]["slot_0"]["ffn"]["down"]["kernel"]
    per_layer = jnp.sum(jnp.abs(w), axis=(1, 2))
    return TermValue(jnp.sum(per_layer), jnp.float32(1), {"per_layer": per_layer})


NLL = LossTerm("nll", _nll, 1.0)
NORM = LossTerm("norm", _norm, "beta")
L1 = LossTerm("l1", _l1, "alpha", on="params", targets=(r"^stack/.*/ffn/down/kernel$",))
HYPER = {"learning_rate": 0.1, "alpha": 0.01, "beta": 0.05}


def hyper(**changes) -> dict:
    return {k: jnp.float32(v) for k, v in (HYPER | changes).items()}


def toy_batch(rows: int, length: int = 7, seed: int = 0) -> dict:
    """A batch [rows, length]; each row has another number of targets and padded positions."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (rows, length)).astype(np.int32)
    live = np.arange(length) < rng.integers(3, length + 1, rows)[:, None]
    mask = live & (np.arange(length) >= rng.integers(0, 3, rows)[:, None])
    targets = (3 * tokens + 1) % V  # something that can be learned
    positions = np.arange(length, dtype=np.int32)[None].repeat(rows, 0)
    learned = {"tokens": tokens, "targets": targets, "loss_mask": mask}
    return learned | {"segment_ids": live.astype(np.int32), "positions": positions}


class ToyBatches:
    """Endless batches, determined by position; `hook(position)` runs before each batch."""

    def __init__(self, rows: int = 4, hook=None, make=toy_batch):
        self.rows, self.position, self.hook, self.make = rows, 0, hook, make

    def __next__(self):
        if self.hook:
            self.hook(self.position)
        self.position += 1
        return self.make(rows=self.rows, seed=self.position)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


def accumulated(batch: dict, parts: int) -> dict:
    return {k: jnp.asarray(v).reshape(parts, -1, *v.shape[1:]) for k, v in batch.items()}
