"""Compensation of a smaller model, block by block, on calibration text (`states.METHODS`).

For each layer, the moments are summed over all rows, the correction of its outgoing weights is
solved for, and the residual streams of the rows are passed to the next layer. Memory holds the
streams and the moments of one layer; attention is computed once per layer (twice if `sequential`).
`observe` is not used: it would hold the moments of all layers at once, and could not run a layer on
top of the fitted one before it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.adapters import neuron_factor
from ffn_heterogeneity.io.assemble import all_finite
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import config_from_hf, config_to_hf
from ffn_heterogeneity.models.feed_forward import FeedForward
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.probes.observe import token_batches
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.surgery.states import METHODS, Moments
from ffn_heterogeneity.tree import flatten

BATCH = 8  # rows per batch
HELD_OUT = 4  # every fourth row is held out to choose lambda


def compensated(
    model: Model, smaller: Model, method: str, rows: Sequence[np.ndarray], sequential: bool = False
) -> tuple[Model, list[dict]]:
    """Fit the outgoing weights of every block of the smaller model that differs from the dense one.

    If a norm follows the FFN, a token's weight is one over the mean square of the dense block's
    output, because that norm divides by it [ours].

    Args:
      model: the dense model, with the same number of layers; neither model is changed.
      method: a name of `states.METHODS`.
      rows: token ids, bos first, of any lengths.
      sequential: the inputs come from the model compensated so far, not the dense model [ours].

    Returns:
      (the smaller model, reports): per changed layer {"layer", "tokens"} and the method's report.
      Adapters and masks of `down` are folded into its kernel; neuron factors stay separate.

    Raises:
      ValueError: too few rows or tokens; non-finite states; "bias" if the format has none; weights
        that no longer fit in their dtype; a changed layer has experts.
    """
    dense = unstack(model.params)["layers"]
    pairs = zip(dense, unstack(smaller.params)["layers"], strict=True)
    changed = [not _equal(old["ffn"], new["ffn"]) for old, new in pairs]
    widths = smaller.config.ffn_widths
    check_fits(model.config, method, {i: widths[i] for i, one in enumerate(changed) if one})
    if method == "bias":
        smaller = _with_biases(smaller)
    batches = batches_of(rows)
    tables = {"embed": jax.device_put(model.params["embed"])}
    streams = [embedded(model.config, tables, batch) for _, batch in batches]
    small = unstack(smaller.params)
    layers, reports = list(small["layers"]), []
    for i, old in enumerate(bar(method, dense, unit="block")):
        configs = tuple(
            dataclasses.replace(c, layers=(c.layers[i],)) for c in (model.config, smaller.config)
        )
        behind = streams
        if changed[i]:
            behind, moments = _observed(configs, old, layers[i]["ffn"], streams, batches, i)
            tokens = int(moments[0].tokens + moments[1].tokens)
            check_fits(model.config, method, {i: widths[i]}, tokens)
            layers[i], report = _fitted(layers[i], moments, method, i)
            reports.append(report)
        elif not sequential:
            behind = _moved(configs[0], old, streams, batches)
        streams = _moved(configs[1], layers[i], streams, batches) if sequential else behind
    params = restack(smaller.config, {**small, "layers": layers})
    return dataclasses.replace(smaller, params=params), reports


def check_fits(
    config: ModelConfig, method: str, kept: Mapping[int, int], tokens: float = math.inf
) -> None:
    """Check before a text is read or generated what `compensated` needs.

    Args:
      kept: {changed layer: number of its remaining neurons}.
      tokens: of the text.

    Raises:
      ValueError: a changed layer has experts, or more neurons remain in one than there are tokens.
    """
    causal_lm.require_one_stack(config, f"compensation {method!r}")
    for i, width in kept.items():
        if config.layers[i].experts is not None:
            raise ValueError(
                f"compensation={method!r} supports dense layers, and layer {i} has experts: "
                "use one that reads no states (ridge)"
            )
        if method != "bias" and tokens < width:  # a bias is a mean
            raise ValueError(
                f"layer {i}: {tokens:,} calibration tokens are too few to fit {width:,} kept "
                f"neurons: give calibration_tokens of at least {width:,}, better four times as many"
            )


def has_ffn_bias(config: ModelConfig) -> bool:
    """True if the model's FFNs have biases, or its format has a place for them."""
    return config_from_hf(config_to_hf(dataclasses.replace(config, ffn_bias=True))).ffn_bias


def _with_biases(model: Model) -> Model:
    """The model with biases of 0 in its FFNs, if it has none and config.json can name them.

    Raises:
      ValueError: the format has no such biases.
    """
    if model.config.ffn_bias:
        return model
    if not has_ffn_bias(model.config):
        raise ValueError(
            f"compensation='bias' adds to the FFN's output bias, and {model.config.family}'s "
            "format has none: use state_ridge"
        )
    config, tree = dataclasses.replace(model.config, ffn_bias=True), unstack(model.params)
    layers = [
        {**leaves, "ffn": {name: _with_bias(name, one) for name, one in leaves["ffn"].items()}}
        for leaves in tree["layers"]
    ]
    params = restack(config, {**tree, "layers": layers})
    return dataclasses.replace(model, config=config, params=params)


def _with_bias(name: str, linear: Any) -> Any:
    if name == "router" or not (isinstance(linear, dict) and "kernel" in linear):
        return linear
    kernel = linear["kernel"]  # of experts with an axis more
    shape = (*kernel.shape[:-2], kernel.shape[-1])
    return {**linear, "bias": np.zeros(shape, kernel.dtype)}


