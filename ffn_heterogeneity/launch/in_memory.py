"""A surgery in memory and its scores: a row of NUCL's Table 4 or massive weights' Table 1."""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.evaluate.inputs import PerplexitySettings, prompt_rows, tokenizer_of
from ffn_heterogeneity.evaluate.tasks import HarnessSettings, evaluate_tasks
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.io.hf.export import pad, save_pretrained
from ffn_heterogeneity.io.load import Load, Model, load_model
from ffn_heterogeneity.io.rows import write_results
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.leaves import Place, declared_at, neuron_axis
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES, Surgery
from ffn_heterogeneity.surgery.adapt import folded
from ffn_heterogeneity.surgery.reduce import results_of
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.tree import flatten, unflatten
from ffn_heterogeneity.wording import settings_from

# The criterion of the baseline row: the unchanged model.
UNPRUNED = "none"
# Per-layer fields of a least-squares report that show whether the solution explodes.
LARGEST = ("lambda_norm", "lambda_max", "condition")


def run(config: ConfigDict, workdir: epath.Path, load: Load = load_model) -> dict:
    """Apply `config.surgery` (`configs/prune.py`, `configs/attack.py`) and score the new model.

    The scores are perplexity (`configs/perplexity.py`) and, if `config.tasks` names any, tasks
    (`configs/harness.py`). Adapters are folded in first; the new model is written only with
    `config.save_model`.

    Args:
      load: as `load_model`; a sweep passes a function that keeps the model for the next point.

    Returns:
      What `results.json` holds: those of the surgery (the removed neurons of each layer are in
      removed_neurons.json;
      "largest_..." over the layers of what a compensation reports), of the perplexity, of the
      tasks, "answers" to `config.prompts`, and "seconds".

    Raises:
      ValueError: an invalid config value or file; the message names it.
    """
    (surgery, settings, text, tasks), start = check_config(config), time.time()
    model = folded(load(config.model, revision=config.revision))
    changed, results = operate(surgery, settings, model, config.get("seed", 0))
    compress.keep_own_text(workdir, results)
    summary = compress.describe(surgery.name, results)
    removed = results.pop("removed", None)
    if any(removed or ()):  # in its own file: results.json stays readable
        write_json(workdir / compress.REMOVED, removed)
    if config.save_model:
        form = {"export": config.export, "tokenizer": changed.tokenizer, "overwrite": True}
        form["dtype"] = None if config.dtype == "as_read" else config.dtype
        form["extra"] = {"removed_neurons": removed} if removed else None
        save_pretrained(changed.config, changed.params, workdir / "model", **form)
    equal = filled_up(changed)
    results |= evaluation.score(text, equal)
    if tasks:
        results |= evaluate_tasks(tasks, equal, workdir)
    if config.prompts:
        limit = config.max_new_tokens
        results["answers"] = answers(equal, config.prompts, text.options, limit)
    results["seconds"] = time.time() - start
    write_results(workdir, results)
    print(f"{summary}: perplexity {results['perplexity']:,.4f}")
    print(f"{workdir}/results.json", file=sys.stderr)
    return results


def surgery(config: ConfigDict, workdir: epath.Path) -> dict:
    """Run `compress.run`, with the perplexity before and after if the config names a text."""
    text = check_surgery(config)
    return compress.run(config, workdir, text and functools.partial(evaluation.score, text))


def check_surgery(config: ConfigDict) -> PerplexitySettings | None:
    """The text that perplexity is measured on, if any; errors as `surgery`."""
    compress.check_config(config)
    measured = config.get("text") or config.get("token_ids")
    return evaluation.check_config(config) if measured else None


def check_config(
    config: ConfigDict,
) -> tuple[Surgery, Any, PerplexitySettings, HarnessSettings | None]:
    """(what changes the model, its settings or None for no change, the text, the tasks), with their
    files read once, before a model is loaded; errors as `run`."""
    text, tasks = evaluation.check_config(config), None
    if config.tasks:
        tasks = settings_from(HarnessSettings, config)
        tasks.read()
    if config.get("push"):
        raise ValueError(f"push={config.push!r} is for scripts/compress.py: this writes numbers")
    if config.get("streaming"):
        raise ValueError("streaming=True is for scripts/compress.py: this works in memory")
    if config.get("criterion") == UNPRUNED:
        return SURGERIES["prune"], None, text, tasks
    return *compress.check_config(config), text, tasks


def operate(surgery: Surgery, settings: Any, model: Model, seed: int = 0) -> tuple[Model, dict]:
    """Return (the new model, the surgery's report); without settings nothing is removed.

    Raises:
      ValueError: as `compress.run`.
    """
    if settings is None:
        nothing = RemovalPlan("random", ratio=0.0)
        results = results_of(nothing, (model.config, model.config), {}, [])
        return model, results | {"criterion": UNPRUNED}
    changed, results = surgery(model, settings, key=jax.random.key(seed))
    for name in LARGEST:
        values = [report.get(name) for report in results.get("compensated", ())]
        values = [value for value in values if value is not None]
        results |= {f"largest_{name}": max(values)} if values else {}
    return changed, results


def answers(
    model: Model, prompts: Sequence[str], options: RunOptions, limit: int
) -> dict[str, str]:
    """Return {prompt: the model's greedy answer}; without a chat template, its continuation."""
    chat = bool(getattr(tokenizer_of(model), "chat_template", None))
    generator = Generator(model.config, model.params, model.tokenizer, options=options)
    made = generator(prompt_rows(model, prompts, chat), Sampling(limit), progress=None)
    return {text: one.text for text, one in zip(prompts, made, strict=True)}


def filled_up(model: Model) -> Model:
    """Pad layers of unequal width with zero neurons to the widest; the outputs are the same.

    So one compiled program evaluates every choice of layers (Figure 4 has as many choices as the
    model has layers).
    """
    if model.config.uniform_width:
        return model
    width = max(model.config.ffn_widths)
    config = model.config.with_widths([width] * model.config.n_layers)
    tree = unstack(model.params)
    layers = [
        {**layer, "ffn": _fill(model.config, Place(i, None, "ffn"), layer["ffn"], width)}
        for i, layer in enumerate(tree["layers"])
    ]
    params = restack(config, {**tree, "layers": layers})
    return dataclasses.replace(model, config=config, params=params)


def _fill(config: ModelConfig, place: Place, ffn: dict, width: int) -> dict:
    filled, leaves = {}, declared_at(config, place, ffn)
    for path, leaf in flatten(ffn).items():
        axis = neuron_axis(f"{place.path}/{path}", leaves[path])
        if axis is not None:
            shape = list(leaf.shape)
            shape[axis] = width
            leaf = pad(leaf, tuple(shape))
        filled[path] = leaf
    return unflatten(filled)
