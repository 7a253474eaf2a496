"""Tiny models in directories, configs by name, and scripts run inside this process."""

import contextlib
import copy
import dataclasses
import io
import json
import logging
import re
import resource
import runpy
import socket
import sys
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import jax
import numpy as np
from tiny_runs import REPOSITORY, Finished, flags_of

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.source import starting_model
from ffn_heterogeneity.tree import unflatten

TEXT = topics["lambda"] + topics["yield"]
_SIZES = {"vocab_size": 258, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
_LAYERS = (LayerConfig(24),) * 4
LLAMA = ModelConfig("llama", **_SIZES, layers=_LAYERS, bos_id=0, eos_id=1, max_position=128)


# Of widths that can be quantised.
WIDE = dataclasses.replace(LLAMA, d_model=64, head_dim=16, layers=(LayerConfig(128),) * 4)


def with_experts(config: ModelConfig = LLAMA, experts: int = 4, **settings) -> ModelConfig:
    """The config with experts in every layer."""
    layers = (dataclasses.replace(one, experts=experts, **settings) for one in config.layers)
    return dataclasses.replace(config, layers=tuple(layers))


def byte_tokenizer(**ids: int):
    """One token per byte, and special tokens with ids 0 (bos) and 1 (eos); `ids`: further ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *alphabet])} | ids
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def tiny_of(family: str, layers: int = 6) -> ModelConfig:
    """The family's first preset with few small layers; its pattern of layers and details stay."""
    config, _ = next(iter(families.FAMILIES[family].presets.values()))
    encoder = layers // 2 if config.kind == "encoder_decoder" else 0
    first = config.layers[:layers]
    if encoder:  # the first of each stack
        start = config.stacks["decoder"][0]
        first = (*first[:encoder], *config.layers[start : start + layers - encoder])
    small_layers = tuple(
        dataclasses.replace(
            layer,
            ffn_width=12,
            window=layer.window and 3,
            **({"experts": 4, "top_k": min(layer.top_k, 2)} if layer.experts else {}),
        )
        for layer in first
    )
    sizes = {"vocab_size": 29, "d_model": 8, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    if family == "gpt_neox":
        # It has no grouped queries, heads fill the width, and 1/4 of a head rotates.
        sizes |= {"d_model": 16, "n_heads": 2, "head_dim": 8}
    if encoder:  # no grouped queries
        sizes |= {"n_kv_heads": 4, "n_encoder_layers": encoder, "output_multiplier": 8**-0.5}
    if config.position_rows:
        sizes |= {"d_model": 16, "n_kv_heads": 4, "max_position": 24}
    ids = {"bos_id": 0, "eos_id": 1, "pad_id": None}
    config = dataclasses.replace(config, layers=small_layers, **sizes, **ids)
    if config.norm_offset:
        config = dataclasses.replace(config, embedding_multiplier=8**0.5)
    return config


def random_params(config: ModelConfig, seed: int = 0, dtype=np.float32) -> dict:
    """A stacked tree of random leaves, large enough that every leaf matters and logits differ."""
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        noise = rng.normal(size=shape)
        if len(shape) == 1:
            return 0.3 * noise + (1 - config.norm_offset if path.endswith("scale") else 0)
        return noise * (0.5 if "embed" in path or "head" in path else 0.25)

    leaves = {
        path: draw(path, shape).astype(dtype)
        for path, shape in families.expected_shapes(config).items()
    }
    return restack(config, unflatten(leaves))


def structured(config: ModelConfig, params: dict, seed: int = 0) -> dict:
    """A model with P in layers 0 and 2, a mask in layer 1, LoRA on q and down everywhere."""
    rng, tree = np.random.default_rng(seed), unstack(jax.tree.map(np.asarray, params))
    for i, layer in enumerate(tree["layers"]):
        layer = tree["layers"][i] = {
            k: {name: dict(x) if isinstance(x, dict) else x for name, x in block.items()}
            for k, block in layer.items()
        }
        for linear in (layer["attention"]["q"], layer["ffn"]["down"]):
            rows, columns = linear["kernel"].shape
            linear["lora_a"] = rng.normal(size=(rows, 3)).astype(np.float32)
            linear["lora_b"] = 0.1 * rng.normal(size=(3, columns)).astype(np.float32)
            linear["lora_scale"] = np.float32([0.5])
        if i in (0, 2):
            width = config.layers[i].ffn_width
            layer["ffn"]["neuron_scale"] = rng.uniform(0.5, 2, width).astype(np.float32)
        if i == 1:
            up = layer["ffn"]["up"]
            up["mask"] = (rng.random(up["kernel"].shape) < 0.7).astype(np.float32)
    return restack(config, tree)


def free_address() -> str:
    """A free address for the coordinator of several processes."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return f"localhost:{listener.getsockname()[1]}"


def batch_of(vocab: int, rows: int = 3, length: int = 10, seed: int = 0, encoder: int = 0) -> dict:
    """A batch with two documents per row and padding at the end.

    Args:
      encoder: length of further rows, for an encoder; the last token is padding.
    """
    rng = np.random.default_rng(seed)
    segments = np.repeat([1, 2, 0], [4, length - 6, 2])[None].repeat(rows, 0).astype(np.int32)
    positions = np.concatenate([np.arange(4), np.arange(length - 4)])[None].repeat(rows, 0)
    batch = {}
    if encoder:
        batch["encoder_tokens"] = rng.integers(0, vocab, (rows, encoder)).astype(np.int32)
        real = np.arange(encoder) < encoder - 1
        batch["encoder_segment_ids"] = np.tile(real, (rows, 1)).astype(np.int32)
    return batch | {
        "tokens": rng.integers(0, vocab, (rows, length)).astype(np.int32),
        "targets": rng.integers(0, vocab, (rows, length)).astype(np.int32),
        "loss_mask": (segments > 0) & (rng.random((rows, length)) < 0.8),
        "segment_ids": segments,
        "positions": positions.astype(np.int32),
    }


def written_again(source: Path, directory: Path) -> Model:
    """The model at `source`, after checking that it comes back from `directory` bit by bit."""
    model = load_model(source)
    save_pretrained(model.config, model.params, directory)
    back = load_model(directory)
    assert back.config == model.config
    jax.tree.map(np.testing.assert_array_equal, back.params, model.params)
    return model


def save_tiny(directory: Path, config: ModelConfig = LLAMA, params: dict | None = None) -> Path:
    """Saves a tiny model with the byte tokenizer in a directory."""
    params = random_params(config) if params is None else params
    return save_pretrained(config, params, directory, tokenizer=byte_tokenizer(), overwrite=True)


def save_tiny_reader(directory: Path, family: str = "bert") -> Path:
    """Saves a model without a head, as a start for classifiers, with the byte tokenizer."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "</s>"
    config = dataclasses.replace(tiny_of(family, 3), vocab_size=258, pad_id=1, eos_id=None)
    config = dataclasses.replace(config, max_position=64)
    return save_pretrained(config, random_params(config), directory, tokenizer=tokenizer)


def card_differs(directory: Path, results: dict) -> dict:
    """{number: (the card's, results.json's)} for numbers that differ within three digits."""
    rows = re.findall(r"^\| (\S+) \| (\S+) \|$", (directory / "README.md").read_text(), re.M)
    said = {key: json.loads(value) for key, value in rows if key != "number"}
    flat = {key.replace(".", "/"): value for key, value in flatten_config(results).items()}
    numbers = {k: x for k, x in flat.items() if isinstance(x, int | float) and type(x) is not bool}
    pairs = {key: (said.get(key, np.inf), numbers.get(key, np.nan)) for key in {**said, **numbers}}
    return {key: pair for key, pair in pairs.items() if not np.isclose(*pair, rtol=5e-3, atol=0)}


def config_of(name: str, argument: str | None = None, **changes):
    """The config in configs/<name>.py; changes with "__" for the dots of nested keys."""
    get_config = runpy.run_path(str(REPOSITORY / "configs" / f"{name}.py"))["get_config"]
    config = get_config() if argument is None else get_config(argument)
    config.lock()
    with config.ignore_type():
        for key, value in changes.items():
            config.update_from_flattened_dict({key.replace("__", "."): value})
    return config


def starting_from(config):
    """The model of a `TrainConfig` at the start of training."""
    return starting_model(config.source, plan(config).objective.head)


def our_logits(config: ModelConfig, params: dict, tokens, dtype=np.float32) -> np.ndarray:
    """Our logits [B, T, V]."""
    options = causal_lm.RunOptions(compute_dtype=dtype)

    @jax.jit
    def compute(params, tokens):
        hidden = causal_lm.forward(config, params, {"tokens": tokens}, options=options)["hidden"]
        return causal_lm.logits(config, params, hidden)

    return np.asarray(compute(params, np.asarray(tokens, np.int32)))


def torch_model(torch, directory):
    """The model that transformers loads from the directory, in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def torch_logits(torch, model, tokens) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens))).logits.float().numpy()


def torch_nll(torch, model, rows) -> tuple[float, int]:
    """(sum of NLL in nats, number of predictions) over windows of ids, by torch, row by row."""
    total, count = 0.0, 0
    for row in torch.tensor(np.asarray(rows, np.int64)):
        with torch.no_grad():
            logits = model(row[None, :-1]).logits[0]
        losses = torch.nn.functional.cross_entropy(logits, row[1:], reduction="none")
        total += losses.double().sum().item()
        count += len(row) - 1
    return total, count


def places(node, path=()):
    """Paths of all values inside JSON, containers too."""
    yield path
    if isinstance(node, dict | list):
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from places(node[key], (*path, key))


def replaced(document, path, value):
    """A copy of the document with another value at a path."""
    if not path:
        return value
    document = copy.deepcopy(document)
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return document


@contextlib.contextmanager
def no_file_beyond(size: int):
    """Writing past `size` bytes fails, as on a full disk (Python ignores the signal SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_script(name: str, *arguments, cwd: Path = REPOSITORY, **keys) -> Finished:
    """Runs scripts/<name>.py as a program, but in this process: 0.1 s instead of 5."""
    import grain  # noqa: F401 (its flags too are defined once per process)
    from absl import app, flags
    from absl import logging as absl_logging

    app.define_help_flags()  # once per process, so not among those to delete
    path = str(REPOSITORY / "scripts" / f"{name}.py")
    command = [path, *flags_of(**keys), *map(str, arguments)]
    out, err, code = io.StringIO(), io.StringIO(), 0
    before, handlers = set(flags.FLAGS), list(logging.root.handlers)
    verbosity = absl_logging.get_verbosity()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            stack.enter_context(contextlib.chdir(cwd))
            stack.enter_context(mock.patch.object(sys, "argv", command))
            runpy.run_path(path, run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        for flag in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, flag)
        flags.FLAGS.unparse_flags()
        logging.root.handlers[:] = handlers
        absl_logging.set_verbosity(verbosity)
    return Finished(code, out.getvalue(), err.getvalue())


def mask_neurons(params, removed):
    """The full model (unstacked) with the neurons' outputs zeroed, which removal must equal."""
    params = unstack(params)
    layers = list(params["layers"])
    for layer, ffn in enumerate(tree["ffn"] for tree in params["layers"]):
        kernel = ffn["down"]["kernel"]
        scale = np.array(ffn.get("neuron_scale", np.ones(kernel.shape[0])), dtype=kernel.dtype)
        scale[np.asarray(removed.get(layer, ()), dtype=np.int64)] = 0
        layers[layer] = {**layers[layer], "ffn": {**ffn, "neuron_scale": scale}}
    return {**params, "layers": layers}


def stopped_and_resumed(config, workdir, monkeypatch, together):
    """Repeats the run, interrupts it before its fourth step, and checks that all bits are equal.

    `together`: the `Shared` of the first run, so that its programs are not compiled again.
    """
    import pytest

    from ffn_heterogeneity.io.load import load_model
    from ffn_heterogeneity.io.metrics import read_metrics
    from ffn_heterogeneity.launch import train as training
    from ffn_heterogeneity.train.loop import TrainLoop
    from ffn_heterogeneity.tree import flatten

    train_one = TrainLoop._train_one

    def breaks(loop):
        if loop.step == 3:
            raise KeyboardInterrupt
        train_one(loop)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainLoop, "_train_one", breaks)
        training.run(config, workdir / "again", together)
    training.run(config, workdir / "again", together)
    one, other = (read_metrics(workdir / name / "metrics.jsonl") for name in ("run", "again"))
    for rows in (one, other):
        for row in rows:
            row.pop("timing/seconds", None), row.pop("timing/tokens_per_second", None)
    assert one == other
    models = [flatten(load_model(workdir / name / "model").params) for name in ("run", "again")]
    assert all(leaf.tobytes() == models[1][path].tobytes() for path, leaf in models[0].items())


@dataclasses.dataclass(frozen=True)
class MeanForward:
    """A run's forward pass (`train.objectives.Forward`) that predicts means of hidden states."""

    config: ModelConfig
    outputs: int = 2

    def __call__(self, params, batch, **given):
        return self._with(causal_lm.forward, params, batch, **given)

    def nudged(self, params, batch, nudges):
        return self._with(causal_lm.nudged, params, batch, nudges_lbtd=nudges)

    def of(self, config):
        return dataclasses.replace(self, config=config)

    def _with(self, run, params, batch, **given):
        options = causal_lm.RunOptions(compute_dtype=params["embed"]["embedding"].dtype)
        outputs = run(self.config, params, batch, options=options, **given)
        return outputs | {"predictions": outputs["hidden"].mean(1)[:, : self.outputs]}
