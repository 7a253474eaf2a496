"""MiniLM trained on MRPC here and by torch: the same rows, head and settings, the same losses."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
import pytest
from tiny_models import config_of, starting_from

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, place_batch, place_scalars
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.state import create_state

STEPS, ROUNDS = 50, 15


class Ours:
    """The trainer's own step: last layer, no dropout; `together` as in configs/p32_glue.py."""

    def __init__(self, minilm_dir, folder, dtype: str, together: int = 1):
        lengths = (64, 96, 128) if together == 1 else (56, 60, 128)
        own = {"pooling": "last", "dropout": 0.0, "together": together, "lengths": lengths}
        for key, name in (("path", "train"), ("validation_path", "validation")):
            own[f"data__{key}"] = str(folder / f"{name}.jsonl")
        self.config = read(config_of("p32_glue", f"{minilm_dir},mrpc", compute_dtype=dtype, **own))
        mesh, self.model = partition.make_mesh(**self.config.mesh), starting_from(self.config)
        built = plan(self.config, mesh, self.model)
        self.batches = built.open_data(self.model.tokenizer).batches
        self.program, self.shardings = built.program(self.config), built.shardings
        given = (self.model.params, built.optimizer, built.trainable)
        self.state = create_state(*given, seed=0, shardings=self.shardings[0])

    def __call__(self, step: int, batch: dict) -> float:
        placed = place_batch(cut(batch, 1, False), self.shardings[1])
        hyper = place_scalars(self.program.hyper(step), self.shardings[2])
        self.state, metrics = self.program.train_step(self.state, placed, hyper)
        jax.block_until_ready(self.state)
        return float(metrics["loss"])


class Theirs:
    """The usual loop in torch: clipped gradients, AdamW; from what `save_pretrained` writes."""

    def __init__(self, torch, directory, rate, half: bool = False):
        from transformers import AutoModelForSequenceClassification

        self.torch, self.rate, self.half = torch, rate, half
        self.model = AutoModelForSequenceClassification.from_pretrained(
            directory, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), weight_decay=0.0)

    def __call__(self, step: int, batch: dict) -> float:
        torch = self.torch
        names = {"input_ids": "tokens", "attention_mask": "segment_ids"}
        names |= {"token_type_ids": "token_types", "labels": "target"}
        given = {k: torch.tensor(batch[v], dtype=torch.long) for k, v in names.items()}
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.half):
            made = self.model(**given)
        self.optimizer.zero_grad()
        made.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return made.loss.item()


@pytest.fixture(scope="module")
def setup(torch, minilm_dir, shared_data, tmp_path_factory):
    """(ours in float32, the directory that torch starts from, the learning rate of a step)."""
    ours = Ours(minilm_dir, shared_data / "glue_mrpc", "float32")
    start = tmp_path_factory.mktemp("s")
    save_pretrained(ours.model.config, ours.model.params, start, overwrite=True)
    return ours, start, lambda step: ours.program.hyper(step)["learning_rate"]


@pytest.mark.slow
def test_fifty_steps_of_minilm_on_mrpc(torch, setup):
    """The losses differ by less than 1e-3."""
    ours, start, rate = setup
    theirs, worst = Theirs(torch, start, rate), 0.0
    for step in range(STEPS):
        batch = next(ours.batches)
        worst = max(worst, abs(ours(step, batch) - theirs(step, batch)))
    assert worst < 1e-3


@pytest.mark.slow
def test_the_steps_speed_beside_torch(torch, setup, minilm_dir, shared_data, capsys):
    """Taken in turn, on the same rows; printed, since another machine's is another."""
    _, start, rate = setup
    for dtype in ("float32", "bfloat16"):
        rows = shared_data / "glue_mrpc"
        alone, shared = (Ours(minilm_dir, rows, dtype, together) for together in (1, 4))
        steps = {"ours": alone, "four rows together": shared}
        steps["torch"] = Theirs(torch, start, rate, half=dtype == "bfloat16")
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for step in range(STEPS, STEPS + ROUNDS):
            batches = next(alone.batches), next(shared.batches)
            for name, one in steps.items():
                batch = batches[one is shared]
                began = time.perf_counter()
                one(step, batch)
                seconds[name].append(time.perf_counter() - began)
        medians = {name: np.median(taken[3:]) for name, taken in seconds.items()}
        words = [
            f"{name} {medians[name]:.3f} s, {_ratio(seconds['torch'], seconds[name]):.2f} x"
            for name in ("ours", "four rows together")
        ]
        with capsys.disabled():
            words.append(f"torch {medians['torch']:.3f} s")
            print(f"\nMiniLM on MRPC, a step of 32 rows, {dtype}: {'; '.join(words)}")


def _ratio(other: list[float], own: list[float]) -> float:
    """How many times as fast, step by step, without those that compile."""
    return statistics.median(a / b for a, b in zip(other[3:], own[3:], strict=True))
