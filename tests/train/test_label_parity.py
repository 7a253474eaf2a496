"""MiniLM trained on MRPC here and by torch: the same rows, head and settings, the same losses."""

import jax
import pytest
from tiny_models import config_of, starting_from

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.placement import cut, place_batch, place_scalars
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.state import create_state

STEPS = 50


class Ours:
    """The trainer's step: last layer, no dropout, float32."""

    def __init__(self, minilm_dir, folder):
        settings = {"pooling": "last", "dropout": 0.0, "together": 1, "lengths": (64, 96, 128)}
        settings["compute_dtype"] = "float32"
        for key, name in (("path", "train"), ("validation_path", "validation")):
            settings[f"data__{key}"] = str(folder / f"{name}.jsonl")
        self.config = read(config_of("p32_glue", f"{minilm_dir},mrpc", **settings))
        mesh, self.model = partition.make_mesh(**self.config.mesh), starting_from(self.config)
        built = plan(self.config, mesh, self.model)
        self.batches = built.open_data(self.model.tokenizer).batches
        self.hyper, self.shardings = self.config.hyper(built.objective.terms), built.shardings
        self.train_step = built.train_step
        given = (self.model.params, built.optimizer, built.trainable)
        self.state = create_state(*given, seed=0, shardings=self.shardings[0])

    def __call__(self, step: int, batch: dict) -> float:
        placed = place_batch(cut(batch, 1, False), self.shardings[1])
        hyper = place_scalars(self.hyper(step), self.shardings[2])
        self.state, metrics = self.train_step(self.state, placed, hyper)
        jax.block_until_ready(self.state)
        return float(metrics["loss"])


class Theirs:
    """The usual loop in torch: clipped gradients, AdamW; starts from `save_pretrained`'s files."""

    def __init__(self, torch, directory, rate):
        from transformers import AutoModelForSequenceClassification

        self.torch, self.rate = torch, rate
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
        made = self.model(**given)
        self.optimizer.zero_grad()
        made.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return made.loss.item()


@pytest.fixture(scope="module")
def setup(torch, minilm_dir, shared_data, tmp_path_factory):
    """(ours in float32, the directory that torch starts from, the learning rate of a step)."""
    ours = Ours(minilm_dir, shared_data / "glue_mrpc")
    start = tmp_path_factory.mktemp("s")
    save_pretrained(ours.model.config, ours.model.params, start, overwrite=True)
    return ours, start, lambda step: ours.hyper(step)["learning_rate"]


@pytest.mark.slow
def test_fifty_steps_of_minilm_on_mrpc(torch, setup):
    """The losses differ by less than 1e-3."""
    ours, start, rate = setup
    theirs, worst = Theirs(torch, start, rate), 0.0
    for step in range(STEPS):
        batch = next(ours.batches)
        worst = max(worst, abs(ours(step, batch) - theirs(step, batch)))
    assert worst < 1e-3
