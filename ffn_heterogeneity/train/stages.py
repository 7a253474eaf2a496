"""A run of several stages (train, surgery, evaluate), each reading the last one's model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.io.files import read_json, write_json
from ffn_heterogeneity.train.workdir import WorkdirError

KINDS = ("train", "surgery", "evaluate")
MARKER = "done.json"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
      kind: "train", "surgery" or "evaluate"; the last hands its input on unchanged.
      name: of its folder; unique in the run.
      function: (model, directory) -> (model, results). `directory` is the stage's own: a training
        stage keeps its checkpoints there and resumes from them. Results are JSON-ready.
    """

    kind: str
    name: str
    function: Callable[[Any, epath.Path], tuple[Any, dict]]

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"stage {self.name!r}: kind={self.kind!r}, choose one of {KINDS}")


def run_stages(
    stages: Sequence[Stage],
    model: Any,
    workdir: str | os.PathLike,
    *,
    save: Callable[[Any, epath.Path], None] | None = None,
    load: Callable[[epath.Path], Any] | None = None,
) -> tuple[Any, dict[str, dict]]:
    """Runs the stages in order; a stage that a former call completed is read back, not run.

    A stage is complete once `<workdir>/<nn>_<name>/done.json` exists, which is written after its
    `model/` (train and surgery) and `results.json`.

    Args:
      model: what the first stage gets (`io.load.Model`, unless `save` and `load` are given).
      save, load: how a model is kept between stages: (model, directory), (directory) -> model.

    Returns:
      The last model, and `{stage name: its results}`.

    Raises:
      ValueError: two stages of one name.
      WorkdirError: the directory holds other stages.
    """
    save, load = save or _save_model, load or _load_model
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two stages are named {name!r}: give each its own name")
    root, results, kept = epath.Path(workdir), {}, None
    folders = [root / f"{i:02d}_{stage.name}" for i, stage in enumerate(stages)]
    _check_folders(root, folders)
    for stage, folder in zip(stages, folders, strict=True):
        if _completed(stage, folder):
            print(f"stage {stage.name}: completed before, skipped", flush=True)
            results[stage.name] = read_json(folder / "results.json")
            if stage.kind != "evaluate":
                kept = folder / "model"  # read only when somebody needs it
            continue
        if kept is not None:
            model, kept = load(kept), None
        print(f"stage {stage.name} ({stage.kind})", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        after, results[stage.name] = stage.function(model, folder)
        if stage.kind != "evaluate":
            model = after
            save(model, folder / "model")
        write_json(folder / "results.json", results[stage.name])
        write_json(folder / MARKER, {"kind": stage.kind, "name": stage.name})
    return (model if kept is None else load(kept)), results


def _completed(stage: Stage, folder: epath.Path) -> bool:
    if not (folder / MARKER).exists():
        return False
    found = read_json(folder / MARKER)
    if found != {"kind": stage.kind, "name": stage.name}:
        raise WorkdirError(
            f"{folder} was completed as {found}, and is asked for as kind={stage.kind!r}: use "
            "another --workdir"
        )
    return True


def _check_folders(root: epath.Path, wanted: list[epath.Path]) -> None:
    found = [path for path in root.iterdir() if (path / MARKER).exists()] if root.exists() else []
    foreign = sorted({path.name for path in found} - {path.name for path in wanted})
    if foreign:
        raise WorkdirError(
            f"{root} holds the completed stage {foreign[0]!r}, which is not one of "
            f"{[path.name for path in wanted]}: use another --workdir"
        )


def _save_model(model: Any, directory: epath.Path) -> None:
    from ffn_heterogeneity.io.export import save_pretrained

    save_pretrained(
        model.config, model.params, directory, tokenizer=model.tokenizer, overwrite=True
    )


def _load_model(directory: epath.Path) -> Any:
    from ffn_heterogeneity.io.load import load_model

    return load_model(os.fspath(directory))
