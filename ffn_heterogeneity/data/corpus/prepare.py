"""Tokenization of a corpus into shards by several processes, with the same bytes for any number.

Each chunk of the input (`corpora.plan_chunks`) becomes the shard with its number. A complete shard
has a file `progress/<name>.json`, so a resumed run makes only the others. The manifest, which makes
the directory readable, is written last and replaces those files. The same command on a finished
directory checks it and rewrites damaged shards.
"""

import concurrent.futures
import dataclasses
import itertools
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ffn_heterogeneity.data.corpus import corpora, shards
from ffn_heterogeneity.data.corpus.documents import Chunk, Layout
from ffn_heterogeneity.data.corpus.prepare_workers import Pool, open_pool
from ffn_heterogeneity.data.corpus.tokenise import PROGRESS, Settings, Tokeniser, note, shard_name
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.read import read_json
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.wording import check_number

PLAN = "plan.json"


def prepare(
    spec: str | Sequence[str],
    tokenizer: Any,
    directory: str | Path,
    *,
    name: str = "",
    settings: Settings | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Tokenize a corpus into `directory` and return the manifest.

    Args:
      spec: see `corpora.find_inputs`.
      tokenizer: `transformers`-like; other processes get a pickled copy.
      name: the tokenizer's name, for the manifest.
      processes: number of parallel processes; the result does not depend on it.

    Raises:
      DataError: invalid input or settings, or the directory holds another corpus.
    """
    directory, settings = Path(directory), settings or Settings()
    check_number("processes", processes, "[1, inf)", DataError)
    tokeniser = Tokeniser(tokenizer, settings)
    inputs = corpora.find_inputs(spec)
    chunks = corpora.plan_chunks(inputs, settings.layout)
    claimed = False
    try:
        with open_pool(tokeniser, directory, processes) as pool:
            read_by = itertools.repeat(settings.layout)
            prints = pool.map(corpora.fingerprint, *zip(*inputs, strict=True), read_by)
            plan = make_plan(list(prints), settings, tokenizer, name)
            done, claimed = claim(directory, plan, tokeniser.dtype), True
            entries = up_to_limits(chunks, done, settings.layout)
            if entries is not None and (directory / shards.MANIFEST).exists():
                return shards.read_manifest(directory)
            if entries is None:
                entries = _run(pool, chunks, done, settings.layout, processes)
        for name in {*done} - {entry["name"] for entry in entries}:  # beyond the limits
            for path in directory.glob(f"{name}.*"):
                path.unlink()
        return finish(directory, plan, entries)
    except DataError:
        if claimed:  # otherwise the files may belong to another run
            release(directory)
        raise


def make_plan(
    inputs: Sequence[Mapping[str, Any]], settings: Settings, tokenizer: Any, name: str
) -> dict[str, Any]:
    """Collect everything that determines the shards; equal plans make equal shards.

    Args:
      inputs: fingerprints of the inputs.
    """
    facts = shards.tokenizer_facts(tokenizer, name)
    layout = dataclasses.asdict(settings.layout)
    for key in ("split", "revision", "stream"):  # part of a hub data set's fingerprint
        layout.pop(key)
    layout = {key: value for key, value in layout.items() if value or key[:4] != "max_"}
    policy = {"bos": "none stored: the reader adds it"}
    policy["eos_id"] = facts["eos_id"] if settings.eos else None
    return {
        "tokenizer": facts,
        "policy": policy,
        "settings": layout | {"passage_chars": settings.passage_chars},
        "inputs": list(inputs),
    }


def claim(directory: Path, plan: Mapping[str, Any], dtype: np.dtype) -> dict[str, dict]:
    """Claim the directory for this plan; return the entries of the shards that are complete.

    Raises:
      DataError: it holds the shards of another plan; the message names the difference.
    """
    progress, finished = directory / PROGRESS, directory / shards.MANIFEST
    old: dict[str, Any] = {}
    if finished.exists():
        old = shards.read_manifest(directory)
    elif (progress / PLAN).exists():
        old = read_json(progress / PLAN)
    if old and (different := _differences(old, plan)):
        raise DataError(
            f"{directory} holds other shards ({'; '.join(different)}): use another directory, or "
            "remove this one"
        )
    if finished.exists():
        entries = [*old["shards"], *old["without_documents"]]
        intact = [entry for entry in entries if _whole(directory, entry, dtype, verify=True)]
        if len(intact) == len(entries):
            return {entry["name"]: entry for entry in intact}
        # Some are damaged: continue as if the run had stopped before they were made.
        progress.mkdir(exist_ok=True)
        write_json(progress / PLAN, plan)
        for entry in intact:
            write_json(note(directory, entry["name"]), entry)
        finished.unlink()
    progress.mkdir(parents=True, exist_ok=True)
    for folder in (directory, progress):  # left by killed processes
        for left in folder.glob(".*.partial.*"):
            left.unlink()
    write_json(progress / PLAN, plan)
    done = {}
    for path in sorted(progress.glob("shard-*.json")):
        entry = read_json(path)
        if _whole(directory, entry, dtype, verify=False):
            done[entry["name"]] = entry
        else:
            path.unlink()
    return done


def release(directory: Path) -> None:
    """Undo `claim` if no shard with documents was made, so that the settings may change."""
    progress = directory / PROGRESS
    if not progress.is_dir() or (directory / shards.MANIFEST).exists():
        return
    if not any(read_json(path)["tokens"] for path in progress.glob("shard-*.json")):
        shutil.rmtree(progress)
        if not any(directory.iterdir()):
            directory.rmdir()


def finish(directory: Path, plan: Mapping[str, Any], entries: list[dict]) -> dict[str, Any]:
    """Write the manifest, as the last file, and remove the progress files.

    Raises:
      DataError: no document has a token.
    """
    entries = sorted(entries, key=lambda entry: entry["name"])
    filled = [entry for entry in entries if entry["tokens"]]
    if not filled:
        raise DataError(
            f"the input has {sum(entry['empty'] for entry in entries)} documents, all of them "
            "empty: there is nothing to write; check text_field and separator"
        )
    size = plan["tokenizer"]["vocab_size"]
    manifest = {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "dtype": shards.token_dtype(size).name,
        "tokens": sum(entry["tokens"] for entry in filled),
        "documents": sum(entry["documents"] for entry in filled),
        "empty_documents": sum(entry["empty"] for entry in entries),
        **plan,
        "shards": filled,
        "without_documents": [entry for entry in entries if not entry["tokens"]],
    }
    write_json(directory / shards.MANIFEST, manifest)
    shutil.rmtree(directory / PROGRESS, ignore_errors=True)
    return manifest


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    different = []
    for key in ("tokenizer", "policy", "settings"):
        before, now = old.get(key, {}), new[key]
        # The same tokenizer may have another path.
        keys = [k for k in {**before, **now} if k != "name" and before.get(k) != now.get(k)]
        different += [f"{k} was {before.get(k)!r:.70}, is {now.get(k)!r:.70}" for k in keys]
    before, now = ({one["path"]: one for one in plan["inputs"]} for plan in (old, new))
    changed = [path for path in {**before, **now} if before.get(path) != now.get(path)]
    if changed or list(before) != list(now):
        different.append(f"other inputs: {', '.join(changed[:3]) or 'another order'}")
    return different


def _whole(directory: Path, entry: Mapping[str, Any], dtype: np.dtype, verify: bool) -> bool:
    return not (entry["tokens"] and shards.damage(directory, entry, dtype, verify=verify))


def up_to_limits(
    chunks: Sequence[Chunk], done: Mapping[str, dict], layout: Layout
) -> list[dict[str, Any]] | None:
    """Entries of the first shards that reach a limit, or of all; None if some are not made yet."""
    entries, sums = [], {"documents": 0, "tokens": 0}
    limits = {"documents": layout.max_documents, "tokens": layout.max_tokens}
    for chunk in chunks:
        if any(0 < limits[key] <= sums[key] for key in limits):
            break
        if (entry := done.get(shard_name(chunk.number))) is None:
            return None
        entries.append(entry)
        sums = {key: sums[key] + entry[key] for key in sums}
    return entries


def _run(
    pool: Pool, chunks: Sequence[Chunk], done: dict, layout: Layout, ahead: int
) -> list[dict[str, Any]]:
    """Make shards and add them to `done` until `up_to_limits` returns them, with a progress bar.

    `ahead`: number of chunks that are waiting or in work.
    """
    todo = [chunk for chunk in chunks if shard_name(chunk.number) not in done]
    left, total = iter(todo), sum(chunk.size for chunk in chunks)
    before = total - sum(chunk.size for chunk in todo)
    start = time.monotonic()
    sizes = {"total": total, "initial": before, "unit": "B", "unit_scale": True}
    with bar("tokenising", **sizes) as shown:

        def show() -> None:
            tokens = pool.counters[1]
            speed = tokens / max(time.monotonic() - start, 1e-9)
            shown.set_postfix_str(
                f"{tokens / 1e6:.1f}M tokens, {speed / 1e3:,.0f}k/s", refresh=False
            )
            shown.update(before + pool.counters[0] - shown.n)

        waiting: set[concurrent.futures.Future] = set()
        while (entries := up_to_limits(chunks, done, layout)) is None or waiting:
            more = itertools.islice(left, ahead - len(waiting)) if entries is None else ()
            waiting |= {pool.tokenise(chunk) for chunk in more}
            made, waiting = concurrent.futures.wait(
                waiting, timeout=0.5, return_when=concurrent.futures.FIRST_COMPLETED
            )
            show()
            done |= {future.result()["name"]: future.result() for future in made}
    return entries
