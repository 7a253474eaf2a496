"""papers/*.json: every number that the papers print, against a second typing of them."""

from __future__ import annotations

import inspect
import json
import re

import pytest
from tiny_models import REPOSITORY

from ffn_heterogeneity import papers
from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report.paper import write_paper

STUDIES = sorted((REPOSITORY / "docs/studies").glob("*.py"))
NUCL, JREG = (printed(name)["tables"] for name in ("nucl", "jreg"))


def rows_of(table):
    """labels -> numbers."""
    n = len(table["index"])
    return {tuple(row[:n]): row[n:] for row in table["rows"]}


@pytest.fixture(scope="module")
def typed(shared_data):
    """The other typing, by paper: table's key -> numbers."""
    folder = shared_data.parent / "papers" / "printed"
    typed = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("nucl", "jreg")}
    return {name: {"_".join(key.split()[0].split("_")[:2]): value for key, value in tables.items()}
            for name, tables in typed.items()}  # fmt: skip


def test_nucl(typed):
    other = typed["nucl"]
    first = other["table_1"]
    blocks = [first["first task (accuracy)"], first["second task (avg. score)"]]
    numbers = [row for block in blocks for row in block.values()] + [first["average"]]
    assert list(rows_of(NUCL["table_1"]).values()) == numbers
    assert [x[1] for x in rows_of(NUCL["table_1"])][:3] == list(blocks[0])
    assert {key[0]: row for key, row in rows_of(NUCL["table_2"]).items()} == other["table_2"]
    assert [row[0] for row in rows_of(NUCL["table_3"]).values()] == list(other["table_3"].values())
    keys = ("unpruned", "srinivas_babu", "stahlberg_byrne", "random", "magnitude", "entropy")
    expected = [list(other["table_4"][key].values()) for key in keys]
    assert list(rows_of(NUCL["table_4"]).values()) == expected
    assert [row[0] for row in rows_of(NUCL["table_5"]).values()] == list(other["table_5"].values())
    for key in ("table_7", "table_8"):
        expected = [row for task in other[key].values() for row in task.values()]
        assert list(rows_of(NUCL[key]).values()) == expected


def test_jreg(typed):
    other = typed["jreg"]
    assert {key[0]: row for key, row in rows_of(JREG["table_1"]).items()} == other["table_1"]
    for key in ("table_2", "table_3"):
        expected = {}
        for size, rows in other[key].items():
            for name, row in rows.items():
                alpha = None if name == "baseline" else float(name.rpartition("=")[2])
                expected[size, alpha] = list(row.values()) if isinstance(row, dict) else row
        mine = {(size, alpha): row for (size, _, alpha), row in rows_of(JREG[key]).items()}
        mine = {(size, None if x == "-" else float(x)): row for (size, x), row in mine.items()}
        assert mine == expected
    assert list(rows_of(JREG["table_4"]).values()) == list(other["table_4"].values())
    rows, sizes = rows_of(JREG["table_5"]), JREG["table_5"]["columns"]
    names = {"layers": "Layers", "d_model": "Model Dim", "ffn": "FFN Dim"}
    names["heads"] = "Attention Heads"
    for i, size in enumerate(sizes):
        mine = {key: rows[name,][i] for key, name in names.items()}
        assert mine == other["table_5"][size]
    assert set(rows["Vocabulary Size",]) == {other["table_5"]["vocabulary"]}
    assert {" ".join(key): row for key, row in rows_of(JREG["table_7"]).items()} == other["table_7"]
    steps = {key[1].replace(",", ""): row[0] for key, row in rows_of(JREG["figure_5"]).items()}
    assert steps == other["figure_5"]


def test_means_and_gains_are_those_of_their_rows():
    """What follows from other numbers; the two slips of JREG's Table 2 are the only ones."""
    for row in rows_of(NUCL["table_4"]).values():
        assert sum(row[:7]) / 7 == pytest.approx(row[7], abs=0.0051)
    rows = rows_of(JREG["table_2"]).items()
    wrong = {key for key, row in rows if abs(sum(row[:9]) / 9 - row[9]) > 0.0501}
    assert wrong == {("170M", "JREG (ours)", "0.3"), ("1B", "JREG (ours)", "1.0")}
    scores, gains = rows_of(NUCL["table_8"]), rows_of(NUCL["table_2"])
    for task, column in (("MBPP (3-shot success rate in %)", 0), ("GSM8K (accuracy in %)", 1)):
        both = (scores[task, f"{kind} fine-tuning"] for kind in ("Standard", "NUCL"))
        for standard, nucl, gain in zip(*both, gains.values(), strict=True):
            assert 100 * (nucl / standard - 1) == pytest.approx(gain[column], abs=0.0051)
    assert gains["2B",][1] == rows_of(NUCL["table_3"])["FFN outgoing",][0] == 2.71


@pytest.mark.parametrize("name", [*papers.NAMES, *map(str, STUDIES)])
def test_what_is_drawn_has_its_function(name):
    """A function of runs and curves; a row has a cell for every label and column."""
    texts, functions = printed(name), papers.load(name).functions
    ours = {"tables": {}, "figures": {}, **texts.get("ours", {})}
    drawn = {*texts["claims"], *texts["figures"], *ours["figures"]}
    drawn |= {key for key, table in ours["tables"].items() if "rows" not in table}
    drawn |= {key for key, table in texts["tables"].items() if "title" in table}
    drawn |= {key for key in texts["tables"] if key in functions}
    for key in drawn:
        needed = inspect.signature(functions[key]).parameters.values()
        assert {x.name for x in needed if x.default is x.empty} <= {"runs", "curves"}, key
    for table in texts["tables"].values():
        if "rows" not in table:
            continue
        width = len(table["index"]) + len(table["columns"])
        assert all(len(row) == width for row in table["rows"])


def test_a_report_of_ones_own(tmp_path):
    """The two files of the how-to, with its command, over the removals at hand."""
    page = (REPOSITORY / "docs/howto/report.md").read_text()
    for kind, end in (("python", "py"), ("json", "json")):
        (tmp_path / f"removals.{end}").write_text(re.search(rf"```{kind}\n(.*?)```", page, re.S)[1])
    name = "rivals-smollm2-135m-instruct-0.25.tar.xz"
    archive = str(REPOSITORY / "docs/results/runs" / name)
    text = write_paper(papers.load(str(tmp_path / "removals.py")), [archive], tmp_path / "out")
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {row[2]: row[4:] for row in rows if len(row) == 6}
    assert found["Entropy-based"] == ["4.88", "1.068 [1.025, 1.11] bootstrap n=40"]
    assert [row[-1] for row in rows if row[:1] == ["entropy does less harm than chance"]] == [
        "holds"
    ]
