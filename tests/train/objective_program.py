"""An objective and a refresh of the test's own, in a process: `objective_program.py <files>
<workdir> <distributed> [stop]`; what it registers is all that the package is told.

Three classes by the first letter of the answer, pooled where the answer begins, as CommitmentBank:
macro-F1 over the whole held-out part, on the host. The refresh scales the embedding while training,
and lets it be otherwise. `stop`: kills itself after that many steps.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import config_of

from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.evaluate.metrics import cb
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.surgery import SURGERIES, Surgery
from ffn_heterogeneity.train import loop
from ffn_heterogeneity.train import run as training
from ffn_heterogeneity.train.objectives import OBJECTIVES, Objective

WORDS = ("entailment", "contradiction", "neutral")
IDS = None  # of the words' first letters, from the tokenizer


def place(batch):
    """[B]: where the answer begins; and its class, 3 for a row without an answer."""
    first = jnp.argmax(batch["loss_mask"], axis=1)
    answer = jnp.take_along_axis(batch["targets"], first[:, None], 1)
    kind = jnp.argmax(jnp.concatenate([answer == jnp.asarray(IDS), jnp.ones_like(answer)], 1), 1)
    return first, jnp.where(batch["loss_mask"].any(1), kind, 3)


def head(leaves, outputs, batch):
    pooled = jnp.take_along_axis(outputs["hidden"], place(batch)[0][:, None, None], 1)[:, 0]
    return pooled @ leaves["kernel"] + leaves["bias"]


def predictions(params, outputs, batch):
    kind = place(batch)[1]
    return {"said": outputs["predictions"].argmax(1), "meant": kind, "valid": kind < 3}


def metrics(rows):
    said, meant = ([WORDS[i] for i in rows[name]] for name in ("said", "meant"))
    return cb(said, meant) | {"rows": float(len(said))}


def classes(context):
    def function(params, outputs, batch):
        kind = place(batch)[1]
        log_p = jax.nn.log_softmax(outputs["predictions"])
        chosen = jnp.take_along_axis(log_p, jnp.minimum(kind, 2)[:, None], 1)[:, 0]
        return TermValue(-jnp.sum(jnp.where(kind < 3, chosen, 0)), jnp.sum(kind < 3) * 1.0)

    return LossTerm(context.name, function, context.weight)


def add_head(model, settings, data=None, key=None):
    kernel = 0.02 * jax.random.normal(key, (model.config.d_model, settings["classes"]))
    leaves = {"kernel": kernel, "bias": jnp.zeros(settings["classes"])}
    return dataclasses.replace(model, params={**model.params, "task_head": leaves}), {}


def wobble(settings):
    def refresh(params, step, key, hyper, train):
        if not train:
            return params
        noise = 1 + settings["size"] * jax.random.normal(key, ())
        embedding = params["embed"]["embedding"] * noise
        return {**params, "embed": {"embedding": embedding}}

    return refresh


def register():
    OBJECTIVES["three_classes"] = lambda config, model: Objective(head, predictions, metrics)
    TERMS["classes"] = classes
    REFRESHES["wobble"] = wobble
    Three = dataclasses.make_dataclass("Three", ["classes"])
    SURGERIES["three"] = Surgery("three", add_head, Three, abstract=True)


def config_for(files: Path, **changes):
    small = {
        "steps": 6, "batch_size": 4, "accumulation": 2, "seq_len": 64, "dropout": 0.0,
        "data__path": str(files / "rows.jsonl"), "data__validation_fraction": 0.3,
        "data__packing": False, "eval__every": 2, "optimizer__learning_rate": 3e-3,
        "optimizer__warmup_steps": 0, "tensorboard": False, "losses__nucl__weight": None,
        "losses__nll__weight": None, "checkpoint__every": 2,
        "eval__best_metric": "max:validation/macro_f1",
    }  # fmt: skip
    config = config_of("nucl_finetune", f"{files}/model,jsonl", **(small | changes))
    with config.unlocked():
        config.objective, config.prepare, config.refresh = "three_classes", ("three",), ("wobble",)
        config.three, config.wobble = {"classes": 3}, {"size": 0.1}
        config.losses.classes = {"weight": 1.0}
        config.optimizer.rates = ((r"^task_head/", 10.0),)
        del config.monitors["entropy"]
    return config


def main(files: str, workdir: str, how: str, stop: str = "0") -> None:
    global IDS
    distributed.initialize("" if how == "alone" else how)
    register()
    from ffn_heterogeneity.io.load import load_tokenizer

    tokenizer = load_tokenizer(f"{files}/model")
    IDS = tuple(tokenizer.encode(word, add_special_tokens=False)[0] for word in WORDS)
    if int(stop):
        train_one = loop.TrainLoop._train_one

        def train_or_die(self):
            if self.step == int(stop):
                os.kill(os.getpid(), signal.SIGKILL)
            train_one(self)

        loop.TrainLoop._train_one = train_or_die
    np.random.seed(0)
    training.run(config_for(Path(files)), workdir)


if __name__ == "__main__":
    main(*sys.argv[1:])
