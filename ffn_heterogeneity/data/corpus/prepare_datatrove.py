"""The same shards by `datatrove`, whose executors run on one machine, on Slurm or on Ray.

`prepare` here is `prepare.prepare` with `LocalPipelineExecutor`. For many machines:

    steps = chunk_steps("corpus/", tokenizer, directory, settings=settings)
    SlurmPipelineExecutor(steps, tasks=steps[0].tasks, ...).run()
    finish_directory(directory, steps[0].tasks)                      when all tasks are done

Filters may stand between the two steps; `between` says which, so that others do not go on with
their shards. Behind another reader of datatrove, `TokenShards` alone makes shards of its own
numbering (task and place); `claim_directory` comes before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.corpus import corpora, shards
from ffn_heterogeneity.data.corpus.prepare import PLAN, claim, finish, make_plan, release
from ffn_heterogeneity.data.corpus.tokenise import (
    PROGRESS,
    Settings,
    Tokeniser,
    note,
    shard_name,
    write_shard,
)
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.files import read_json, write_json

try:
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise ImportError(
        f"datatrove is not installed ({error}): pip install 'ffn-heterogeneity[datatrove]', or "
        "leave --config.engine=local"
    ) from error


class ChunkReader(PipelineStep):
    """Reads the documents of the chunks rank, rank + world_size, ... that are not done yet.

    Attributes:
      tasks: how many tasks to give the executor: one for every chunk.
    """

    type, name = "READER", "chunks"

    def __init__(self, chunks: Sequence[corpora.Chunk], layout: corpora.Layout, directory: Path):
        super().__init__()
        self.chunks, self.layout, self.directory = chunks, layout, directory
        self.tasks = len(chunks)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for chunk in self.chunks[rank::world_size]:
            if note(self.directory, shard_name(chunk.number)).exists():
                continue
            for number, text in enumerate(corpora.read_chunk(chunk, self.layout)):
                metadata = {"chunk": chunk.number}
                yield Document(text=text, id=f"{chunk.number}/{number}", metadata=metadata)


class TokenShards(PipelineStep):
    """Writes documents as token shards: those of a `ChunkReader` by their chunk, others by task.

    Args:
      chunks: how many chunks the reader has; 0 for another reader, whose documents are cut into
        shards of about `settings.layout.chunk_bytes` characters.
      tasks: behind another reader, how many tasks there are.
    """

    type, name = "WRITER", "token shards"

    def __init__(self, tokeniser: Tokeniser, directory: Path, chunks: int = 0, tasks: int = 0):
        super().__init__()
        self.tokeniser, self.directory = tokeniser, directory
        self.chunks, self.tasks = chunks, tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Passes nothing on: it is the last step.

        Raises:
          DataError: behind another reader, not as many tasks as were claimed: the shards of the
            others would hold the same documents again.
        """
        if not self.chunks:
            self._begin(rank, world_size)
        for name, documents in self._groups(data or (), rank):
            texts = (document.text for document in documents)
            entry = write_shard(name, texts, self.tokeniser, self.directory)
            self.stat_update("tokens", value=entry["tokens"])
        # Chunks of which a filter left nothing.
        for number in range(rank, self.chunks, world_size):
            if not note(self.directory, shard_name(number)).exists():
                write_shard(shard_name(number), (), self.tokeniser, self.directory)
        if not self.chunks:
            write_json(_done(self.directory, rank), {"tasks": self.tasks})
        yield from ()

    def _begin(self, rank: int, world_size: int) -> None:
        """The task makes all of its shards: those of its run before are not part of it."""
        if world_size != self.tasks:
            raise DataError(
                f"{self.directory} was claimed for {self.tasks} tasks, the executor has "
                f"{world_size}: claim another directory for them"
            )
        _done(self.directory, rank).unlink(missing_ok=True)
        for left in _notes(self.directory, f"{rank:06d}-*"):
            left.unlink()
            for shard in self.directory.glob(f"{left.stem}.*"):
                shard.unlink()

    def _groups(self, data: Any, rank: int) -> Iterator[tuple[str, Any]]:
        if self.chunks:
            for number, documents in itertools.groupby(data, lambda d: d.metadata["chunk"]):
                yield shard_name(number), documents
            return
        size = 0

        def place(document: Document) -> int:
            nonlocal size
            at = size // self.tokeniser.settings.layout.chunk_bytes
            size += len(document.text)
            return at

        for part, documents in itertools.groupby(data, place):
            yield f"shard-{rank:06d}-{part:04d}", documents


