"""Fixtures of the report's tests."""

from __future__ import annotations

import pytest
from builders import read_csv, seed_runs

from ffn_heterogeneity import papers
from ffn_heterogeneity.report import figures
from ffn_heterogeneity.report.paper import write_paper


@pytest.fixture(autouse=True)
def small_figures(monkeypatch):
    """Draws figures completely, with few pixels, and closes them."""
    from matplotlib import pyplot as plt

    monkeypatch.setattr(figures, "DPI", 20)
    yield
    plt.close("all")


@pytest.fixture
def report(tmp_path):
    """(paper, runs) -> table's key -> rows as dicts; the Markdown under "text"."""

    def write(paper, runs, out="out"):
        text = write_paper(papers.load(paper), runs, tmp_path / out)
        tables = {}
        for path in (tmp_path / out).glob("*.csv"):
            header, rows = read_csv(path)
            tables[path.stem] = [dict(zip(header, row, strict=True)) for row in rows]
        return tables | {"text": text}

    return write


@pytest.fixture
def seeds(tmp_path):
    """Baseline and JREG over two seeds, and a sharpness of one."""
    return seed_runs(tmp_path / "seeds")
