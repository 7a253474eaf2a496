"""scripts/report.py --paper=jreg: tables, figures and claims from directories written by hand."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from tiny_models import run_script

from ffn_heterogeneity.report import jreg, jreg_conditions, jreg_figures, jreg_models, paper_jreg
from ffn_heterogeneity.report.runs import read_runs

NLL, ZETA = "validation/nll", "validation/jreg/zeta_L"
ENTROPY = "validation/entropy/ent/ffn_out/mean"
SCORE = {"n": 8, "acc": 0.25, "acc_low": 0.1, "acc_high": 0.5}
SHAPE = {"layers": 4, "d_model": 8, "ffn_width": 24}
TEXT = {"text": "lambada.txt", "token_ids": "", "window": 64, "max_windows": 4, "bos": "segment"}
# step -> (zeta_L, validation NLL)
RISING = {0: (0.0, 8.0), 10: (6.0, 5.0), 20: (12.0, 4.0)}
FLAT = {0: (0.0, 8.0), 10: (0.3, 5.2), 20: (0.2, 4.1)}


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def pretrain(
    path, weight, curve, *, alpha=1.0, seed=0, steps=20, finished=True, psi=(), **settings
):
    """A run of configs/jreg_pretrain.py; `psi`: the displacements of its last evaluation."""
    values = {
        "model": "", "tokenizer": "tokens", "batch_size": 4, "seq_len": 16, "steps": steps,
        "seed": seed, "seeds": [], "shape": SHAPE, "nucl": {"variant": "none", "alpha": 0.0},
        "jreg": {"weight": weight, "alpha": alpha, "final_norm": False, "positions": "all"},
        "data": {"task": "tokens", "path": "corpus"}, "optimizer": {"learning_rate": 1e-3},
        **settings,
    }  # fmt: skip
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    rows = lines(curve, psi)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        found = {"final": rows[-1], "parameters": 1234, "device": "cpu"}
        (path / "results.json").write_text(json.dumps(found))
    return str(path)


def lines(curve, psi=()):
    rows = [
        {"step": step, ZETA: zeta, f"{ZETA}-1": zeta, f"{ZETA}-2": zeta, NLL: nll, ENTROPY: 5.5}
        for step, (zeta, nll) in curve.items()
    ]
    if psi:
        rows[-1]["validation/jreg/psi"] = list(psi)
    return rows


def reading(psi, **rates):
    return {"psi": list(psi), "zeta_L": 9.5, "zeta_L-1": 9.75, "zeta_L-2": 10.25, **rates}


def analysed(path, model, **results):
    """A run of configs/analyze.py:displacement."""
    config = {"analysis": "displacement", "model": model, "positions": "all", **TEXT}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    default = {
        "before_final_norm": reading([0.5, 0.1, 0.2]),
        "after_final_norm": reading([0.5, 0.1, 0.6], zeta_L=50.0),
        "tokens": 260,
    }
    (path / "results.json").write_text(json.dumps(results or default))
    return str(path)


def table(folder, key):
    """The CSV's rows as dicts."""
    with (folder / f"{key}.csv").open() as file:
        return list(csv.DictReader(file))


def claims(folder):
    """(start of the statement, run on) -> (measured, verdict)."""
    return {(row["statement"], row["run on"]): (row["measured"], row["verdict"])
            for row in table(folder, "claims")}  # fmt: skip


def claim(folder, part, where=""):
    (found,) = [v for (says, on), v in claims(folder).items() if part in says and where in on]
    return found


@pytest.fixture
def seeds(tmp_path):
    """Baseline and JREG over two seeds, and a sharpness of one."""
    root = tmp_path / "seeds"
    other = {0: (0.0, 8.0), 10: (8.0, 5.0), 20: (14.0, 4.2)}
    return [
        pretrain(root / "base0", 0.0, RISING, psi=[0.4, 0.2, 0.1, 0.22]),
        pretrain(root / "base1", 0.0, other, seed=1, psi=[0.4, 0.2, 0.1, 0.26]),
        pretrain(root / "jreg0", 1.0, FLAT, psi=[0.4, 0.2, 0.1, 0.1]),
        pretrain(root / "jreg1", 1.0, {0: (0.0, 8.0), 20: (0.4, 4.2)}, seed=1),
        pretrain(root / "sharp", 1.0, {0: (0.0, 8.0), 20: (1.5, 4.5)}, alpha=3.0),
    ]


