"""Token shards: the format, its writer, and the reader with its checks.

A directory holds

    manifest.json         the shards, and their inputs and settings; written last
    <name>.tokens         concatenated ids of all documents of a shard: little-endian uint16 if
                          every id of the tokenizer fits, else uint32
    <name>.documents      int64 offsets [documents + 1] of the documents in it: 0 ... tokens

A document is its text's ids and, depending on the manifest, the tokenizer's eos; a bos is added
when it is read. Both files are memory-mapped: a corpus may be larger than memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.data.packing import encode
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.files import atomic_path
from ffn_heterogeneity.io.read import read_object
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import first_line

MANIFEST = "manifest.json"
FORMAT, VERSION = "token shards", 1
SUFFIXES = ("tokens", "documents")
_OFFSETS = np.dtype("<i8")
_PROBE = "The quick brown fox, 1234 times: naïve\n\tif (x >= 0) { return «日本語»; }  \n"
# Maximum number of open files over all corpora: each memory map keeps one open.
_OPEN_FILES = 256


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smaller of uint16 and uint32 that can hold ids below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def tokenizer_facts(tokenizer: Any, name: str = "") -> dict[str, Any]:
    """Facts about a tokenizer for the manifest.

    The fingerprint is a SHA-256 of the vocabulary with its ids and of the ids of a probe text, so
    it does not depend on the tokenizer's path.
    """
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else []
    seen = json.dumps([vocabulary, encode(tokenizer, _PROBE)])
    return {
        "name": name,
        "fingerprint": hashlib.sha256(seen.encode()).hexdigest(),
        "vocab_size": vocab_size(tokenizer),
        "bos_id": tokenizer.bos_token_id,
        "eos_id": tokenizer.eos_token_id,
    }


def vocab_size(tokenizer: Any) -> int:
    """One more than the largest id (ids may have gaps)."""
    if hasattr(tokenizer, "get_vocab"):
        return max(tokenizer.get_vocab().values()) + 1
    return 0x110000 + 3  # unknown: any character


def check_vocabulary(tokenizer: Any, model_size: int, model: str) -> None:
    """Check that the model has embeddings for all ids of a tokenizer (of `transformers`).

    Special tokens except bos and eos may be beyond the vocabulary: Gemma 3's tokenizer has one for
    images, which its text models do not use. `packing.unknown_token` finds it if a text contains
    it.

    Raises:
      DataError: a token without embedding; the message names it, its id, and both sizes.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    spare = special - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    largest, token = max((i, token) for token, i in tokenizer.get_vocab().items() if i not in spare)
    if largest >= model_size:
        raise DataError(
            f"the tokenizer has ids up to {largest}, but model {model} has a vocabulary of "
            f"{model_size}: token {token!r} (id {largest}) has no embedding. Use the model's own "
            f"tokenizer, or a model with vocab_size >= {largest + 1}"
        )


class ShardWriter:
    """Writer of one shard, document by document; `close` moves both files to their names.

    No file is created if the block ends with an error, or if the shard has no documents.
    """

    def __init__(self, directory: Path, name: str, dtype: np.dtype):
        self._directory, self.name, self._dtype = Path(directory), name, dtype
        self._stack = contextlib.ExitStack()
        self._hash, self._offsets = hashlib.sha256(), [0]
        self._before = self._hash.copy()  # hash of the finished documents
        self._file: Any = None
        self.tokens = 0

    def __enter__(self) -> ShardWriter:
        self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        if self._file is not None:
            self._file.close()
        return self._stack.__exit__(*error)

    def add(self, ids: Sequence[int]) -> None:
        """Write one document, which must not be empty."""
        self.extend(ids)
        self.end()

    def extend(self, ids: Sequence[int]) -> None:
        """Write a part of a document; `end` finishes it."""
        if self._file is None:
            path = self._stack.enter_context(atomic_path(_path(self._directory, self.name, 0)))
            self._file = path.open("wb")
        data = np.asarray(ids, np.int64).astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.tokens += len(ids)

    def end(self, least: int = 1) -> bool:
        """Finish a document; one of fewer than `least` tokens is dropped, and False is returned."""
        if long_enough := self.tokens - self._offsets[-1] >= least:
            self._offsets.append(self.tokens)
            self._before = self._hash.copy()
        elif self._file is not None:
            self.tokens, self._hash = self._offsets[-1], self._before.copy()
            self._file.seek(self.tokens * self._dtype.itemsize)
            self._file.truncate()
        return long_enough

    def close(self) -> dict[str, Any]:
        """Move the files; return the shard's entry in the manifest."""
        entry = {"name": self.name, "tokens": self.tokens, "documents": len(self._offsets) - 1}
        if self._file is None:
            return entry
        if not self.tokens:  # all documents were dropped
            self._file.close()
            self._stack.close()
            _path(self._directory, self.name, 0).unlink()
            return entry
        offsets = np.asarray(self._offsets, _OFFSETS).tobytes()
        with atomic_path(_path(self._directory, self.name, 1)) as path:
            path.write_bytes(offsets)
        self._file.close()
        self._stack.close()
        hashes = (self._hash.hexdigest(), hashlib.sha256(offsets).hexdigest())
        return entry | {"sha256": dict(zip(SUFFIXES, hashes, strict=True))}


