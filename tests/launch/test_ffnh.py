"""The installed wheel: `ffnh` finds its scripts and configs from any directory."""

import json
import os
import re
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import REPOSITORY, save_tiny
from tiny_runs import flags_of, refused, run_program

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.models.stack import unstack

COMMAND = (sys.executable, "-c", "from ffn_heterogeneity.launch.ffnh import main; main()")
SCRIPTS = sorted(path.stem for path in (REPOSITORY / "scripts").glob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel's content, built from a copy, because a build leaves files next to the sources."""
    root = tmp_path_factory.mktemp("wheel")
    copy = root / "source"
    subprocess.run(["git", "clone", "-q", REPOSITORY, copy], check=True)
    for changed in ("configs", "scripts", "ffn_heterogeneity", "pyproject.toml", "setup.py"):
        subprocess.run(["cp", "-r", REPOSITORY / changed, copy], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, copy, "-w", root], check=True)
    (built,) = root.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(root / "installed")
    return root / "installed"


def ffnh(wheel, cwd, *arguments):
    return tuple(run_program(*COMMAND, *arguments, cwd=cwd, PYTHONPATH=str(wheel)))


def test_everything_is_in_it(wheel):
    for folder in ("configs", "configs/parts", "scripts"):
        ours = {path.name for path in (REPOSITORY / folder).glob("*.py")}
        bundled = wheel / "ffn_heterogeneity" / "_bundled" / folder
        assert {path.name for path in bundled.glob("*.py")} == ours != set()
    inside = {path.relative_to(wheel) for path in (wheel / "ffn_heterogeneity").rglob("*")}
    for file in (REPOSITORY / "ffn_heterogeneity").rglob("*"):
        if file.suffix in (".py", ".json", ".yaml") or file.name == "py.typed":
            assert file.relative_to(REPOSITORY) in inside
    (entry,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "ffnh = ffn_heterogeneity.launch.ffnh:main" in entry.read_text()


def test_the_commands_of_the_wheel(wheel, tmp_path):
    code, out, _ = ffnh(wheel, tmp_path)
    assert code == 0 and all(f"\n  {name} " in out for name in SCRIPTS)
    assert "`ffnh configs`" in out
    reader, writer = os.pipe()  # from a `| head` that stopped reading
    os.close(reader)
    env = os.environ | {"PYTHONPATH": str(wheel)}
    done = subprocess.run(COMMAND, env=env, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    code, _, error = ffnh(wheel, tmp_path, "compres")
    assert code == 2 and "did you mean 'compress'?" in error
    code, out, _ = ffnh(wheel, tmp_path, "train", "--config=nucl_finetune:some/model,text", "-h")
    assert code == 0 and "--config.model='some/model'" in out and "--workdir" in out
    assert "ffnh train --config=nucl_finetune:gemma2_2b" in out and "scripts/" not in out
    assert re.search(r"now\s+nucl_finetune:some/model,text", out) and str(wheel) not in out


def test_pieces_of_ones_own_without_a_fork(wheel, tmp_path):
    """The files of docs/howto/your-own.md, used with the wheel."""
    page = (REPOSITORY / "docs" / "howto" / "your-own.md").read_text()
    files = re.findall(r"```python\n(.*?)```", page, re.S)
    for name, code in zip(("mine", "gain", "thin"), files, strict=True):
        (tmp_path / f"{name}.py").write_text(code)
    save_tiny(tmp_path / "tiny")
    rows = [json.dumps({"riddle": f"{i} and one", "solution": str(i + 1)}) for i in range(40)]
    (tmp_path / "riddles.jsonl").write_text("\n".join(rows) + "\n")
    settings = {"data.path": "riddles.jsonl", "steps": 1, "batch_size": 2, "seq_len": 64}
    settings |= {"eval.max_batches": 1, "tensorboard": "false"}
    train = ("train", *flags_of("mine.py:tiny", "mine", **settings))
    code, out, error = ffnh(wheel, tmp_path, *train)
    assert code == 0 and 0.1 < float(re.search(r"validation/l1: (.*)", out)[1]) < 0.3, error
    thin = ("--config=thin.py", "--config.criterion=largest", "--config.model=tiny")
    code, out, error = ffnh(wheel, tmp_path, "compress", *thin, "--workdir=thin")
    assert code == 0, error
    removed = json.loads((tmp_path / "thin" / "results.json").read_text())["removed"]
    kernels = [
        x["ffn"]["down"]["kernel"] for x in unstack(load_model(tmp_path / "tiny").params)["layers"]
    ]
    for gone, kernel in zip(removed, kernels, strict=True):
        assert set(gone) == set(np.argsort(np.abs(kernel).max(1))[: len(gone)].tolist())
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over it\n" * 40)
    settings |= {"data.path": "text.txt", "data.passage_chars": 100}
    settings |= {"optimizer.learning_rate": 0.1, "optimizer.warmup_steps": 0}
    train = ("train", *flags_of("gain.py:tiny,text", "gain", **settings))
    code, _, error = ffnh(wheel, tmp_path, *train)
    assert code == 0, error
    gains = load_file(tmp_path / "gain/model/structure/model.safetensors")["layers/1/ffn/gain"]
    assert np.ptp(gains) > 0.05 and np.abs(gains - 1).max() < 0.11
    weights = load_file(tmp_path / "gain/model/model.safetensors")
    folded = weights["model.layers.1.mlp.down_proj.weight"].T
    np.testing.assert_allclose(folded, kernels[1] * gains[:, None], rtol=1e-6)


@pytest.mark.slow
def test_a_config_of_ones_own_beside_them(wheel, tmp_path):
    """A user's config prunes; the user's `configs` directory hides none of our configs."""
    save_tiny(tmp_path / "tiny")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text(
        "from configs.parts import adapters\nfrom ml_collections import ConfigDict\n"
        "def get_config():\n    return ConfigDict({'surgery': 'lora', 'model': 'tiny', 'seed': 0,\n"
        "        'revision': None, 'export': 'auto', 'dtype': 'as_read', **adapters.LORA})\n"
    )
    run = ("--config.ratio=0.5", "--config.model=tiny", "--workdir=pruned")
    code, _, error = ffnh(wheel, tmp_path, "compress", "--config=prune", *run)
    assert code == 0 and (tmp_path / "pruned" / "model" / "config.json").exists(), error
    code, _, error = ffnh(
        wheel, tmp_path, "compress", "--config=configs/mine.py", "--workdir=adapted"
    )
    assert code == 0, error
    code, _, error = ffnh(wheel, tmp_path, "compress", "--config=configs/prun.py")
    assert code == 2 and "configs/mine.py" in error and "prune" in error


def test_a_name_is_a_config_of_ours_whatever_the_directory_holds(tmp_path, monkeypatch):
    """A file of that name is run only if its path is typed."""
    monkeypatch.chdir(tmp_path)
    for name in ("prune", "prune.py", "configs/prune.py", "nucl_finetune"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('run')\ndef get_config(): pass\n")
    for spec in ("prune", "nucl_finetune:a,text", "prune_recover:a,text"):
        config = cli.load_config(spec)
    for name in config.stages:
        cli.load_config(config[name].base)
    for spec in ("prune.py", "configs/prune.py"):
        refused("RuntimeError: run", cli.load_config, spec, error=cli.UsageError)