def test_tables_2_and_3(seeds, tmp_path):
    text = jreg.write_paper(seeds, tmp_path / "out")
    rows = [row for row in table(tmp_path / "out", "table_2") if row["run on"] == "4x8/24"]
    assert [(r["loss"], r["weight"], r["alpha"]) for r in rows] == [
        ("baseline", "0", "-"), ("JREG", "1", "1"), ("JREG", "1", "3")]  # fmt: skip
    assert [float(r["validation NLL"]) for r in rows] == pytest.approx([4.1, 4.15, 4.5])
    # Seed by seed: (0.1 + 0) / 2 and 4.5 - 4.0 of seed 0, not 4.5 less the mean of both.
    assert rows[0]["above baseline"] == "-"
    above = [float(row["above baseline"]) for row in rows[1:]]
    assert above == pytest.approx([0.05, 0.5])
    assert {(r["steps"], r["tokens"], r["parameters"]) for r in rows} == {("20", "1280", "1234")}
    rates = table(tmp_path / "out", "table_3")
    assert [float(r["zeta_L"]) for r in rates[:3]] == pytest.approx([13.0, 0.3, 1.5])
    assert rates[0]["zeta_L-2"] == "13.0" and rates[0]["paper"] == "-"
    assert "13 [12, 14] n=2" in text and "4.1 [4, 4.2] n=2" in text


def test_what_the_paper_ran_and_nobody_did_here(seeds, tmp_path):
    jreg.write_paper(seeds, tmp_path / "out")
    rows = [r for r in table(tmp_path / "out", "table_3") if r["zeta_L"] == "not run"]
    mine = [r for r in rows if r["run on"] == "12x768/2048 (170M)"]
    assert [r["alpha"] for r in mine] == ["-", "0", "0.1", "0.3", "0.5", "1", "3"]
    assert [r["paper"] for r in mine] == ["-"] * 4 + ["text: no jump"] * 2 + [
        "text: no jump, zeta_L-2 1.55"]  # fmt: skip
    assert {r["paper"] for r in rows if r not in mine} == {"-"} and len(rows) == 11


def test_the_papers_number_stands_beside_its_own_setting_alone(tmp_path):
    shape = {"layers": 12, "d_model": 768, "ffn_width": 2048}
    paths = [
        pretrain(tmp_path / "long", 1.0, {200_000: (0.0, 3.0)}, alpha=3.0, steps=200_000,
                 shape=shape, batch_size=512, seq_len=1024),
        pretrain(tmp_path / "small", 1.0, {200_000: (0.0, 3.0)}, alpha=3.0, steps=200_000,
                 shape=shape),
        pretrain(tmp_path / "short", 1.0, {20: (0.0, 3.0)}, alpha=3.0, shape=shape),
    ]  # fmt: skip
    jreg.write_paper(paths, tmp_path / "out")
    rows = [r for r in table(tmp_path / "out", "table_3") if r["alpha"] == "3"]
    assert sorted((int(r["steps"]), r["paper"], r["zeta_L"]) for r in rows) == [
        (20, "-", "0.0"), (200_000, "-", "0.0"), (200_000, "text: no jump, zeta_L-2 1.55", "0.0")
    ]  # fmt: skip
    jreg.write_paper(paths[1:], tmp_path / "out")
    rows = [r for r in table(tmp_path / "out", "table_3") if r["alpha"] == "3"]
    assert [r["zeta_L"] for r in rows] == ["0.0", "0.0", "not run"], "neither is the paper's run"


