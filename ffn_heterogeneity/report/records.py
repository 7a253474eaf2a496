"""Records: runs that differ in nothing but the seed, and the values that tables read of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import read_json
from ffn_heterogeneity.papers.specs import Against, At, Kind, Label, Task, two_proportions
from ffn_heterogeneity.report.runs import Run, Spread, number_of, union, written_models

READINGS = {"before_final_norm": "before", "after_final_norm": "after"}
FILES = ("text", "jsonl", "tokens")  # tasks that say nothing of the data
BEST_FIRST = ("acc_norm", "acc", "exact_match")  # metrics of a task, for a paper's one number


class Member(NamedTuple):
    """One seed of a record; its model's accuracies, whoever evaluated it."""

    run: Run
    curves: Mapping[str, Mapping[int, float]]
    layers: Mapping[str, Mapping[int, Sequence[float]]]
    tasks: Mapping[str, Spread]
    used: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """Runs that differ in nothing but the seed.

    Attributes:
      config: the keys that they share, and what `_facts` adds.
      key: config key -> value as JSON, of all that had to be equal.
      members: by seed; None where no chance is in it.
      differs: what sets it apart from other records beside its labels: ", seq_len 16".
      peers: all records of its kind, what it may stand against.
    """

    kind: Kind
    config: Mapping[str, Any]
    key: Mapping[str, str]
    members: Mapping[Any, Member]
    differs: str
    peers: list[Record] = dataclasses.field(repr=False, compare=False)

    @property
    def used(self) -> tuple[str, ...]:
        """Paths of the runs in it, and of those that evaluated its models."""
        return tuple(path for m in self.members.values() for path in (m.run.path, *m.used))


def finished(run: Run) -> bool:
    """Whether it has its results, of every seed."""
    return run.state.split(", ")[-1] == "finished"


def records(runs: Sequence[Run], kind: Kind, *, begun: bool = False) -> list[Record]:
    """Runs of one kind as records; `begun`: with those that have curves but no results yet."""
    everyone, groups = runs, {}
    runs = [run for run in runs if run.config.get("analysis") != "displacement"]
    runs += displacements(everyone)
    # Of two runs of the same settings and seed the finished one is taken.
    for run in sorted(runs, key=lambda run: not finished(run)):
        config = {**run.config, **_facts(run)}
        if not all(fits_value(config.get(k, run.values.get(k)), v) for k, v in kind.where.items()):
            continue
        if finished(run) or (begun and any(run.curves)):
            config = _without_idle_losses(config, kind)
            key = {k: json.dumps(v) for k, v in config.items() if _among(k, kind.same)}
            members = groups.setdefault(tuple(sorted(key.items())), (config, {}))[1]
            chance = all(fits_value(config.get(k), v) for k, v in kind.chance.items())
            for seed, member in _members(run, everyone).items():
                members.setdefault(seed if kind.chance and chance else None, member)
    differing = {k for k in union(dict(key) for key in groups) if not _among(k, kind.shown)
                 and len({dict(key).get(k) for key in groups}) > 1}  # fmt: skip
    result: list[Record] = []
    for key, (config, members) in groups.items():
        differs = [f", {k} {dict(key).get(k, 'unset')}" for k in sorted(differing)]
        result.append(Record(kind, config, dict(key), members, "".join(differs), result))
    result.sort(key=lambda r: [_rank(r.config.get(k)) for k in kind.shown])
    return result


def _rank(value: Any) -> tuple:
    number = number_of(value)
    return (number is None, number or 0, str(value))


def _among(key: str, names: Sequence[str]) -> bool:
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in names)


