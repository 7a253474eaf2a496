"""Shares of texts that experts get, and the similarity of experts' outputs."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ffn_heterogeneity.evaluate.inputs import PerplexitySettings
from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.report.figures import probabilities_figure
from ffn_heterogeneity.surgery.expert_text import ExpertText
from ffn_heterogeneity.wording import markdown_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings(PerplexitySettings):
    """Settings of `configs/analyze.py:experts`.

    Attributes:
      against: directories of other models of the same tokenizer and shape.
    """

    compute_dtype: str = "float32"
    against: tuple[str, ...] = ()


def experts(settings: ExpertSettings, model: Model, workdir: epath.Path) -> dict:
    """The analysis "experts": the share of each text's tokens that each expert gets, and cosines.

    A cosine is that of two experts' outputs for the same token, without gates, averaged over all
    tokens; every expert is applied to every token. Experts of another model see that model's own
    residual stream. They are matched one to one for the largest sum of cosines. Streams of models
    that were trained apart have unrelated axes, so the outputs are also compared after the
    orthogonal map of one stream to the other before that layer (Procrustes) [ours].

    Writes experts.csv: {layer, expert, text, share of the text's tokens}: over the experts of a
    layer a text's shares add up to the number of experts that a token uses.

    Returns:
      {"expert_cosine": mean over layers; of other models "against": {name: {"matched_cosine",
      "aligned_cosine": after that map}}, means over layers; "tokens"; "layers": for each layer with
      experts "layer" (from 1), the same numbers, "load_min" and "load_max" (shares of all tokens'
      choices), and "text_information": mutual information of text and chosen expert, in nats}.

    Raises:
      ValueError: a model without experts, or another of another shape or vocabulary.
    """
    names, rows, of_row = [], [], []
    for name, one in settings.files().items():
        names.append(name or epath.Path(one.text or one.token_ids).stem)
        rows += list(one.rows(model))
        of_row += [len(names) - 1] * (len(rows) - len(of_row))
    others = {epath.Path(path).name: load_model(path) for path in settings.against}
    for name, other in others.items():
        _check(name, other, model)
    models = [model, *others.values()]
    trees = [unstack(one.params)["layers"] for one in models]
    texts = [ExpertText(one, rows, settings.batch_size) for one in models]
    layers, table = [], []
    for i, layer in enumerate(bar("experts", model.config.layers, unit="layer")):
        if layer.experts is not None:
            loads, found = _layer(i, layer.columns, texts, trees, np.array(of_row), list(others))
            layers.append({"layer": i + 1, **found})
            shares = loads * layer.top_k / loads.sum(1, keepdims=True)
            table.append((i + 1, shares))
        for one, text, tree in zip(models, texts, trees, strict=True):
            text.move(one.config.layers[i], tree[i])
    if not layers:
        raise ValueError(f"{settings.model} has no layer with experts")
    write_text(workdir / "experts.csv", _csv(names, table))
    results = _means(layers) | {"tokens": int(sum(map(len, rows))), "layers": layers}
    _say(results, names, table, workdir)
    return results


def _check(name: str, other: Model, model: Model) -> None:
    for field in ("n_layers", "d_model", "vocab_size"):
        actual, expected = getattr(other.config, field), getattr(model.config, field)
        if actual != expected:
            raise ValueError(f"against={name}: its {field} is {actual}, the model's {expected}")
    if [x.columns for x in other.config.layers] != [x.columns for x in model.config.layers]:
        raise ValueError(f"against={name}: its layers have other numbers of experts")


def _layer(
    i: int,
    columns: int,
    texts: Sequence[ExpertText],
    trees: Sequence[Sequence[dict]],
    of_row: np.ndarray,
    names: Sequence[str],
) -> tuple[np.ndarray, dict[str, Any]]:
    """(tokens of each text sent to each column [texts, columns], the layer's results)."""
    loads, cosines, tokens = np.zeros((max(of_row) + 1, columns)), 0.0, 0
    maps: list[Any] = [0.0] * len(names)
    for seen, *others in _batches(i, texts, trees):
        at = np.broadcast_to(of_row[seen.rows][:, None], seen.columns.shape)
        np.add.at(loads, (at, seen.columns), 1)
        cosines, tokens = cosines + _cosines(seen.outputs, seen.outputs), tokens + len(seen.rows)
        for k, other in enumerate(others):
            maps[k] = maps[k] + _unit(other.streams).T @ _unit(seen.streams)
    found: dict[str, Any] = {"expert_cosine": _mean_of_pairs(np.asarray(cosines) / tokens)}
    if names:
        turns = [_nearest_rotation(one) for one in maps]
        plain, turned = ([0.0] * len(names) for _ in range(2))
        for seen, *others in _batches(i, texts, trees):
            for k, (other, turn) in enumerate(zip(others, turns, strict=True)):
                plain[k] = plain[k] + _cosines(seen.outputs, other.outputs)
                turned[k] = turned[k] + _cosines(seen.outputs, other.outputs @ turn)
        found["against"] = {
            name: {"matched_cosine": _matched(a / tokens), "aligned_cosine": _matched(b / tokens)}
            for name, a, b in zip(names, plain, turned, strict=True)
        }
    shares = loads / loads.sum()
    expected = shares.sum(1, keepdims=True) * shares.sum(0)
    ratio = np.divide(shares, expected, out=np.ones_like(shares), where=shares > 0)
    loaded = shares.sum(0)
    found |= {"load_min": float(loaded.min()), "load_max": float(loaded.max())}
    return loads, found | {"text_information": float(np.sum(shares * np.log(ratio)))}


def _batches(i: int, texts: Sequence[ExpertText], trees: Sequence[Sequence[dict]]):
    return zip(
        *(x.everywhere(i, tree[i]) for x, tree in zip(texts, trees, strict=True)), strict=True
    )


def _unit(x: Any) -> Any:
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.maximum(norms, np.finfo(np.float32).tiny)


@jax.jit
def _cosines(one_end: jax.Array, other_fnd: jax.Array) -> jax.Array:
    """Sum over tokens of the cosine of each pair of experts, [E, F]; 0 for an output of zeros."""
    unit = [
        x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), jnp.finfo(x.dtype).tiny)
        for x in (one_end, other_fnd)
    ]
    return jnp.einsum("end,fnd->ef", *unit)


