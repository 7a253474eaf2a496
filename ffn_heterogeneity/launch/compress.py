"""`scripts/compress.py`: apply a surgery to a model; write the new model and a report."""

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.heads import ROOT
from ffn_heterogeneity.io.files import atomic_path, write_json, write_text
from ffn_heterogeneity.io.fingerprint import of_model
from ffn_heterogeneity.io.hf.card import (
    check_repository,
    compared,
    published,
    push_directory,
    write_card,
)
from ffn_heterogeneity.io.hf.export import EXPORTS, save_pretrained
from ffn_heterogeneity.io.load import load_config, load_model, model_directory
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.io.workdir import stage_of
from ffn_heterogeneity.models.options import choose_dtype
from ffn_heterogeneity.models.unused import check_leaves
from ffn_heterogeneity.surgery import SURGERIES, Surgery
from ffn_heterogeneity.surgery.calibration import write_rows
from ffn_heterogeneity.surgery.own_text import OWN, WRITTEN
from ffn_heterogeneity.surgery.streaming import check_streamed, compress_directory
from ffn_heterogeneity.wording import check_choice

OWN_TEXT = "own_text.jsonl"
REMOVED = "removed_neurons.json"
RANKING = "ranking.jsonl"
DTYPES = ("as_read", "float32", "bfloat16", "float16")


def run(config: ConfigDict, workdir: epath.Path, score: Callable[..., dict] | None = None) -> dict:
    """Load a model, apply the surgery, write the result; return the content of `results.json`.

    Masks and adapters are saved as structure.

    Args:
      score: model -> perplexity, tokens ... (`evaluate.run.score`), applied to the original model
        and to the written one after reading it back; None: not measured.

    Raises:
      ValueError, CheckpointError: a config value or a file is wrong; the message names it.
    """
    surgery, settings = check_config(config)
    target, dtype = workdir / "model", None if config.dtype == "as_read" else config.dtype
    model = None if config.get("streaming") else load_model(config.model, revision=config.revision)
    before = None
    if score:
        before = score(model or load_model(config.model, revision=config.revision))
    if model is None:
        source = model_directory(config.model, revision=config.revision)
        results = compress_directory(source, target, settings, export=config.export, dtype=dtype)
        written = load_config(target)
    else:
        key = jax.random.key(config.get("seed", 0))
        changed, results = surgery(model, settings, key=key)
        written = changed.config
        check_leaves(changed.config, changed.params, exempt=ROOT)
        form = {"export": config.export, "dtype": dtype, "tokenizer": model.tokenizer}
        form["structure"] = "fold" if config.export == "padded" else "keep"
        save_pretrained(changed.config, changed.params, target, overwrite=True, **form)
    keep_own_text(workdir, results)
    if ranking := results.get("ranking"):
        lines = "".join(f"{json.dumps(row)}\n" for row in ranking)
        write_text(workdir / RANKING, lines)
    summary = describe(surgery.name, results)
    if "removed" in results:
        write_json(target / REMOVED, published(results))
    if score and before:
        after = score(load_model(str(target)))
        protocol = {"text": config.text or config.token_ids}
        protocol |= {key: after[key] for key in ("windows", "tokens", "bos")}
        protocol["dtype"] = str(choose_dtype(config.compute_dtype))
        results |= compared(before["perplexity"], after["perplexity"], **protocol)
    loads = write_card(target, config.model, summary, results, written, config.get("push", ""))
    results |= of_model(target)
    write_results(workdir, results)
    print(summary)
    if "perplexity_after" in results:
        print("perplexity {perplexity_before:,.4f} -> {perplexity_after:,.4f}".format(**results))
    print(target, file=sys.stderr)
    print(loads, file=sys.stderr)
    if config.get("push"):
        print(push_directory(target, config.push), file=sys.stderr)
    return results


def keep_own_text(workdir: epath.Path, results: dict) -> None:
    """Move the self-generated calibration text from a surgery's report to a file."""
    if rows := results.pop("own_rows", None):
        with atomic_path(workdir / OWN_TEXT) as temporary:
            write_rows(temporary, rows)


def describe(name: str, results: dict) -> str:
    """One-line description of the surgery."""
    if "k" in results:
        indices = ", ".join(map(str, results["indices"][:3])) + (", .." if results["k"] > 3 else "")
        return f"{results['attack']} {results['k']} of layer {results['layer']} ({indices})"
    if "active_parameters" in results:
        before, active = results["parameters_before"], results["active_parameters"]
        counts = f"{results['experts']} experts, {results['top_k'] + results['shared']} per token"
        return f"{name}: {counts}: {active:,} of {before:,} parameters active"
    if "parameters_removed_percent" not in results:
        return name
    what = f"compressed by {results.get('method')}"
    if "removed" in results:
        neurons = sum(map(np.size, results["removed"]))  # those of every expert
        what = f"removed {neurons:,} neurons by {results['criterion']}"
    if "dropped" in results:
        what = f"dropped block {', '.join(map(str, results['dropped']))}"
    if "removed_experts" in results:
        count = sum(map(len, results["removed_experts"]))
        what = f"removed {count:,} experts by {results['rule']}"
    return (
        f"{what}: {results['parameters_before']:,} -> {results['parameters_after']:,} parameters "
        f"({results['parameters_removed_percent']:.1f}% removed)"
    )


def check_config(config: ConfigDict) -> tuple[Surgery, Any]:
    """Return the surgery that `config.surgery` names (default: neuron removal) and its settings.

    Raises:
      ValueError: an invalid setting; the message names it.
    """
    if not config.model:
        raise ValueError("--config.model is empty: give a directory, a .gguf file or a hub id")
    check_choice("dtype", config.dtype, DTYPES)
    check_choice("export", config.export, EXPORTS)
    name = config.get("surgery", "prune")
    check_choice("surgery", name, tuple(SURGERIES))
    settings = SURGERIES[name].read(config)
    text = config.get("calibration") or OWN
    if text not in WRITTEN and not stage_of(text) and not epath.Path(text).exists():
        raise ValueError(f"calibration={text}: no such file")
    if config.get("push"):
        check_repository(config.push)
    if config.get("streaming"):
        check_streamed(settings)
        if str(config.model).endswith(".gguf"):
            model_directory(config.model)  # its error suggests a solution
    return SURGERIES[name], settings
