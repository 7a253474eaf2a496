"""Tokenizers from elsewhere: limited, checked, and an error of one line if unreadable."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny

from ffn_heterogeneity.io import child, tokenizer_files
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.tokenizer_files import read_tokenizer


def _replace(times, content):
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": content}] * times
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


def _split(regex):
    kind = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": kind | {"pattern": {"Regex": regex}}}


TOKENIZER = [  # of tokenizer.json
    (_replace(5, "a" * 1000), "is stopped: it wants more than 768 MB"),
    (_split("(a+)+$"), "retry-limit-in-match"),
    ({"normalizer": {"type": "Nope"}}, "did not match any variant"),
    ({"model": {"type": "BPE"}}, "cannot be read"),
    ({"model": 3}, "cannot be read"),
    ({"added_tokens": [{"id": -1}]}, "cannot be read"),
]
CONFIG = [  # of tokenizer_config.json
    ({"tokenizer_class": 3}, "tokenizer_class=3 is of a wrong type"),
    ({"auto_map": "x"}, "auto_map='x' is of a wrong type"),
    ({"added_tokens_decoder": [1]}, "is of a wrong type"),
    ({"model_max_length": "9"}, "is of a wrong type"),
    ({"chat_template": 3}, "is of a wrong type"),
    ({"chat_template": [{"name": "default"}]}, "cannot be read"),
    ({"added_tokens_decoder": {"x": 3}}, "cannot be read"),
    ({"bos_token": [1]}, "cannot be read .*bos_token"),
    ({"padding_side": "x"}, "cannot be read .*current value: x"),
    ({"tokenizer_object": 3}, "cannot be read"),
    ({"extra_special_tokens": {"chat_template": "x"}}, "a special token named 'chat_template'"),
    ({"model_specific_special_tokens": {"encode": "x"}}, "a special token named 'encode'"),
]
OTHERS = [
    ("special_tokens_map.json", '{"chat_template": "x"}', "a special token named 'chat_template'"),
    ("special_tokens_map.json", "[" * 100_000, "not JSON"),
    ("added_tokens.json", '{"a": 1, "a": 2}', "the name 'a' is twice"),
    ("tokenizer_config.json", "7", "it holds a int"),
    ("tokenizer_config.json", "\xff", "is no text"),
    ("tokenizer.json", "[]", "cannot be read"),
    ("tokenizer.json", '{"a": ' * 100_000, "cannot be read"),
]
CASES = [("tokenizer.json", *case) for case in TOKENIZER]
CASES += [("tokenizer_config.json", *case) for case in CONFIG] + OTHERS


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return Path(save_tiny(tmp_path_factory.mktemp("tokenizers") / "model"))


@pytest.mark.parametrize("name, content, message", CASES)
def test_what_cannot_be_read_is_one_line(directory, name, content, message):
    path = directory / name
    before = path.read_text() if path.exists() else None
    if isinstance(content, dict):
        content = json.dumps(json.loads(before) | content)
    path.write_text(content, encoding="latin-1")
    try:
        with pytest.raises(CheckpointError, match=message) as refused:
            read_tokenizer(directory)
    finally:
        path.unlink() if before is None else path.write_text(before)
    said = str(refused.value)
    assert "\n" not in said and str(directory) in said and len(said) < 500
    assert read_tokenizer(directory).encode("abc"), "the next one is read as ever"


def test_what_computes_without_end_is_stopped(directory, monkeypatch):
    monkeypatch.setattr(tokenizer_files, "SECONDS", 0.3)
    text = (directory / "tokenizer.json").read_text()
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(text) | _replace(19, "aa")))
    try:
        with pytest.raises(CheckpointError, match="is stopped: it computes for more than 0.3 s"):
            read_tokenizer(directory)
    finally:
        (directory / "tokenizer.json").write_text(text)


def test_files_that_are_none(tmp_path, monkeypatch):
    directory = Path(save_tiny(tmp_path / "model"))
    os.mkfifo(directory / "chat_template.jinja")
    with pytest.raises(CheckpointError, match="chat_template.jinja is no regular file"):
        read_tokenizer(directory)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="chat_template.jinja is no regular file"):
        read_tokenizer(directory)
    (directory / "chat_template.jinja").unlink()
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", 100)
    with pytest.raises(CheckpointError, match="tokenizer.json: .* bytes; 100 are read"):
        read_tokenizer(directory)


def test_one_process_is_kept_and_knows_no_jax(directory):
    read_tokenizer(directory)
    worker = child.kept("tokenizer", tokenizer_files.BYTES, os.getpid())
    first = worker.process.pid
    read_tokenizer(directory)
    assert worker.process.pid == first
    with open(f"/proc/{first}/maps") as file:
        assert "jax" not in file.read()


@pytest.mark.slow
def test_a_good_tokenizer_costs_little_more(directory):
    """The trial in a new process that imports transformers adds at most half a second.

    (It takes 0.1 s after an import of 2 s. On a busy machine the limit says nothing.)
    """
    code = (
        "import sys, time; from ffn_heterogeneity.io import tokenizer_files as t; "
        "t._try = t._try if sys.argv[1] == 'tried' else lambda path: None; start = time.time(); "
        "t.read_tokenizer(sys.argv[2]); print(time.time() - start)"
    )
    times = {"tried": [], "not": []}
    for _ in range(2):
        for way, seconds in times.items():
            command = [sys.executable, "-c", code, way, directory]
            seconds.append(float(subprocess.run(command, capture_output=True, check=True).stdout))
    assert min(times["tried"]) < min(times["not"]) + 0.5
