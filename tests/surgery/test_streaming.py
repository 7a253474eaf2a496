"""Streaming surgery writes the same bytes as in memory, with little memory, or nothing."""

import dataclasses
import filecmp
import json
import math
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    REPOSITORY,
    byte_tokenizer,
    config_of,
    random_params,
    run_script,
    save_tiny,
    tiny_of,
)
from tiny_runs import refused

from ffn_heterogeneity.bench.streaming_cases import time_streaming
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.fingerprint import fingerprint
from ffn_heterogeneity.io.hf.export import choose_form, save_pretrained, write_configs
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.pieces import Spec, open_pieces
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.families import FAMILIES, expected_shapes, family_by_name
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.streaming import compress_directory

pytestmark = pytest.mark.usefixtures("compiled_quickly")
# Files that transformers writes and we copy.
NOT_OURS = ("tokenizer.json", "tokenizer_config.json")


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def assert_same(streamed, in_memory, but=NOT_OURS):
    ours, wanted = contents(streamed), contents(in_memory)
    assert set(ours) == set(wanted)
    for name in set(ours) - set(but):
        assert ours[name] == wanted[name], name


def both(tmp_path, source, **changes) -> tuple[dict, dict]:
    """Results of scripts/compress.py in memory and streaming; checks that the files are equal."""
    results, changes = [], {"base": "prune", "argument": None} | changes
    base = changes.pop("base"), changes.pop("argument")
    for name, streaming in (("memory", False), ("stream", True)):
        config = config_of(*base, model=str(source), streaming=streaming, **changes)
        results.append(compress.run(config, tmp_path / name))
    assert_same(tmp_path / "stream/model", tmp_path / "memory/model")
    for name, result in zip(("memory", "stream"), results, strict=True):
        assert json.loads((tmp_path / name / "results.json").read_text()) == result
        assert result.pop("model_fingerprint") == fingerprint(
            tmp_path / name / "model"
        )  # all files
    assert list(results[0].items()) == list(results[1].items())
    return results[1]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_every_family(tmp_path, family, dtype, capsys):
    config = tiny_of(family)
    source = save_tiny(tmp_path / "model", config, random_params(config, dtype=dtype))
    results = both(tmp_path, source)
    shapes = [(3,) if layer.experts is None else (4, 3) for layer in config.layers]
    assert [np.shape(gone) for gone in results["removed"]] == shapes
    assert f"removed {sum(map(np.prod, shapes))} neurons by" in capsys.readouterr().out
    assert results["ffn_widths_after"] == [9] * 6


