"""What Srinivas & Babu's greedy selection costs, measured: seconds a layer, and how they grow."""

from __future__ import annotations

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
    config: ModelConfig,
    rounds: int = 1,
    ratio: float = 0.25,
    parts: Sequence[int] = (8, 4, 2, 1),
    seed: int = 0,
) -> dict:
    """Times the selection in one random layer of `config`, and in the first 1/8, 1/4, 1/2 of it.

    In turns with its floor, the products of all pairs of incoming vectors in float32 (2 m^2 p
    operations, p = 2 d_model in a gated FFN), in blocks. A table with every step's whole matrix
    would take count times m^2. Prints a table and returns its rows and, by kind of layer, the
    exponent of m in the seconds (least squares in logarithms).

    Args:
      ratio: of the neurons that go.
    """
    m = config.layers[0].ffn_width
    cases = [(kind, m // part) for kind in SPREADS for part in parts]
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {case: [] for case in cases}
    with tqdm(total=rounds * len(cases), desc="layers", disable=None, file=sys.stderr) as bar:
        for turn in range(rounds):
            for kind, width in cases:
                ffn = random_layer(config, width, SPREADS[kind], seed + turn)
                start = time.perf_counter()
                merges(ffn, int(ratio * width))
                middle = time.perf_counter()
                _all_products(incoming(ffn)[0])
                found = (middle - start, time.perf_counter() - middle)
                seconds[kind, width].append(found)
                bar.update()
    rows = []
    for (kind, width), found in seconds.items():
        selection, floor = np.median(found, axis=0)
        rows.append((kind, width, int(ratio * width), float(selection), float(floor)))
    print(f"a layer of {config.family}, d_model {config.d_model}, {rounds} rounds, medians")
    head = ("layer", "neurons", "removed", "selection, s", "all products, s", "ratio")
    print(markdown_table(head, [(*r[:3], f"{r[3]:.2f}", f"{r[4]:.2f}", f"{r[3] / r[4]:.1f}")
                                for r in rows]))  # fmt: skip
    exponents = {}
    for kind in SPREADS:
        sizes, times = np.array([(r[1], r[3]) for r in rows if r[0] == kind]).T
        exponents[kind] = float(np.polyfit(np.log(sizes), np.log(times), 1)[0])
        print(f"{kind}: seconds grow with neurons to the power {exponents[kind]:.2f}")
    names = ("layer", "neurons", "removed", "selection_seconds", "products_seconds")
    return {"rows": [dict(zip(names, row, strict=True)) for row in rows], "exponents": exponents}


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
