"""The report on massive weights: attacks, the analysis, removals that spare neurons."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from builders import adapted, attack, claim, lines, massive, removal
from scipy.stats import ttest_1samp
from tiny_models import REPOSITORY

import ffn_heterogeneity as fh
from ffn_heterogeneity import papers
from ffn_heterogeneity.report import stats
from ffn_heterogeneity.report.frame import plain
from ffn_heterogeneity.report.paper import with_evaluations, write_paper
from ffn_heterogeneity.report.stats import student

STUDY = str(REPOSITORY / "docs/studies/massive_removal.py")
NUMBERS = ("wikitext", "c4", "pg19", "perplexity_mean", "arc_easy", "arc_challenge", "boolq")
NUMBERS += ("piqa", "winogrande", "mean")


def test_attacks(report, tmp_path):
    right, wrong = [1, 1, 1, 0, 1, 1], [0, 1, 0, 0, 1, 0]
    runs = [
        attack(tmp_path / "without_tasks", "zero", 0, 20.0),
        attack(tmp_path / "none", "zero", 0, 20.0, answers=right),
        attack(tmp_path / "zero", "zero", 5, 90.0, windows=(4.5, 4.9), answers=wrong),
        attack(tmp_path / "retain", "retain", 5, 30.0, windows=(3.4, 3.5)),
        attack(tmp_path / "c4", "zero", 5, 120.0, windows=(4.7, 4.8), text="data/c4/a.txt"),
        attack(tmp_path / "three", "zero", 3, 80.0, windows=(4.4, 4.3)),
    ]
    tables = report("massive_weights", runs)
    ours = [row for row in tables["table_1"] if row["from"] != "paper"]
    rows = {row["Attack"]: row for row in ours if row["Models"] == "small"}
    assert rows["-"]["WikiText"] == "20.0" and float(rows["-"]["PIQA"]) == pytest.approx(500 / 6)
    assert (rows["top-5 zeroing"]["WikiText"], rows["top-5 zeroing"]["C4"]) == ("90.0", "120.0")
    assert rows["top-5 zeroing"]["Avg. (perplexity)"] == "-"
    ours = {(r["attack"], r["k"], r["text"]): r for r in tables["attacks"]}
    zeroed = ours["zero", "5", "wikitext"]
    assert float(zeroed["Δ NLL vs unattacked"]) == pytest.approx((1.5 + 1.7) / 2)
    assert float(zeroed["Δ PIQA vs unattacked"]) == pytest.approx(-50)
    assert ours["zero", "5", "c4"]["Δ NLL vs unattacked"] == "-"
    assert "bootstrap n=2" in tables["text"] and "bootstrap n=6" in tables["text"]
    points = lines(tables, "perplexity_by_k")
    assert points["small", "zero, wikitext, windows of 512", "-"] == [(0, 20), (3, 80), (5, 90)]
    assert claim(tables, "top-5 zeroing does more harm")[1] == "holds"
    assert claim(tables, "zeroing three already does harm")[1] == "holds"


def test_what_labels_do_not_tell_has_rows_of_its_own(report, tmp_path):
    """Two layers attacked alike; two texts calibrate one rule."""
    texts = [f"data/{name}/train.txt" for name in ("wikitext2", "c4")]
    runs = [attack(tmp_path / f"a{x}", "zero", 5, 90.0 + x, layer=x) for x in (1, 2)]
    for i, text in enumerate(texts):
        own = {"criterion": "mean_state", "calibration": text, "calibration_tokens": 8192}
        runs.append(removal(tmp_path / f"r{i}", 20.0 + i, **own))
        (tmp_path / f"r{i}/results.json").write_text(json.dumps({"perplexity": 20.0, "nll": i}))
    tables = report("massive_weights", runs)
    rows = {row["from"]: row["perplexity"] for row in tables["attacks"]}
    end = ", windows of 512"
    assert rows == {f"here, layer 1{end}": "91.0", f"here, layer 2{end}": "92.0"}
    methods = {row["method"] for row in report(STUDY, runs, "study")["removal"]}
    assert methods == {f"mean_state, on {x}, 8192 tokens" for x in ("wikitext", "c4")}


def test_the_analysis_against_table_7(report, tmp_path):
    runs = [
        massive(tmp_path / "a", "hub/Meta-Llama-3-8B", 2, (2427, 198, 6412, 12657, 591)),
        massive(tmp_path / "b", "hub/Mistral-7B-v0.1", 2, (7310, 8572, 2514, 1878, 1)),
        massive(tmp_path / "c", "hub/little"),
    ]
    tables = report("massive_weights", runs)
    rows = {row["Models"]: row for row in tables["table_7"] if row["from"] == "here"}
    assert rows["little"]["Indices"] == "5, 3, 1, 2, 0" and rows["little"]["Layer"] == "2"
    verdicts = [claim(tables, "the massive layer and its five", name)[1] for name in ("Meta", "Mi")]
    assert verdicts == ["holds", "does not hold"]
    rows = [row for row in tables["figure_3"] if row["panel"] == "little" and row["layer"] == "3"]
    points = {(row["line"], row["value"]): float(row["y"]) for row in rows}
    assert points["median", "intermediate state"] == pytest.approx(0.2)
    assert points["1st", "hidden state"] == 9


def test_adapters_attacked(report, tmp_path):
    """Evaluations of trained models are rows of how these were trained, paired over its seeds."""
    right, wrong, runs = [1, 1, 1, 0], [0, 1, 0, 0], []
    for name, p0, seed in product(("lora", "dora"), (0.0, 0.8), (0, 1, 2)):
        path = tmp_path / f"{name}{p0}{seed}"
        runs.append(adapted(path, [name, "macdrop"], p0, seed))
        gain = 1.0 + 0.1 * seed if p0 else 0.0
        for k, nll in ((0, 3.0), (3, 4.5 - gain)):
            own = {"windows": (nll, nll), "model": f"{path}/model"}
            own["answers"] = right if k == 0 or p0 else wrong
            runs.append(attack(tmp_path / f"{path.name}_{k}", "zero", k, float(np.exp(nll)), **own))
            own = {"windows": (nll + 1, nll + 1), "model": own["model"], "text": "c4.txt"}
            runs.append(attack(tmp_path / f"c4_{path.name}_{k}", "zero", k, 9.0, **own))
    path = tmp_path / "control"
    runs.append(adapted(path, ["lora", "macdrop"], 1.0, 0, "constant"))
    for k, nll in ((0, 3.1), (3, 3.2)):
        own = {"windows": (nll, nll), "model": f"{path}/model", "answers": wrong if k else right}
        runs.append(attack(tmp_path / f"control_{k}", "zero", k, float(np.exp(nll)), **own))
    path = tmp_path / "exp"
    runs.append(adapted(path, ["nf4", "macdrop", "dora"], 0.8, 0, "exp"))
    runs.append(attack(tmp_path / "exp_0", "zero", 0, 20.0, model=f"{path}/model"))
    tables = report("massive_weights", runs)
    assert "unset" not in tables["text"]
    drawn = lines(tables, "figure_7")
    assert {name[1].split(", ", 2)[2] for name in drawn} == {"step", "constant", "exp, a = 0.01"}
    rows = [r for r in tables["macdrop"] if r["model"] == "small"]
    texts = [r for r in rows if r["text"] == "c4"]
    other = {(r["method"], r["attacked"]): float(r["NLL"].split()[0]) for r in texts}
    assert other["LoRA", "zero 3"] == pytest.approx(5.5) and len(other) == 8
    rows = {(r["method"], r["attacked"]): r for r in rows if r["text"] == "wikitext"}
    assert len(rows) == 11 and ("nf4 + dora, massive, exp, a 0.01, p0 0.8", "-") in rows
    for name in ("LoRA", "DoRA"):
        assert float(rows[name, "zero 3"]["NLL"].split()[0]) == pytest.approx(4.5)
        drops = rows[f"{name} + MacDrop", "zero 3"]
        assert float(drops["Δ vs adapter alone"]) == pytest.approx(-1.1)
        assert float(drops["Δ vs unattacked"]) == pytest.approx(0.4)
        assert rows[name, "-"]["Δ vs adapter alone"] == "-"
        for key, method, value in (("table_4", name, 25), ("table_8", f"{name} + MacDrop", 75)):
            own = [r for r in tables[key] if (r["Model"], r["Method"]) == ("small", method)]
            assert [float(r["PIQA"]) for r in own] == [value]
    asked = {(r["method"], r["attacked"]): r["PIQA"] for r in tables["macdrop_questions"]}
    assert float(asked["DoRA + MacDrop", "zero 3"]) == 50
    better = "an adapter trained with MacDrop does better under"
    for where, text in product(("lora", "dora"), ("wikitext", "c4")):
        assert claim(tables, better, f"small, {where}, {text}")[1] == "holds"
    assert claim(tables, "trained with the massive weights", "small, lora, wiki")[1] == "holds"
    assert {row["Models"] for row in tables["table_1"]} & {"small", "model"} == set()
    points = lines(tables, "figure_7")
    assert points["p0 0.8", "small, lora, step", "-"][0] == (1, pytest.approx(0.8 * 59 / 60))
    # Tasks of what an attack left are not the trained model's own.
    frame = with_evaluations(plain(fh.results(*runs)))
    own = frame[frame["run"].str.endswith("control") & frame.task.notna()]
    assert [by.rpartition("/")[2] for by in own["by"]] == ["control_0"] and set(own.value) == {0.75}


def test_paired_intervals_against_a_plain_loop():
    rng = np.random.default_rng(3)
    own, base = rng.normal(1.0, 0.2, 40), rng.normal(2.0, 0.2, 40)
    found = stats.bootstrap(own - base)
    draws = np.random.default_rng(0).integers(40, size=(10_000, 40))
    means = [(own - base)[draw].mean() for draw in draws]
    np.testing.assert_allclose((found.low, found.high), np.percentile(means, [2.5, 97.5]))


def test_a_share_has_the_interval_of_its_test():
    """The ends are where a t test of (base - own) - r (base - goal) has p = 0.05."""
    rng = np.random.default_rng(3)
    own, base = rng.normal(1.0, 0.2, 20), rng.normal(2.0, 0.4, 20)
    share = papers.load(STUDY).functions["share"]
    found = share(dict(enumerate(own)), dict(enumerate(base)), {None: 0.5})
    assert found.mean == pytest.approx((base - own).mean() / (base - 0.5).mean())
    for r in (found.low, found.high):
        assert ttest_1samp(base - own - r * (base - 0.5), 0).pvalue == pytest.approx(0.05)
    # One seed of twenty gains: every draw is 0 or more, and still it is not told from 0.
    gain = np.eye(20)[0]
    some = share(dict(enumerate(base - gain)), dict(enumerate(base)), {None: 0.5})
    assert some.low < 0 < some.mean < some.high
    # Chance in the goal alone; a goal that is not told from the base.
    lost = share({None: 3.0}, {None: 1.0}, dict(enumerate(base)))
    interval = student(base - 1)
    assert (lost.low, lost.high) == pytest.approx((2 / interval.high, 2 / interval.low))
    wide = share({None: 3.0}, {None: 2.0}, dict(enumerate(base)))
    assert (wide.low, wide.high) == (-np.inf, np.inf)


def test_a_damaged_analysis_is_named(tmp_path):
    massive(tmp_path / "a", "m")
    (tmp_path / "a" / "results.json").write_text('{"layer": 2}')
    with pytest.raises(ValueError, match=r"a/results.json is no analysis"):
        write_paper(papers.load("massive_weights"), [str(tmp_path / "a")], tmp_path / "out")
