"""Every measured cell of the reports, as the engine before the functions in plain pandas made it.

golden/values.json.xz holds {report: {table: rows of cells}} of commit 1f169a1, of the archives in
docs/results/runs and of the runs that `builders` makes: a number, [mean, low, high, n, how], or
text; of a figure x and y. Labels are not in it: the functions make them now. golden/claims.json
holds what those functions first said of every claim: [run on, measured, verdict]. P-32's and MLP
Fusion's values were made again when scores became those of the last evaluation, not of the best
(and when the kernels were measured again);
the two on depth, when they were first judged seed by seed, and their figure, when two
runs of a seed became their mean;
`test_scores_are_those_of_the_last_evaluation` recomputes them without the reports.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import tarfile
from pathlib import Path

import builders
import pytest
from tiny_models import REPOSITORY

import ffn_heterogeneity as fh
from ffn_heterogeneity import papers
from ffn_heterogeneity.report.paper import draw_all, gather, write_paper
from ffn_heterogeneity.report.tables import number

GOLDEN = Path(__file__).parent / "golden" / "values.json.xz"
VALUES = json.loads(lzma.decompress(GOLDEN.read_bytes()))
CLAIMS = json.loads(GOLDEN.with_name("claims.json").read_text())
ARCHIVES = {
    "nucl": ("rivals-smollm2-135m-instruct-0.25", "own-smollm2", "nucl-gsm8k-qwen2.5-coder"),
    "massive_weights": ("macdrop-*", "massive-states"),
    "p32": ("p32-*",),
    "mlp_fusion": ("ntk-*", "fusion-*", "webnlg-*"),
    "docs/studies/own_removal.py": ("own-*",),
    "docs/studies/massive_removal.py": ("rivals-smollm2-*-0.25", "needed-smollm2-*-0.25"),
}
# Points that the engine before lost: LoRA's schedule had the label of DoRA's.
MORE = {("massive_weights", "figure_7"): 60}


def rows_of(one) -> list:
    """The measured cells of each row, None left out; x and y of a figure."""
    if one.header[-1] == "y":
        return [list(row[-2:]) for row in one.rows]
    place = list(one.header).index("from")
    rows = [row[place + 1 :] for row in one.rows if str(row[place]).startswith("here")]
    rows = [[x for x in row if x is not None] for row in rows]
    return [row for row in rows if row]


def key(cell) -> str:
    """Text, equal where numbers agree to 9 digits."""
    if isinstance(cell, (list, tuple)):
        return ", ".join(map(key, cell))
    if isinstance(cell, str) or not math.isfinite(cell):
        return str(cell)
    return f"{float(cell):.9g}" if abs(cell) > 1e-9 else "0"


def check(name: str, paper, paths: list[str]) -> None:
    made = {one.key: one for one in draw_all(paper, gather(paper, paths)[1])}
    assert [list(row[2:]) for row in made.pop("claims").rows] == CLAIMS.get(name, [])
    drawn = {key: rows_of(one) for key, one in made.items()}
    assert {table for table, rows in drawn.items() if rows} == set(VALUES[name])
    for table, wanted in VALUES[name].items():
        found, wanted = list(map(key, drawn[table])), list(map(key, wanted))
        more = sorted(found)
        for row in wanted:
            assert row in more, (table, row)
            more.remove(row)
        assert len(more) == MORE.get((name, table), 0), (table, more)


@pytest.mark.parametrize("name", ARCHIVES)
def test_archives(name):
    folder = REPOSITORY / "docs/results/runs"
    paths = sorted(str(x) for stem in ARCHIVES[name] for x in folder.glob(f"{stem}.tar.xz"))
    assert len(paths) >= len(ARCHIVES[name])
    check(name, papers.load(str(REPOSITORY / name) if "/" in name else name), paths)


@pytest.mark.parametrize("name", ["nucl", "jreg"])
def test_runs_by_hand(name, tmp_path):
    check(f"built {name}", papers.load(name), getattr(builders, f"{name}_runs")(tmp_path))


def test_scores_are_those_of_the_last_evaluation():
    """Read from metrics.jsonl by hand: the mean over the seeds of each pooling."""
    path, scores = REPOSITORY / "docs/results/runs/p32-mrpc-minilm-poolings.tar.xz", {}
    with tarfile.open(path) as archive:
        for name in archive.getnames():
            if pooling := re.search(r"seed=\d,(pooling=\w+)/metrics.jsonl", name):
                lines = archive.extractfile(name).read().splitlines()
                f1 = [x["validation/f1"] for x in map(json.loads, lines) if "validation/f1" in x]
                scores.setdefault(pooling[1], []).append(100 * f1[-1])
    means = {key([sum(x) / 5, min(x), max(x), 5, "range"]) for x in scores.values()}
    paper = papers.load("p32")
    drawn = {one.key: one for one in draw_all(paper, gather(paper, [str(path)])[1])}
    assert len(means) == 3
    assert means <= {key(row[0]) for row in rows_of(drawn["paired"])}


@pytest.mark.parametrize(("task", "metric"), [("mrpc", "f1"), ("stsb", "spearman")])
def test_the_table_of_rates_has_the_last_evaluations(task, metric):
    runs, found = REPOSITORY / f"docs/results/runs/rates-{task}-minilm-poolings.tar.xz", []
    with tarfile.open(runs) as archive:
        for name in archive.getnames():
            if name.endswith("/metrics.jsonl"):
                rows = map(json.loads, archive.extractfile(name).read().splitlines())
                last = [row for row in rows if f"validation/{metric}" in row][-1]
                names = (metric, f"{metric}_low", f"{metric}_high")
                value, low, high = (f"{100 * last[f'validation/{x}']:.4g}" for x in names)
                found.append(f"{value} [{low}, {high}]")
    table = (REPOSITORY / "docs/results/p32_rates.md").read_text()
    assert len(found) == 6 and all(cell in table for cell in found)


def test_a_run_that_began_again_is_said_and_no_pair(tmp_path):
    """Its seed is another; so it is paired with no run of the seed that was asked for."""
    archive = REPOSITORY / "docs/results/runs/p32-mrpc-minilm-poolings.tar.xz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    paper, tables = papers.load("p32"), []
    for _ in range(2):
        drawn = {one.key: one for one in draw_all(paper, gather(paper, [str(tmp_path)])[1])}
        tables.append(drawn["paired"])
        for path in tmp_path.rglob("results.json"):
            config = json.loads((path.parent / "config.json").read_text())
            if config["pooling"] == "p32" and config["seed"] == 0:
                path.write_text(json.dumps(json.loads(path.read_text()) | {"retries": 1}))
    before, after = ([*one.header] for one in tables)
    assert set(after) - set(before) == {"began again"}
    rows = [next(x for x in one.rows if tuple(x[1:3]) == ("mrpc", "P-32")) for one in tables]
    column = [one.header.index("Δ vs Baseline") for one in tables]
    pairs = [row[at].n for row, at in zip(rows, column, strict=True)]
    assert pairs[1] == pairs[0] - 1


def test_the_table_at_the_chosen_rate_is_the_report_of_its_archives():
    folder, paper = REPOSITORY / "docs/results", papers.load("p32")
    text = (folder / "p32_chosen.md").read_text()
    runs = gather(paper, [str(folder / "runs/rates-minilm-chosen.tar.xz")])[1]
    drawn = {one.key: one for one in draw_all(paper, runs)}
    cells = [x for key in ("paired", "test_sets") for row in rows_of(drawn[key]) for x in row]
    assert len(cells) == 35
    assert [x for x in cells if number(x) not in text] == []
    for path in ("rates-stsb-minilm-depths-1e-4", "p32-stsb-minilm-depths"):
        frame = fh.results(folder / f"runs/{path}.tar.xz").query("what == 'spearman'")
        last = frame[frame.step.notna()].groupby("run").last()
        shallow = last[last["config.truncate.blocks"] <= 2].value
        assert len(shallow) == 2 and all(f"| {100 * x:.4g} |" in text for x in shallow)


def test_the_table_of_recovery_is_the_report_of_its_archive():
    """Evaluations on the way (4 batches, or all) are no difference, unless the best is scored."""
    folder, paper = REPOSITORY / "docs/results", papers.load("mlp_fusion")
    text = (folder / "recover_spread.md").read_text()
    archives = [f"runs/spread-recover-{name}.tar.xz" for name in ("smollm2", "gemma3")]
    runs = gather(paper, [str(folder / name) for name in archives])[1]
    assert runs["runs"]["recover.eval.max_batches"].nunique() == 2
    drawn = {one.key: one for one in draw_all(paper, runs)}["after_recovery"]
    cells = [x for row in rows_of(drawn) for x in row]
    assert len(cells) > 15 and [x for x in cells if number(x) not in text] == []
    best = {"runs": runs["runs"].assign(**{"recover.export.weights": "best"})}
    with pytest.raises(ValueError, match=r"differ in recover\.eval\.max_batches"):
        list(draw_all(paper, runs | best))


KEPT = {
    ("jreg", "jreg-seeds", "jreg_seeds"): ("paired", "claims", "table_3", "pretraining"),
    (str(REPOSITORY / "docs/studies/experts.py"), "experts-*", "experts"): (
        "training",
        "similarity",
        "equal_parameters",
        "equal_flops",
        "kinds",
        "zeroed",
        "macdrop",
        "claims",
    ),
    (str(REPOSITORY / "docs/studies/shrink.py"), "shrink-*", "shrink"): (
        "compared",
        "overall",
        "shares",
        "tasks",
        "job",
    ),
    (str(REPOSITORY / "docs/studies/reach.py"), "reach-*", "reach"): ("added", "dearer"),
    (str(REPOSITORY / "docs/studies/switch.py"), "switch-*", "switch"): (
        "recovery",
        "training",
        "kernels",
        "predictions",
        "labelled",
        "claims",
    ),
}


@pytest.mark.parametrize("name", KEPT, ids=lambda name: name[2])
def test_tables_are_the_report_of_their_archive(name, tmp_path):
    study, archives, start = name
    folder = REPOSITORY / "docs/results"
    paths = sorted(map(str, (folder / "runs").glob(f"{archives}.tar.xz")))
    write_paper(papers.load(study), paths, tmp_path)
    for key in KEPT[name]:
        assert (tmp_path / f"{key}.md").read_text() == (folder / f"{start}_{key}.md").read_text()
