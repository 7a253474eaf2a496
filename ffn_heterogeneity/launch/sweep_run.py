"""`scripts/sweep.py`: run the points of a sweep, each in its directory, resumably."""

import copy
import dataclasses
import os
import runpy
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.io.runs import SWEEP, read_listing
from ffn_heterogeneity.io.workdir import WorkdirError, prepare_workdir, working_in
from ffn_heterogeneity.launch import cli, experiment, slurm
from ffn_heterogeneity.launch.commands import COMMANDS
from ffn_heterogeneity.launch.sweep import Point, Sweep, check_sweep
from ffn_heterogeneity.parallel.processes import ALONE
from ffn_heterogeneity.progress import bar, say_above
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.wording import check_choice, check_known, shell_line, some

LAUNCHERS = ("local", "submitit")


class SweepFailed(ValueError):
    """Some points failed (the message has a line for each); the others are finished."""


@dataclasses.dataclass(frozen=True)
class PointRun:
    """A point ready to run: its complete config and its directory."""

    point: Point
    config: ConfigDict
    directory: epath.Path

    @property
    def finished(self) -> bool:
        """True if the point has results (the start of the sweep checks that they are its own)."""
        return (self.directory / "results.json").exists()


def run(
    config: ConfigDict,
    workdir: str | os.PathLike,
    *,
    spec: str,
    sweep: str,
    only: Sequence[str] = (),
    launcher: str = "local",
    commands: bool = False,
    submitit: str = "",
) -> dict[str, Any]:
    """Run every unfinished point of `sweep`.

    A point with results.json is skipped, an interrupted one is resumed, and a failure does not stop
    the others. Points run one after the other in this process, with one loaded model and one
    compiled program for all points that differ only in values (`train.shared`).

    Args:
      config: the config of every point, before its settings.
      workdir: `<workdir>/<point>` is a point's directory; `<workdir>/sweep.json` lists the points.
      spec: the config file (with its argument) that defines the sweep.
      only: names of points; empty: all.
      launcher: "local": in this process; "submitit": one job per point (`slurm`).
      commands: run nothing, print one command per line.
      submitit: options of the jobs.

    Returns:
      {"points", "finished" (in total), "ran", "programs" and "compilations" of train steps}.

    Raises:
      ValueError: no such sweep, point or setting; nothing was run.
      WorkdirError: a directory holds a run with other settings (the message names the keys);
        nothing was run.
      SweepFailed: some points failed.
    """
    check_choice("launcher", launcher, LAUNCHERS)
    root = epath.Path(workdir)
    kind, points = points_of(spec, sweep, config)
    tasks = [PointRun(one, apply(config, one), root / one.name) for one in points]
    chosen = choose(tasks, only)
    check(kind, chosen, names=not commands)
    claim(root, spec, sweep, kind, points)
    todo = [task for task in chosen if not task.finished]
    if commands:
        for task in todo:
            print(command(task, root, spec, sweep, kind))
        return {"points": len(tasks), "finished": sum(task.finished for task in tasks), "ran": 0}
    say_above(f"sweep {sweep} in {root}: {budget(kind, tasks, todo)}")
    shared = Shared()
    if launcher == "local":
        failed = run_here(kind, todo, shared)
    else:
        jobs = {task.point.name: (kind, task, sys.argv) for task in todo}
        failed = slurm.run_jobs(run_alone, jobs, root / "submitit", submitit)
    return conclude(tasks, todo, failed, shared)


# ---- choice of points


def points_of(spec: str, sweep: str, config: ConfigDict) -> tuple[str, Sweep]:
    """Return (KIND, points) of a sweep from the config file.

    Raises:
      ValueError: the file defines no sweeps, not this one, or no known KIND.
    """
    names = runpy.run_path(spec.partition(":")[0])
    sweeps, kind = names.get("SWEEPS"), names.get("KIND")
    if not isinstance(sweeps, Mapping) or kind not in COMMANDS:
        raise ValueError(
            f"config file {spec.partition(':')[0]!r} defines no sweep: it needs SWEEPS and a KIND "
            f"of {tuple(COMMANDS)}; `ffnh configs` lists the command of each config"
        )
    check_known([sweep], sweeps, "sweep")
    points = sweeps[sweep]
    points = tuple(points(config) if callable(points) else points)
    check_sweep(points)
    return kind, points


