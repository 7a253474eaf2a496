"""scripts/report.py --paper: tables, curves and claims, from directories written by hand."""

from __future__ import annotations

import json
import math

import builders
import numpy as np
import pytest
from builders import analysed, claim, pretrain, reading, removal, score, scored, training, write_run
from tiny_models import run_script

import ffn_heterogeneity as fh
from ffn_heterogeneity import papers
from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.jreg import TASKS
from ffn_heterogeneity.report.paper import draw_all, gather, write_paper

RATE = "20 steps, learning rate 0.001"
PUBLISHED = "zeta_L of a published model"


@pytest.mark.parametrize("paper", papers.NAMES)
def test_a_printed_table_is_always_drawn(report, tmp_path, paper):
    for name in ("sweep", "out"):
        (tmp_path / name).mkdir()
    points = [{"name": "baseline", "settings": {}}]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"points": points}))
    (tmp_path / "out" / "figure_4.png").write_bytes(b"of other runs")
    tables = report(paper, [str(tmp_path / "sweep")])
    for key, table in printed(paper)["tables"].items():
        rows = [[*row.values()] for row in tables[key] if row.pop("from") == "paper"]
        assert rows == [["-" if x is None else str(x) for x in row] for row in table["rows"]]
        assert table["caption"].rstrip(".") in tables["text"]
    assert not list((tmp_path / "out").glob("*.png")) and "sweep/baseline" in tables["text"]
    ours = [row for row in tables["claims"] if not row["run on"].startswith("the paper's")]
    assert {row["verdict"] for row in ours} <= {"open"}


def test_ours_stands_below_the_papers_row(report, tmp_path):
    gone = {"mmlu": (0.3, 5), "hellaswag": (0.4, 10), "arc_easy": (0.5, 0), "piqa": (0.6, 0)}
    gone |= {"social_iqa": (0.2, 0), "triviaqa": (0.1, 5), "nq_open": (0.0, 5)}
    tasks = {task: score(value, shots=shots) for task, (value, shots) in gone.items()}
    tasks["hellaswag"] |= {"acc_norm": 0.7, "acc_norm_low": 0.6, "acc_norm_high": 0.8}
    own = {"tasks": tasks}, {"tasks": tasks, "criterion": "random", "ratio": 0.5}
    own += ({"tasks": {"mmlu": score(0.9)}, "criterion": "magnitude"},)
    tables = report("nucl", [removal(tmp_path / str(i), 45.0, **x) for i, x in enumerate(own)])
    rows = [row for row in tables["table_4"] if row["from"] != "paper"]
    (mine,) = [row for row in rows if row["PIQA 0-shot"] != "-"]
    assert (mine["Method"], mine["from"]) == ("Entropy-based", "here: small")
    assert mine["HellaSwag 10-shot"] == "70.0", "acc_norm where there is one"
    assert float(mine["Average"]) == pytest.approx(240 / 7)
    assert {row["MMLU 5-shot"] for row in rows} == {"30.0", "-"}, "other shots, other ratio: no row"
    assert "30 [20, 40] Wilson n=100" in tables["text"]


def test_gains_are_relative_and_have_their_z(report, tmp_path):
    runs = []
    points = ((0.0, 2.0, 0.4, "ffn_out"), (1.0, 1.9, 0.5, "ffn_out"), (100.0, 2.2, 0.9, "ffn_out"))
    for i, (alpha, nll, value, of) in enumerate((*points, (1.0, 2.0, 0.44, "ffn_in_gated"))):
        tasks = {"gsm8k": score(value, "exact_match", n=1000)}
        own = {"model": "google/gemma-2-2b", "tasks": tasks, "targets": [of]}
        runs.append(training(tmp_path / str(i), alpha, {20: (6.0, nll)}, **own))
    tables = report("nucl", runs)
    rows = {row["from"]: row["GSM8K"] for row in tables["table_2"] if row["Model size"] == "2B"}
    assert rows["paper"] == "2.71"
    assert float(rows["here"]) == pytest.approx(25.0), "of the alpha of the lowest loss"
    ours = [row for row in tables["table_3"] if row["from"].startswith("here:")]
    gained = {x["Weight matrices"]: round(float(x["Relative gain (in %)"])) for x in ours}
    assert gained == {"FFN outgoing": 25, "FFN incoming (gated)": 10}
    ours = [r for r in tables["table_8"] if r["from"] == "here" and r["Gemma-2B"] != "-"]
    scores = {r["Method"]: r["Gemma-2B"] for r in ours}
    assert scores == {"Standard fine-tuning": "40.0", "NUCL fine-tuning": "50.0"}
    gains = {(r["task"], r["model"], r["from"]): r for r in tables["gains"]}
    z = 0.1 / math.sqrt(0.45 * 0.55 * 2 / 1000)
    assert float(gains["GSM8K", "gemma-2-2b", "here"]["z (ours)"]) == pytest.approx(z, rel=1e-6)


