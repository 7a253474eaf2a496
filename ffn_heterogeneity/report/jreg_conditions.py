"""Runs of JREG's pre-training by what they were given: groups that compare, conditions, seeds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.report import paper_jreg as paper
from ffn_heterogeneity.report.compare import mean_curve
from ffn_heterogeneity.report.paper_table import middle, spread
from ffn_heterogeneity.report.runs import Run, number_of, union
from ffn_heterogeneity.report.writer import read_metrics

NLL = "validation/nll"
RATES = {name: f"validation/jreg/{name}" for name in ("zeta_L", "zeta_L-1", "zeta_L-2")}
ENTROPY = "validation/entropy/ent/ffn_out/mean"
PSI = "validation/jreg/psi"
# Config keys that must be equal for losses and rates to stand beside one another.
SETUP = (
    "model", "revision", "tokenizer", "batch_size", "seq_len", "dropout", "compute_dtype",
    "nll_reduction", "eval.max_batches", "jreg.final_norm", "jreg.positions", "freeze",
    "train_only",
)  # fmt: skip
SETUP_GROUPS = ("shape.", "data.", "optimizer.")


class Member(NamedTuple):
    """One seed of a condition; `seed` is None where it cannot be told."""

    seed: int | None
    run: Run
    curve: dict[str, dict[int, float]]

    @property
    def folder(self) -> epath.Path:
        """Where its metrics.jsonl is."""
        path = epath.Path(self.run.path)
        return path / f"seed_{self.seed}" if self.run.config.get("seeds") else path


@dataclasses.dataclass(frozen=True)
class Condition:
    """Runs that differ in nothing but the seed.

    Attributes:
      group: a name for what must be equal to compare; conditions of one group do.
      size: "12x768/2048": layers, width, FFN width; or the name of the model that went on.
      weight, alpha: lambda and the sharpness; alpha is None in a baseline (lambda 0).
      members: each seed once.
      again: runs left out, because a member has their settings and their seeds.
    """

    group: str
    size: str
    weight: float
    alpha: float | None
    steps: int
    members: tuple[Member, ...]
    again: tuple[Run, ...] = ()

    @property
    def loss(self) -> str:
        """ "baseline", "weight 1, alpha 0.5"."""
        return f"weight {self.weight:g}, alpha {self.alpha:g}" if self.weight else "baseline"

    @property
    def published(self) -> bool:
        """Whether it saw as many tokens as the paper's runs, in steps of the same size."""
        config = self.members[0].run.config
        batch = (config.get("batch_size"), config.get("seq_len"))
        return (self.steps, *batch) == (paper.STEPS, *paper.BATCH)

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all runs in it, each once."""
        return tuple(union([m.run.path] for m in self.members))


def trained(runs: Sequence[Run]) -> list[Run]:
    """The runs that pre-trained and know JREG, finished or not."""
    return [run for run in runs if "jreg.weight" in run.config and "shape.layers" in run.config]


def finished(run: Run) -> bool:
    """Whether it has its results, of every seed."""
    return run.state.split(", ")[-1] == "finished"


def conditions(runs: Sequence[Run], *, unfinished: bool = False) -> list[Condition]:
    """By group; in it by steps, the baseline first, then by weight and sharpness.

    Args:
      unfinished: with the runs that have curves but no results yet. Names are the same either way.
    """
    begun = [run for run in trained(runs) if finished(run) or any(run.curves)]
    names, found = _group_names(begun), {}
    # Of two runs of the same settings and seed the finished one is taken.
    for run in sorted(begun, key=lambda run: not finished(run)):
        if not unfinished and not finished(run):
            continue
        weight = float(run.config["jreg.weight"])
        alpha = float(run.config.get("jreg.alpha", paper.BEST_ALPHA)) if weight else None
        key = (names[_setup(run)], _size(run), weight, alpha, run.config.get("steps", 0))
        found.setdefault(key, []).append(run)
    merged = [_condition(key, mine) for key, mine in found.items()]
    order = union([names.values()])
    return sorted(merged, key=lambda c: (order.index(c.group), c.steps, c.weight, c.alpha or 0.0))


def baseline_of(condition: Condition, others: Sequence[Condition]) -> Condition | None:
    """The condition without JREG that it compares with."""
    same = [c for c in others if (c.group, c.steps) == (condition.group, condition.steps)]
    return next((c for c in same if not c.weight), None)


def values_of(condition: Condition, metric: str, when: Callable = max) -> list[float]:
    """A value a seed, at its last evaluation (`min`: its first); none where it was not made."""
    found = [_value(member, metric, when) for member in condition.members]
    return [value for value in found if value is not None]


def number_over_seeds(condition: Condition, metric: str, when: Callable = max) -> Any:
    """The number of one seed, mean and ends of several; None without any."""
    return spread(values_of(condition, metric, when))


def differences(condition: Condition, base: Condition, metric: str) -> list[float]:
    """How far its last values lie above the baseline's, seed by seed.

    Where the two have no seed in common: of the means, one value.
    """
    mine, theirs = (
        {m.seed: v for m in c.members if (v := _value(m, metric, max)) is not None}
        for c in (condition, base)
    )
    common = [seed for seed in mine if seed is not None and seed in theirs]
    if common:
        return [mine[seed] - theirs[seed] for seed in common]
    means = [middle(number_over_seeds(c, metric)) for c in (condition, base)]
    return [] if None in means else [means[0] - means[1]]


def mean_over_seeds(condition: Condition, metric: str) -> tuple[list[int], np.ndarray]:
    """(steps, values [seeds, steps]) at the steps that every seed has."""
    curves = [member.curve for member in condition.members]
    return mean_curve(dataclasses.replace(condition.members[0].run, curves=curves), metric)


def final_psi(condition: Condition) -> dict[int | None, list[float]]:
    """Psi_1 .. Psi_L of each seed's last evaluation; without a seed that has none."""
    found = {}
    for member in condition.members:
        rows = [row for row in read_metrics(member.folder / "metrics.jsonl") if PSI in row]
        values = [number_of(value) for value in rows[-1][PSI]] if rows else []
        if values and None not in values:
            found[member.seed] = values
    return found