def apply(config: ConfigDict, one: Point) -> ConfigDict:
    """Return the config with the point's settings.

    Raises:
      ValueError: an unknown key (the message names the nearest), or a value of another type.
    """
    # Copied with its references, so that keys that refer to a set key change with it.
    config = copy.deepcopy(config)
    cli.set_keys(config, one.settings, f"point {one.name!r}", "the config")
    return config.copy_and_resolve_references()


def check(kind: str, tasks: Sequence[PointRun], names: bool = True) -> None:
    """Check all points before anything is run, and report all errors at once.

    Checks the settings, the files that they name, and that no directory holds another run.

    Args:
      names: whether to check the named files; False if only another machine has them.
    """
    bad, examined = {}, set()
    for task in tasks:
        try:
            experiment.check(task.config, kind)
            # Most sweeps vary numbers and seeds, which name no files.
            settings = flatten_config(task.config.to_dict()).items()
            key = repr([x for x in settings if type(x[1]) is not float and "seed" not in x[0]])
            if names and key not in examined and not task.finished:
                experiment.examine(task.config, kind)
            examined.add(key)
        except cli.USER_ERRORS as error:
            bad.setdefault(cli.one_line(error), []).append(task.point.name)
    if bad:
        lines = [f"point {some(points)}: {line}" for line, points in bad.items()]
        more = f"; and {len(lines) - 5} other errors" if len(lines) > 5 else ""
        raise ValueError("; ".join(lines[:5]) + more)
    for task in tasks:
        if (task.directory / "config.json").exists():
            prepare_workdir(task.directory, task.config.to_dict())


def claim(root: epath.Path, spec: str, sweep: str, kind: str, points: Sweep) -> None:
    """Write `<root>/sweep.json`.

    Raises:
      WorkdirError: the directory holds another sweep, or points that this one does not have.
    """
    path, names = root / SWEEP, [one.name for one in points]
    before = {"sweep": sweep, "kind": kind, "points": []}
    before = read_listing(path) if path.exists() else before
    for key, value in (("sweep", sweep), ("kind", kind)):
        if before.get(key) != value:
            raise WorkdirError(
                f"{root} holds another sweep ({key}: {before.get(key)!r} there, {value!r} here): "
                "use another --workdir"
            )
    if gone := [one["name"] for one in before["points"] if one["name"] not in names]:
        raise WorkdirError(
            f"{path} lists {gone[0]!r}, which is no point now: use another --workdir"
        )
    listed = [{"name": one.name, "settings": flatten_config(one.settings)} for one in points]
    write_json(path, {"sweep": sweep, "kind": kind, "config": spec, "points": listed})


def choose(tasks: Sequence[PointRun], only: Sequence[str]) -> list[PointRun]:
    """Return the tasks that `only` names, or all if it is empty.

    Raises:
      ValueError: no such point.
    """
    check_known(only, [task.point.name for task in tasks], "point")
    return [task for task in tasks if not only or task.point.name in only]


def command(task: PointRun, root: epath.Path, spec: str, sweep: str, kind: str) -> str:
    """Return a shell command that runs only this point, in the same directory."""
    scripts, config = os.path.dirname(sys.argv[0]) or "scripts", cli.load_config(spec)
    base, mine = flatten_config(config.to_dict()), flatten_config(task.config.to_dict())
    changed = [key for key in mine if mine[key] != base.get(key, ...)]
    nones = [key for key in changed if mine[key] is None and key in base]
    script = COMMANDS[kind].script
    # `--only` includes the point's settings, even those that no flag can set.
    if not script or not all(cli.may_be_none(config, key) for key in nones):
        script, changed = "", [key for key in changed if key not in task.point.settings]
    place = [f"--workdir={task.directory}"]
    if not script:
        place = [f"--sweep={sweep}", f"--only={task.point.name}", f"--workdir={root}"]
    elif COMMANDS[kind].together:
        place.append(f"--distributed={ALONE}")  # as a task of one `srun`, too
    program = [sys.executable or "python", os.path.join(scripts, script or "sweep.py")]
    overrides = [f"--config.{key}={mine[key]}" for key in changed]
    return shell_line([*program, f"--config={spec}", *overrides, *place])


