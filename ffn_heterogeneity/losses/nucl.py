"""NUCL, outgoing connection heterogeneity (Stahlberg & Kumar): sums, loss term, statistics.

See `nucl_rows.py` for the formulas, closed-form gradients and degenerate rows.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.losses.kernels import by_layer, kernels, layer_count, pattern
from ffn_heterogeneity.losses.nucl_exact import distributions, exact_kernel, row_statistics
from ffn_heterogeneity.losses.nucl_rows import VARIANTS, nucl_rows
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.models.stack import layer_leaves
from ffn_heterogeneity.wording import check_choice

# Table 3's names -> the subtree of a layer that holds the kernel.
TARGETS = {
    "ffn_out": "ffn/down",
    "ffn_in_linear": "ffn/up",
    "ffn_in_gated": "ffn/gate",
    "attention_out": "attention/out",
}
AXES = ("neurons", "outputs")


@jax.jit
def compute_nucl(w_param: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three NUCL sums over all rows of a matrix or a stack: the paper's listing, made safe.

    Args:
      w_param: [m, n] or [..., m, n]; row i holds the outgoing weights of neuron i. Any float dtype;
        sums are float32 (float64 for float64 weights).

    Returns:
      (ent_loss, gini_loss, mstd_loss), scalars: sum H(r), sum (1 - q), -sum std(r).

    Raises:
      TypeError: the weights are not real floating point numbers.
    """
    ent_loss, gini_loss, mstd_loss = (nucl(w_param, variant) for variant in VARIANTS)
    return ent_loss, gini_loss, mstd_loss


def nucl(w: jax.Array, variant: str = "mstd", *, axis: int = -1) -> jax.Array:
    """Sum over rows of one variant; see `nucl_rows`."""
    return jnp.sum(nucl_rows(w, variant, axis=axis))


