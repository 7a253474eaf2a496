"""rows.jsonl of every command, of every kept archive, and of benchmarks; damaged rows."""

from __future__ import annotations

import csv
import json
import re
import tarfile

import numpy as np
import pytest
from tiny_models import REPOSITORY, TEXT, save_tiny, save_tiny_reader
from tiny_runs import read_rows as rows_in
from tiny_runs import refused, small_run, write_rows

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate.answer_metrics import wilson_interval
from ffn_heterogeneity.evaluate.chat.judge import pairwise_summary, single_summary
from ffn_heterogeneity.io.rows import FIELDS, MAX_LINE, read_rows, rows_of
from ffn_heterogeneity.report.frame import units

pytestmark = pytest.mark.usefixtures("compiled_quickly")
ARCHIVES = sorted((REPOSITORY / "docs/results/runs").glob("*.tar.xz"))
# The names in docs/rows.md; "<loss>" and similar placeholders match any word.
NAMES = [
    re.compile(re.sub(r"<\w+>", r"[^/]+(/.+)?", name))
    for cell in re.findall(r"^\| (.+?) \|", (REPOSITORY / "docs/rows.md").read_text(), re.M)
    for name in cell.replace("`", "").split(", ")
    if not name.startswith("<")
]


def listed(what: str) -> bool:
    """True if the page has the name, alone or after the name of its measurement or loss."""
    what = what.removesuffix("/median")
    return any(name.fullmatch(form) for name in NAMES for form in (what, what.rpartition("/")[2]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A work directory of every command."""
    root = tmp_path_factory.mktemp("runs")
    model, text = save_tiny(root / "tiny"), root / "text.txt"
    text.write_text(TEXT)
    small = small_run(text, seeds=(0, 1))
    train = {key.replace("__", "."): value for key, value in small.items()}
    read = {"text": str(text), "window": 27, "max_windows": 3, "compute_dtype": "float32"}
    settings = {"model": str(model)}
    fh.run("train", f"nucl_finetune:{model},text", root / "train", train)
    fh.run("evaluate", "perplexity", root / "evaluate", settings | read)
    for name in ("connectivity", "displacement", "massive"):
        more = read if name == "displacement" else {}
        fh.run("evaluate", f"analyze:{name}", root / "analyze" / name, settings | more)
    (root / "few.csv").write_text("sentence,label\na b,0\nc d,1\n")
    few = {"data.path": str(root / "few.csv"), "methods": ("svd",)}
    fh.run("evaluate", "analyze:ntk", root / "analyze" / "ntk", settings | few)
    fh.run("in_memory", "prune_table", root / "in_memory", settings | read)
    fh.run("surgery", "prune", root / "compress", settings)
    answer(root, settings)
    return root


def answer(root, settings):
    """A classifier, its predictions, and answers to a question with two turns."""
    reader, exact = save_tiny_reader(root / "reader"), {"compute_dtype": "float32"}
    labelled = [{"text": text, "label": text[0]} for text in ("low", "high") * 8]
    rows = write_rows(root / "labelled.jsonl", labelled)
    question = {"question_id": 81, "category": "math", "turns": ["Why?", "How?"]}
    write_rows(root / "data/mt_bench/question.jsonl", [question])
    train = {"data.path": str(rows), "data.validation_fraction": 0.25, "fields": "text"}
    train |= {"lengths": (16,), "batch_size": 8, "epochs": 1.0, "tensorboard": False}
    fh.run("train", f"p32_glue:{reader},labels", root / "labels", train | exact)
    said = {"model": str(root / "labels/model"), "input": str(rows)}
    fh.run("evaluate", "classify", root / "classify", said | exact)
    talk = {"data_root": str(root / "data"), "max_new_tokens": 2}
    fh.run("evaluate", "chat", root / "chat", settings | talk | exact)


INTERVAL = {"low", "high", "n", "how"}
SEED, LAYER, SIZED = {"seed"}, {"layer"}, {"n", "units"}
PART, NEURON, EVERY = {"split", "step", "seed"}, {"layer", "neuron"}, {"layer", "seed"}
# Directory of a command -> what it measures -> the fields of those rows.
SCHEMA = {
    "train/seed_0": {"nll": PART, "nucl": PART, "best/nll": PART, "seconds": SEED},
    "evaluate": {"nll": SIZED, "perplexity": SIZED},
    "analyze/connectivity": {"entropy": LAYER, "mstd": LAYER},
    "analyze/displacement": {"before_final_norm/psi": LAYER, "after_final_norm/zeta_L": set()},
    "analyze/massive": {"h_out": NEURON, "h_out/median": LAYER, "massive_rank": NEURON},
    "in_memory": {"perplexity": SIZED | SEED, "ffn_widths_after": EVERY},
    "compress": {"ffn_widths_after": EVERY, "parameters_after": SEED},
    "labels": {"accuracy": PART | INTERVAL, "rows": {"split", "seed"}, "classification": PART},
    "classify": {"accuracy": INTERVAL | {"units"}, "rows": set(), "rows_cut": set()},
    "chat": {"answered": SEED, "turns": SEED, "turns_no_room": SEED},
}
SCHEMA["analyze/massive"]["layer"] = set()
SCHEMA["in_memory"]["parameters_removed_percent"] = SEED
SCHEMA["classify"]["matthews"] = INTERVAL
SCHEMA["labels"] |= {"lambda": EVERY, "best/accuracy": PART, "depth_weights": EVERY}


def test_the_rows_of_every_command(runs):
    """Rows have known fields and equal `rows_of` of results.json; the page lists their names."""
    everything = fh.results(runs)
    unlisted = [what for what in everything.what.unique() if not listed(what)]
    assert unlisted == []
    for name, wanted in SCHEMA.items():
        run_rows = everything[everything.run == str(runs / name)]
        for what, fields in wanted.items():
            rows = run_rows[run_rows.what == what]
            assert len(rows), f"{name}: no {what}"
            has = {field for field in FIELDS if rows[field].notna().all()}
            assert has == {"what", "value", *fields}, f"{name}: {what}"
        results = json.loads((runs / name / "results.json").read_text())
        assert rows_in(runs / name / "rows.jsonl") == rows_of(results)
    assert set(everything[everything.what == "h_out"].layer) == {1, 2, 3, 4}
    assert set(everything.how.dropna()) == {"bootstrap"}


def test_right_and_wrong_of_each_row_of_a_classifier(runs):
    rows = fh.results(runs / "classify")
    (row,) = rows[rows.what == "accuracy"].itertuples()
    with (runs / "classify/predictions.csv").open() as file:
        right = [line["label"] == line["prediction"] for line in csv.DictReader(file)]
    assert [*units(row.run, row.units).values()] == right and row.value == np.mean(right)


def test_the_rows_of_a_judge():
    """Rows of ratings and pairs, from summaries without a server."""
    same = {"question_id": 1, "g1_winner": "model_1", "g2_winner": "model_1"}
    rows = [same | {"turn": turn, "score": 2.0 + turn} for turn in (1, 2)]
    summaries = [judged(rows, {1: "math"}) for judged in (single_summary, pairwise_summary)]
    by_name = {row["what"]: row for one in summaries for row in rows_of(one | {"judged": 2})}
    assert not [what for what in by_name if not listed(what)] and by_name["by_turn/2"]["value"] == 4
    ends = [(by_name[name]["how"], by_name[name]["n"]) for name in ("score", "win_rate")]
    assert ends == [("normal", 1), ("Wilson", 1)]
    # Two turns of a question that always agree are one draw.
    pairs = (("model_1",) * 2, ("model_2",) * 2, ("tie",) * 2, ("model_1", "model_2"))
    rows = [
        {"question_id": i, "turn": turn, "score": float(i), "g1_winner": a, "g2_winner": b}
        for i, (a, b) in enumerate(pairs)
        for turn in (1, 2)
    ]
    single, pairwise = (
        single_summary(rows, dict.fromkeys(range(4), "math")),
        pairwise_summary(rows, {}),
    )
    half = 1.96 * np.std(range(4), ddof=1) / 2
    assert single["score_high"] - single["score"] == pytest.approx(half)
    assert (pairwise["win_rate_low"], pairwise["win_rate_high"]) == wilson_interval(2, 4)
    assert (single["n"], single["turns"]) == (pairwise["n"], pairwise["turns"]) == (4, 8)


def test_a_run_over_seeds_is_its_seeds_and_settings_are_columns(runs):
    frame = fh.results(runs / "train")
    assert set(frame.run) == {str(runs / "train" / f"seed_{seed}") for seed in (0, 1)}
    assert set(frame.seed) == {0, 1} and set(frame["config.losses.nucl.variant"]) == {"mstd"}
    assert frame["step"].dtype == "Int64" and frame.value.dtype == "float64"
    results = json.loads((runs / "train/seed_1/results.json").read_text())
    last = frame[(frame.what == "nll") & (frame.seed == 1) & (frame.step == 2)]
    assert last.value.item() == results["final"]["validation/nll"]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "docs/results/benchmarks").glob("*.json")))
def test_rounds_of_a_benchmark_are_its_median(path):
    results = json.loads(path.read_text())
    rows = rows_of(results)
    assert rows and not [row for row in rows if "layer" in row]
    by_name = {row["what"]: row for row in rows}
    for program, seconds in results.get("seconds", {}).items():
        row = by_name[f"seconds/{program}"]
        assert (row["value"], row["n"]) == (np.median(seconds), len(seconds))
    for pair, (ratio, low, high) in results.get("ratios", {}).items():
        row = by_name[f"ratios/{pair}"]
        found_here = [row[key] for key in ("value", "low", "high", "how")]
        assert found_here == [ratio, low, high, "bootstrap"]
    assert not [what for what in by_name if not listed(what)]


def test_layers_count_from_1_and_lists_of_experts_are_no_layers():
    reports = [{"layer": 0, "residual": 0.5}, {"layer": 2, "residual": 0.25}]
    merged = [{"layer": 1, "usage": [3, 4], "similarity": 0.5}]
    rows = rows_of({"compensated": reports, "merged": merged, "ffn_widths_after": [8, 9]})
    assert [(row["what"], row["layer"], row["value"]) for row in rows] == [
        ("compensated/residual", 1, 0.5),
        ("compensated/residual", 3, 0.25),
        ("merged/similarity", 2, 0.5),
        ("ffn_widths_after", 1, 8),
        ("ffn_widths_after", 2, 9),
    ]


def test_names_of_the_user_are_no_settings():
    results = {"texts": {"first": {"nll": 1.0, "windows": 3}}, "predicted": {"train": 3, "test": 2}}
    rows = {row["what"]: row["value"] for row in rows_of(results | {"first": 5, "token": 7})}
    assert rows == {"texts/first/nll": 1.0, "predicted/train": 3, "predicted/test": 2}


def test_curves_are_those_of_metrics(runs):
    curves = fh.curves(runs / "train", what=["train/loss", "validation/nll"])
    assert set(curves.what) == {"loss", "nll"} and set(curves.seed) == {0, 1}
    rows = rows_in(runs / "train/seed_1/metrics.jsonl")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert list(curves[(curves.what == "loss") & (curves.seed == 1)].value) == losses


def test_archives_are_read_as_what_is_in_them(runs, tmp_path):
    path, names = tmp_path / "all.tar.xz", ("train", "evaluate")
    with tarfile.open(path, "w:xz") as archive:
        for name in names:
            archive.add(runs / name, f"runs/{name}")
    inside, outside = fh.results(path), fh.results(*(runs / name for name in names))
    assert inside.run.str.startswith(str(path)).all()
    shown = [*FIELDS, "config.seed", "config.window"]
    one, other = (frame[shown].astype(str).values.tolist() for frame in (inside, outside))
    assert sorted(one) == sorted(other)


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name.split(".tar")[0])
def test_the_archives_that_are_kept(path):
    """Runs of earlier versions: every name is listed, and every run has its settings."""
    frame = fh.results(path)
    assert not [what for what in frame.what.unique() if not listed(what)]
    with tarfile.open(path) as archive:
        folders = {name.rpartition("/")[0] for name in archive.getnames() if "results" in name}
    assert frame.run.nunique() == len(folders) and frame["config.model"].notna().all()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"what": "nll"}', "'value'"),
        ("[1]", "not a row"),
        ("{", "Expecting"),
        ('{"what": "nll", "value": "low"}', "'value' is no float: None"),
        ('{"what": "nll", "value": 1, "layer": 1.5}', "'layer' is no int"),
        ('{"what": "nll", "value": true}', "'value' is no float"),
        ('{"what": 3, "value": 1}', "'what' is no str"),
        ('{"what": "nll", "value": 1, "cell": "x"}', "no field 'cell'"),
        ('{"what": "' + "x" * MAX_LINE + '", "value": 1}', "characters"),
    ],
)
def test_damaged_rows_are_refused_by_file_and_line(line, words, tmp_path):
    good = '{"what": "nll", "value": 1.0}\n'
    refused(rf"x, line 2: .*{words}", read_rows, good + line, "x")
    (tmp_path / "rows.jsonl").write_text(good + line)
    refused(r"rows.jsonl, line 2", fh.results, tmp_path)
