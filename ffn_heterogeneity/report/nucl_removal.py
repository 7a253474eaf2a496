"""Tables 4 and 5 and the data of Figure 4: neurons removed, nothing trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ffn_heterogeneity.report import paper_nucl as paper
from ffn_heterogeneity.report.paper_table import (
    NOT_RUN,
    UNKNOWN,
    Table,
    middle,
    number,
    spread,
)
from ffn_heterogeneity.report.runs import Run, Spread, union

# Of a row, unless it says otherwise.
PLAIN = {"reverse": False, "compensation": "none"}
# Row -> (what it says, the config keys that make a run it).
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "unpruned": ("unpruned", {"criterion": "none"}),
    "entropy": ("highest entropy (NUCL)", {"criterion": "entropy"}),
    "gini": ("highest gini", {"criterion": "gini"}),
    "mstd": ("highest mstd", {"criterion": "mstd"}),
    "random": ("random", {"criterion": "random"}),
    "magnitude": ("smallest magnitude", {"criterion": "magnitude"}),
    "srinivas_babu": (
        "Srinivas & Babu 2015: merged into the nearest",
        {"criterion": "similarity", "compensation": "sum"},
    ),
    "stahlberg_byrne": (
        "Stahlberg & Byrne 2017: least squares, minimum norm",
        {"criterion": "similarity", "compensation": "least_squares"},
    ),
    "stahlberg_byrne_ridge": (
        "Stahlberg & Byrne 2017: ridge",
        {"criterion": "similarity", "compensation": "ridge"},
    ),
    "lowest_entropy": (
        "lowest entropy (sanity row)",
        {"criterion": "entropy", "reverse": True},
    ),
}
# Layers of Table 5, counted from 0 as in configs, and from 1 as in the paper.
PARTS = {
    "all": "all layers",
    "top": "top half (next to the output)",
    "bottom": "bottom half",
    "even": "even from 0: layers 0, 2, 4, ... (1, 3, 5, ... from 1: the paper's odd)",
    "odd": "odd from 0: layers 1, 3, 5, ... (2, 4, 6, ... from 1: the paper's even)",
}
WEAK = ("magnitude", "srinivas_babu", "stahlberg_byrne")
# In results.json, of the worst layer.
SOLUTION = {
    "largest_lambda_norm": "the largest norm of lambda is",
    "largest_lambda_max": "its largest entry",
    "largest_condition": "the largest condition number",
}
# Config keys that must be equal for numbers to stand beside one another.
OF_REMOVAL = ("ratio", "count", "budget")
COMPARABLE = (
    *OF_REMOVAL, "text", "token_ids", "window", "max_windows", "bos", "compute_dtype",
)  # fmt: skip
INDICES = (
    'The paper counts layers from 1. In Gemma-2 layer 0 is local; its "even layers" (after global '
    'attention) are layers 1, 3, 5, ... here, config.layers="odd".'
)


def tables(runs: Sequence[Run]) -> list[Table]:
    """Table 4 and Table 5, one for each model (one without numbers where there is no run)."""
    found = []
    for model, mine in _by_model(runs).items():
        found += [_criteria(model, mine), _parts(model, mine)]
    return found


def pairs(runs: Sequence[Run]) -> list[Table]:
    """The data of Figure 4, for each model."""
    return [_pairs(model, mine) for model, mine in _by_model(runs).items()]


def row_of(run: Run) -> str | None:
    """The row of Table 4 that a run is, whatever its layers; None: none of them."""
    mine = {key: run.config.get(key, PLAIN.get(key)) for key in ("criterion", *PLAIN)}
    if mine["criterion"] == "none":  # nothing goes, whatever would make up for it
        return "unpruned"
    return next((row for row, (_, keys) in ROWS.items() if {**PLAIN, **keys} == mine), None)


def pair_of(run: Run) -> int | None:
    """i of "pair:i"."""
    match = re.fullmatch(r"pair:(\d+)", str(run.config.get("layers", "")))
    return int(match[1]) if match else None


def task_values(run: Run) -> dict[str, Any]:
    """ "<task> <metric>, <n> shots" -> value with its interval, of results.json's "tasks"."""
    values = {k[6:]: v for k, v in run.values.items() if k.startswith("tasks.")}
    found = {}
    for name, value in values.items():
        task, _, metric = name.partition(".")
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        if low is None or high is None or isinstance(value, str):
            continue
        shots = values.get(f"{task}.shots")
        label = f"{task} {metric}" + (f", {shots} shots" if isinstance(shots, int) else "")
        found[label] = Spread(value, low, high, values.get(f"{task}.n", 0))
    return found


def _by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    mine = [run for run in runs if "criterion" in run.config and "perplexity" in run.values]
    names = union([run.model] for run in mine)
    return {name: [run for run in mine if run.model == name] for name in names} or {"": []}


def _criteria(model: str, runs: Sequence[Run]) -> Table:
    found = {row: [] for row in ROWS}
    for run in runs:
        row = row_of(run)
        if row and (run.config["layers"] == "all" or row == "unpruned"):
            found[row].append(run)
    others = [run.label for run in runs if row_of(run) is None and run.config["layers"] == "all"]
    printed = {row: paper.TABLE_4.get(row, {}) for row in ROWS}
    known = {row: ", ".join(f"{k} {v}" for k, v in cell.items()) for row, cell in printed.items()}
    labels = {row: (says, known[row] or UNKNOWN) for row, (says, _) in ROWS.items()}
    shots = ", ".join(f"{task} {count}" for task, count in paper.SHOTS.items())
    notes = [
        f"Paper: {paper.REMOVAL} Its columns are few-shot accuracies (shots: {shots}); its three "
        "weak baselines stand at chance, its random row far above them."
    ]
    if runs:
        notes.insert(0, _ordering({row: _perplexity(mine) for row, mine in found.items()}))
        notes += [f"{ROWS[row][0]}: {text}" for row in ROWS if (text := _solution(found[row]))]
    if others:
        notes.append(f"In no row, other criteria or compensations: {', '.join(others)}.")
    header = ("removed by", "paper (Gemma-2 2B, %)")
    return _table(
        "table_4", model, header, [(labels[row], found[row]) for row in ROWS], runs, notes
    )


