"""Helpers of reports: settings that exist and agree, cells, short functions."""

from __future__ import annotations

import ast
import json
import math
import shutil

import numpy as np
import pandas
import pytest
from builders import removal
from tiny_models import REPOSITORY

from ffn_heterogeneity import papers
from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.report import cells
from ffn_heterogeneity.report.cells import against, need, one_setting, spread
from ffn_heterogeneity.report.paper import draw_all, gather, write_paper
from ffn_heterogeneity.report.stats import OPEN, Spread, middle, verdict

REPORTS = [REPOSITORY / f"ffn_heterogeneity/papers/{name}.py" for name in papers.NAMES]
REPORTS += sorted((REPOSITORY / "docs/studies").glob("*.py"))


def frame(**columns):
    fields = dict.fromkeys(["task", "shots", "layer", "neuron", "step"])
    rows = pandas.DataFrame({"run": list("abcd"), "what": "nll", **fields, **columns})
    return rows.assign(cell=rows["value"].astype(object)) if "value" in rows else rows


@pytest.fixture
def renamed(tmp_path, monkeypatch):
    """Runs and configs in which "criterion" has the name "rule"; without its runs, if asked."""
    shutil.copytree(REPOSITORY / "configs", tmp_path / "configs")
    for path in (tmp_path / "configs").rglob("*.py"):
        path.write_text(path.read_text().replace("criterion", "rule"))
    monkeypatch.setattr(cells, "FOLDERS", (str(tmp_path / "configs"),))
    cells.config_words.cache_clear()
    yield tmp_path
    cells.config_words.cache_clear()


