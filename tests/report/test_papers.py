"""papers/*.json: every printed number of the papers, typed a second time."""

from __future__ import annotations

import inspect
import json
import re

import numpy as np
import pytest
from scipy.stats import linregress
from tiny_models import REPOSITORY, config_of
from tiny_runs import read_rows

from ffn_heterogeneity import papers
from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.papers.mlp_fusion import count_of
from ffn_heterogeneity.report.paper import write_paper

STUDIES = sorted((REPOSITORY / "docs/studies").glob("*.py"))
NUCL, JREG = (printed(name)["tables"] for name in ("nucl", "jreg"))
ROMAN = {1: "I", 2: "II", 3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII"}
ROMAN |= {12: "XII", 13: "XIII", 14: "XIV"}
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
    for (task, _), row in rows_of(printed("nucl")["ours"]["tables"]["gains"]).items():
        p, n = sum(row[:2]) / 200, {"GSM8K": 1319, "MBPP": 500}.get(task)
        z = row[2] / 100 / (2 * p * (1 - p) / n) ** 0.5 if n else None
        assert row[2:4] == pytest.approx([row[1] - row[0], 100 * (row[1] / row[0] - 1)], 1e-3)
        assert row[4] == (z and pytest.approx(z, 1e-3))


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


@pytest.mark.parametrize(("place", "claim"), [(0, "samples_tell"), (1, "length_tells")])
def test_regressions_are_those_of_the_tables(place, claim):
    """The line through LLAMA-2-7B's gains, without and with MNLI."""
    tables, found = printed("p32")["tables"], []
    scores, names = rows_of(tables["table_2"]), tables["table_2"]["columns"]
    both = (scores["LLAMA-2-7B", method] for method in ("P-32 (ours)", "Baseline"))
    gains = dict(zip(names, np.subtract(*both), strict=True))
    x = {task: row[place] for (task,), row in rows_of(tables["table_5"]).items()}
    for tasks in ([task for task in x if task != "mnli"], list(x)):
        line = linregress([x[task] for task in tasks], [gains[task] for task in tasks])
        found.append(f"slope {line.slope:.4g}, R2 {line.rvalue**2:.3f}, p {line.pvalue:.3f}")
    ((_, text, _),) = printed("p32")["claims"][claim]["rows"]
    assert text == f"seven data sets, without mnli {found[0]}; all eight {found[1]}"


@pytest.mark.parametrize(
    ("claim", "table", "place"), [("closest_kernel", 1, 1), ("above_all", 2, 0)]
)
def test_z_are_those_of_the_tables(claim, table, place):
    """Of three runs a cell, "mean ± spread"; each method minus fusion."""
    table = rows_of(printed("mlp_fusion")["tables"][f"table_{table}"])
    cells = {name: [float(x) for x in row[place].split(" ± ")] for (name,), row in table.items()}
    mean, spread = cells["MLP Fusion (Ours)"]
    ((_, text, _),) = printed("mlp_fusion")["claims"][claim]["rows"]
    for name, apart, z in re.findall(r"(\S[^;]*) (\S+), z (\S+?)(?:;|$)", text):
        error = ((spread**2 + cells[name][1] ** 2) / 3) ** 0.5
        assert float(apart.replace(",", "")) == pytest.approx(cells[name][0] - mean, abs=0.0051)
        assert float(z) == pytest.approx(abs(cells[name][0] - mean) / error, abs=0.051)


@pytest.mark.parametrize(
    ("layers", "count"), [("2-5", 4), ("0,3", 2), ("0-1,5", 3), ("top", None), ("nan", None)]
)
def test_how_many_layers(layers, count):
    assert count_of(layers) == count


@pytest.mark.parametrize("name", [*papers.NAMES, *map(str, STUDIES)])
def test_what_is_drawn_has_its_function(name):
    """Each item has a function of runs, curves or others; each row has all labels and columns."""
    texts, functions = printed(name), papers.load(name).functions
    ours = {"tables": {}, "figures": {}, **texts.get("ours", {})}
    drawn = {*texts["figures"], *ours["figures"]}
    alone = {**texts["claims"], **ours["tables"]}  # printed alone, where they have rows
    drawn |= {key for key, x in alone.items() if "rows" not in x or key in functions}
    drawn |= {key for key, x in texts["tables"].items() if "title" in x or key in functions}
    for key in drawn:
        needed = inspect.signature(functions[key]).parameters.values()
        needed = {x.name for x in needed if x.default is x.empty}
        assert needed <= {"runs", "curves", *functions}, key
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