def _value(member: Member, metric: str, when: Callable) -> float | None:
    points = member.curve.get(metric)
    if points:
        return points[when(points)]
    value = member.run.values.get(f"{'final' if when is max else 'first'} {metric}")
    return None if isinstance(value, str) else middle(value)


def _condition(key: tuple, runs: Sequence[Run]) -> Condition:
    members, again = [], []
    for run in runs:
        there = {member.seed for member in members}
        new = [m for m in _members(run) if m.seed is None or m.seed not in there]
        members += new
        again += [] if new else [run]
    return Condition(*key, tuple(members), tuple(again))


def _members(run: Run) -> list[Member]:
    seeds = run.config.get("seeds") or [run.config.get("seed")]
    if len(seeds) != len(run.curves):  # a seed has not begun: which one, its curves do not say
        seeds = [None] * len(run.curves)
    return [Member(s, run, curve) for s, curve in zip(seeds, run.curves, strict=True)]


def _setup(run: Run) -> tuple[tuple[str, str], ...]:
    """(config key, value as JSON) of all that must be equal."""
    keys = [k for k in run.config if k in SETUP or k.startswith(SETUP_GROUPS)]
    if run.config.get("nucl.variant", "none") != "none":
        keys += [k for k in run.config if k.startswith("nucl.")]
    # Weights of further terms; one that is 0 or not there is no term.
    weights = [k for k, v in run.config.items() if k.endswith(".weight") and v]
    keys += [k for k in weights if k != "jreg.weight"]
    return tuple((key, json.dumps(run.config[key])) for key in sorted(set(keys)))


def _group_names(runs: Sequence[Run]) -> dict[tuple, str]:
    """Setup -> its size; with the keys that differ where there are several of one size."""
    sizes = {_setup(run): _size(run) for run in runs}
    found = {}
    for setup, size in sizes.items():
        values = [dict(other) for other, its in sizes.items() if its == size]
        differing = [k for k in union(values) if len({v.get(k) for v in values}) > 1]
        mine = dict(setup)
        parts = [f"{key} {mine.get(key, 'unset')}" for key in differing]
        name = f"{size} ({paper.SIZES[size]})" if size in paper.SIZES else size
        found[setup] = ", ".join([name, *parts])
    return found


def _size(run: Run) -> str:
    if run.config.get("model"):
        return run.model
    layers, width, ffn = (run.config.get(f"shape.{k}") for k in ("layers", "d_model", "ffn_width"))
    return f"{layers}x{width}/{ffn}"