def _mean_of_pairs(cosines: np.ndarray) -> float:
    return float(cosines[np.triu_indices(len(cosines), 1)].mean()) if len(cosines) > 1 else 1.0


def _nearest_rotation(product: np.ndarray) -> np.ndarray:
    """The orthogonal R that minimizes |A - B R|, from B^T A."""
    u, _, v = np.linalg.svd(product)
    return (u @ v).astype(np.float32)


def _matched(cosines: Any) -> float:
    """Mean over the pairs of the one-to-one matching of largest sum."""
    from scipy.optimize import linear_sum_assignment

    cosines = np.asarray(cosines)
    return float(cosines[linear_sum_assignment(cosines, maximize=True)].mean())


def _means(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over layers of the cosines."""
    means: dict[str, Any] = {"expert_cosine": float(np.mean([x["expert_cosine"] for x in layers]))}
    if "against" in layers[0]:
        means["against"] = {
            name: {what: float(np.mean([x["against"][name][what] for x in layers])) for what in one}
            for name, one in layers[0]["against"].items()
        }
    return means


def _csv(names: Sequence[str], table: Sequence[tuple[int, np.ndarray]]) -> str:
    """A line for each layer, text and expert."""
    made = io.StringIO()
    writer = csv.writer(made, lineterminator="\n")
    writer.writerow(("layer", "expert", "text", "share"))
    for layer, shares in table:
        for name, row in zip(names, shares, strict=True):
            writer.writerows((layer, e, name, f"{share:.6g}") for e, share in enumerate(row))
    return made.getvalue()


def _say(
    results: Mapping[str, Any],
    names: Sequence[str],
    table: Sequence[tuple[int, np.ndarray]],
    workdir: epath.Path,
) -> None:
    """Print a table of the layers, and draw the shares of each text's tokens."""
    shown = ("layer", "expert_cosine", "load_min", "load_max", "text_information")
    rows = [[f"{layer[x]:.4g}" for x in shown] for layer in results["layers"]]
    print(markdown_table(shown, rows))
    for name, one in results.get("against", {}).items():
        print(f"against {name}: " + ", ".join(f"{x} {y:.4f}" for x, y in one.items()))
    made = {f"layer {layer}": shares.tolist() for layer, shares in table}
    label = "share of the text's tokens"
    probabilities_figure(made, workdir / "experts.png", names=names, label=label)
