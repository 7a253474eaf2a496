"""The diffs of CONTRIBUTING.md for new pieces, applied to a copy of the tree and run."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from tiny_models import REPOSITORY, TEXT, save_tiny
from tiny_runs import flags_of, read_rows, run_program, write_rows

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.tree import flatten

SMALL = {"steps": 2, "batch_size": 2, "eval.max_batches": 1, "tensorboard": "false"}


# Each of these diffs gets a separate tree, because it and an adapter's diff change one line.
ALONE = ("families/seed_oss.py", "surgery/weaken.py")


def with_diffs(root, alone: bool):
    """A copy of the code with the diffs of CONTRIBUTING.md, or with those of `ALONE`."""
    for name in ("ffn_heterogeneity", "configs", "scripts", "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
    diffs = re.findall(r"```diff\n(.*?)```", (REPOSITORY / "CONTRIBUTING.md").read_text(), re.S)
    assert len(diffs) == 11, "a loss, a probe, a task, a head, an objective, ... a table"
    for diff in diffs:
        if any(name in diff for name in ALONE) == alone:
            done = run_program("git", "apply", "-", cwd=root, given=diff)
            assert done.code == 0, f"{done.err}\n{diff}"
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    save_tiny(root / "tiny")
    (root / "text.txt").write_text(TEXT)
    return root


# Scripts one after another in one process, which imports JAX once.
SCRIPTS = """
import json, sys
sys.path.insert(0, "tests")
from tiny_models import run_script
for name, *flags in json.loads(sys.argv[1]):
    done = run_script(name, *flags)
    assert done.code == 0, (name, done.out, done.err)
