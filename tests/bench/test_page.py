"""The page of benchmarks: one section per question, one row per run, numbers as in the files."""

import json
import re
import shutil

import pytest
from ml_collections import ConfigDict
from tiny_models import REPOSITORY
from tiny_runs import refused

from ffn_heterogeneity.bench import run
from ffn_heterogeneity.bench.page import write_page
from ffn_heterogeneity.io.files import write_json

KEPT = "results/benchmarks"
QUESTION = {"Is it fast?": ["Theirs / ours", r"(\w+), \w / \w", r"^\w+|\d+ rows"]}
CARD = {"device": "NVIDIA H100", "processor": "Xeon", "cores": 8, "units": "amx_bf16"}


def results(*ratios, **changes) -> dict:
    """The results file of a new benchmark with its question."""
    tables = [
        {
            "title": "tiny, 3 rows; 2 rounds",
            "columns": ["program", "mb"],
            "rows": [["call", "7.5"]],
        },
        {"title": "", "columns": ["ratio", "median"], "rows": [list(one) for one in ratios]},
    ]
    made = {"benchmark": "new", "questions": QUESTION, "machine": CARD, "tables": tables}
    return {**made, **changes}


def test_the_committed_page_is_what_the_script_makes(tmp_path):
    """The order of sections does not depend on the order of the files."""
    shutil.copytree(REPOSITORY / "docs" / KEPT, tmp_path / KEPT)
    paths = sorted(map(str, (tmp_path / KEPT).glob("*.json")))
    page = write_page(paths, tmp_path)
    assert page == (tmp_path / "benchmarks.md").read_text()
    assert page == (REPOSITORY / "docs/benchmarks.md").read_text()
    headings = re.findall(r"^## .*", page, re.M)
    assert headings == re.findall(r"^## .*", write_page(paths[::-1], tmp_path), re.M)


def test_every_run_has_its_rows_and_every_ratio_its_file():
    page = (REPOSITORY / "docs/benchmarks.md").read_text()
    for path in sorted((REPOSITORY / "docs" / KEPT).glob("*.json")):
        rows = [line for line in page.splitlines() if f"({KEPT}/{path.name})" in line]
        text = path.read_text()
        cells = [cell.strip() for row in rows for cell in row.split("|")[3:-1]]
        assert rows and all(f'"{one}"' in text for one in cells if one != "-"), path


def test_a_new_benchmark_brings_its_question(tmp_path):
    """Only the card's name is shown; brackets of a label make no column."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    write_json(paths[0], results(("call, a / b", "2.0 (1 .. 3)"), ("call, b", "9.0")))
    write_json(paths[1], results(("call, a / b (no units)", "4.0"), ("other, a / b", "5.0")))
    page = write_page(paths, tmp_path / "out")
    heading, reading, table = page.split("## ")[1].strip().split("\n\n")
    assert (heading, reading) == ("Is it fast?", "Theirs / ours:")
    header, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    assert header == ["machine", "size", "call", "other"]
    assert rows == [
        ["[NVIDIA H100](../a.json)", "tiny, 3 rows", "2.0 (1 .. 3)", "-"],
        ["[NVIDIA H100](../b.json)", "tiny, 3 rows", "4.0", "5.0"],
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"perplexity": 3}, "is not the results.json of scripts/benchmark.py"),
        ({"benchmark": "mt_bench", "machine": CARD}, "is not the results.json"),
        (results(benchmark="other", questions={}), "is not the results.json"),
        (results(tables=[]), "is not the results.json"),
        (results(), "answers none of its benchmark's questions"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, values, message):
    path = tmp_path / "results.json"
    write_json(path, values)
    refused(f"{re.escape(str(path))} {message}", write_page, [str(path)], tmp_path)
    assert not (tmp_path / "benchmarks.md").exists()


def test_no_files_are_refused(tmp_path):
    refused("--benchmarks needs the results.json", write_page, [], tmp_path)


def test_results_keep_the_questions(tmp_path, monkeypatch):
    questions = run.CASES["nll"][1]
    monkeypatch.setitem(run.CASES, "nll", (lambda *_: {"tables": []}, questions))
    run.run(ConfigDict({"name": "nll"}), tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["questions"] == json.loads(json.dumps(questions))
