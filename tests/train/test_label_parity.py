"""MiniLM trained on MRPC here and by torch: the same rows, head and settings, the same losses."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
import pytest
from tiny_models import config_of

from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.launch.train import open_data
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, place_batch, place_scalars
from ffn_heterogeneity.train.build import build
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.source import starting_model
from ffn_heterogeneity.train.state import create_state

STEPS = 50


def torch_step(torch, model, optimizer, batch, rate):
    """One of the usual loop's: the loss, clipped gradients, AdamW at this rate."""
    ids, mask, types = (
        torch.tensor(batch[name], dtype=torch.long)
        for name in ("tokens", "segment_ids", "token_types")
    )
    labels = torch.tensor(batch["target"], dtype=torch.long)
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = model(input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss)


@pytest.mark.slow
def test_fifty_steps_of_minilm_on_mrpc(torch, minilm_dir, shared_data, tmp_path, capsys):
    """Losses within 1e-3; the ratio of the two steps' times, taken in turn, is printed."""
    from transformers import AutoModelForSequenceClassification

    folder = shared_data / "glue_mrpc"
    config = read(
        config_of(
            "p32_glue",
            f"{minilm_dir},mrpc",
            pooling="last",
            dropout=0.0,
            lengths=(64, 96, 128),
            compute_dtype="float32",
            data__path=str(folder / "train.jsonl"),
            data__validation_path=str(folder / "validation.jsonl"),
        )  # fmt: skip
    )
    mesh, model = partition.make_mesh(**config.mesh), starting_model(config)
    built = build(config, model, mesh)
    data = open_data(config, built.objective, model.tokenizer, mesh)
    save_pretrained(model.config, model.params, tmp_path / "start")
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "start", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), weight_decay=0.0)
    state = create_state(
        model.params, built.optimizer, built.trainable, seed=0, shardings=built.shardings[0]
    )
    program, losses, seconds = built.program(config), [], []
    for step in range(STEPS):
        batch, hyper = next(data.batches), built.program(config).hyper(step)
        placed = place_batch(cut(batch, 1, False), built.shardings[1])
        start = time.perf_counter()
        state, metrics = program.train_step(state, placed, place_scalars(hyper, built.shardings[2]))
        jax.block_until_ready(state)
        middle = time.perf_counter()
        other = torch_step(torch, theirs, optimizer, batch, hyper["learning_rate"])
        seconds.append((middle - start, time.perf_counter() - middle))
        losses.append((float(metrics["loss"]), other))
    ours, torchs = np.array(losses).T
    assert np.abs(ours - torchs).max() < 1e-3
    ratio = statistics.median(other / own for own, other in seconds[5:])
    with capsys.disabled():
        print(f"\nMiniLM on MRPC, 32 rows a step, float32: {ratio:.2f} x torch's speed")
