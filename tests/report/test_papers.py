"""papers/*.json: every printed number of the papers, typed a second time."""

from __future__ import annotations

import inspect
import json
import re

import numpy as np
import pytest
from tiny_models import REPOSITORY, config_of
from tiny_runs import read_rows

from ffn_heterogeneity import papers
from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.mlp_fusion import count_of
from ffn_heterogeneity.report.paper import write_paper

STUDIES = sorted((REPOSITORY / "docs/studies").glob("*.py"))
NUCL, JREG = (printed(name)["tables"] for name in ("nucl", "jreg"))
ROMAN = {1: "I", 2: "II", 4: "IV", 5: "V", 12: "XII", 13: "XIII", 14: "XIV"}
# Paper -> tables that were typed twice.
TWICE = {"nucl": (1, 2, 3, 4, 5, 7, 8), "jreg": (1, 2, 3, 4, 7), "p32": (1, 2, 3, 4, 5, 6)}
TWICE |= {"massive_weights": (1, 4, 7, 8, 9), "mlp_fusion": ROMAN}
# Tables whose last number (of a place) is a mean of others; rows with errors in the paper.
MEANS = [
    ("nucl", "table_4", slice(7), 7, 0.0051, []),
    ("jreg", "table_2", slice(9), 9, 0.0501, ["170M JREG (ours) 0.3", "1B JREG (ours) 1.0"]),
    ("massive_weights", "table_1", slice(4, 9), 9, 0.0501, []),
    ("massive_weights", "table_1", slice(3), 3, 0.0051, []),
    ("massive_weights", "table_4", slice(5), 5, 0.0601, []),
    ("massive_weights", "table_8", slice(5), 5, 0.0601, ["Llama-2-13B LoRA + MacDrop"]),
]


def rows_of(table):
    """labels -> numbers."""
    n = len(table["index"])
    return {tuple(row[:n]): row[n:] for row in table["rows"]}


def numbers(value) -> list[float]:
    """The numbers in a table, row by row; "1.2 ± 0.3" is two."""
    if isinstance(value, (dict, list)):
        parts = value.values() if isinstance(value, dict) else value
        return [number for part in parts for number in numbers(part)]
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", str(value))]


def typed(shared_data, paper: str) -> dict:
    return json.loads((shared_data.parent / f"papers/printed/{paper}.json").read_text())


@pytest.mark.parametrize("paper", TWICE)
def test_what_is_printed(shared_data, paper):
    other = typed(shared_data, paper)
    for i in TWICE[paper]:
        place = ROMAN[i] if paper == "mlp_fusion" else str(i)
        (key,) = [x for x in other if re.match(rf"table_(\d_and_)?{place}(?![\dA-Z])", x)]
        mine = numbers(list(rows_of(printed(paper)["tables"][f"table_{i}"]).values()))
        assert mine == numbers(other[key]), (i, key)


def test_what_is_printed_in_another_form(shared_data):
    """Sizes of JREG's models by column; the last of MacDrop's curricula is their mean."""
    other, rows = typed(shared_data, "jreg"), rows_of(JREG["table_5"])
    keys = ("Layers", "Model Dim", "FFN Dim", "Attention Heads")
    mine = [[rows[x,][i] for x in keys] for i in range(3)]
    names = ("layers", "d_model", "ffn", "heads")
    assert mine == [[other["table_5"][x][y] for y in names] for x in JREG["table_5"]["columns"]]
    assert set(rows["Vocabulary Size",]) == {other["table_5"]["vocabulary"]}
    (figure,) = [value for key, value in other.items() if key.startswith("figure_5")]
    mine = {key[1].replace(",", ""): row[0] for key, row in rows_of(JREG["figure_5"]).items()}
    assert mine == figure
    *rows, mean = rows_of(printed("massive_weights")["tables"]["table_5"]).values()
    assert numbers(rows) == numbers(typed(shared_data, "massive_weights")["table_5"])
    np.testing.assert_allclose(np.mean(rows, 0), mean, atol=0.0501)


@pytest.mark.parametrize(("paper", "table", "parts", "mean", "error", "slips"), MEANS)
def test_means_are_those_of_their_rows(paper, table, parts, mean, error, slips):
    rows = rows_of(printed(paper)["tables"][table]).items()
    wrong = [" ".join(x) for x, row in rows if abs(np.mean(row[parts]) - row[mean]) > error]
    assert wrong == slips


