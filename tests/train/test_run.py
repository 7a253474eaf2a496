"""The whole trainer on a tiny real model directory and real text; and its config."""

import contextlib
import dataclasses
import json
import runpy
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, card_differs
from tiny_runs import metrics, stop_at_batch

from ffn_heterogeneity.data.corpus.prepare import prepare
from ffn_heterogeneity.data.corpus.shards import check_vocabulary
from ffn_heterogeneity.data.pipeline import make_pipeline
from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.io.checkpoints import Checkpoints
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.workdir import WorkdirError
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses.nucl import layer_statistics
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.parallel.partition import RuleError
from ffn_heterogeneity.train import language
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "nucl_finetune.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(model directory, text file)."""
    root = tmp_path_factory.mktemp("files")
    config = dataclasses.replace(LLAMA, layers=LLAMA.layers[:2])
    params = jax.tree.map(np.asarray, causal_lm.init(config, jax.random.key(0)))
    save_pretrained(config, params, root / "model", tokenizer=byte_tokenizer())
    # Topics of about the same length in every Python.
    text = "\n\n".join(topics[name] for name in ("assert", "assignment", "compound"))
    (root / "text.txt").write_text(text[:20_000])
    return root / "model", root / "text.txt"


def make_config(files, **changes):
    config = runpy.run_path(str(CONFIG))["get_config"](f"{files[0]},text")
    config.data.path = str(files[1])
    config.data.validation_fraction = 0.2
    small = {"steps": 6, "batch_size": 4, "accumulation": 2, "seq_len": 32, "dropout": 0.0}
    small |= {"optimizer.learning_rate": 3e-3, "optimizer.warmup_steps": 2, "tensorboard": False}
    small |= {"eval.every": 3, "eval.max_batches": 2, "losses.nucl.weight": 10.0}
    for key, value in (small | changes).items():
        config.update_from_flattened_dict({key: value})
    return config


@pytest.fixture(scope="module")
def finished(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "a"
    return workdir, training.run(make_config(files), workdir)


def test_a_run_trains_and_exports(files, finished):
    workdir, results = finished
    assert results == json.loads((workdir / "results.json").read_text())
    assert results["final"]["validation/nll"] < results["first"]["validation/nll"]
    assert [row["step"] for row in results["history"]] == [0, 3, 6]
    assert "steps_without_metrics" not in results
    before, after = load_model(str(files[0])), load_model(str(workdir / "model"))
    assert results["parameters"] == sum(x.size for x in flatten(before.params).values())
    assert after.tokenizer.encode("ab") == before.tokenizer.encode("ab")
    for row, model in ((results["first"], before), (results["final"], after)):
        entropy = sum(layer["entropy"] for layer in layer_statistics(model.params))
        rows = sum(model.config.ffn_widths)
        assert row["validation/entropy/ent/ffn_out/mean"] == pytest.approx(entropy / rows)
    start = flatten(before.params)
    assert all(np.any(leaf != start[path]) for path, leaf in flatten(after.params).items())
    assert Checkpoints(workdir / "checkpoints").latest_step() == 6


def test_the_card_says_what_results_json_says(files, finished):
    workdir, results = finished
    assert not card_differs(workdir / "model", results)
    nll = [np.log(results[f"perplexity_{when}"]) for when in ("before", "after")]
    expected = [results[row]["validation/nll"] for row in ("first", "final")]
    np.testing.assert_allclose(nll, expected, rtol=1e-12)
    said = results["protocol"]
    assert said["text"] == "held-out part of text.txt" and said["dtype"] == "float32"
    # Pushed files do not contain local paths.
    written = b"".join(x.read_bytes() for x in (workdir / "model").rglob("*") if x.is_file())
    assert not any(str(place.parent).encode() in written for place in (*files, workdir))
    # Two batches of four rows; each document's first token is not predicted.
    assert said["windows"] == 8 and said["window"] == 32 and 8 * 31 <= said["tokens"] <= 8 * 32
    card = (workdir / "model" / "README.md").read_text()
    assert f"before, {results['perplexity_after']:.3g} after" in card


def test_nucl_lowers_the_entropy(files, finished, tmp_path):
    plain = training.run(make_config(files, **{"losses.nucl.weight": 0.0}), tmp_path / "plain")

    name = "validation/entropy/ent/ffn_out/mean"
    assert finished[1]["final"][name] < plain["final"][name]
    assert plain["first"][name] == finished[1]["first"][name]
    assert finished[1]["final"]["validation/nucl"] < plain["final"]["validation/nucl"]


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path):
    """The error comes before compilation: such an id would be read as NaN."""
    text = tmp_path / "text.txt"
    text.write_text("zeros and ones " * 500)
    config = dataclasses.replace(LLAMA, vocab_size=49_152, layers=LLAMA.layers[:1])
    params = jax.tree.map(np.asarray, causal_lm.init(config, jax.random.key(0)))
    save_pretrained(config, params, tmp_path / "model", tokenizer=byte_tokenizer(z=60_000))
    with pytest.raises(DataError) as error:
        training.run(make_config((tmp_path / "model", text)), tmp_path / "run")
    for words in ("'z'", "60000", "49152", "Use the model's own tokenizer"):
        assert words in str(error.value)


