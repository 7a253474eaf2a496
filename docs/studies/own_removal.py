"""Removal without data: rules on what the model itself writes, and what the kept neurons can say
for the others; before and after a short recovery.

A report of our own, in the form of those of the papers:

  python scripts/report.py --paper=docs/studies/own_removal.py runs/own-* --out=runs/own
"""

from __future__ import annotations

import os
import re
from typing import Any

from ffn_heterogeneity.papers import nucl, printed
from ffn_heterogeneity.papers.massive_weights import corpus
from ffn_heterogeneity.report import tidy
from ffn_heterogeneity.report.paper import Runs
from ffn_heterogeneity.report.tidy import Frame
from ffn_heterogeneity.report.versus import versus

PRINTED = printed(__file__)
SAME = (*nucl.REMOVED, "sequential")
FREE = (*nucl.REMOVAL, "sequential")
UNPRUNED, ENTROPY = {"criterion": "none"}, {"criterion": "entropy", **nucl.PLAIN}


def text_read(place: Any) -> str:
    """ "own <seed>" of a model's own text, the corpus of another."""
    own = re.fullmatch(r"\w+-(\d+)\.jsonl", os.path.basename(str(place)))
    return f"own {own[1]}" if own else corpus(place)


def removals(rows: Frame) -> Frame:
    rows = nucl.removals(rows, ("model", "ratio", *FREE, "window"), SAME)
    rows["calibration_tokens"] = rows.calibration_tokens.where(rows.calibration.astype(bool))
    order = rows.sequential.map(lambda value: ", layer after layer" if value else "")
    made = rows.compensation + order
    return rows.assign(text_read=rows.calibration.map(text_read), made_good=made)


def own(runs: Runs) -> Frame:
    every = runs["removal"]
    columns = {
        "NLL": "nll",
        "less unpruned": versus(every, "nll", every, UNPRUNED, SAME, (*FREE, *nucl.SIZE), "units"),
        "less entropy": versus(every, "nll", every, ENTROPY, SAME, FREE, "units"),
    }
    return tidy.cells(every, columns)


KINDS = {"removal": removals}
SETTINGS = nucl.SETTINGS | {"sequential": False}
