"""Work directories of runs, which record config, command, versions and input fingerprints."""

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.files import (
    check_opens,
    is_bucket,
    lock,
    paths_in,
    plain,
    write_json,
    write_text,
)
from ffn_heterogeneity.io.fingerprint import fingerprint
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.io.read import read_bytes, read_object
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.parallel.processes import gathered, on_main
from ffn_heterogeneity.wording import shell_line, some

SEEN_SECONDS = 60.0  # until another node sees a new file
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "transformers")
# Keys (or groups) that do not change what is computed, so that a run can be resumed on other
# devices or with logging, and a sweep with more points.
WHERE_NOT_WHAT = (
    "mesh",
    "profile",
    "dry_run",
    "processes",
    "engine",
    "push",
    "wandb",
    "models",
    "calibrations",
)
# Outputs that only a run writes: a directory with one of them but no config is left alone.
OUTPUTS = (
    "checkpoints",
    "checkpoints_frozen",
    "metrics.jsonl",
    "results.json",
    "rows.jsonl",
    "model",
    "tokens",
)
# Outputs of a training run that exist before its first step.
UNSTARTED = ("checkpoints", "checkpoints_frozen", "metrics.jsonl", "tensorboard", "wandb")
# Files that `prepare_workdir` writes.
CLAIM = ("config.json", "inputs.json", "command.txt", "versions.json")
# Last parts of config keys that name input files of a run.
INPUTS = (
    "model",
    "rewind",
    "tokenizer",
    "text",
    "calibration",
    "jsonl",
    "token_ids",
    "input",
    "path",
    "validation_path",
    "test_path",
    "mixture",
    "data_root",
    "answers",
    "baseline",
)
_ABSENT = "<absent>"


class WorkdirError(ValueError):
    """The work directory holds another run; the message names the difference and a solution."""


@contextlib.contextmanager
def working_in(
    workdir: str | os.PathLike, config: Mapping[str, Any], *, alone: bool = True
) -> Iterator[None]:
    """Claim `workdir` (`prepare_workdir`) for the block: a script, or a point of a sweep.

    If a run fails before its first step or before it writes anything, the directory is restored, so
    that the corrected command can use it. With several processes only the main one does all this.

    Args:
      alone: raise an error if another process of this machine works in the directory (they would
        overwrite each other's files); False for a directory whose runs have separate directories.

    Raises:
      WorkdirError: as `prepare_workdir`, or another process works there.
      ImportError: a bucket whose package is missing.
    """
    check_opens(workdir)
    with contextlib.ExitStack() as stack:

        def claim() -> set[str] | None:
            if alone:
                stack.enter_context(_locked(workdir))
            before = {path.name for path in entries_of(workdir)}
            return None if prepare_workdir(workdir, config) else before

        before = on_main(claim)
        try:
            _check_shared(workdir)
            yield
        except Exception as error:
            given_back = False
            with contextlib.suppress(OSError):  # before is None: resumed, or not the main process
                given_back = before is not None and release_workdir(workdir, before)
            # A launcher and its run claim the same directory: the run's note is enough, and is
            # removed if nothing is left to resume.
            if given_back:
                vars(error).pop("__notes__", None)
            elif isinstance(error, (OSError, CheckpointError)) and not hasattr(error, "__notes__"):
                error.add_note(f"to resume: {resume_command(workdir)}")
            raise


def _check_shared(workdir: str | os.PathLike) -> None:
    """Check that every process sees the directory that the main one claimed.

    Raises:
      WorkdirError: one does not, and its checkpoints would be lost.
    """
    if jax.process_count() == 1:
        return
    there, end = epath.Path(workdir) / "config.json", time.monotonic() + SEEN_SECONDS
    while not (seen := there.exists()) and time.monotonic() < end:
        time.sleep(1.0)  # network file systems
    if blind := np.flatnonzero(~gathered(seen)).tolist():
        raise WorkdirError(
            f"processes {some(blind)} do not see the work directory {workdir}: give one on a file "
            "system that all nodes share, or in a bucket"
        )


