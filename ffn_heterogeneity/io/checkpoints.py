"""Checkpoints of a run: orbax arrays, JSON beside them, and a manifest that tells damage."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.paths import path_str

MANIFEST = "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read or does not fit; names it and the last good one."""


class Checkpoints:
    """The checkpoints under one directory: the latest `keep` and, by metric, the best one.

    A checkpoint is a directory named by its step: `state/` (orbax, arrays by path), `info/` (JSON:
    what the caller hands over, e.g. the data position), and `manifest.json` with the size and
    CRC-32 of every file, written last. Orbax writes under a temporary name and moves the whole, so
    a save that was killed is never seen.

    Args:
      directory: local path or bucket; made when missing.
      keep: how many of the latest are kept.
      best_mode: "min" or "max": which metric value given to `save` is the best.
      keep_best: keep the best one besides.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 1,
        best_mode: str = "min",
        keep_best: bool = True,
    ):
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode={best_mode!r}: choose 'min' or 'max'")
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the latest checkpoint must be kept")
        self.directory = epath.Path(directory).absolute()
        policies: list[Any] = [checkpoint_managers.LatestN(keep)]
        if keep_best:
            best = checkpoint_managers.BestN(
                get_metric_fn=lambda metrics: metrics["value"],
                reverse=best_mode == "max",
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            # On CPU the arrays on the host ARE the device's: a save in the background would read
            # buffers that the next step has been given by donation.
            enable_async_checkpointing=jax.default_backend() != "cpu",
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._unsealed: int | None = None

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, ascending."""
        self.wait()
        return sorted(self._manager.all_steps(read=True))

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    def save(self, step: int, state: Any, info: dict, *, metric: float | None = None) -> None:
        """Saves `state` (any pytree of arrays) and `info` (JSON) as `step`; a no-op if it is there.

        Args:
          metric: the value by which this checkpoint may be the best; None: it never is.

        Raises:
          CheckpointError: the files could not be written (a full disk, say).
        """
        if step in self.steps():
            return
        leaves = _named_leaves(state)
        record = {"tree": _describe(leaves), "info": info}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves), info=ocp.args.JsonSave(record)
                ),
                metrics=None if metric is None else {"value": float(metric)},
                force=True,
            )
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} could not be written: {error}; "
                f"{self._last_good(exclude=step)}"
            ) from error
        self._unsealed = step
        if jax.default_backend() == "cpu":
            self.wait()

    def wait(self) -> None:
        """Waits for a save in the background and seals it with its manifest."""
        self._manager.wait_until_finished()
        step, self._unsealed = self._unsealed, None
        if step is not None and jax.process_index() == 0:
            folder = self.directory / str(step)
            if folder.exists():  # the policy may have removed it already
                write_json(folder / MANIFEST, _checksums(folder))

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """`(state, info)` of `step` (None: the latest).

        Args:
          abstract_state: tree of arrays or ShapeDtypeStructs of the expected shapes and dtypes;
            leaves with a `sharding` are restored onto it.

        Raises:
          CheckpointError: there is none; a file is missing, truncated or altered; the tree is
            another model's. The message names the file or leaf and the last good checkpoint.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self.steps():
            raise CheckpointError(
                f"{self.directory} holds no checkpoint{'' if step is None else f' {step}'}; "
                f"there are {self.steps() or 'none'}"
            )
        self.verify(step)
        name = self.directory / str(step)
        wanted = {
            key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
            for key, x in _named_leaves(abstract_state).items()
        }
        try:
            record = self._restore(step, info=ocp.args.JsonRestore())["info"]
            _check_tree(name, record["tree"], _describe(wanted))
            leaves = self._restore(step, state=ocp.args.StandardRestore(wanted))["state"]
        except CheckpointError:
            raise
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise CheckpointError(
                f"checkpoint {name} cannot be read ({type(error).__name__}: "
                f"{_first_line(error)}); {self._last_good(exclude=step)}"
            ) from error
        treedef = jax.tree_util.tree_structure(abstract_state)
        return jax.tree_util.tree_unflatten(treedef, [leaves[key] for key in wanted]), record["info"]

    def verify(self, step: int) -> None:
        """Compares the files of `step` with its manifest (none: killed before sealing, accepted).

        Raises:
          CheckpointError: names the file that is missing, truncated or altered.
        """
        problem = self._problem(step)
        if problem:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is damaged: {problem}; "
                f"{self._last_good(exclude=step)}"
            )

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _restore(self, step: int, **items):
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _problem(self, step: int) -> str | None:
        folder = self.directory / str(step)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        except json.JSONDecodeError:
            return f"{MANIFEST} is not JSON"
        for name, (size, checksum) in manifest.items():
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            found = path.stat().length
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if _crc32(path) != checksum:
                return f"{name} was altered (its CRC-32 differs)"
        return None

    def _last_good(self, exclude: int) -> str:
        for step in sorted(set(self._manager.all_steps(read=True)) - {exclude}, reverse=True):
            if self._problem(step) is None:
                good = self.directory / str(step)
                return (
                    f"the last good checkpoint is {good}: remove {self.directory / str(exclude)} "
                    "to continue from it"
                )
        return "there is no other good checkpoint: start again in a new work directory"


def _named_leaves(tree: Any) -> dict[str, Any]:
    """`{path: leaf}`. "." joins, since orbax makes folders of "/" and paths may hold it already."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {path_str(path).replace("/", "."): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path once '/' is written as '.'")
    return leaves


def _describe(leaves: dict[str, Any]) -> dict[str, list]:
    return {name: [list(x.shape), str(x.dtype)] for name, x in leaves.items()}


def _check_tree(name: epath.Path, saved: dict, wanted: dict) -> None:
    for leaf in sorted({*saved, *wanted}):
        there, here = saved.get(leaf), wanted.get(leaf)
        if there != here:
            raise CheckpointError(
                f"checkpoint {name} is another run's: leaf {leaf!r} is "
                f"{_shape(there)} there and {_shape(here)} here. Use the config that wrote it, "
                "or another work directory"
            )


def _shape(entry: list | None) -> str:
    return "absent" if entry is None else f"{entry[1]}{entry[0]}"


def _checksums(folder: epath.Path) -> dict[str, list[int]]:
    files = sorted(p for p in folder.glob("**/*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(folder)): [p.stat().length, _crc32(p)] for p in files}


def _crc32(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
