"""What CONTRIBUTING.md says a new piece costs: its diffs, applied to a copy of the tree and run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tiny_models import REPOSITORY, TEXT, save_tiny

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.paths import flatten


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of what runs, with every diff of CONTRIBUTING.md in it."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("ffn_heterogeneity", "configs", "scripts", "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
    diffs = re.findall(r"```diff\n(.*?)```", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.S)
    assert len(diffs) == 8, "a loss, a probe, a task, a head, an objective, ... a table"
    for diff in (part for each in diffs for part in re.split(r"(?m)^(?=--- )", each) if part):
        command = ["git", "apply", "--recount", "-"]
        done = subprocess.run(command, input=diff, cwd=root, text=True, capture_output=True)
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    save_tiny(root / "tiny")
    (root / "text.txt").write_text(TEXT)
    return root


def run(copy, script, *flags) -> None:
    command = [sys.executable, f"scripts/{script}.py", *flags]
    environment = os.environ | {"PYTHONPATH": str(copy), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_loss_and_a_probe(copy):
    run(
        copy, "train", "--config=configs/nucl_finetune.py:tiny,text,l1", "--workdir=run",
        "--config.data.path=text.txt", "--config.data.validation_path=text.txt",
        "--config.data.validation_fraction=0", "--config.losses.l1.weight=0.5", "--config.steps=2",
        "--config.batch_size=2", "--config.seq_len=16", "--config.eval.max_batches=1",
        "--config.tensorboard=false",
    )  # fmt: skip
    rows = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = next(row for row in rows if "train/l1" in row)
    assert 0.1 < trained["train/l1"] < 0.3, "a normal deviation of 0.25 has the mean 0.2"
    parts = trained["train/nll"] + trained["train/nucl"] + 0.5 * trained["train/l1"]
    assert trained["train/loss"] == pytest.approx(parts, rel=1e-5)
    lengths = next(row for row in rows if "validation/nll" in row)["validation/lengths/mean"]
    assert len(lengths) == 4 and min(lengths) > 0


def test_a_task(copy):
    """The new task trains, and its questions are answered and scored."""
    rows = [{"riddle": f"what is {i} and one", "solution": str(i + 1)} for i in range(40)]
    (copy / "data" / "riddles").mkdir(parents=True)
    for name in ("train", "validation"):
        lines = [json.dumps(row) for row in rows[: 40 if name == "train" else 3]]
        (copy / "data" / "riddles" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    run(
        copy, "train", "--config=configs/nucl_finetune.py:tiny,riddles,gain", "--workdir=solved",
        "--config.data.path=data/riddles/train.jsonl", "--config.steps=2", "--config.batch_size=2",
        "--config.seq_len=64", "--config.tensorboard=false", "--config.optimizer.learning_rate=1",
        "--config.data.validation_fraction=0.1", "--config.eval.max_batches=1",
    )  # fmt: skip
    # (Without its structure: nobody outside of the copy knows the adapter.)
    shutil.rmtree(copy / "solved" / "model" / "structure")
    told = json.loads((copy / "solved" / "model" / "config.json").read_text())
    del told["ffn_heterogeneity"]
    (copy / "solved" / "model" / "config.json").write_text(json.dumps(told))
    before, after = (flatten(load_model(copy / x).params) for x in ("tiny", "solved/model"))
    down, attention = (f"stack/segment_0/slot_0/{x}/kernel" for x in ("ffn/down", "attention/out"))
    gains = after[down] / before[down]
    np.testing.assert_allclose(gains, np.broadcast_to(gains[:, :1], gains.shape), rtol=1e-4)
    assert np.ptp(gains) > 0.01
    np.testing.assert_array_equal(after[attention], before[attention])
    run(
        copy, "evaluate", "--config=configs/answers.py", "--config.model=tiny",
        "--config.data_root=data", "--config.tasks=('riddles',)", "--config.max_new_tokens=2",
        "--workdir=answers",
    )  # fmt: skip
    scored = json.loads((copy / "answers" / "results.json").read_text())["tasks"]["riddles"]
    assert scored["n"] == 3 and scored["accuracy"] == 0


def contracts(copy, *chosen) -> None:
    """The tests of the copy itself, with the pieces in it."""
    environment = os.environ | {"PYTHONPATH": str(copy), "CI": "", "RUN_SLOW": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_the_new_pieces_meet_their_contracts(copy):
    picked = (
        "l1 or norms or largest or gain or (config and (nucl_finetune or topics)) or docstrings"
    )
    files = ("contracts", "slips", "adapter_contract", "architecture")
    contracts(copy, *(f"tests/test_{name}.py" for name in files), "tests/surgery/test_walk.py",
              f"-k={picked}")  # fmt: skip


@pytest.mark.slow
def test_everything_else_is_as_it_was(copy):
    contracts(copy, "tests/test_contracts.py", "tests/test_slips.py", "tests/test_architecture.py",
              "tests/test_adapter_contract.py", "tests/surgery", "tests/losses", "tests/data",
              "tests/scripts/test_typos.py")  # fmt: skip


def test_an_objective_and_a_head(copy):
    """Texts of the alphabet's two halves are told apart; the head is pruned with its model."""
    rng = np.random.default_rng(0)
    for name, count in (("train", 64), ("held_out", 9)):
        rows = []
        for i in range(count):
            letters = "abcdefghijklm" if i % 2 else "nopqrstuvwxyz"
            rows.append({"text": "".join(rng.choice(list(letters), 12)), "label": i % 2})
        lines = [json.dumps(row) for row in rows]
        (copy / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    task = (
        "--config.data.path=train.jsonl", "--config.data.validation_path=held_out.jsonl",
        "--config.seq_len=16", "--config.batch_size=8",
    )  # fmt: skip
    run(
        copy, "train", "--config=configs/topics.py:tiny", "--workdir=topics", *task,
        "--config.steps=60", "--config.optimizer.learning_rate=1e-2",
        "--config.optimizer.warmup_steps=0", "--config.tensorboard=false",
    )  # fmt: skip
    final = json.loads((copy / "topics" / "results.json").read_text())["final"]
    assert final["validation/accuracy"] == 1.0 and final["validation/classification"] < 0.3
    run(copy, "compress", "--config.model=topics/model", "--workdir=thin")
    run(copy, "evaluate", "--config=configs/topics.py:thin/model", "--workdir=scored", *task)
    assert json.loads((copy / "scored" / "results.json").read_text())["validation/accuracy"] > 0.5


def test_a_criterion(copy):
    run(copy, "compress", "--config.model=tiny", "--config.criterion=largest", "--workdir=pruned")
    results = json.loads((copy / "pruned" / "results.json").read_text())
    assert [len(layer) for layer in results["removed"]] == [6, 6, 6, 6]


def test_a_table(copy):
    run(
        copy, "sweep", "--config=configs/prune_table.py", "--sweep=halves", "--workdir=halves",
        "--config.model=tiny", "--config.text=text.txt", "--config.window=16",
        "--config.max_windows=1",
    )  # fmt: skip
    run(copy, "report", "--paper=nucl", "halves", "--out=tables")
    rows = (copy / "tables" / "what_went.csv").read_text().splitlines()
    assert "parameters" in rows[0] and len(rows) > 1
