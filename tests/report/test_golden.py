"""The one engine against the engine of paper modules that it replaced: equal cells.

golden/*.csv are the old engine's tables of the runs that `builders` makes, with the old config
keys. Every measured cell of them stands in one of the new tables; `CHANGED` are the others. What
the old engine said of the papers and the new one does not, one falsehood each:

- NUCL, Table 1: rows for MBPP, ent and plain fine-tuning; the paper has none.
- NUCL, Table 2: "2.71 points" on GSM8K; the gain is 2.71 percent, relative.
- JREG, Table 3: 170M from alpha 0.5 on "text: no jump"; the table prints 0.00.
- JREG: zeta_L of published models "between 7 and 28%"; 7.16 to 22.2, 28.2 is a zeta_L-1.
- JREG: the jump "larger at the end than at first"; it grows over all five checkpoints.
- JREG: zeta_L "about 0 (below 0.5%)" at every alpha; below the baseline's at every alpha, 0.00 from
  alpha 0.5 on.
- JREG: "alpha 1 has the lowest validation NLL"; it prints no loss; alpha 1 and 3 share the best
  mean of nine accuracies.
- NUCL's settings, JREG's Tables 5 and 6: without a column of what the runs here were given, which
  their config.json and `report.py --compare` show.
- Ours: alpha 1's NLL "holds within the seeds' spread"; the paired interval holds 0: untold.
- Ours: a jump that "does not" grow in one evaluation; one evaluation tells nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from builders import jreg_runs, nucl_runs, read_csv

from ffn_heterogeneity import papers
from ffn_heterogeneity.report.paper import write_paper

GOLDEN = Path(__file__).parent / "golden"
ABSENT = ("not run", "-", "")
OLD_METHODS = {"unpruned": "Pre-trained baseline", "highest entropy (NUCL)": "Entropy-based"}
OLD_METHODS |= {"highest gini": "gini", "highest mstd": "mstd", "random": "Random"}
OLD_METHODS |= {"smallest magnitude": "Magnitude-based"}
OLD_METHODS |= {
    "Srinivas & Babu 2015: merged into the nearest": "Srinivas and Babu (2015)",
    "Stahlberg & Byrne 2017: least squares, minimum norm": "Stahlberg and Byrne (2017)",
    "Stahlberg & Byrne 2017: ridge": "Stahlberg and Byrne (2017), ridge",
    "lowest entropy (sanity row)": "lowest entropy (sanity row)",
}
OLD_LAYERS = {"none: unpruned": "all", "all layers": "all", "top half": "Top half of the layers"}
OLD_LAYERS |= {"bottom half": "Bottom half of the layers"}
OLD_LAYERS |= {"even": "Odd layers (after local attention)"}
OLD_LAYERS |= {"odd": "Even layers (after global attention)"}
PLACES = {"FFN, outgoing": "FFN outgoing", "attention, outgoing": "Attention outgoing"}
# A run that is not finished is in no table; the paper prints PaLM-2's hardware.
CHANGED = {"hardware, PaLM-2": "TPU v4"}


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """Table's key -> rows as dicts, of both papers."""
    tables = {}
    for paper, build in (("nucl", nucl_runs), ("jreg", jreg_runs)):
        root = tmp_path_factory.mktemp(paper)
        write_paper(papers.load(paper), build(root / "runs"), root / "out")
        tables |= {f"{paper}_{x.stem}": table(x) for x in (root / "out").glob("*.csv")}
    return tables


def table(path):
    header, rows = read_csv(path)
    return [dict(zip(header, row, strict=True)) for row in rows]


def old(key):
    return table(GOLDEN / f"{key}.csv")


def cell(rows, column, **where):
    """The one cell of the rows that fit; "-" without any."""
    (row,) = [r for r in rows if all(r[k] == str(v) for k, v in where.items())] or [{column: "-"}]
    return row.get(column, "-")


def same(before, after):
    if before in ABSENT:
        return after in ABSENT
    return after not in ABSENT and float(after) == pytest.approx(float(before), rel=1e-12)


def removed(row, key, new):
    """The cells of one row of Table 4, Table 5 or Figure 4 in the one table of removals."""
    model = key.rpartition("_")[2]
    if "table_4" in key:
        where = {"method": OLD_METHODS[row["removed by"]], "layers": "all"}
    elif "table_5" in key:
        name = row["removed from"]
        layers = next(new for start, new in OLD_LAYERS.items() if name.startswith(start))
        method = "unpruned" if name[:4] == "none" else "highest entropy (NUCL)"
        where = {"method": OLD_METHODS[method], "layers": layers}
    else:
        first = row["layers from 0"].split(",")[0]
        where = {"method": "Entropy-based", "layers": f"pair:{first}"}
    measured = ("perplexity", "x unpruned", "% of parameters")
    for column in (*measured, "hellaswag acc, 10 shots", "piqa acc, 0 shots"):
        if column in row:
            yield row[column], cell(new["nucl_removal"], column, model=model, **where)


@pytest.mark.parametrize("key", [p.stem for p in sorted(GOLDEN.glob("nucl_*_[sO]*.csv"))])
def test_removal(new, key):
    cells = [pair for row in old(key) for pair in removed(row, key, new)]
    assert len(cells) >= 3 and all(same(*pair) for pair in cells), cells


