"""LoRA on SmolLM2-135M, 20 steps on rows of Alpaca: changed leaves, saved files, five kills."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tiny_models import REPOSITORY
from tiny_runs import flags_of

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.slow
STEPS, SAVES = 20, 10


def start(model, data, workdir) -> subprocess.Popen:
    keys = {"data.path": data, "data.validation_fraction": 0.02, "steps": STEPS, "batch_size": 2}
    keys |= {"seq_len": 64, "dropout": 0.0, "losses.nucl.weight": 0.0, "eval.every": 10}
    keys |= {"eval.max_batches": 2, "checkpoint.every": STEPS // SAVES, "checkpoint.keep": SAVES}
    keys |= {"checkpoint.keep_best": False, "optimizer.learning_rate": 1e-3, "lora.rank": 8}
    keys |= {"optimizer.warmup_steps": 0, "tensorboard": False}
    flags = flags_of(f"configs/nucl_finetune.py:{model},jsonl,lora", workdir, **keys)
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    options = {"cwd": REPOSITORY, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    return subprocess.Popen([sys.executable, "scripts/train.py", *flags], **options, **pipes)


@pytest.fixture(scope="module")
def places(smollm2_gguf, shared_data, tmp_path_factory):
    """(the run's directory, the arguments that start it)."""
    workdir = tmp_path_factory.mktemp("lora") / "run"
    arguments = smollm2_gguf, shared_data / "alpaca_gpt4_en" / "train.jsonl"
    process = start(*arguments, workdir)
    error = process.communicate()[1]
    assert process.returncode == 0, error
    return workdir, arguments


def leaves(directory):
    return flatten(unstack(load_model(directory).params))


def size(folder) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_only_the_adapter_moves(places):
    workdir, (model, _) = places
    before, after = leaves(model), leaves(workdir / "model")
    assert all(leaf.tobytes() == after[path].tobytes() for path, leaf in before.items())
    more = set(after) - set(before)
    assert len(more) == 30 * 7 * 3 and all("/lora_" in path for path in more)
    assert all(np.any(after[path]) for path in more if path.endswith("lora_b"))
    rows = read_metrics(workdir / "metrics.jsonl")
    nll = [row["validation/nll"] for row in rows if "validation/nll" in row]
    assert nll[-1] < nll[0]


def test_ten_saves_hold_the_base_once(places):
    workdir, _ = places
    after = leaves(workdir / "model")
    adapter = sum(leaf.nbytes for path, leaf in after.items() if "/lora_" in path)
    base = sum(leaf.nbytes for path, leaf in after.items() if "/lora_" not in path)
    saves = [path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()]
    assert len(saves) == SAVES
    written = size(workdir / "checkpoints") + size(workdir / "checkpoints_frozen")
    assert written <= base + SAVES * 3 * adapter + 10_000_000


def test_merged_is_unmerged(places, tmp_path):
    model = load_model(places[0] / "model")
    tokens = np.asarray([model.tokenizer.encode("Describe a process of making crepes.")])

    def logits(one):
        hidden = causal_lm.forward(one.config, one.params, {"tokens": tokens})["hidden"]
        return np.asarray(causal_lm.logits(one.config, one.params, hidden))

    folded, _ = SURGERIES["fold"].function(model)
    top = np.abs(logits(model)).max()
    np.testing.assert_allclose(logits(folded), logits(model), rtol=0, atol=1e-5 * top)
    save_pretrained(model.config, model.params, tmp_path / "kept", structure="keep")
    again = flatten(load_model(tmp_path / "kept").params)
    for path, leaf in flatten(model.params).items():
        assert leaf.tobytes() == again[path].tobytes(), path


def test_five_kills_change_nothing(places, tmp_path):
    workdir, arguments = places
    rng, other = np.random.default_rng(0), tmp_path / "run"
    lives = 0
    while not (other / "results.json").exists():
        process = start(*arguments, other)
        if lives < 5:
            saved = len(list((other / "checkpoints").glob("[0-9]*"))) if other.exists() else 0
            while process.poll() is None and (
                len(list((other / "checkpoints").glob("[0-9]*"))) <= saved
            ):
                time.sleep(0.05)
            time.sleep(rng.uniform(0, 2))
            process.send_signal(signal.SIGKILL)
        lives += 1
        error = process.communicate()[1]
        assert process.returncode in (0, -9), error
    assert lives == 6
    one, two = (leaves(place / "model") for place in (workdir, other))
    assert all(leaf.tobytes() == two[path].tobytes() for path, leaf in one.items())
    losses = [
        [row["train/loss"] for row in read_metrics(place / "metrics.jsonl") if "train/loss" in row]
        for place in (workdir, other)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
