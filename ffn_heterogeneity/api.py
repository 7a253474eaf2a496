"""The public Python API: functions of `import ffn_heterogeneity as fh`."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath

from ffn_heterogeneity.data.packing import Encoder
from ffn_heterogeneity.data.sources import read_utf8
from ffn_heterogeneity.data.tasks.messages import end_of_turn
from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate import perplexity as measured
from ffn_heterogeneity.evaluate.classify import classify as classify
from ffn_heterogeneity.evaluate.hidden import hidden_states as hidden_states
from ffn_heterogeneity.evaluate.inputs import one_text, prompt_rows, tokenizer_of
from ffn_heterogeneity.io.files import copy_tree
from ffn_heterogeneity.io.gguf.export import save_gguf
from ffn_heterogeneity.io.hf.card import push_directory
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import Model, one_model
from ffn_heterogeneity.io.load import load_model as load_model
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.options import products
from ffn_heterogeneity.models.sampling import sampling_settings
from ffn_heterogeneity.models.stack import slots
from ffn_heterogeneity.report.frame import curves as curves
from ffn_heterogeneity.report.frame import results as results

# A model, and the report of the function that made it.
Made = tuple[Model, dict[str, Any]]


def save_model(
    model: Model, directory: str | os.PathLike, *, structure: str = "keep", **options: Any
) -> epath.Path:
    """Save a model as a directory that `load_model` and `transformers` load, or as a .gguf file.

    Args:
      directory: path; a name that ends with .gguf means a file, with folded structure.
      structure: "keep": `load_model` restores masks, adapters, P and task heads (other tools read
        the folded weights); "fold": only plain weights.
      options: those of `io.hf.export.save_pretrained`: export, dtype, overwrite ...; for a .gguf
        file those of `io.gguf.export.save_gguf`: type, overwrite.

    Raises:
      CheckpointError: as `save_pretrained`.
    """
    model, directory = one_model(model), epath.Path(directory).expanduser()
    if directory.suffix == ".gguf":
        options = {"tokenizer": model.tokenizer, "source": model.source, **options}
        return epath.Path(save_gguf(model.config, model.params, directory, **options))
    options = {"tokenizer": model.tokenizer, "structure": structure, **options}
    return save_pretrained(model.config, model.params, directory, **options)


def push(model: Model | str | os.PathLike, repository: str, *, private: bool = True) -> str:
    """Upload a model, or a model directory, to the Hugging Face hub; return its address there.

    The repository is created if missing. The token is that of `hf auth login`.

    Args:
      model: a model is saved first, in a temporary directory, with its structure.
      repository: "owner/name".

    Raises:
      CheckpointError: no such directory, no valid name, no network, not logged in, not allowed.
      ValueError: neither a model nor a path.
    """
    if isinstance(model, (str, os.PathLike)):
        return push_directory(model, repository, private=private)
    with tempfile.TemporaryDirectory() as folder:
        return push_directory(save_model(model, f"{folder}/model"), repository, private=private)


@products()
def generate(
    model: Model,
    prompts: str | Sequence[str],
    max_new_tokens: int = 64,
    *,
    chat: bool = False,
    do_sample: bool | None = None,
    batch_size: int = 8,
    **sampling: Any,
) -> str | list[str]:
    """Generate the continuation of a prompt, or of each of several.

    An encoder-decoder answers a prompt. An answer stops at the ids of generation_config.json (else
    config.json). If that file has do_sample, tokens are sampled with the file's temperature and
    top_p; otherwise, and with `temperature=0`, they are the most likely ones.

    Args:
      chat: each prompt is a user's message; the answer is generated in the tokenizer's chat
        template, and stops at the template's end of a turn.
      do_sample: as in transformers. False: greedy, at any temperature; True: the file's temperature
        and top_p, else 1; None: the temperature decides.
      sampling: settings of `models.generate.Sampling`: temperature, top_p, seed, stop ...

    Raises:
      TypeError: prompts that are not texts, such as ids or chat messages.
      ValueError: a model without a tokenizer, a prompt too long for it, or an invalid setting.
    """
    model, texts = one_model(model), [prompts] if isinstance(prompts, str) else list(prompts)
    if wrong := [type(text).__name__ for text in texts if not isinstance(text, str)]:
        way = "give ids as model.tokenizer.decode(ids), a user's message as a text with chat=True"
        raise TypeError(f"prompts must be texts: got {wrong[0]}; {way}")
    ids = prompt_rows(model, texts, chat)
    sampling = sampling_settings(model.config, sampling, do_sample)
    if chat:
        end = end_of_turn(Encoder(model.tokenizer, "auto"))
        sampling["eos"] = (*sampling.get("eos", ()), *([] if end is None else [end]))
    batch_size = min(batch_size, 1 << max(0, len(ids) - 1).bit_length())  # few programs, no waste
    generator = Generator(model.config, model.params, model.tokenizer, batch_size=batch_size)
    continuations = generator(ids, Sampling(max_new_tokens, **sampling), progress=None)
    answers = [one.text for one in continuations]
    return answers[0] if isinstance(prompts, str) else answers


@products()
def perplexity(
    model: Model,
    text: str | Sequence[str] = "",
    *,
    path: str | os.PathLike = "",
    window: int = 512,
    max_windows: int | None = None,
    bos: str = "auto",
    batch_size: int = 4,
) -> float:
    """Perplexity of a text: exp of the mean NLL, over non-overlapping windows.

    Args:
      text: several texts are joined with empty lines.
      path: a UTF-8 file that is used instead of `text`.
      bos: auto (the tokenizer's rule) | segment | stream | none, as of `data.windows.text_windows`.

    Raises:
      ValueError: a model without a tokenizer, a text shorter than one window, a path instead of a
        text, or an invalid setting.
    """
    model = one_model(model)
    if bool(path) == bool(text):
        raise ValueError(f"give either text or path: got {text!r:.40} and path={path!r}")
    text = "\n\n".join(text) if isinstance(text, (list, tuple)) else text
    text = read_utf8(os.fspath(path)) if path else one_text(text)
    rows = text_windows(text, tokenizer_of(model), window, max_windows, bos)
    options = {"batch_size": batch_size, "progress": None}
    return measured.perplexity(model.config, model.params, rows, **options)["perplexity"]


# ---- surgeries: from a model to a new model and a report


def prune(model: Model, criterion: str = "entropy", ratio: float = 0.25, **settings: Any) -> Made:
    """Remove a share of the FFN neurons; return (the new model, a report).

    Args:
      criterion, ratio, settings: those of `surgery.reduce.Removal`, as in configs/prune.py: layers,
        calibration, compensation, seed ...

    Raises:
      ValueError: as the surgery.
    """
    return _operate("prune", model, {"criterion": criterion, "ratio": ratio, **settings})


def fuse(model: Model, method: str = "fusion", ratio: float = 0.25, **settings: Any) -> Made:
    """Cluster the FFN neurons to fewer ones; return (the new model, a report).

    Args:
      method, ratio, settings: those of `surgery.fuse.Fusion` (configs/fuse.py): layers, n_init ...

    Raises:
      ValueError: as the surgery.
    """
    return _operate("fuse", model, {"method": method, "ratio": ratio, **settings})


def experts(model: Model, rule: str = "aimer", ratio: float = 0.5, **settings: Any) -> Made:
    """Remove a share of each layer's experts; return (the new model, a report).

    Args:
      rule, ratio, settings: those of `surgery.experts.ExpertRemoval`, as in configs/experts.py:
        layers, top_k, protect, constant, calibration ...

    Raises:
      ValueError: as the surgery.
    """
    return _operate("experts", model, {"rule": rule, "ratio": ratio, **settings})


def merge_experts(
    model: Model, method: str = "m_smoe", ratio: float = 0.5, **settings: Any
) -> Made:
    """Merge the experts of a mixture of experts to fewer; return (the new model, a report).

    Args:
      method, ratio, settings: those of `surgery.merge_experts.Merging`: layers, calibration,
        calibration_tokens, columns; share and residual of method "resmoe" ...

    Raises:
      ValueError: as the surgery.
    """
    return _operate("merge_experts", model, {"method": method, "ratio": ratio, **settings})


def partition(
    model: Model, experts: int = 8, top_k: int | None = None, router: str = "zeros", **settings: Any
) -> Made:
    """Divide each layer's FFN neurons into experts; return (the new model, a report).

    Args:
      experts, top_k, router, settings: those of `surgery.partition.Partition`, as in
        configs/experts.py: shared, layers, calibration, seed ...

    Raises:
      ValueError: as the surgery.
    """
    given = {"experts": experts, "top_k": top_k, "router": router}
    return _operate("partition", model, {**given, **settings})


def upcycle(model: Model, experts: int = 8, top_k: int = 2, **settings: Any) -> Made:
    """Copy each layer's FFN into experts; return (the new model, with equal outputs, a report).

    Args:
      experts, top_k, settings: those of `surgery.upcycle.Upcycling`: layers, noise, seed.

    Raises:
      ValueError: as the surgery.
    """
    return _operate("upcycle", model, {"experts": experts, "top_k": top_k, **settings})


def attack(model: Model, k: int = 5, **settings: Any) -> Made:
    """Zero the k massive weights, or all others; return (the new model, a report of their place).

    Args:
      k, settings: those of `surgery.attack.Attack`: attack ("zero", "retain"), layer, token.

    Raises:
      ValueError: as the surgery.
    """
    return _operate("attack", model, {"k": k, **settings})


def lora(model: Model, rank: int = 16, *, seed: int = 0, **settings: Any) -> Made:
    """Add LoRA adapters; return (the new model, with unchanged outputs, a report).

    Args:
      rank, settings: those of `surgery.adapt.Lora`: alpha, targets. Dropout is a training's.
      seed: seed of A; B is 0.

    Raises:
      ValueError: as the surgery.
    """
    return _operate("lora", model, {"rank": rank, **settings}, jax.random.key(seed))


def ffn(model: Model, layer: int) -> dict[str, Any]:
    """Return one layer's feed-forward leaves by name.

    {"up": {"kernel": [d, m]}, "down": {"kernel": [m, d]}}, and "gate" of a gated FFN, biases,
    adapters' leaves and neuron factors.

    Args:
      layer: counted from 0.

    Raises:
      ValueError: no such layer.
    """
    params, count = one_model(model).params, model.config.n_layers
    if layer not in range(count):
        raise ValueError(f"layer={layer!r}: the model has layers 0 to {count - 1}")
    slot = next(slot for slot in slots(params) if layer in slot.layers)  # slices only this layer
    place, leaves = slot.layers.index(layer), slot.tree["ffn"]
    return jax.tree.map(lambda leaf: leaf[place], leaves) if slot.stacked else leaves


def fold(model: Model) -> Made:
    """Fold masks, adapters and factors into plain kernels; return (the new model, a report)."""
    return _operate("fold", model, {})


def fit(config: str, workdir: str | os.PathLike, **overrides: Any) -> Made:
    """Train like `ffnh train` in this process; return (the trained model, the results).

    Args:
      config: a name such as "nucl_finetune:smollm2,text", or your config file.
      overrides: the config's keys; "__" means a dot: data__path="train.txt".

    Raises:
      ValueError: as `run`; a job of several stages or seeds, or a dry run: use `run`.
    """
    # Imported here: loading and generating do not need the command line.
    from ffn_heterogeneity.launch import cli

    settings = {name.replace("__", "."): value for name, value in overrides.items()}
    values = cli.load_config(config)
    cli.set_keys(values, settings, "fit", config)
    for name in ("stages", "seeds", "dry_run"):
        if values.get(name):
            said = f"{name}={values[name]!r}"
            raise ValueError(f"{said}: fit returns one model: call run('train', {config!r}, ...)")
    run_results = run("train", config, workdir, settings)
    return load_model(epath.Path(workdir).expanduser() / "model"), run_results


def analyze(
    model: Model, analysis: str = "", workdir: str | os.PathLike | None = None, **settings: Any
) -> dict[str, Any]:
    """Analyze a model like `ffnh analyze`; return the numbers.

    Args:
      analysis: an analysis of configs/analyze.py: "connectivity", "massive", "displacement",
        "lesions", "ntk", "experts"; "": "displacement" if a text is given, else "connectivity".
      workdir: directory for the files; None: not saved. Only `ffnh analyze` resumes.
      settings: the config's keys; "__" means a dot. `text` is a file, or the text itself (if it
        contains a space and is no path).

    Raises:
      ValueError: no such analysis or key, or an invalid setting.
    """
    from ffn_heterogeneity.evaluate import run as evaluation  # not needed to load or generate
    from ffn_heterogeneity.launch import cli

    analysis = analysis or ("displacement" if "text" in settings else "connectivity")
    config, model = cli.load_config(f"analyze:{analysis}"), one_model(model)
    named = {name.replace("__", "."): value for name, value in settings.items()}
    with tempfile.TemporaryDirectory() as folder:
        where = epath.Path(folder) / "out"  # without an earlier call's files, to continue from
        if " " in (text := str(named.get("text", ""))) and not os.path.exists(text):
            named["text"] = os.path.join(folder, "text.txt")
            epath.Path(named["text"]).write_text(text)
        cli.set_keys(config, {"model": model.source, **named}, "analyze", analysis)
        where.mkdir()
        dtype = config.get("compute_dtype", "float32")
        with contextlib.redirect_stdout(sys.stderr), products(dtype):  # results are returned
            made = evaluation.run(config, where, lambda *_, **__: model)
        if workdir:
            copy_tree(where, epath.Path(workdir).expanduser())
        return made


def _operate(name: str, model: Model, settings: Mapping[str, Any], key: Any = None) -> Made:
    from ffn_heterogeneity.surgery import SURGERIES

    return SURGERIES[name](one_model(model), settings, key=key)


# ---- commands


def run(
    command: str, config: str, workdir: str | os.PathLike, settings: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run `ffnh <command> --config=<config> --workdir=<workdir>` in this process.

    (Only one process may use a TPU, for example a notebook's kernel.)

    Args:
      command: a name of `launch.commands.COMMANDS`: "train", "evaluate" (analyses too), "surgery".
      config: a name such as "nucl_finetune:smollm2,text", or your config file.
      settings: dotted config keys and their values.

    Returns:
      The content of `<workdir>/results.json`.

    Raises:
      ValueError: an unknown command, config or key, or an invalid setting.
    """
    # Imported here: loading and generating do not need the trainer.
    from ffn_heterogeneity.io.workdir import working_in
    from ffn_heterogeneity.launch import cli, commands, configs, experiment

    workdir = epath.Path(workdir).expanduser()
    script = commands.command_of(command).script.removesuffix(".py")
    made = cli.load_config(config)
    configs.check_command(script, made, config)
    cli.set_keys(made, settings or {}, command, config)
    experiment.check(made, command)
    with working_in(workdir, made.to_dict()):
        return experiment.run(made, workdir, kind=command)
