"""Ranks that a router gives for bos to the experts which hold a dense model's massive neurons.

    python docs/router_ranks.py <dense model> <its partition> <the same, trained> \
        --layer=11 --neurons=1229,1487 --out=docs/results/experts_bos.md

House of Cards: massive weights, Figure 5, shows that Mixtral's router sends bos to one expert of
the massive layer with a probability near 1. Here the experts are groups of a dense model's neurons
(configs/experts.py:partition, router=means), so it is known where its massive neurons went: a
neuron is found by its column of gate, which `partition` copies. For each model with experts: the
rank (1: the most probable) that the router gives for a lone bos to the expert of each of those
neurons, and the rank that routers give whose columns are the means of a random division of the same
neurons. A model is named after its work directory.
"""

from __future__ import annotations

import argparse
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.files import write_text
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.wording import markdown_table

SEED = 0
COLUMNS = ("model", "neuron", "its expert", "rank", "probability", "largest", "largest |h|")
COLUMNS += ("mean rank in random divisions", "first in")
TEXT = """## Ours: the router of layer {layer} on bos

{table}

Rank and probability of the neuron's expert, the largest probability, and the layer's largest
\\|h\\|. Then {draws:,} random divisions of the same neurons, with mean columns of gate as router:
the rank of the neuron's expert there. Experts are counted from 0.
"""


@functools.cache
def ffn_input() -> Probe:
    """Inputs of each layer's feed-forward block, for the first token."""

    def function(seen, batch, per_layer):
        return seen.ffn_input[:, 0].astype(jnp.float32)

    return Probe("ffn_input", function, kind="example")


def on_bos(model, layer: int) -> np.ndarray:
    """The layer's input for a lone bos, float64 [D]."""
    alone = [{"tokens": np.array([[model.config.bos_id]], np.int32)}]
    seen = observe(model.config, model.params, alone, ffn_input())["ffn_input"]
    return np.float64(seen[layer, 0])


def columns(model, layer: int) -> tuple[np.ndarray, np.ndarray | None]:
    """(gate's columns by expert [E, D, m], or [1, D, M] of a dense layer; router [D, E])."""
    ffn = unstack(model.params)["layers"][layer]["ffn"]
    gate = np.float64(ffn["gate"]["kernel"])
    router = np.float64(ffn["router"]["kernel"]) if "router" in ffn else None
    return (gate if gate.ndim == 3 else gate[None]), router


def ranks(logits: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, 1 for the largest."""
    return (-logits).argsort(-1).argsort(-1) + 1


def random_means(states: np.ndarray, experts: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """(logits of mean columns [draws, E], the expert of each neuron [draws, M])."""
    every = np.tile(np.arange(len(states)), (draws, 1))
    orders = np.random.default_rng(SEED).permuted(every, axis=1)
    logits = states[orders].reshape(draws, experts, -1).mean(-1)
    return logits, orders.argsort(1) // (len(states) // experts)


def rows_of(name: str, model, layer: int, places: dict[int, tuple], draws: int) -> list[list]:
    """A row for each neuron: its expert under the model's router, and under random divisions."""
    gate, router = columns(model, layer)
    if router is None:
        raise ValueError(f"{name}: layer {layer} (from 0) has no router")
    experts, width = gate.shape[0], gate.shape[2]
    read = on_bos(model, layer)
    logits = read @ router
    shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    states = np.einsum("d,edm->em", read, gate).reshape(-1)
    drawn, of_neuron = random_means(states, experts, draws)
    massive = massive_weights(model.config, model.params, layer).magnitudes[0]
    rows = []
    for neuron, (expert, index) in places.items():
        rank = int(ranks(logits)[expert])
        theirs = np.take_along_axis(ranks(drawn), of_neuron[:, [expert * width + index]], 1)
        row = [name, neuron, expert, rank, shares[expert], shares.max(), float(massive)]
        row += [theirs.mean(), f"{(theirs == 1).mean():.1%}"]
        rows.append([x if isinstance(x, str) else f"{x:.4g}" for x in row])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dense")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--layer", type=int, required=True, help="from 0")
    parser.add_argument("--neurons", required=True, help="of the dense model, with commas")
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--out", default="")
    asked = parser.parse_args()
    models = {pathlib.Path(path).parent.name: fh.load_model(path) for path in asked.models}
    dense, _ = columns(fh.load_model(asked.dense), asked.layer)
    copies, _ = columns(next(iter(models.values())), asked.layer)
    places = {}
    for neuron in map(int, asked.neurons.split(",")):
        found = np.argwhere((copies == dense[0, :, neuron][None, :, None]).all(1))
        if len(found) != 1:
            raise ValueError(f"neuron {neuron}: {len(found)} experts have its column of gate")
        places[neuron] = tuple(found[0])
    rows = [
        row
        for name, model in models.items()
        for row in rows_of(name, model, asked.layer, places, asked.draws)
    ]
    table = markdown_table(COLUMNS, rows)
    text = TEXT.format(layer=asked.layer + 1, table=table, draws=asked.draws)
    print(text, end="")
    if asked.out:
        write_text(pathlib.Path(asked.out), text)


if __name__ == "__main__":
    main()