def batches_of(rows: Sequence[np.ndarray]) -> list[tuple[bool, dict]]:
    """Return (is held out, batch) pairs of at most eight rows, padded to the longest row of all.

    Raises:
      ValueError: too few rows to hold one out.
    """
    held = list(rows)[HELD_OUT - 1 :: HELD_OUT]
    if not held:
        raise ValueError(
            f"{len(rows)} rows of calibration text: give at least {HELD_OUT} (of a text more "
            "calibration_tokens)"
        )
    fitted = [row for place, row in enumerate(rows) if place % HELD_OUT != HELD_OUT - 1]
    longest, batches = max(map(len, rows)), []
    for is_held, some in ((False, fitted), (True, held)):
        batches += [(is_held, batch) for batch in token_batches(some, BATCH, longest)]
    return batches


def _equal(one: dict, other: dict) -> bool:
    both = flatten(one), flatten(other)
    return both[0].keys() == both[1].keys() and all(
        leaf.shape == both[1][path].shape and bool((leaf == both[1][path]).all())
        for path, leaf in both[0].items()
    )


# ---- the model, layer by layer


@functools.partial(jax.jit, static_argnums=0)
def embedded(config: ModelConfig, params: dict, batch: dict) -> jax.Array:
    """The residual stream before the first layer, [B, T, D]."""
    positions = causal_lm.row_positions(batch) if config.position_rows else None
    return causal_lm.embed(config, params, batch["tokens"], RunOptions(), positions)


@functools.partial(jax.jit, static_argnums=0)
def one_layer(config: ModelConfig, leaves: dict, x: jax.Array, batch: dict) -> jax.Array:
    """The residual stream after the first layer of the config, [B, T, D]."""
    return causal_lm.one_layer(config, 0, leaves, x, batch)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer_and_sums(
    config: ModelConfig, small: ModelConfig, leaves: dict, ffn: dict, x: jax.Array, batch: dict
) -> tuple[jax.Array, dict]:
    """Return the stream after the dense layer, and the `Moments` of `ffn` as its replacement."""
    x, seen = causal_lm.one_layer(config, 0, leaves, x, batch)
    block = FeedForward(small, small.layers[0])
    small_output, state = block.apply({"params": ffn}, seen.ffn_input)
    factor = neuron_factor(ffn)
    state = jnp.asarray(state)
    state = state if factor is None else state * factor.astype(state.dtype)

    def weighed(places: slice) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(weights [B, t], their roots and the states times the roots [B, t, .]) of positions."""
        weight = (batch["segment_ids"] > 0).astype(jnp.float32)[:, places]
        if config.post_norms:
            output = seen.ffn_output[:, places].astype(jnp.float32)
            weight = weight / (jnp.mean(output**2, -1) + config.norm_eps)
        root = jnp.sqrt(weight)[..., None]
        return weight, root, state[:, places].astype(jnp.float32) * root

    on_bos, _, first = weighed(slice(1))
    weight, root, state = weighed(slice(1, None))
    missed = (seen.ffn_output - small_output)[:, 1:].astype(jnp.float32) * root
    return x, {
        "states": jnp.einsum("btc,btk->ck", state, state),
        "crossed": jnp.einsum("btc,btn->cn", state, missed),
        "missed": jnp.einsum("btn,bt->n", missed, root[..., 0]),
        "squares": jnp.sum(missed**2),
        "weight": jnp.sum(weight),
        "tokens": jnp.sum(weight > 0),
        "first": jnp.sum(first**2, (0, 1)),
        "rows": jnp.sum(on_bos > 0),
    }


def _moved(config: ModelConfig, leaves: dict, streams: Sequence, batches: Sequence) -> list:
    leaves, rows = jax.device_put(leaves), zip(streams, batches, strict=True)
    return [one_layer(config, leaves, x, batch) for x, (_, batch) in rows]


def _observed(
    configs: tuple, leaves: dict, ffn: dict, streams: Sequence, batches: Sequence, layer: int
) -> tuple[list, list[Moments]]:
    """(the streams after the dense layer, the moments of the fitted and of the held-out rows)."""
    leaves, ffn = jax.device_put((leaves, ffn))
    behind, sums = [], {}
    for x, (is_held, batch) in zip(streams, batches, strict=True):
        x, seen = _layer_and_sums(*configs, leaves, ffn, x, batch)
        behind.append(x)
        moments = {name: np.asarray(value, np.float64) for name, value in seen.items()}
        if not all(map(all_finite, moments.values())):
            raise ValueError(f"layer {layer}: its states are not finite: check the checkpoint")
        moments = Moments(**moments)
        sums[is_held] = sums[is_held] + moments if is_held in sums else moments
    return behind, [sums[False], sums[True]]


def _fitted(leaves: dict, moments: list[Moments], method: str, layer: int) -> tuple[dict, dict]:
    """(the smaller layer with the correction that `method` computes, its report)."""
    ffn, tokens = leaves["ffn"], int(moments[0].tokens + moments[1].tokens)
    kernel = np.asarray(effective_kernel(ffn["down"]))
    fit = METHODS[method](moments[0], moments[1], kernel.astype(np.float64))
    down = {"kernel": (kernel + fit.kernel).astype(kernel.dtype)}
    if "bias" in ffn["down"]:
        bias = np.asarray(ffn["down"]["bias"])
        down["bias"] = bias if fit.bias is None else (bias + fit.bias).astype(bias.dtype)
    if not all_finite(down["kernel"]):
        raise ValueError(
            f"layer {layer}: compensation={method!r}: the weights no longer fit in {kernel.dtype}: "
            "use a float32 model"
        )
    report = {"layer": layer, "tokens": tokens} | fit.report
    return {**leaves, "ffn": {**ffn, "down": down}}, report