def test_no_number_of_the_paper_is_made_up(seeds, tmp_path):
    """All that is printed as the paper's comes from the one module, and only what it holds."""
    assert paper_jreg.TABLE_3 == {("170M", 3.0): {"zeta_L-2": 1.55}}
    assert paper_jreg.PUBLISHED == (7.0, 28.0)
    jreg.write_paper([*seeds, analysed(tmp_path / "a", "hub/some-1b")], tmp_path / "out")
    for key in ("table_1", "table_2", "table_7"):
        assert {row["paper"] for row in table(tmp_path / "out", key)} == {"-"}, key
    known = {row["paper"] for row in table(tmp_path / "out", "table_3")}
    assert known == {"-", "text: no jump", "text: no jump, zeta_L-2 1.55"}


def test_claims_that_hold(seeds, tmp_path):
    jreg.write_paper(seeds, tmp_path / "out")
    out = tmp_path / "out"
    assert claim(out, "larger at the end") == ("0 at first, 13 [12, 14] n=2 at the end", "holds")
    measured, verdict = claim(out, "about 0", "alpha 1")
    assert measured == "0.3 [0.2, 0.4] n=2; baseline 13 [12, 14] n=2" and verdict == "holds"
    assert claim(out, "about 0", "alpha 3")[1] == "does not hold"
    measured, verdict = claim(out, "not above", "alpha 1")
    # Losses of both are apart by at most 0.2 over the seeds, and JREG's lie 0.05 above.
    assert verdict == "holds within the seeds' spread" and measured.endswith("seeds' spread 0.2")
    measured, verdict = claim(out, "not above", "alpha 3")
    assert verdict == "does not hold" and measured.startswith("0.5 (baseline 4.1 [4, 4.2] n=2)")
    assert measured.endswith("one seed: spread not known")
    assert claim(out, "lowest validation NLL")[1] == "holds"


@pytest.mark.parametrize(
    ("change", "part", "verdict"),
    [
        ({"curve": {0: (0.0, 8.0), 20: (0.1, 3.9)}}, "not above", "holds"),
        ({"curve": {0: (0.0, 8.0), 20: (0.1, 4.001)}}, "not above", "does not hold"),
        ({"curve": {0: (0.0, 8.0), 20: ("nan", "nan")}}, "not above", "not known: not finite"),
        ({"curve": {0: (0.0, 8.0), 20: ("nan", "nan")}}, "about 0", "not known: not finite"),
        ({"curve": FLAT, "batch_size": 8}, "not above", "not known"),
        ({"curve": FLAT, "steps": 10}, "not above", "not known"),
        ({"curve": FLAT, "data": {"task": "tokens", "path": "x"}}, "not above", "not known"),
    ],
)
def test_one_seed_and_what_is_not_known(tmp_path, change, part, verdict):
    base = pretrain(tmp_path / "base", 0.0, RISING)
    other = pretrain(tmp_path / "jreg", 1.0, change.pop("curve"), **change)
    jreg.write_paper([base, other], tmp_path / "out")
    assert claim(tmp_path / "out", part)[1] == verdict


@pytest.mark.parametrize("first", [3.0, 0.0])
def test_a_baseline_without_a_jump_makes_the_claim_empty(tmp_path, first):
    paths = [pretrain(tmp_path / "base", 0.0, {0: (first, 8.0), 20: (0.0, 4.0)}),
             pretrain(tmp_path / "jreg", 1.0, FLAT)]  # fmt: skip
    jreg.write_paper(paths, tmp_path / "out")
    assert claim(tmp_path / "out", "larger at the end")[1] == "does not hold"
    verdict = "holds, but the baseline's is about 0 as well"
    assert claim(tmp_path / "out", "about 0")[1] == verdict


@pytest.mark.parametrize(
    "settings, key, here, there",
    [
        ({"optimizer": {"learning_rate": 2e-3}}, "optimizer.learning_rate", "0.001", "0.002"),
        ({"revision": "step64"}, "revision", "unset", '"step64"'),
        ({"eval": {"max_batches": 8}}, "eval.max_batches", "unset", "8"),
    ],
)
def test_setups_that_differ_do_not_mix(seeds, tmp_path, settings, key, here, there):
    changed = pretrain(tmp_path / "x", 0.0, {20: (99.0, 9.0)}, seed=2, **settings)
    jreg.write_paper([*seeds, changed], tmp_path / "out")
    rows = table(tmp_path / "out", "table_2")
    names = [f"4x8/24, {key} {value}" for value in (here, there)]
    assert [r["run on"] for r in rows[:4]] == [names[0]] * 3 + names[1:]
    assert float(rows[0]["validation NLL"]) == pytest.approx(4.1)