def test_fine_tuning(new):
    rows = new["nucl_finetuning"]
    for row in old("nucl_table_2")[:4]:
        where = {"loss": row["loss"].replace("plain", "mstd"), "connections": "FFN outgoing"}
        where |= {key: row[key] for key in ("model", "alpha")}
        assert same(row["validation NLL"], cell(rows, "validation NLL", **where))
        below = cell(rows, "less standard", **where)
        assert row["below plain"] in ABSENT or same(row["below plain"], str(-float(below)))
        if row["gsm8k exact_match, 0 shots"].startswith("0"):
            score = row["gsm8k exact_match, 0 shots"].split(" ")[0]
            assert same(score, cell(rows, "gsm8k exact_match, 0 shots", **where))
    for row in old("nucl_table_3")[1:]:
        if row["variant, alpha"] not in ABSENT:
            loss, alpha = row["variant, alpha"].split(", ")
            where = {"connections": PLACES[row["connections"]], "loss": loss, "alpha": alpha}
            assert same(row["validation NLL"], cell(rows, "validation NLL", **where))
    for row in old("nucl_table_8"):
        mine = [r for r in rows if r["loss"] == row["loss"] and r["connections"] == "FFN outgoing"]
        best = min((r for r in mine if r["alpha"] != "0"), key=lambda r: float(r["validation NLL"]))
        assert best["alpha"] == row["lowest NLL at alpha"]
        tried = [r["line"] for r in new["nucl_figure_3"] if r["panel"].endswith(row["loss"])]
        assert {x.removeprefix("alpha = ") for x in tried} == set(row["tried"].split(", "))


@pytest.mark.parametrize("key", ["nucl_figure_2", "nucl_figure_3"])
def test_curves_of_fine_tuning(new, key):
    rows = old(key)
    metric = list(rows[0])[-1]
    assert len(rows) == len(new[key])
    for row in rows:
        where = {"panel": f"{row['model']}, {row['variant']}", "step": row["step"]}
        where["line"] = f"alpha = {float(row['alpha']):g}"
        assert same(row[metric], cell(new[key], "y", **where))


def test_settings(new):
    for row in old("nucl_table_7"):
        for before, after in (("paper: Gemma-2", "Gemma-2"), ("paper: PaLM-2", "PaLM-2")):
            name = row["setting"] + (", PaLM-2" if after == "PaLM-2" else "")
            changed = CHANGED.get(name) if after != "Gemma-2" else None
            value = cell(new["nucl_settings"], after, setting=row["setting"])
            assert value == (changed or row[before])


def where_of(row):
    """Labels of a condition in our table of pre-training."""
    size, _, differs = row["run on"].partition(", ")
    found = differs or "optimizer.learning_rate 0.001"
    loss = f"lambda 1, alpha {row['alpha']}" if row["loss"] == "JREG" else "baseline"
    return {"size": size, "loss": loss, "from": f"here, {found}"}


def test_pre_training(new):
    for key in ("jreg_table_2", "jreg_table_3"):
        columns = {"tokens", "parameters", "validation NLL", "entropy", "piqa acc, 0 shots"}
        for row in old(key):
            for column in (columns | {"zeta_L", "zeta_L-1", "zeta_L-2"}) & set(row):
                after = cell(new["jreg_pretraining"], column, **where_of(row))
                assert same(row[column], after), (key, row, column)
            if row["loss"] == "JREG" and "above baseline" in row:
                where = {k: v for k, v in where_of(row).items() if k != "from"}
                apart = cell(new["jreg_paired"], "validation NLL", **where)
                assert same(row["above baseline"], apart)


def curve_of(name):
    """(panel, line) of an old curve's name."""
    if "final norm" in name:
        return "checkpoints", name.replace(", ", ", h_L ")
    group, _, rest = name.partition(", ")
    differs = "optimizer.learning_rate 0.001"
    if rest.startswith("optimizer"):
        differs, _, rest = rest.partition(", ")
    return group, f"{rest.replace('weight', 'lambda')}, {differs}"


def test_curves_of_pre_training(new):
    values = {}
    for r in new["jreg_curves"]:
        line = (r["panel"], r["line"], r["value"].removesuffix(" (%)"), int(r["step"]))
        values.setdefault(line, {})[r["seed"]] = float(r["y"])
    metrics = ("zeta_L", "zeta_L-1", "zeta_L-2", "validation NLL")
    points = 0
    for row in old("jreg_figure_4"):
        for metric in metrics:
            after = values.get((*curve_of(row["curve"]), metric, int(row["step"])), {})
            assert same(row[metric], str(after.get(row["seed"], "-"))), row
            points += row[metric] not in ABSENT
    assert points == len(new["jreg_curves"]), "and no point more"
    for row in old("jreg_table_7"):  # "13 [12, 14] n=2": of the seeds
        for metric in metrics:
            step = int(row["step"].replace(",", ""))
            seeds = list(values.get((*curve_of(row["curve"]), metric, step), {}).values())
            assert same(row[metric].split(" ")[0], str(np.mean(seeds)) if seeds else "-")


@pytest.mark.parametrize(("before", "after"), [("figure_1", "figure_2"), ("figure_2", "psi")])
def test_displacements_by_layer(new, before, after):
    rows = old(f"jreg_{before}")
    assert len(rows) == len(new[f"jreg_{after}"])
    for row in rows:
        if before == "figure_1":
            where = {"panel": row["model"], "line": f"{row['final norm']} the final norm"}
        else:
            where = dict(zip(("panel", "line"), curve_of(row["curve"]), strict=True))
            where["seed"] = row["seed"]
        assert same(row["Psi"], cell(new[f"jreg_{after}"], "y", layer=row["layer"], **where))


def test_models(new):
    for row in old("jreg_table_1")[:2]:
        for reading in ("before", "after"):
            where = {"model": row["model"], "h_L": f"{reading} the final norm"}
            for column in ("zeta_L", "zeta_L-1", "zeta_L-2"):
                after = cell(new["jreg_models"], column, **where)
                assert same(row[f"{column} {reading}"], after)
            for column in ("layers", "tokens"):
                assert same(row[column], cell(new["jreg_models"], column, **where))
            assert cell(new["jreg_models"], "text", **where) == row["text"]
