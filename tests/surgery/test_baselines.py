"""MLP Fusion's baselines: support points, SVD, pruning; counts, and further training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusing import KINDS, apart, block, compressed, fused, logits, model_of, output
from tiny_models import TEXT, save_tiny
from tiny_runs import small_run

import ffn_heterogeneity as fh
from ffn_heterogeneity.adapters import low_rank
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.families import count_parameters
from ffn_heterogeneity.models.feed_forward import ACTIVATIONS
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.entries import ENTRIES
from ffn_heterogeneity.surgery.fuse import METHODS
from ffn_heterogeneity.surgery.mmd import discrepancy, support_points
from ffn_heterogeneity.tree import flatten

# ---- support points


def test_the_discrepancy_is_its_formula():
    """Against float64 differences in numpy; means exclude a point's distance to itself."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(14, 6)), rng.normal(size=(5, 6))

    def distances(a, b):
        return np.sqrt(((a[:, None] - b) ** 2).sum(-1))

    both = np.concatenate([x, y])
    base = distances(both, both).sum() / (19 * 18) / 4

    def kernel(a, b):
        return np.mean(sum(np.exp(-distances(a, b) / (base * 2**i)) for i in range(5)))

    wanted = kernel(x, x) - 2 * kernel(x, y) + kernel(y, y)
    assert float(discrepancy(jnp.float32(x), jnp.float32(y))) == pytest.approx(wanted, rel=1e-4)


def test_support_points_begin_as_rows_and_the_discrepancy_falls():
    points = np.random.default_rng(0).normal(size=(60, 9)).astype(np.float32)
    start, first, same = support_points(points, 20, steps=0, seed=3)
    assert first == same and {tuple(row) for row in start} <= {tuple(row) for row in points}
    moved, again, last = support_points(points, 20, steps=100, seed=3)
    assert again == first and 0 < last < 0.95 * first and np.isfinite(moved).all()
    one, *_ = support_points(points, 20, steps=1, seed=3)
    # AdamW's first step is of the rate's length, against the gradient's sign, and decay.
    gradient = np.sign((start * (1 - 1e-4) - one) / 1e-2)
    for i, j in ((0, 0), (7, 4), (19, 8)):
        up, down = (jnp.asarray(start).at[i, j].add(e) for e in (0.02, -0.02))
        slope = float(discrepancy(points, up) - discrepancy(points, down))
        assert np.sign(slope) == gradient[i, j]


@KINDS
def test_all_neurons_as_support_points_are_the_same_block(gated):
    ffn, x = block(gated), np.random.default_rng(3).normal(size=(7, 5))
    same = compressed(ffn, "mmd", 12, steps=0)
    few = compressed(ffn, "mmd", 5, steps=0)
    assert (same["neuron_scale"] == 1).all() and (few["neuron_scale"] == np.float32(12 / 5)).all()
    with jax.enable_x64(True):
        act = ACTIVATIONS["gelu"]
        assert apart(output(ffn, x, act), output(same, x, act)) < 1e-6


# ---- baselines that keep every neuron


def down_kernels(model):
    layers = unstack(jax.tree.map(np.asarray, model.params))["layers"]
    return [effective_kernel(layer["ffn"]["down"]) for layer in layers], layers


