"""The pages that hold the evidence: cells that fit, links that resolve, numbers with a source.

A number of three and more digits in a table of docs/findings stands as it is written in what its
page may quote: the committed tables of docs/results, what the paper prints, and the paper's report,
drawn anew from the archives in docs/results/runs. Of a share a table may write the percentage.
"""

from __future__ import annotations

import os
import re
from functools import cache

import pytest
from tiny_models import REPOSITORY

from ffn_heterogeneity import papers
from ffn_heterogeneity.report.paper import draw_all, gather
from ffn_heterogeneity.report.tables import number

DOCS = REPOSITORY / "docs"
STATES = {
    "works on real models", "parity-tested", "works, effect not seen", "built, not run",
    "not there",
}  # fmt: skip
# Page -> what it may quote of docs/results, and its archives.
SOURCES = {
    "nucl": (("nucl_*", "table_*", "figure_4_*"), ("lesions-*",)),  # of no run: what is printed
    "jreg": (("jreg_*",), ("lesions-*",)),
    "massive_weights": (("massive_*", "macdrop*", "table_4_smollm2*"), ("lesions-*",)),
    "p32": ((), ("p32-*",)),
}
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])|(?<![\w.])\.\d+")


def tables(text: str) -> list[list[list[str]]]:
    """Every table's rows of cells, the header first, without the line of dashes."""
    found = re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.M)
    return [[cells(line) for line in one.splitlines() if not dashes(line)] for one in found]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def dashes(line: str) -> bool:
    return set(line) <= set("|:- ")


def numbers(text: str) -> set[str]:
    """The numbers as they are written, but for thousands' commas and zeros that say nothing."""
    return {plain(one) for one in NUMBER.findall(text)}


def plain(number: str) -> str:
    number = number.replace(",", "")
    number = number.rstrip("0").rstrip(".") if "." in number and "e" not in number else number
    return number[1:] if number.startswith("0.") else number


def digits(number: str) -> int:
    return len(re.sub(r"\D", "", number.split("e")[0]).lstrip("0"))


@cache
def quoted(page: str) -> tuple[set[str], set[str]]:
    """The numbers that a page may quote; its shares of a whole (Fieller's), in percent."""
    names, archives = SOURCES[page]
    paths = [path for name in names for path in (DOCS / "results").glob(f"{name}.md")]
    text = "\n".join(path.read_text() for path in paths)
    text += (REPOSITORY / f"ffn_heterogeneity/papers/{page}.json").read_text()
    paper = papers.load(page)
    runs = [path for name in archives for path in (DOCS / "results/runs").glob(f"{name}.tar.xz")]
    for table in draw_all(paper, gather(paper, sorted(map(os.fspath, runs)))[1]):
        text += "".join(f"\n{number(value)}" for row in table.rows for value in row)
    shares = " ".join(re.findall(r"[^|]*\] Fieller", text))
    return numbers(text), {f"{100 * float(one):.0f}" for one in numbers(shares)}


def pages(folder: str = "**") -> list:
    return sorted(DOCS.glob(f"{folder}/*.md")) + (
        [REPOSITORY / "README.md"] if folder == "**" else []
    )


def test_states():
    """Every row of status.md has one of the five states of its legend, and cells that fit."""
    legend, *rest = tables((DOCS / "status.md").read_text())
    assert {row[0] for row in legend[1:]} == STATES
    assert len(rest) > 5
    for header, *rows in rest:
        assert header[:2] == ["item", "state"]
        for row in rows:
            assert len(row) == len(header), row
            assert row[1] in STATES, row
            assert [cell for cell in row if len(cell) > 120] == []
    states = {row[-1] for one in tables((DOCS / "reproduce.md").read_text()) for row in one[1:]}
    assert states <= STATES


def test_findings_are_short():
    """At most 12 rows a table; each question has its answer first, and its limits."""
    assert {path.stem for path in pages("findings")} == SOURCES.keys()
    for path in pages("findings"):
        text = path.read_text()
        assert [one[0] for one in tables(text) if len(one) - 1 > 12] == [], path
        for question in re.split(r"^## ", text, flags=re.M)[1:]:
            title, answer, *_ = question.split("\n\n", 2)
            assert answer.startswith("**"), title
            assert "How sure:" in question and "does not show:" in question, title
            assert f"(#{anchor(title)})" in text, title


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def test_links_resolve():
    """Files, pictures and headings that a page points to."""
    for page in pages():
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for link in re.findall(r"\]\(\s*([^)\s]+)\s*\)", text):
            if re.match(r"https?:|mailto:", link):
                continue
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), (page, link)
            if heading:
                titles = re.findall(r"^#+ (.*)", target.read_text(), re.M)
                assert heading in map(anchor, titles), (page, link)


@pytest.mark.parametrize("page", SOURCES)
def test_numbers_have_a_source(page):
    sources, shares = quoted(page)
    seen = 0
    for one in tables((DOCS / f"findings/{page}.md").read_text()):
        for cell in (cell for row in one[1:] for cell in row):
            found = {x for x in numbers(cell) if digits(x) >= 3}
            seen += len(found)
            allowed = sources | shares if "%" in cell else sources
            assert found <= allowed, (cell, found - allowed)
    assert seen > 10


def test_a_number_without_a_source_is_found():
    """The tests above see a changed digit, a long cell, a percentage that is none."""
    assert numbers("4.88 [4.8, 16,384] n=20, .838, 1e-5") >= {"4.88", "4.8", "16384", ".838"}
    assert plain("0.740") == ".74" and plain("1,000") == "1000" and plain("12.0") == "12"
    assert digits(".0123") == 3 and digits("0.10") == 2
    sources, shares = quoted("massive_weights")
    assert "4.881" not in sources and "347" in shares and "349" not in shares
