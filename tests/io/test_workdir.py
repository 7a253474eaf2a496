"""A work directory belongs to one config."""

import json
import os
import signal
import subprocess
import sys

import pytest
from tiny_runs import refused

from ffn_heterogeneity.io.files import plain
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.io.workdir import WorkdirError, finished, prepare_workdir, working_in

CONFIG = {"steps": 10, "optimizer": {"name": "adamw", "betas": (0.9, 0.99)}, "path": None}


def test_a_new_directory_is_claimed_and_resumed(tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert prepare_workdir(run, CONFIG) is False
    assert json.loads((run / "config.json").read_text())["optimizer"]["betas"] == [0.9, 0.99]
    assert json.loads((run / "versions.json").read_text())["jax"]
    prepare_workdir(run, CONFIG)
    monkeypatch.setattr("sys.argv", ["train.py", "--config.name=two words"])
    assert prepare_workdir(run, CONFIG) is True
    assert "'--config.name=two words'" in (run / "command.txt").read_text()
    assert len((run / "command.txt").read_text().splitlines()) == 2


def test_two_processes_do_not_work_in_one_directory(tmp_path):
    program = (
        "import json, os, sys, time\n"
        "from ffn_heterogeneity.io.workdir import working_in\n"
        "with working_in(sys.argv[1], json.loads(sys.argv[2])):\n"
        "    if not (child := os.fork()):\n"
        "        time.sleep(600)\n"
        "    print(child, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run"), json.dumps(CONFIG)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        child = int(other.stdout.readline())
        refused = pytest.raises(WorkdirError, match="another process is at work in .*/run: wait")
        with refused, working_in(tmp_path / "run", CONFIG):
            pass
        with working_in(tmp_path / "run", CONFIG, alone=False):
            pass
        other.kill()  # the lock is released at the end of the process
        other.wait()
    try:
        with working_in(tmp_path / "run", CONFIG):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_that_failed_at_once_gives_its_directory_back(tmp_path):
    with pytest.raises(KeyError), working_in(tmp_path / "run", CONFIG):
        raise KeyError("something")
    assert not (tmp_path / "run").exists()
    with pytest.raises(KeyError), working_in(tmp_path / "run", CONFIG):
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
        raise KeyError("something")
    assert (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("saved", [None, "checkpoints/1", "seed_0", "model"])
def test_before_its_first_step_a_run_gives_all_back_but_what_was_there(tmp_path, saved):
    for folder in ("other run/checkpoints/5", "tensorboard"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyError), working_in(tmp_path, CONFIG):
        for folder in ("checkpoints/6.orbax-checkpoint-tmp", "checkpoints_frozen/0", "wandb"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st')
        (tmp_path / (saved or "wandb")).mkdir(parents=True, exist_ok=True)
        raise KeyError("something")
    assert (sorted(tmp_path.rglob("*")) == before) == (saved is None)
    assert (tmp_path / "config.json").exists() == (saved is not None)


def test_versions_are_those_of_the_run_that_made_the_results(tmp_path):
    prepare_workdir(tmp_path, CONFIG)
    (tmp_path / "versions.json").write_text('{"jax": "0.0.1"}')
    (tmp_path / "results.json").write_text('{"nll": 1}')
    prepare_workdir(tmp_path, CONFIG)
    assert (tmp_path / "versions.json").read_text() == '{"jax": "0.0.1"}'


def test_another_config_is_refused_with_its_keys(tmp_path):
    prepare_workdir(tmp_path, CONFIG)
    other = {"steps": 20, "optimizer": {"name": "adamw", "betas": (0.9, 0.95)}, "seed": 1}
    with pytest.raises(WorkdirError) as error:
        prepare_workdir(tmp_path, other)
    message = str(error.value)
    assert "steps: 10 there, 20 here" in message
    assert "optimizer.betas: [0.9, 0.99] there, [0.9, 0.95] here" in message
    assert "seed: '<absent>' there, 1 here" in message and "another --workdir" in message
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 10
    assert "optimizer.name" not in message


@pytest.mark.parametrize("key", ["text", "calibration", "model", "data.path", "data.mixture"])
def test_inputs_that_changed_are_refused(tmp_path, key):
    """The path is the same, but its content changed."""
    source = tmp_path / "source"
    if key in ("text", "calibration"):
        file = source
        file.write_text("one two three")
    else:
        (source / "sub").mkdir(parents=True)
        file = source / "sub" / "weights.bin"
        file.write_bytes(bytes(300_000))
        (source / ".cache").write_text("1")
    config = {"steps": 1, "data": {}}
    group = config["data"] if key.startswith("data.") else config
    mixed = (("text", str(source), 1.0), ("text", str(source), 2.0))
    group[key.split(".")[-1]] = mixed if key == "data.mixture" else str(source)
    prepare_workdir(tmp_path / "run", config)
    if file != source:
        (source / ".cache").write_text("hidden files are not part of it")
    prepare_workdir(tmp_path / "run", config)
    before, damaged = file.read_bytes(), bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    for changed in (bytes(damaged), before + b"\0"):
        file.write_bytes(changed)
        with pytest.raises(WorkdirError, match=f"other inputs: {key}=.*source.* changed since"):
            prepare_workdir(tmp_path / "run", config)
    file.write_bytes(before)
    prepare_workdir(tmp_path / "run", config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("validation_path", "a={},b={}.other"),
        ("path", "~/source"),
        ("path", ["{}.other", "{}"]),
        ("mixture", [["text", "{}", 1.0], ["text", "{}.other", 2.0]]),
    ],
)
def test_every_form_of_a_path_is_an_input(tmp_path, monkeypatch, key, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    source = tmp_path / "source"
    for file in (source, tmp_path / "source.other"):
        file.write_text("one two three")
    value = json.loads(json.dumps(value).replace("{}", str(source)))
    prepare_workdir(tmp_path / "run", {"data": {key: value}})
    prepare_workdir(tmp_path / "run", {"data": {key: value}})
    source.write_text("one two four")
    with pytest.raises(WorkdirError, match=f"other inputs: data.{key}=.* changed since"):
        prepare_workdir(tmp_path / "run", {"data": {key: value}})


def test_an_unfinished_job_of_stages_may_change_what_its_stages_guard(tmp_path):
    (tmp_path / "a").write_text("one")
    config = {"stages": ["first"], "first": {"text": str(tmp_path / "a")}, "seeds": []}
    prepare_workdir(tmp_path / "run", config)
    (tmp_path / "a").write_text("two")
    refused("changed since", prepare_workdir, tmp_path / "run", config, error=WorkdirError)
    (tmp_path / "b").write_text("three")
    other = config | {"first": {"text": str(tmp_path / "b")}}
    assert prepare_workdir(tmp_path / "run", other) is True
    (tmp_path / "b").write_text("four")
    refused("changed since", prepare_workdir, tmp_path / "run", other, error=WorkdirError)
    refused("seeds", prepare_workdir, tmp_path / "run", config | {"seeds": [0]}, error=WorkdirError)


def test_a_series_of_checkpoints_may_grow(tmp_path):
    config = {"model": str(tmp_path / "checkpoints")}
    (tmp_path / "checkpoints" / "10").mkdir(parents=True)
    prepare_workdir(tmp_path / "run", config)
    (tmp_path / "checkpoints" / "20").mkdir()
    assert prepare_workdir(tmp_path / "run", config) is True


def test_outputs_without_a_config_are_foreign(tmp_path):
    (tmp_path / "model").mkdir()
    refused("holds model but no config.json", prepare_workdir, tmp_path, CONFIG, error=WorkdirError)
    assert not (tmp_path / "config.json").exists()


def test_an_empty_name_is_refused():
    refused("--workdir", prepare_workdir, "", CONFIG, error=WorkdirError)


def test_a_config_of_something_else_than_data_is_refused(tmp_path):
    refused("not plain data", prepare_workdir, tmp_path, {"function": print}, error=TypeError)
    assert flatten_config(plain({"a": {"b": {}}, "c": float("inf")})) == {"a.b": {}, "c": "inf"}


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", "[]", "config.json is malformed: it holds a list"),
    ("config.json", '{"a": ' * 100_000, "config.json: not JSON"),
    ("config.json", '{"steps": ' + "9" * 5000 + "}", "config.json: not JSON"),
    ("config.json", "\xff", "config.json is no text"),
    ("inputs.json", "7", "inputs.json is malformed: it holds a int"),
    ("results.json", "[]", "results.json is malformed: it holds a list"),
    ("results.json", "{}", "results.json is empty: remove it"),
])  # fmt: skip
def test_a_damaged_file_is_one_line(tmp_path, name, content, message):
    prepare_workdir(tmp_path, CONFIG)
    (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(WorkdirError, match=message) as bad:
        prepare_workdir(tmp_path, CONFIG)
        finished(tmp_path)
    assert (
        "\n" not in str(bad.value) and "another --workdir" in str(bad.value) or "empty" in message
    )


def test_no_link_is_followed_in_writing(tmp_path):
    """A file outside does not change if the directory has a link to it."""
    (tmp_path / "mine").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("command.txt", "config.json", "inputs.json", "versions.json"):
        (run / name).symlink_to(tmp_path / "mine")
    for name in ("config.json", "inputs.json"):
        (run / name).unlink()
    prepare_workdir(run, CONFIG)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not any(path.is_symlink() for path in run.iterdir())
    assert finished(run) is None