def test_svd_is_the_closest_of_its_rank_and_keeps_so_many_parameters():
    """Against numpy's singular values; the factors train and define the model's function."""
    model = model_of()
    few, report = fused(model, method="svd", ratio=0.5)
    (before, _), (after, layers) = down_kernels(model), down_kernels(few)
    n, k = before[0].shape
    rank = int(0.5 * n * k / (n + k))
    for one, other in zip(before, after, strict=True):
        values = np.linalg.svd(one, compute_uv=False)
        assert np.linalg.norm(one - other) == pytest.approx(
            np.sqrt((values[rank:] ** 2).sum()), 1e-4
        )
    size = sum(x.size for leaves in layers[0]["ffn"].values() for x in leaves.values())
    assert size == 3 * rank * (n + k) and report["kept_share"] == size / (3 * n * k) <= 0.5
    assert report["ffn_widths_after"] == report["ffn_widths_before"]
    folded, _ = SURGERIES["fold"](few, {})
    np.testing.assert_allclose(logits(few), logits(folded), atol=1e-5)
    full, _ = fused(model, method="svd", ratio=0.0)
    ranks = {leaves["low_rank_a"].shape[1] for leaves in down_kernels(full)[1][0]["ffn"].values()}
    assert ranks == {n * k // (n + k)}, "as many parameters as before, not as many directions"
    exact = low_rank.of_kernel(before[0], min(n, k))
    np.testing.assert_allclose(exact["low_rank_a"] @ exact["low_rank_b"], before[0], atol=1e-5)


def test_a_mask_keeps_the_largest_weights_of_all_blocks():
    model = model_of()
    few, report = fused(model, method="unstructured", ratio=0.75, layers="1-2")
    _, layers = down_kernels(few)
    masked = [leaves for layer in layers[1:3] for leaves in layer["ffn"].values()]
    pairs = [(np.abs(leaves["kernel"]), leaves["mask"]) for leaves in masked]
    remaining = np.concatenate([kernel[mask == 1] for kernel, mask in pairs])
    gone = np.concatenate([kernel[mask == 0] for kernel, mask in pairs])
    assert remaining.min() > gone.max() and len(remaining) == 0.25 * (len(remaining) + len(gone))
    assert report["kept_share"] == 0.25 and "mask" not in layers[0]["ffn"]["up"]
    assert report["parameters_after"] == report["parameters_before"] - len(gone)


def test_structured_pruning_takes_whole_neurons():
    """The smallest sums of sizes are removed, as in numpy; the rest is equal bit for bit."""
    ffn = block(gated=True, dtype=np.float32)
    few = compressed(ffn, "structured", 7)
    sums = sum(np.abs(ffn[x]["kernel"]).sum(0) + np.abs(ffn[x]["bias"]) for x in ("gate", "up"))
    survivors = np.sort(np.argsort(-(sums + np.abs(ffn["down"]["kernel"]).sum(1)))[:7])
    np.testing.assert_array_equal(few["gate"]["kernel"], ffn["gate"]["kernel"][:, survivors])
    np.testing.assert_array_equal(few["down"]["kernel"], ffn["down"]["kernel"][survivors])


@pytest.mark.parametrize("method", sorted([*METHODS, *ENTRIES]))
def test_what_is_counted_is_what_is_kept(method):
    model = model_of()
    few, report = fused(model, method=method, ratio=0.5, steps=1)
    assert report["kept_share"] <= 0.5 + 1e-9
    assert report["parameters_before"] == count_parameters(model.config)["total"]
    if method in METHODS:
        assert report["parameters_after"] == count_parameters(few.config)["total"]
    assert np.isfinite(logits(few)).all()


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize("method", ["fusion", "mmd", "svd", "unstructured", "ntk_sap"])
def test_what_is_compressed_trains_on_and_p_and_masks_stay(method, tmp_path):
    """Training from the written directory, as another run reads it."""
    (tmp_path / "text.txt").write_text(TEXT)
    model = save_tiny(tmp_path / "tiny")
    fh.run("surgery", "fuse", tmp_path / "few", {"model": str(model), "method": method, "steps": 1})
    few = tmp_path / "few" / "model"
    train = small_run(tmp_path / "text.txt", dropout=0.1)
    train = {key.replace("__", "."): value for key, value in train.items()}
    fh.run("train", f"nucl_finetune:{few},text", tmp_path / "run", train)
    made = (load_model(str(path)) for path in (few, tmp_path / "run" / "model"))
    before, after = (flatten(unstack(model.params)) for model in made)
    assert before.keys() == after.keys()
    still = {path.split("/")[-1] for path in before if np.array_equal(before[path], after[path])}
    fixed = {
        "fusion": "neuron_scale",
        "mmd": "neuron_scale",
        "unstructured": "mask",
        "ntk_sap": "mask",
    }
    assert still == ({fixed[method]} if method in fixed else set())
