"""The pages of results: short cells, valid links, numbers with a source.

A number of three and more digits in a table of docs/findings stands as it is written in what its
page may quote: the committed tables of docs/results, what the paper prints, and the paper's report,
computed again from the archives in docs/results/runs. Of a share a table may write the percentage.
Sentences may round, and quote what is a step away: a perplexity of an NLL, a difference of runs.
"""

import json
import os
import re
from functools import cache

import numpy as np
import pytest
from tiny_models import REPOSITORY

import ffn_heterogeneity as fh
from ffn_heterogeneity import papers
from ffn_heterogeneity.models.families import FAMILIES
from ffn_heterogeneity.models.families.common import no_gguf
from ffn_heterogeneity.report.paper import draw_all, gather
from ffn_heterogeneity.report.stats import student
from ffn_heterogeneity.report.tables import number

DOCS = REPOSITORY / "docs"
STATES = {"works on real models", "parity-tested", "works, effect not seen", "built, not run"}
STATES |= {"not there"}
# Page -> the files of docs/results that it may quote, and its archives.
SOURCES = {
    "nucl": (
        ("nucl_*", "table_*", "figure_4_*", "own_*"),
        ("lesions-*",),
    ),  # of no run: printed numbers
    "jreg": (("jreg_*",), ("lesions-*", "jreg-*")),
    "massive_weights": (
        ("massive_*", "macdrop*", "table_4_smollm2*", "own_removal_rules"),
        ("lesions-*",),
    ),
    "p32": (("p32_mrpc_qwen", "p32_rates", "p32_chosen"), ("p32-*",)),
    "mlp_fusion": (("recover_spread",), ("fusion-*", "ntk-*", "own-recover*", "webnlg-*")),
    "experts": (("experts_*",), ("experts-*",)),
    "switch": (("switch_*",), ("switch-*",)),
    "shrink": (("shrink_*", "reach_*"), ("shrink-*",)),
}
# Page -> numbers in its sentences that are not measured, and their meaning.
SETTINGS = {
    "nucl": {},
    "jreg": {"4,096": "tokens of the vocabulary"},
    "massive_weights": {"46,080": "all FFN neurons of SmolLM2", "1,536": "those of a layer"},
    "p32": {},
    "mlp_fusion": {},
    "experts": {
        "192": "width, and neurons of an expert",
        "2,048": "tokens of a training step",
        "1,024": "tokens of a recovery step",
        "8,192": "tokens of calibration text",
        "1,536": "neurons of a layer of SmolLM2",
        "200": "training steps of Figure 5",
    },
    "switch": {
        "192": "width",
        "256": "tokens of a row, and held-out rows of the training",
        "512": "held-out rows",
        "768": "neurons of an expert",
        "872": "validation sentences of SST-2",
        "6,228": "training sentences of SST-2",
        "692": "held-out training sentences of SST-2",
    },
    "shrink": {
        "7,400": "those that train",
        "256": "tokens of a window",
    },
}
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])|(?<![\w.])\.\d+")


def tables(text: str) -> list[list[list[str]]]:
    """Every table's rows of cells, the header first, without the line of dashes."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text + "\n", re.M)
    return [[cells(line) for line in one.splitlines() if not dashes(line)] for one in blocks]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def dashes(line: str) -> bool:
    return set(line) <= set("|:- ")


def numbers(text: str) -> set[str]:
    """The written numbers, without thousands' commas and trailing zeros."""
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
    study = DOCS / f"studies/{page}.py"
    paper = papers.load(str(study) if study.exists() else page)
    text += json.dumps(paper.printed)
    runs = [path for name in archives for path in (DOCS / "results/runs").glob(f"{name}.tar.xz")]
    for table in draw_all(paper, gather(paper, sorted(map(os.fspath, runs)))[1]):
        text += "".join(f"\n{number(value)}" for row in table.rows for value in row)
    shares = " ".join(re.findall(r"[^|\n]*\] Fieller", text))
    return numbers(text), {f"{100 * float(one):.0f}" for one in numbers(shares)}


def sentences(text: str) -> list[str]:
    """Paragraphs, without tables, code and the targets of links."""
    away = r"(?s:```.*?```)|`[^`]*`|^\|.*\|$|\]\([^)]*\)"
    return re.sub(away, "", text, flags=re.M).split("\n\n")


def shown(number: str, values: np.ndarray) -> bool:
    """Whether a value is the number, to the digits shown: 3,060 of 3064.8, 0.020 of 0.02025."""
    text = number.replace(",", "")
    digits = len(text.partition(".")[2]) or len(text.rstrip("0")) - len(text)
    return bool(np.isclose(np.round(values, digits), float(text), rtol=1e-9, atol=1e-9).any())


def close(paragraph: str, values: np.ndarray) -> np.ndarray:
    """The values, and perplexities of NLLs, or NLLs of perplexities, where it speaks of them."""
    perplexities = np.exp(values[values < 20]) if "perplexity" in paragraph else ()
    losses = np.log(values[values > 1]) if "NLL" in paragraph else ()
    return np.concatenate([values, perplexities, losses])