def test_gains_are_those_of_their_scores():
    scores, gains = rows_of(NUCL["table_8"]), rows_of(NUCL["table_2"])
    for task, column in (("MBPP (3-shot success rate in %)", 0), ("GSM8K (accuracy in %)", 1)):
        both = (scores[task, f"{kind} fine-tuning"] for kind in ("Standard", "NUCL"))
        for standard, nucl, gain in zip(*both, gains.values(), strict=True):
            assert 100 * (nucl / standard - 1) == pytest.approx(gain[column], abs=0.0051)
    assert gains["2B",][1] == rows_of(NUCL["table_3"])["FFN outgoing",][0] == 2.71


def test_the_configs_numbers_are_macdrops(shared_data):
    text = (shared_data.parent / "papers" / "massive-weights.txt").read_text()
    part = text.split("Table 6. Config")[1].split("\n\n")[0]
    rows = re.findall(r"(.+)\t([\d.e-]+)\n", part + "\n")
    config, table = config_of("macdrop_sft"), {key: float(value) for key, value in rows}
    assert (table["lora rank"], table["lora alpha"]) == (config.lora.rank, config.lora.alpha)
    assert table["learning rate"] == config.optimizer.learning_rate
    assert table["num train epochs"] == config.macdrop.epochs
    assert table["warmup ratio"] == round(config.optimizer.warmup_steps / config.steps, 2)
    rows = dict(printed("massive_weights")["tables"]["table_6"]["rows"])
    assert table == {key: value for key, value in rows.items() if not isinstance(value, str)}


@pytest.mark.parametrize(
    ("task", "name"), [("mrpc", "Quality"), ("rte", "label"), ("sst2", "label")]
)
def test_the_majority_answers_are_those_of_the_validation_sets(shared_data, task, name):
    labels = [row[name] for row in read_rows(shared_data / f"glue_{task}" / "validation.jsonl")]
    share = max(map(labels.count, set(labels))) / len(labels)
    score = 2 * share / (1 + share) if task == "mrpc" else share  # F1 of always yes
    assert 100 * score == pytest.approx(printed("p32")["majority"][task], abs=1e-3)


@pytest.mark.parametrize(
    ("layers", "count"), [("2-5", 4), ("0,3", 2), ("0-1,5", 3), ("top", None), ("nan", None)]
)
def test_how_many_layers(layers, count):
    assert count_of(layers) == count


@pytest.mark.parametrize("name", [*papers.NAMES, *map(str, STUDIES)])
def test_what_is_drawn_has_its_function(name):
    """Each figure has a function of runs and curves; each row has all labels and columns."""
    texts, functions = printed(name), papers.load(name).functions
    ours = {"tables": {}, "figures": {}, **texts.get("ours", {})}
    drawn = {*texts["claims"], *texts["figures"], *ours["figures"]}
    drawn |= {key for key, table in ours["tables"].items() if "rows" not in table}
    drawn |= {key for key, x in texts["tables"].items() if "title" in x or key in functions}
    for key in drawn:
        needed = inspect.signature(functions[key]).parameters.values()
        assert {x.name for x in needed if x.default is x.empty} <= {"runs", "curves"}, key
    for table in (x for x in texts["tables"].values() if "rows" in x):
        width = len(table["index"]) + len(table["columns"])
        assert all(len(row) == width for row in table["rows"])


def test_a_report_of_ones_own(tmp_path):
    """The two files of the how-to, with its command, on the stored removals."""
    page = (REPOSITORY / "docs/howto/report.md").read_text()
    for kind, end in (("python", "py"), ("json", "json")):
        (tmp_path / f"removals.{end}").write_text(re.search(rf"```{kind}\n(.*?)```", page, re.S)[1])
    name = "docs/results/runs/rivals-smollm2-135m-instruct-0.25.tar.xz"
    paper = papers.load(str(tmp_path / "removals.py"))
    text = write_paper(paper, [str(REPOSITORY / name)], tmp_path / "out")
    rows = [[x.strip() for x in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {row[2]: row[4:] for row in rows if len(row) == 6}
    assert found["Entropy-based"] == ["4.88", "1.068 [1.025, 1.11] bootstrap n=40"]
    claims = [row[-1] for row in rows if row[:1] == ["entropy does less harm than chance"]]
    assert claims == ["holds"]
