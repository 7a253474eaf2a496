"""Choice of layers, of the number of neurons to remove, and of the neurons."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ffn_heterogeneity.wording import check_number


def layer_subset(
    spec: str | Sequence[int], n_layers: int, groups: Mapping[str, Sequence[int]] = {}
) -> tuple[int, ...]:
    """Return the 0-based layers that a specification names, in order.

    Args:
      spec: "all"; "top" (the half next to the output) or "bottom"; "even" or "odd" (0-based
        indices; Gemma-2's layer 0 is local, so "odd" are its global layers, which the NUCL paper,
        counting from 1, calls even); "pair:i" (layers i and i + 1, Figure 4); "last4"; "3,7,9";
        "4-9"; or a sequence of integers. After the names of groups, each with a colon, these rules
        are about the layers in all these groups, numbered from 0: "encoder:top", "encoder:0-2",
        "decoder:sparse:last4". Several specifications are joined by "+".
      groups: `ModelConfig.groups`.

    Raises:
      ValueError: the specification is not understood, names a layer twice or out of range.
    """
    if isinstance(spec, str) and "+" in spec:
        each = [layer_subset(one, n_layers, groups) for one in spec.split("+")]
        if doubled := [i for i, times in Counter(itertools.chain(*each)).items() if times > 1]:
            raise ValueError(f"layers={spec!r} names layer {doubled[0]} twice")
        return tuple(sorted(itertools.chain(*each)))
    pool, rule = list(range(n_layers)), spec
    while isinstance(rule, str) and (name := rule.partition(":")[0].strip()) in groups:
        pool, rule = [i for i in pool if i in groups[name]], rule.partition(":")[2]
    if not isinstance(rule, (str, Iterable)):
        raise ValueError(f"layers={spec!r}: give a name or indices: [{spec!r}]")
    chosen = _parsed(spec, rule, len(pool)) if isinstance(rule, str) else [int(i) for i in rule]
    outside = [i for i in chosen if not 0 <= i < len(pool)]
    if outside:
        raise ValueError(
            f"layers={spec!r}: layer {outside[0]} is out of range, the model has layers "
            f"0 to {len(pool) - 1}" + (" there" if rule != spec else "")
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"layers={spec!r} names a layer twice")
    if not chosen:
        raise ValueError(f"layers={spec!r} names no layer of the model's {n_layers}")
    return tuple(sorted(pool[i] for i in chosen))


def _parsed(spec: str | Sequence[int], rule: str, count: int) -> list[int]:
    """Positions among `count` layers that a rule names."""
    text, half = rule.strip(), count // 2
    names = {
        "all": range(count),
        "top": range(half, count),
        "bottom": range(half),
        "even": range(0, count, 2),
        "odd": range(1, count, 2),
    }
    try:
        return list(names[text]) if text in names else _parse_layers(text, count)
    except ValueError:
        raise ValueError(
            f"layers={spec!r} is not understood: use {', '.join(names)}, last4, pair:5, 0,3,7 or "
            "4-9, also after encoder:, decoder: or sparse: if the model has such layers, or "
            "several joined by +"
        ) from None


def _parse_layers(text: str, count: int) -> list[int]:
    if text.startswith("pair:"):
        first = int(text.removeprefix("pair:"))
        return [first, first + 1]
    if text.startswith("last"):
        # Negative positions, if any, are out of range.
        return list(range(count - min(int(text.removeprefix("last")), count + 1), count))
    chosen: list[int] = []
    for span in text.split(","):
        first, dash, last = span.strip().partition("-")
        # Check the range before it is expanded: no model has that many layers.
        chosen += range(int(first), min(int(last), 10**6) + 1) if dash else [int(first)]
    return chosen


def removal_count(width: int, *, ratio: float | None = None, count: int | None = None) -> int:
    """Number of neurons to remove: `count`, or floor(ratio * width + 1e-9) [our rounding].

    Raises:
      ValueError: not exactly one of ratio and count is given, ratio is outside [0, 1), or no neuron
        would remain.
    """
    if (ratio is None) == (count is None):
        raise ValueError(f"give exactly one of ratio and count, got ratio={ratio}, count={count}")
    if count is None:
        check_number("ratio", ratio, "[0, 1): 0.25 removes a quarter")
        return math.floor((ratio or 0.0) * width + 1e-9)
    check_number(f"of {width} neurons, count", count, f"[0, {width})")
    return int(count)


def rounded_count(width: int, count: int, multiple: int) -> int:
    """Number of neurons to remove so that a multiple is left: the nearest, the upper of two.

    At least one multiple is left, and never more than the layer has; a count of 0 stays 0.

    Raises:
      ValueError: the layer is narrower than `multiple`.
    """
    if count == 0:
        return 0
    if width < multiple:
        raise ValueError(f"multiple={multiple}: a layer has {width} neurons, which is less")
    nearest = (width - count + multiple // 2) // multiple
    return width - multiple * min(max(nearest, 1), width // multiple)


def highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest scores, ascending; ties go to the lower index."""
    order = np.argsort(-scores, kind="stable")
    return np.sort(order[:count])


def select_global(
    scores: Mapping[int, np.ndarray], *, ratio: float | None = None, count: int | None = None
) -> dict[int, np.ndarray]:
    """Return {layer: removed indices} for one budget over all layers, highest scores first.

    Each layer keeps at least the neuron that it would lose last. Ties go to the lower layer, then
    to the lower index.

    Args:
      ratio, count: of all the layers' neurons together.
    """
    layers = sorted(scores)
    total = sum(len(scores[layer]) for layer in layers)
    budget = removal_count(total, ratio=ratio, count=count)
    if budget > total - len(layers):
        raise ValueError(
            f"a global budget of {budget} of {total} neurons would empty a layer: at most "
            f"{total - len(layers)} can go"
        )
    # All neurons of a layer except the one it would lose last (not every -inf score marks that
    # one).
    orders = [np.sort(np.argsort(-scores[layer], kind="stable")[:-1]) for layer in layers]
    flat = np.concatenate(
        [scores[layer][order] for layer, order in zip(layers, orders, strict=True)]
    )
    owner = np.repeat(layers, [len(order) for order in orders])
    index = np.concatenate(orders)
    chosen = np.argsort(-flat, kind="stable")[:budget]
    return {layer: np.sort(index[chosen[owner[chosen] == layer]]) for layer in layers}


def highest_share(values: Sequence[np.ndarray], share: float) -> list[np.ndarray]:
    """True for the highest values of all arrays together; of those tied, for the first ones.

    Exactly a share, because a model with zeros (masked, quantized) has many ties.
    """
    every = np.concatenate([array.ravel() for array in values])
    gone = math.floor((1 - share) * every.size + 1e-9)
    if gone in (0, every.size):
        return [np.full(array.shape, not gone) for array in values]
    border = np.partition(every, gone)[gone]
    stays, tied = every > border, np.flatnonzero(every == border)
    left = every.size - gone - np.count_nonzero(stays)
    stays[tied[:left]] = True
    parts = np.split(stays, np.cumsum([array.size for array in values])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, values, strict=True)]
