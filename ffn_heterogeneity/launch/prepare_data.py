"""`scripts/prepare_data.py`: convert texts to token shards; optionally train a tokenizer."""

import collections
import functools
import itertools
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.corpus import corpora, shards
from ffn_heterogeneity.data.corpus.documents import Chunk, Layout
from ffn_heterogeneity.data.corpus.prepare import prepare
from ffn_heterogeneity.data.corpus.tokenise import Settings, Tokeniser
from ffn_heterogeneity.data.corpus.tokenizer_training import (
    Hashed,
    differs,
    sample_texts,
    save_tokenizer,
    train_tokenizer,
)
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.files import is_bucket
from ffn_heterogeneity.io.load import load_config, load_tokenizer
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.io.workdir import CLAIM, entries_of, release_workdir
from ffn_heterogeneity.wording import check_number, check_numbers, settings_from

# Sample that a dry run tokenizes to estimate the total.
SAMPLE_BYTES = 1 << 20


def run(config: ConfigDict, workdir: epath.Path) -> dict[str, Any]:
    """Prepare data as `configs/prepare_data.py` describes; return the content of `results.json`.

    Writes `<workdir>/tokens/` and, if a tokenizer is trained, `<workdir>/tokenizer/`. The same
    command resumes an interrupted run, and rewrites damaged shards of a finished directory.

    Raises:
      ValueError (e.g. DataError, CheckpointError): an invalid setting or file, in one line.
    """
    settings = check_config(config)
    chunks = corpora.plan_chunks(corpora.find_inputs(config.input), settings.layout)
    if is_bucket(workdir):
        raise DataError(f"{workdir}: shards are memory-mapped; write them to a local disk")
    name = config.tokenizer or str(workdir / "tokenizer")
    if config.tokenizer:
        tokenizer = load_tokenizer(name, revision=config.revision)
    else:
        training, dry_run = config.train_tokenizer, config.dry_run
        tokenizer = trained_tokenizer(training, Path(workdir), chunks, settings, dry_run)
    if config.model:
        size = load_config(config.model, revision=config.revision).vocab_size
        shards.check_vocabulary(tokenizer, size, config.model)
    if config.dry_run:
        # The real run may have other settings. All but the claim is the user's.
        release_workdir(workdir, {path.name for path in entries_of(workdir)} - {*CLAIM})
        return estimate(chunks, tokenizer, settings)
    start = time.monotonic()
    made_by = {"name": name, "settings": settings, "processes": config.processes}
    manifest = prepare(config.input, tokenizer, Path(workdir) / "tokens", **made_by)
    results = {
        **{key: manifest[key] for key in ("tokens", "documents", "empty_documents", "dtype")},
        "shards": len(manifest["shards"]),
        "vocab_size": manifest["tokenizer"]["vocab_size"],
        "tokenizer": manifest["tokenizer"]["name"],
        "input_bytes": sum(one.get("bytes", 0) for one in manifest["inputs"]),
        "seconds": time.monotonic() - start,
    }
    write_results(workdir, results)
    print(
        f"{results['tokens']:,} tokens of {results['documents']:,} documents in "
        f"{results['shards']} shards ({results['dtype']}): {workdir}/tokens; train on them with "
        f"--config.data.task=tokens --config.data.path={workdir}/tokens"
    )
    return results


def check_config(config: ConfigDict) -> Settings:
    """Return the settings of tokenization from the config.

    Raises:
      ValueError: the message names the key, its value and the allowed values.
    """
    training = config.train_tokenizer
    check_numbers(config, processes="[1, inf)", passage_chars="[1, inf)", shard_mb="[1e-6, 1e6]")
    check_numbers(config, max_documents="[0, inf)", max_tokens="[0, inf)")
    check_number("train_tokenizer.max_mb", training.max_mb, "[1e-6, 1e6]")
    check_number("train_tokenizer.min_frequency", training.min_frequency, f"[1, {2**31}]")
    if bool(config.tokenizer) == bool(config.train_tokenizer.vocab_size):
        raise ValueError(
            f"tokenizer={config.tokenizer!r} and "
            f"train_tokenizer.vocab_size={config.train_tokenizer.vocab_size}: give one of them, a "
            "model's tokenizer or the size of one to train"
        )
    chunk_bytes = max(int(float(config.shard_mb) * 1e6), 1)
    revision = config.data_revision
    layout = settings_from(Layout, config, chunk_bytes=chunk_bytes, revision=revision)
    return settings_from(Settings, config, layout=layout)


def trained_tokenizer(
    training: ConfigDict, workdir: Path, chunks: list[Chunk], settings: Settings, dry_run: bool
) -> Any:
    """Train the tokenizer once and write it to `<workdir>/tokenizer` (not in a dry run).

    `training`: the group `train_tokenizer`.

    Raises:
      DataError: the existing tokenizer was trained on other texts and shards were made with it.
    """
    directory = workdir / "tokenizer"
    sample = functools.partial(sample_texts, chunks, settings.layout, int(training.max_mb * 1e6))
    facts = {"vocab_size": training.vocab_size, "min_frequency": training.min_frequency}
    if (directory / "tokenizer.json").is_file():
        texts = Hashed(sample())
        collections.deque(texts, maxlen=0)  # read only for their digest
        changed = differs(directory, facts | {"texts_sha256": texts.digest()})
        if not changed:
            return load_tokenizer(directory)
        if (workdir / "tokens").exists():
            raise DataError(
                f"{directory} was trained on something else ({', '.join(changed)} changed), and "
                f"{workdir}/tokens made with it: use another --workdir, or remove both directories"
            )
    print(f"training a tokenizer of {training.vocab_size:,} ...", file=sys.stderr)
    texts = Hashed(sample())
    tokenizer = train_tokenizer(texts, training.vocab_size, training.min_frequency)
    if dry_run:
        return tokenizer
    shutil.rmtree(directory, ignore_errors=True)  # from texts that have changed since
    save_tokenizer(tokenizer, directory, facts | {"texts_sha256": texts.digest()})
    print(f"tokenizer: {directory}", file=sys.stderr)
    return load_tokenizer(directory)


def estimate(chunks: list[Chunk], tokenizer: Any, settings: Settings) -> dict[str, Any]:
    """Estimate the result of a run from a sample of the input; print it and write nothing."""
    texts = sample_texts(chunks, settings.layout, SAMPLE_BYTES)
    texts = [text for text in itertools.islice(texts, 10_000) if text.strip()]
    tokeniser, start = Tokeniser(tokenizer, settings), time.monotonic()
    tokens = sum(map(len, tokeniser.encode(texts)))
    seconds, sampled = time.monotonic() - start, sum(len(text.encode()) for text in texts)
    total = sum(chunk.size for chunk in chunks)
    # Records have other fields too, so their text is at most the whole file.
    tokens_about = int(tokens / max(sampled, 1) * total)
    figures = {
        "shards": len(chunks),
        "input_bytes": total,
        "tokens_at_most_about": tokens_about,
        "disk_bytes_at_most_about": tokens_about * tokeniser.dtype.itemsize,
        "dtype": tokeniser.dtype.name,
        "tokens_per_second": tokens / max(seconds, 1e-9),
    }
    for key, value in figures.items():
        print(f"{key}: {value:,.0f}" if not isinstance(value, str) else f"{key}: {value}")
    return figures
