"""Evaluations of models that others of the runs adapted: they carry how those were trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ffn_heterogeneity.report.runs import Run

PREFIX = "trained."
KEYS = ("steps", "batch_size", "seq_len", "dropout", "freeze", "export.weights")
GROUPS = ("data.", "optimizer.", "losses.")
ADAPTER = ("rank", "alpha", "targets", "dropout")
MACDROP = ("k", "p0", "curriculum", "a", "epochs", "scope", "layer")
# Settings of a curriculum that the others do not read.
OWN = {"a": ("exp",), "epochs": ("epoch_before", "epoch_after")}


def of_trained(runs: Iterable[Run]) -> Iterator[Run]:
    """The runs; one that evaluated what another put adapters in has its model, seed and settings.

    The settings are "trained.<key>": `KEYS` and `GROUPS`, "trained.adapter" ("lora", "nf4 + dora"),
    "trained.adapter.<key>" of LoRA or DoRA, "trained.nf4.targets" and "trained.macdrop.<key>",
    which are None where nothing was quantised or dropped.
    """
    runs = list(runs)
    made = {seed.model: (run, name) for run in runs if run.config.get("prepare")
            for name, seed in run.seeds.items()}  # fmt: skip
    for run in runs:
        origin, name = made.get(run.reads, (None, None))
        if origin is None:
            yield run
            continue
        config = run.config | settings(origin.config)
        seeds = dict(zip([name], run.seeds.values(), strict=False))
        yield dataclasses.replace(run, config=config, model=origin.model, seeds=seeds)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `of_trained` adds, of the config of a training."""
    own = {k: v for k, v in config.items() if k in KEYS or k.startswith(GROUPS)}
    names = list(config["prepare"])
    group = next((name for name in names if name in ("lora", "dora")), "")
    own |= {f"adapter.{key}": config.get(f"{group}.{key}") for key in ADAPTER}
    own["nf4.targets"] = config.get("nf4.targets") if "nf4" in names else None
    trains = config.get("train_only")  # the adapter's leaves, unless somebody says otherwise
    own["train_only"] = None if "lora_" in str(trains) else trains
    drops = "macdrop" in names and bool(config.get("macdrop.p0"))
    own["adapter"] = " + ".join(name for name in names if name != "macdrop")
    curriculum = config.get("macdrop.curriculum")
    for key in MACDROP:
        read = drops and curriculum in OWN.get(key, (curriculum,))
        own[f"macdrop.{key}"] = config.get(f"macdrop.{key}") if read else None
    return {PREFIX + key: value for key, value in own.items()}
