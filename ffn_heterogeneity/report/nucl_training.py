"""Tables 1, 2, 3, 7, 8 and the data of Figures 2 and 3: fine-tuning with NUCL."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ffn_heterogeneity.report import paper_nucl as paper
from ffn_heterogeneity.report.compare import mean_curve
from ffn_heterogeneity.report.nucl_removal import task_values
from ffn_heterogeneity.report.paper_table import (
    CLOSED,
    NOT_RUN,
    UNKNOWN,
    Table,
    middle,
    number,
)
from ffn_heterogeneity.report.runs import Run, union

VARIANTS = {"ent": "entropy", "gini": "gini", "mstd": "mstd"}
TARGETS = {
    "ffn_out": "FFN, outgoing",
    "ffn_in_linear": "FFN, incoming (linear)",
    "ffn_in_gated": "FFN, incoming (gated)",
    "attention_out": "attention, outgoing",
}
NLL = "final validation/nll"
FIGURES = {"figure_2": "validation/entropy/ent/ffn_out/mean", "figure_3": "validation/nll"}
# Row of Table 7 -> config key.
SETTINGS = {
    "optimiser": "optimizer.name",
    "batch size": "batch_size",
    "learning rate": "optimizer.learning_rate",
    "warm-up steps, linear": "optimizer.warmup_steps",
    "dropout": "dropout",
    "steps": "steps",
    "alpha": "nucl.alpha",
    "hardware": "device",
}
OTHERWISE = "Everything but the named setting is equal in a sweep; see each run's config.json."


def tables(runs: Sequence[Run]) -> list[Table]:
    """Tables 1, 2, 3, 7 and 8."""
    mine = trained(runs)
    return [closed(), _variants(mine), _targets(mine), _settings(mine), _alphas(mine)]


def curves(runs: Sequence[Run]) -> list[Table]:
    """The data of Figures 2 and 3."""
    return [_curves(key, metric, runs) for key, metric in FIGURES.items()]


def trained(runs: Sequence[Run]) -> list[Run]:
    """The runs that fine-tuned, finished or not."""
    return [run for run in runs if "nucl.alpha" in run.config]


def alpha_of(run: Run) -> float:
    """The weight of NUCL; 0 where there is no such term."""
    off = run.config.get("nucl.variant") == "none"
    return 0.0 if off else float(run.config["nucl.alpha"])


def task_of(run: Run) -> str:
    """What it was trained on: the task's name, with the file's for plain text."""
    name, path = str(run.config.get("data.task", "")), str(run.config.get("data.path", ""))
    return f"{name} ({os.path.basename(path)})" if path and name in ("text", "jsonl") else name


def plain_targets(run: Run) -> bool:
    """Whether it acts where the paper's main experiments do: the FFN's outgoing weights."""
    return list(run.config.get("nucl.targets", [])) == ["ffn_out"]


def closed() -> Table:
    """Table 1: nothing to run, the weights are not public."""
    rows = [(paper.CLOSED, task, variant, UNKNOWN, CLOSED)
            for task in paper.CLOSED_DATA for variant in ("plain", *VARIANTS.values())]  # fmt: skip
    note = "The same recipe runs on any open model: configs/nucl_finetune.py:<model>,<data>."
    header = ("model", "data", "loss", "paper", "here")
    return Table("table_1", paper.TITLES["table_1"], header, tuple(rows), (note,))


def _variants(runs: Sequence[Run]) -> Table:
    """Per model and data: plain fine-tuning, and each variant at its best alpha."""
    rows, used = [], []
    mine = [run for run in runs if plain_targets(run)]
    tasks = union(task_values(run) for run in mine)
    for model, data in _groups(mine):
        group = [run for run in mine if _group(run) == (model, data)]
        plain = _best(group, "plain")
        for name in ("plain", *VARIANTS):
            run = _best(group, name)
            rows.append((
                model, data, VARIANTS.get(name, name), UNKNOWN, number(_nll(run), 6),
                UNKNOWN if name == "plain" else number(_below(run, plain)),
                f"{alpha_of(run):g}" if run else NOT_RUN,
                *(number(task_values(run).get(task) if run else None) for task in tasks),
            ))  # fmt: skip
            used += [run.path] if run else []
    for model in dict.fromkeys(paper.GEMMA.values()):
        for data in paper.GEMMA_DATA:
            if (model, data) not in _groups(mine):
                rows.append((model, data, "each", UNKNOWN, *[NOT_RUN] * (3 + len(tasks))))
    header = ("model", "data", "loss", "paper", "validation NLL", "below plain", "alpha", *tasks)
    notes = (
        "Each variant at the alpha of its lowest final validation NLL, of those that were run.",
        f"Paper: NUCL gains {paper.GAIN} points of accuracy on GSM8K with Gemma-2 2B; with which "
        "variant is not known here.",
    )
    return Table("table_2", paper.TITLES["table_2"], header, tuple(rows), notes, (), tuple(used))


def _targets(runs: Sequence[Run]) -> Table:
    """Per model and data with more than one target: gain of each over plain fine-tuning."""
    rows, used = [], []
    groups = [[run for run in runs if _group(run) == group] for group in _groups(runs)]
    groups = [group for group in groups if not all(map(plain_targets, group))] or [[]]
    for group in groups:
        plain = _best(group, "plain")
        label = ", ".join(_group(group[0])) if group else UNKNOWN
        for target, says in {"": "none (alpha = 0)", **TARGETS}.items():
            found = [run for run in group if alpha_of(run) > 0]
            found = [run for run in found if list(run.config["nucl.targets"]) == [target]]
            run = _lowest(found) if target else plain
            tasks = task_values(run).items() if run else ()
            rows.append((
                label, says, f"+{paper.TABLE_3[target]}" if target in paper.TABLE_3 else UNKNOWN,
                number(_nll(run), 6), number(_below(run, plain)) if target else UNKNOWN,
                f"{run.config['nucl.variant']}, {alpha_of(run):g}" if run else NOT_RUN,
                ", ".join(f"{task} {number(value)}" for task, value in tasks) or NOT_RUN,
            ))  # fmt: skip
            used += [run.path] if run else []
    header = (
        "run on", "connections", "paper (GSM8K points, Gemma-2 2B)", "validation NLL",
        "below plain", "variant, alpha", "accuracy",
    )  # fmt: skip
    return Table(
        "table_3", paper.TITLES["table_3"], header, tuple(rows), (OTHERWISE,), (), tuple(used)
    )


def _settings(runs: Sequence[Run]) -> Table:
    rows = []
    for says, key in SETTINGS.items():
        gemma, palm = paper.SETTINGS[says]
        values = union([str(run.config.get(key, run.values.get(key, UNKNOWN)))] for run in runs)
        rows.append((says, gemma, palm, ", ".join(values) or NOT_RUN))
    note = (
        "What the paper does not state is listed in configs/nucl_finetune.py, with what stands in."
    )
    header = ("setting", "paper: Gemma-2", f"paper: {paper.CLOSED}", "here")
    used = tuple(run.path for run in runs)
    return Table("table_7", paper.TITLES["table_7"], header, tuple(rows), (note,), (), used)


def _alphas(runs: Sequence[Run]) -> Table:
    rows, used = [], []
    for model, data in _groups(runs):
        group = [run for run in runs if _group(run) == (model, data) and plain_targets(run)]
        for variant in VARIANTS:
            tried = sorted(
                {alpha_of(run) for run in group if run.config["nucl.variant"] == variant}
            )
            if tried:
                best = _best(group, variant)
                rows.append((
                    model, data, VARIANTS[variant], UNKNOWN,
                    f"{alpha_of(best):g}" if best else NOT_RUN, ", ".join(f"{a:g}" for a in tried),
                ))  # fmt: skip
                used += [best.path] if best else []
    header = ("model", "data", "loss", "paper", "lowest NLL at alpha", "tried")
    if not rows:
        rows = [(UNKNOWN, UNKNOWN, says, UNKNOWN, NOT_RUN, NOT_RUN) for says in VARIANTS.values()]
    note = (
        "Paper: tuned in powers of ten between 1e-2 and 1e4. Its reduction of the text loss is not "
        "stated, so no value of alpha there can be compared with one here."
    )
    return Table("table_8", paper.TITLES["table_8"], header, tuple(rows), (note,), (), tuple(used))


def _curves(key: str, metric: str, runs: Sequence[Run]) -> Table:
    rows, used = [], []
    for run in with_curves(runs, metric):
        steps, values = mean_curve(run, metric)
        used.append(run.path)
        for step, value in zip(steps, values.mean(0), strict=True):
            rows.append((run.model, run.config["nucl.variant"], alpha_of(run), step, value))
    exact, shown = tuple(rows), _ends(rows)
    header = ("model", "variant", "alpha", "step", metric)
    notes = (
        f"First and last value of each curve; {key}.csv holds them all. Paper: alpha "
        f"{paper.FIGURE_ALPHAS}.",
    )
    return Table(key, paper.TITLES[key], header, shown, notes, exact, tuple(used))


def _ends(rows: Sequence[tuple]) -> tuple[tuple[str, ...], ...]:
    """Of each curve its first and last row, as shown."""
    found: dict[tuple, list[tuple]] = {}
    for row in rows:
        found.setdefault(row[:3], []).append(row)
    if not found:
        return ((UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, NOT_RUN),)
    return tuple(
        (model, variant, f"{alpha:g}", str(step), number(float(value), 6))
        for points in found.values()
        for model, variant, alpha, step, value in (points[0], points[-1])
    )


def with_curves(runs: Sequence[Run], metric: str) -> list[Run]:
    """Fine-tuning runs on the FFN's outgoing weights that have the metric, by variant and alpha."""
    mine = [
        run for run in trained(runs)
        if plain_targets(run) and any(metric in curve for curve in run.curves)
    ]  # fmt: skip
    return sorted(mine, key=lambda run: (run.model, run.config["nucl.variant"], alpha_of(run)))


