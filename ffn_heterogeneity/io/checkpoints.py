"""Checkpoints of a run: orbax arrays, JSON beside them, and a manifest that tells damage."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.files import read_json, write_json
from ffn_heterogeneity.paths import path_str

MANIFEST = "manifest.json"
BEST = "best.json"


class Checkpoints:
    """The checkpoints under one directory: the latest `keep`, and the best one.

    A checkpoint is a directory named by its step: `state/` (orbax, arrays by path), `info/` (JSON:
    what the caller hands over, e.g. the data position), and `manifest.json` with the size and
    CRC-32 of every file, written last. Orbax writes under a temporary name and moves the whole, so
    a save that was killed is never seen.

    Args:
      directory: local path or bucket; made when missing.
      keep: how many of the latest are kept.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        keep: int = 1,
    ):
        if keep < 1:
            raise ValueError(f"keep={keep}: at least the latest checkpoint must be kept")
        self.directory = epath.Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_LatestAndBest(keep, self),
            # On CPU the arrays on the host ARE the device's: a save in the background would read
            # buffers that the next step has been given by donation.
            enable_async_checkpointing=jax.default_backend() != "cpu",
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)
        self._unsealed: int | None = None

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint, ascending."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        return max(self.steps(), default=None)

    @property
    def best_step(self) -> int | None:
        """The step last saved as the best."""
        path = self.directory / BEST
        return read_json(path)["step"] if path.exists() else None

    def save(self, step: int, state: Any, info: dict, *, best: bool = False) -> None:
        """Saves `state` (any pytree of arrays) and `info` (JSON) as `step`, unless it is there.

        Args:
          best: it is the best so far: it stays until another is.

        Raises:
          CheckpointError: the files could not be written (a full disk, say).
        """
        if step not in self.steps():
            self._write(step, state, info)
        if best:
            write_json(self.directory / BEST, {"step": step})

    def _write(self, step: int, state: Any, info: dict) -> None:
        leaves = _named_leaves(state)
        record = {"tree": _describe(leaves), "info": info}
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves), info=ocp.args.JsonSave(record)
                ),
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
        problem, record, leaves = None, {}, {}
        try:
            record = self._restore(step, info=ocp.args.JsonRestore())["info"]
            _check_tree(name, record["tree"], _describe(wanted))
            leaves = self._restore(step, state=ocp.args.StandardRestore(wanted))["state"]
        except CheckpointError:
            raise
        except Exception as error:  # of many kinds and a hundred lines each
            problem = f"{type(error).__name__}: {_first_line(error)}"
        if problem:
            raise CheckpointError(
                f"checkpoint {name} cannot be read ({problem}); {self._last_good(exclude=step)}"
            )
        treedef = jax.tree_util.tree_structure(abstract_state)
        return jax.tree_util.tree_unflatten(treedef, [leaves[key] for key in wanted]), record[
            "info"
        ]

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
        for step in sorted(set(self._manager.all_steps()) - {exclude}, reverse=True):
            if self._problem(step) is None:
                good = self.directory / str(step)
                return (
                    f"the last good checkpoint is {good}: remove {self.directory / str(exclude)} "
                    "to continue from it"
                )
        return "there is no other good checkpoint: start again in a new work directory"


class _LatestAndBest:
    """Orbax preservation policy: the latest `keep`, and the best."""

    def __init__(self, keep: int, owner: Checkpoints):
        self.keep, self.owner = keep, owner

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        latest = sorted(info.step for info in checkpoints)[-self.keep :]
        return [info.step in (*latest, self.owner.best_step) for info in checkpoints]


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
    return {
        str(path.relative_to(folder)): [path.stat().length, _crc32(path)]
        for path in _files(folder)
        if path.name != MANIFEST
    }


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _crc32(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0].split(" See full")[0][:200]