def archived(*names: str) -> dict[str, float]:
    """NLL by run."""
    frame = fh.results(*(DOCS / f"results/runs/{name}.tar.xz" for name in names))
    return dict(frame[frame.what == "nll"][["run", "value"]].values)


def by_seed(runs: dict[str, float], pattern: str) -> np.ndarray:
    nlls = {int(hit[1]): nll for run, nll in runs.items() if (hit := re.search(pattern, run))}
    return np.array([nlls[seed] for seed in sorted(nlls)])


def looked_at() -> list[float]:
    """Numbers that only sentences quote: states, lesions, random draws, MacDrop's gain."""
    states = fh.results(DOCS / "results/runs/massive-states.tar.xz")
    states = states[states.what.isin(["intermediate", "h_out", "massive_rank"])]
    lesions = fh.results(DOCS / "results/runs/lesions-smollm2-135m-instruct.tar.xz")
    damage = lesions[lesions.what == "damage"]
    there = damage.layer == 12
    values = [*states.value, *states.neuron, *lesions[lesions.what == "nll"].value]
    values += [damage[there].value.median(), damage[~there].value.max()]
    values += [*damage[there & damage.neuron.isin([1229, 1487])].value]
    draws = archived("rivals-smollm2-135m-instruct-0.25")
    chance, spared = (by_seed(draws, rf"random,seed=(\d+),protect={x}$") for x in ("", "massive_5"))
    runs = archived("macdrop-eval-lora", "macdrop-eval-dora")
    lora, dora = (
        by_seed(runs, rf"{x}-p0=0.8,seed=(\d).*k=3$") - by_seed(runs, rf"{x}-p0=0,seed=(\d).*k=3$")
        for x in ("lora", "dora")
    )
    gain = student(list(dora - lora))
    return [*values, *chance, *(chance - spared), *lora, lora.std(ddof=1), *gain[:3]]


def pages(folder: str = "**") -> list:
    return [
        *sorted(DOCS.glob(f"{folder}/*.md")),
        *(REPOSITORY.glob("*.md") if folder == "**" else ()),
    ]


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
            cited = {x for x in numbers(cell) if digits(x) >= 3}
            seen += len(cited)
            allowed = sources | shares if "%" in cell else sources
            assert cited <= allowed, (cell, cited - allowed)
    assert seen > 10


@pytest.mark.parametrize("page", SOURCES)
def test_numbers_in_sentences_have_a_source(page):
    """Numbers with a decimal point or at least three digits; every named setting exists."""
    looked = looked_at() if page == "massive_weights" else ()
    sources, _ = quoted(page)
    values = np.abs(np.array([*map(float, sources), *looked], float))
    strange, seen = set(), 0
    for paragraph in sentences((DOCS / f"findings/{page}.md").read_text()):
        near = close(paragraph, values)
        for hit in NUMBER.finditer(paragraph):
            word = hit[0].rstrip(",")
            if "." not in word and digits(word) < 3:
                continue
            seen += 1
            share = 100 * values if paragraph[hit.end() :].startswith("%") else ()
            if plain(word) not in sources and not shown(word, np.concatenate([near, share])):
                strange.add(word)
    assert seen > 10 and strange == SETTINGS[page].keys()


def test_a_number_without_a_source_is_found():
    """The tests above see a changed digit, a long cell, a percentage that is none."""
    assert numbers("4.88 [4.8, 16,384] n=20, .838, 1e-5") >= {"4.88", "4.8", "16384", ".838"}
    assert plain("0.740") == ".74" and plain("1,000") == "1000" and plain("12.0") == "12"
    assert digits(".0123") == 3 and digits("0.10") == 2
    assert sentences("a 1.5 [b](3.5.md) `4.5`\n| 5.5 |\n\nd") == ["a 1.5 [b ", "\nd"]
    values = np.array([3064.8, 0.02025, 4.51e-5, 3.348])
    assert [shown(x, values) for x in ("3,060", "0.020", "3,065", "0.00005")] == [True] * 4
    assert not any(shown(x, values) for x in ("3,066", "0.021", "0.0212", "3.35e0", "28.4"))
    assert shown("28.4", close("a perplexity of 28.4", values))
    sources, shares = quoted("massive_weights")
    assert "4.881" not in sources and "347" in shares and "349" not in shares


def test_readme_lists_every_family_once():
    """The table of families, by the registry: what trains them, and whether llama.cpp has them."""
    (rows,) = [
        rest
        for head, *rest in tables((REPOSITORY / "README.md").read_text())
        if head[0] == "families"
    ]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(listed) == sorted(FAMILIES)
    for names, _, trains, gguf in rows:
        for name in re.findall(r"`(\w+)`", names):
            family = FAMILIES[name]
            kind = next(iter(family.presets.values()))[0].kind
            wanted = {
                "encoder": "labels",
                "decoder": "text, labels",
                "encoder_decoder": "spans of text, answers, labels",
            }
            assert trains == wanted[kind], name
            assert gguf == ("no" if family.from_gguf is no_gguf else "yes"), name


def test_readme_is_short():
    assert len((REPOSITORY / "README.md").read_text().split()) <= 900
