"""A task from outside the package, and a process that trains on it: `outside_task.py <files>
<workdir> <distributed> [stop]`. What `register` adds is all that the package is told.

Rows of 4 to 32 tokens with a score and one of three kinds, in new batch leaves; batches of
16 or 32 tokens, drawn by the seed and the step; a head with a pooler; Spearman's rank correlation
over each of two held-out sets, on the host. A refresh scales the embedding while training, and lets
it be otherwise. `stop`: kills itself after that many steps.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import config_of

from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.heads import HEADS, ROOT, Head
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.train import build, loop
from ffn_heterogeneity.train.objectives import Data, Objective
from ffn_heterogeneity.tree import weights

KINDS, LENGTHS = 3, (16, 32)


def rows_of(count: int, seed: int) -> list[tuple]:
    """(tokens, score, kind): the share of high tokens, and the third of the first token."""
    rng, rows = np.random.default_rng(seed), []
    for length in rng.integers(4, 33, count):
        tokens = rng.integers(2, 258, length)
        rows.append((tokens, np.mean(tokens > 129 + 60 * rng.normal()), (tokens[0] - 2) // 86))
    return rows


def batch_of(rows: list[tuple], length: int, size: int) -> dict:
    batch = {name: np.zeros((size, length), np.int32) for name in ("tokens", "segment_ids")}
    batch |= {"score": np.zeros(size, np.float32), "kind": np.full(size, -1, np.int32)}
    for i, (tokens, score, kind) in enumerate(rows):
        batch["tokens"][i, : len(tokens)] = tokens
        batch["segment_ids"][i, : len(tokens)] = 1
        batch["score"][i], batch["kind"][i] = score, kind
    return batch


class Drawn:
    """Batches whose length and rows are those of (seed, step), in every process."""

    def __init__(self, rows, size, mine, seed):
        self.rows, self.size, self.mine, self.seed, self.step = rows, size, mine, seed, 0

    def __next__(self):
        rng = np.random.default_rng([self.seed, self.step])
        self.step += 1
        length = LENGTHS[rng.integers(2)]
        fitting = [row for row in self.rows if len(row[0]) <= length]
        chosen = [fitting[i] for i in rng.choice(len(fitting), self.size, replace=False)]
        return {k: v[self.mine] for k, v in batch_of(chosen, length, self.size).items()}

    def get_state(self):
        return {"step": self.step}

    def set_state(self, state):
        self.step = state["step"]

    def close(self):
        pass


def held_out(rows, size, mine):
    def batches():
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            length = next(n for n in LENGTHS if max(len(row[0]) for row in chunk) <= n)
            yield {k: v[mine] for k, v in batch_of(chunk, length, size).items()}

    return batches


def scores(config, model):
    size = config.batch_size

    def data(tokenizer, rows):
        counts = {"near": (18, 1), "far": (10, 2)}
        sets = {name: held_out(rows_of(*count), size, rows) for name, count in counts.items()}
        batches = Drawn(rows_of(64, 0), size, rows, config.seed)
        return Data(batches, sets, lambda results: {"rows": 64})

    def predictions(params, outputs, batch):
        made = outputs["predictions"]
        said = {"said": made[:, 0], "kind": made[:, 1:].argmax(1), "valid": batch["kind"] >= 0}
        return said | {"meant": batch["score"], "meant_kind": batch["kind"]}

    leaves = dict.fromkeys(("tokens", "segment_ids"), (("B", "T"), np.int32))
    return Objective(
        "scores",
        batch=leaves | {"score": (("B",), np.float32), "kind": (("B",), np.int32)},
        lengths=tuple({"T": length} for length in LENGTHS),
        data=data,
        head=HeadConfig.of("pooled", {"outputs": 1 + KINDS}),
        terms={"squares": {"weight": 1.0}, "kinds": {"weight": 0.1}},
        counts=lambda batch: {"tokens": jnp.sum(batch["segment_ids"])},
        predictions=predictions,
        metrics=metrics,
        best="max:validation/near/spearman",
    )


def metrics(rows):
    said, meant = (np.argsort(np.argsort(rows[name])) for name in ("said", "meant"))
    right = float(np.mean(rows["kind"] == rows["meant_kind"]))
    rank = float(np.corrcoef(said, meant)[0, 1])
    return {"spearman": rank, "rows": float(len(said)), "accuracy": right}


def pooled(model, settings):
    """tanh of a projection of the mean state, then a projection to the outputs."""
    leaves = {"pooler/kernel": weights("d_model", "pooled", cut=False)}
    leaves["out/kernel"] = weights("d_model", "outputs", cut=False)

    def apply(params, outputs, batch, drop):
        real = batch["segment_ids"][..., None].astype(jnp.float32)
        mean = jnp.sum(outputs["hidden"] * real, 1) / jnp.maximum(jnp.sum(real, 1), 1)
        head = params[ROOT]
        return drop(jnp.tanh(mean @ head["pooler"]["kernel"])) @ head["out"]["kernel"]

    return Head(leaves, apply, sizes={"outputs": settings["outputs"]})


def squares(context):
    def function(params, outputs, batch):
        real = batch["kind"] >= 0
        error = jnp.where(real, (outputs["predictions"][:, 0] - batch["score"]) ** 2, 0)
        return TermValue(jnp.sum(error), jnp.sum(real) * 1.0)

    return LossTerm(context.name, function, context.weight)


def kinds(context):
    def function(params, outputs, batch):
        log_p = jax.nn.log_softmax(outputs["predictions"][:, 1:])
        chosen = jnp.take_along_axis(log_p, jnp.maximum(batch["kind"], 0)[:, None], 1)[:, 0]
        real = batch["kind"] >= 0
        return TermValue(-jnp.sum(jnp.where(real, chosen, 0)), jnp.sum(real) * 1.0)

    return LossTerm(context.name, function, context.weight)


def wobble(settings):
    def refresh(params, step, key, hyper, train):
        if not train:
            return params
        noise = 1 + settings["size"] * jax.random.normal(key, ())
        return {**params, "embed": {"embedding": params["embed"]["embedding"] * noise}}

    return refresh


ADDED = ((build.OBJECTIVES, "scores", scores), (HEADS, "pooled", pooled))
ADDED += ((REFRESHES, "wobble", wobble), (TERMS, "squares", squares), (TERMS, "kinds", kinds))


def register():
    for registry, name, piece in ADDED:
        registry[name] = piece


def config_for(model: Path | str, **changes):
    small = {"steps": 6, "batch_size": 4, "accumulation": 2, "seq_len": 64, "dropout": 0.1}
    small |= {"eval__every": 2, "checkpoint__every": 2, "tensorboard": False}
    small |= {"optimizer__learning_rate": 3e-3, "optimizer__warmup_steps": 0}
    config = config_of("nucl_finetune", f"{model},text", **(small | changes))
    with config.unlocked():
        config.objective, config.refresh, config.wobble = "scores", ("wobble",), {"size": 0.1}
        config.optimizer.rates = ((r"^task_head/", 10.0),)
        del config.losses["nll"], config.losses["nucl"], config.monitors["entropy"]
    return config


def main(files: str, workdir: str, how: str, stop: str = "0") -> None:
    distributed.initialize("" if how == "alone" else how)
    register()
    if int(stop):
        train_one = loop.TrainLoop._train_one

        def train_or_die(self):
            if self.step == int(stop):
                os.kill(os.getpid(), signal.SIGKILL)
            train_one(self)

        loop.TrainLoop._train_one = train_or_die
    training.run(config_for(f"{files}/model"), workdir)


if __name__ == "__main__":
    main(*sys.argv[1:])