def test_a_special_token_beyond_the_vocabulary_is_refused_where_it_is_used(files, tmp_path):
    """Gemma 3's token for images, for example, has no embedding in its text models."""
    model = load_model(files[0])
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_vocabulary(tokenizer, model.config.vocab_size, "tiny")
    text, shards = tmp_path / "text.txt", tmp_path / "shards"
    for words, refused in (("plain words ", False), ("a picture: <image> ", True)):
        text.write_text(words * 50)
        prepare([str(text)], tokenizer, shards / str(refused))
        for data in ({"path": str(text)}, {"task": "tokens", "path": str(shards / str(refused))}):
            pipeline = make_pipeline(data, tokenizer, 2, 16, 0, vocab_size=258)
            place = "True/shard-000000.tokens, document 1" if "task" in data else "character 0"
            with pipeline_error(refused, place):
                next(pipeline.train_iterator())


def pipeline_error(refused: bool, place: str):
    words = f"{place}: token '<image>', id 258, beyond the model's vocabulary of 258"
    return pytest.raises(DataError, match=words) if refused else contextlib.nullcontext()


def test_a_bad_first_batch_names_its_row_and_gives_the_directory_back(files, tmp_path, capsys):
    import pyarrow
    import pyarrow.parquet

    path, workdir = tmp_path / "rows.parquet", tmp_path / "run"
    texts = ["a text that is long enough"] + [None] * 9  # the first is checked when it is opened
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    workdir.mkdir()
    (workdir / "notes.txt").write_text("mine")
    config = make_config((files[0], path), **{"data.validation_fraction": 0.0})
    with pytest.raises(DataError, match=r"rows.parquet, row \d+: field 'text' is NoneType \(None"):
        training.run(config, workdir)
    assert [child.name for child in workdir.iterdir()] == ["notes.txt"]
    assert "to resume" not in capsys.readouterr().err


def test_a_complete_run_is_only_read(files, finished, capsys):
    workdir, results = finished
    assert training.run(make_config(files), workdir) == results
    assert "complete" in capsys.readouterr().err


def test_an_interrupted_run_ends_with_the_same_numbers(files, finished, tmp_path, monkeypatch):
    stop_at_batch(monkeypatch, 4)
    with pytest.raises(SystemExit) as stop:
        training.run(make_config(files), tmp_path / "b")
    assert stop.value.code == 143 and not (tmp_path / "b" / "results.json").exists()
    results = training.run(make_config(files), tmp_path / "b")
    uninterrupted = finished[1]
    for key in ("history", "best", "steps"):
        assert results[key] == uninterrupted[key], key
    assert metrics(tmp_path / "b") == metrics(finished[0])


