"""Span corruption: the published lengths, and a run of an encoder-decoder on it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TEXT, byte_tokenizer, config_of, save_tiny, stopped_and_resumed
from tiny_runs import refused

from ffn_heterogeneity.data.sources import DataError
from ffn_heterogeneity.data.span_corruption import (
    Corruption,
    corrupted_batch,
    partition,
    sentinels_of,
)
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.metrics import read_metrics
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.shared import Shared

pytestmark = pytest.mark.usefixtures("compiled_quickly")
HOW = Corruption(tuple(range(999, 899, -1)), 1)


@pytest.mark.parametrize(("inputs", "tokens", "targets"), [(512, 568, 114), (1024, 1137, 229)])
def test_lengths_are_those_of_the_published_code(inputs, tokens, targets):
    """t5.data.preprocessors.random_spans_helper for 15% and spans of 3: 568 and 114 for 512."""
    assert HOW.row_length(inputs) == tokens and HOW.lengths(tokens) == (inputs, targets)


@pytest.mark.parametrize("tokens", [2, 3, 7, 64, 568])
def test_inputs_and_targets_hold_all_tokens_in_order(tokens):
    noise, spans = HOW.counts(tokens)
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(2, 800, tokens).astype(np.int32)
        inputs, targets = HOW.corrupt(ids, np.random.default_rng([seed, 1]))
        assert (len(inputs), len(targets)) == HOW.lengths(tokens)
        assert inputs[-1] == targets[-1] == 1
        lost = np.split(targets[:-1], np.flatnonzero(targets[:-1] >= 900))[1:]
        assert [part[0] for part in lost] == list(HOW.sentinels[:spans])
        filled = {part[0]: part[1:] for part in lost}
        again = [filled[x] if x >= 900 else [x] for x in inputs[:-1]]
        np.testing.assert_array_equal(np.concatenate(again), ids)
        assert sum(map(len, filled.values())) == noise and inputs[0] < 900


def test_every_partition_is_equally_likely():
    rng = np.random.default_rng(0)
    seen = [tuple(partition(5, 3, rng)) for _ in range(6000)]
    counts = {one: seen.count(one) for one in set(seen)}
    assert len(counts) == 6 and all(abs(n - 1000) < 130 for n in counts.values())
    assert partition(4, 1, rng).tolist() == [4] and partition(3, 3, rng).tolist() == [1, 1, 1]


def test_a_batch_is_shifted_padded_and_the_same_in_any_process():
    rng = np.random.default_rng(0)
    real = np.arange(40) < np.array([40, 25, 1, 40])[:, None]
    batch = {"tokens": rng.integers(2, 800, (4, 40)), "segment_ids": real.astype(int)}
    given = {"how": HOW, "start_id": 7, "pad_id": 0}
    made = corrupted_batch(batch, seed=(3, 5), rows=range(4), **given)
    assert {k: v.shape for k, v in made.items()} == {
        **dict.fromkeys(("encoder_tokens", "encoder_segment_ids"), (4, HOW.lengths(40)[0])),
        **dict.fromkeys(("tokens", "segment_ids", "targets", "loss_mask"), (4, HOW.lengths(40)[1])),
    }
    for i in (0, 1, 3):
        n = int(made["segment_ids"][i].sum())
        assert made["tokens"][i, 0] == 7 and made["targets"][i, n - 1] == 1
        np.testing.assert_array_equal(made["tokens"][i, 1:n], made["targets"][i, : n - 1])
        inputs, targets = HOW.corrupt(batch["tokens"][i][real[i]], np.random.default_rng([3, 5, i]))
        np.testing.assert_array_equal(made["targets"][i, :n], targets)
        m = int(made["encoder_segment_ids"][i].sum())
        np.testing.assert_array_equal(made["encoder_tokens"][i, :m], inputs)
        assert not made["tokens"][i, n:].any() and not made["encoder_tokens"][i, m:].any()
    assert not any(made[x][2].any() for x in ("segment_ids", "encoder_segment_ids", "loss_mask"))
    half = {name: leaf[2:] for name, leaf in batch.items()}
    part = corrupted_batch(half, seed=(3, 5), rows=(2, 3), **given)
    jax.tree.map(np.testing.assert_array_equal, part, {k: v[2:] for k, v in made.items()})


def test_settings_that_do_not_fit_are_rejected():
    refused("density=1", Corruption, (5,), 1, density=1.0, error=DataError)
    refused("mean_span=0.5", Corruption, (5,), 1, mean_span=0.5, error=DataError)
    refused("seq_len=2", HOW.row_length, 2, error=DataError)
    few = dataclasses.replace(HOW, sentinels=(9, 8))
    refused("28 spans, and there are 2 sentinels", few.row_length, 512, error=DataError)
    refused("a vocabulary of 358 or more", sentinels_of, byte_tokenizer(), 300, error=DataError)
    named = byte_tokenizer(**{f"<extra_id_{i}>": 300 - i for i in range(3)})
    assert sentinels_of(named, 301) == (300, 299, 298)
    assert sentinels_of(byte_tokenizer(), 400)[:2] == (399, 398)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    root = tmp_path_factory.mktemp("t5")
    (root / "text.txt").write_text(TEXT * 3)
    (root / "tokenizer").mkdir()
    byte_tokenizer().save_pretrained(root / "tokenizer")
    return root


def config_for(root, argument="local,nucl,jreg", **changes):
    shape = {"encoder_layers": 2, "layers": 1, "d_model": 16, "ffn_width": 24, "n_heads": 2}
    keys = {f"shape__{key}": value for key, value in shape.items()} | {"shape__vocab_size": 360}
    keys |= {"data__path": str(root / "text.txt"), "data__task": "text", "seq_len": 32}
    keys |= {"tokenizer": str(root / "tokenizer"), "steps": 6, "batch_size": 4}
    keys |= {"optimizer__warmup_steps": 1, "compute_dtype": "float32", "tensorboard": False}
    keys |= {"eval__every": 2, "eval__max_batches": 2, "checkpoint__every": 2}
    keys |= {"optimizer__learning_rate": 1e-2, "data__passage_chars": 100}
    return config_of("t5_pretrain", argument, **(keys | changes))


SWITCH = {"shape__experts": 3, "shape__capacity": 8}  # of about 10 tokens a row


@pytest.mark.parametrize(
    ("argument", "changes"), [("local,nucl,jreg", {}), ("switch,jreg", SWITCH)]
)
def test_a_run_learns_resumes_and_is_read_by_torch(
    torch, tiny, tmp_path, monkeypatch, argument, changes
):
    """With losses over both stacks, and a router's noise; the saved model's loss is PyTorch's."""
    from transformers import AutoModelForSeq2SeqLM

    together = Shared()
    config = config_for(tiny, argument, **changes)
    training.run(config, tmp_path / "run", together)
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    nll = [row["validation/nll"] for row in rows if "validation/nll" in row]
    assert len(nll) == 4 and nll[-1] < nll[0] - 0.1
    # Independent logits of variance v add v / 2, and v is at most 1.
    assert nll[0] == pytest.approx(np.log(360) + 0.2, abs=0.2)
    jumps = [row["train/jreg"] for row in rows if "train/jreg" in row]
    assert len(jumps) == 6 and np.isfinite(jumps).all()
    if changes:
        name = "train/load_balance/dropped"
        dropped = np.array([row[name] for row in rows if name in row])
        assert (dropped[:, 1] > 0).any() and (dropped < 1).all() and not dropped[:, 0].any()
    stopped_and_resumed(config, tmp_path, monkeypatch, together)
    model = load_model(tmp_path / "run/model")
    assert model.config.kind == "encoder_decoder" and model.config.bos_id == 0
    batch = {"tokens": np.arange(2, 82).reshape(2, 40), "segment_ids": np.ones((2, 40), int)}
    how = Corruption(sentinels_of(model.tokenizer, 360), 1)
    batch = corrupted_batch(batch, how, 0, 0, (0,), range(2))
    outputs = causal_lm.forward(model.config, model.params, batch)
    log_p = jax.nn.log_softmax(causal_lm.logits(model.config, model.params, outputs["hidden"]))
    ours = -jnp.take_along_axis(log_p, batch["targets"][..., None], -1).mean()
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run/model")
    with torch.no_grad():
        given = {"input_ids": batch["encoder_tokens"], "labels": batch["targets"]}
        loss = theirs(**{k: torch.tensor(v, dtype=torch.long) for k, v in given.items()}).loss
    assert float(ours) == pytest.approx(loss.item(), abs=1e-5)


def test_held_out_spans_do_not_depend_on_the_batch_size(tiny):
    def rows(size):
        config = config_for(tiny, batch_size=size, eval__max_batches=8 // size)
        held_out = plan(read(config)).open_data(byte_tokenizer()).held_out["held_out"]
        return np.concatenate([batch["targets"] for batch in held_out()])

    np.testing.assert_array_equal(rows(2), rows(4))


def test_other_models_and_missing_ids_are_rejected(tiny, tmp_path):
    save_tiny(tmp_path / "llama")
    config = config_for(tiny, model=str(tmp_path / "llama"))
    refused("a llama model is a decoder: span corruption", training.run, config, tmp_path / "run")
    config = config_for(tiny, shape__vocab_size=300)
    refused("100 further ids", training.run, config, tmp_path / "small", error=DataError)