def _parts(model: str, runs: Sequence[Run]) -> Table:
    base = [run for run in runs if row_of(run) == "unpruned"]
    mine = [run for run in runs if row_of(run) == "entropy"]
    rows = [(("none: unpruned", UNKNOWN), base)]
    for part, says in PARTS.items():
        rows.append(((says, UNKNOWN), [run for run in mine if run.config["layers"] == part]))
    notes = ["By highest entropy, the config's share of the chosen layers' neurons.", INDICES]
    return _table("table_5", model, ("removed from", "paper"), rows, runs, notes)


def _pairs(model: str, runs: Sequence[Run]) -> Table:
    found = [run for run in runs if pair_of(run) is not None]
    rows = []
    for first in sorted(set(map(pair_of, found))):
        label = (f"{first}, {first + 1}", f"{first + 1}, {first + 2}", UNKNOWN)
        rows.append((label, [run for run in found if pair_of(run) == first]))
    header = ("layers from 0", "from 1 (paper)", "paper")
    return _table("figure_4", model, header, rows or [(("every pair",) * 2 + (UNKNOWN,), [])], runs)


def _table(
    key: str,
    model: str,
    labels: tuple[str, ...],
    rows: Sequence[tuple[tuple[str, ...], Sequence[Run]]],
    runs: Sequence[Run],
    notes: Sequence[str] = (),
) -> Table:
    """A row for each (labels, runs): what was measured, beside the unpruned model's."""
    used = [run for _, mine in rows for run in mine]
    base = [run for run in runs if row_of(run) == "unpruned"]
    tasks = union(task_values(run) for run in used)
    values = [_values(mine, base, tasks) for _, mine in rows]
    shown = [(*label, *map(number, row)) for (label, _), row in zip(rows, values, strict=True)]
    exact = [
        (*label, *(NOT_RUN if value is None else middle(value) for value in row))
        for (label, _), row in zip(rows, values, strict=True)
    ]
    return Table(
        key=f"{key}_{re.sub(r'[^A-Za-z0-9.-]+', '-', model)}" if model else key,
        title=paper.TITLES[key] + (f" ({model})" if model else ""),
        header=(*labels, "perplexity", "x unpruned", "% of parameters", *tasks),
        rows=tuple(shown),
        notes=(*notes, *_differing(used)),
        exact=tuple(exact) if used else (),
        used=tuple(run.path for run in used),
    )


def _values(mine: Sequence[Run], base: Sequence[Run], tasks: Sequence[str]) -> list[Any]:
    """[perplexity, its ratio to the unpruned one's, % of parameters removed, tasks ...]."""
    perplexity, plain = _perplexity(mine), middle(_perplexity(base))
    ratio = middle(perplexity) / plain if perplexity is not None and plain else None
    gone = spread([run.values["parameters_removed_percent"] for run in mine])
    accuracies = [task_values(run) for run in mine]
    found = [_over_runs([one[task] for one in accuracies if task in one]) for task in tasks]
    return [perplexity, ratio, gone, *found]


def _over_runs(values: Sequence[Spread]) -> Any:
    """The one with its interval; of several runs the mean and its ends."""
    if len({value.mean for value in values}) == 1:
        return values[0]
    return spread([value.mean for value in values])


def _perplexity(runs: Sequence[Run]) -> Any:
    return spread([middle(run.values["perplexity"]) for run in runs])


def _solution(runs: Sequence[Run]) -> str:
    """How large a least-squares compensation became; an exact fit says nothing by its residual."""
    if not any("largest_condition" in run.values for run in runs):
        return ""
    parts = []
    for key, says in SOLUTION.items():
        values = [run.values[key] for run in runs if key in run.values]
        parts += [f"{says} {number(spread(values))}"] if values else []
    return f"over the layers, {', '.join(parts)}."


def _differing(runs: Sequence[Run]) -> list[str]:
    """What keeps the numbers of these runs from being compared."""
    found = []
    for key in COMPARABLE:
        mine = [run for run in runs if key not in OF_REMOVAL or row_of(run) != "unpruned"]
        values = union([str(run.config.get(key))] for run in mine)
        if len(values) > 1:
            found.append(f"These runs differ in {key} ({', '.join(values)}): not comparable.")
    return found


def _ordering(perplexity: Mapping[str, Any]) -> str:
    """Whether the paper's ordering holds: entropy, then random, then the weak baselines."""
    found = {row: middle(value) for row, value in perplexity.items() if value is not None}
    steps = [("unpruned", "entropy"), ("entropy", "random"), *(("random", row) for row in WEAK)]
    known = [(a, b) for a, b in steps if a in found and b in found]
    wrong = [
        f"{b} ({found[b]:,.4g}) is not above {a} ({found[a]:,.4g})"
        for a, b in known
        if not found[a] < found[b]
    ]
    text = (
        "The paper's ordering (unpruned, entropy, random, the three weak baselines) by perplexity"
    )
    if wrong:
        return f"{text} does not hold: {'; '.join(wrong)}."
    absent = [row for row in ("unpruned", "entropy", "random", *WEAK) if row not in found]
    if absent:
        return f"{text}: not known whole, not run: {', '.join(absent)}; the rest is in order."
    return f"{text} holds."
