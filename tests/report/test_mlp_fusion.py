"""The report on MLP Fusion: jobs of stages, kernels, claims on its numbers and on ours."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders import claim, write_run
from scipy.stats import ttest_rel

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.mlp_fusion import count_of

TABLES = printed("mlp_fusion")["tables"]
# Accuracies of seeds 0, 1, 2.
WHOLE, FUSION, SQRT = (0.90, 0.91, 0.92), (0.85, 0.87, 0.86), (0.80, 0.84, 0.81)
HERE = ("here: small, epochs 3", "here: small, 75% of layers 2-5, epochs 3")
MASKS = {"kind": "surgery", "ratio": 0.75, "layers": "2-5"}
TUNE = {"kind": "train", "epochs": 1.0, "losses": {"layerwise": {"states": "block"}}}


def written(path, results):
    path.mkdir()
    (path / "results.json").write_text(json.dumps(results))


def job(path, score, seed=0, task="sst2", rate=2e-5, **groups):
    """A run of configs/mlp_fusion.py: its config, and what its last stage wrote."""
    base = f"configs/p32_glue.py:models/small,{task}"
    stages = [*groups, "finetune"]
    values = {"stages": stages, "seed": seed, "finetune": {"base": base, "kind": "train"}}
    write_run(path, {"model": "models/small", **values, **groups})
    if "compress" in groups:
        left = round(1536 * (1 - groups["compress"]["ratio"]))
        results = {"ffn_widths_after": [1536, left], "ffn_widths_before": [1536, 1536]}
        written(path / "00_compress", results)
    metric = {"stsb": "spearman"}.get(task, "accuracy")
    config = {"objective": "labels", "model": "x/00_compress/model", "data": {"task": task}}
    config |= {"optimizer": {"learning_rate": rate}, "epochs": 3.0, "batch_size": 32, "seed": seed}
    config["truncate"] = {"blocks": groups.get("finetune_blocks", 0)}
    best = {"step": 20, "metric": f"validation/{metric}", "value": score}
    results = {"best": best, "parameters": 99, "rows": {"train": 6920, "validation": 872}}
    write_run(path / f"{len(stages) - 1:02d}_finetune", config, results)
    return str(path)


def compress(method, ratio=0.75, layers="2-5"):
    return {"kind": "surgery", "method": method, "ratio": ratio, "layers": layers, "n_init": 30}


@pytest.fixture
def tables(report, tmp_path):
    runs = []
    for seed in range(3):
        own = (tmp_path / f"{name}{seed}" for name in ("whole", "fusion", "sqrt"))
        runs.append(job(next(own), WHOLE[seed], seed))
        runs.append(job(next(own), FUSION[seed], seed, rate=5e-5, compress=compress("fusion")))
        runs.append(job(next(own), SQRT[seed], seed, compress=compress("sqrt")))
    runs.append(job(tmp_path / "lth", 0.83, mask_1=MASKS, mask_3=MASKS))
    runs.append(job(tmp_path / "tuned", 0.88, compress=compress("fusion"), tune=TUNE))
    runs.append(job(tmp_path / "narrow", 0.70, compress=compress("fusion", 0.5)))
    runs.append(job(tmp_path / "few", 0.89, compress=compress("fusion", layers="4-5")))
    errors = {"fusion": 4.0, "merged": 9.0, "svd": 3.0, "sketch": 8.0}
    for seed in (0, 1):
        found = {name: {"ntk_error": x + seed} for name, x in errors.items()}
        config = {"analysis": "ntk", "model": "models/small", "layer": 0, "ratio": 0.75}
        config |= {"seed": seed, "data": {"task": "sst2", "path": "rows.jsonl"}}
        results = {"errors": found, "kernel_norm": 10.0 + seed}
        runs.append(write_run(tmp_path / "ntk" / f"seed_{seed}", config, results))
    return report("mlp_fusion", runs)


def test_methods_are_paired_over_seeds(tables):
    """Whatever their learning rates; each against fusion and the whole model."""
    rows = {r["method"]: r for r in tables["paired"] if r["from"] in HERE}
    sqrt = rows["Clustering"]
    assert float(sqrt["score"]) == pytest.approx(100 * np.mean(SQRT))
    assert float(sqrt["Δ vs fusion"]) == pytest.approx(100 * np.mean(np.subtract(SQRT, FUSION)))
    assert float(sqrt["Δ vs whole"]) == pytest.approx(100 * np.mean(np.subtract(SQRT, WHOLE)))
    low, high = 100 * np.array(ttest_rel(SQRT, FUSION).confidence_interval())
    assert f"[{low:.4g}, {high:.4g}] t n=3" in tables["text"]
    assert float(rows["LTH"]["Δ vs whole"]) == pytest.approx(-7)
    assert float(rows["+Task-specific Tuning"]["Δ vs fusion"]) == pytest.approx(3)


def test_claims(tables):
    measured, verdict = claim(tables, "fusion keeps the kernel closer", "the paper's RoBERTa")
    assert verdict == "holds" and "SVD +1,596.79, z 14.6" in measured
    ours = claim(tables, "fusion keeps the kernel closer", "small")
    assert ours[1] == "does not hold (svd)"
    measured, verdict = claim(tables, "fusion is above the other methods", "the paper's RoBERTa")
    assert verdict == "cannot be told (Clustering)"
    assert "LTH -0.32, z 2.0" in measured and "Clustering -0.22, z 1.3" in measured
    assert claim(tables, "layer-wise tuning improves fusion", "sst2")[1] == "holds"


@pytest.mark.parametrize(
    ("layers", "count"), [("2-5", 4), ("0,3", 2), ("0-1,5", 3), ("top", None), ("nan", None)]
)
def test_how_many_layers(layers, count):
    assert count_of(layers) == count