def test_a_run_that_is_in_two_sweeps_counts_once(seeds, tmp_path):
    again = pretrain(tmp_path / "lambda" / "again", 0.0, {20: (50.0, 9.0)})
    begun = pretrain(tmp_path / "begun", 0.0, {0: (0.0, 8.0)}, seed=5, finished=False)
    text = jreg.write_paper([*seeds, again, begun], tmp_path / "out")
    assert "so not counted: again." in text and "in no row: begun (not finished, at step 0)" in text
    assert float(table(tmp_path / "out", "table_2")[0]["validation NLL"]) == pytest.approx(4.1)
    runs = [line.split("|") for line in text.split("## Runs")[1].splitlines() if "|" in line]
    used = {row[1].strip(): row[3].strip() for row in runs[2:]}
    assert used["again"] == "no" and used["base0"] == "yes"


def test_seeds_within_one_run(tmp_path):
    folder = tmp_path / "many"
    pretrain(folder, 0.0, RISING, seeds=[3, 4])
    for seed, last in ((3, 4.0), (4, 5.0)):
        (folder / f"seed_{seed}").mkdir()
        rows = lines({0: (0.0, 8.0), 20: (2.0 * seed, last)}, [0.1 * seed, 0.2, 0.3, 0.4])
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"seed_{seed}" / "metrics.jsonl").write_text(text)
        (folder / f"seed_{seed}" / "results.json").write_text(json.dumps({"final": rows[-1]}))
    (folder / "metrics.jsonl").unlink()
    (folder / "results.json").write_text(json.dumps({"seeds": [3, 4]}))
    other = pretrain(tmp_path / "jreg", 1.0, {0: (0.0, 8.0), 20: (0.0, 4.75)}, seed=4)
    jreg.write_paper([str(folder), other], tmp_path / "out")
    rows = table(tmp_path / "out", "table_2")
    assert [float(row["validation NLL"]) for row in rows[:2]] == [4.5, 4.75]
    assert float(rows[1]["above baseline"]) == -0.25, "against seed 4, not the mean"
    psi = [float(row["Psi"]) for row in table(tmp_path / "out", "figure_2")]
    np.testing.assert_allclose(psi, [0.3, 0.2, 0.3, 0.4, 0.4, 0.2, 0.3, 0.4])
    # Its models are ours, not published ones, and their accuracies are the run's.
    mine = [analysed(tmp_path / f"own{seed}", f"{folder}/seed_{seed}/model") for seed in (3, 4)]
    for seed, acc in ((3, 0.25), (4, 0.5)):
        (tmp_path / f"score{seed}").mkdir()
        config = {"model": f"{folder}/seed_{seed}/model", "evaluation": "tasks", "tasks": ["piqa"]}
        (tmp_path / f"score{seed}" / "config.json").write_text(json.dumps(config))
        found = {"tasks": {"piqa": SCORE | {"acc": acc, "acc_low": acc - 0.1}}}
        (tmp_path / f"score{seed}" / "results.json").write_text(json.dumps(found))
    scores = [str(tmp_path / f"score{seed}") for seed in (3, 4)]
    text = jreg.write_paper([str(folder), other, *mine, *scores], tmp_path / "out")
    assert claim(tmp_path / "out", "between 7") == ("not run", "not run")
    assert "0.375 [0.15, 0.5] n=8" in text