def test_a_renamed_setting_stops_the_report(renamed):
    """The error names it before anything is written; without the check, tables would be empty."""
    (run,) = [removal(renamed / "run", 7.0)]
    config = json.loads((renamed / "run/config.json").read_text())
    config["rule"] = config.pop("criterion")
    (renamed / "run/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"nucl, \w+: setting 'criterion' is in no run"):
        write_paper(papers.load("nucl"), [run], renamed / "out")
    assert not (renamed / "out").exists()


def test_a_setting_that_no_run_has_yet_is_an_empty_column(tmp_path):
    rows = frame(ratio=[1, 2, 3, 4])
    made = need(rows, "ratio", "losses.nucl.weight", "mask_3.layers")
    assert list(made.ratio) == [1, 2, 3, 4] and made["mask_3.layers"].isna().all()
    assert made.query("`losses.nucl.weight` > 0").empty
    for name in ("losses.nukl.weight", "ratios_of_all"):
        with pytest.raises(ValueError, match=name):
            need(rows, name)


def test_two_settings_in_one_cell_are_named():
    rows = frame(method=["x", "x", "y", "y"], ratio=[1, 1, 2, None], seed=[0, 1, 0, 1])
    one_setting(rows[:2].assign(batch=[None, np.nan]))
    one_setting(rows, by=["method"], except_for=["ratio"])
    with pytest.raises(ValueError, match=r"\(y\) differ in ratio \(2.0, nan\)"):
        one_setting(rows, by=["method"])
    with pytest.raises(ValueError, match="method .x, y.; ratio"):
        one_setting(rows)
    with pytest.raises(ValueError, match="losses.a.weight"):
        one_setting(rows.assign(**{"losses.a.weight": list("1234")}), ["method"], ["ratio"])
    one_setting(rows.assign(**{"losses.a.weight": list("1234")}), ["method"], ["ratio", "losses."])


def test_a_cell_is_its_runs():
    assert spread([2.0]) == 2.0 and spread([1.0, 3.0]) == Spread(2.0, 1.0, 3.0, 2)
    own = Spread(2.0, 1.5, 2.5, 9, "Wilson")
    assert spread([own]) == spread([own, 2.0]) == own and spread([np.nan]) == "nan"


def test_sides_are_compared_by_seed_and_have_equal_settings():
    values = {"value": [1.0, 2.0, 4.0, 8.0], "seed": [0, 1, 1, 0], "method": list("xxyy")}
    rows = frame(model="m", batch=[1, 1, 1, 1], **values)
    sides = (rows[rows.method == "y"], rows[rows.method == "x"])
    (value,) = against(*sides, ["model", "method"], ["model"])
    assert (value.mean, value.n, value.how) == (4.5, 2, "t")  # 4 - 2 and 8 - 1
    # A label that none of them has: one of another report's runs.
    (same,) = against(*(x.assign(kind=np.nan) for x in sides), ["method"], ["model", "kind"])
    assert same == value
    sides = (sides[0].assign(batch=2), sides[1])
    with pytest.raises(ValueError, match=r"batch \(2, 1\)"):
        against(*sides, ["model", "method"], ["model"])
    assert len(against(*sides, ["model", "method"], ["model"], ["batch"])) == 1
    # Of several runs of a seed, or without one, the mean.
    same = rows[:2].assign(seed=1), rows[:2].assign(seed=np.nan)
    for base, n in zip(same, (1, 2), strict=True):
        (value,) = against(sides[0], base, ["model", "method"], ["model"], ["batch"])
        assert (middle(value), getattr(value, "n", 1)) == ((2.5, 1) if n == 1 else (4.5, 2))
    with pytest.raises(ValueError, match="batch"):  # two baselines
        against(rows[:2], rows[2:].assign(batch=[1, 2]), ["model", "method"], ["model"], ["batch"])


def test_several_seeds_of_which_no_two_pair_have_no_finite_interval():
    """The sign alone decides only where a side has a single seed."""

    def side(**seeds):
        return pandas.DataFrame({"seed": [int(x[1:]) for x in seeds], "value": [*seeds.values()]})

    many = side(s0=1.0, s1=2.0, s2=3.0)
    for other in (side(s3=0.5, s4=0.6), side(s2=0.5, s4=0.6)):
        apart = cells.difference(many, other)
        assert (apart.low, apart.high) == (-math.inf, math.inf) and apart.mean > 0
        assert verdict(apart, 1) == OPEN
    assert cells.difference(many, side(s2=1.0)) == 2.0
    assert cells.difference(many, side(s1=0.0, s2=1.0)).n == 2


def test_a_run_that_is_there_twice_counts_once(tmp_path):
    """Two sweeps with one run; an evaluation with tasks replaces one without."""
    tasks = {"piqa": {"n": 9, "acc": 0.5, "acc_low": 0.4, "acc_high": 0.6}}
    runs = [removal(tmp_path / x, 7.0, seed=0, mesh={"data": i}) for i, x in enumerate("ab")]
    runs.append(removal(tmp_path / "c", 7.0, seed=0, tasks=tasks, limit=9))
    runs.append(removal(tmp_path / "d", 7.0, seed=1))
    _, frames = gather(papers.load("nucl"), runs)
    assert [run[-1] for run in frames["runs"]["run"].unique()] == ["c", "d"]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_functions_are_short_and_texts_hold_no_logic(path):
    """At most 25 lines without the docstring; JSON has captions, headings, notes and numbers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            assert node.end_lineno - first.lineno < 25, node.name
    texts = printed(path.stem if path.stem in papers.NAMES else str(path))
    allowed = {"caption", "title", "index", "columns", "rows", "notes", "source", "x", "xlabel"}
    allowed |= {"log", "heat", "statement", "stated"}
    for source in (texts, texts.get("ours", {})):
        for kind in ("tables", "figures", "claims"):
            for table in source.get(kind, {}).values():
                assert table.keys() <= allowed and "{" not in json.dumps(table)[1:]


def test_rows_without_a_label_stay():
    rows = frame(value=[1.0, 2.0, 3.0, 4.0], ratio=["a", "a", None, None], column="c")
    assert [x.mean for x in cells.cells(rows, ["ratio"])] == [1.5, 3.5]
    made = cells.pivot(rows, {"ratio": rows.ratio})
    assert made.index.to_list() == ["a", "-"] and [x.mean for x in made["c"]] == [1.5, 3.5]


def test_names_without_a_function_are_named(tmp_path):
    """Of a text, or of what a function reads; another function's result comes as a copy."""
    mine = tmp_path / "mine.py"
    code = "def rows(runs):\n    return runs\ndef lost(nobody):\n    return nobody\n"
    mine.write_text(
        code + "def kept(rows):\n    rows['part'] = rows['run_on'] = 'x'\n    return rows\n"
    )
    runs = frame(value=[1.0] * 4).assign(verdict="holds")
    for key, missing in (("harmles", "harmles"), ("lost", "nobody"), ("kept", "")):
        claims = {key: {"statement": "s", "stated": "p"}}
        mine.with_suffix(".json").write_text(json.dumps({"paper": "Mine", "claims": claims}))
        papers.printed.cache_clear()
        drawn = draw_all(papers.load(str(mine)), {"runs": runs, "curves": frame()})
        if missing:
            with pytest.raises(ValueError, match=f"mine, {key}: no function is named '{missing}'"):
                next(drawn)
        else:
            assert next(drawn).rows[0][-1] == "holds" and "part" not in runs
