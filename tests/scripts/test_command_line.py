"""Every script's command line: help, flags, and one clear line for a user's mistake."""

import errno
import json
import os
import re
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import LLAMA, REPOSITORY, random_params, run_script
from tiny_runs import flags_of, run_program

from ffn_heterogeneity.data.tasks import tasks
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.launch import cli
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.models.stack import unstack

pytestmark = pytest.mark.usefixtures("compiled_quickly")
SCRIPTS = sorted(path.stem for path in (REPOSITORY / "scripts").glob("*.py"))
WITH_CONFIG = ["analyze", "benchmark", "compress", "evaluate", "prepare_data", "sweep", "train"]
TRAIN = {"steps": 2, "batch_size": 2, "seq_len": 16, "eval.max_batches": 1}
TRAIN |= {"data.validation_fraction": 0.2, "data.passage_chars": 500}
PLACES = {"convert": "--output", "report": "--output", "fetch_models": "--directory"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_shows_an_example_the_flags_and_the_config(name):
    """Only existing flags; keys by group (ungrouped ones first), in 80 columns, with comments."""
    done = run_script(name, "--help")
    assert done.code == 0 and done.err == "", done
    assert f"python scripts/{name}.py" in done.out and "Flags:" in done.out
    assert PLACES.get(name, "--workdir") in done.out
    assert ("--config." in done.out.split("Flags:")[1]) == (name in (*WITH_CONFIG, "convert"))
    if name == "compress":
        assert "--config.ratio=0.25" in done.out and "configs/prune.py" in done.out
    example, _, listed = done.out.partition("Flags:")
    assert "Example:" in example
    for flag in re.findall(r"--([\w.]+)", example):
        assert re.search(rf"--{re.escape(flag)}\b", listed), flag
    said = [line for line in listed.splitlines() if not line.startswith("  --")]
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in said)
    keys = re.findall(r"^  --config\.([\w.]+)=", listed, re.M)
    groups = [key.rpartition(".")[0].partition(".")[0] for key in keys]
    assert groups == sorted(groups) and len(set(keys)) == len(keys)
    assert re.findall(r"^Config, (\w+):", listed, re.M) == sorted({*groups} - {""})
    assert not re.search(r"^  --config\.\S+\n  --", listed, re.M), "a key without a comment"


def test_help_of_a_config_of_ones_own(tmp_path, monkeypatch):
    """The file of docs/howto/your-own.md: comments of its keys are shown together with ours."""
    page = (REPOSITORY / "docs" / "howto" / "your-own.md").read_text()
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", page, re.S)[1])
    monkeypatch.setitem(TERMS, "l1", None)  # which the file sets, and which is then deleted
    shown = run_script("train", f"--config={tmp_path / 'mine.py'}:some/model", "-h").out
    assert re.search(r"losses\.l1\.weight=0\.1 +of the mean outgoing weight", shown)
    assert "--config.losses.nucl.variant=" in shown
    tasks().pop("riddles")


def test_compiled_programs_are_kept_unless_the_flag_says_no(monkeypatch, tmp_path):
    wanted = []
    monkeypatch.setattr(cli, "keep_compiled", wanted.append)
    for flag in ([], ["--nocompilation_cache"]):
        assert "nothing" in run_script("report", f"{tmp_path}/nothing", *flag).error
    assert wanted == [True, False]


@pytest.mark.parametrize("name", SCRIPTS)
def test_unknown_flags_and_positional_arguments(name, tmp_path):
    given = ["--model=x", f"--output={tmp_path}/x"] if name == "convert" else []
    assert "nosuchflag" in run_script(name, "--nosuchflag=1", *given).error
    error = run_script(name, *given, "stray").error
    assert "stray" in error


def test_the_benchmarks_name_is_an_argument(monkeypatch, tmp_path):
    from ffn_heterogeneity.bench import run as benchmark

    monkeypatch.setattr(benchmark, "CASES", {"nll": (lambda config, *_: config.to_dict(), {})})
    for i in (0, 1, 3):
        flags = ["--workdir", str(tmp_path / str(i)), "--config.batch=3"]
        arguments = [*flags[:i], "nll", *flags[i:]] if i != 1 else [flags[2], "nll", *flags[:2]]
        assert run_script("benchmark", *arguments).code == 0
        results = json.loads((tmp_path / str(i) / "results.json").read_text())
        assert (results["name"], results["batch"]) == ("nll", 3)
        assert json.loads((tmp_path / str(i) / "config.json").read_text())["name"] == "nll"


