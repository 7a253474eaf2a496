"""Fingerprints that detect changes of a file or directory without reading all of it."""

import hashlib
import os
from pathlib import Path

# Bytes read at the beginning, in the middle and at the end of a file.
SAMPLE = 1 << 16


def fingerprint(path: str | os.PathLike) -> str:
    """SHA-256 of a file's size and three samples; for a directory, of all names and fingerprints.

    Further training of a checkpoint or an edit of a text changes it. A change of a few bytes in the
    middle of a large file, without a change of size, may go unnoticed. A directory's hidden files
    (metadata of downloads) and model card are ignored.
    """
    path, hasher = Path(path), hashlib.sha256()
    if not path.is_dir():
        hasher.update(_sampled(path))
        return hasher.hexdigest()
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        name = file.relative_to(path)
        if name != Path("README.md") and not any(segment.startswith(".") for segment in name.parts):
            hasher.update(name.as_posix().encode() + b"\0" + _sampled(file))
    return hasher.hexdigest()


def of_model(directory: str | os.PathLike) -> dict[str, str]:
    """Fingerprint, for results.json, of the model that a run wrote.

    Reports identify the model by it even if files are moved. Empty for a model in a bucket, which
    would have to be downloaded.
    """
    digest = fingerprint(directory) if os.path.isdir(directory) else ""
    return {"model_fingerprint": digest}


def _sampled(path: Path) -> bytes:
    size = path.stat().st_size
    hasher = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for start in (0, size // 2, max(0, size - SAMPLE)):
            file.seek(start)
            hasher.update(file.read(SAMPLE))
    return hasher.digest()
