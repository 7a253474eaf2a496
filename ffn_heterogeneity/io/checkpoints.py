"""Checkpoints of a run: orbax arrays, JSON, and a manifest that detects damage."""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.path import atomicity

from ffn_heterogeneity.io import seals
from ffn_heterogeneity.io.errors import CheckpointError, os_error_of
from ffn_heterogeneity.io.files import is_bucket
from ffn_heterogeneity.parallel.processes import on_main
from ffn_heterogeneity.tree import path_str
from ffn_heterogeneity.wording import check_number, first_line

SECONDS = 3 * 3600  # for a checkpoint in the background


class Checkpoints:
    """The checkpoints under one directory: the latest `keep`, and the best that each of them names.

    A checkpoint is a directory named by its step: `state/` (orbax, arrays by path), `info/` (JSON:
    data of the caller, e.g. the data position, and which step is the best so far), and
    `manifest.json` with the size and CRC-32 of every file. Process 0 writes everything under a
    temporary name (arrays: every process) and moves it at the end. So an interrupted save is never
    visible, and a checkpoint without a manifest is damaged. The best step is recorded inside the
    latest checkpoint, so it cannot disagree with the files. Older checkpoints are removed after the
    move. Leaves that never change are written once, with a manifest, to `<directory>_frozen/0`;
    every checkpoint refers to them by the digest of that manifest.

    Args:
      directory: local path or bucket; created if missing.
      keep: number of latest checkpoints to keep.

    Raises:
      ValueError: `keep` is below 1.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 1):
        check_number("keep", keep, "[1, inf)")
        directory = epath.Path(directory)
        self.directory = directory if is_bucket(directory) else directory.absolute()
        self.keep = keep
        self._manager = self._open()
        self._bests: dict[int, int | None] = {}
        self._saving: int | None = None
        self._sealed: str | None = None  # digest of the frozen leaves, once they are there
        self._threads: set[threading.Thread] = set()

    def _open(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_LatestAndBest(self),
            temporary_path_class=seals.temporary_path_class(self.directory),
            # On CPU, host arrays ARE the device's buffers: a save in the background would read
            # buffers that were donated to the next step.
            enable_async_checkpointing=jax.default_backend() != "cpu",
            # The others wait while the main process reads all that was written, for its seal.
            async_options=ocp.AsyncOptions(timeout_secs=SECONDS),
        )
        return ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending.

        Raises:
          CheckpointError: see `wait`.
        """
        self.wait()
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The last of `steps()`."""
        return max(self.steps(), default=None)

    @property
    def best_step(self) -> int | None:
        """The step that was the best when the latest checkpoint was saved."""
        latest = self.latest_step()
        return None if latest is None else self._best_by(latest)

    def save(
        self, step: int, state: Any, info: dict, *, best: bool = False, frozen: Collection[str] = ()
    ) -> None:
        """Save `state` (any pytree of arrays) and `info` (JSON) as `step`, unless it exists.

        Args:
          frozen: paths of leaves that are the same in every checkpoint.
          best: whether this step is the best so far; it is kept until another is better. If the
            step is already saved, its files are not changed: the next save records it as best.

        Raises:
          CheckpointError: the files of this or the previous save could not be written (e.g. a full
            disk). Existing checkpoints are unchanged and partial files are removed (with several
            processes they remain, invisible, until the next start).
        """
        if step in self.steps():
            if best:
                self._bests[step] = step
            return
        leaves = _named_leaves(state)
        constant = {path: leaves.pop(path) for path in map(_dotted, frozen)}
        self._bests[step] = step if best else self.best_step
        record = {"tree": _describe(leaves), "info": info, "best": self._bests[step]}
        record["frozen"] = {"tree": _describe(constant), "digest": self._seal_frozen(constant)}
        self._threads = set(threading.enumerate())
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(leaves), info=ocp.args.JsonSave(record)
                ),
                force=True,
            )
        except Exception as error:  # tensorstore has its own kinds: a full disk is a ValueError
            self._give_up(step, error)
        self._saving = step
        if jax.default_backend() == "cpu":
            self.wait()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
          CheckpointError: the save failed; see `save`.
        """
        step, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._give_up(step, error)

    def _give_up(self, step: int | None, error: Exception) -> NoReturn:
        """Remove the partial files of a failed save, which also frees disk space, and raise."""
        if step is not None:
            self._bests.pop(step, None)
        if jax.process_count() == 1:  # with more, they would wait for each other here
            _join(set(threading.enumerate()) - self._threads)
            for path in self.directory.glob(f"{step}{atomicity.TMP_DIR_SUFFIX}*"):
                _remove(path)
            # The old manager would raise the same error forever, and has lost its list of steps.
            self._manager = self._open()
        good = self._good_step(exclude=step)
        last = "there is no other one"
        if good is not None:
            last = f"the last good checkpoint is {self.directory / str(good)}"
        name = self.directory if step is None else self.directory / str(step)
        raise CheckpointError(
            f"checkpoint {name} could not be written: {_cause(error)}; {last}. Fix the cause "
            "(e.g. free disk space), then resume"
        ) from error

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict]:
        """`(state, info)` of `step` (None: the latest).

        Args:
          abstract_state: tree of arrays or ShapeDtypeStructs of the expected shapes and dtypes;
            leaves with a `sharding` are restored onto it.

        Raises:
          CheckpointError: no checkpoint; a file is missing, truncated or altered; the tree belongs
            to another model. The message names the file or leaf and the last good checkpoint.
        """
        step = self.latest_step() if step is None else step
        if step is None or step not in self.steps():
            nothing = "no checkpoint" if step is None else f"no checkpoint {step}"
            raise CheckpointError(
                f"{self.directory} holds {nothing}; there are {self.steps() or 'none'}"
            )
        on_main(lambda: self.verify(step))
        name = self.directory / str(step)
        wanted = {
            key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))
            for key, x in _named_leaves(abstract_state).items()
        }
        problem, record, leaves = None, {}, {}
        try:
            record = self._restore(step, info=ocp.args.JsonRestore())["info"]
            frozen = record["frozen"]["tree"]
            if unlike := _difference(record["tree"] | frozen, _describe(wanted)):
                raise CheckpointError(
                    f"checkpoint {name} is another run's: {unlike}. Use the config that wrote it, "
                    "or another work directory"
                )
            changing = {path: x for path, x in wanted.items() if path not in frozen}
            leaves = self._restore(step, state=ocp.args.StandardRestore(changing))["state"]
            if frozen:
                leaves |= self._read_frozen(name, record, {p: wanted[p] for p in frozen})
        except CheckpointError:
            raise
        except Exception as error:  # of many types, with messages of a hundred lines
            problem = f"{type(error).__name__}: {first_line(error)}"
        if problem:
            raise CheckpointError(
                f"checkpoint {name} cannot be read ({problem}); {self._last_good(exclude=step)}"
            )
        treedef = jax.tree_util.tree_structure(abstract_state)
        return jax.tree_util.tree_unflatten(treedef, [leaves[key] for key in wanted]), record[
            "info"
        ]

    def _seal_frozen(self, leaves: dict[str, Any]) -> str | None:
        """Write the frozen leaves unless they exist; return the digest of their manifest."""
        if leaves and self._sealed is None:
            with contextlib.closing(Checkpoints(_frozen_beside(self.directory))) as store:
                store.save(0, leaves, {})
                store.wait()
            self._sealed = _manifest_digest(self.directory)
        return self._sealed if leaves else None

    def _read_frozen(self, name: epath.Path, record: dict, wanted: dict) -> dict[str, Any]:
        with contextlib.closing(Checkpoints(_frozen_beside(self.directory))) as store:
            leaves, _ = store.restore(wanted, 0)
        if _manifest_digest(self.directory) != record["frozen"]["digest"]:
            raise CheckpointError(
                f"{store.directory} is not what checkpoint {name} was written with: restore the "
                "frozen leaves of that run, or start again in a new work directory"
            )
        return leaves

    def verify(self, step: int) -> None:
        """Compare the files of `step` with its manifest.

        Raises:
          CheckpointError: a file is missing, truncated, altered or not listed; the message names
            it.
        """
        if problem := seals.problem(self.directory / str(step)):
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} is damaged: {problem}; "
                f"{self._last_good(exclude=step)}"
            )

    def close(self) -> None:
        """Wait for the save in the background, then stop orbax's threads.

        Raises:
          CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def _restore(self, step: int, **items):
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _best_by(self, step: int) -> int | None:
        """Best step recorded inside the checkpoint `step`; None if the record is unreadable."""
        if step not in self._bests:
            self._bests[step] = None
            with contextlib.suppress(Exception):  # `restore` reports damage, with the file's name
                record = self._restore(step, info=ocp.args.JsonRestore())["info"]
                self._bests[step] = record["best"]
        return self._bests[step]

    def _good_step(self, exclude: int | None) -> int | None:
        others = sorted(set(self._manager.all_steps()) - {exclude}, reverse=True)
        return next(
            (step for step in others if seals.problem(self.directory / str(step)) is None), None
        )

    def _last_good(self, exclude: int) -> str:
        good = self._good_step(exclude)
        if good is None:
            return "there is no other good checkpoint: start again in a new work directory"
        return (
            f"the last good checkpoint is {self.directory / str(good)}: remove "
            f"{self.directory / str(exclude)} to continue from it"
        )


class _LatestAndBest:
    """Orbax preservation policy: the latest `keep` steps, and the best step each of them names.

    Orbax calls it at every save, with the new step included; a dropped checkpoint is deleted only
    after the new one is complete.
    """

    def __init__(self, owner: Checkpoints):
        self.owner = owner

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        latest = sorted(info.step for info in checkpoints)[-self.owner.keep :]
        preserved = {*latest, *(self.owner._best_by(step) for step in latest)}
        return [info.step in preserved for info in checkpoints]


def _frozen_beside(directory: epath.Path) -> epath.Path:
    return directory.parent / f"{directory.name}_frozen"


def _manifest_digest(directory: epath.Path) -> str:
    path = _frozen_beside(directory) / "0" / seals.MANIFEST
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _dotted(path: str) -> str:
    return path.replace("/", ".")


def _named_leaves(tree: Any) -> dict[str, Any]:
    """`{path: leaf}`, joined by ".", because orbax turns "/" into folders, and paths contain it."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    leaves = {_dotted(path_str(path)): leaf for path, leaf in pairs}
    if len(leaves) != len(pairs):
        raise ValueError("two leaves of the state have the same path once '/' is written as '.'")
    return leaves