def chunk_steps(
    spec: str | Sequence[str],
    tokenizer: Any,
    directory: str | Path,
    *,
    name: str = "",
    settings: Settings | None = None,
    between: str = "",
) -> tuple[ChunkReader, TokenShards]:
    """Reader and writer for an executor; claims the directory. See `prepare.prepare`.

    Args:
      between: what stands between the two, in a few words for the manifest.

    Raises:
      DataError: the directory holds shards of other inputs, settings or steps between.
    """
    directory, settings = Path(directory), settings or Settings()
    tokeniser = Tokeniser(tokenizer, settings)
    inputs = corpora.find_inputs(spec)
    chunks = corpora.plan_chunks(inputs, settings.layout)
    prints = [corpora.fingerprint(*one, settings.layout) for one in inputs]
    plan = make_plan(prints, settings, tokenizer, name)
    if between:
        plan["settings"]["between"] = between
    claim(directory, plan, tokeniser.dtype)
    reader = ChunkReader(chunks, settings.layout, directory)
    return reader, TokenShards(tokeniser, directory, len(chunks))


def claim_directory(
    source: str,
    tokenizer: Any,
    directory: str | Path,
    settings: Settings,
    *,
    tasks: int,
    name: str = "",
) -> TokenShards:
    """The writer behind a reader of datatrove's own.

    Args:
      source: what is read and how it is filtered, in a few words for the manifest.
      tasks: of the executor; shards are named after them.

    Raises:
      DataError: the directory holds other shards, or those of another number of tasks.
    """
    directory = Path(directory)
    tokeniser = Tokeniser(tokenizer, settings)
    inputs = [{"path": source, "tasks": tasks}]
    claim(directory, make_plan(inputs, settings, tokenizer, name), tokeniser.dtype)
    return TokenShards(tokeniser, directory, tasks=tasks)


def finish_directory(directory: str | Path, chunks: int = 0) -> dict[str, Any]:
    """Writes the manifest when all tasks are done; returns it.

    Args:
      chunks: how many there must be; 0: behind another reader, those of all its tasks.

    Raises:
      DataError: some are missing.
    """
    directory = Path(directory)
    if (directory / shards.MANIFEST).exists():
        return shards.read_manifest(directory)
    entries = [read_json(path) for path in _notes(directory, "*")]
    if not (directory / PROGRESS / PLAN).exists() or (chunks and len(entries) != chunks):
        raise DataError(
            f"{directory}: {len(entries)} of {chunks or 'the'} shards are there; run the tasks "
            "that failed again"
        )
    plan = read_json(directory / PROGRESS / PLAN)
    tasks = 0 if chunks else plan["inputs"][0].get("tasks", 0)
    if open_ := [rank for rank in range(tasks) if not _done(directory, rank).exists()]:
        raise DataError(
            f"{directory}: {len(open_)} of {tasks} tasks are not done (the first: {open_[0]}); run "
            "them again"
        )
    return finish(directory, plan, entries)


def _notes(directory: Path, numbers: str) -> list[Path]:
    return sorted((directory / PROGRESS).glob(f"shard-{numbers}.json"))


def _done(directory: Path, rank: int) -> Path:
    return directory / PROGRESS / f"task-{rank:06d}.json"


def prepare(
    spec: str | Sequence[str],
    tokenizer: Any,
    directory: str | Path,
    *,
    name: str = "",
    settings: Settings | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """As `prepare.prepare`, by datatrove's local executor; logs under `progress/datatrove`."""
    directory = Path(directory)
    steps = chunk_steps(spec, tokenizer, directory, name=name, settings=settings)
    try:
        if not (directory / shards.MANIFEST).exists():
            LocalPipelineExecutor(
                list(steps),
                tasks=steps[0].tasks,
                workers=min(processes, steps[0].tasks),
                logging_dir=str(directory / PROGRESS / "datatrove"),
                skip_completed=False,  # the notes beside the shards say which are whole
            ).run()
        return finish_directory(directory, steps[0].tasks)
    except DataError:
        release(directory)
        raise