"""
HALVES = {"data.path": "train.jsonl", "data.validation_path": "held_out.jsonl"}
HALVES |= {"seq_len": 16, "batch_size": 8}


def run(copy, *commands, program=SCRIPTS) -> None:
    environment = {"PYTHONPATH": str(copy), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = (sys.executable, "-c", program, json.dumps(commands))
    done = run_program(*command, cwd=copy, **environment)
    assert done.code == 0, (done.out + done.err)[-4000:]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree with the diffs, after the commands whose results the tests check."""
    copy, rng = with_diffs(tmp_path_factory.mktemp("copy"), False), np.random.default_rng(0)
    for name, count in (("train", 64), ("held_out", 9)):
        letters = [list(("nopqrstuvwxyz", "abcdefghijklm")[i % 2]) for i in range(count)]
        texts = ["".join(rng.choice(each, 12)) for each in letters]
        rows = [{"text": text, "label": i % 2} for i, text in enumerate(texts)]
        write_rows(copy / f"{name}.jsonl", rows)
    rows = [{"riddle": f"what is {i} and one", "solution": str(i + 1)} for i in range(40)]
    for name, few in (("train", rows), ("validation", rows[:3])):
        write_rows(copy / f"data/riddles/{name}.jsonl", few)
    (copy / "held_out.txt").write_text((copy / "text.txt").read_text())
    text = {"data.path": "text.txt", "data.validation_path": "held_out.txt"}
    text |= SMALL | {"data.validation_fraction": 0, "seq_len": 16, "losses.l1.weight": 0.5}
    solved = {"data.path": "data/riddles/train.jsonl", "data.validation_fraction": 0.1}
    solved |= SMALL | {"seq_len": 64, "optimizer.learning_rate": 1}
    asked = {"model": "tiny", "data_root": "data", "tasks": ("riddles",), "max_new_tokens": 2}
    topics = {"steps": 60, "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 0}
    topics |= HALVES | {"tensorboard": "false"}
    halves = {"model": "tiny", "text": "text.txt", "window": 16, "max_windows": 1}
    largest = ("--config.model=tiny", "--config.criterion=largest")
    run(
        copy,
        ("train", *flags_of("configs/nucl_finetune.py:tiny,text,l1", "run", **text)),
        ("train", *flags_of("configs/nucl_finetune.py:tiny,riddles,gain", "solved", **solved)),
        ("evaluate", *flags_of("configs/answers.py", "answers", **asked)),
        ("train", *flags_of("configs/topics.py:tiny", "topics", **topics)),
        ("compress", "--config.model=topics/model", "--workdir=thin"),
        ("evaluate", *flags_of("configs/topics.py:thin/model", "scored", **HALVES)),
        ("compress", *largest, "--workdir=pruned"),
        ("sweep", *flags_of("configs/prune_table.py", "halves", **halves), "--sweep=halves"),
        ("report", "--paper=nucl", "halves", "--out=tables"),
    )
    return copy


def test_a_loss_and_a_probe(copy):
    rows = read_rows(copy / "run" / "metrics.jsonl")
    trained = next(row for row in rows if "train/l1" in row)
    assert 0.1 < trained["train/l1"] < 0.3, "a normal deviation of 0.25 has the mean 0.2"
    parts = trained["train/nll"] + trained["train/nucl"] + 0.5 * trained["train/l1"]
    assert trained["train/loss"] == pytest.approx(parts, rel=1e-5)
    lengths = next(row for row in rows if "validation/nll" in row)["validation/lengths/mean"]
    assert len(lengths) == 4 and min(lengths) > 0


def test_a_task(copy):
    """The new task trains, and its questions are answered and scored."""
    # (Without its structure: only the copy knows the adapter.)
    shutil.rmtree(copy / "solved" / "model" / "structure")
    config = json.loads((copy / "solved" / "model" / "config.json").read_text())
    del config["ffn_heterogeneity"]
    (copy / "solved" / "model" / "config.json").write_text(json.dumps(config))
    before, after = (flatten(load_model(copy / x).params) for x in ("tiny", "solved/model"))
    down, attention = (f"stack/segment_0/slot_0/{x}/kernel" for x in ("ffn/down", "attention/out"))
    gains = after[down] / before[down]
    np.testing.assert_allclose(gains, np.broadcast_to(gains[:, :1], gains.shape), rtol=1e-4)
    assert np.ptp(gains) > 0.01
    np.testing.assert_array_equal(after[attention], before[attention])
    scored = json.loads((copy / "answers" / "results.json").read_text())["tasks"]["riddles"]
    assert scored["n"] == 3 and scored["accuracy"] == 0


CONTRACTS = ("contracts", "slips", "adapter_contract", "architecture")


def contracts(copy, *chosen, flags=()) -> None:
    """The tests of the copy, with the new pieces."""
    files = [f"tests/{name}" for name in (*(f"test_{x}.py" for x in CONTRACTS), *chosen)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *flags]
    done = run_program(*command, cwd=copy, PYTHONPATH=str(copy), CI="", RUN_SLOW="0")
    assert done.code == 0, (done.out + done.err)[-4000:]


def test_the_new_pieces_meet_their_contracts(copy):
    picked = "l1 or norms or largest or gain or docstrings"
    picked += " or (config and (nucl_finetune or topics))"
    contracts(copy, "surgery/test_walk.py", flags=[f"-k={picked}"])


@pytest.mark.slow
def test_everything_else_is_as_it_was(copy):
    contracts(copy, "surgery", "losses", "data", "scripts/test_typos.py")


def test_an_objective_and_a_head(copy):
    """The head separates texts of the alphabet's two halves, and stays when its model is pruned."""
    final = json.loads((copy / "topics" / "results.json").read_text())["final"]
    assert final["validation/accuracy"] == 1.0 and final["validation/classification"] < 0.3
    assert json.loads((copy / "scored" / "results.json").read_text())["validation/accuracy"] > 0.5


def test_a_criterion(copy):
    results = json.loads((copy / "pruned" / "results.json").read_text())
    assert [len(layer) for layer in results["removed"]] == [6, 6, 6, 6]


LEAF = """
import dataclasses
import jax, numpy as np
import ffn_heterogeneity as fh
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.leaves import count_parameters, declared
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.tree import flatten

model = fh.load_model("tiny")
config = dataclasses.replace(model.config, head_scales=True)
params = causal_lm.init(config, jax.random.key(0))
path = "stack/segment_0/slot_0/attention/scales"
assert (flatten(params)[path] == np.ones((4, 4))).all()
leaves = declared(config, params)
assert partition.trainable_mask(leaves)[path] and not leaves[path].decays
assert flatten(partition.shardings(partition.make_mesh(), params, leaves))[path]
more = count_parameters(config)["total"] - count_parameters(model.config)["total"]
assert more == 4 * 4
batch = {"tokens": np.arange(9)[None]}
states = lambda params: causal_lm.forward(config, params, batch)["hidden"]
halved = params | {"stack": jax.tree.map_with_path(
    lambda path, x: x / 2 if "scales" in str(path) else x, params["stack"])}
assert np.abs(states(halved) - states(params)).max() > 1e-4
scaled = dataclasses.replace(model, config=config, params=params)
smaller, _ = fh.prune(scaled, criterion="entropy", ratio=0.5)
assert flatten(smaller.params)[path].shape == (4, 4)
for options in ({}, {"export": "native"}):
    try:
        fh.save_model(scaled, "scaled", **options)
        raise SystemExit("it was written")
    except ConfigError as error:
        assert "layers/0/attention/scales" in str(error), error
"""


def test_a_leaf(copy):
    """One declaration: it is initialised, trained, sharded, counted, kept; export rejects it."""
    run(copy, program=LEAF)


def test_a_table(copy):
    rows = (copy / "tables" / "what_remains.csv").read_text().splitlines()
    assert "Entropy-based" in rows[0] and len(rows) > 1


TWO = """
import sys
import numpy as np, torch, transformers
import ffn_heterogeneity as fh
from ffn_heterogeneity.surgery import SURGERIES

sizes = dict(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=10)
sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
theirs = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**sizes)).eval()
with torch.no_grad():
    for name, leaf in theirs.named_parameters():
        leaf.copy_(torch.randn_like(leaf) * 0.2 + ("norm" in name))
theirs.save_pretrained("theirs")
ids = np.arange(18).reshape(2, 9) * 3
logits = lambda: theirs(torch.tensor(ids)).logits.detach().numpy()
model = fh.load_model("theirs")
np.testing.assert_allclose(model(ids), logits(), atol=1e-4)
fh.save_model(model, "back")
again = transformers.AutoModelForCausalLM.from_pretrained("back")
assert type(again) is type(theirs)
np.testing.assert_array_equal(again(torch.tensor(ids)).logits.detach().numpy(), logits())
weaker, _ = SURGERIES["weaken"](model, {"factor": 0.25})
with torch.no_grad():
    for layer in theirs.model.layers:
        layer.mlp.down_proj.weight.mul_(0.25)
np.testing.assert_allclose(weaker(ids), logits(), atol=1e-4)
"""


def test_a_family_and_a_surgery(tmp_path, torch):
    root = with_diffs(tmp_path / "copy", True)
    command = ("compress", "--config=weaken", "--config.model=tiny", "--workdir=run")
    run(root, command, program=TWO + SCRIPTS)
    assert json.loads((root / "run/results.json").read_text())["factor"] == 0.5
