"""Measurements as rows, which every command writes to rows.jsonl next to its results.json.

A row is one number: what was measured, the value, an interval, and where it applies. docs/rows.md
lists every name. Directories of earlier versions have no rows.jsonl: `rows_of` computes the same
rows from their results.json.
"""

import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.io.files import plain, write_json, write_text
from ffn_heterogeneity.io.read import lines_of, parse_json
from ffn_heterogeneity.wording import first_line

RESULTS, ROWS = "results.json", "rows.jsonl"
# Field -> its type. Absent fields do not apply; "nan", "inf" and "-inf" are those numbers.
FIELDS: dict[str, type] = {
    "what": str,  # the name of a number, "nll", "accuracy", "jreg/zeta_L"
    "value": float,
    "low": float,  # lower end of the interval
    "high": float,
    "n": int,  # number of questions, windows or rows behind the value
    "how": str,  # method of the interval: Wilson, bootstrap, normal, t
    "step": int,  # of training
    "layer": int,  # from 1
    "neuron": int,  # from 0
    "task": str,  # of the harness
    "shots": int,  # examples in its prompt
    "split": str,  # train, validation, test
    "seed": int,
    "units": str,  # the file with the value of each window or question
}
MAX_LINE = 1 << 20
SPLITS = ("train/", "validation/", "test/")
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
# Keys that are not measurements: settings, machine facts, and duplicates in the same results.
_NO_MEASUREMENTS = (
    "first",
    "final",
    "seed",
    "seeds",
    "summary",
    "runs",
    "stages",
    "mesh",
    "losses",
    "machine",
    "tables",
    "protocol",
    "windows",
    "nll_windows",
    "accuracy_windows",
    "accuracy_rows",
    "window_documents",
    "magnitudes",
    "answers",
    "processes",
    "ratio",
    "count",
    "multiple",
    "first_window",
    "blocks",
    "dropped",
    "k",
    "layer_index",
    "token",
    "d_model",
    "least_influential",
    "ranking",
)
# Objects whose keys the user named: files, labels, categories, other models.
_NAMED = ("texts", "predicted", "by_category", "by_turn", "errors", "against")
# Lists of objects whose "layer" is an index.
_FROM_0 = ("compensated", "merged", "neurons")


