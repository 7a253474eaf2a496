"""Products of float32 stay products of float32, on machines that would round their factors."""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny_models import (
    LLAMA,
    TEXT,
    WIDE,
    byte_tokenizer,
    config_of,
    random_params,
    save_tiny,
    tiny_of,
)
from tiny_runs import run_program, small_run

import ffn_heterogeneity as fh
from ffn_heterogeneity.evaluate.perplexity import window_nll
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.launch import experiment
from ffn_heterogeneity.launch.commands import COMMANDS, Command
from ffn_heterogeneity.models import generate
from ffn_heterogeneity.models.options import RunOptions, products
from ffn_heterogeneity.models.splash import splash_attention
from ffn_heterogeneity.models.stack import restack
from ffn_heterogeneity.surgery import Surgery, attack
from ffn_heterogeneity.surgery.adapt import Nothing
from ffn_heterogeneity.train.hardware import find_target


@pytest.fixture(autouse=True)
def nobody_has_said(monkeypatch):
    monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION", raising=False)
    with jax.default_matmul_precision(None):
        yield


def said() -> str | None:
    return jax.config.jax_default_matmul_precision


@pytest.mark.parametrize("config", [WIDE, tiny_of("gemma2")], ids=["llama", "gemma2"])
@pytest.mark.parametrize("dtype, exact", [("float32", True), ("bfloat16", False)])
def test_every_product_of_a_program_is_told(config, dtype, exact):
    """Read from the program given to the compiler, on any platform."""
    params = restack(config, random_params(config))
    rows = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (2, 16)))
    batch = {"tokens": rows, "segment_ids": jnp.ones_like(rows)}
    with products(dtype):
        options = RunOptions(compute_dtype=jnp.dtype(dtype))
        text = window_nll.lower(config, options, params, batch).as_text()
    precisions = re.findall(r"dot_general.*precision = \[(\w+), (\w+)\]", text)
    assert text.count("stablehlo.dot_general") == len(precisions) > 5
    assert set(precisions) == {("HIGHEST", "HIGHEST") if exact else ("DEFAULT", "DEFAULT")}


def test_a_command_follows_its_config_inside_another():
    config = ConfigDict({"compute_dtype": "bfloat16"})
    command = Command(dict, lambda config, workdir, shared: said())
    seen = [command(ConfigDict({}), None, None)]
    with products():
        seen.append(command(config, None, None))
        for name in ("float32", "auto"):  # auto: bfloat16 on machines where it matters
            config.compute_dtype = name
            seen.append(command(config, None, None))
        seen.append(said())
    assert seen == ["float32", None, "float32", None, "float32"]
    assert said() is None


@pytest.mark.parametrize("dtype, exact", [("float32", True), ("bfloat16", False)])
def test_every_product_of_a_training_step_is_told(tmp_path, monkeypatch, dtype, exact):
    """With the backward pass and the losses, whose rules are traced later."""
    texts, lower = [], jax.stages.Traced.lower

    def seen(traced, **given):
        lowered = lower(traced, **given)
        texts.append(lowered.as_text())
        return lowered

    monkeypatch.setattr(jax.stages.Traced, "lower", seen)
    save_tiny(tmp_path / "model", LLAMA)
    (tmp_path / "text.txt").write_text(TEXT)
    keys = small_run(tmp_path / "text.txt", compute_dtype=dtype, losses__nucl__weight=1.0)
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    fh.run("train", f"nucl_finetune:{tmp_path / 'model'},text", tmp_path / "run", keys)
    step = max(texts, key=len)
    precisions = re.findall(r"dot_general.*precision = \[(\w+), (\w+)\]", step)
    assert step.count("stablehlo.dot_general") == len(precisions) > 30
    assert set(precisions) == {("HIGHEST", "HIGHEST") if exact else ("DEFAULT", "DEFAULT")}


