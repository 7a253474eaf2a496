"""The report on P-32: tables of runs on labelled rows, claims on its numbers and on ours."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from builders import claim, write_run
from scipy.stats import linregress, ttest_rel

from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.p32 import gains

TABLES = printed("p32")["tables"]
# Scores of seeds 0, 1, 2 and raw lambdas of three blocks.
LAST, MEAN, P32 = (0.80, 0.82, 0.81), (0.60, 0.61, 0.65), (0.85, 0.80, 0.85)
LAMBDA = [0.0, 0.5, 2.0]


def trained(path, score, seed=0, pooling="last", rate=None, task="mrpc", **settings):
    """A run of configs/p32_glue.py; `settings`: blocks, fraction."""
    metric = {"stsb": "spearman"}.get(task, "f1")
    config = {"objective": "labels", "model": "models/small", "pooling": pooling}
    config |= {"final_norm": "pooled", "truncate": {"blocks": settings.get("blocks", 0)}}
    config |= {"data": {"task": task, "fraction": settings.get("fraction", 1.0)}, "prepare": []}
    config |= {"optimizer": {"learning_rate": 2e-5}, "epochs": 3.0, "batch_size": 32, "seed": seed}
    loss = "regression" if task == "stsb" else "classification"
    config |= {"losses": {loss: {"weight": 1.0}}, "lambda_rate": rate}
    best = {"step": 20, "metric": f"validation/{metric}", "value": score}
    results = {"best": best, "parameters": 99, "rows": {"train": 3668}, "test/n": 50}
    results |= {"tokens_a_row": {"train": 53.5}, f"test/{metric}": score - 0.1}
    results |= {f"test/{metric}_low": score - 0.2, f"test/{metric}_high": score}
    if pooling == "average":  # as the head leaves them
        results |= {"lambda": [0.0] * 3, "depth_weights": [1 / 3] * 3}
    if pooling == "p32":
        weights = np.exp(LAMBDA) / np.exp(LAMBDA).sum()
        results |= {"lambda": LAMBDA, "depth_weights": weights.tolist()}
    return write_run(path, config, results)


@pytest.fixture
def tables(report, tmp_path):
    arms = {"last": LAST, "average": MEAN, "p32": P32}
    runs, rates = [], {"p32": 1e-2}
    for (name, scores), seed in product(arms.items(), range(3)):
        path = tmp_path / f"{name}{seed}"
        runs.append(trained(path, scores[seed], seed, name, rates.get(name)))
    runs += [trained(tmp_path / f"n{n}", 0.7 + n / 10, blocks=n) for n in (1, 2)]
    for (pooling, share), seed in product((("last", 0.7), ("p32", 0.78)), (0, 1)):
        rate = rates.get(pooling)
        name = f"{pooling}_{share}_{seed}"
        runs.append(trained(tmp_path / name, share, seed, pooling, rate, "stsb", fraction=0.2))
        full = 0.80 + 0.01 * seed + (0.02 if rate else 0.0)
        runs.append(trained(tmp_path / f"f_{name}", full, seed, pooling, rate, "stsb"))
    return report("p32", runs)


def test_poolings_are_paired_over_seeds(tables):
    rows = {(r["task"], r["method"]): r for r in tables["paired"]}
    ours = rows["mrpc", "P-32"]
    assert float(ours["score"]) == pytest.approx(100 * np.mean(P32))
    assert float(ours["Δ vs Baseline"]) == pytest.approx(100 * np.mean(np.subtract(P32, LAST)))
    assert float(ours["Δ vs Avg.Pool"]) == pytest.approx(100 * np.mean(np.subtract(P32, MEAN)))
    low, high = 100 * np.array(ttest_rel(P32, LAST).confidence_interval())
    mean = float(ours["Δ vs Baseline"])
    assert f"{mean:.4g} [{low:.4g}, {high:.4g}] t n=3" in tables["text"]
    weights = np.exp(LAMBDA) / np.exp(LAMBDA).sum()
    assert float(ours["max |w - 1/L|"]) == pytest.approx(np.abs(weights - 1 / 3).max())
    assert (ours["peak layer"], ours["majority"]) == ("3.0", "81.2227")
    assert rows["mrpc", "Avg.Pool"]["peak layer"] == rows["stsb", "P-32"]["majority"] == "-"
    (test,) = [r for r in tables["test_sets"] if (r["task"], r["method"]) == ("mrpc", "P-32")]
    assert float(test["score"]) == pytest.approx(100 * np.mean(P32) - 10)
    assert float(test["Δ vs Baseline"]) == pytest.approx(float(ours["Δ vs Baseline"]))


def test_claims_on_ours(tables):
    assert claim(tables, "P-32 is above the baseline", "small")[1] == "cannot be told (mrpc)"
    assert claim(tables, "average pooling is above", "small")[1] == "does not hold"
    assert claim(tables, "P-32 is above average", "small")[1] == "holds"
    gain = claim(tables, "the gain is larger on a fifth", "small")
    assert gain == ("stsb 6 [6, 6] t n=2", "holds")
    increase = claim(tables, "scores strictly increase", "small")
    assert increase == ("mrpc best at 2 of 3", "does not hold")
    assert claim(tables, "fewer blocks than all", "small")[1] == "holds"
    measured, verdict = claim(tables, "lambda is highest", "small")
    assert measured.startswith("mrpc, seed 0 3; mrpc, seed 1 3") and verdict.startswith("does not")


def test_claims_on_the_papers_numbers(tables):
    """The claims of sections 4.1 to 6, by the paper's own tables."""
    models = {"holds": ("StableCode", "7B"), "does not hold": ("BERT", "13B")}
    for told, names in models.items():
        assert {claim(tables, "P-32 gains 1.5", name)[1] for name in names} == {told}
    assert claim(tables, "scores strictly increase", "BERT")[1] == "does not hold (rte)"
    verdict = claim(tables, "fewer blocks than all", "LLAMA-2-7B")[1]
    assert verdict == "does not hold (mrpc; qqp)"
    assert claim(tables, "average pooling is above", "paper") == ("mean 0.6", "holds")


def test_the_regressions_of_section_5_4_hold_without_mnli_alone(tables):
    """The printed slope, R squared and p, from the paper's own Tables 2 and 5."""
    sizes = {row[0]: row[1] for row in TABLES["table_5"]["rows"]}
    gain = gains().loc["LLAMA-2-7B"]
    tasks = [task for task in sizes if task != "mnli"]
    line = linregress([sizes[x] for x in tasks], [gain[x] for x in tasks])
    assert line.slope == pytest.approx(-1.428e-5, rel=5e-4)
    assert (round(line.rvalue**2, 3), round(line.pvalue, 3)) == (0.644, 0.030)
    measured, verdict = claim(tables, "the gain falls with the number")
    assert "without mnli slope -1.428e-05, R2 0.644, p 0.030" in measured
    assert "all eight slope -2.739e-06, R2 0.033, p 0.669" in measured
    assert verdict == "does not hold (all eight)"
    measured, verdict = claim(tables, "the gain does not depend on the input length")
    assert "slope 0.04253, R2 0.060, p 0.596" in measured and "slope 0.02983, R2 0.023" in measured
    assert verdict == "holds"