def _group(run: Run) -> tuple[str, str]:
    """(model, data)."""
    name = run.model
    return paper.GEMMA.get(name, name), task_of(run)


def _groups(runs: Sequence[Run]) -> list[tuple[str, str]]:
    return list(dict.fromkeys(map(_group, runs)))


def _below(run: Run | None, plain: Run | None) -> float | None:
    """How far a run's final validation NLL is below the plain one's."""
    if run is None or plain is None:
        return None
    return middle(_nll(plain)) - middle(_nll(run))


def _nll(run: Run | None) -> Any:
    value = run.values.get(NLL) if run else None
    return None if isinstance(value, str) else value


def _lowest(runs: Sequence[Run]) -> Run | None:
    """The finished run of the lowest final validation NLL."""
    done = [run for run in runs if _nll(run) is not None and run.state.endswith("finished")
            and not run.state.endswith("not finished")]  # fmt: skip
    return min(done, key=lambda run: middle(_nll(run)), default=None)


def _best(runs: Sequence[Run], name: str) -> Run | None:
    """ "plain": alpha = 0; a variant: its best alpha above 0."""
    if name == "plain":
        return _lowest([run for run in runs if alpha_of(run) == 0])
    return _lowest([r for r in runs if r.config["nucl.variant"] == name and alpha_of(r) > 0])