def test_models_of_one_name_do_not_mix(report, tmp_path):
    """Every model that a run writes is in a directory called "model"."""
    names = ("runs/a/model", "runs/b/model", "x/a/model")
    runs = [removal(tmp_path / str(i), 10.0 * (i + 1), model=name) for i, name in enumerate(names)]
    runs.append(removal(tmp_path / "r", 99.0, model="runs/b/model", revision="step5"))
    found = {row["model"]: row["perplexity"] for row in report("nucl", runs)["removal"]}
    assert found == {"runs/a/model": "10.0", "b": "20.0", "x/a/model": "30.0", "b step5": "99.0"}


def test_runs_that_cannot_be_compared_are_named(report, tmp_path):
    runs = [
        removal(tmp_path / "u", 5.0, criterion="none", ratio=0.1),
        removal(tmp_path / "x", 7.0),
        removal(tmp_path / "y", 7.0, criterion="gini", window=128, ratio=0.5),
        removal(tmp_path / "n", 7.0, criterion="mstd", ratio=0.25, count=5),
        removal(tmp_path / "g", 7.0, criterion="magnitude", ratio=0.5, budget="global"),
    ]
    rows = {r["method"]: r for r in report("nucl", runs)["removal"]}
    assert rows["Entropy-based"]["x unpruned"] == "1.4"
    assert rows["gini"]["x unpruned"] == "-", "nothing was unpruned in windows of 128"
    assert rows["gini"]["from"] == "here: wiki.txt, windows of 128"
    assert (rows["gini"]["removed"], rows["Pre-trained baseline"]["removed"]) == ("50%", "0%")
    sizes = {row["removed"] for row in rows.values()}
    assert {"5 neurons", "50%, global"} <= sizes and "25%" not in {rows["mstd"]["removed"]}


def test_one_text_under_two_paths_is_one_text(report, tmp_path):
    """The content of the file at the start of the run counts."""
    paths = []
    for name, text, mark in (("a", "wiki.txt", 1), ("b", "../wiki.txt", 1), ("c", "other.txt", 2)):
        own = {"text": text, "criterion": f"rule {name}", "data_root": text}
        paths.append(removal(tmp_path / name, 7.0, **own))
        inputs = {"text": str(mark), "model": "m", "gone": "0"}
        (tmp_path / name / "inputs.json").write_text(json.dumps(inputs))
    frame = fh.results(*paths).drop_duplicates("run").set_index("run")
    assert list(frame["config.text"]) == ["wiki.txt", "wiki.txt", "other.txt"]
    assert frame["config.data_root"][paths[1]] == "../wiki.txt" and "config.gone" not in frame
    places = {f"here: {text}, windows of 512" for text in ("wiki.txt", "other.txt")}
    assert {row["from"] for row in report("nucl", paths)["removal"]} == places