def _without_idle_losses(config: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """A loss of weight 0 is none: its other settings are no difference."""
    idle = [key.removesuffix("weight") for key, value in config.items()
            if re.fullmatch(r"losses\.\w+\.weight", key) and not value]  # fmt: skip
    return {k: v for k, v in config.items() if _among(k, kind.always) or not _among(k, idle)}


def _facts(run: Run) -> dict[str, Any]:
    """What tables say of a run beside its config."""
    size = [run.config.get(k) or 0 for k in ("steps", "batch_size", "seq_len")]
    pair = re.fullmatch(r"pair:(\d+)", str(run.config.get("layers")))
    own = {"pair": int(pair[1]) if pair else None, "model": run.model, "path": run.path}
    task, path = str(run.config.get("data.task")), str(run.config.get("data.path") or "")
    own["data"] = f"{task} ({os.path.basename(path)})" if path and task in FILES else task
    if run.config.get("criterion") == "none":  # nothing goes, from wherever
        own |= {"layers": "all", "compensation": "none", "reverse": False}
        own |= dict.fromkeys(("ratio", "count", "budget"))
    return own | ({"tokens": int(np.prod(size))} if all(size) else {})


def _members(run: Run, everyone: Sequence[Run]) -> dict[Any, Member]:
    """By seed; unnamed where a seed has not begun: which one, its curves do not say."""
    seeds = run.config.get("seeds") or [run.config.get("seed")]
    places = written_models(run)[1:] if run.config.get("seeds") else written_models(run)
    if len(seeds) != len(run.curves):
        seeds, places = [f"?{i}" for i in range(len(run.curves))], [None] * len(run.curves)
    result = {}
    for i, (seed, place) in enumerate(zip(seeds, places, strict=True)):
        users = [other for other in everyone if other is not run and other.config.get("model")
                 and os.path.realpath(str(other.config["model"])) == place]  # fmt: skip
        users = [other for other in users if _tasks(other)]
        tasks = {name: x for one in (run, *users) for name, x in _tasks(one).items()}
        layers = run.layers[i] if i < len(run.layers) else {}
        seed = run.path if seed is None else seed
        result[seed] = Member(run, run.curves[i], layers, tasks, tuple(x.path for x in users))
    return result


def _tasks(run: Run) -> dict[str, Spread]:
    """ "piqa acc, 0 shots" -> accuracy with Wilson's interval."""
    values, result = {k[6:]: v for k, v in run.values.items() if k.startswith("tasks.")}, {}
    for name, value in values.items():
        task, _, metric = name.partition(".")
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        if None not in (low, high) and number_of(value) is not None:
            shots = values.get(f"{task}.shots")
            label = f"{task} {metric}" + (f", {shots} shots" if isinstance(shots, int) else "")
            result[label] = Spread(value, low, high, values.get(f"{task}.n", 0), "Wilson")
    return result


def displacements(runs: Sequence[Run]) -> list[Run]:
    """The analyses of displacement as runs: one a reading of h_L, checkpoints as steps.

    Raises:
      ValueError: a results.json is not one of that analysis; the message names it.
    """
    ours = {p for run in runs if "shape.layers" in run.config for p in written_models(run)}
    result = []
    for run in runs:
        path = epath.Path(run.path) / "results.json"
        if run.config.get("analysis") != "displacement" or not path.exists():
            continue
        results = read_json(path)
        rows = results.get("checkpoints", [results])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: its checkpoints are no list of results: is it damaged?")
        same = [x for x in runs if x.model == run.model and x.config.get("analysis")]
        config = run.config | {
            "series": "checkpoints" in results, "tokens": results.get("tokens"),
            "written here": os.path.realpath(str(run.config.get("model", ""))) in ours,
            "text": os.path.basename(str(run.config.get("text") or run.config.get("token_ids"))),
        }  # fmt: skip
        for reading, where in READINGS.items():
            layers, curves = {}, {}
            for row in sorted(rows, key=lambda row: row.get("step", 0)):
                psi = row[reading].get("psi") if isinstance(row.get(reading), dict) else None
                if not isinstance(psi, list) or not psi or None in map(number_of, psi):
                    raise ValueError(f"{path} holds no displacements under {reading}.psi: is it "
                                     "damaged?")  # fmt: skip
                layers[row.get("step", 0)] = psi
                for name, value in row[reading].items():
                    if number_of(value) is not None:
                        curves.setdefault(f"validation/jreg/{name}", {})[row.get("step", 0)] = value
            model = f"{run.model} ({run.label})" if len(same) > 1 else run.model
            result.append(dataclasses.replace(
                run, config=config | {"reading": where, "layers": len(psi)}, curves=[curves],
                layers=[{"validation/jreg/psi": layers}], model=model,
            ))  # fmt: skip
    return result


# ---- values


def middle(value: Any) -> Any:
    """The number itself; the mean of several."""
    return value.mean if isinstance(value, Spread) else value


def over(values: Sequence[Any]) -> Any:
    """Mean, lowest and highest of several; the one where they are the same; None of none."""
    if len(set(map(middle, values))) < 2:
        return values[0] if values else None
    values = [middle(value) for value in values]
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)), len(values))


def interval(values: Sequence[float]) -> Any:
    """Mean and Student's 95% interval of paired differences; one value alone has none."""
    from scipy import stats

    if len(values) < 2:
        return values[0] if values else None
    mean, n = float(np.mean(values)), len(values)
    half = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5)
    return Spread(mean, mean - half, mean + half, n, "t")


def fits_value(value: Any, wanted: Any) -> bool:
    """Equal to what is wanted, or to one of several; `bool`: true of itself."""
    if wanted is bool:
        return bool(value)
    return any(value == one for one in (wanted if isinstance(wanted, tuple) else (wanted,)))