def test_table_1_and_figure_1(tmp_path):
    paths = [analysed(tmp_path / "one", "models/small.gguf"),
             analysed(tmp_path / "two", "runs/alpha/model")]  # fmt: skip
    text = jreg.write_paper(paths, tmp_path / "out")
    rows = table(tmp_path / "out", "table_1")
    assert [row["model"] for row in rows] == ["small", "alpha"]
    assert rows[0]["zeta_L before"] == "9.5" and rows[0]["zeta_L after"] == "50.0"
    assert (rows[0]["layers"], rows[0]["tokens"], rows[0]["text"]) == ("3", "260", "lambada.txt")
    psi = [float(r["Psi"]) for r in table(tmp_path / "out", "figure_1") if r["model"] == "small"]
    assert psi == [0.5, 0.1, 0.2, 0.5, 0.1, 0.6]
    assert claim(tmp_path / "out", "between 7", "before") == ("small 9.5, alpha 9.5", "holds")
    assert claim(tmp_path / "out", "between 7", "after")[1] == "does not hold: 0 of 2 do"
    assert "](figure_1.png)" in text
    assert (tmp_path / "out" / "figure_1.png").read_bytes()[:4] == b"\x89PNG"
    before, after = jreg_figures.models_by_depth(jreg_models.measured(read_runs(paths))).axes
    expected = np.array([[1 / 3, 0.5], [2 / 3, 0.1], [1, 0.6]])
    np.testing.assert_allclose(after.lines[0].get_xydata(), expected)
    assert before.lines[0].get_label() == "small, jump 9.50%" and len(before.lines) == 2


def test_analyses_that_cannot_be_compared(tmp_path, seeds):
    own = analysed(tmp_path / "own", f"{seeds[0]}/model")
    first, second = (analysed(tmp_path / name, "hub/small") for name in ("first", "second"))
    config = json.loads((tmp_path / "second" / "config.json").read_text()) | {"window": 128}
    (tmp_path / "second" / "config.json").write_text(json.dumps(config))
    text = jreg.write_paper([*seeds, first, second, own], tmp_path / "out")
    names = [row["model"] for row in table(tmp_path / "out", "table_1")]
    assert names == ["small (first)", "small (second)", "base0"]
    assert "These rows differ in window (64, 128): not comparable." in text
    assert "base0" not in claim(tmp_path / "out", "between 7", "before")[0], "no published model"


def test_a_short_model_has_fewer_rates(tmp_path):
    short = {name: {"psi": [0.5, 0.25], "zeta_L": 0.0} for name in jreg_models.READINGS}
    jreg.write_paper([analysed(tmp_path / "one", "x", **short)], tmp_path / "out")
    (row,) = table(tmp_path / "out", "table_1")
    assert (row["zeta_L before"], row["zeta_L-1 before"], row["tokens"]) == ("0.0", "-", "-")


