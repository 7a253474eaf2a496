"""`scripts/train.py`: one run, one run per seed, or a run of stages."""

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
from ffn_heterogeneity.launch.stages import Stage, effect_of, run_stages
from ffn_heterogeneity.parallel.processes import answer, on_main, say
from ffn_heterogeneity.report.stats import student
from ffn_heterogeneity.train.early import check_early
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.wording import check_choice, naming

# Keys of a stage that are not part of its config: its kind, and the file of its base config.
OWN_KEYS = ("kind", "base")


def run(
    config: ConfigDict,
    workdir: str | os.PathLike,
    shared: Shared | None = None,
    kind: str = "train",
) -> dict:
    """Run `config` according to its kind; return the content of `<workdir>/results.json`.

    - with a tuple `stages` (names of groups in the config): `run_stages`;
    - with a tuple `seeds`: once per seed, in `<workdir>/seed_<seed>`, then the mean over seeds of
      every final number with a 95% interval (Student's t);
    - otherwise the command `kind`.

    Args:
      shared: state shared with other runs of this process; runs over seeds always share their
        compiled programs.
      kind: a key of `COMMANDS`.

    Raises:
      ValueError: an invalid setting or file; the message is one line.
      SystemExit: a signal stopped it after the state was saved; the same command resumes.
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
        raise ValueError(f"seeds={seeds}: expected different integers, e.g. (0, 1, 2)")
    results = {}
    for seed in seeds:
        say(f"seed {seed}")
        results[seed] = _single(_with_seed(config, seed), workdir / f"seed_{seed}", shared, kind)
    summary = summarise(list(results.values()))
    combined = {"seeds": list(seeds), "summary": summary, "runs": list(results.values())}
    on_main(lambda: write_json(workdir / "results.json", combined))
    for name, row in summary.items():
        if name.startswith("validation/") or "perplexity" in name:
            answer(f"{name}: {row['mean']:.5f} [{row['low']:.5f}, {row['high']:.5f}]")
    return combined


def check(config: ConfigDict, kind: str = "train") -> None:
    """Validate the config without loading anything.

    Raises:
      ValueError: the message names the key, its value and the allowed values.
    """
    if "stages" in config:
        make_stages(config)
    else:
        COMMANDS[kind].check(config)


def examine(config: ConfigDict, kind: str = "train") -> None:
    """Check everything that a run checks before compiling, including files, but not the weights.

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
        for stage in stages:  # checked now, because the last stage may start hours later
            if stage.kind == "train":
                check_early(read(stage.config))
    results = run_stages(stages, config.model, workdir)
    on_main(lambda: write_json(workdir / "results.json", {"stages": results}))
    if len(stages) > 1 and (line := effect_of(results)):
        answer(line)
    return {"stages": results}


def _plan(stages: list[Stage], model: str, devices: str, workdir: epath.Path) -> dict:
    """Plan every training stage on the original model (a surgery would make it smaller)."""
    plans, before = {}, []
    for stage in stages:
        if stage.kind == "surgery":
            before.append(stage.name)
        if stage.kind == "train":
            if before:
                say(f"stage {stage.name}: planned on {model}, as it is before {', '.join(before)}")
            planned = stage.config.copy_and_resolve_references()
            planned.model, planned.dry_run = model, devices
            plans[stage.name] = stage.command(planned, workdir / stage.name, None)
    return plans


def make_stages(config: ConfigDict) -> list[Stage]:
    """Build the stages that `config.stages` names, in order.

    A stage is a group of the config: its `kind`, `base` (the config file of its settings, as on a
    command line: "nucl_finetune:x,gsm8k"), and the settings that differ from the base.

    Raises:
      ValueError: a name without a group, a group without `kind` or `base`, or a setting that the
        base does not have (the message names the nearest), of another type or with an invalid
        value.
    """
    return [_make_stage(name, config.get(name), config.model) for name in tuple(config.stages)]


def _make_stage(name: str, group: Any, model: str) -> Stage:
    if not isinstance(group, ConfigDict) or not all(key in group for key in OWN_KEYS):
        raise ValueError(f"stage {name!r}: the config needs a group {name!r} with kind and base")
    kinds = tuple(kind for kind, command in COMMANDS.items() if command.script)
    check_choice(f"stage {name!r}: kind", group.kind, kinds)
    base = cli.load_config(group.base)
    settings = flatten_config(group.to_dict())
    overrides = {key: value for key, value in settings.items() if key not in OWN_KEYS}
    cli.set_keys(base, overrides, f"stage {name!r}", group.base)
    base.model = model
    with naming(f"stage {name!r}"):
        configs.check_command(COMMANDS[group.kind].script.removesuffix(".py"), base, group.base)
        COMMANDS[group.kind].check(base)
    return Stage(group.kind, name, base)


def _with_seed(config: ConfigDict, seed: int) -> ConfigDict:
    """Config of one run of several: its seed everywhere, without the list of seeds."""
    config = copy.deepcopy(config)  # references between keys are kept
    config.seeds = ()
    if "seed" in config:
        config.seed = seed
    for name in tuple(config.get("stages", ())):
        group = config.get(name)
        if not isinstance(group, ConfigDict):
            continue
        if "seed" in group or ("base" in group and "seed" in cli.load_config(group.base)):
            with group.unlocked():
                group.seed = seed
    return config.copy_and_resolve_references()


def summarise(results: list[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and 95% interval over seeds of every number that all results have.

    Numbers of `final` keep their names ("validation/nll"); those of stages become "<stage>/<key>".
    The interval is mean -+ t_{0.975, n-1} s / sqrt(n), infinite for a single seed.
    """
    rows = [_numbers(result) for result in results]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: student([row[name] for row in rows])._asdict() for name in names}


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, stage in result.get("stages", {}).items():
        numbers |= {f"{name}/{key}": value for key, value in _numbers(stage).items()}
    for values in (result, result.get("final") or {}):
        for key, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
                numbers[key] = float(value)
    return numbers
