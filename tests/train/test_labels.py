"""Classification and regression with the common trainer, on tiny models (P-32)."""

import csv
import dataclasses

import jax
import numpy as np
import pytest
from tiny_models import config_of, save_tiny_reader, starting_from
from tiny_runs import read_rows, refused, write_halves, write_rows

from ffn_heterogeneity.data.glue import get_task
from ffn_heterogeneity.data.labelled import constant_loss
from ffn_heterogeneity.evaluate.classify import classify
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.workdir import prepare_workdir
from ffn_heterogeneity.launch import evaluate as evaluating
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.build import objective_of
from ffn_heterogeneity.train.loop import TrainingDiverged
from ffn_heterogeneity.train.objectives import make_forward
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Tiny models of two families, and rows whose label is which half of the alphabet they use."""
    root = tmp_path_factory.mktemp("labels")
    for family in ("bert", "roberta", "llama"):
        save_tiny_reader(root / family, family)
    write_halves(root, train=60, held_out=21, test=9)
    return root


def config_for(files, model="bert", task="labels", more="", **changes):
    settings = {"data__path": str(files / "train.jsonl"), "fields": "sentence", "lengths": (32,)}
    settings |= {
        "data__validation_path": str(files / "held_out.jsonl"),
        "together": 1,
        "batch_size": 8,
    }
    settings |= {
        "epochs": 4.0,
        "least_steps": 0,
        "dropout": 0.0,
        "optimizer__learning_rate": 2e-2,
        "eval__every": 10,
    }
    settings |= {"compute_dtype": "float32", "tensorboard": False}
    return config_of("p32_glue", f"{files / model},{task}{more}", **(settings | changes))


@pytest.mark.parametrize(
    ("model", "pooling"), [("bert", "last"), ("llama", "p32"), ("bert", "scalar_mix")]
)
def test_a_run_from_rows_to_predictions(files, tmp_path, capsys, model, pooling):
    """Trained, exported, loaded: predictions for the file's rows agree with validation."""
    config = config_for(files, model, pooling=pooling, data__test_path=str(files / "test.jsonl"))
    results = training.run(config, tmp_path / "run")
    assert "nothing was learned" not in capsys.readouterr().err
    assert results["steps"] == 30 and results["rows"] == {"train": 60, "validation": 21, "test": 9}
    best = max(row["validation/accuracy"] for row in results["history"])
    assert best > 0.85 and results["best"]["value"] == best and results["test/accuracy"] > 0.6
    assert results["tokens_a_row"]["train"] == pytest.approx(12.5, abs=1.5)
    if pooling == "last":
        assert "lambda" not in results
    else:
        lambdas = np.array(results["lambda"])
        weights = np.exp(lambdas) / np.exp(lambdas).sum()
        np.testing.assert_allclose(results["depth_weights"], weights, rtol=1e-5)
        assert lambdas.shape == (3,) and np.abs(lambdas).max() > 1e-3
    settings = {"model": str(tmp_path / "run" / "model"), "input": str(files / "held_out.jsonl")}
    asked = config_of("classify", compute_dtype="float32", **settings)
    said = evaluating.run(asked, tmp_path)
    exported = next(r for r in results["history"] if r["step"] == results["exported_step"])
    for name in ("accuracy", "macro_f1", "matthews"):
        assert said[name] == pytest.approx(exported[f"validation/{name}"])
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open(newline="")))
    columns = ["sentence", "label", "score", "prediction", "probability_high", "probability_low"]
    assert list(rows[0]) == columns
    shares = [float(row["probability_high"]) + float(row["probability_low"]) for row in rows]
    assert len(rows) == 21 and np.allclose(shares, 1)
    right = np.mean([row["label"] == row["prediction"] for row in rows])
    assert right == pytest.approx(said["accuracy"])
    loaded = load_model(tmp_path / "run" / "model")
    (answer,) = classify(loaded, ["abc"])
    assert classify(loaded, []) == [] and answer["prediction"] in ("low", "high")
    refused("is not a text", classify, loaded, [("a", "b")])


