"""Srinivas & Babu's selection: every step equals the minimum of the whole matrix, recomputed."""

import time

import ml_dtypes
import numpy as np
import pytest
from tiny_runs import refused

from ffn_heterogeneity.surgery import neighbours, similarity
from ffn_heterogeneity.surgery.neighbours import Neighbours, duplicate_groups
from ffn_heterogeneity.surgery.weights import incoming


def layer_of(rng, m: int, n: int, *, plain=False, bias=False, draw=None, dtype=np.float64) -> dict:
    draw = draw or (lambda shape: rng.normal(size=shape))
    ffn = {
        "gate": {"kernel": draw((n, m)), "bias": draw((m,))},
        "up": {"kernel": draw((n, m)), "bias": draw((m,))},
        "down": {"kernel": draw((m, n)), "bias": draw((n,))},
    }
    if plain:
        del ffn["gate"]
    if not bias:
        for leaves in ffn.values():
            del leaves["bias"]
    return {k: {name: x.astype(dtype) for name, x in v.items()} for k, v in ffn.items()}


def vectors_of(ffn: dict) -> np.ndarray:
    """Incoming vectors, from the definition."""
    rows = []
    for name in ("gate", "up"):
        if name in ffn:
            rows.append(ffn[name]["kernel"].astype(np.float64))
            if "bias" in ffn[name]:
                rows.append(ffn[name]["bias"].astype(np.float64)[None])
    return np.concatenate(rows).T


def brute_force(ffn: dict, count: int) -> list[tuple[int, int]]:
    """The first minimum of s[i, j], computed again at each step."""
    e, w = vectors_of(ffn), ffn["down"]["kernel"].astype(np.float64)
    if "neuron_scale" in ffn:
        w = w * ffn["neuron_scale"].astype(np.float64)[:, None]
    squared = ((e[:, None] - e[None]) ** 2).sum(axis=-1)
    alive, steps = np.ones(len(e), bool), []
    for _ in range(count):
        s = squared * (w**2).mean(axis=1)[None, :]
        s[~alive], s[:, ~alive] = np.inf, np.inf
        np.fill_diagonal(s, np.inf)
        i, j = np.unravel_index(s.argmin(), s.shape)
        w[i] += w[j]
        alive[j] = False
        steps.append((int(i), int(j)))
    return steps


def found(ffn: dict, count: int) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in similarity.merges(ffn, count).tolist()]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_every_step_is_that_of_brute_force(plain, bias, dtype):
    rng = np.random.default_rng(0)
    for m, n in ((2, 3), (9, 4), (40, 6), (90, 5)):
        ffn = layer_of(rng, m, n, plain=plain, bias=bias, dtype=dtype)
        assert found(ffn, m - 1) == brute_force(ffn, m - 1)