@contextlib.contextmanager
def _locked(workdir: str | os.PathLike) -> Iterator[None]:
    """Hold the kernel's lock on a local directory; it is released when this process ends.

    A forked process that outlives this one does not keep the lock.
    """
    path = epath.Path(workdir)
    if not os.fspath(workdir) or is_bucket(path):
        yield
        return
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY)
    held = [handle]
    os.register_at_fork(after_in_child=lambda: held and os.close(held.pop()))
    try:
        if lock(handle) is False:  # None: no locks here, so no check
            raise WorkdirError(
                f"another process is at work in {path}: wait for it, stop it, or use another "
                "--workdir"
            )
        yield
    finally:
        if held:
            os.close(held.pop())


def prepare_workdir(workdir: str | os.PathLike, config: Mapping[str, Any]) -> bool:
    """Claim `workdir` for the run that `config` describes; return whether it already held this run.

    Writes `config.json`, `inputs.json` (fingerprints of the files that the config names),
    `command.txt` (one line per different command) and `versions.json`.

    Args:
      workdir: local path or bucket (`gs://...`).
      config: nested dict of plain values (`ConfigDict.to_dict()`).

    Raises:
      WorkdirError: it holds another run (the message names the differing keys), a run whose input
        files have changed since, or outputs without a config.
    """
    if not os.fspath(workdir):
        raise WorkdirError("no work directory given: add --workdir=<directory>")
    path = epath.Path(workdir)
    new = what_is_computed(config)
    resumed = (path / "config.json").exists()
    if resumed:
        before = _own(path / "config.json")
        old = what_is_computed(before)
        differing = [k for k in {**old, **new} if old.get(k, _ABSENT) != new.get(k, _ABSENT)]
        # Each completed stage has a digest, and a training or evaluation that has begun its own
        # config: the rest of an unfinished job may have other settings.
        guarded = "stages" in config and not (path / "results.json").exists()
        rejected = [k for k in differing if not guarded or k == "seeds"]
        if rejected:
            shown = "; ".join(
                f"{k}: {old.get(k, _ABSENT)!r} there, {new.get(k, _ABSENT)!r} here"
                for k in rejected[:8]
            )
            more = f"; and {len(rejected) - 8} more" if len(rejected) > 8 else ""
            raise WorkdirError(
                f"work directory {path} holds another run ({shown}{more}). "
                "Use another --workdir, remove that directory, or repeat its config"
            )
        if changed := _changed_inputs(path, before, config):
            raise WorkdirError(
                f"work directory {path} holds a run of other inputs: {', '.join(changed)} changed "
                "since it began. Use another --workdir, remove it, or put the old files back"
            )
        if differing:
            _record_config(path, config)
    else:
        foreign = [name for name in OUTPUTS if (path / name).exists()]
        if foreign:
            raise WorkdirError(
                f"work directory {path} holds {', '.join(foreign)} but no config.json, so it is "
                "another run's: use another --workdir"
            )
        path.mkdir(parents=True, exist_ok=True)
        _record_config(path, config)
    _record_start(path)
    return resumed


def finished(workdir: str | os.PathLike) -> dict[str, Any] | None:
    """Return the results of the run in `workdir`; None if it is not complete.

    Raises:
      WorkdirError: results.json exists but has no results.
    """
    path = epath.Path(workdir) / "results.json"
    return _own(path) if path.exists() else None


def _own(path: epath.Path) -> dict[str, Any]:
    """Read a JSON object that a run wrote."""
    try:
        record = read_object(path)
    except (OSError, ValueError) as error:
        raise WorkdirError(f"{error}: put the file back, or use another --workdir") from None
    if not record and path.name == "results.json":
        raise WorkdirError(f"{path} is empty: remove it, then the run continues")
    return record


def release_workdir(workdir: str | os.PathLike, before: Collection[str] = ()) -> bool:
    """Clear a directory whose run failed before its first step, so that another run can use it.

    Args:
      before: names of the entries that existed before the run and are kept.

    Returns:
      Whether it was cleared.
    """
    path = epath.Path(workdir)
    if not (path / "config.json").exists():  # not the claimed directory: a lost mount
        return False
    children = [child for child in entries_of(workdir) if child.name not in before]
    # Remaining folders are finished stages or seeds; other files are the user's.
    if any((child.is_dir() or child.name in OUTPUTS) and _has_step(child) for child in children):
        return False
    for child in children:
        if child.is_dir():
            child.rmtree()
        elif child.name in (*CLAIM, *UNSTARTED):
            child.unlink()
    if not is_bucket(path) and not any(path.iterdir()):  # a bucket has no empty directories
        path.rmdir()
    return True