def test_a_run_that_learns_nothing_says_so(files, tmp_path, capsys):
    """With equal texts the loss stays that of one answer, ln 3 for three equal labels."""
    rows = [{"sentence": "abc", "label": label} for label in ("a", "b", "c") * 8]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    more = {"data__path": str(path), "data__validation_path": ""}
    results = training.run(config_for(files, **more), tmp_path / "same")
    assert results["constant_loss"] == pytest.approx(np.log(3))
    said = capsys.readouterr().err
    assert "nothing was learned: final loss 1." in said and "prediction has 1.099" in said
    values = np.array([1.0, 2.0, 4.0])
    assert constant_loss(get_task("stsb"), values) == pytest.approx(((values - 7 / 3) ** 2).mean())


def test_small_files_have_steps_enough(files):
    """Four epochs of 60 rows are 8 steps; a user's small file gets more."""
    ours = config_of("p32_glue", f"{files / 'bert'},labels")
    for steps, least in ((8, 0), (200, 200)):
        config = config_for(files, batch_size=32, epochs=4.0, least_steps=least)
        assert read(config).loop.steps == steps
    glue = config_of("p32_glue", f"{files / 'bert'},mrpc")
    assert (ours.least_steps > 0, glue.least_steps) == (True, 0)


def test_a_regression_and_a_part_that_is_held_out(files, tmp_path):
    held_out = {"data__validation_path": "", "data__validation_fraction": 0.2}
    config = config_for(files, task="regression", **held_out)
    path, rows = tmp_path / "rows.csv", read_rows(files / "train.jsonl")
    path.write_text("sentence,label\n" + "".join(f"{r['sentence']},{r['score']}\n" for r in rows))
    config.data.path = str(path)
    results = training.run(config, tmp_path / "run")
    assert results["rows"] == {"train": 48, "validation": 12} and results["steps"] == 24
    assert results["best"]["metric"] == "validation/spearman" and results["best"]["value"] > 0.5
    value = classify(load_model(tmp_path / "run" / "model"), ["abc"])[0]["value"]
    assert isinstance(value, float)


SLOW = (("roberta", "last"), ("llama", "last"), ("bert", "p32"), ("roberta", "p32"))
SLOW_READERS = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("model", "pooling"), [("bert", "last"), ("llama", "p32"), *SLOW_READERS])
def test_rows_that_stand_together_train_the_same(files, tmp_path, model, pooling):
    """Losses of every step and all metrics are equal; the batches are smaller."""
    seen, sizes = [], []
    for together in (1, 4):
        options = {"pooling": pooling, "together": together, "steps": 12, "lengths": (14, 16)}
        options |= {"losses__jreg__weight": 0.1, "optimizer__learning_rate": 2e-3}
        config = config_for(files, model, more=",jreg", **options)
        results = training.run(config, tmp_path / str(together))
        rows = read_rows(tmp_path / str(together) / "metrics.jsonl")
        names = ("train/loss", "train/jreg", "train/grad_norm", "train/tokens")
        seen.append([[row[name] for name in names] for row in rows if "train/loss" in row])
        seen[-1] += [[row["validation/classification"]] * 4 for row in results["history"]]
        settings, start = read(config), load_model(files / model)
        data = objective_of(settings.task, start.config).data(start.tokenizer, range(8))
        sizes.append(sum(next(data.batches)["tokens"].size for _ in range(12)))
    assert len(seen[0]) >= 12
    np.testing.assert_allclose(seen[1], seen[0], rtol=2e-4, atol=1e-5)
    assert sizes[1] < sizes[0]


def test_hidden_states_of_rows_that_stand_together_are_laid_out_as_the_batch(files):
    config = read(config_for(files, together=4, lengths=(8, 16)))
    start = starting_from(config)
    objective = objective_of(config.task, start.config)
    batch = next(objective.data(start.tokenizer, range(8)).batches)
    outputs = make_forward(objective, start.config, RunOptions())(start.params, batch)
    assert outputs["hidden"].shape == (*batch["tokens"].shape, start.config.d_model)
    assert outputs["predictions"].shape == (8, 2)


def test_rows_that_cannot_stand_together(files):
    for changes, words in (
        ({"together": 3}, "together=3.*8 rows"),
        ({"together": 4, "lengths": (32,)}, "64 positions"),
        ({"together": 0}, "together=0"),
    ):
        with pytest.raises(ValueError, match=words):
            objective_of(read(config_for(files, **changes)).task, load_model(files / "bert").config)