def test_broken_config_files(tmp_path):
    path = tmp_path / "mine.py"
    for body, words in [
        ("x = 1\n", ["no get_config"]),
        ("def get_config():\n    raise ValueError('two\\nlines')\n", ["two lines"]),
    ]:
        path.write_text(body)
        error = run_script("compress", f"--config={path}", f"--workdir={tmp_path / 'run'}").error
        assert all(word in error for word in words), error


def test_the_traceback_is_there_for_the_asking(tmp_path):
    done = run_script("compress", "--traceback", f"--workdir={tmp_path / 'run'}")
    assert done.code == 2 and "Traceback" in done.err and "launch/compress.py" in done.err


def test_other_errors_keep_their_traceback(monkeypatch, tmp_path):
    from ffn_heterogeneity.evaluate.run import EVALUATIONS

    broken = EVALUATIONS["connectivity"]._replace(measure=lambda *_: 1 / 0, loads=False)
    monkeypatch.setitem(EVALUATIONS, "connectivity", broken)
    with pytest.raises(ZeroDivisionError):
        run_script("analyze", "--config.model=x", f"--workdir={tmp_path / 'run'}")


def test_a_workdir_belongs_to_one_run(model, tmp_path):
    flags = [f"--config.model={model}", f"--workdir={tmp_path / 'run'}"]
    bad = run_script("compress", *flags, "--config.ratio=1.5")
    assert "ratio=1.5 must be a number in [0, 1)" in bad.error
    assert run_script("compress", *flags).code == 0, "the corrected command can use the directory"
    assert run_script("compress", *flags).code == 0, "and may be repeated"
    before = sorted((tmp_path / "run").rglob("*"))
    error = run_script("compress", *flags, "--config.ratio=0.5").error
    assert "holds another run" in error and "ratio: 0.25 there, 0.5 here" in error
    assert "holds another run" in run_script("analyze", *flags).error
    assert "holds another run" in run_script("train", *flags).error
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert json.loads((tmp_path / "run" / "results.json").read_text())["ratio"] == 0.25


def test_a_failed_run_keeps_what_was_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    run_script("compress", "--config.model=nothing", f"--workdir={tmp_path}").error  # noqa: B018
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_values_reach_the_run(model, text, tmp_path):
    settings = {"model": model, "text": text, "window": 16, "max_windows": 3, "bos": "none"}
    done = run_script("evaluate", workdir=tmp_path / "run", **settings)
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["window"], config["max_windows"], config["bos"]) == (16, 3, "none")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["tokens"], results["windows"], results["bos"]) == (48, 3, "none")


def test_from_a_pruned_model_to_its_perplexity(model, text, tmp_path):
    """compress, analyze, evaluate and convert read each other's directories."""
    pruned, wide = tmp_path / "pruned", tmp_path / "wide"
    settings = {"model": model, "layers": "odd", "ratio": 0.75, "workdir": pruned}
    assert run_script("compress", **settings).code == 0
    places = (f"--model={pruned / 'model'}", f"--output={wide}")
    done = run_script("convert", *places, "--dtype=float32", "--export=padded")
    assert done.code == 0, done.err
    nll = {}
    for spec in (model, pruned / "model", wide):
        workdir = tmp_path / f"nll-{len(nll)}"
        settings = {"model": spec, "text": text, "window": 32, "max_windows": 8, "workdir": workdir}
        done = run_script("evaluate", **settings)
        assert done.code == 0, done.err
        nll[str(spec)] = json.loads((workdir / "results.json").read_text())["nll"]
    full, smaller, padded = nll.values()
    assert abs(smaller - padded) < 1e-5 < 1e-3 < abs(full - smaller)
    workdir = tmp_path / "analysis"
    assert run_script("analyze", model=pruned / "model", workdir=workdir).code == 0
    layers = json.loads((workdir / "results.json").read_text())["layers"]
    assert [layer["neurons"] for layer in layers] == [24, 6, 24, 6]


def test_train_from_the_command_line(model, text, tmp_path):
    """Tuples and nested keys by flag; the same command again only reads; another is rejected."""
    workdir = tmp_path / "run"
    settings = TRAIN | {"losses.nucl.variant": "ent", "optimizer.name": "sgd", "dropout": 0}
    settings |= {"data.path": text, "losses.nucl.targets": ("ffn_out", "attention_out")}
    flags = flags_of(f"configs/nucl_finetune.py:{model},text", workdir, **settings)
    flags.append("--noconfig.tensorboard")
    done = run_script("train", *flags)
    assert done.code == 0, done.err
    results = json.loads((workdir / "results.json").read_text())
    assert results["steps"] == 2 and results["losses"] == {"nll": 1.0, "nucl": 1.0}
    assert any("attention_out" in key for key in results["final"])
    stamp = (workdir / "model" / "model.safetensors").stat().st_mtime_ns
    again = run_script("train", *flags)
    assert again.code == 0 and "complete" in again.err
    assert (workdir / "model" / "model.safetensors").stat().st_mtime_ns == stamp
    assert "steps: 2 there, 3 here" in run_script("train", *flags, "--config.steps=3").error
    pruned = run_script("compress", model=workdir / "model", workdir=tmp_path / "pruned")
    assert pruned.code == 0, pruned.err
    short = tmp_path / "short.txt"
    short.write_text("")
    flags += [f"--config.data.path={short}", f"--workdir={tmp_path / 'empty'}"]
    assert "short.txt" in run_script("train", *flags).error
    assert not (tmp_path / "empty").exists()


