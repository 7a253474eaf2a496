"""scripts/report.py --paper=nucl: tables and figures from directories written by hand."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
from tiny_models import run_script

from ffn_heterogeneity.report import nucl, nucl_figures, nucl_training, paper_nucl
from ffn_heterogeneity.report.paper_table import number, spread
from ffn_heterogeneity.report.runs import Spread, read_runs

EVALUATION = {"text": "wiki.txt", "window": 512, "max_windows": 40, "bos": "segment"}
SCORE = {"n": 8, "exact_match": 0.25, "exact_match_low": 0.1, "exact_match_high": 0.5}
CELL = "exact_match 0.25 [0.1, 0.5] n=8"
ENTROPY = "validation/entropy/ent/ffn_out/mean"


@pytest.fixture(autouse=True)
def figures_closed():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def removal(path, perplexity=None, *, model="models/small.gguf", gone=10.0, tasks=None, **config):
    """A point of configs/prune_table.py; without a perplexity it is not finished."""
    values = {"criterion": "entropy", "reverse": False, "compensation": "none", "layers": "all",
              "ratio": 0.25, "seed": 0, "model": model, **EVALUATION, **config}  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(values))
    if perplexity is not None:
        found = {"perplexity": perplexity, "parameters_removed_percent": gone}
        found |= {"tasks": tasks} if tasks else {}
        (path / "results.json").write_text(json.dumps(found))
    return str(path)


def training(
    path, alpha, curve, *, variant="mstd", targets=("ffn_out",), finished=True, tasks=None
):
    """A fine-tuning run; `curve`: step -> (entropy, nll)."""
    values = {
        "model": "hub/small", "batch_size": 4, "steps": 20, "dropout": 0.1, "seeds": [],
        "nucl": {"variant": variant, "alpha": alpha, "targets": list(targets)},
        "data": {"task": "gsm8k", "path": ""},
        "optimizer": {"name": "adamw", "learning_rate": 1e-5, "warmup_steps": 10},
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(values))
    rows = [{"step": s, ENTROPY: e, "validation/nll": n} for s, (e, n) in curve.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        found = {"final": rows[-1], "device": "cpu"} | ({"tasks": tasks} if tasks else {})
        (path / "results.json").write_text(json.dumps(found))
    return str(path)


def rows_of(text, title):
    """Cells of the table under the heading that begins so, by their first cell."""
    section = next(part for part in text.split("\n## ") if part.startswith(title))
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells[2:]}


def notes_of(text, title):
    return next(part for part in text.split("\n## ") if part.startswith(title))


@pytest.fixture
def criteria(tmp_path):
    root = tmp_path / "runs"
    return [
        removal(root / "unpruned", 20.0, criterion="none", gone=0.0),
        removal(root / "entropy", 45.0, tasks={"hellaswag": {
            "n": 100, "shots": 10, "acc": 0.5, "acc_low": 0.4, "acc_high": 0.6, "acc_norm": 0.55}}),
        *(removal(root / f"random{i}", x, criterion="random", seed=i)
          for i, x in enumerate((400.0, 500.0, 900.0))),
        removal(root / "magnitude", 12345.6, criterion="magnitude"),
        removal(root / "babu", 2000.0, criterion="similarity", compensation="sum"),
        removal(root / "byrne", 3000.0, criterion="similarity", compensation="least_squares"),
        removal(root / "lowest", 9000.0, reverse=True),
    ]  # fmt: skip


def test_table_4(criteria, tmp_path):
    text = nucl.write_paper(criteria, tmp_path / "out")
    rows = rows_of(text, "Table 4")
    assert rows["unpruned"] == ["-", "20", "1", "0", "not run"]
    assert rows["highest entropy (NUCL)"] == ["-", "45", "2.25", "10", "0.5 [0.4, 0.6] n=100"]
    assert rows["random"][:4] == ["-", "600 [400, 900] n=3", "30", "10"]
    assert rows["smallest magnitude"][:3] == ["mmlu 22.95", "12,346", "617.3"]
    assert rows["highest gini"] == ["-"] + ["not run"] * 4
    assert rows["Stahlberg & Byrne 2017: ridge"][:2] == ["-", "not run"]
    assert rows["Srinivas & Babu 2015: merged into the nearest"][:2] == ["mmlu 22.95", "2,000"]
    assert "by perplexity holds." in notes_of(text, "Table 4")
    assert "| hellaswag acc, 10 shots |" in text
    with (tmp_path / "out" / "table_4_small.csv").open() as file:
        exact = {row[0]: row[1:] for row in csv.reader(file)}
    assert exact["smallest magnitude"][1] == "12345.6" and exact["random"][1] == "600.0"
    assert exact["random"][2] == "30.0" and exact["highest gini"][1] == "not run"
    assert (tmp_path / "out" / "table_4_small.md").read_text() in text + "\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entropy": 700.0}, "does not hold: random (600) is not above entropy (700)."),
        ({"byrne": 500.0}, "does not hold: stahlberg_byrne (500) is not above random (600)."),
        ({"entropy": 15.0}, "does not hold: entropy (15) is not above unpruned (20)."),
        ({"babu": None}, "not known whole, not run: srinivas_babu; the rest is in order."),
    ],
)
def test_whether_the_papers_ordering_holds_is_said(criteria, tmp_path, change, message):
    ((name, perplexity),) = change.items()
    path = tmp_path / "runs" / name / "results.json"
    path.unlink() if perplexity is None else path.write_text(
        json.dumps({"perplexity": perplexity, "parameters_removed_percent": 10.0})
    )
    assert message in nucl.write_paper(criteria, tmp_path / "out")


def test_several_models_have_their_own_tables(criteria, tmp_path):
    other = removal(tmp_path / "x", 7.0, model="org/Other-1B")
    text = nucl.write_paper([*criteria, other], tmp_path / "out")
    assert rows_of(text, "Table 4: data-free removal of a quarter of the neurons, by criterion "
                   "(Other-1B)")["highest entropy (NUCL)"][1:3] == ["7", "not run"]  # fmt: skip
    assert (tmp_path / "out" / "table_4_Other-1B.csv").exists()


def test_models_of_one_name_do_not_mix(tmp_path):
    """Every model that a run writes lies in a directory called "model"."""
    names = ("runs/a/model", "runs/b/model", "x/a/model", "./x/a/model/")
    runs = [removal(tmp_path / str(i), 10.0 * (i + 1), model=name) for i, name in enumerate(names)]
    runs.append(removal(tmp_path / "r", 99.0, model="runs/b/model", revision="step5"))
    nucl.write_paper(runs, tmp_path / "out")
    found = {}
    for path in (tmp_path / "out").glob("table_4_*.csv"):
        with path.open() as file:
            found[path.stem] = {row[0]: row[2] for row in csv.reader(file)}[
                "highest entropy (NUCL)"
            ]
    assert found == {"table_4_runs-a-model": "10.0", "table_4_b": "20.0",
                     "table_4_x-a-model": "35.0", "table_4_b-step5": "99.0"}  # fmt: skip


def test_a_compensation_is_a_row_of_its_own_or_none(criteria, tmp_path):
    more = [
        removal(tmp_path / "more" / name, 7.0, **settings)
        for name, settings in {
            "solved": {"criterion": "magnitude", "compensation": "least_squares"},
            "ridged": {"compensation": "ridge"},
            "turned": {"criterion": "similarity", "compensation": "sum", "reverse": True},
        }.items()
    ]
    text = nucl.write_paper([*criteria, *more], tmp_path / "out")
    rows = rows_of(text, "Table 4")
    assert rows["smallest magnitude"][1] == "12,346" and rows["highest entropy (NUCL)"][1] == "45"
    assert rows["Srinivas & Babu 2015: merged into the nearest"][1] == "2,000"
    note = "In no row, other criteria or compensations: solved, ridged, turned."
    assert note in notes_of(text, "Table 4")


def test_runs_that_cannot_be_compared_are_named(criteria, tmp_path):
    other = removal(tmp_path / "x", 7.0, criterion="gini", window=128, ratio=0.5)
    text = notes_of(nucl.write_paper([*criteria, other], tmp_path / "out"), "Table 4")
    assert "These runs differ in ratio (0.25, 0.5): not comparable." in text
    assert "These runs differ in window (512, 128): not comparable." in text
    assert "differ in criterion" not in text and "differ in seed" not in text


def test_one_text_under_two_paths_is_one_text(tmp_path):
    """What counts is what was in the file when the run began."""
    paths = [
        removal(tmp_path / name, 7.0, text=text, data_root=text)
        for name, text in (("x", "wiki.txt"), ("y", "../wiki.txt"), ("z", "other.txt"))
    ]
    for path, text in zip(paths, ("1", "1", "2"), strict=True):
        inputs = {"text": text, "model": "m", "gone": "0"}
        (tmp_path / path / "inputs.json").write_text(json.dumps(inputs))
    x, y, z = (run.config for run in read_runs(paths))
    assert (x["text"], y["text"], z["text"]) == ("wiki.txt", "wiki.txt", "other.txt")
    assert y["data_root"] == "../wiki.txt" and "gone" not in y
    text = notes_of(nucl.write_paper(paths[:2], tmp_path / "out"), "Table 4")
    assert "differ in text" not in text


def test_how_large_a_compensation_became(criteria, tmp_path):
    path = tmp_path / "runs" / "byrne" / "results.json"
    found = json.loads(path.read_text())
    path.write_text(json.dumps(found | {"largest_lambda_norm": 28.5, "largest_condition": 1e7}))
    text = notes_of(nucl.write_paper(criteria, tmp_path / "out"), "Table 4")
    assert "norm of lambda is 28.5, the largest condition number 10,000,000." in text


def test_table_5_states_both_conventions(tmp_path):
    paths = [removal(tmp_path / "u", 10.0, criterion="none")]
    for i, part in enumerate(("all", "top", "bottom", "even", "odd"), 1):
        paths.append(removal(tmp_path / part, 10.0 * (i + 1), layers=part))
    paths.append(removal(tmp_path / "gini", 999.0, layers="odd", criterion="gini"))
    text = nucl.write_paper(paths, tmp_path / "out")
    rows = rows_of(text, "Table 5")
    assert [row[2] for row in rows.values()] == ["1", "2", "3", "4", "5", "6"]
    even, odd = list(rows)[-2:]
    assert "layers 0, 2, 4" in even and "1, 3, 5, ... from 1: the paper's odd" in even
    assert "layers 1, 3, 5" in odd and "2, 4, 6, ... from 1: the paper's even" in odd
    assert "999" not in text.split("## Table 7")[0].split("## Table 5")[1]


def test_figure_4_has_a_bar_for_each_pair(tmp_path):
    ratios = {0: 1.1, 2: 30.0, 1: 1.3, 10: 2.0}
    paths = [removal(tmp_path / "u", 10.0, criterion="none")]
    paths += [removal(tmp_path / f"p{i}", 10 * x, layers=f"pair:{i}") for i, x in ratios.items()]
    text = nucl.write_paper(paths, tmp_path / "out")
    rows = rows_of(text, "Figure 4")
    assert rows["2, 3"] == ["3, 4", "-", "300", "30", "10"]
    assert list(rows) == ["0, 1", "1, 2", "2, 3", "10, 11"]
    assert "![Figure 4: removal from two adjacent layers (small)](figure_4_small.png)" in text
    assert (tmp_path / "out" / "figure_4_small.png").read_bytes()[:4] == b"\x89PNG"
    table = nucl.nucl_removal.pairs(read_runs(paths))[0]
    (axis,) = nucl_figures.bars(table).axes
    tops = [bar.get_y() + bar.get_height() for bar in axis.patches]
    np.testing.assert_allclose(tops, [1.1, 1.3, 30, 2])
    assert {bar.get_y() for bar in axis.patches} == {1.0}
    assert [label.get_text() for label in axis.get_xticklabels()] == list(rows)
    assert axis.get_yscale() == "log" and "x unpruned" in axis.get_ylabel()


@pytest.fixture
def alphas(tmp_path):
    root = tmp_path / "alpha"
    return [
        training(root / "m0", 0.0, {0: (6.0, 3.0), 10: (6.0, 2.5), 20: (6.0, 2.0)}),
        training(root / "m10", 10.0, {0: (6.0, 3.0), 10: (5.9, 2.4), 20: (5.8, 1.9)}),
        training(root / "m1000", 1000.0, {0: (6.0, 3.0), 10: (5.0, 2.8), 20: (4.0, 2.6)}),
        training(root / "g1", 1.0, {0: (6.0, 3.0), 20: (5.9, 2.1)}, variant="gini"),
        training(root / "late", 100.0, {0: (6.0, 3.0), 10: (5.5, 0.1)}, finished=False),
    ]


def test_figures_2_and_3(alphas, tmp_path):
    runs = read_runs(alphas)
    for key, column in (("figure_2", 0), ("figure_3", 1)):
        metric = nucl_training.FIGURES[key]
        mine = nucl_training.with_curves(runs, metric)
        figure = nucl_figures.lines(mine, metric, nucl_figures.WORDS[key])
        gini, mstd = figure.axes
        assert (gini.get_title(), mstd.get_title()) == ("small, gini", "small, mstd")
        drawn = {line.get_label(): line.get_xydata() for line in mstd.lines}
        assert list(drawn) == [f"alpha = {a}" for a in (0, 10, 100, 1000)]
        expected = {0: (6.0, 3.0), 10: (5.9, 2.4), 20: (5.8, 1.9)}
        points = [(step, pair[column]) for step, pair in expected.items()]
        np.testing.assert_array_equal(drawn["alpha = 10"], points)
    text = nucl.write_paper(alphas, tmp_path / "out")
    with (tmp_path / "out" / "figure_3.csv").open() as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 3 + 3 + 3 + 2 + 2
    assert ["small", "mstd", "1000.0", "20", "2.6"] in rows
    assert "](figure_2.png)" in text and (tmp_path / "out" / "figure_2.png").exists()


def test_tables_2_7_and_8(alphas, tmp_path):
    text = nucl.write_paper(alphas, tmp_path / "out")
    with (tmp_path / "out" / "table_2.csv").open() as file:
        rows = [row for row in csv.reader(file) if row[0] == "small"]
    # The best finished alpha of each variant; one that is not finished counts for nothing.
    assert rows == [
        ["small", "gsm8k", "plain", "-", "2", "-", "0"],
        ["small", "gsm8k", "entropy", "-", "not run", "not run", "not run"],
        ["small", "gsm8k", "gini", "-", "2.1", "-0.1", "1"],
        ["small", "gsm8k", "mstd", "-", "1.9", "0.1", "10"],
    ]
    assert text.count("| Gemma-2 27B |") == 2 and "gains 2.71 points" in text
    settings = rows_of(text, "Table 7")
    assert settings["alpha"][-1] == "0.0, 10.0, 1000.0, 1.0, 100.0"
    assert settings["learning rate"] == ["1e-6", "1e-4 to 1e-6", "1e-05"]
    with (tmp_path / "out" / "table_8.csv").open() as file:
        assert ["small", "gsm8k", "mstd", "-", "10", "0, 10, 100, 1000"] in list(csv.reader(file))


def test_table_3(alphas, tmp_path):
    text = nucl.write_paper(alphas, tmp_path / "one")
    assert set(rows_of(text, "Table 3")) == {"-"}, "one target alone is no Table 3"
    curve = {0: (6.0, 3.0), 20: (6.0, 2.3)}
    more = training(tmp_path / "attention", 10.0, curve, targets=["attention_out"],
                    tasks={"gsm8k": SCORE})  # fmt: skip
    nucl.write_paper([*alphas, more], tmp_path / "two")
    with (tmp_path / "two" / "table_3.csv").open() as file:
        rows = {row[1]: row[2:] for row in csv.reader(file)}
    assert rows["none (alpha = 0)"] == ["-", "2", "-", "mstd, 0", "not run"]
    assert rows["FFN, outgoing"] == ["+2.71", "1.9", "0.1", "mstd, 10", "not run"]
    assert rows["attention, outgoing"] == ["-", "2.3", "-0.3", "mstd, 10", f"gsm8k {CELL}"]
    assert rows["FFN, incoming (gated)"] == ["-"] + ["not run"] * 4


def test_a_sweep_stands_for_its_points(criteria, tmp_path):
    names = ["random0", "random1", "nothing", "entropy"]
    points = [{"name": name, "settings": {}} for name in names]
    (tmp_path / "runs" / "sweep.json").write_text(json.dumps({"points": points}))
    given = nucl.gather([str(tmp_path / "runs"), criteria[0]])
    assert [run.label for run in given.runs] == ["random0", "random1", "entropy", "unpruned"]
    text = nucl.write_paper([str(tmp_path / "runs"), criteria[0]], tmp_path / "out")
    runs = rows_of(text, "Runs")
    assert runs["runs/nothing"] == ["not run", "no"] and runs["entropy"] == ["finished", "yes"]
    assert rows_of(text, "Table 4")["random"][1] == "450 [400, 500] n=2"
    only = tmp_path / "empty"
    only.mkdir()
    (only / "sweep.json").write_text(json.dumps({"points": points}))
    assert "not run" in nucl.write_paper([str(only)], tmp_path / "none")


def test_accuracies_go_to_the_run_whose_model_was_evaluated(alphas, tmp_path):
    (tmp_path / "scores").mkdir()
    config = {"model": f"{alphas[1]}/model", "evaluation": "tasks", "tasks": ["gsm8k"]}
    (tmp_path / "scores" / "config.json").write_text(json.dumps(config))
    results = {"model": config["model"], "tasks": {"gsm8k": SCORE}}
    (tmp_path / "scores" / "results.json").write_text(json.dumps(results))
    nucl.write_paper([*alphas, str(tmp_path / "scores")], tmp_path / "out")
    with (tmp_path / "out" / "table_2.csv").open() as file:
        rows = {row[2]: row for row in csv.reader(file) if row[0] in ("model", "small")}
    assert rows["loss"][-1] == "gsm8k exact_match"
    assert rows["mstd"][-1] == "0.25 [0.1, 0.5] n=8" and rows["plain"][-1] == "not run"


def test_without_runs_of_a_kind_everything_is_not_run(alphas, criteria, tmp_path):
    text = nucl.write_paper(alphas[:1], tmp_path / "out")
    assert all(row[1:] == ["not run"] * 3 for row in rows_of(text, "Table 4").values())
    assert rows_of(text, "Figure 4") == {"every pair": ["every pair", "-"] + ["not run"] * 3}
    text = nucl.write_paper(criteria[:1], tmp_path / "other")
    assert not (tmp_path / "other" / "figure_2.png").exists()
    with (tmp_path / "other" / "table_1.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    assert {row[0] for row in rows} == {"PaLM-2"} and {row[4] for row in rows} == {"closed weights"}
    for number_ in (1, 2, 3, 4, 5, 7, 8):
        assert f"## Table {number_}: " in text
    for number_ in (2, 3, 4):
        assert f"## Figure {number_}: " in text


def test_no_number_of_the_paper_is_made_up(tmp_path, criteria):
    """All that is printed as the paper's comes from the one module, and only what it holds."""
    assert paper_nucl.TABLE_3 == {"ffn_out": 2.71}
    assert {v for cells in paper_nucl.TABLE_4.values() for v in cells.values()} == {22.95}
    text = nucl.write_paper(criteria, tmp_path / "out")
    for title in ("Table 5", "Figure 4"):
        section = notes_of(text, title)
        index = 2 if title == "Table 5" else 3
        cells = [line.split("|")[index].strip() for line in section.splitlines() if "|" in line]
        assert {cell for cell in cells[2:] if not re.match(r"[-:]+$", cell)} <= {"-"}


