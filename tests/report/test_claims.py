"""Verdicts on the papers' statements, from directories written by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas
import pytest
from builders import FLAT, RISING, claim, pretrain, training

from ffn_heterogeneity.papers import p32
from ffn_heterogeneity.report.stats import FAILS, HOLDS, OPEN, interval, verdict

BELOW, NLL = "zeta_L is below the baseline's at every alpha", "the validation NLL is below"
GROWS, PUBLISHED = "zeta_L grows from checkpoint to checkpoint", "zeta_L of a published model"


@pytest.mark.parametrize(
    ("change", "statement", "verdict"),
    [
        ({"curve": {20: (0.1, 3.9)}}, NLL, "holds"),
        ({"curve": {20: (0.1, 4.001)}}, NLL, "does not hold"),
        ({"curve": {20: (12.0, 3.9)}}, BELOW, "open"),
        ({"curve": {20: (0.0, 3.9)}}, "zeta_L is 0", "holds"),
        ({"curve": {20: (0.006, 3.9)}}, "zeta_L is 0", "does not hold"),
        ({"curve": {20: (0.006, 3.9)}, "alpha": 0.3}, "zeta_L is 0", "open"),
        ({"curve": {20: ("nan", "nan")}}, NLL, "open"),
        ({"curve": {20: ("nan", "nan")}}, "zeta_L is 0", "open"),
        ({"curve": FLAT, "batch_size": 8}, NLL, "open"),
        ({"curve": FLAT, "steps": 10}, NLL, "open"),
    ],
)
def test_one_seed_and_what_cannot_be_told(report, tmp_path, change, statement, verdict):
    base = pretrain(tmp_path / "base", 0.0, RISING)
    other = pretrain(tmp_path / "jreg", 1.0, **change)
    assert claim(report("jreg", [base, other]), statement)[1] == verdict


def test_every_seed_has_to_lie_within(report, tmp_path):
    runs = [pretrain(tmp_path / "base", 0.0, RISING)]
    for seed, zeta in enumerate((0.0, 0.5)):
        runs.append(pretrain(tmp_path / f"j{seed}", 1.0, {20: (zeta, 3.9)}, seed=seed))
    measured, verdict = claim(report("jreg", runs), "zeta_L is 0")
    assert measured == "lambda 1, alpha 1 0.25 [0, 0.5] range n=2" and verdict == "does not hold"


def test_several_seeds_decide_by_their_interval():
    values = [1.0, 2.0, 4.0]
    half = 4.302653 * np.std(values, ddof=1) / 3**0.5
    mean, low, high, *how = interval(values)
    assert (mean, *how) == (np.mean(values), 3, "t")
    np.testing.assert_allclose((low, high), (mean - half, mean + half), 1e-6)
    assert interval([3.0]) == 3.0 and interval([]) is None
    assert [verdict(interval([1.0, 1.1, 0.9]), x) for x in (1, -1)] == ["holds", "does not hold"]
    for values, sign in (([1.0, -0.1, 0.9], 1), ([0.0, 0.0], -1), ([], 1), ([math.nan, 1.0], 1)):
        assert verdict(interval(values), sign) == "open"


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [
        ({0: 9.0, 4: 1.0, 8: 2.0, 12: 3.0, 16: 4.0, 20: 5.0}, "holds"),
        ({0: 0.0, 4: 1.0, 8: 2.0, 12: 1.5, 16: 4.0, 20: 5.0}, "does not hold (step 12)"),
        ({4: 1.0, 7: 0.5, 8: 2.0, 12: 3.0, 16: 4.0, 20: 5.0}, "holds"),  # 7: no fifth
        ({0: 0.0, 7: 1.0, 20: 0.5}, "does not hold"),
        ({0: 0.0, 7: 1.0, 20: 1.0}, "does not hold"),
        ({0: 0.0, 20: 1.0}, "open"),
    ],
)
def test_growth_is_from_each_fifth_to_the_next(report, tmp_path, curve, verdict):
    run = pretrain(tmp_path / "base", 0.0, {step: (zeta, 4.0) for step, zeta in curve.items()})
    rows = report("jreg", [run])["claims"]
    assert next(r["verdict"] for r in rows if r["statement"] == GROWS) == verdict


def test_mstd_against_gini_is_computed(report, tmp_path):
    runs, ends = [], [("mstd", 1.0, 5.9, 2.0), ("gini", 1.0, 5.8, 2.1), ("mstd", 10.0, 5.0, 2.0)]
    for variant, alpha, *end in (*ends, ("gini", 10.0, 5.5, 2.1), ("mstd", 100.0, 5.0, 9.0)):
        curve = {0: (6.0, 3.0), 20: end}
        runs.append(training(tmp_path / f"{variant}{alpha}", alpha, curve, variant=variant))
    tables = report("nucl", runs)
    measured, verdict = claim(tables, "mstd's entropy")
    assert measured == "alpha = 1 0.1; alpha = 10 -0.5" and verdict == "does not hold (alpha = 1)"
    assert claim(tables, "mstd's text loss")[1] == "holds"


def test_claims_about_depth_are_judged_seed_by_seed():
    """The mean says which depth does best; the paired interval whether it is better."""

    def scores(*seeds):
        return pandas.DataFrame(seeds, columns=[1, 2, 3]).astype(float)

    depths = {
        ("m", "rises"): scores([1, 5, 9], [2, 6.1, 10], [1, 5, 9.1]),
        ("m", "sinks"): scores([1, 9, 5], [2, 10.1, 6], [1, 9, 5.1]),
        ("m", "unclear"): scores([1, 9, 5], [2, 4, 6], [1, 5, 5.1]),
        ("m", "one seed"): scores([1, 9, 5]),
    }
    rising, fewer = p32.rising_with_depth(depths), p32.overthinking(depths)
    assert rising.verdict.tolist() == [HOLDS, FAILS, OPEN, FAILS]
    assert fewer.verdict.tolist() == [FAILS, HOLDS, OPEN, HOLDS]
    assert rising.value.tolist() == ["best at 3 of 3", *["best at 2 of 3"] * 3]
    mean, low, high, n, _ = fewer.value[2]
    assert (mean, n) == (pytest.approx(19 / 30), 3) and low < 0 < high