def flatten_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested config to `{"optimizer.name": "adamw"}`; an empty group is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        nested = isinstance(value, Mapping) and value
        flat |= flatten_config(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def write_results(workdir: str | os.PathLike, results: Mapping[str, Any]) -> None:
    """Write rows.jsonl, then results.json: if the latter exists, the former is complete."""
    folder = epath.Path(workdir)
    lines = [json.dumps(row) + "\n" for row in rows_of(results)]
    write_text(folder / ROWS, "".join(lines))
    write_json(folder / RESULTS, results)


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Extract the measurements from a command's results, each with the fields that apply."""
    results = dict(plain(results))
    if "final" in results and "history" not in results:
        results["history"] = [results["final"]]
    return [*_special(results), *_of_object(results, "", {})]


def measurement(name: str, value: Any, where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Row of a number, or rows of a list with one number per layer; none for other values."""
    if _number(value) is not None:
        yield _row(name, value, where)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield from _of_list(value, name, where)


def _special(results: dict[str, Any]) -> Iterator[dict]:
    """Rows of results in special forms, which are removed from `results`.

    These are a benchmark's rounds and ratios, the best evaluation, and named neurons.
    """
    if "benchmark" in results:
        for program, seconds in results.pop("seconds", {}).items():
            rounds = {"n": len(seconds)}
            yield _row(f"seconds/{program}", statistics.median(seconds), rounds)
        for pair, (ratio, low, high) in results.pop("ratios", {}).items():
            ends = {"low": low, "high": high, "how": "bootstrap"}
            yield _row(f"ratios/{pair}", ratio, ends)
    best = results.pop("best", None)
    if isinstance(best, Mapping):
        split, _, name = str(best["metric"]).partition("/")
        where = {"step": best["step"], "split": split}
        yield _row(f"best/{name}", best["value"], where)
    layer = {"layer": results["layer"]} if _is_int(results, "layer") else {}
    for rank, neuron in enumerate(results.pop("indices", ()), 1):
        yield _row("massive_rank", rank, layer | {"neuron": neuron})


def _of_object(values: Mapping[str, Any], prefix: str, where: dict[str, Any]) -> Iterator[dict]:
    if "top" in values and "indices" in values:  # the largest entries of a hidden state
        for neuron, value in zip(values["indices"], values["top"], strict=True):
            yield _row(prefix.strip("/"), value, where | {"neuron": neuron})
        values = {name: x for name, x in values.items() if name not in ("top", "indices")}
    named = prefix.strip("/").rpartition("/")[2] in _NAMED
    splits = {name for name in values if f"{name}/" in SPLITS}
    for name, value in values.items():
        if not named and (name in where or name in _NO_MEASUREMENTS or _is_end(values, name)):
            continue
        if not named and splits == set(values) and _number(value) is not None:
            yield _row(prefix.strip("/"), value, where | {"split": name})
            continue
        if _number(value) is not None:
            yield _row(prefix + name, value, where | _interval(values, name))
        elif name == "tasks" and isinstance(value, Mapping):
            for task, its in value.items():
                yield from _of_object(its, "", where | {"task": task} | _places(its))
        elif isinstance(value, Mapping):
            yield from _of_object(value, f"{prefix}{name}/", where)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _of_list(value, prefix + name, where)


def _of_list(values: Sequence[Any], name: str, where: dict[str, Any]) -> Iterator[dict]:
    """Rows of a list: one number per layer, or objects with their place (or layers in order)."""
    for i, value in enumerate(values, 1):
        if _number(value) is not None:
            if "layer" not in where:  # in a layer: of its experts, which rows do not name
                yield _row(name, value, where | {"layer": i})
        elif isinstance(value, Mapping):
            place = ({"layer": i} if name == "layers" else {}) | _places(value)
            if name in _FROM_0 and "layer" in place:
                place["layer"] += 1
            prefix = "" if name in ("layers", "history", "checkpoints", "neurons") else f"{name}/"
            yield from _of_object(value, prefix, where | place)


def _places(values: Mapping[str, Any]) -> dict[str, int]:
    """Fields in an object of a list that give its place."""
    names = ("step", "layer", "neuron", "shots")
    return {name: values[name] for name in names if _is_int(values, name)}


def _row(name: str, value: Any, where: Mapping[str, Any]) -> dict[str, Any]:
    split = next((one for one in SPLITS if name.startswith(one)), "")
    split_field = {"split": split[:-1]} if split else {}
    row = {"what": name.removeprefix(split), "value": value, **split_field, **where}
    return {field: row[field] for field in FIELDS if field in row}


def _interval(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields low, high, n and how of a value, from the keys next to it; n and units of windows."""
    windows = f"{'nll' if name == 'perplexity' else name}_windows"
    if windows in values:
        return {"n": len(values[windows]), "units": f"{RESULTS}:{windows}"}
    if name in ("nll", "accuracy") and _is_int(values, "first_window"):
        first, n = values["first_window"], values["windows"]
        return {"n": n, "units": f"{RESULTS}:{windows}[{first}:{first + n}]"}
    if name in ("nll", "perplexity") and _is_int(values, "windows"):
        return {"n": values["windows"]}
    low, high = (values.get(f"{name}_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return {}
    split = next((one for one in SPLITS if name.startswith(one)), "")
    interval = {"low": low, "high": high}
    if _is_int(values, f"{split}n"):
        interval["n"] = values[f"{split}n"]
    if f"{name}_rows" in values:
        interval["units"] = f"{RESULTS}:{name}_rows"
    return interval | {"how": values.get("interval", "bootstrap" if split else "Wilson")}


def _is_end(values: Mapping[str, Any], name: str) -> bool:
    """True if the key is an interval end or the n of another key."""
    base, _, end = name.rpartition("_")
    if end in ("low", "high") and base in values:
        return True
    return name.rpartition("/")[2] in ("n", "interval") and any(
        one.endswith("_low") for one in values
    )


def _is_int(values: Mapping[str, Any], name: str) -> bool:
    return is_count(values.get(name))


def is_count(value: Any) -> bool:
    """True for an integer that fits in int64, the largest type of data frames."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        return _NOT_FINITE.get(value)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def read_results(results: Mapping[str, Any], source: str) -> list[dict[str, Any]]:
    """Extract the measurements of an untrusted results.json.

    Raises:
      ValueError: no command writes this form; the message names the file.
    """
    try:
        return [_check_row(row) for row in rows_of(results)]
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{source} is damaged: {first_line(error)}") from None


def read_rows(text: str, source: str) -> list[dict[str, Any]]:
    """Read the rows of a rows.jsonl; values become numbers.

    Raises:
      ValueError: a line is not a row (too long, not JSON, an unknown field or one of another type);
        the message names the file and line.
    """
    rows = []
    for number, line in enumerate(lines_of(text), 1):
        try:
            rows.append(_checked(line))
        except ValueError as error:
            raise ValueError(f"{source}, line {number}: {first_line(error)}") from None
    return rows


def _checked(line: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise ValueError(f"{len(line):,} characters, a row has at most {MAX_LINE:,}")
    row = parse_json(line, "")
    if not isinstance(row, dict) or not {"what", "value"} <= set(row):
        raise ValueError("not a row: expected an object with a 'what' and a 'value'")
    return _check_row(row)


def _check_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with values as numbers; raise ValueError for a field of another type."""
    for field, value in row.items():
        if field not in FIELDS:
            raise ValueError(f"a row has no field {field!r:.40}: there are {', '.join(FIELDS)}")
        if FIELDS[field] is float:
            row[field] = value = _number(value)
        elif FIELDS[field] is int and not is_count(value):
            value = None
        if not isinstance(value, (int, float) if FIELDS[field] is float else FIELDS[field]):
            raise ValueError(f"field {field!r} is no {FIELDS[field].__name__}: {row[field]!r:.40}")
    return row