def test_lambda_learns_at_its_own_rate(files, tmp_path):
    """With the model's rate it moves by no more than steps times that rate."""
    moved = {}
    for rate in (None, 5e-2):
        config = config_for(files, lambda_rate=rate, optimizer__learning_rate=1e-5, steps=20)
        config.export.weights = "last"
        results = training.run(config, tmp_path / str(rate))
        moved[rate] = np.abs(results["lambda"]).max()
    assert 0 < moved[None] <= 20 * 1e-5 and moved[5e-2] > 1e-2


def test_a_rate_of_its_own_is_part_of_the_program(files):
    """It is compiled in as a factor of the run's rate; the rate itself is an argument."""
    keys = {}
    for lambda_rate in (None, 0.0, 1e-2):
        for rate in (1e-5, 1e-4):
            config = read(config_for(files, lambda_rate=lambda_rate, optimizer__learning_rate=rate))
            mesh = partition.make_mesh(**config.mesh)
            keys[lambda_rate, rate] = plan(config, mesh).key
    assert keys[None, 1e-5] == keys[None, 1e-4]
    assert keys[1e-2, 1e-5] != keys[1e-2, 1e-4] and keys[0.0, 1e-5] != keys[None, 1e-5]


def test_adapters_truncation_and_nucl_beside_a_head(files, tmp_path):
    """On half of the rows, with two held-out sets."""
    settings = {
        "data__validation_path": f"near={files / 'held_out.jsonl'},far={files / 'test.jsonl'}"
    }
    settings |= {"data__fraction": 0.5, "truncate__blocks": 2, "steps": 4}
    config = config_for(files, "llama", more=",truncate,lora,nucl", **settings)
    results = training.run(config, tmp_path / "run")
    assert results["rows"] == {"train": 30, "near": 21, "far": 9}
    assert results["best"]["metric"] == "validation/near/accuracy"
    assert "validation/far/matthews" in results["final"]
    assert set(results["losses"]) == {"classification", "nucl"}
    model = load_model(tmp_path / "run" / "model")
    assert model.config.n_layers == 2 and len(results["lambda"]) == 2
    head = sum(np.size(x) for x in (model.params["task_head"]["out"]["kernel"], results["lambda"]))
    assert head < results["trainable_parameters"] < results["parameters"] / 2


