"""Fixtures of the report's tests."""

from __future__ import annotations

import pytest
from builders import FLAT, RISING, pretrain, read_csv

from ffn_heterogeneity import papers
from ffn_heterogeneity.report import figures
from ffn_heterogeneity.report.paper import write_paper


@pytest.fixture(autouse=True)
def small_figures(monkeypatch):
    """Drawn whole, with few pixels, and closed."""
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
    root = tmp_path / "seeds"
    other = {0: (0.0, 8.0), 10: (8.0, 5.0), 20: (14.0, 4.2)}
    return [
        pretrain(root / "base0", 0.0, RISING, psi=[0.4, 0.2, 0.1, 0.22]),
        pretrain(root / "base1", 0.0, other, seed=1, psi=[0.4, 0.2, 0.1, 0.26]),
        pretrain(root / "jreg0", 1.0, FLAT, psi=[0.4, 0.2, 0.1, 0.1]),
        pretrain(root / "jreg1", 1.0, {0: (0.0, 8.0), 20: (0.4, 4.2)}, seed=1),
        pretrain(root / "sharp", 1.0, {0: (0.0, 8.0), 20: (1.5, 4.5)}, alpha=3.0),
    ]
