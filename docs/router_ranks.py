"""What a router of experts made from a dense model does with bos, where its massive neurons are.

    python docs/router_ranks.py <dense model> <its partition> <the same, trained> \
        --layer=11 --neurons=1229,1487 --out=runs/router_ranks.md

House of Cards: massive weights, Figure 5, shows that Mixtral's router sends bos to one expert of
the massive layer with a probability near 1. Here the experts are groups of a dense model's neurons
(configs/experts.py:partition, router=means), so it is known where its massive neurons went: a
neuron is found by its column of gate, which `partition` copies. For each model with experts: the
ranks (1: the most probable) that the router gives for a lone bos to the experts of those neurons,
and how often a router gives such ranks whose columns are the means of a random division of the same
neurons.
"""

from __future__ import annotations

import argparse
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

import ffn_heterogeneity as fh
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe
from ffn_heterogeneity.wording import markdown_table

SEED = 0


@functools.cache
def ffn_input() -> Probe:
    """What the feed-forward block of each layer reads, of the first token."""

    def function(seen, batch, per_layer):
        return seen.ffn_input[:, 0].astype(jnp.float32)

    return Probe("ffn_input", function, kind="example")


def on_bos(model, layer: int) -> np.ndarray:
    """The layer's input for a lone bos, float64 [D]."""
    alone = [{"tokens": np.array([[model.config.bos_id]], np.int32)}]
    return np.float64(observe(model.config, model.params, alone, ffn_input())["ffn_input"])[
        layer, 0
    ]


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
    orders = np.random.default_rng(SEED).permuted(
        np.tile(np.arange(len(states)), (draws, 1)), axis=1
    )
    logits = states[orders].reshape(draws, experts, -1).mean(-1)
    return logits, orders.argsort(1) // (len(states) // experts)


def rows_of(name: str, model, layer: int, places: list[tuple[int, int]], draws: int) -> list[list]:
    """Two rows: the model's router, and routers of random divisions of its neurons."""
    gate, router = columns(model, layer)
    assert router is not None, f"{name} has no router in layer {layer}"
    experts, width = gate.shape[0], gate.shape[2]
    read = on_bos(model, layer)
    logits = read @ router
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    own, order = [e for e, _ in places], ranks(logits)
    states = np.einsum("d,edm->em", read, gate).reshape(-1)
    drawn, of_neuron = random_means(states, experts, draws)
    neurons = [e * width + i for e, i in places]
    holders = of_neuron[:, neurons]
    theirs = np.take_along_axis(ranks(drawn), holders, 1)
    top = [int(x) for x in order[own]]
    chosen = ", ".join(f"{x:.3g}" for x in shares[own])
    first = f"{shares.max():.3g}"
    same = (theirs <= np.array(top)).mean(0)
    return [
        [name, ", ".join(str(e) for e in own), ", ".join(map(str, top)), chosen, first],
        [
            f"{name}: means of random divisions",
            "-",
            ", ".join(f"{x:.3g}" for x in theirs.mean(0)),
            "as high in " + ", ".join(f"{x:.1%}" for x in same),
            f"both in the first two: {(theirs <= 2).all(1).mean():.1%}",
        ],
    ]


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
    places = []
    for neuron in map(int, asked.neurons.split(",")):
        same = (copies == dense[0, :, neuron][None, :, None]).all(1)
        ((expert, index),) = np.argwhere(same)
        places.append((int(expert), int(index)))
    names = [f"experts of {asked.neurons}", "ranks (random: means)", "probabilities", "largest"]
    rows = [
        row
        for name, model in models.items()
        for row in rows_of(name, model, asked.layer, places, asked.draws)
    ]
    text = markdown_table(["router", *names], rows)
    print(text)
    if asked.out:
        pathlib.Path(asked.out).write_text(text + "\n")


if __name__ == "__main__":
    main()