def test_differences_are_seed_by_seed(seeds, report):
    tables = report("jreg", seeds)
    apart = {row["loss"]: float(row["validation NLL"]) for row in tables["paired"]}
    # (0.1 + 0) / 2, and 4.5 - 4.0 of seed 0, not 4.5 less the mean of both.
    assert apart == pytest.approx({"lambda 1, alpha 1": 0.05, "lambda 1, alpha 3": 0.5})
    assert "0.05 [-0.5853, 0.6853] t n=2" in tables["text"], "0.05 -+ 12.7062 x 0.05"
    assert "13 [12, 14] range n=2" in tables["text"] and "Student's 95% interval" in tables["text"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"data": {"path": "x"}}, "data.path"),
        ({"monitors": {"x": {"term": "j"}}}, "monitors.x.term"),
    ],
)
def test_setups_that_differ_stop_the_report(seeds, tmp_path, settings, key):
    changed = pretrain(tmp_path / "x", 0.0, {20: (99.0, 9.0)}, seed=2, **settings)
    with pytest.raises(ValueError, match=rf"runs of one cell .* differ in .*{key}"):
        write_paper(papers.load("jreg"), [*seeds, changed], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_loss_of_weight_0_is_none(seeds, report, tmp_path):
    """A sweep of NUCL in pre-training has its baseline among the others'."""
    jreg = {"term": "jreg", "weight": 0.0, "alpha": 3.0, "final_norm": False, "positions": "all"}
    idle = {"nll": {"reduction": "mean"}, "jreg": jreg, "nucl": {"weight": 0.0, "variant": "mstd"}}
    more = [pretrain(tmp_path / "idle", 0.0, {20: (12.0, 4.4)}, seed=2, losses=idle)]
    (row,) = [r for r in report("jreg", [*seeds, *more])["pretraining"] if r["loss"] == "baseline"]
    assert float(row["validation NLL"]) == pytest.approx((4.0 + 4.2 + 4.4) / 3)


def test_accuracies_go_to_the_run_whose_model_was_evaluated(seeds, report, tmp_path):
    for seed, acc in zip(seeds, (0.25, 0.75, 0.5, 0.95), strict=False):
        tasks = {task: score(acc) for task, _ in TASKS.values()}
        seeds = [*seeds, scored(tmp_path / f"s{acc}", f"{seed}/model", tasks)]
    # A compressed form of a run's model is not the run's.
    fused = {task: score(0.1) for task, _ in TASKS.values()}
    settings = {"method": "fusion", "ratio": 0.25, "model": f"{seeds[4]}/model"}
    results = {"model": f"{seeds[4]}/model", "tasks": fused}
    seeds = [*seeds, write_run(tmp_path / "fused", settings, results)]
    tables = report("jreg", seeds)
    rows = {r["Method"]: r for r in tables["table_2"] if r["from"].startswith("here:")}
    assert float(rows["Baseline"]["avg"]) == pytest.approx(50.0)
    assert float(rows["JREG (ours)"]["PIQA"]) == pytest.approx(72.5)
    measured, verdict = claim(tables, "the mean of the nine accuracies")
    # 25 and 20 points, seed by seed; alpha 3 was not scored.
    assert measured.startswith("lambda 1, alpha 1 22.5 [-9.266, 54.27] t n=2; lambda 1, alpha 3 -")
    assert verdict == "open (lambda 1, alpha 1; lambda 1, alpha 3)"


# ---- models and curves


def test_evaluations_of_one_model_must_agree(report, tmp_path):
    """A quick one with fewer questions neither replaces nor joins the full one; a repeat counts
    once."""
    runs, tasks = [pretrain(tmp_path / "base", 0.0, builders.FLAT)], {"arc_easy": score(0.5)}
    for name, limit in (("full", None), ("repeat", None), ("quick", 10)):
        values = {"model": f"{tmp_path}/base/model", "evaluation": "tasks", "limit": limit}
        runs.append(write_run(tmp_path / name, values, {"tasks": tasks}))
    rows = gather(papers.load("jreg"), runs[:3])[1]["runs"]
    assert len(rows[(rows.task == "arc_easy") & (rows["run"] == runs[0])]) == 1
    with pytest.raises(ValueError, match="base on arc_easy differ in limit"):
        gather(papers.load("jreg"), runs)


def test_models_of_two_machines_with_one_path_are_two(tmp_path):
    """Told apart by the fingerprint of what was read."""
    runs = []
    for place, weight in (("a", 0.0), ("b", 1.0)):
        trained = tmp_path / place / "runs/train"
        runs.append(pretrain(trained, weight, builders.FLAT))
        done = json.loads((trained / "results.json").read_text()) | {"model_fingerprint": place}
        (trained / "results.json").write_text(json.dumps(done))
        read = tmp_path / place / "runs/attacked"
        runs.append(builders.attack(read, "zero", 3, 20.0, model="runs/train/model"))
        (read / "inputs.json").write_text(json.dumps({"model": place}))
    rows = gather(papers.load("jreg"), runs)[1]["runs"]
    assert {*rows[rows.what == "perplexity"]["run"]} == {runs[1], runs[3]}


def test_a_finished_run_is_kept_instead_of_a_crashed_one(tmp_path):
    """Whichever name comes first: in the tables and in the curves."""
    for names in (("a", "b"), ("b", "a")):
        half = {step: builders.FLAT[step] for step in (0, 10)}
        root = tmp_path / "".join(names)
        runs = [pretrain(root / names[0], 0.0, half, finished=False)]
        runs.append(pretrain(root / names[1], 0.0, builders.FLAT))
        runs.append(pretrain(root / "c", 0.0, {0: (0.0, 8.0)}, finished=False))
        made = gather(papers.load("jreg"), sorted(runs))[1]
        assert {*made["runs"]["run"]} == {*made["curves"]["run"]} == {runs[1]}


def test_removals_on_two_texts_are_judged_apart(report, tmp_path):
    runs = []
    for text in ("wiki.txt", "c4.txt"):
        for name, value in (("entropy", 45.0), ("random", 400.0)):
            place = tmp_path / f"{name}-{text}"
            runs.append(removal(place, value, criterion=name, text=text))
    places = claim(report("nucl", runs), "removal by entropy", "wiki.txt")
    assert places[1] == "holds"


def test_jump_rates_of_models(report, tmp_path, seeds):
    own = analysed(tmp_path / "own", f"{seeds[0]}/model")
    first = analysed(tmp_path / "first", "hub/small")
    second = analysed(tmp_path / "second", "hub/small", {"window": 128})
    two = {"psi": [0.5, 0.25], "zeta_L": 8.0}
    short = dict.fromkeys(("before_final_norm", "after_final_norm"), two)
    runs = [*seeds, first, second, own, analysed(tmp_path / "short", "x", **short)]
    tables = report("jreg", runs)
    rows = {(r["model"], r["h_L"].split()[0]): r for r in tables["models"]}
    names = {"small (first)", "small (second)", "base0", "x"}
    assert {model for model, _ in rows} == names, "two analyses of one model have two names"
    assert rows["x", "before"]["zeta_L-1"] == rows["x", "before"]["tokens"] == "-"
    assert rows["small (second)", "after"]["from"] == "here, windows of 128"
    measured, verdict = claim(tables, PUBLISHED, "before the final norm, windows of 64")
    assert measured == "small (first) 9.5; x 8" and verdict == "holds", "base0 is not published"
    assert claim(tables, PUBLISHED, "after the final norm, windows of 128")[1] == "does not hold"


@pytest.mark.parametrize(
    "results",
    [
        {"before_final_norm": reading([0.1]), "after_final_norm": {"psi": ["x"]}},
        {"before_final_norm": 3, "after_final_norm": reading([0.1])},
        {"checkpoints": 3},
        {"checkpoints": [3]},
        {"checkpoints": [{"checkpoint": "step1", "step": 1}]},
    ],
)
def test_damaged_analyses_are_named(tmp_path, results):
    path = analysed(tmp_path / "bad", "x", **results)
    with pytest.raises(ValueError, match=r"bad/results\.json.*is it damaged\?"):
        write_paper(papers.load("jreg"), [path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_figures_show_means_over_seeds(seeds):
    paper = papers.load("jreg")
    drawn = draw_all(paper, gather(paper, seeds)[1])
    figures = {one.key: one.figure for one in drawn if one.figure}
    assert set(figures) == {"psi", "curves"}
    (axis,) = figures["psi"].axes
    means = [[1, 0.4], [2, 0.2], [3, 0.1], [4, 0.24]]
    np.testing.assert_allclose(axis.lines[0].get_xydata(), means)
    assert axis.lines[0].get_label() == f"baseline, {RATE} (mean of 2 seeds)"
    zeta, *_, nll = figures["curves"].axes
    np.testing.assert_allclose(zeta.lines[0].get_xydata(), [[0, 0], [10, 7], [20, 13]])
    assert [axis.get_ylabel() for axis in (zeta, nll)] == ["zeta_L (%)", "validation NLL"]
    assert len(nll.lines) == 3 and len(zeta.collections) == 2, "a band where there are seeds"


# ---- cells, sweeps, the command line


def test_a_sweep_stands_for_its_points(report, tmp_path):
    runs = builders.nucl_runs(tmp_path / "runs")
    points = [{"name": name} for name in ("random0", "random1", "nothing", "entropy")]
    (tmp_path / "runs" / "sweep.json").write_text(json.dumps({"points": points}))
    text = report("nucl", [str(tmp_path / "runs"), runs[0]])["text"]
    listed = [[x.strip() for x in line.split("|")[1:3]] for line in text.splitlines()]
    assert ["runs/nothing", "not run"] in listed and ["entropy", "finished"] in listed
    assert "600 [400, 900] range n=3" in text


def test_from_the_command_line(seeds, tmp_path):
    out = tmp_path / "out"
    done = run_script("report", "--paper=jreg", *seeds, f"--out={out}")
    assert done.code == 0, done.err
    assert done.out == (out / "jreg.md").read_text() and "jreg.md" in done.err
    assert (out / "curves.md").read_text().strip() in done.out
    for name in ("psi", "curves"):
        assert f"]({name}.png)" in done.out and (out / f"{name}.png").exists()
    assert "--paper=other" in run_script("report", "--paper=other", *seeds).error
    assert "no run given" in run_script("report", "--paper=nucl", f"--out={tmp_path / 'x'}").error
    assert not (tmp_path / "x").exists()
