"""Seals of checkpoints: a manifest of all files, written before the folder gets its final name."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from etils import epath
from orbax.checkpoint.path import atomicity, atomicity_defaults

from ffn_heterogeneity.io.files import walk
from ffn_heterogeneity.io.read import read_json

MANIFEST, READERS = "manifest.json", 8
# In a bucket, which cannot move files, orbax writes these two after the manifest.
LATE = ("_CHECKPOINT_METADATA", atomicity.COMMIT_SUCCESS_FILE)


def temporary_path_class(directory: epath.Path) -> type[atomicity.TemporaryPath]:
    """Return the class that seals: by a move on a file system, in place in a bucket."""
    moved = issubclass(
        atomicity_defaults.get_default_temporary_path_class(directory),
        atomicity.AtomicRenameTemporaryPath,
    )
    return _SealedThenMoved if moved else _SealedInPlace


def problem(folder: epath.Path) -> str | None:
    """Describe the damage in the files of a sealed folder, or return None."""
    try:
        manifest = read_json(folder / MANIFEST)
        sums = {name: (size, checksum) for name, (size, checksum) in manifest.items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{MANIFEST} is not the JSON that was written"
    files = {str(path.relative_to(folder)): path for path in walk(folder)}
    for name, (size, _) in sums.items():
        if name not in files:
            return f"{name} is missing"
        length = files[name].stat().length
        if length != size:
            return f"{name} has {length} bytes instead of {size}"
    for name, value in _checksums({name: files[name] for name in sums}).items():
        if value != sums[name][1]:
            return f"{name} was altered (its CRC-32 differs)"
    unlisted = sorted({*files} - {*sums, *LATE, MANIFEST})
    return f"{MANIFEST} does not list {unlisted[0]}" if unlisted else None


class _SealedThenMoved(atomicity.AtomicRenameTemporaryPath):
    """Orbax's temporary directory, with a manifest in it before it gets its final name.

    Orbax writes its last marker files and moves in one call. Here it moves to a second temporary
    name, where the manifest can include those files. Runs only on process 0.
    """

    async def finalize(self) -> None:
        final = self.get_final()
        if not final.name.isdigit():  # an item's folder inside a checkpoint
            await super().finalize()
            return
        self._final_path = final.parent / f"{final.name}{atomicity.TMP_DIR_SUFFIX}-sealed"
        if self._final_path.exists():  # left by a process killed between the two moves
            await asyncio.to_thread(self._final_path.rmtree)
        try:
            await super().finalize()
            await asyncio.to_thread(_seal, self._final_path)
            self._final_path.rename(final)
        finally:
            self._final_path = final


class _SealedInPlace(atomicity.CommitFileTemporaryPath):
    """For buckets: a checkpoint is complete with orbax's marker, which follows the manifest."""

    async def finalize(self) -> None:
        if self.get_final().name.isdigit():
            await asyncio.to_thread(_seal, self.get(), LATE)
        await super().finalize()


def _seal(folder: epath.Path, late: Sequence[str] = ()) -> None:
    """Write the manifest of all files except those that orbax writes `late`."""
    names = {str(path.relative_to(folder)): path for path in walk(folder)}
    names = {name: path for name, path in names.items() if name not in late}
    sums = {name: [names[name].stat().length, x] for name, x in _checksums(names).items()}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1) + "\n")


def _checksums(files: Mapping[str, epath.Path]) -> dict[str, int]:
    """CRC-32 of each file; several are read at a time, since one stream is slow in a bucket."""
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(files, pool.map(_crc32, files.values()), strict=True))


def _crc32(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value
