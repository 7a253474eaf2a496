"""Every table, figure's points and claim of three papers, cell by cell, as they were drawn before.

golden/tables.json.xz holds {paper: {key: {header, rows}}}, a value with an interval as {mean, low,
high, n, how}: NUCL's and JREG's of the runs that `builders` makes, massive weights' of the archives
in docs/results/runs.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import tarfile
from pathlib import Path

import pytest
from builders import jreg_runs, nucl_runs
from tiny_models import REPOSITORY

from ffn_heterogeneity.report.engine import PAPERS, draw_all, gather
from ffn_heterogeneity.report.records import records
from ffn_heterogeneity.report.tables import Spread

GOLDEN = json.loads(
    lzma.decompress((Path(__file__).parent / "golden" / "tables.json.xz").read_bytes())
)


def drawn(name: str, paths, root: Path) -> dict:
    """Its tables; `root`, where the runs lie, is "<runs>" in their cells."""
    paper, runs = PAPERS[name], gather(paths)[0]
    done, begun = (
        {kind: records(runs, own, begun=flag) for kind, own in paper.kinds.items()}
        for flag in (False, True)
    )
    made = {
        one.key: {"header": list(one.header), "rows": [list(map(plain, row)) for row in one.rows]}
        for one in draw_all(paper, done, begun)
    }
    return json.loads(json.dumps(made).replace(os.path.realpath(root), "<runs>"))


def plain(cell):
    if not isinstance(cell, Spread):
        return cell
    return {
        "mean": cell.mean, "low": cell.low, "high": cell.high, "n": cell.n, "how": cell.kind
    }  # fmt: skip


def same(one, other) -> bool:
    """Numbers to 1e-9, all else equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-9) or (one != one and other != other)
    return one == other


def check(name: str, found: dict) -> None:
    assert list(found) == list(GOLDEN[name])
    for key, table in GOLDEN[name].items():
        assert found[key]["header"] == table["header"], key
        assert len(found[key]["rows"]) == len(table["rows"]), key
        for row, wanted in zip(found[key]["rows"], table["rows"], strict=True):
            assert len(row) == len(wanted) and all(map(same, wanted, row)), (key, wanted, row)


@pytest.mark.parametrize(("name", "build"), [("nucl", nucl_runs), ("jreg", jreg_runs)])
def test_tables_of_runs_by_hand(name, build, tmp_path):
    check(name, drawn(name, build(tmp_path), tmp_path))


@pytest.mark.slow
def test_tables_of_the_archives(tmp_path, monkeypatch):
    for path in sorted((REPOSITORY / "docs/results/runs").glob("*.tar.xz")):
        if not path.name.startswith("p32"):
            with tarfile.open(path) as archive:
                archive.extractall(tmp_path, filter="data")
    # Models are named by paths relative to where the runs were started.
    monkeypatch.chdir(tmp_path)
    sweeps = sorted({os.path.dirname(path) for path in map(str, tmp_path.rglob("sweep.json"))})
    check("massive_weights", drawn("massive_weights", sweeps, tmp_path))