@pytest.mark.parametrize(
    "results",
    [
        {"before_final_norm": reading([0.1]), "after_final_norm": {"psi": []}},
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
        jreg.write_paper([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_figure_4_and_table_7(seeds, tmp_path):
    points = [
        {"checkpoint": f"step{n}", "step": n, "after_final_norm": reading([0.1, 0.2], zeta_L=40.0),
         "before_final_norm": reading([0.1, 0.2], zeta_L=n / 100)} for n in (2000, 1000)
    ]  # fmt: skip
    series = analysed(tmp_path / "series", "hub/pythia", checkpoints=points)
    running = pretrain(tmp_path / "run", 1.0, {0: (0.0, 8.0), 10: (1.0, 5.0)}, alpha=0.5,
                       finished=False)  # fmt: skip
    jreg.write_paper([*seeds, series, running], tmp_path / "out")
    rows = table(tmp_path / "out", "figure_4")
    mine = [r for r in rows if r["curve"] == "pythia, before the final norm"]
    assert [(r["step"], r["zeta_L"]) for r in mine] == [("1000", "10.0"), ("2000", "20.0")]
    assert len(rows) == 3 + 3 + 3 + 2 + 2 + 2 + 4, "every seed and step, finished or not"
    shown = {(r["curve"], r["step"]): r["zeta_L"] for r in table(tmp_path / "out", "table_7")}
    assert shown["4x8/24, baseline, 20 steps", "10"] == "7 [6, 8] n=2"
    # Seed 1 of JREG was not evaluated at step 10.
    assert ("4x8/24, weight 1, alpha 1, 20 steps", "10") not in shown
    assert shown["pythia, after the final norm", "2,000"] == "40"
    conditions = jreg_conditions.conditions(read_runs([*seeds, running]), unfinished=True)
    zeta, *others, nll = jreg_figures.by_step(conditions, []).axes
    np.testing.assert_allclose(zeta.lines[0].get_xydata(), [[0, 0], [10, 7], [20, 13]])
    labels = [x.get_label() for x in nll.lines if x.get_label()[0] != "_"]
    assert labels[0] == "baseline, 20 steps (mean of 2 seeds)" and len(labels) == 4
    assert len(zeta.lines) == 4 + 2 + 2, "each of two seeds has a thin line too"
    assert [axis.get_ylabel() for axis in others] == [
        "jump rate zeta_L-1 (%)", "jump rate zeta_L-2 (%)"
    ]  # fmt: skip


def test_a_long_curve_is_shortened_in_table_7(tmp_path):
    curve = {10 * i: (float(i), 8.0 - i / 100) for i in range(101)}
    jreg.write_paper([pretrain(tmp_path / "x", 0.0, curve, steps=1000)], tmp_path / "out")
    steps = [row["step"] for row in table(tmp_path / "out", "table_7")]
    assert steps == ["0", "200", "400", "600", "800", "1,000"]
    assert len(table(tmp_path / "out", "figure_4")) == 101


def test_figure_2_shows_baseline_and_jreg(seeds, tmp_path):
    conditions = jreg_conditions.conditions(read_runs(seeds))
    (axis,) = jreg_figures.runs_by_depth(conditions).axes
    drawn = [line.get_ydata() for line in axis.lines]
    np.testing.assert_allclose(drawn[0], [0.4, 0.2, 0.1, 0.24])
    np.testing.assert_allclose(drawn[-1], [0.4, 0.2, 0.1, 0.1])
    assert len(drawn) == 4, "a mean with two seeds, and one alone; two runs have no displacements"


def test_accuracies_go_to_the_run_whose_model_was_evaluated(seeds, tmp_path):
    for i, acc in ((0, 0.25), (1, 0.75)):
        folder = tmp_path / f"score{i}"
        folder.mkdir()
        config = {"model": f"{seeds[i]}/model", "evaluation": "tasks", "tasks": ["piqa"]}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "results.json").write_text(json.dumps({"tasks": {"piqa": SCORE | {"acc": acc}}}))
    scores = [str(tmp_path / f"score{i}") for i in (0, 1)]
    text = jreg.write_paper([*seeds, *scores], tmp_path / "out")
    base, other, *_ = table(tmp_path / "out", "table_2")
    assert base["piqa acc"] == "0.5" and other["piqa acc"] == "not run"
    assert "0.5 [0.25, 0.75] n=2" in text and "yes" in text.split("| score0")[1].splitlines()[0]
    text = jreg.write_paper([*seeds, scores[0]], tmp_path / "one")
    assert "0.25 [0.1, 0.5] n=8" in text


def test_without_runs_everything_is_not_run(tmp_path):
    (tmp_path / "sweep").mkdir()
    points = [{"name": "baseline", "settings": {}}]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"points": points}))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "figure_4.png").write_bytes(b"of other runs")
    text = jreg.write_paper([str(tmp_path / "sweep")], tmp_path / "out")
    for key in paper_jreg.TITLES:
        assert "not run" in (tmp_path / "out" / f"{key}.md").read_text(), key
    assert not list((tmp_path / "out").glob("*.png")) and "sweep/baseline" in text
    assert {verdict for _, verdict in claims(tmp_path / "out").values()} == {"not run"}


def test_from_the_command_line(seeds, tmp_path):
    out = tmp_path / "out"
    done = run_script("report", "--paper=jreg", *seeds, f"--out={out}")
    assert done.code == 0, done.err
    assert done.out == (out / "jreg.md").read_text() and "jreg.md" in done.err
    for name in ("figure_2", "figure_4"):
        assert f"]({name}.png)" in done.out and (out / f"{name}.png").exists()
    error = run_script("report", "--paper=jreg", "nowhere", f"--out={tmp_path / 'x'}").error
    assert "'nowhere' is no run" in error and not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    error = run_script("report", "--paper=jreg", *seeds, f"--out={tmp_path}/file").error
    assert "is a file" in error