def process_of(name, *arguments, cwd=REPOSITORY):
    return run_program(sys.executable, REPOSITORY / f"scripts/{name}.py", *arguments, cwd=cwd)


def test_a_real_process_succeeds_from_another_directory(model, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    flags = flags_of(workdir="out", model=model, count=5)
    done = process_of("compress", *flags, cwd=tmp_path)
    assert done.code == 0, done.err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    down = [tree["ffn"]["down"]["kernel"] for tree in unstack(random_params(LLAMA))["layers"]]
    r = np.abs(np.float64(down))
    r /= r.sum(-1, keepdims=True)
    entropy = -(r * np.log(r)).sum(-1)
    assert results["removed"] == np.sort(np.argsort(-entropy, axis=-1)[:, :5]).tolist()
    command = (tmp_path / "out" / "command.txt").read_text()
    assert "scripts/compress.py --workdir=out --config.model=" in command


def test_a_real_process_fails_with_one_line():
    done = process_of("evaluate", "--config.modle=x")
    assert done.code == 2 and done.out == ""
    lines = done.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: unknown config key 'modle', did you")


def test_trouble_that_may_have_passed_has_its_own_code():
    """So that again.sh starts the command again."""

    def code(error, cause=None):
        with pytest.raises(SystemExit) as ended, cli.errors_in_one_line():
            try:
                raise cause or error
            except (OSError, ValueError):
                raise error from None
        return ended.value.code

    tensorstore = ValueError("Error writing: [os_error_code='28']")  # as orbax's threads raise it
    assert code(CheckpointError("not written"), tensorstore) == 1
    for number in (errno.ENOSPC, errno.EIO, errno.ECONNRESET, errno.ESTALE):
        trouble = OSError(number, os.strerror(number))
        assert code(trouble) == 1 and code(CheckpointError("not written"), trouble) == 1
    assert code(TimeoutError("timed out")) == 1
    # Of a hub, of a bucket, of names, and of JAX's processes.
    refusal = type("HfHubHTTPError", (OSError,), {"response": SimpleNamespace(status_code=503)})()
    for trouble in (
        refusal,
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        ValueError("DEADLINE_EXCEEDED: Barrier timed out"),
        ValueError("Error reading: [http_response_code='503']"),
        TimeoutError("barrier"),
    ):
        assert code(CheckpointError("not fetched"), trouble) == 1
    refusal.response.status_code = 404
    assert code(CheckpointError("not fetched"), refusal) == 2
    for mistake in (FileNotFoundError(errno.ENOENT, "no file"), OSError("no model")):
        assert code(mistake) == 2 and code(CheckpointError("not read"), mistake) == 2


def test_answers_are_on_stdout_and_notes_on_stderr(model, text, tmp_path):
    """So `> file` holds every result, and `2> /dev/null` loses none."""
    of = [f"--config.model={model}"]
    small = [*of, *flags_of(window=16, max_windows=2, text=text)]
    train = flags_of(f"configs/nucl_finetune.py:{model},text", **{"data.path": text}, **TRAIN)
    train.append("--noconfig.tensorboard")
    table = [*small, "--config=configs/prune_table.py", "--sweep=criteria", "--only=entropy"]
    commands = {
        "evaluate": (small, ["perplexity "]),
        "analyze": ([*of, "--config=configs/analyze.py:connectivity"], ["| layer", "uniform"]),
        "compress": (small, ["removed", "parameters", "perplexity "]),
        "train": (train, ["validation/nll: "]),
        "sweep": (table, ["removed", ": perplexity "]),
    }
    for name, (flags, expected) in commands.items():
        workdir = tmp_path / name
        done = run_script(name, *flags, f"--workdir={workdir}")
        assert done.code == 0, done.err
        for words in expected:
            assert words in done.out and words not in done.err, (name, done)
        for note in ("work directory", "it/s", "loading", "step 1/", "compiling", str(tmp_path)):
            assert note not in done.out, (name, note)
    again = run_script("train", *train, f"--workdir={tmp_path / 'train'}")
    assert "validation/nll: " in again.out and "complete" in again.err
