"""The layer where massive activations begin, and the weights that cause them (MW, section 2)."""

import dataclasses
from typing import Any

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.evaluate.inputs import ModelSettings
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.massive import SINKS, STATES, TOP, magnitudes_probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.probes.routing import first_token_probe
from ffn_heterogeneity.report.figures import curves_figure, probabilities_figure
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.wording import markdown_table

SHOWN = 3  # the paper's figures: the three largest and the median
# Positions of bos in a sentence of n tokens (Figure 2).
PLACES = {"none": None, "first": lambda n: 0, "middle": lambda n: n // 2, "last": lambda n: n}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MassiveSettings(ModelSettings):
    """Settings of `massive`.

    Attributes:
      layer, token: as in `massive_weights`.
      sentence: text into which bos is inserted.
    """

    layer: int | None
    token: int | None
    sentence: str


def massive(settings: MassiveSettings, model: Model, workdir: epath.Path) -> dict:
    """The analysis "massive": the massive layer, its neurons, and the states of a lone bos.

    With a tokenizer it also measures bos at other positions of `settings.sentence`.

    Returns:
      {"layer" (from 1), "layer_index" (from 0), of a layer with experts "expert" and
      "expert_index" likewise, "indices" and "magnitudes" of the 32 largest |h|,
      "token", "layers": one row per layer, {state: {"top", "indices", "median"}} (of experts
      indices e m + i); of a model with experts "router": the probabilities of the token's columns
      in each layer, [] without experts (Figure 5); with a tokenizer
      "sinks" and "bos": {place: result of `magnitudes_by_token`}}.

    Raises:
      ValueError: as `massive_weights`.
    """
    largest = massive_weights(model.config, model.params, settings.layer, settings.token)
    token = model.config.bos_id if settings.token is None else settings.token
    options = settings.options
    seen = _seen(model, options, [token])
    layers = [
        {name: _row(jax.tree.map(lambda x, i=i: x[i, 0, 0], seen[name])) for name in STATES}
        for i in range(model.config.n_layers)
    ]
    result = {
        **largest.where(),
        "token": token,
        "indices": largest.indices[:TOP].tolist(),
        "magnitudes": largest.magnitudes[:TOP].tolist(),
        "layers": layers,
        "bos": {},
    }
    if columns := max(layer.columns for layer in model.config.layers):
        seen = _seen(model, options, [token], first_token_probe(columns))[:, 0]
        result["router"] = [row[row >= 0].tolist() for row in seen]
    if model.tokenizer is not None:
        result["sinks"] = sinks(model, settings.sentence, token, options)
        for place in PLACES:
            result["bos"][place] = magnitudes_by_token(
                model, settings.sentence, place, token, options
            )
    _say(settings.model, result)
    _draw(result, workdir)
    return result


def _seen(model: Model, options: Any, ids: list[int], probe: Probe | None = None) -> Any:
    """The probe's results for one row of tokens; by default the magnitudes of all states."""
    probe = probe or magnitudes_probe(max(layer.experts or 0 for layer in model.config.layers))
    batches = [{"tokens": np.array([ids], np.int32)}]
    return observe(model.config, model.params, batches, probe, options=options)[probe.name]


def _row(state: dict) -> dict[str, Any]:
    """Row of one token: its `SHOWN` largest magnitudes, their indices, and the median."""
    return {
        "top": np.asarray(state["values"][:SHOWN]).tolist(),
        "indices": np.asarray(state["indices"][:SHOWN]).tolist(),
        "median": float(state["median"]),
    }


def sinks(model: Model, sentence: str, token: int, options: Any) -> list[float]:
    """Share of attention, per layer, of a sentence's tokens to the bos before it."""
    ids = [token, *model.tokenizer.encode(sentence, add_special_tokens=False)]
    seen = _seen(model, options, ids, SINKS)
    return (seen["sum"] / seen["count"]).tolist()


def magnitudes_by_token(
    model: Model, sentence: str, place: str, token: int, options: Any
) -> list[dict[str, Any]]:
    """The text of each token of a sentence, and the largest |h_l| at the middle layer.

    (Massive activations exist well before that layer; Figure 2: layer 16 of 32.)

    Args:
      place: a key of `PLACES`: where bos is inserted.
    """
    ids = model.tokenizer.encode(sentence, add_special_tokens=False)
    if PLACES[place] is not None:
        ids.insert(PLACES[place](len(ids)), token)
    seen = _seen(model, options, ids)
    middle = jax.tree.map(lambda x: x[model.config.n_layers // 2 - 1, 0], seen["h_out"])
    rows = [_row(jax.tree.map(lambda x, t=t: x[t], middle)) for t in range(len(ids))]
    texts = model.tokenizer.convert_ids_to_tokens(ids)
    return [{"token": text, **row} for text, row in zip(texts, rows, strict=True)]


def _say(name: str, result: dict) -> None:
    columns, rows = ["layer"], [[i] for i in range(1, len(result["layers"]) + 1)]
    for state in ("intermediate", "h_out"):
        columns += [f"{state}: {what}" for what in ("largest", "2nd", "3rd", "median")]
        for cells, layer in zip(rows, result["layers"], strict=True):
            values = (*layer[state]["top"], layer[state]["median"])
            cells += [f"{x:.3g}" for x in values]
    top = ", ".join(
        f"{i} ({x:.3g})"
        for i, x in zip(result["indices"][:5], result["magnitudes"][:5], strict=True)
    )
    print(f"{name}, token {result['token']} alone\n{markdown_table(columns, rows)}")
    where = f"massive layer {result['layer']} (from 1)"
    if "expert" in result:
        where += f", expert {result['expert']} ({result['expert_index']} from 0)"
    print(f"{where}, neurons {top}")
    for place, tokens in result["bos"].items():
        cells = [f"{row['token']} {row['top'][0]:.3g}" for row in tokens]
        print(f"bos {place}: {', '.join(cells)}")


def _draw(result: dict, workdir: epath.Path) -> None:
    """Draw Figures 3(b, c), magnitudes over depth, and 3(a), states around the massive layer."""
    labels = ("largest", "2nd", "3rd", "median")

    def lines(rows: dict[Any, dict]) -> dict[str, dict]:
        values = {x: (*row["top"], row["median"]) for x, row in rows.items()}
        return {label: {x: v[i] for x, v in values.items()} for i, label in enumerate(labels)}

    if any(result.get("router", ())):
        panels = {f"router, token {result['token']} alone": result["router"]}
        probabilities_figure(panels, workdir / "massive_router.png")
    depth = {
        title: lines({i: row[state] for i, row in enumerate(result["layers"], 1)})
        for title, state in (("intermediate state", "intermediate"), ("hidden state", "h_out"))
    }
    if "sinks" in result:
        depth["attention"] = {"share of bos": dict(enumerate(result["sinks"], 1))}
    axes = {"ylabel": "magnitude"}
    curves_figure(depth, workdir / "massive_depth.png", xlabel="layer", **axes)
    near = range(max(result["layer"] - 2, 0), min(result["layer"] + 1, len(result["layers"])))
    early = {
        f"layer {i + 1}": lines(dict(enumerate((result["layers"][i][s] for s in STATES), 1)))
        for i in near
    }
    named = [f"{i} {name}" for i, name in enumerate(STATES, 1)]
    states = f"{', '.join(named[:4])},\n{', '.join(named[4:])}"
    curves_figure(early, workdir / "massive_states.png", xlabel=states, **axes)