@pytest.mark.parametrize("plain", [False, True])
def test_ties_duplicates_and_zero_rows(plain):
    """Small integers: sums are exact, so equal saliencies are equal."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        m, n = rng.integers(2, 12), rng.integers(1, 4)
        width = rng.integers(1, 3)
        draw = lambda shape, width=width: rng.integers(-width, width + 1, shape)  # noqa: E731
        ffn = layer_of(rng, m, n, plain=plain, bias=True, draw=draw, dtype=np.float32)
        for leaf in (ffn["up"]["kernel"], ffn["up"]["bias"]):
            leaf[leaf == 0] *= rng.choice([-1, 1])  # -0.0 equals 0.0
        ffn["down"]["kernel"][rng.random(m) < 0.3] = 0
        assert found(ffn, m - 1) == brute_force(ffn, m - 1)


def test_near_duplicates_are_told_apart_exactly():
    """Clusters that are closer than a float32 matrix product can distinguish."""
    rng = np.random.default_rng(2)
    centres = rng.normal(size=(3, 20))
    points = centres[rng.integers(0, 3, 70)] + 1e-6 * rng.normal(size=(70, 20))
    points = (points / 8).astype(np.float32)
    exact = ((points[:, None].astype(np.float64) - points[None]) ** 2).sum(axis=-1)
    np.fill_diagonal(exact, np.inf)
    for remembered in (1, 4, 32):
        search = Neighbours(points, np.ones(70, bool), remembered)
        matrix, alive = exact.copy(), np.arange(70)
        for gone in rng.permutation(70)[:60]:
            index, distance = search.nearest(alive)
            np.testing.assert_array_equal(index, matrix[alive].argmin(axis=1))
            np.testing.assert_allclose(distance, matrix[alive].min(axis=1), rtol=1e-12)
            search.remove(gone)
            matrix[:, gone] = np.inf
            alive = alive[alive != gone]


def test_a_real_layer_equals_the_definition(smollm2_gguf):
    """Weights with hubs: the first 600 neurons of a layer, down to 200."""
    from ffn_heterogeneity.io.gguf.file import open_gguf

    tensors = open_gguf(smollm2_gguf).tensors
    kernels = {k: tensors[f"blk.5.ffn_{k}.weight"].dequantize().T for k in ("gate", "up", "down")}
    kernels = {k: x[:600] if k == "down" else x[:, :600] for k, x in kernels.items()}
    ffn = {name: {"kernel": kernel} for name, kernel in kernels.items()}
    e, w = vectors_of(ffn), ffn["down"]["kernel"].astype(np.float64)
    squared = np.stack([((e - row) ** 2).sum(axis=1) for row in e])
    np.fill_diagonal(squared, np.inf)
    assert np.bincount(squared.argmin(axis=0)).max() > 100, "one neuron is nearest to many"
    steps = []
    for _ in range(400):
        s = squared * (w**2).mean(axis=1)[None, :]
        i, j = np.unravel_index(s.argmin(), s.shape)
        w[i] += w[j]
        w[j] = 1
        squared[j], squared[:, j] = np.inf, np.inf
        steps.append((int(i), int(j)))
    assert found(ffn, 400) == steps
    assert len({i for i, _ in steps}) < len(steps), "some survivor takes several"


def test_the_saliency_uses_weights_as_the_forward_pass_does():
    rng = np.random.default_rng(3)
    ffn = layer_of(rng, 20, 5)
    scaled = {**ffn, "neuron_scale": rng.uniform(-2, 2, 20)}
    assert found(scaled, 15) == brute_force(scaled, 15) != brute_force(ffn, 15)
    ffn = layer_of(rng, 20, 5, dtype=np.float32)
    mask = (rng.random((20, 5)) < 0.5).astype(np.float32)
    masked = {**ffn, "down": {**ffn["down"], "mask": mask}}
    gone = {**ffn, "down": {"kernel": ffn["down"]["kernel"] * mask}}
    assert found(masked, 15) == brute_force(gone, 15) != brute_force(ffn, 15)


@pytest.mark.parametrize("power", [-500, -60, 60, 400])
def test_scale_does_not_matter(power):
    """Squares of such weights underflow or overflow."""
    ffn = layer_of(np.random.default_rng(4), 30, 5)
    tiny = {k: {"kernel": np.ldexp(v["kernel"], power)} for k, v in ffn.items()}
    assert found(tiny, 20) == found(ffn, 20)


def test_incoming_vectors_and_their_order():
    ffn = layer_of(np.random.default_rng(5), 7, 3, bias=True)
    vectors, gate = incoming(ffn)
    assert gate == 4 and vectors.shape == (7, 8) and 0.5 <= np.abs(vectors).max() < 1
    ratio = vectors_of(ffn) / vectors
    assert (ratio == ratio[0, 0]).all() and np.log2(ratio[0, 0]) % 1 == 0
    for layout in ("C", "F"):
        other = {k: {n: np.asarray(x, order=layout) for n, x in v.items()} for k, v in ffn.items()}
        np.testing.assert_array_equal(incoming(other)[0], vectors)


def test_groups_of_duplicates():
    points = np.array([[0.0, 1], [2, 3], [-0.0, 1], [2, 3], [5, 5], [0, 1]], np.float32)
    assert duplicate_groups(points).tolist() == [0, 1, 0, 1, 4, 0]


def test_many_duplicates_cost_no_distances(monkeypatch):
    """Padding: neurons of zeros, by the hundred."""
    ffn = layer_of(np.random.default_rng(6), 300, 4, dtype=np.float32)
    for name in ("gate", "up"):
        ffn[name]["kernel"][:, 100:] = 0
    ffn["down"]["kernel"][100:250] = 0
    monkeypatch.setattr(similarity, "Neighbours", None)
    steps = found(ffn, 199)
    # Neurons without effect come first; of other equal ones the lowest index stays.
    assert sorted(j for _, j in steps) == [*range(100, 250), *range(251, 300)]
    monkeypatch.undo()
    assert found(ffn, 199) == steps
    assert neighbours.REMEMBERED < 100


@pytest.mark.parametrize("leaf", ["gate", "up", "down"])
def test_non_finite_weights_are_named(leaf):
    ffn = layer_of(np.random.default_rng(7), 8, 3)
    ffn[leaf]["kernel"][1, 2] = np.nan
    refused(f"ffn/{leaf}/kernel.*row 1, column 2", similarity.merges, ffn, 2)
    ffn = layer_of(np.random.default_rng(7), 8, 3, bias=True)
    if leaf != "down":
        ffn[leaf]["bias"][2] = np.inf
        refused(f"ffn/{leaf}/bias", similarity.merges, ffn, 2)


@pytest.mark.parametrize("count", [-1, 8])
def test_something_stays(count):
    ffn = layer_of(np.random.default_rng(7), 8, 3)
    refused(r"number in \[0, 8\)", similarity.merges, ffn, count)
    assert similarity.merges(ffn, 0).shape == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.5], ids=["equal lengths", "hubs"])
def test_a_layer_of_gemma2_2b_takes_a_few_passes_over_its_pairs(spread):
    """9,216 neurons with incoming vectors of 4,608; a matrix per step would take 2,304 passes."""
    rng, m, d = np.random.default_rng(0), 9216, 2304
    gate, up = 0.02 * rng.standard_normal((2, d, m), dtype=np.float32)
    lengths = np.exp(spread * rng.standard_normal(m, dtype=np.float32))
    ffn = {"gate": {"kernel": gate * lengths}, "up": {"kernel": up * lengths}}
    ffn["down"] = {"kernel": np.zeros((m, d), np.float32)}
    start = time.perf_counter()
    similarity.merges(ffn, m // 4)
    middle = time.perf_counter()
    vectors = np.concatenate([ffn["gate"]["kernel"], ffn["up"]["kernel"]]).T
    for block in np.array_split(np.arange(m), 16):
        np.max(vectors[block] @ vectors.T)
    assert middle - start < 30 * (time.perf_counter() - middle)
