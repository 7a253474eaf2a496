"""Records: runs that differ in nothing but the seed, and the values that tables read of them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from ffn_heterogeneity.io.files import read_json
from ffn_heterogeneity.papers.specs import (
    Accuracy,
    Against,
    At,
    Kind,
    Label,
    Scored,
    Share,
    two_proportions,
)
from ffn_heterogeneity.report import paired
from ffn_heterogeneity.report.runs import Run, Seed, union
from ffn_heterogeneity.report.tables import Spread, interval, middle, number_of, over
from ffn_heterogeneity.report.trained import PREFIX, of_trained

READINGS = {"before_final_norm": "before", "after_final_norm": "after"}
FILES = ("text", "jsonl", "tokens")  # tasks that say nothing of the data
RANKS = ("1st", "2nd", "3rd", "median")  # of the magnitudes of a state
CORPORA = ("wikitext", "c4", "pg19")  # known by the path of a text; others by its last part
BEST_FIRST = ("acc_norm", "acc", "exact_match")  # metrics of a task, for a paper's one number
IDLE = {"layers": "all", "compensation": "none", "reverse": False, "protect": "", "lose": "",
        "calibration": "", "ratio": None, "count": None, "budget": None}  # fmt: skip


class Member(NamedTuple):
    """One seed of a record; its model's accuracies, whoever evaluated it (the runs `users`)."""

    run: Run
    seed: Seed
    tasks: Mapping[str, Spread]
    users: Sequence[Run]


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
    def used(self) -> list[str]:
        """Paths of the runs in it, and of those that evaluated its models."""
        return [run.path for m in self.members.values() for run in (m.run, *m.users)]


def records(runs: Sequence[Run], kind: Kind, *, begun: bool = False) -> list[Record]:
    """Runs of one kind as records; `begun`: with those that have curves but no results yet."""
    groups: dict[tuple, tuple[dict, dict]] = {}
    joined = any(key.startswith(PREFIX) for key in (*kind.same, *kind.where))
    every = of_trained(runs) if joined else runs
    # Of two runs of the same settings and seed the finished one is taken, and that with tasks.
    for run in sorted(unfolded(list(every)), key=lambda run: (not run.finished, not _tasks(run))):
        config = _without_idle_losses({**run.config, **_facts(run)}, kind)
        values = {**next(iter(run.seeds.values())).values, **config} if run.seeds else config
        if matches(values, kind.where) and (run.finished or (begun and run.curves)):
            key = {k: json.dumps(v) for k, v in config.items() if _among(k, kind.same)}
            members = groups.setdefault(tuple(sorted(key.items())), (config, {}))[1]
            chance = kind.chance and matches(config, kind.chance)
            for seed, member in _members(run, runs):
                members.setdefault(seed if chance else None, member)
    keys = [dict(key) for key in groups]
    differing = [k for k in sorted(union(keys)) if not _among(k, kind.shown)
                 and len({key.get(k) for key in keys} - {"null"}) > 1]  # fmt: skip
    result: list[Record] = []
    for key, (config, members) in zip(keys, groups.values(), strict=True):
        shown = {k: key.get(k, "unset") for k in differing}
        differs = "".join(f", {k} {value}" for k, value in shown.items() if value != "null")
        result.append(Record(kind, config, key, members, differs, result))
    result.sort(key=lambda record: [_rank(record.config.get(k)) for k in kind.shown])
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
    place = str(run.config.get("text") or run.config.get("token_ids") or "")
    own["corpus"] = _corpus(place)
    own["data"] = f"{task} ({os.path.basename(path)})" if path and task in FILES else task
    if "criterion" in run.config:  # older runs lack what came later
        own |= {key: run.config.get(key, "") for key in ("protect", "lose", "calibration")}
        own["draws"] = run.config["criterion"] == "random" or own["lose"].startswith("random:")
        own["calibration_corpus"] = _corpus(own["calibration"])
    if run.config.get("criterion") == "none":  # nothing goes, from wherever
        own |= IDLE
    return own | ({"tokens": int(np.prod(size))} if all(size) else {})


def _corpus(place: str) -> str:
    return next((x for x in CORPORA if x in place.lower()), os.path.basename(place))


def _members(run: Run, everyone: Sequence[Run]) -> Iterator[tuple[Any, Member]]:
    for name, seed in run.seeds.items():
        users = [other for other in everyone if other is not run and _tasks(other)
                 and not _changes(other) and other.reads == seed.model]  # fmt: skip
        tasks = _accuracies(seed.values)
        for user in users:
            tasks |= _tasks(user)
        yield (run.path if name is None else name), Member(run, seed, tasks, users)


def _changes(run: Run) -> bool:
    """Whether what it evaluated is no longer the model that it read."""
    attacked = (run.config.get("attack") or "zero", run.config.get("k") or 0) != ("zero", 0)
    return attacked or run.config.get("criterion") not in (None, "none")


def _tasks(run: Run) -> dict[str, Spread]:
    return _accuracies(next(iter(run.seeds.values())).values) if run.seeds else {}


def _accuracies(values: Mapping[str, Any]) -> dict[str, Spread]:
    """ "piqa acc, 0 shots" -> accuracy with its interval: Wilson's, or what the task says."""
    values, result = {k[6:]: v for k, v in values.items() if k.startswith("tasks.")}, {}
    for name, value in values.items():
        task, _, metric = name.partition(".")
        low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
        if None not in (low, high) and number_of(value) is not None:
            shots = values.get(f"{task}.shots")
            label = f"{task} {metric}" + (f", {shots} shots" if isinstance(shots, int) else "")
            kind = values.get(f"{task}.interval", "Wilson")
            result[label] = Spread(value, low, high, values.get(f"{task}.n", 0), kind)
    return result