NO_SETS = {"data.validation_fraction": 0.0, "losses.nucl.weight": None, "remat": "full"}
GATED = {"losses.nll.reduction": "sum", "losses.nucl.targets": ("ffn_in_gated",)}


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer.name": "adafactor", "dropout": 0.1, "losses.nucl.variant": "ent"},
        {"optimizer.name": "sgd", "freeze": ("^embed/",), "compute_dtype": "bfloat16"},
        pytest.param({**NO_SETS, "unroll": 0}, marks=pytest.mark.slow),
        pytest.param({**GATED, "export.weights": "best"}, marks=pytest.mark.slow),
    ],
)
def test_options(files, tmp_path, changes):
    results = training.run(make_config(files, steps=3, **changes), tmp_path / "x")
    assert results["steps"] == 3
    after, before = load_model(str(tmp_path / "x" / "model")), load_model(str(files[0]))
    start = flatten(before.params)
    same = {path: np.array_equal(x, start[path]) for path, x in flatten(after.params).items()}
    assert same["embed/embedding"] == ("freeze" in changes)
    assert sum(same.values()) == ("freeze" in changes)
    assert (results["final"] is None) == (changes.get("data.validation_fraction") == 0.0)


def test_chosen_steps_are_traced(files, tmp_path, capsys):
    training.run(make_config(files, steps=4, profile="3:4"), tmp_path / "x")
    assert "trace of steps 3 to 3" in capsys.readouterr().err
    assert list((tmp_path / "x" / "profile").rglob("*.xplane.pb"))
    for bad in ("3", "0:2", "3:3", "a:b", "3:6"):
        with pytest.raises(ValueError, match=f"profile='{bad}'"):
            training.run(make_config(files, steps=4, profile=bad), tmp_path / "y")


def test_the_best_weights_are_the_input_where_nothing_was_better(files, tmp_path, capsys):
    changes = {"optimizer.learning_rate": 0.3, "optimizer.warmup_steps": 0, "steps": 1}
    changes["export.weights"] = "best"
    results = training.run(make_config(files, **changes), tmp_path / "x")
    assert results["final"]["validation/nll"] > results["best"]["value"]
    assert results["best"]["step"] == 0
    assert results["perplexity_after"] == results["perplexity_before"]
    # NLLs of whole documents (reduction="sum") have no accuracy, and exp() of them no meaning.
    keys = [key for key in results["history"][0] if not key.endswith("/accuracy")]
    sums = [{key: row[key] for key in keys} for row in results["history"]]
    assert language._perplexities(None, None, results | {"history": sums}) == {}
    assert "no evaluation was better" in capsys.readouterr().err
    before = flatten(load_model(str(files[0])).params)
    for path, leaf in flatten(load_model(str(tmp_path / "x" / "model")).params).items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dropout": 1.0}, ValueError, r"dropout=1.0 must be a number in \[0, 1\)"),
        ({"losses.nucl.weight": -1.0}, ValueError, "losses.nucl.weight=-1.0"),
        ({"losses.nucl.variant": "std"}, ValueError, "variant='std'"),
        ({"batch_size": 5}, ValueError, "batch_size=5 must be a multiple of accumulation=2"),
        ({"compute_dtype": "fp8"}, ValueError, "compute_dtype='fp8': choose one of"),
        ({"freeze": ("ffn/down/kernal",)}, RuleError, "decides nothing"),
        ({"freeze": ("ffn/down/kernel",)}, ValueError, "'nucl' has no trainable leaf"),
        ({"data.path": "nowhere.txt"}, ValueError, "nowhere.txt"),
        ({"model": ""}, ValueError, "model is empty"),
        ({"optimizer.name": "adam"}, ValueError, "optimizer='adam'"),
        ({"optimizer.schedule": "cos"}, ValueError, "schedule='cos'"),
        ({"eval.best_metric": "nll"}, ValueError, "best_metric='nll' is not among"),
    ],
)
def test_bad_settings_are_one_clear_error(files, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        training.run(make_config(files, **changes), tmp_path / "x")


def test_another_run_in_the_work_directory_is_refused(files, finished):
    with pytest.raises(WorkdirError, match="steps: 6 there, 7 here"):
        training.run(make_config(files, steps=7), finished[0])
