"""Damaged models given to a script: an error of one clear line, no files left behind.

What each reader says in detail is tested in tests/io; here, that it reaches the user.
"""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import run_script, save_tiny
from tiny_runs import run_program

DOWN = "model.layers.2.mlp.down_proj.weight"


def tensors(change):
    """An edit of the tensors of a directory."""

    def damage(directory):
        path = directory / "model.safetensors"
        leaves = load_file(path)
        change(leaves)
        save_file(leaves, path, metadata={"format": "pt"})

    return damage


def settings(**changes):
    def damage(directory):
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def truncate(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_a_pickle(directory):
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def not_a_number(leaves):
    leaves[DOWN][3, 5] = np.nan


DAMAGES = {
    "NaN": (tensors(not_a_number), [DOWN, "NaN"]),
    "truncated": (truncate, ["model.safetensors", "not a whole"]),
    "pickle": (only_a_pickle, ["pytorch_model.bin"]),
    "architecture": (
        settings(model_type="mamba", architectures=["MambaForCausalLM"]),
        ["config.json", "'mamba'", "gemma2"],
    ),
    "no config": (lambda directory: (directory / "config.json").unlink(), ["config.json"]),
}


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("script", ["compress", "analyze", "train"])
def test_a_damaged_directory(script, kind, tmp_path):
    directory = save_tiny(tmp_path / "model")
    damage, words = DAMAGES[kind]
    damage(directory)
    model = f"--config.model={directory}"
    if script == "train":
        model = f"--config=configs/nucl_finetune.py:{directory},text"
    data = ["--config.data.path=README.md"] if script == "train" else []
    error = run_script(script, model, *data, f"--workdir={tmp_path / 'run'}").error
    assert all(word.lower() in error.lower() for word in words), error
    assert not (tmp_path / "run").exists()


def test_a_damaged_gguf(smollm2_gguf, tmp_path):
    with smollm2_gguf.open("rb") as file:
        start = file.read(3_000_000)
    for name, content in [
        ("header.gguf", start[:5_000]),
        ("data.gguf", start),
        ("magic.gguf", b"GGML" + start[4:10_000]),
        ("nothing.gguf", b""),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        flags = {"model": path, "text": "README.md", "workdir": tmp_path / "run"}
        assert name in run_script("evaluate", **flags).error
        assert not (tmp_path / "run").exists()
        convert = run_script("convert", f"--model={path}", f"--output={tmp_path / 'out'}")
        assert name in convert.error
        assert not (tmp_path / "out").exists()


def test_a_model_without_tokenizer_evaluates_ids_but_no_text(tmp_path):
    directory = save_tiny(tmp_path / "model")
    for path in directory.glob("*token*"):
        path.unlink()
    np.save(tmp_path / "ids.npy", np.arange(12).reshape(2, 6))
    model = f"--config.model={directory}"
    ids = f"--config.token_ids={tmp_path / 'ids.npy'}"
    (tmp_path / "text.txt").write_text("some text")
    text = f"--config.text={tmp_path / 'text.txt'}"
    done = run_script("evaluate", model, ids, f"--workdir={tmp_path / 'a'}")
    assert done.code == 0, done.err
    error = run_script("evaluate", model, text, f"--workdir={tmp_path / 'b'}").error
    assert "no tokenizer" in error and "token_ids" in error
    arguments = ["--config=configs/nucl_finetune.py:" + str(directory) + ",text"]
    arguments += [f"--config.data.path={tmp_path / 'text.txt'}", f"--workdir={tmp_path / 'c'}"]
    assert "no tokenizer" in run_script("train", *arguments).error
    assert run_script("compress", model, f"--workdir={tmp_path / 'd'}").code == 0


FOREIGN = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import PretrainedConfig, PreTrainedTokenizer
class Config(PretrainedConfig):
    model_type = "foreign"
class Tokenizer(PreTrainedTokenizer):
    pass
"""


@pytest.mark.parametrize("vocabulary", ["vocab.txt", "tokenizer.json"])
def test_code_in_a_directory_never_runs(vocabulary, tmp_path):
    """A user types "y" where transformers would ask; a separate process, so that it can ask."""
    directory, marker = save_tiny(tmp_path / "model"), tmp_path / "marker"
    (directory / "foreign.py").write_text(FOREIGN.format(marker=str(marker)))
    if vocabulary == "vocab.txt":
        for path in directory.glob("*token*"):
            path.unlink()
        (directory / "vocab.txt").write_text("a\nb\n")
    settings(auto_map={"AutoConfig": "foreign.Config"}, model_type="foreign")(directory)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["foreign.Tokenizer", None]}})
    )
    load = "import sys; from ffn_heterogeneity.io.load import load_tokenizer\n"
    load += "try: print(len(load_tokenizer(sys.argv[1])))\nexcept ValueError as error: print(error)"
    options = {"given": "y\n" * 9, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = run_program(sys.executable, "-c", load, directory, **options)
    assert not marker.exists() and done.code == 0, done.err
    (line,) = done.out.splitlines()
    if vocabulary == "tokenizer.json":
        assert line == "258"
    else:
        assert line.startswith(str(directory)) and "code in a model's directory is never" in line