def entries_of(workdir: str | os.PathLike) -> list[epath.Path]:
    """The entries of a directory; none if it does not exist."""
    path = epath.Path(workdir)
    return list(path.iterdir()) if path.exists() else []


def _has_step(path: epath.Path) -> bool:
    """True if an output contains more than what exists before the first step."""
    if path.name == "checkpoints":
        return any(child.name.isdigit() for child in path.iterdir())
    if path.name == "metrics.jsonl":
        return any(row["step"] for row in read_metrics(path))
    return path.name not in UNSTARTED


def resume_command(workdir: str | os.PathLike) -> str:
    """Return the command that resumes the run in `workdir`, one line to paste into a shell.

    It names the work directory even if this process was started without one.
    """
    command = [sys.executable or "python", *sys.argv]
    if not any(argument.lstrip("-").split("=")[0] == "workdir" for argument in sys.argv[1:]):
        command.append(f"--workdir={os.fspath(workdir)}")
    return shell_line(command)


def what_is_computed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} of the settings that identify a run, without devices etc."""
    flat = flatten_config(plain(config))
    return {k: v for k, v in flat.items() if not set(k.split(".")) & set(WHERE_NOT_WHAT)}


def inputs_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return {config key: fingerprint} of the local files and directories that the config names.

    Directories of checkpoints are omitted, because they grow while their run continues.
    """
    fingerprints = {}
    for key, value in flatten_config(config).items():
        paths = _inputs(value) if key.split(".")[-1] in INPUTS else []
        if paths:
            fingerprints[key] = " ".join(map(fingerprint, paths))
    return fingerprints


def _inputs(value: Any) -> list[str]:
    """Local files, and directories of fixed content, in a setting: a path, several, or a list."""
    if isinstance(value, (list, tuple)):
        return [path for one in value for path in _inputs(one)]
    found = []
    for _, path in paths_in(value) if isinstance(value, str) and value else ():
        # In a directory of prepare_data.py only the shards: it also stores its commands there.
        path = f"{path}/tokens" if os.path.isdir(f"{path}/tokens") else path
        if os.path.isfile(path) or (os.path.isdir(path) and not _series(path)):
            found.append(path)
    return found


def stage_of(path: str) -> str:
    """Name of the stage of the same job that a path begins with: "{shrink}/own_text.jsonl"."""
    match = re.match(r"\{(\w+)\}/", path)
    return match[1] if match else ""


def paths_in_stages(config: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """{key: (stage, rest of the path)} of the paths that are in the folder of a stage."""
    texts = {key: x for key, x in flatten_config(config).items() if isinstance(x, str)}
    return {key: (stage_of(x), x.partition("/")[2]) for key, x in texts.items() if stage_of(x)}


def _series(directory: str) -> bool:
    return any(entry.name.isdigit() and entry.is_dir() for entry in os.scandir(directory))


def _record_config(path: epath.Path, config: Mapping[str, Any]) -> None:
    write_json(path / "inputs.json", inputs_of(config))
    write_json(path / "config.json", config)


def _changed_inputs(path: epath.Path, before: Mapping, config: Mapping) -> list[str]:
    """List "key=path" of the inputs that have changed since the run in `path` began."""
    if not (path / "inputs.json").exists():
        return []
    # (Tuples are lists in the file.)
    old, new = _own(path / "inputs.json"), inputs_of(config)
    flat = flatten_config(plain(config))
    there = flatten_config(before)
    kept = [key for key in new if flat[key] == there.get(key)]
    return [f"{key}={flat[key]}" for key in kept if old.get(key, new[key]) != new[key]]


def _record_start(path: epath.Path) -> None:
    """Add the command, and the versions; those of a finished run are those that computed it."""
    if (path / "results.json").exists():
        return
    log = path / "command.txt"
    lines = read_bytes(log).decode(errors="replace").splitlines() if log.is_file() else []
    command = resume_command(path)
    if command not in lines:
        write_text(log, "\n".join([*lines, command, ""]))
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    write_json(path / "versions.json", versions)
