"""A head, metrics of whole predictions and a refresh, from outside the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import LLAMA, REPOSITORY, free_address, save_tiny

from ffn_heterogeneity.evaluate.metrics import cb
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.paths import flatten

PROGRAM = Path(__file__).with_name("objective_program.py")
PLACES = f"{REPOSITORY}{os.pathsep}{REPOSITORY / 'tests'}"
WORDS = ("entailment", "contradiction", "neutral")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("objective")
    save_tiny(root / "model")
    rng = np.random.default_rng(0)
    kinds = [(word, "abc"[i]) for i, word in enumerate(WORDS)]
    rows = [{"prompt": letter * int(rng.integers(3, 9)) + "?", "response": word}
            for word, letter in (kinds[i] for i in rng.integers(0, 3, 60))]  # fmt: skip
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def run(files, workdir, ways=("alone",), stop=0):
    running = [
        subprocess.Popen(
            [sys.executable, PROGRAM, files, workdir, way, str(stop)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PLACES},
            stderr=subprocess.PIPE, text=True,
        )
        for way in ways
    ]  # fmt: skip
    ended = [process.communicate(timeout=240)[1] for process in running]
    return [process.returncode for process in running], ended


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    codes, errors = run(files, workdir)
    assert codes == [0], errors
    return workdir


@pytest.mark.slow
def test_macro_f1_over_the_whole_held_out_part(files, alone):
    results = json.loads((alone / "results.json").read_text())
    first, last = results["first"], results["final"]
    assert first["validation/rows"] == last["validation/rows"] == 18
    assert last["validation/classes"] < first["validation/classes"]
    best = max(row["validation/macro_f1"] for row in results["history"])
    assert results["best"]["value"] == best >= last["validation/macro_f1"]
    # A share of the 18 rows, of which no batch of four holds as many.
    right = 18 * last["validation/accuracy"]
    assert right == pytest.approx(round(right), abs=1e-9) and right > 6


def test_the_head_is_kept_and_the_refresh_never_stored(files, alone):
    before, after = load_model(files / "model"), load_model(alone / "model")
    assert after.params["task_head"]["kernel"].shape == (LLAMA.d_model, 3)
    moved = after.params["embed"]["embedding"] / before.params["embed"]["embedding"]
    assert np.abs(moved - 1).max() < 0.5 and np.std(moved) > 0, "moved by steps, not by the noise"
    assert set(flatten(after.params)) - set(flatten(before.params)) == {
        "task_head/kernel", "task_head/bias"}  # fmt: skip


def same(one, other, bound):
    one, other = (read_metrics(x / "metrics.jsonl") for x in (one, other))
    assert [row["step"] for row in one] == [row["step"] for row in other]
    for a, b in zip(one, other, strict=True):
        for key in {k for k in a if k.startswith(("validation/", "train/loss"))}:
            assert abs(a[key] - b[key]) <= bound * abs(a[key]), (key, a["step"])


@pytest.mark.slow
def test_two_processes_are_one(files, alone, tmp_path):
    address = free_address()
    codes, errors = run(files, tmp_path / "two", [f"{address},2,{i}" for i in range(2)])
    assert codes == [0, 0], errors
    same(alone, tmp_path / "two", 2e-5)


@pytest.mark.slow
def test_killed_and_resumed(files, alone, tmp_path):
    assert run(files, tmp_path / "run", stop=3)[0] == [-9]
    codes, errors = run(files, tmp_path / "run")
    assert codes == [0], errors
    same(alone, tmp_path / "run", 0)
    one, other = (flatten(load_model(x / "model").params) for x in (alone, tmp_path / "run"))
    for path, leaf in one.items():
        assert leaf.tobytes() == other[path].tobytes(), path


def test_f1_does_not_add_up():
    """What the batches' own scores would have averaged to is another number."""
    said, meant = list("ecneceec"), list("ecnnceen")
    words = {"e": WORDS[0], "c": WORDS[1], "n": WORDS[2]}
    said, meant = ([words[x] for x in one] for one in (said, meant))
    parts = [cb(said[i : i + 4], meant[i : i + 4])["macro_f1"] for i in (0, 4)]
    assert abs(np.mean(parts) - cb(said, meant)["macro_f1"]) > 0.05