def test_numbers_as_cells():
    assert number(None) == "not run" and number("x") == "x"
    assert number(1234567.0) == "1,234,567" and number(0.000123456) == "0.0001235"
    assert number(float("inf")) == "inf" and number(float("nan")) == "nan"
    assert number(Spread(2.0, 1.0, 3.0, 4)) == "2 [1, 3] n=4"
    assert spread([]) is None and spread([2.0, 2.0]) == 2.0
    assert spread([1.0, 3.0]) == Spread(2.0, 1.0, 3.0, 2)


def test_from_the_command_line(criteria, alphas, tmp_path):
    out = tmp_path / "out"
    done = run_script("report", "--paper=nucl", *criteria, *alphas, f"--out={out}")
    assert done.code == 0, done.err
    assert done.out == (out / "nucl.md").read_text() and "nucl.md" in done.err
    assert "--paper" in run_script("report", "--paper=other", *criteria).error
    assert "no run given" in run_script("report", "--paper=nucl", f"--out={tmp_path / 'x'}").error
    error = run_script("report", "--paper=nucl", "nowhere", f"--out={tmp_path / 'x'}").error
    assert "'nowhere' is no run" in error and not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    assert (
        "is a file"
        in run_script("report", "--paper=nucl", *criteria, f"--out={tmp_path}/file").error
    )
