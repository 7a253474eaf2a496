"""Every table, figure's points and claim of three papers, cell by cell, as the engine before drew.

golden/tables.json.xz holds {paper: {key: {header, rows}}}, a value with an interval as {mean, low,
high, n, how}: NUCL's and JREG's of the runs that `builders` makes, massive weights' of the archives
in docs/results/runs, made by commit f6768d8's engine of specs.
"""

from __future__ import annotations

import json
import lzma
import math
import os
from pathlib import Path

import pytest
from builders import jreg_runs, nucl_runs
from tiny_models import REPOSITORY

from ffn_heterogeneity import papers
from ffn_heterogeneity.report.paper import draw_all, gather

TABLES = Path(__file__).parent / "golden" / "tables.json.xz"
GOLDEN = json.loads(lzma.decompress(TABLES.read_bytes()))


def drawn(name: str, paths, root: Path) -> dict:
    """Its tables; `root`, where the runs lie, is "<runs>" in their cells."""
    paper = papers.load(name)
    made = {}
    for one in draw_all(paper, gather(paper, paths)[1]):
        rows = [list(map(plain, row)) for row in one.rows]
        made[one.key] = {"header": list(one.header), "rows": rows}
    return json.loads(json.dumps(made).replace(str(root), "<runs>"))


def plain(cell):
    if hasattr(cell, "_asdict"):
        return cell._asdict()
    return cell.item() if hasattr(cell, "item") else cell


def same(one, other) -> bool:
    """Numbers to 1e-9, all else equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9) or (one != one and other != other)
    return one == other


# Their rows stand in another order: analyses before trainings or after them; gains by task.
MOVED = {("jreg", "table_7"), ("jreg", "models"), ("jreg", "claims"), ("nucl", "gains")}


def check(name: str, found: dict) -> None:
    """Equal rows, in equal order; a figure's points in any."""
    assert found.keys() == GOLDEN[name].keys()
    for key, table in GOLDEN[name].items():
        assert found[key]["header"] == table["header"], key
        rest = list(found[key]["rows"])
        for wanted in table["rows"]:
            row = next((x for x in rest if all(map(same, wanted, x))), None)
            assert row is not None, (key, wanted)
            rest.remove(row)
        assert not rest, key
        if "seed" not in table["header"] and (name, key) not in MOVED:
            pairs = zip(table["rows"], found[key]["rows"], strict=True)
            assert all(all(map(same, *pair)) for pair in pairs), key


@pytest.mark.parametrize(("name", "build"), [("nucl", nucl_runs), ("jreg", jreg_runs)])
def test_tables_of_runs_by_hand(name, build, tmp_path):
    check(name, drawn(name, build(tmp_path), tmp_path))


def test_tables_of_the_archives():
    """Read without being unpacked."""
    folder = REPOSITORY / "docs/results/runs"
    later = ("p32", "massive", "fusion", "own", "five", "webnlg")
    paths = [os.fspath(x) for x in sorted(folder.glob("*.tar.xz")) if not x.name.startswith(later)]
    found = drawn("massive_weights", paths, folder)
    # Removals are a report of their own since.
    study = drawn(str(REPOSITORY / "docs/studies/massive_removal.py"), paths, folder)
    found["claims"]["rows"] += study.pop("claims")["rows"]
    check("massive_weights", found | study)