# ---- running


def run_here(kind: str, todo: Sequence[PointRun], shared: Shared) -> dict[str, str]:
    """Run the tasks one after the other; return {name: error line} of the failed ones."""
    failed, seconds = {}, []
    with bar("sweep", total=len(todo), unit="run") as shown:
        for number, task in enumerate(todo, 1):
            name, start = task.point.name, time.monotonic()
            say_above(f"[{number}/{len(todo)}] {name}")
            try:
                run_one(kind, task, shared)
            except Exception as error:  # a failed point must not stop the others
                line = cli.one_line(error)
                if line not in failed.values() and not isinstance(error, cli.USER_ERRORS):
                    traceback.print_exception(error)
                failed[name] = line
            seconds.append(time.monotonic() - start)
            left, bad = len(todo) - number, failed.get(name)
            # Perhaps only the first run compiles.
            typical = sum(seconds[1:]) / len(seconds[1:]) if number > 1 else seconds[0]
            ended = f"failed: {bad}" if bad else f"finished in {shown.format_interval(seconds[-1])}"
            more = f"; {left} left, about {shown.format_interval(left * typical)}" if left else ""
            say_above(f"[{number}/{len(todo)}] {name} {ended}{more}")
            shown.update()
    return failed


def run_one(kind: str, task: PointRun, shared: Shared) -> None:
    """Claim a point's directory and run it, unless another process has finished it meanwhile."""
    with working_in(task.directory, task.config.to_dict()):
        if not task.finished:
            experiment.run(task.config, task.directory, shared, kind)


def run_alone(kind: str, task: PointRun, command_line: Sequence[str]) -> str | None:
    """Call `run_one` in a separate process (`slurm`); return its error line, if it failed."""
    sys.argv = list(command_line)  # the command that the run shows for resuming
    try:
        run_one(kind, task, Shared(keep_model=False))
    except Exception as error:
        traceback.print_exception(error)  # into the job's log
        return cli.one_line(error)
    return None


def conclude(
    tasks: Sequence[PointRun], todo: Sequence[PointRun], failed: Mapping[str, str], shared: Shared
) -> dict[str, Any]:
    """Return the results of `run`, or raise SweepFailed."""
    finished = sum(task.finished for task in tasks)
    compiled = f"; train steps compiled: {shared.compilations}" if shared.programs else ""
    say_above(f"{finished} of {len(tasks)} points finished{compiled}")
    if failed:
        names = {
            line: [n for n, other in failed.items() if other == line] for line in failed.values()
        }
        lines = "; ".join(f"{' '.join(point_names)}: {line}" for line, point_names in names.items())
        raise SweepFailed(f"{len(failed)} of {len(todo)} points failed: {lines}")
    return {
        "points": len(tasks),
        "finished": finished,
        "ran": len(todo),
        "programs": shared.programs,
        "compilations": shared.compilations,
    }


def budget(kind: str, tasks: Sequence[PointRun], todo: Sequence[PointRun]) -> str:
    """One-line summary of the work, before the first run shows how long a run takes."""
    text = f"{len(todo)} runs to do, {sum(task.finished for task in tasks)} finished before"
    configs = [task.config.to_dict() for task in todo if kind == "train"]
    trained = [config for config in configs if "batch_size" in config]  # not a run of stages
    steps = sum(config["steps"] * max(1, len(config["seeds"])) for config in trained)
    if steps:
        rows, length = trained[0]["batch_size"], trained[0].get("seq_len")
        text += f"; {steps:,} steps of {rows}"
        text += f" x {length}, {steps * rows * length:,} tokens" if length else " rows"
    return f"{text}; the first run will show the time" if todo else text
