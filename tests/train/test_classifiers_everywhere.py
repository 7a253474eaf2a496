"""Classifiers of every family, pooling and file: trained, saved, read here and by transformers."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import theirs
from tiny_models import byte_tokenizer, config_of, random_params, tiny_of
from tiny_runs import REPOSITORY, run_program, write_rows

from ffn_heterogeneity.data.glue import get_task
from ffn_heterogeneity.data.labelled import batch_of, encode_rows
from ffn_heterogeneity.data.sources import ListSource
from ffn_heterogeneity.evaluate.classify import form_of, logits_of, task_of
from ffn_heterogeneity.heads import make_head, with_head
from ffn_heterogeneity.heads.classification import POOLINGS, Classification
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.card import write_card
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.families import FAMILIES
from ffn_heterogeneity.models.options import RunOptions

pytestmark = pytest.mark.usefixtures("compiled_quickly")
HEADED = [name for name in FAMILIES if tiny_of(name).kind != "encoder_decoder"]
FILES = [(name, False) for name in HEADED] + [("bert", True), ("roberta", True)]
# {directory: our logits}, for transformers 4 at the end.
MADE: dict[str, np.ndarray] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("classifiers")


def base_of(family: str, pooler: bool):
    """(config, byte tokenizer) of a tiny base model."""
    config = dataclasses.replace(tiny_of(family, 2), vocab_size=258, max_position=64)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = "</s>"
    return dataclasses.replace(config, pad_id=1, eos_id=None, pooler=pooler), tokenizer


ROWS = [{"a": "xyz"[i % 3] * i, "b": "text", "label": "pqr"[i % 3]} for i in range(1, 7)]


def trained(root: Path, family: str, pooler: bool, pooling: str) -> Path:
    """The directory of a classifier after two steps of `train` on pairs; `pooler`: the base's."""
    config, tokenizer = base_of(family, pooler)
    save_pretrained(config, random_params(config), root / "base", tokenizer=tokenizer)
    rows = write_rows(root / "rows.jsonl", ROWS)
    settings = {"data__path": str(rows), "fields": "a,b", "steps": 2, "pooling": pooling}
    settings |= {"lengths": (48,), "together": 1, "batch_size": 4, "compute_dtype": "float32"}
    settings |= {"tensorboard": False, "optimizer__learning_rate": 1e-2}
    training.run(config_of("p32_glue", f"{root / 'base'},labels", **settings), root / "run")
    return root / "run" / "model"


def stepped(root: Path, family: str, pooler: bool, pooling: str) -> Path:
    """The same after two steps of plain gradient descent, without the trainer, in 1/3 of the
    time."""
    config, tokenizer = base_of(family, pooler)
    task = get_task("labels", ("a", "b"), ("p", "q", "r"))
    options = {"outputs": 3, "labels": [*task.labels], "task": "labels", "fields": [["a", "b"]]}
    settings = Classification(pooling=pooling, max_length=48, **options)
    made = HeadConfig.of("classification", vars(settings))
    config, params = with_head(config, random_params(config), made, jax.random.key(0))
    head = make_head(config, made)
    rows = ListSource("rows", ROWS, [""] * len(ROWS))
    batch = batch_of(encode_rows(task, rows, tokenizer, form_of(config)), range(6), [48], 6)

    @jax.jit
    @jax.grad
    def slope(params):
        outputs = causal_lm.forward(config, params, batch, probes=head.probes)
        logits = head.apply(params, outputs, batch, lambda x: x)
        label = batch["target"].astype(int)[:, None]
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), label, 1))

    for _ in range(2):
        params = jax.tree.map(lambda leaf, g: leaf - 0.01 * g, params, slope(params))
    save_pretrained(config, params, root / "model", tokenizer=tokenizer)
    write_card(root / "model", "x", "y", {}, config)
    return root / "model"


# The card has no lines for a scalar mix: two families are enough. What a family adds to a file
# shows with one pooling.
CASES = [
    pytest.param(
        file,
        pooling,
        marks=[pytest.mark.slow]
        if pooling == "average" and file[0] not in ("bert", "roberta", "llama", "gpt2")
        else [],
    )
    for file, pooling in itertools.product(FILES, POOLINGS)
    if pooling != "scalar_mix" or file[0] in ("bert", "llama")
]


@pytest.mark.parametrize(("file", "pooling"), CASES)
def test_a_trained_classifier_is_the_same_everywhere(root, torch, file, pooling):
    family, pooler = file
    launched = pooling in ("last", "p32") and family in ("bert", "roberta", "llama")
    make = trained if launched else stepped
    made = make(root / f"{family}_{pooler}_{pooling}", family, pooler, pooling)
    model = load_model(made)
    assert model.config.pooler == (pooler if pooling != "last" else family == "bert")
    rows = ListSource("rows", [{"a": a, "b": b} for a, b in theirs.PAIRS], [""] * 3)
    data = encode_rows(task_of(model), rows, model.tokenizer, form_of(model.config), False)
    batch = batch_of(data, range(3), [48], 3)
    ours = np.asarray(logits_of(model.config, RunOptions(), model.params, batch))
    assert np.ptp(ours, axis=0).max() > 1e-4
    if pooling == "scalar_mix":
        return
    np.testing.assert_allclose(theirs.logits(made), ours, atol=1e-5, rtol=1e-5)
    MADE[str(made)] = ours
    if pooling != "last":
        with pytest.raises(CheckpointError, match=pooling):
            save_pretrained(model.config, model.params, root / "no", export="classifier")


@pytest.mark.slow
def test_transformers_4_gives_the_same(torch):
    folder = theirs.transformers_4(REPOSITORY / ".cache" / "transformers-4")
    program = (sys.executable, REPOSITORY / "tests" / "theirs.py", "logits", *MADE)
    done = run_program(*program, PYTHONPATH=str(folder))
    assert done.code == 0, done.err
    logits = json.loads(done.out.splitlines()[-1])
    assert len(logits) == 3 * len(FILES)
    for name, ours in MADE.items():
        if "olmo_False_last" in name:
            assert "Unrecognized configuration class" in logits[name]
            continue
        np.testing.assert_allclose(logits[name], ours, atol=1e-5, rtol=1e-5, err_msg=name)
