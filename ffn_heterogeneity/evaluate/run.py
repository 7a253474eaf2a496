"""`scripts/evaluate.py`."""

from __future__ import annotations

import sys

import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models.causal_lm import RunOptions

DTYPES = ("float32", "bfloat16")


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Perplexity of `config.text` or of `config.token_ids`; returns what `results.json` holds.

    Raises:
      ValueError: neither or both inputs are given, or one is unusable; the message names it.
    """
    check_config(config)
    rows = read_token_ids(config.token_ids) if config.token_ids else None
    text = read_utf8(config.text) if config.text else ""
    model = load_model(config.model, revision=config.revision)
    if rows is None:
        if model.tokenizer is None:
            raise ValueError(
                f"{model.source} has no tokenizer, so no text can be read: add its files, or give "
                "--config.token_ids"
            )
        rows = text_windows(
            text, model.tokenizer, config.window,
            max_windows=config.max_windows or None, bos=config.bos,
        )  # fmt: skip
    results = perplexity(
        model.config, model.params, rows, batch_size=config.batch_size,
        options=RunOptions(compute_dtype=np.dtype(config.compute_dtype)),
    )  # fmt: skip
    results |= {"bos": "in token_ids" if config.token_ids else config.bos, "model": config.model}
    write_json(workdir / "results.json", results)
    print(
        f"perplexity {results['perplexity']:.4f} (nll {results['nll']:.5f} nats, "
        f"{results['tokens']:,} tokens in {results['windows']} windows); {workdir}/results.json",
        file=sys.stderr,
    )
    return results


def check_config(config: ConfigDict) -> None:
    """Refuses what is cheap to refuse, before a model is loaded or trained; errors as `run`."""
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    if bool(config.text) == bool(config.token_ids):
        raise ValueError("give exactly one of --config.text=<file> and --config.token_ids=<file>")
    if config.compute_dtype not in DTYPES:
        raise ValueError(f"compute_dtype={config.compute_dtype!r}: choose one of {DTYPES}")
    if config.batch_size < 1:
        raise ValueError(f"batch_size={config.batch_size} must be at least 1")
    if config.token_ids:
        read_token_ids(config.token_ids)
    else:
        read_utf8(config.text)


def read_token_ids(path: str) -> np.ndarray:
    """Integers [windows, length] of a .npy file; pickled objects are refused.

    Raises:
      ValueError: the file is not such an array.
    """
    try:
        with epath.Path(path).open("rb") as file:
            ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a plain .npy array of integers: {error}") from None
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path} is not a plain .npy array of integers but a .npz archive")
    return ids
