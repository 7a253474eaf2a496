"""`scripts/train.py`: one run, one for each of several seeds, or a run of stages."""

import copy
import os
from collections.abc import Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.io.workdir import finished
from ffn_heterogeneity.launch import cli, configs
from ffn_heterogeneity.launch.commands import COMMANDS
from ffn_heterogeneity.launch.stages import Stage, run_stages
from ffn_heterogeneity.parallel.processes import answer, on_main, say
from ffn_heterogeneity.report.stats import student
from ffn_heterogeneity.train.early import check_early
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.wording import check_choice, naming

# Keys of a stage that are not its config's: which kind it is, and the file its config comes from.
OWN_KEYS = ("kind", "base")


def run(
    config: ConfigDict,
    workdir: str | os.PathLike,
    shared: Shared | None = None,
    kind: str = "train",
) -> dict:
    """Runs `config` as what it is; returns what `<workdir>/results.json` holds.

    - with a tuple `stages` (of names of groups in the config): `run_stages`;
    - with a tuple `seeds`: once per seed, in `<workdir>/seed_<seed>`, then the mean over seeds of
      every final number with a 95% interval (Student's t);
    - otherwise the command `kind`.

    Args:
      shared: what this run has in common with others of this process; runs over seeds share their
        compiled programs in any case.
      kind: a key of `COMMANDS`.

    Raises:
      ValueError: what is wrong, in one line.
      SystemExit: a signal stopped it, after the state was saved; the same command goes on.
    """
    workdir = epath.Path(workdir)
    if config.get("dry_run"):
        if "stages" not in config:
            return COMMANDS["train"](config, workdir, shared)
        return _plan(make_stages(config), config.model, config.dry_run, workdir)
    seeds, shared = tuple(config.get("seeds", ())), shared or Shared(keep_model=False)
    if not seeds:
        return _single(config, workdir, shared, kind)
    if len(set(seeds)) < len(seeds) or not all(type(seed) is int for seed in seeds):
        raise ValueError(f"seeds={seeds}: different integers, e.g. (0, 1, 2)")
    results = {}
    for seed in seeds:
        say(f"seed {seed}")
        results[seed] = _single(_with_seed(config, seed), workdir / f"seed_{seed}", shared, kind)
    summary = summarise(list(results.values()))
    found = {"seeds": list(seeds), "summary": summary, "runs": list(results.values())}
    on_main(lambda: write_json(workdir / "results.json", found))
    for name, row in summary.items():
        if name.startswith("validation/") or "perplexity" in name:
            answer(f"{name}: {row['mean']:.5f} [{row['low']:.5f}, {row['high']:.5f}]")
    return found


def check(config: ConfigDict, kind: str = "train") -> None:
    """Refuses what is cheap to refuse, before anything is loaded.

    Raises:
      ValueError: names the key, its value and what it may be.
    """
    if "stages" in config:
        make_stages(config)
    else:
        COMMANDS[kind].check(config)


def examine(config: ConfigDict, kind: str = "train") -> None:
    """Refuses what a run would before it compiles: it opens what the config names, no weights.

    Raises:
      ValueError, OSError: as the run.
    """
    stages = make_stages(config) if "stages" in config else [Stage(kind, "", config)]
    for stage in stages:
        COMMANDS[stage.kind].examine(stage.config)


def _single(config: ConfigDict, workdir: epath.Path, shared: Shared, kind: str) -> dict:
    if "stages" not in config:
        return COMMANDS[kind](config, workdir, shared)
    stages = make_stages(config)
    if not finished(workdir):
        for stage in stages:  # the last one may begin in hours
            if stage.kind == "train":
                check_early(read(stage.config))
    results = run_stages(stages, config.model, workdir)
    on_main(lambda: write_json(workdir / "results.json", {"stages": results}))
    return {"stages": results}


def _plan(stages: list[Stage], model: str, devices: str, workdir: epath.Path) -> dict:
    """Of every stage that trains, on the model as it comes (surgery makes it smaller)."""
    plans = {}
    for stage in stages:
        if stage.kind == "train":
            planned = stage.config.copy_and_resolve_references()
            planned.model, planned.dry_run = model, devices
            plans[stage.name] = stage.command(planned, workdir / stage.name, None)
    return plans


def make_stages(config: ConfigDict) -> list[Stage]:
    """The stages that `config.stages` names, in order.

    A stage is a group of the config: its `kind`, `base` (the config file its settings come from,
    as on a command line: "nucl_finetune:x,gsm8k"), and the settings that differ.

    Raises:
      ValueError: a name without a group, a group without `kind` or `base`, a setting that the base
        does not have (the nearest is named), of another type or that its script would refuse.
    """
    return [_make_stage(name, config.get(name), config.model) for name in tuple(config.stages)]


def _make_stage(name: str, group: Any, model: str) -> Stage:
    if not isinstance(group, ConfigDict) or not all(key in group for key in OWN_KEYS):
        raise ValueError(f"stage {name!r}: the config needs a group {name!r} with kind and base")
    kinds = tuple(kind for kind, command in COMMANDS.items() if command.script)
    check_choice(f"stage {name!r}: kind", group.kind, kinds)
    base = cli.load_config(group.base)
    settings = flatten_config(group.to_dict())
    own = {key: value for key, value in settings.items() if key not in OWN_KEYS}
    cli.set_keys(base, own, f"stage {name!r}", group.base)
    base.model = model
    with naming(f"stage {name!r}"):
        configs.check_command(COMMANDS[group.kind].script.removesuffix(".py"), base, group.base)
        COMMANDS[group.kind].check(base)
    return Stage(group.kind, name, base)


def _with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """One run of several: its seed everywhere, and no list of seeds."""
    config = copy.deepcopy(config)  # with its references, which follow
    config.seeds = ()
    if "seed" in config:
        config.seed = seed
    for name in tuple(config.get("stages", ())):
        group = config.get(name)
        if isinstance(group, ConfigDict) and "seed" in group:
            group.seed = seed
    return config.copy_and_resolve_references()


def summarise(results: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and 95% interval over seeds of every number that all results have.

    Numbers of `final` keep their names ("validation/nll"), those of stages are "<stage>/<key>".
    The interval is mean -+ t_{0.975, n-1} s / sqrt(n), infinite for a single seed.
    """
    rows = [_numbers(result) for result in results]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: student([row[name] for row in rows])._asdict() for name in names}


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, stage in result.get("stages", {}).items():
        found |= {f"{name}/{key}": value for key, value in _numbers(stage).items()}
    for values in (result, result.get("final") or {}):
        for key, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
                found[key] = float(value)
    return found