@pytest.mark.parametrize(
    "changes",
    [
        {"criterion": "similarity", "compensation": "sum"},
        {"criterion": "similarity", "compensation": "least_squares", "layers": "top"},
        {"criterion": "magnitude", "compensation": "ridge", "count": 5},
        {"criterion": "gini", "compensation": "scaled", "reverse": True},
        {"criterion": "random", "seed": 3},
        {"criterion": "mstd", "budget": "global", "ratio": 0.4},
        {"budget": "global", "layers": "0-2", "export": "padded"},
        {"layers": "1,3", "ratio": 0.5},
        {"layers": "1,3", "ratio": 0.5, "export": "padded", "dtype": "bfloat16"},
        {"export": "native", "dtype": "float16"},
        {"ratio": 0.0},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_every_way(model, tmp_path, changes):
    both(tmp_path, model, **changes)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("rule", ["aimer", "entropy", "random"])
def test_experts(tmp_path, family, rule):
    source = save_tiny(tmp_path / "model", tiny_of(family))
    changes = {"rule": rule, "count": 2, "layers": "1-3", "argument": "experts", "base": "experts"}
    results = both(tmp_path, source, **changes)
    assert list(map(len, results["removed_experts"])) == [0, 2, 2, 2, 0, 0]
    ranking = (tmp_path / "stream/ranking.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in ranking] == results["ranking"]
    changes |= {"rule": "reap", "calibration": "own", "streaming": True, "model": str(source)}
    config = config_of(changes.pop("base"), changes.pop("argument"), **changes)
    refused("streaming=True never loads the whole model", compress.run, config, tmp_path / "not")


@pytest.mark.parametrize("export", ["auto", "padded"])
def test_layers_of_unequal_width(tmp_path, export):
    """From a native directory; untouched layers are padded too."""
    config = dataclasses.replace(
        LLAMA, layers=tuple(LayerConfig(w) for w in (24, 10, 16, 7)), ffn_bias=True
    )
    source = save_tiny(tmp_path / "model", config)
    results = both(tmp_path, source, layers="0,2", export=export)
    assert results["ffn_widths_after"] == [18, 10, 12, 7]


@pytest.mark.parametrize("parts", [1, 7])
def test_shards_in_and_out(tmp_path, parts):
    config, params = tiny_of("gemma2"), random_params(tiny_of("gemma2"))
    size = sum(leaf.nbytes for layer in unstack(params)["layers"] for leaf in flat(layer))
    source = tmp_path / "model"
    save_pretrained(config, params, source, tokenizer=byte_tokenizer(), max_shard_bytes=size // 4)
    assert len(list(source.glob("*.safetensors"))) > 3
    plan = RemovalPlan("entropy", ratio=0.25, layers="0,3-5")
    compress_directory(source, tmp_path / "stream", plan, max_shard_bytes=size // parts)
    smaller, tree, *_ = reduce_model(config, load_model(source).params, plan)
    options = {"tokenizer": byte_tokenizer(), "max_shard_bytes": size // parts}
    save_pretrained(smaller, tree, tmp_path / "memory", **options)
    (tmp_path / "stream/removed_neurons.json").unlink()
    assert_same(tmp_path / "stream", tmp_path / "memory")
    assert (parts > 1) == (tmp_path / "stream/model.safetensors.index.json").is_file()


def flat(tree) -> list[np.ndarray]:
    return [leaf for x in tree.values() for leaf in (flat(x) if isinstance(x, dict) else [x])]


def test_what_others_left_out_or_added(tmp_path, model):
    """A head in addition to tied embeddings, and rotary tables, are dropped, as in loading."""
    from safetensors.numpy import load_file, save_file

    source = tmp_path / "model"
    source.mkdir()
    for name, content in contents(model).items():
        (source / name).write_bytes(content)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    save_file(tensors, source / "model.safetensors")
    (source / "generation_config.json").write_text('{"temperature": 0.2}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "notes").mkdir()
    plan = RemovalPlan("entropy", ratio=0.25)
    compress_directory(source, tmp_path / "from_others", plan)
    compress_directory(model, tmp_path / "from_ours", plan)
    files, wanted = contents(tmp_path / "from_others"), contents(tmp_path / "from_ours")
    assert files.pop("generation_config.json") == b'{"temperature": 0.2}'
    assert files.pop("chat_template.jinja") == b"{{ messages }}"
    del wanted["generation_config.json"]
    assert files == wanted
    tensors["lm_head.weight"][3] += 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight.*differs"):
        compress_directory(source, tmp_path / "x", plan)


def test_the_model_is_never_in_memory(tmp_path):
    """Of 20 MB of embeddings and 8 MB of layers, only a layer and a few pieces are in memory."""
    config = dataclasses.replace(
        LLAMA, vocab_size=40_000, d_model=128, head_dim=32, layers=(LayerConfig(512),) * 10
    )
    source = save_tiny(tmp_path / "model", config)
    size = Path(source, "model.safetensors").stat().st_size
    assert size > 25e6
    plan = RemovalPlan("similarity", count=20, compensation="ridge", layers="0-1")
    tracemalloc.start()
    compress_directory(source, tmp_path / "out", plan)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.4 * size, f"{peak / 1e6:.1f} MB held of {size / 1e6:.1f}"


# ---- what cannot be done, and what is interrupted


def test_a_gguf_file_is_refused_at_once(tmp_path):
    path, workdir = tmp_path / "model.gguf", tmp_path / "run"
    path.write_bytes(b"GGUF")
    flags = [f"--config.model={path}", "--config.streaming=true", f"--workdir={workdir}"]
    error = run_script("compress", *flags).error
    assert "model.gguf" in error and "scripts/convert.py" in error
    assert not workdir.exists()


@pytest.mark.parametrize(
    "tensor", ["model.embed_tokens.weight", "model.layers.2.mlp.up_proj.weight"]
)
def test_values_that_are_no_numbers_are_refused(tmp_path, model, tensor):
    from safetensors.numpy import load_file, save_file

    source, workdir = tmp_path / "model", tmp_path / "run"
    source.mkdir()
    for name, content in contents(model).items():
        (source / name).write_bytes(content)
    tensors = load_file(source / "model.safetensors")
    tensors[tensor][1, 2] = np.nan
    save_file(tensors, source / "model.safetensors")
    flags = [f"--config.model={source}", "--config.streaming=true", f"--workdir={workdir}"]
    error = run_script("compress", *flags).error
    assert tensor in error and "NaN" in error
    assert not workdir.exists(), "nothing is left behind"


def test_damaged_checkpoints_are_refused(tmp_path, model):
    plan, source = RemovalPlan("entropy", ratio=0.25), tmp_path / "model"
    source.mkdir()
    for name, content in contents(model).items():
        (source / name).write_bytes(content)
    weights = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        compress_directory(source, tmp_path / "out", plan)
    (source / "model.safetensors").write_bytes(weights)
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"intermediate_size": 23}))
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight.*\(24, 16\).*\(23, 16\)"):
        compress_directory(source, tmp_path / "out", plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


PROGRAM = """
import runpy, sys, time
from ffn_heterogeneity.io import pieces
write, count = pieces.Pieces.write, [0]
def slow(self, name, array):
    write(self, name, array)
    count[0] += 1
    if count[0] == 15:
        print("half", flush=True)
        time.sleep(600)
pieces.Pieces.write = slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def killed(*flags, limit=()):
    """scripts/compress.py in a separate process, killed half-way."""
    script = str(REPOSITORY / "scripts/compress.py")
    command = [*limit, sys.executable, "-c", PROGRAM, script, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        said = process.stdout.readline()
        os.kill(process.pid, signal.SIGKILL)
        assert said == b"half\n", process.stderr.read().decode()
    assert process.returncode == -signal.SIGKILL


def test_killed_half_way_and_again(tmp_path, model):
    workdir = tmp_path / "run"
    flags = [f"--config.model={model}", "--config.streaming=true", f"--workdir={workdir}"]
    killed(*flags)
    hidden = [path for path in workdir.iterdir() if path.name.startswith(".")]
    assert len(hidden) == 1 and list(hidden[0].glob("*.safetensors")), "it was at work"
    there = {path.name for path in workdir.iterdir()} - {hidden[0].name}
    assert there == {"config.json", "inputs.json", "command.txt", "versions.json"}
    assert run_script("compress", *flags).code == 0
    assert not [path for path in workdir.iterdir() if path.name.startswith(".")]
    config = config_of("prune", model=str(model))
    compress.run(config, tmp_path / "memory")
    assert_same(workdir / "model", tmp_path / "memory/model")
    # An existing model stays complete until the next one is complete.
    before = contents(workdir / "model")
    killed(*flags)
    assert contents(workdir / "model") == before
    assert run_script("compress", *flags).code == 0
    assert contents(workdir / "model") == before
    assert not [path for path in workdir.iterdir() if path.name.startswith(".")]


def test_leftovers_of_others_stay(tmp_path, model):
    names = [".model.tmp", ".other.0123abcd.partial", ".model.0123abcd.partial.txt", "model2"]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / ".model.0123abcd.partial").mkdir()
    (tmp_path / ".model.0123abcd.old").mkdir()
    compress_directory(model, tmp_path / "model", RemovalPlan("entropy", ratio=0.25))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "model"])


@pytest.mark.slow
def test_experts_of_a_checkpoint_larger_than_the_address_space(tmp_path, monkeypatch):
    """3 GiB in shards of 512 MiB under a limit of 2 GiB; killed, resumed: the same bits."""
    layer = dataclasses.replace(tiny_of("mixtral").layers[0], ffn_width=3584, experts=8)
    sizes = {"d_model": 1024, "n_heads": 16, "n_kv_heads": 8, "head_dim": 64, "vocab_size": 32_000}
    config = dataclasses.replace(tiny_of("mixtral"), layers=(layer,) * 17, **sizes)
    source, shapes = tmp_path / "model", expected_shapes(config)
    source.mkdir()
    rng, dtype = np.random.default_rng(0), np.dtype(ml_dtypes.bfloat16)
    pool = rng.normal(0, 0.02, 1 << 26).astype(np.float32).astype(dtype)
    rules = family_by_name("mixtral").rules(config)
    specs = {
        n: s for rule in rules for n, s in zip(rule.names, rule.stored_shapes(shapes), strict=True)
    }
    with open_pieces(source, {n: Spec(s, dtype) for n, s in specs.items()}, 1 << 29) as pieces:
        for name in pieces.order:
            size = math.prod(specs[name])
            start = rng.integers(len(pool) - size)
            pieces.write(name, pool[start : start + size].reshape(specs[name]))
    write_configs(source, choose_form(config, "auto"), {dtype})
    byte_tokenizer().save_pretrained(source)
    del pool
    assert sum(path.stat().st_size for path in source.iterdir()) > 3 * 2**30
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    flags = ["--config=configs/experts.py:experts", f"--config.model={source}"]
    flags += ["--config.streaming=true", "--config.rule=entropy", "--config.ratio=0.25"]
    limit = ["prlimit", f"--as={2**31}"]
    killed(*flags, f"--workdir={tmp_path / 'again'}", limit=limit)
    assert list((tmp_path / "again").glob(".*/*.safetensors"))
    for name in ("once", "again"):
        script = [sys.executable, "scripts/compress.py", *flags, f"--workdir={tmp_path / name}"]
        subprocess.run([*limit, *script], cwd=REPOSITORY, check=True, capture_output=True)
    files = sorted((tmp_path / "once/model").iterdir())
    for file in files:
        assert filecmp.cmp(file, tmp_path / "again/model" / file.name, shallow=False)
    assert load_model(tmp_path / "once/model", check_finite=False).config.layers[0].experts == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "as_read"},
        {"criterion": "similarity", "compensation": "sum", "layers": "0,29"},
        {"criterion": "magnitude", "compensation": "least_squares", "layers": "5", "count": 100},
    ],
    ids=["entropy", "sum", "least_squares"],
)
def test_smollm2(tmp_path, smollm2_gguf, changes):
    model = load_model(smollm2_gguf, dtype="bfloat16")
    source = tmp_path / "smollm2"
    save_pretrained(model.config, model.params, source, tokenizer=model.tokenizer)
    results = both(tmp_path, source, **changes)
    assert sum(map(len, results["removed"])) > 0
    again = load_model(tmp_path / "stream/model")
    text = "Ein Satz, and another one."
    assert again.tokenizer.encode(text) == model.tokenizer.encode(text)


def test_the_benchmark_measures_and_cleans_up(tmp_path, capsys):
    config = config_of("benchmark", repetitions=1, directory=str(tmp_path))
    figures = time_streaming(config, model=tiny_of("gemma2"))
    assert not list(tmp_path.iterdir())
    assert figures["ratio"] == figures["process_seconds"][0] / figures["copy_seconds"][0]
    assert 0 < figures["streaming_seconds"][0] < figures["process_seconds"][0]
    # Only Python with numpy and jax.
    assert 20 < figures["peak_anonymous_mb"][0] < 300
    assert "process / copy" in capsys.readouterr().out
    json.dumps(figures)