def nucl_term(
    context: TermContext,
    variant: str = "mstd",
    targets: Sequence[str] = ("ffn_out",),
    axis: str = "neurons",
    layers: Sequence[int] | None = None,
    control: bool = False,
) -> LossTerm:
    """NUCL over chosen matrices of chosen layers (equation 6, Table 3): a term on parameters.

    total = SUM over layers, targets and rows of the variant; denominator 1. Rows are those of the
    EFFECTIVE kernels (masks and adapters applied, one layer at a time); neuron factors scale whole
    rows and cancel.

    Metrics, from the same reductions (under the term's name): "<variant>/<target>/layer_mean"
    [layers that hold the target, in order] and "<variant>/<target>/mean" over the rows acted on.
    Both are per row, because a sum grows with the rows (Gaussian weights: -0.7555/n for mstd).

    Args:
      context: its weight is the paper's alpha; on a mesh of several devices see `nucl_rows`.
      variant: "ent", "gini" or "mstd".
      targets: names among "ffn_out" (rows of W, one per inner neuron), "ffn_in_linear" (U),
        "ffn_in_gated" (G), "attention_out" (rows of the attention's output kernel).
      axis: for the two incoming kernels, where the paper does not say which axis is the row:
        "neurons" (chosen here) one distribution per inner neuron over its incoming weights,
        "outputs" one per input over the neurons.
      layers: indices of the layers to act on; None: all.
      control: the same value, and gradients of the effective kernels of the same magnitudes with
        the signs of other weights of their row [ours]: they move as far, in directions that hardly
        change the variant.

    Raises:
      ValueError: unknown variant, target or axis; and, when the term runs: a tree without the
        target, a layer out of range.
    """
    check_choice("variant", variant, VARIANTS)
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    unknown = [target for target in targets if target not in TARGETS]
    if unknown or not targets or len(set(targets)) < len(targets):
        raise ValueError(f"targets={targets}: name each of {tuple(TARGETS)} at most once")
    check_choice("axis", axis, AXES)
    chosen = None if layers is None else frozenset(int(layer) for layer in layers)
    if chosen is not None and not chosen:
        raise ValueError("layers is empty: the term would act on nothing; None means all layers")

    sharded = context.mesh is not None and context.mesh.size > 1
    rows_of = functools.partial(nucl_rows, variant=variant, sharded=sharded)
    if control:
        rows_of = functools.partial(_with_other_signs, rows_of)

    def function(params: dict) -> TermValue:
        total, metrics = jnp.zeros((), jnp.float32), {}
        for target in targets:
            along = -2 if target.startswith("ffn_in") and axis == "neurons" else -1
            value, means = _target_value(params, target, rows_of, along, chosen)
            total = total + value
            metrics |= {f"{variant}/{target}/{key}": array for key, array in means.items()}
        return TermValue(total, jnp.ones((), jnp.float32), metrics)

    patterns = tuple(pattern(TARGETS[target], chosen) for target in targets)
    return LossTerm(context.name, function, context.weight, on="params", targets=patterns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def _with_other_signs(rows_of, w, axis):
    """rows_of(w, axis=axis), whose gradient has its signs permuted along the axis, always alike."""
    return rows_of(w, axis=axis)


def _other_signs_fwd(rows_of, w, axis):
    return jax.vjp(functools.partial(rows_of, axis=axis), w)


def _other_signs_bwd(rows_of, axis, pull, cotangent):
    (gradient,) = pull(cotangent)
    order = np.random.default_rng(0).permutation(gradient.shape[axis])
    signs = jnp.take(jnp.sign(gradient), order, axis=axis)
    return (jnp.abs(gradient) * signs,)


_with_other_signs.defvjp(_other_signs_fwd, _other_signs_bwd)


def _target_value(params, target, rows_of, along, chosen):
    """(sum over the chosen layers' rows, metrics) of one target."""
    stacks = kernels(params, TARGETS[target])
    if not stacks:
        raise ValueError(
            f"NUCL target {target!r}: no layer of the model holds {TARGETS[target]!r} (a plain FFN "
            "has no gate)"
        )
    count = layer_count(params)
    wrong = sorted(layer for layer in chosen or () if not 0 <= layer < count)
    if wrong:
        raise ValueError(f"NUCL layers {wrong}: the model has layers 0 to {count - 1}")
    total, count_rows, means, order = jnp.zeros((), jnp.float32), 0, [], []
    for stack in stacks:
        rows = by_layer(stack, functools.partial(rows_of, axis=along))
        keep = [chosen is None or layer in chosen for layer in stack.layers]
        if all(keep):
            total = total + jnp.sum(rows)
        elif any(keep):
            # A mask and not a selection: selecting would copy stacked weights.
            factors = np.asarray(keep, np.float32).reshape(-1, *[1] * (rows.ndim - 1))
            total = total + jnp.sum(rows * factors)
        # For layers with experts, the rows of all of them: [layers, E, rows].
        means.append(jnp.mean(jax.lax.stop_gradient(rows), axis=tuple(range(1, rows.ndim))))
        order += stack.layers
        count_rows += sum(keep) * math.prod(rows.shape[1:])
    if not count_rows:
        raise ValueError(f"NUCL target {target!r}: none of the layers {sorted(chosen)} holds it")
    # Whole arrays, because a program that splits them by layer would grow with depth.
    layer_mean = jnp.concatenate(means)[np.argsort(order)]
    mean = jax.lax.stop_gradient(total) / count_rows
    return total, {"layer_mean": layer_mean, "mean": mean}


def layer_statistics(params: dict) -> list[dict[str, float]]:
    """Heterogeneity of the outgoing connections of each layer, in float64.

    Args:
      params: a tree, stacked or not; the effective kernels ffn/down [m, n] are read one at a time.

    Returns:
      One {"entropy": sum H(r), "gini": sum (1 - q), "mstd": -sum std(r)} per layer, each summed
      over the layer's neurons (rows). An all-zero row contributes 0.

    Raises:
      ValueError: a kernel holds a value that is not finite; the message names the layer.
    """
    statistics = []
    for index, leaves in layer_leaves(params, TARGETS["ffn_out"]):
        weights = exact_kernel(leaves, f"layer {index}: {TARGETS['ffn_out']}")
        rows = row_statistics(*distributions(weights))
        statistics.append({name: float(values.sum()) for name, values in rows.items()})
    return statistics
