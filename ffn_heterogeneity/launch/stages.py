"""Runs of several stages (train, surgery, evaluate); each reads the previous model directory.

A stage does the same as a script with the same config. Stages exchange models through directories,
so an interrupted run resumes from the same bytes that an uninterrupted run reads.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.hf.card import push_directory
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.io.workdir import (
    WorkdirError,
    paths_in_stages,
    prepare_workdir,
    release_workdir,
    what_is_computed,
)
from ffn_heterogeneity.launch.commands import COMMANDS, Command
from ffn_heterogeneity.parallel.processes import is_main, on_main, say
from ffn_heterogeneity.train.shared import Shared

MARKER = "done.json"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a run.

    Attributes:
      kind: a key of `COMMANDS` with a script.
      name: name of its folder; unique in the run. A training stage saves checkpoints there and
        resumes from them.
      config: the command's config; its key `model` is set to the previous stage's model.
    """

    kind: str
    name: str
    config: ConfigDict

    @property
    def command(self) -> Command:
        return COMMANDS[self.kind]


def run_stages(stages: Sequence[Stage], model: str, workdir: str | os.PathLike) -> dict[str, dict]:
    """Run the stages in order; results of already completed stages are read, not recomputed.

    A stage is complete if `<workdir>/<nn>_<name>/done.json` exists, which is written last. That
    file has a digest of the configs of this stage and of all before it. So a stage of another run,
    or after other stages, is never mistaken for this one.

    Args:
      model: input of the first stage: a directory, .gguf file, preset or hub id.

    Returns:
      `{stage name: its results}`.

    A path in a stage's config that begins with an earlier stage's name in braces is in its folder:
    "{shrink}/own_text.jsonl".

    Raises:
      ValueError: no stages, two of one name, or a path in the folder of one that is not before it.
      WorkdirError: the directory holds other stages, or one completed with another config.
    """
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two stages are named {name!r}: give each its own name")
    if not names:
        raise ValueError("stages is empty: name at least one")
    for i, stage in enumerate(stages):
        for key, (name, _) in paths_in_stages(stage.config.to_dict()).items():
            if name not in names[:i]:
                raise ValueError(f"stage {stage.name!r}: {key}: no stage {name!r} is before it")
    root, results = epath.Path(workdir), {}
    folders = [root / f"{i:02d}_{stage.name}" for i, stage in enumerate(stages)]
    digests = _digests(stages, model)
    completed = _completed(root, dict(zip(folders, digests, strict=True)))
    for stage, folder, digest in zip(stages, folders, digests, strict=True):
        if folder.name in completed:
            say(f"stage {stage.name}: completed before, skipped")
            if stage.config.get("push"):  # perhaps added since
                on_main(functools.partial(push_directory, folder / "model", stage.config.push))
        else:
            say(f"stage {stage.name} ({stage.kind})")
            start = time.perf_counter()
            _peak_memory()  # counts from here on
            _run_stage(stage, model, folder, dict(zip(names, folders, strict=True)))
            marker = {"kind": stage.kind, "name": stage.name, "digest": digest}
            marker["seconds"] = time.perf_counter() - start
            marker["memory_bytes"] = _peak_memory()
            used = f"{marker['seconds']:,.0f} s, {marker['memory_bytes'] / 2**30:.2f} GiB"
            say(f"stage {stage.name}: {used} of this host's memory at most")
            on_main(lambda: write_json(folder / MARKER, marker))  # noqa: B023 (called at once)
        results[stage.name] = read_json(folder / "results.json")
        if stage.command.makes_model:
            model = os.fspath(folder / "model")
    return results


def _peak_memory() -> int:
    """Most bytes of the host's memory that this process held since the last call.

    Outside Linux, where a process cannot reset its peak: since it began.
    """
    units = 1 if sys.platform == "darwin" else 1024
    peak = units * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