@dataclasses.dataclass(frozen=True)
class Shard:
    """One shard of a corpus; its arrays are memory maps."""

    directory: Path
    name: str
    documents_count: int
    dtype: np.dtype

    @property
    def tokens(self) -> np.ndarray:
        """Concatenated ids of all documents: uint16 or uint32."""
        return _mapped(str(_path(self.directory, self.name, 0)), self.dtype)

    @property
    def offsets(self) -> np.ndarray:
        """[documents_count + 1] int64."""
        return _mapped(str(_path(self.directory, self.name, 1)), _OFFSETS)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document."""
        start, stop = self.offsets[number : number + 2]
        return self.tokens[start:stop]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The shards and the manifest of a directory."""

    directory: Path
    manifest: Mapping[str, Any]
    shards: tuple[Shard, ...]


def open_corpus(path: str | Path, *, verify: bool = True) -> Corpus:
    """Open a directory of shards (or a work directory that has them in `tokens`).

    Args:
      verify: read everything and compare the SHA-256 with the manifest's (about 1 GB/s); sizes are
        always compared.

    Raises:
      DataError: no manifest, or one of another version or without shards; a shard that is missing,
        truncated, empty or changed (the message names it and a solution).
    """
    directory = Path(path).expanduser()
    if not (directory / MANIFEST).is_file() and (directory / "tokens" / MANIFEST).is_file():
        directory = directory / "tokens"
    manifest = read_manifest(directory)
    if not manifest["shards"]:
        raise DataError(f"{directory}: no shards; prepare the data again")
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    _mapped.cache_clear()  # the files may have been rewritten
    size = sum(entry["tokens"] for entry in manifest["shards"]) * dtype.itemsize
    label = "" if not verify or size < 1e9 else "checking shards"
    with bar(label, total=size, unit="B", unit_scale=True) as shown:
        for entry in manifest["shards"]:
            if damaged := damage(directory, entry, dtype, verify=verify):
                raise DataError(
                    f"{damaged}; run scripts/prepare_data.py with the same settings again, which "
                    "rewrites damaged shards, or copy the directory again"
                )
            shown.update(entry["tokens"] * dtype.itemsize)
    shards = [
        Shard(directory, entry["name"], entry["documents"], dtype) for entry in manifest["shards"]
    ]
    return Corpus(directory, manifest, tuple(shards))


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest and check its form.

    Raises:
      DataError: no manifest, not JSON, incomplete, or of another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        begun = (directory / "progress").is_dir()
        unfinished = " (unfinished: run the same command again)" if begun else ""
        raise DataError(
            f"{directory}: no {MANIFEST}{unfinished}; scripts/prepare_data.py makes token shards"
        )
    try:
        manifest = read_object(path, DataError)
        stamp = (manifest["format"], manifest["version"])
        for entry in [*manifest["shards"], *manifest.get("without_documents", ())]:
            counts = entry["tokens"], entry["documents"]
            if not re.fullmatch(r"shard-\d+", entry["name"]) or not all(map(_is_count, counts)):
                raise ValueError(f"shard {str(entry['name'])!r:.40} of {str(counts):.60}")
            if entry["tokens"]:
                _ = [entry["sha256"][suffix].lower() for suffix in SUFFIXES]
        if manifest["dtype"] not in ("uint16", "uint32"):
            raise ValueError(f"dtype {str(manifest['dtype'])!r:.40}")
        _ = manifest["tokenizer"]["fingerprint"], manifest["policy"]["eos_id"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = first_line(error)
        raise DataError(f"{path}: not a manifest of token shards ({reason})") from error
    if stamp != (FORMAT, VERSION):
        raise DataError(
            f"{path}: {stamp[0]!r} of version {stamp[1]!r}, this code reads {FORMAT!r} of version "
            f"{VERSION}; prepare the data again"
        )
    return manifest


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def damage(
    directory: Path, entry: Mapping[str, Any], dtype: np.dtype, *, verify: bool
) -> str | None:
    """Name the file of a shard that differs from its entry, and the difference; None if equal."""
    sizes = (entry["tokens"] * dtype.itemsize, (entry["documents"] + 1) * _OFFSETS.itemsize)
    if not entry["tokens"] or not entry["documents"]:
        return f"{_path(directory, entry['name'], 0)}: the manifest says that it is empty"
    for i, expected in enumerate(sizes):
        path = _path(directory, entry["name"], i)
        if not path.is_file():
            return f"{path}: no such file"
        size = path.stat().st_size
        if size != expected:
            fault = "empty" if not size else f"{size:,} bytes, but the manifest says {expected:,}"
            return f"{path}: {fault}" + (" (truncated)" if 0 < size < expected else "")
        if verify:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != entry["sha256"][SUFFIXES[i]]:
                return f"{path}: its SHA-256 is not the manifest's: it was changed"
    return None


def _path(directory: Path, name: str, suffix: int) -> Path:
    return directory / f"{name}.{SUFFIXES[suffix]}"


@functools.lru_cache(maxsize=_OPEN_FILES)
def _mapped(path: str, dtype: np.dtype) -> np.ndarray:
    # As a plain array: indexing a np.memmap makes an object each time.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
