"""Self-generated calibration text against documents of a domain, by length.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/reach.py runs/reach-* --out=runs/reach

on scripts/sweep.py --config=configs/prune_table.py --sweep=reach, with a directory of texts as
--config.text and a calibration text of the same name for each; and its point "unpruned" on the
self-generated text.
"""

from __future__ import annotations

import os

from ffn_heterogeneity.report import cells as c
from ffn_heterogeneity.report.cells import Frame
from ffn_heterogeneity.report.stats import middle

NAMES = {"own_text": "self-generated", "random": "random ids", "written": "another model's"}
OWN, WHOLE, ENTROPY, SAME = "self-generated", "unpruned", "entropy", "of the same kind"
KEYS = ("criterion", "compensation", "calibration", "calibration_tokens", "text")
FREE = (*KEYS, "read", "removed")
LABELS = ["model", "domain", "tokens", "place"]
ON = ["model", "domain", "place"]


def reach(runs: Frame) -> Frame:
    """NLL of each text after removal; "read" is what the rule read, "apart" the dense model's NLL
    on the text less that on what it writes."""
    rows = c.evaluated(c.need(runs, *KEYS), "criterion")
    text = rows.text.fillna("").map(os.path.basename)
    whole = rows.criterion == "none"
    written = rows[whole & text.str.startswith("written") & (rows.what == "nll")]
    domain = rows.what.str.extract(r"^texts/(.+)/nll$", expand=False)
    rows = rows.assign(domain=domain, place="here")[domain.notna()]
    read = rows.calibration.fillna("").map(lambda path: os.path.basename(path).split(".")[0])
    read = read.replace(NAMES).where(read != rows.domain, SAME)
    rows["read"] = read.mask(rows.criterion == "entropy", ENTROPY).mask(
        rows.criterion == "none", WHOLE
    )
    rows["tokens"] = rows.calibration_tokens.where(~rows.read.isin([ENTROPY, WHOLE]))
    dense = rows[rows.read == WHOLE].groupby(["model", "domain"])["value"].mean()
    own = written.groupby("model")["value"].mean()
    apart = [
        dense.get(x, float("nan")) - own.get(x[0], float("nan"))
        for x in zip(rows.model, rows.domain, strict=True)
    ]
    return rows.assign(apart=apart)


def of(rows: Frame, read: str) -> Frame:
    return rows[rows["read"] == read]


def added(reach: Frame) -> Frame:
    """Added NLL on a text, by what the rule read."""
    columns = {}
    for read in (OWN, SAME, *NAMES.values()):
        columns[read] = c.against(
            of(reach, read), of(reach, WHOLE), LABELS, ON, FREE, c.paired_units
        )
    return c.table(of(reach, OWN), LABELS, columns)


def dearer(reach: Frame) -> Frame:
    """Self-generated text against text of the same kind, against others, and against no text."""
    columns = {"NLL apart": of(reach, OWN).groupby(LABELS)["apart"].mean()}
    own = of(reach, OWN)
    for base, on in ((SAME, LABELS), ("random ids", LABELS), (ENTROPY, ON)):
        columns[f"Δ vs {base}"] = c.against(own, of(reach, base), LABELS, on, FREE, c.paired_units)
    return c.table(own, LABELS, columns)


def by_distance(reach: Frame) -> Frame:
    """Points: what self-generated text costs more, over the distance of the text."""
    rows = of(reach, OWN)
    cost = c.against(rows, of(reach, SAME), LABELS, LABELS, FREE, c.paired_units)
    made = cost.map(middle).rename("y").reset_index()
    apart = rows.groupby(LABELS)["apart"].mean().rename("x").reset_index()
    made = made.merge(apart, on=LABELS).sort_values(["model", "tokens", "x"])
    line = made.tokens.map("{:,.0f} tokens".format)
    return made.assign(panel=made.model, line=line, value="Δ NLL (nats per token)", seed=None)
