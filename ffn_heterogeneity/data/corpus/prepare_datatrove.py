"""The same shards by `datatrove`, whose executors run on one machine, on Slurm or on Ray.

`prepare` here is `prepare.prepare` with `LocalPipelineExecutor`. For many machines:

    steps = chunk_steps("corpus/", tokenizer, directory, settings=settings)
    SlurmPipelineExecutor(steps, tasks=steps[0].tasks, ...).run()
    finish_directory(directory, steps[0].tasks)                      when all tasks are done

Filters may stand between the two steps; `between` says which, so that others do not go on with
their shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ffn_heterogeneity.data.corpus import corpora, shards
from ffn_heterogeneity.data.corpus.documents import Chunk, DocumentPart, Layout, read_chunk
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
from ffn_heterogeneity.io.read import read_json

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

    def __init__(self, chunks: Sequence[Chunk], layout: Layout, directory: Path):
        super().__init__()
        self.chunks, self.layout, self.directory = chunks, layout, directory
        self.tasks = len(chunks)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for chunk in self.chunks[rank::world_size]:
            if note(self.directory, shard_name(chunk.number)).exists():
                continue
            for number, text in enumerate(read_chunk(chunk, self.layout)):
                metadata = {"chunk": chunk.number}
                yield Document(text=text, id=f"{chunk.number}/{number}", metadata=metadata)


class TokenShards(PipelineStep):
    """Writes the documents of a `ChunkReader` as token shards, one for each of its chunks.

    Args:
      chunks: how many chunks the reader has.
    """

    type, name = "WRITER", "token shards"

    def __init__(self, tokeniser: Tokeniser, directory: Path, chunks: int):
        super().__init__()
        self.tokeniser, self.directory, self.chunks = tokeniser, directory, chunks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Passes nothing on: it is the last step."""
        for number, documents in itertools.groupby(data or (), lambda d: d.metadata["chunk"]):
            parts = (DocumentPart(document.text) for document in documents)
            entry = write_shard(shard_name(number), parts, self.tokeniser, self.directory)
            self.stat_update("tokens", value=entry["tokens"])
        # Chunks of which a filter left nothing.
        for number in range(rank, self.chunks, world_size):
            if not note(self.directory, shard_name(number)).exists():
                write_shard(shard_name(number), (), self.tokeniser, self.directory)
        yield from ()


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


def finish_directory(directory: str | Path, chunks: int) -> dict[str, Any]:
    """Writes the manifest when all tasks are done; returns it.

    Args:
      chunks: how many there must be.

    Raises:
      DataError: some are missing.
    """
    directory = Path(directory)
    if (directory / shards.MANIFEST).exists():
        return shards.read_manifest(directory)
    progress = directory / PROGRESS
    entries = [read_json(path) for path in sorted(progress.glob("shard-*.json"))]
    if not (progress / PLAN).exists() or len(entries) != chunks:
        raise DataError(
            f"{directory}: {len(entries)} of {chunks} shards are there; run the tasks that failed "
            "again"
        )
    return finish(directory, read_json(progress / PLAN), entries)


def prepare(
    spec: str | Sequence[str],
    tokenizer: Any,
    directory: str | Path,
    *,
    name: str = "",
    settings: Settings | None = None,
    processes: int = 1,
) -> dict[str, Any]:
    """Does what `prepare.prepare` does, by datatrove; its logs are in `progress/datatrove`."""
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