@pytest.mark.parametrize("given, word", [("", "float32"), ("bfloat16", "None")])
def test_a_script_follows_its_config(tmp_path, given, word):
    """Most run no `Command`: only `cli.launch` sets their precision."""
    (tmp_path / "config.py").write_text(
        "from ml_collections import ConfigDict\n"
        f"get_config = lambda: ConfigDict({{'compute_dtype': {given!r}}} if {given!r} else {{}})\n"
    )
    program = (
        "import jax; from ffn_heterogeneity.launch import cli; "
        "look = lambda *given: print(jax.config.jax_default_matmul_precision); "
        "cli.launch(look, 'x', 'config.py')"
    )
    done = run_program(sys.executable, "-c", program, "--workdir=run", cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, word), done.err


@pytest.mark.parametrize("dtype, word", [("auto", None), ("float32", "float32")])
def test_a_planned_stage_follows_its_own_config(tmp_path, monkeypatch, dtype, word):
    """Not the precision of its job, which has no dtype: a TPU's compiler rejects float32 there."""
    seen, command = [], COMMANDS["train"]
    looking = dataclasses.replace(command, run=lambda *given: seen.append(said()) or {})
    monkeypatch.setitem(COMMANDS, "train", looking)
    save_tiny(tmp_path / "model", LLAMA)
    settings = {"dry_run": "h100:8", "score__text": __file__}
    config = config_of("prune_recover", f"{tmp_path / 'model'},text", **settings)
    with config.recover.unlocked():
        config.recover.compute_dtype = dtype
    with products():
        experiment.run(config, tmp_path / "run")
    assert seen == [word]


def test_surgeries_compute_in_float32():
    surgery = Surgery("look", lambda model, settings: (model, {"said": said()}), Nothing)
    with products("bfloat16"):  # before a training in bfloat16
        assert surgery(None, {})[1] == {"said": "float32"}


def test_massive_neurons_are_found_in_float32(monkeypatch):
    seen, original = [], attack.observe
    monkeypatch.setattr(attack, "observe", lambda *given: seen.append(said()) or original(*given))
    with products("bfloat16"):
        attack.massive_weights(WIDE, restack(WIDE, random_params(WIDE)))
    assert seen == ["float32"]


def test_whoever_has_said_how_is_heard(monkeypatch):
    with jax.default_matmul_precision("tensorfloat32"), products():
        assert said() == "tensorfloat32"
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16")
    with products():
        assert said() is None  # jax itself has read the variable when it was imported


def test_the_python_interface_does_as_well(monkeypatch):
    seen = []
    model = Model(LLAMA, random_params(LLAMA), byte_tokenizer(), "tiny")
    inside = fh.hidden_states.__wrapped__.__globals__
    original = inside["_states"]
    monkeypatch.setitem(inside, "_states", lambda *given: seen.append(said()) or original(*given))
    fh.hidden_states(model, [TEXT[:20]])
    fh.hidden_states(model, [TEXT[:20]], options=RunOptions(compute_dtype=jnp.bfloat16))
    forward = generate.Generator.__call__
    monkeypatch.setattr(
        generate.Generator, "__call__", lambda *a, **k: seen.append(said()) or forward(*a, **k)
    )
    assert json.dumps(fh.generate(model, TEXT[:8], max_new_tokens=2))
    assert seen == ["float32", None, "float32"]


def test_a_tpus_compiler_takes_the_word_with_float32_alone(libtpu):
    """The reason why runs in bfloat16 do not set a precision."""
    device = find_target("v5e:2x2", jnp.float32).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)

    def attention(q, k, v):
        return jnp.sum(splash_attention(q, k, v, scale=0.125).astype(jnp.float32))

    def compile_for(dtype):
        q, k = (jax.ShapeDtypeStruct((1, 256, n, 64), dtype, sharding=place) for n in (4, 2))
        gradient = jax.jit(jax.grad(attention, (0, 1, 2))).trace(q, k, k)
        return gradient.lower(lowering_platforms=("tpu",)).compile()

    for dtype in ("float32", "bfloat16"):
        with products(dtype):
            compile_for(dtype)
    with jax.default_matmul_precision("float32"), pytest.raises(Exception, match="Bad lhs type"):
        compile_for("bfloat16")