def test_a_run_that_is_not_finite_begins_anew(files, tmp_path, monkeypatch):
    """With another seed, at most `retries` times; the earlier files are moved aside."""
    config = config_for(files, steps=2, retries=1, seed=7)
    train, seeds = training.train, []

    def fails_once(settings, workdir, *more):
        seeds.append(settings.seed)
        if len(seeds) == 1:
            (workdir / "metrics.jsonl").write_text("{}\n")
            raise TrainingDiverged("step 1: not finite")
        return train(settings, workdir, *more)

    monkeypatch.setattr(training, "train", fails_once)
    results = training.run(config, tmp_path / "run")
    assert seeds == [7, 1007] and (results["seed"], results["retries"]) == (1007, 1)
    assert (tmp_path / "run" / "diverged_0" / "metrics.jsonl").exists()
    # Stopped while the files were moved: the next start moves the rest before it begins.
    prepare_workdir(tmp_path / "moving", config.to_dict())
    (tmp_path / "moving" / "failed_attempt" / "checkpoints").mkdir(parents=True)
    (tmp_path / "moving" / "metrics.jsonl").write_text("{}\n")
    seeds[:] = [0]
    assert training.run(config, tmp_path / "moving")["retries"] == 1 and seeds == [0, 1007]
    moved = {path.name for path in (tmp_path / "moving" / "diverged_0").iterdir()}
    assert moved == {"checkpoints", "metrics.jsonl"}
    config.optimizer.learning_rate = 1e30
    seeds[:] = [0]
    with pytest.raises(TrainingDiverged):
        training.run(config, tmp_path / "never")


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"pooling": "p33"}, "pooling='p33'"),
        ({"lengths": (8, 16, 32, 64)}, "one to 3"),
        ({"lengths": (8, 128)}, "the model has 64 positions"),
        ({"fields": "text"}, "reads the fields 'text'"),
        ({"labels": "low,lower"}, "line 2: field 'label' is 'high'"),
        ({"data__validation_path": "test=a,near=b"}, "can be called 'test'"),
        ({"epochs": -1.0}, "epochs=-1.0"),
        ({"data__path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(files, tmp_path, changes, told):
    refused(told, training.run, config_for(files, **changes), tmp_path / "run")


@pytest.mark.parametrize("key", ["validation_path", "test_path"])
def test_no_file_is_read_for_training_and_evaluation(files, tmp_path, key):
    other = tmp_path / "other"
    other.symlink_to(files)
    changes = {f"data__{key}": str(other / "train.jsonl")}
    config = config_for(files, **changes)
    refused("train.jsonl: training and .* both read it", training.run, config, tmp_path / "run")


def test_rows_of_one_class_and_hidden_labels(files, tmp_path):
    rows = read_rows(files / "train.jsonl")
    for label, message in (("low", "there is nothing to learn"), (-1, "not published")):
        path = write_rows(tmp_path / f"{label}.jsonl", [row | {"label": label} for row in rows])
        config = config_for(files, data__path=str(path), labels="low,high")
        refused(message, training.run, config, tmp_path / "run")


def test_a_model_without_a_head_predicts_nothing_and_an_encoder_no_words(files, tmp_path):
    asked = config_of("classify", model=str(files / "bert"), input=str(files / "test.jsonl"))
    refused("no head.*train one first", evaluating.run, asked, tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 50)
    settings = {"model": str(files / "bert"), "text": str(tmp_path / "text.txt"), "window": 16}
    spoken = config_of("perplexity", bos="none", **settings)
    refused("perplexity needs a decoder", evaluating.run, spoken, tmp_path)
    settings = {"data__path": str(tmp_path / "text.txt"), "steps": 1, "seq_len": 16}
    packed = config_of("nucl_finetune", f"{files / 'bert'},text", **settings)
    refused("training on next words.*needs a decoder", training.run, packed, tmp_path / "run")


def test_evaluations_of_few_batches_read_drawn_rows(files, tmp_path):
    """Not the shortest ones; the test set is read whole."""
    settings = {"data__test_path": str(files / "test.jsonl"), "epochs": 0.5, "batch_size": 4}
    whole = training.run(config_for(files, **settings), tmp_path / "whole")
    few = training.run(config_for(files, eval__max_batches=2, **settings), tmp_path / "few")
    assert (few["rows"]["validation"], few["rows"]["test"]) == (8, whole["rows"]["test"])
    assert few["tokens_a_row"]["validation"] > 0 and few["final"]["validation/n"] == 8
    assert whole["rows"]["validation"] == whole["final"]["validation/n"] > 8


def test_the_two_dropouts_of_a_head_are_drawn_apart(files):
    """RoBERTa's head has one before its dense layer and one after."""
    config = config_for(files, "roberta", dropout=0.5)
    built, drawn = plan(read(config)), []
    shapes = built.objective.shapes(4, built.objective.longest)
    batch = {k: np.full(x.shape, k == "segment_ids", x.dtype) for k, x in shapes.items()}

    def apply(params, outputs, batch, drop):
        drawn.extend(drop(np.ones((4, 40), np.float32)) != 0 for _ in range(2))
        return drawn[0]

    head = dataclasses.replace(built.forward.head, apply=apply)
    forward = dataclasses.replace(built.forward, head=head)
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), built.params)
    forward(params, batch, dropout=(jax.random.key(0), 0.5))
    assert 0.3 < np.mean(drawn[0]) < 0.7 and np.any(drawn[0] != drawn[1])


@pytest.mark.parametrize("frozen", ["^task_head/lambda", "^task_head/"])
def test_a_frozen_lambda_needs_no_rate(files, frozen):
    """The rate is the task's own, so no rule of the user is wrong."""
    planned = plan(read(config_for(files, pooling="p32", lambda_rate=1e-2, freeze=(frozen,))))
    assert not planned.trainable["task_head/lambda"] and any(planned.trainable.values())


def test_nothing_that_is_read_trains(files):
    config = config_for(files, "llama", pooling="last", train_only=("^head/",))
    with pytest.raises(partition.RuleError, match="no leaf is left to train"):
        plan(read(config))


def test_a_rate_of_its_own_needs_a_rate_of_the_run(files):
    config = config_for(files, "llama", pooling="p32", lambda_rate=1e-2)
    config.optimizer.learning_rate = 0.0
    refused("learning_rate=0 with another rate for .*lambda", plan, read(config))