def _describe(leaves: dict[str, Any]) -> dict[str, list]:
    return {name: [list(x.shape), str(x.dtype)] for name, x in leaves.items()}


def _difference(saved: dict, wanted: dict) -> str | None:
    """Describe the first leaf that differs; None if all are equal."""
    for leaf in sorted({*saved, *wanted}):
        there, here = saved.get(leaf), wanted.get(leaf)
        if there != here:
            return f"leaf {leaf!r} is {_shape(there)} there and {_shape(here)} here"
    return None


def _shape(entry: list | None) -> str:
    return "absent" if entry is None else f"{entry[1]}{entry[0]}"


def _join(threads: set[threading.Thread], seconds: float = 5.0) -> None:
    """Wait for the other threads of a failed save, which could write into the removed folder."""
    end = time.monotonic() + seconds
    for thread in threads - {threading.current_thread()}:
        with contextlib.suppress(Exception):  # orbax's threads re-raise their errors here
            thread.join(timeout=max(0.0, end - time.monotonic()))


def _remove(folder: epath.Path) -> None:
    """Remove a folder, repeatedly: tensorstore's threads may still write and recreate it.

    A folder that reappears later is not a complete checkpoint; the next start removes it.
    """
    gone, end = 0, time.monotonic() + 5
    while gone < 6 and time.monotonic() < end:
        with contextlib.suppress(OSError):
            folder.rmtree()
        gone = 0 if folder.exists() else gone + 1
        time.sleep(0.05)


def _cause(error: BaseException) -> str:
    """The operating system's message ("No space left on device"), if there is one."""
    if code := os_error_of(error):
        return os.strerror(code)
    return f"{type(error).__name__}: {first_line(error)}"
