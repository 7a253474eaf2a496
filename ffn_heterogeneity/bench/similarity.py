"""What Srinivas & Babu's greedy selection costs, measured: seconds a layer, and how they grow."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.report.tables import markdown_table
from ffn_heterogeneity.surgery.neighbours import BLOCK
from ffn_heterogeneity.surgery.similarity import merges
from ffn_heterogeneity.surgery.weights import blocks, incoming

# Of the incoming vectors' lengths, as exponents of e. Equal lengths make neighbours mutual and few;
# unequal ones make hubs (a short vector is nearest to most of the others), as real layers have.
SPREADS = {"equal lengths": 0.0, "hubs": 0.5}


def benchmark_similarity(
    config: ModelConfig, rounds: int = 1, parts: Sequence[int] = (8, 4, 2, 1)
) -> dict:
    """Times the selection of a quarter of the neurons in one random layer of `config`, and in the
    first 1/8, 1/4, 1/2 of it.

    In turns with its floor, the products of all pairs of incoming vectors in float32 (2 m^2 p
    operations, p = 2 d_model in a gated FFN), in blocks. A table with every step's whole matrix
    would take count times m^2. Prints a table and returns its rows and, by kind of layer, the
    exponent of m in the seconds (least squares in logarithms).
    """
    m = config.layers[0].ffn_width
    cases = list(itertools.product(SPREADS, parts))
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    turns = list(itertools.product(range(rounds), cases))
    for turn, (kind, part) in tqdm(turns, desc="layers", disable=None, file=sys.stderr):
        seconds[kind, part].append(_turn(config, m // part, SPREADS[kind], seed=turn))
    rows = []
    for kind, part in cases:
        selection, products = np.median(seconds[kind, part], axis=0).tolist()
        rows.append(
            {"layer": kind, "neurons": m // part, "removed": m // part // 4,
             "selection_seconds": selection, "products_seconds": products}
        )  # fmt: skip
    print(f"a layer of {config.family}, d_model {config.d_model}, {rounds} rounds, medians")
    cells = [[f"{x:.2f}" if isinstance(x, float) else x for x in row.values()] for row in rows]
    print(markdown_table(list(rows[0]), cells))
    exponents = {}
    for kind in SPREADS:
        points = [(r["neurons"], r["selection_seconds"]) for r in rows if r["layer"] == kind]
        exponents[kind] = float(np.polyfit(*np.log(points).T, 1)[0])
        print(f"{kind}: seconds grow with neurons to the power {exponents[kind]:.2f}")
    return {"rows": rows, "exponents": exponents}


def _turn(config: ModelConfig, width: int, spread: float, seed: int) -> tuple[float, float]:
    """Seconds of (the selection, the products of all pairs) in one random layer."""
    ffn = random_layer(config, width, spread, seed)
    start = time.perf_counter()
    merges(ffn, width // 4)
    middle = time.perf_counter()
    _all_products(incoming(ffn)[0])
    return middle - start, time.perf_counter() - middle


def random_layer(config: ModelConfig, width: int, spread: float, seed: int) -> dict:
    """A gated FFN of Gaussian float32 weights; neuron j's incoming ones times exp(spread z_j)."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return 0.02 * rng.standard_normal(shape, dtype=np.float32)

    lengths = np.exp(spread * rng.standard_normal(width, dtype=np.float32))
    d = config.d_model
    return {
        "gate": {"kernel": draw(d, width) * lengths},
        "up": {"kernel": draw(d, width) * lengths},
        "down": {"kernel": draw(width, d)},
    }


def _all_products(vectors: np.ndarray) -> None:
    m = len(vectors)
    for part in blocks(m, m, BLOCK):
        np.max(vectors[part] @ vectors.T)