def _run_stage(
    stage: Stage, model: str, folder: epath.Path, folders: Mapping[str, epath.Path]
) -> None:
    config = stage.config.copy_and_resolve_references()
    config.model = model
    texts = flatten_config(config.to_dict())
    inside = paths_in_stages(config.to_dict()).items()
    paths = {key: folders[name] / rest for key, (name, rest) in inside}
    if missing := [key for key, path in paths.items() if not path.exists()]:
        raise ValueError(
            f"stage {stage.name!r}: {missing[0]}={texts[missing[0]]}: that stage has not written "
            "it (own_text.jsonl only if it read self-generated text): give another path"
        )
    config.update_from_flattened_dict({key: os.fspath(path) for key, path in paths.items()})
    run = functools.partial(stage.command, config, folder, Shared(keep_model=False))
    on_main(lambda: _claim(folder, stage))
    try:
        # A training's losses on other data need all devices, as the training does.
        together = stage.command.together or (stage.kind == "evaluate" and "losses" in config)
        run() if together else on_main(run)
    except Exception:
        # Lets the corrected command use the same directory. (If one process alone failed, the
        # others are in another collective.)
        if is_main():
            release_workdir(folder)
        raise


def _claim(folder: epath.Path, stage: Stage) -> None:
    """Make a stage's folder; an evaluation's has its config, so that others do not add results.

    A training claims its own, and a surgery begins again.

    Raises:
      WorkdirError: it has results of other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if stage.command.makes_model:
        return
    config = stage.config.to_dict()  # with paths as given: the job's folder may move
    try:
        prepare_workdir(folder, config)
    except WorkdirError:
        if not release_workdir(folder):
            raise
        # It was stopped before there was anything to resume.
        prepare_workdir(folder, config)


def effect_of(results: Mapping[str, Mapping]) -> str:
    """Describe what a job did to the model in one line; "" if no stage says it.

    Args:
      results: from `run_stages`.
    """
    stages, lines = list(results.values()), []
    if sizes := [x for x in stages if "parameters_before" in x and "parameters_after" in x]:
        before, after = sizes[0]["parameters_before"], sizes[-1]["parameters_after"]
        lines.append(f"{before:,} -> {after:,} parameters ({after / before - 1:+.1%})")
    if scored := [x for x in stages if "perplexity_after" in x]:
        before, after = scored[0]["perplexity_before"], scored[-1]["perplexity_after"]
        lines.append(f"perplexity {before:,.4f} -> {after:,.4f} ({after / before - 1:+.1%})")
    return "; ".join(lines)


def _digests(stages: Sequence[Stage], model: str) -> list[str]:
    """Digest of each stage's computation and of everything before it."""
    digests, before = [], model
    for stage in stages:
        values = what_is_computed(stage.config.to_dict())
        values.pop("model", None)
        text = json.dumps([before, stage.kind, stage.name, values], sort_keys=True)
        digests.append(hashlib.sha256(text.encode()).hexdigest())
        # A stage that passes its model on does not affect the later stages.
        before = digests[-1] if stage.command.makes_model else before
    return digests


def _completed(root: epath.Path, digests: dict[epath.Path, str]) -> set[str]:
    """Return the names of the folders of completed stages.

    Raises:
      WorkdirError: a completed stage is not one of these, or has another digest.
    """
    folders = [path for path in root.iterdir() if (path / MARKER).exists()] if root.exists() else []
    wanted = {path.name: digest for path, digest in digests.items()}
    for path in sorted(folders):
        if path.name not in wanted:
            raise WorkdirError(
                f"{root} holds the completed stage {path.name!r}, which is not one of "
                f"{list(wanted)}: use another --workdir"
            )
        if read_json(path / MARKER).get("digest") != wanted[path.name]:
            raise WorkdirError(
                f"{path} was completed with another config, or after other stages: use another "
                "--workdir, or remove it and the stages after it"
            )
    return {path.name for path in folders}
