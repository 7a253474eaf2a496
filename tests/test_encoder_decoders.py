"""Every config on an encoder-decoder: it works, or is rejected by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from etils import epath
from tiny_models import REPOSITORY, byte_tokenizer, config_of, random_params, tiny_of
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate.harness import HarnessLM
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.launch.commands import COMMANDS
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.train.shared import Shared

pytestmark = pytest.mark.usefixtures("compiled_quickly")
BY_NAME = "a t5 model is an encoder-decoder"
TEXT, ROWS = {"text": "{text}", "window": 16}, {"data__path": "{rows}"}
LABELS = ROWS | {"fields": "text", "data__task": "labels"}
ON_TEXT = {"calibration": "{text}", "calibration_tokens": 512}
# Config -> (command, argument, keys), of which "{model}" is the model: rejected by name.
REJECTED = [
    ("train", "nucl_finetune", "{model},text", {"data__path": "{text}"}),
    ("train", "jreg_sft", "{model}", ROWS),
    ("train", "macdrop_sft", "{model},lora", ROWS),
    ("train", "jreg_pretrain", "local", {"data__path": "{text}", "model": "{model}"}),
    ("train", "moe_pretrain", "local", {"data__path": "{text}", "model": "{model}"}),
    ("train", "p32_glue", "{model},labels", ROWS | {"fields": "text"}),
    ("train", "five", "{model},labels,p32", ROWS | {"fields": "text"}),
    ("surgery", "prune", None, {"criterion": "bos"}),
    ("surgery", "prune", None, {"protect": "massive:5"}),
    ("surgery", "prune", None, {"criterion": "optipfair"} | ON_TEXT),
    ("surgery", "prune", None, {"criterion": "optipfair", "calibration": "own"}),
    ("surgery", "prune", None, {"compensation": "state_ridge"} | ON_TEXT),
    ("surgery", "prune", None, TEXT),
    ("surgery", "fuse", None, {"spare": 2}),
    ("surgery", "attack", None, {}),
    ("surgery", "drop_layers", None, ON_TEXT),
    ("surgery", "experts", "partition", {"experts": 4, "router": "trained"} | ON_TEXT),
    ("evaluate", "perplexity", None, TEXT),
    ("evaluate", "analyze", "displacement", TEXT),
    ("evaluate", "analyze", "massive", {}),
    ("evaluate", "analyze", "lesions", TEXT),
    ("evaluate", "analyze", "experts", TEXT),
    ("in_memory", "prune_table", None, TEXT),
    ("in_memory", "fuse_table", None, TEXT),
    ("in_memory", "attack_table", None, TEXT),
]
SPANS = {"model": "{model}", "data__path": "{text}", "data__task": "text", "seq_len": 24}
WORKS = [
    ("train", "t5_pretrain", "local,nucl", SPANS | {"data__passage_chars": 100}),
    ("train", "t5_finetune", "{model},jsonl,lora", ROWS | {"target_len": 8}),
    ("train", "p32_glue", "{model},labels", LABELS | {"pooling": "last"}),
    ("surgery", "prune", None, {"layers": "decoder:last1", "criterion": "gini"}),
    ("surgery", "prune", None, {"streaming": True, "layers": "encoder:all"}),
    ("surgery", "prune", None, {"criterion": "magnitude", "compensation": "ridge"}),
    ("surgery", "fuse", None, {}),
    ("surgery", "adapt", "lora", {}),
    ("surgery", "experts", "partition", {"experts": 4, "router": "zeros"}),
    ("surgery", "experts", "upcycle", {"experts": 2}),
    ("evaluate", "analyze", "connectivity", {}),
    ("evaluate", "analyze", "ntk", LABELS | {"methods": ("fusion",)}),
]
# Stages of the above; no model of their own; or functions that the last test calls.
OTHERS = {"prune_recover", "fuse_recover", "expert_recover", "mlp_fusion", "benchmark"}
OTHERS |= {"switch", "t5_recover", "shrink", "judge", "prepare_data"} | {
    "answers",
    "chat",
    "classify",
    "harness",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("t5")
    config = dataclasses.replace(tiny_of("t5", 4), vocab_size=360, pad_id=0)  # with sentinels
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "<s>"
    save_pretrained(config, random_params(config), root / "model", tokenizer=tokenizer)
    (root / "text.txt").write_text("some words of a text, again and again. " * 60)
    row = {"text": "abc", "prompt": "p", "response": "r", "instruction": "a", "output": "b"}
    rows = [json.dumps(row | {"label": "xy"[i % 2]}) + "\n" for i in range(12)]
    (root / "rows.jsonl").write_text("".join(rows))
    names = {"model": "model", "text": "text.txt", "rows": "rows.jsonl"}
    return {name: str(root / file) for name, file in names.items()}


def run(files, where, kind, name, argument, keys):
    keys = {k: v.format(**files) if isinstance(v, str) else v for k, v in keys.items()}
    config = config_of(name, argument and argument.format(**files))
    defaults = {"steps": 2, "batch_size": 4, "accumulation": 1, "seq_len": 16}
    defaults |= {"tensorboard": False, "compute_dtype": "float32", "together": 1}
    if "model" in config and "model" not in keys and "{model}" not in (argument or ""):
        defaults["model"] = files["model"]
    defaults = {key: value for key, value in defaults.items() if key in config}
    for key, value in (defaults | keys).items():
        config.update_from_flattened_dict({key.replace("__", "."): value})
    if "optimizer" in config:
        config.optimizer.warmup_steps = 0
    where.mkdir()
    return COMMANDS[kind](config, epath.Path(where), Shared(keep_model=False))


def title(case):
    kind, name, argument, keys = case
    return f"{name}-{argument}-{'-'.join(map(str, keys.values()))}"


@pytest.mark.parametrize("case", REJECTED, ids=map(title, REJECTED))
def test_what_reads_one_text_is_rejected_by_name(files, tmp_path, case):
    refused(BY_NAME, run, files, tmp_path / "run", *case)


@pytest.mark.parametrize("case", WORKS, ids=map(title, WORKS))
def test_what_reads_weights_works(files, tmp_path, case):
    run(files, tmp_path / "run", *case)
    if case[0] == "evaluate":
        return
    ours, made = (fh.load_model(x) for x in (files["model"], tmp_path / "run/model"))
    assert made.config.kind == "encoder_decoder"
    rng = np.random.default_rng(0)
    batch = {x: rng.integers(2, 258, (2, 7)) for x in ("tokens", "encoder_tokens")}
    hidden = [causal_lm.forward(x.config, x.params, batch)["hidden"] for x in (ours, made)]
    equal = case[1] in ("experts", "adapt")  # the same function in another form
    apart = np.abs(hidden[0] - hidden[1]).max()
    assert apart < 1e-4 if equal else apart > 1e-3


def test_every_config_is_here():
    tried = {case[1] for case in (*REJECTED, *WORKS)}
    assert tried | OTHERS == {path.stem for path in (REPOSITORY / "configs").glob("*.py")}


def test_functions_that_predict_from_one_text_are_rejected_by_name(files):
    model = fh.load_model(files["model"])
    assert len(fh.generate(model, ["a prompt", "another"], max_new_tokens=3)) == 2
    refused(BY_NAME, fh.perplexity, model, "a text " * 600)
    refused(BY_NAME, HarnessLM, model)
    refused(f"{BY_NAME}: truncation", fh.surgery.SURGERIES["truncate"], model, {"blocks": 1})
    assert jax.tree.leaves(model.params)
