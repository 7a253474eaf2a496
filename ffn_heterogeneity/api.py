"""The public face in Python: what `import ffn_heterogeneity as fh` offers beside its rooms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate import perplexity as measured
from ffn_heterogeneity.evaluate.classify import classify as classify
from ffn_heterogeneity.evaluate.hidden import hidden_states as hidden_states
from ffn_heterogeneity.evaluate.inputs import prompt_rows, tokenizer_of
from ffn_heterogeneity.io.card import push as push
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.io.gguf_export import save_gguf
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.io.load import load_model as load_model
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.report.frame import curves as curves
from ffn_heterogeneity.report.frame import results as results
from ffn_heterogeneity.wording import check_choice


def save_model(
    model: Model, directory: str | os.PathLike, *, structure: str = "keep", **options: Any
) -> epath.Path:
    """Writes a directory that `load_model`, and `transformers`, read; or a .gguf file.

    Args:
      directory: a name that ends in .gguf is a file's, with structure folded away.
      structure: "keep": masks, adapters, P and task heads come back with `load_model` (any other
        tool reads the folded weights); "fold": plain weights alone.
      options: of `io.export.save_pretrained`: export, dtype, overwrite ...; of
        `io.gguf_export.save_gguf`: type, overwrite.

    Raises:
      CheckpointError: as `save_pretrained`.
    """
    if os.fspath(directory).endswith(".gguf"):
        options = {"tokenizer": model.tokenizer, **options}
        return epath.Path(save_gguf(model.config, model.params, directory, **options))
    options = {"tokenizer": model.tokenizer, "structure": structure, **options}
    return save_pretrained(model.config, model.params, directory, **options)


def generate(
    model: Model,
    prompts: str | Sequence[str],
    max_new_tokens: int = 64,
    *,
    chat: bool = False,
    batch_size: int = 8,
    **sampling: Any,
) -> str | list[str]:
    """The model's continuation of a prompt, or of each of several; greedy unless told otherwise.

    Args:
      chat: each prompt is what a user says; the answer follows in the tokenizer's template.
      sampling: of `models.generate.Sampling`: temperature, top_p, seed, stop ...

    Raises:
      ValueError: a model without a tokenizer, a prompt too long for it, or a bad setting.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    ids = prompt_rows(model, texts, chat)
    generator = Generator(model.config, model.params, model.tokenizer, batch_size=batch_size)
    found = generator(ids, Sampling(max_new_tokens, **sampling), progress=None)
    answers = [one.text for one in found]
    return answers[0] if isinstance(prompts, str) else answers


def perplexity(
    model: Model,
    text: str,
    *,
    window: int = 512,
    max_windows: int | None = None,
    bos: str | None = None,
    batch_size: int = 4,
) -> float:
    """exp of the mean NLL of a text, cut into windows that do not overlap.

    Args:
      bos: see `data.windows.text_windows`; None: "segment" where the tokenizer has one.

    Raises:
      ValueError: a model without a tokenizer, a text shorter than one window, a bad setting.
    """
    bos = bos or ("none" if tokenizer_of(model).bos_token_id is None else "segment")
    rows = text_windows(text, model.tokenizer, window, max_windows, bos)
    options = {"batch_size": batch_size, "progress": None}
    return measured.perplexity(model.config, model.params, rows, **options)["perplexity"]


def run(
    command: str, config: str, workdir: str | os.PathLike, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """`ffnh <command> --config=<config> --workdir=<workdir>` inside this process.

    A notebook's kernel that holds a TPU is the only process that may use it.

    Args:
      command: of `launch.commands.COMMANDS`: "train", "evaluate" (analyses too), "surgery".
      config: "nucl_finetune:smollm2,text", or a file of yours.
      settings: dotted config keys and their values.

    Returns:
      What `<workdir>/results.json` holds.

    Raises:
      ValueError: an unknown command, config or key, or a setting that cannot be.
    """
    # Here: loading and generating do without what trains.
    from ffn_heterogeneity.io.workdir import working_in
    from ffn_heterogeneity.launch import cli, commands, experiment

    check_choice("command", command, tuple(commands.COMMANDS))
    made = cli.load_config(config)
    cli.set_keys(made, settings or {}, command, config)
    experiment.check(made, command)
    with working_in(workdir, made.to_dict()):
        return experiment.run(made, epath.Path(workdir), kind=command)
