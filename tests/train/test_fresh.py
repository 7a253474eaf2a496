"""Pre-training: a new model of a config's shape, with and without JREG."""

import json

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params, save_tiny
from tiny_runs import refused

from ffn_heterogeneity.io.load import load_model, load_tokenizer
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.source import found_shapes, starting_model
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
SHAPE = {"layers": 3, "d_model": 16, "ffn_width": 24, "n_heads": 2, "vocab_size": 260}
TINY = {f"shape__{key}": value for key, value in SHAPE.items()}
TINY |= {"data__task": "text", "data__validation_fraction": 0.2, "data__passage_chars": 400}
TINY |= {"steps": 6, "batch_size": 4, "accumulation": 2, "seq_len": 24, "tensorboard": False}
TINY |= {"eval__every": 3, "eval__max_batches": 2, "checkpoint__every": 0}
TINY["optimizer__warmup_steps"] = 2


@pytest.fixture
def files(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    lines = [f"sentence {i}: the quick brown fox number {i * i}" for i in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    paths = {"tokenizer": str(tmp_path / "tokenizer"), "data__path": str(tmp_path / "text.txt")}
    return paths | TINY


def total_of(config) -> int:
    model, _ = found_shapes(read(config).source)
    return count_parameters(model.config)["total"]


@pytest.mark.parametrize(
    ("size", "untied", "tied"),
    [("170m", 134.1, 109.5), ("134m", 134.1, 109.5), ("1b", 928, 862), ("3_4b", 3590, 3500)],
)
def test_the_papers_sizes(size, untied, tied):
    """Millions of parameters; the sizes in the paper's names are neither of the two counts."""
    for value, millions in ((False, untied), (True, tied)):
        config = config_of("jreg_pretrain", size, shape__tied=value)
        total = total_of(config) / 1e6
        assert total == pytest.approx(millions, rel=2e-3)


def test_a_new_model_is_the_seeds(files):
    configs = [config_of("jreg_pretrain", "local", **files, seed=s) for s in (0, 0, 1)]
    made = [starting_model(read(config).source, None) for config in configs]
    first, again, other = (flatten(model.params) for model in made)
    assert all(isinstance(leaf, np.ndarray) for leaf in first.values())
    assert all((leaf == again[path]).all() for path, leaf in first.items())
    assert any((leaf != other[path]).any() for path, leaf in first.items())
    assert made[0].config.bos_id == 0 and made[0].config.eos_id == 1
    assert made[0].config.max_position >= 2048
    assert "new 3x16/24" in made[0].source
    assert np.std(first["embed/embedding"]) == pytest.approx(0.02, rel=0.1)


def test_baseline_and_jreg_from_text(files, tmp_path):
    models = {}
    for name, weight in (("baseline", 0.0), ("jreg", 1.0)):
        config = config_of("jreg_pretrain", "local", **files, losses__jreg__weight=weight)
        results = training.run(config, tmp_path / name)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        checked = [row for row in rows if "validation/nll" in row]
        assert [row["step"] for row in checked] == [0, 3, 6]
        for row in checked:
            psi = row["validation/jreg/psi"]
            rises = [max(0.0, b - a) for a, b in zip(psi[:-1], psi[1:], strict=True)]
            assert len(psi) == 3
            assert row["validation/jreg/zeta_L"] == pytest.approx(100 * rises[-1], abs=1e-4)
            assert row["validation/jreg/zeta_L-1"] == pytest.approx(100 * sum(rises), abs=1e-4)
            after = row["validation/jreg_after_norm/psi"]
            assert after[:-1] == psi[:-1], "only the last layer's displacement has two readings"
            # A new model's final norm scales no channel, which leaves every angle as it was.
            same = after[-1] == pytest.approx(psi[-1], rel=1e-5)
            assert same == (row["step"] == 0), row["step"]
        # A weight of 0 is a baseline that reports jumps, in training as well.
        trained = [row for row in rows if "train/loss" in row]
        assert len(trained) == 6
        assert all(row["train/losses.jreg.weight"] == weight for row in trained)
        assert all((row["train/loss"] == row["train/nll"]) == (weight == 0) for row in trained)
        assert results["parameters"] == total_of(config)
        models[name] = load_model(tmp_path / name / "model")
    for path, leaf in flatten(models["baseline"].params).items():
        assert (leaf != flatten(models["jreg"].params)[path]).any(), path
    # The same data and the same start, and the paper's loss: CE + lambda * sum_l w_l Psi_l.
    first = [read_metrics(tmp_path / name / "metrics.jsonl") for name in models]
    nll = [next(row["train/nll"] for row in rows if "train/nll" in row) for rows in first]
    assert nll[0] == pytest.approx(nll[1], rel=1e-6)
    row = next(row for row in first[1] if "train/jreg" in row)
    row = {key.removeprefix("train/"): value for key, value in row.items()}
    weights = np.exp(np.arange(3)) / np.exp(np.arange(3)).sum()
    assert row["jreg"] == pytest.approx(float(weights @ np.array(row["jreg/psi"])), rel=1e-5)
    assert row["loss"] == pytest.approx(row["nll"] + row["jreg"], rel=1e-6)


def test_going_on_from_a_model(files, tmp_path):
    config = config_of("jreg_pretrain", "local", **files, model=str(save_tiny(tmp_path / "model")))
    model = starting_model(read(config).source, None)
    assert model.config.n_layers == LLAMA.n_layers
    assert (jax.tree.leaves(model.params)[0] == jax.tree.leaves(random_params(LLAMA))[0]).all()


def test_a_dry_run_plans_it(files, tmp_path, capsys):
    config = config_of("jreg_pretrain", "1b", dry_run="h200:8", mesh__fsdp=8)
    training.run(config, tmp_path / "plan")
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["parameters"] == total_of(config)
    assert "928" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": ""}, "tokenizer is empty: a new model needs one"),
        ({"shape__vocab_size": 200}, "ids up to 257, but model of shape.vocab_size=200 has"),
        ({"shape__n_heads": 3}, "shape.d_model=16 must be a multiple of shape.n_heads=3"),
        ({"shape__layers": 0}, "shape.layers=0 must be a number in"),
        ({"losses__jreg__weight": -1.0}, "losses.jreg.weight=-1.0 must be a number in"),
        ({"losses__jreg__alpha": -1.0}, "losses.jreg: alpha=-1.0 must be a number in"),
        ({"losses__jreg__positions": "first"}, "positions='first'"),
    ],
)
def test_what_cannot_be(files, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        training.run(config_of("jreg_pretrain", "local", **{**files, **changes}), tmp_path / "run")
    refused("choose one of 170m", config_of, "jreg_pretrain", "7b")


def test_a_tokenizer_alone(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    assert len(load_tokenizer(tmp_path / "tokenizer")) == 258
    (tmp_path / "nothing").mkdir()
    refused("holds no tokenizer", load_tokenizer, tmp_path / "nothing")
