"""Table 1 and the data of Figure 1: jump rates of models, and of their checkpoints over training.

From the results of `scripts/analyze.py --config=configs/analyze.py:displacement`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from etils import epath

from ffn_heterogeneity.io.files import read_json
from ffn_heterogeneity.report import paper_jreg as paper
from ffn_heterogeneity.report.paper_table import NOT_RUN, UNKNOWN, Table, number
from ffn_heterogeneity.report.runs import Run, number_of, union

READINGS = {"before_final_norm": "before", "after_final_norm": "after"}
RATES = ("zeta_L", "zeta_L-1", "zeta_L-2")
# Config keys that must be equal for rates to stand beside one another.
COMPARABLE = ("text", "token_ids", "window", "max_windows", "bos", "positions", "compute_dtype")


class Measured(NamedTuple):
    """One model, or one checkpoint of it."""

    name: str
    run: Run
    checkpoint: str  # "": the model is one
    step: int
    readings: dict[str, dict[str, Any]]  # reading -> "psi", rates
    tokens: int | None


def measured(runs: Sequence[Run]) -> list[Measured]:
    """What the finished displacement analyses found, checkpoints by step.

    Raises:
      ValueError: a results.json is not one of that analysis; the message names it.
    """
    found = []
    for run in runs:
        path = epath.Path(run.path) / "results.json"
        if run.config.get("analysis") != "displacement" or not path.exists():
            continue
        results = read_json(path)
        rows = results.get("checkpoints")
        if rows is None:
            found.append(_measured(run, path, results))
        elif isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            mine = [_measured(run, path, row) for row in rows]
            found += sorted(mine, key=lambda one: one.step)
        else:
            raise ValueError(f"{path}: its checkpoints are no list of results: is it damaged?")
    return _told_apart(found)


def tables(models: Sequence[Measured]) -> list[Table]:
    """Table 1 and the data of Figure 1."""
    return [_rates(models), _depths(models)]


def whole(models: Sequence[Measured]) -> list[Measured]:
    """The models that are no checkpoint of a series."""
    return [one for one in models if not one.checkpoint]


def series(models: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Name -> its checkpoints, by step."""
    points = [one for one in models if one.checkpoint]
    return {name: [one for one in points if one.name == name]
            for name in union([one.name] for one in points)}  # fmt: skip


def _measured(run: Run, path: epath.Path, values: dict) -> Measured:
    readings = {name: values.get(name) for name in READINGS}
    for name, reading in readings.items():
        psi = reading.get("psi") if isinstance(reading, dict) else None
        if not isinstance(psi, list) or not psi or None in map(number_of, psi):
            raise ValueError(f"{path} holds no displacements under {name}.psi: is it damaged?")
    step = values.get("step", 0)
    return Measured(
        run.model, run, str(values.get("checkpoint", "")), step, readings, values.get("tokens")
    )


def _told_apart(found: Sequence[Measured]) -> list[Measured]:
    """Several analyses of one model are named by their directories as well."""
    owners = {name: {one.run.path for one in found if one.name == name}
              for name in union([one.name] for one in found)}  # fmt: skip
    return [
        one._replace(name=f"{one.name} ({one.run.label})") if len(owners[one.name]) > 1 else one
        for one in found
    ]


def _rates(models: Sequence[Measured]) -> Table:
    rows, exact = [], []
    for one in models:
        cells = [one.readings[name].get(rate) for name in READINGS for rate in RATES]
        label = f"{one.name}, {one.checkpoint}" if one.checkpoint else one.name
        text = os.path.basename(str(one.run.config.get("text") or one.run.config.get("token_ids")))
        layers = len(one.readings["before_final_norm"]["psi"])
        row = (label, UNKNOWN, *cells, layers, one.tokens, text)
        rows.append(tuple(UNKNOWN if cell is None else number(cell) for cell in row))
        exact.append(tuple(UNKNOWN if cell is None else cell for cell in row))
    rates = [f"{rate} {says}" for says in READINGS.values() for rate in RATES]
    header = ("model", "paper", *rates, "layers", "tokens", "text")
    rows = rows or [("every model", UNKNOWN, *[NOT_RUN] * (len(header) - 2))]
    notes = ["In percent; h_L before and after the final norm.", paper.TABLE_1]
    notes += _differing(models)
    used = tuple(union([one.run.path] for one in models))
    return Table(
        "table_1", paper.TITLES["table_1"], header, tuple(rows), tuple(notes), tuple(exact), used
    )


def _depths(models: Sequence[Measured]) -> Table:
    rows, exact = [], []
    for one in whole(models):
        for name, says in READINGS.items():
            psi = one.readings[name]["psi"]
            exact += [(one.name, says, layer, value) for layer, value in enumerate(psi, 1)]
            rows += [
                (one.name, says, str(layer), number(psi[layer - 1])) for layer in ends(len(psi))
            ]
    header = ("model", "final norm", "layer", "Psi")
    rows = rows or [("every model", UNKNOWN, UNKNOWN, NOT_RUN)]
    note = "The first and the last three layers of each, from 1; figure_1.csv holds all of them."
    used = tuple(union([one.run.path] for one in whole(models)))
    return Table(
        "figure_1", paper.TITLES["figure_1"], header, tuple(rows), (note,), tuple(exact), used
    )


def ends(n_layers: int) -> list[int]:
    """The first and the last three layers, from 1."""
    return sorted({1, *range(max(1, n_layers - 2), n_layers + 1)})


def _differing(models: Sequence[Measured]) -> list[str]:
    found = []
    for key in COMPARABLE:
        values = union([str(one.run.config.get(key))] for one in models)
        if len(values) > 1:
            found.append(f"These rows differ in {key} ({', '.join(values)}): not comparable.")
    return found
