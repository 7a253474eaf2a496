"""Cheap checks before a model is loaded: packages, a login, paths of data."""

import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from ffn_heterogeneity.data.labelled import LabelSettings, named_paths, open_rows
from ffn_heterogeneity.data.mixtures import place_of
from ffn_heterogeneity.data.sources import DataError, kind_of, named_place
from ffn_heterogeneity.data.tasks import get_task
from ffn_heterogeneity.data.weighted import parse_mixture
from ffn_heterogeneity.io.workdir import stage_of
from ffn_heterogeneity.train.labels import task_of
from ffn_heterogeneity.train.settings import LANGUAGE, TrainConfig
from ffn_heterogeneity.wording import settings_of

# Package that reads a kind of data; `datasets` for hub data sets.
PACKAGES = {"parquet": "pyarrow", "hub": "datasets"}


def check_early(config: TrainConfig) -> None:
    """Check settings that would otherwise fail only after the model is loaded.

    Raises:
      ImportError: a package that the run needs is not installed.
      DataError: a missing path, file or directory; rows without the task's fields.
      ValueError: logging to Weights & Biases without a login.
    """
    if config.objective == LANGUAGE:
        importlib.import_module("grain")
    for key, path in _paths(config.data):
        if stage_of(path):  # written before this stage begins
            continue
        kind = kind_of(path) if path else "hub"  # of the task's data set
        if kind != "hub" and not epath.Path(path).expanduser().exists():
            raise DataError(f"data.{key}={path!r}: no such file")
        if package := PACKAGES.get(kind):
            importlib.import_module(package)
        if key == "path" and config.objective == "labels" and path and kind != "hub":
            with named_place(rows := open_rows(path), 0):
                task_of(settings_of(LabelSettings, config.data), config.own).texts(rows[0])
    if config.objective == LANGUAGE and "task" in config.data and not config.data.get("mixture"):
        place_of(get_task(config.data["task"]), config.data["path"])
    if project := config.loop.wandb:
        wandb = importlib.import_module("wandb")
        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.api.api_key:
            raise ValueError(
                f"wandb={project!r}: no login found; run `wandb login`, or set WANDB_MODE=offline"
            )


def _paths(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key of `config.data`, path) of all data to read; "" is the task's data set."""
    for _, path, _ in parse_mixture(data["mixture"]) if "mixture" in data else ():
        yield "mixture", path
    for key in ("path", "validation_path", "test_path"):
        given = data.get(key, "")
        if not given and (key != "path" or "mixture" in data):
            continue
        if isinstance(given, str) and key != "path":
            given = list(named_paths(given).values())
        yield from ((key, path) for path in ([given] if isinstance(given, str) else given))
