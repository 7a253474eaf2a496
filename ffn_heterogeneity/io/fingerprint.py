"""Fingerprints that tell whether a file or directory has changed, without reading it whole."""

import hashlib
import os
from pathlib import Path

# Bytes read at the beginning, in the middle and at the end of a file.
SAMPLE = 1 << 16


def fingerprint(path: str | os.PathLike) -> str:
    """SHA-256 of a file's size and three samples of it; of a directory, of its files' and names.

    A checkpoint that was trained further or a text that was edited has another one; a change of a
    few bytes in the middle of a large file that leaves its size may pass. Hidden files of a
    directory are left out: downloads keep their notes there; and its card, which is text about it.
    """
    path, found = Path(path), hashlib.sha256()
    if not path.is_dir():
        found.update(_sampled(path))
        return found.hexdigest()
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        name = file.relative_to(path)
        if name != Path("README.md") and not any(part.startswith(".") for part in name.parts):
            found.update(name.as_posix().encode() + b"\0" + _sampled(file))
    return found.hexdigest()


def of_model(directory: str | os.PathLike) -> dict[str, str]:
    """The fingerprint, for results.json, of the model that a run wrote.

    By it a report knows the model again wherever both are moved. Nothing of one in a bucket, which
    would have to be read.
    """
    found = fingerprint(directory) if os.path.isdir(directory) else ""
    return {"model_fingerprint": found}


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    found = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - SAMPLE)):
            file.seek(start)
            found.update(file.read(SAMPLE))
    return found.digest()