def unfolded(runs: Sequence[Run]) -> Iterator[Run]:
    """The runs; of an analysis of displacement one for each reading of h_L, of one of massive
    weights one for each rank of magnitudes.

    Raises:
      ValueError: a results.json is not one of that analysis; the message names it.
    """
    ours = {seed.model for run in runs if "shape.layers" in run.config
            for seed in run.seeds.values()}  # fmt: skip
    for run in runs:
        path = epath.Path(run.path) / "results.json"
        analysis = run.config.get("analysis")
        if analysis not in ("displacement", "massive"):
            yield run
        elif path.exists():
            same = [x for x in runs if (x.model, x.config.get("analysis")) == (run.model, analysis)]
            model = f"{run.model} ({run.label})" if len(same) > 1 else run.model
            one = dataclasses.replace(run, model=model)
            try:
                results = read_json(path)
                massive = analysis == "massive"
                yield from _ranks(one, results) if massive else _readings(one, results, ours)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is no analysis: is it damaged? {error!r}") from None


def _readings(run: Run, results: Mapping[str, Any], ours: set[str]) -> Iterator[Run]:
    """A run for each reading, checkpoints as steps."""
    config = run.config | {
        "series": "checkpoints" in results, "tokens": results.get("tokens"),
        "written here": run.reads in ours,
        "text": os.path.basename(str(run.config.get("text") or run.config.get("token_ids"))),
    }  # fmt: skip
    rows = {row.get("step", 0): row for row in results.get("checkpoints", [results])}
    for reading, where in READINGS.items():
        psi: dict[int, list[float]] = {}
        curves: dict[str, dict[int, float]] = {}
        for step in sorted(rows):
            found = rows[step][reading]
            psi[step] = [float(x) for x in found["psi"]]
            for name, value in found.items():
                if number_of(value) is not None:
                    curves.setdefault(f"validation/jreg/{name}", {})[step] = value
        more = {"reading": where, "layers": len(psi[max(rows)])}
        seed = Seed("", {}, curves, {"validation/jreg/psi": psi})
        yield dataclasses.replace(run, config=config | more, seeds={None: seed})


def _ranks(run: Run, results: Mapping[str, Any]) -> Iterator[Run]:
    """A run for each of the three largest magnitudes and the median, by layer."""
    found = {"layer": results["layer"], "five": ", ".join(map(str, results["indices"][:5]))}
    rows = results["layers"]
    for i, rank in enumerate(RANKS):
        layers = {
            f"massive/{state}": {0: [float((*row[state]["top"], row[state]["median"])[i])
                                     for row in rows]}
            for state in rows[0]
        }  # fmt: skip
        seed = Seed("", {}, {}, layers)
        yield dataclasses.replace(
            run, config=run.config | found | {"rank": rank}, seeds={None: seed}
        )


# ---- values


def matches(config: Mapping[str, Any], match: Mapping[str, Any]) -> bool:
    """Whether every key is as wanted, or one of several wanted; `bool`: true of itself."""
    for key, wanted in match.items():
        value = config.get(key)
        several = wanted if isinstance(wanted, tuple) else (wanted,)
        if not (bool(value) if wanted is bool else any(value == one for one in several)):
            return False
    return True


def fits(record: Record, match: Mapping[str, Any]) -> bool:
    """Whether the record's config has what `match` asks for."""
    return matches(record.config, match)


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
    found = {seed: _of_member(record, member, path) for seed, member in record.members.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _of_member(record: Record, member: Member, path: Any) -> Any:
    values = member.seed.values
    match path:
        case Accuracy():
            return _task(record, member, path)
        case Scored():
            return member.tasks.get(path.name)
        case At():
            points = member.seed.curves.get(path.metric, {})
            steps = record.config.get("steps", max(points, default=0))
            return points.get(round(path.share * steps))
        case tuple():  # the mean of all of them
            several = [middle(_of_member(record, member, one)) for one in path]
            return None if None in several else float(np.mean(several))
    points = member.seed.curves.get(path)
    return points[max(points)] if points else values.get(f"final.{path}", values.get(path))


def _task(record: Record, member: Member, task: Accuracy) -> Any:
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
    if isinstance(path, Share):
        ends = [reference_of(record, Against(path.path, one, path.free))
                for one in (path.base, path.goal)]  # fmt: skip
        if record in ends or None in ends:
            return None
        return paired.share(*(_middles(one, path.path) for one in (record, *ends)))
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
    if path.how in ("windows", "questions"):
        units = [_units(one, path) for one in (record, reference)]
        return None if record is reference else paired.difference(*units)
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


def _units(record: Record, path: Against) -> dict[Any, float]:
    """{window or question: mean over the seeds}; empty where the seeds' units differ."""
    each = []
    for member in record.members.values():
        if path.how == "windows":
            each.append(dict(enumerate(member.seed.windows)))
        else:
            each.append(paired.questions(member.run.path, fill(record, path.path.name)))
    if len({tuple(one) for one in each}) != 1:
        return {}
    return {unit: float(np.mean([one[unit] for one in each])) for unit in each[0]}


def _middles(record: Record, path: Any) -> dict[Any, float]:
    return {seed: middle(value) for seed, value in by_seed(record, path).items()}


def differences(record: Record, reference: Record, path: Any) -> list[float]:
    """Of the seeds that both have; a side without chance (None) meets every seed of the other.

    Where the two have no seed in common: of the means, one value.
    """
    own, other = (_middles(one, path) for one in (record, reference))
    if not own or not other:
        return []
    if None in own:
        own = dict.fromkeys(other, own[None])
    if None in other:
        other = dict.fromkeys(own, other[None])
    common = [own[seed] - other[seed] for seed in own if seed in other]
    return common or [float(np.mean(list(own.values())) - np.mean(list(other.values())))]