def fits(record: Record, match: Mapping[str, Any]) -> bool:
    """Whether the record's config has what `match` asks for."""
    return all(fits_value(record.config.get(key), wanted) for key, wanted in match.items())


def label(record: Record, spec: Label) -> str:
    """The record's name: the first whose match fits, keys filled in."""
    name = next((name for name, match in spec.names.items() if fits(record, match)), spec.default)
    return fill(record, name)


def fill(record: Record, text: str) -> str:
    """ "{steps:,d} steps" with the record's values; "{name}" is its kind's name for it."""

    def value(match: re.Match) -> str:
        if match[1] == "name":
            return label(record, record.kind.name)
        result = record.config.get(match[1])
        result = ", ".join(result) if isinstance(result, list) else result
        return format(result, match[2] or "") if result not in (None, "") else "-"

    return re.sub(r"\{([^:}]+):?([^}]*)\}", value, text)


def by_seed(record: Record, path: Any) -> dict[Any, Any]:
    """seed -> value, of the seeds that have it: at the last evaluation; tasks in percent."""
    result = {}
    for seed, member in record.members.items():
        if isinstance(path, tuple) and not isinstance(path, (Task, At)):  # the mean of all of them
            values = [by_seed(record, one).get(seed) for one in path]
            value = None if None in values else float(np.mean([middle(x) for x in values]))
        elif isinstance(path, Task):
            value = _task(record, member, path)
        else:
            metric = path.metric if isinstance(path, At) else path
            points = member.curves.get(metric, {})
            if isinstance(path, At):
                value = points.get(
                    round(path.share * record.config.get("steps", max(points or [0])))
                )
            elif points:
                value = points[max(points)]
            else:
                value = member.run.values.get(f"final {path}", member.run.values.get(path))
        if value is not None:
            result[seed] = value
    return result


def _task(record: Record, member: Member, task: Task) -> Any:
    name, shots = fill(record, task.name), task.shots
    ends = "(, .*)?" if shots is None else f"(, {shots} shots)?"
    names = [x for x in member.tasks if re.fullmatch(re.escape(name) + r" \S+" + ends, x)]
    rank = {f"{name} {metric}": i for i, metric in enumerate(BEST_FIRST)}
    best = min(names, key=lambda x: rank.get(x.split(",")[0], len(rank)), default=None)
    if best is None:
        return None
    x = member.tasks[best]
    return x._replace(mean=100 * x.mean, low=100 * x.low, high=100 * x.high)


def value_of(record: Record, path: Any) -> Any:
    """A table's value: a number, `Spread` or text; None: it was not measured."""
    if isinstance(path, Against):
        reference = reference_of(record, path)
        return None if reference is None else _against(record, reference, path)
    if isinstance(path, str) and path in record.config:
        return record.config[path]
    return over(list(by_seed(record, path).values()))


def reference_of(record: Record, path: Against) -> Record | None:
    """The record that it stands against."""
    own, *others = ({k: v for k, v in r.key.items() if not _among(k, path.free)}
                     for r in (record, *record.peers))  # fmt: skip
    same = (r for r, its in zip(record.peers, others, strict=True) if its == own)
    return next((r for r in same if fits(r, path.where)), None)


def _against(record: Record, reference: Record, path: Against) -> Any:
    own, other = (middle(value_of(r, path.path)) for r in (record, reference))
    if record is reference and path.how != "ratio" or None in (own, other):
        return None
    if path.how == "difference":
        return interval(differences(record, reference, path.path))
    if path.how == "z":
        score = value_of(record, path.path)
        n = score.n if isinstance(score, Spread) and score.kind == "Wilson" else None
        return two_proportions(other, own, n)
    ratio = own / other if other else None
    return ratio if path.how == "ratio" or ratio is None else 100 * (ratio - 1)


def differences(record: Record, reference: Record, path: Any) -> list[float]:
    """Of the seeds that both have; a side without chance (None) meets every seed of the other.

    Where the two have no seed in common: of the means, one value.
    """
    own, other = ({k: middle(v) for k, v in by_seed(r, path).items()} for r in (record, reference))
    if not own or not other:
        return []
    if None in own or None in other:
        seeds = [seed for seed in {**own, **other} if seed is not None] or [None]
        return [own.get(s, own.get(None)) - other.get(s, other.get(None)) for s in seeds]
    common = [seed for seed in own if seed in other]
    if common:
        return [own[seed] - other[seed] for seed in common]
    return [float(np.mean(list(own.values())) - np.mean(list(other.values())))]
