"""Links between runs: models that another run wrote, and equal data under different names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

# Keys of inputs.json (their last parts) that name no data: two runs may write the same model.
NO_DATA = ("model", "tokenizer")


class Facts(NamedTuple):
    """A run's config (dotted), fingerprints of the files that it named (inputs.json), and that of
    the model that it wrote; older runs do not have the last two."""

    config: dict[str, Any]
    inputs: Mapping[str, str]
    wrote: str = ""


def spell_alike(runs: Iterable[Facts]) -> None:
    """Give data with equal fingerprints (`inputs`) one name in the configs, the first one."""
    first: dict[tuple[str, str], Any] = {}
    for run in runs:
        for key, mark in run.inputs.items():
            if key.split(".")[-1] not in NO_DATA and key in run.config:
                run.config[key] = first.setdefault((key, str(mark)), run.config[key])


def model_names(runs: Iterable[Facts]) -> list[str]:
    """Short names of models: "smollm2-135m" for a path or hub id, a run's name for its model.

    The whole path is used if two models would have the same name.
    """
    configs = [run.config for run in runs]
    paths = [str(config.get("model") or "model") for config in configs]
    paths = [path if "://" in path else os.path.normpath(path) for path in paths]
    short = {path: _short(path) for path in paths}
    names = list(short.values())
    unique = [short[path] if names.count(short[path]) == 1 else path for path in paths]
    revisions = [config.get("revision") for config in configs]
    return [f"{name} {x}" if x else name for name, x in zip(unique, revisions, strict=True)]


def _short(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if len(parts) > 1 and parts[-1] in ("model", "checkpoints"):
        parts = parts[:-1]
    return parts[-1].removesuffix(".gguf")


def origins(runs: Mapping[str, Facts]) -> dict[str, str]:
    """Path of a run -> path of the one among them that wrote the model which it read.

    It is found by the model's path, complete or (for moved runs) its end, unless the fingerprints
    differ; otherwise by the fingerprint alone.
    """
    places = {os.path.join(os.path.realpath(path), "model"): path for path in runs}
    found = {}
    for path, run in runs.items():
        mark, name = run.inputs.get("model"), str(run.config.get("model") or "")
        writer = _writer(name, places)
        if writer and mark and runs[writer].wrote not in ("", mark):
            writer = None
        if writer is None and mark:
            same = [one for one, its in runs.items() if its.wrote == mark]
            writer = same[0] if len(same) == 1 else None
        if writer and writer != path:
            found[path] = writer
    return found


def _writer(name: str, places: Mapping[str, str]) -> str | None:
    place = name and os.path.realpath(name)
    if place in places or os.path.isabs(name) or "/" not in name:
        return places.get(place)
    end = "/" + os.path.normpath(name)
    ends = [path for place, path in places.items() if place.endswith(end)]
    return ends[0] if len(ends) == 1 else None
