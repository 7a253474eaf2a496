"""What a step costs, measured: ours and a peer's in turn, with an added term and without."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from ffn_heterogeneity.bench.timing import paired_interval, print_ratios, ratio_interval, take_turns
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.losses.jreg import jreg_term
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import LossTerm, TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.report.tables import markdown_table
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.wording import check_choice

LEARNING_RATE = 1e-6
Call = Callable[[], object]


class Subject(NamedTuple):
    """What is measured: a model of random weights, on random tokens [batch, seq_len + 1]."""

    model: ModelConfig
    params: dict
    tokens: np.ndarray
    options: RunOptions


def benchmark_step(config: ConfigDict) -> dict:
    """Times forward (logits) and forward + backward + AdamW of one batch [batch, seq_len].

    The peer ("transformers": torch on the same weights, its default attention, fused AdamW) takes
    turns with ours in one process; ratios above 1 mean that ours is faster. The step with NUCL
    (mstd) beside the one without shows what the term adds.

    Raises:
      ValueError: an unknown peer or model.
    """
    check_choice("peer", config.peer, ("", "transformers"))
    subject = make_subject(config)
    # The peer before our steps, which donate their state.
    calls = peer_calls(subject) if config.peer else {}
    calls |= {
        "forward": forward_call(subject),
        "train step": train_call(subject),
        "train step + NUCL": train_call(subject, nucl_term(TermContext("nucl"))),
    }
    pairs = [("train step + NUCL", "train step")]
    if config.peer:
        pairs += [("forward", "peer forward"), ("train step", "peer train step")]
    return _measure(config, calls, pairs)


def benchmark_jreg(config: ConfigDict) -> dict:
    """Times the training step with JREG and without, in turn: what the term adds.

    Raises:
      ValueError: an unknown model.
    """
    subject = make_subject(config)
    calls = {
        "train step": train_call(subject),
        "train step + JREG": train_call(subject, jreg_term(TermContext("jreg"))),
    }
    results = _measure(config, calls, [("train step", "train step + JREG")])
    seconds = results["seconds"]
    paired = paired_interval(seconds["train step + JREG"], seconds["train step"])
    print("median of the rounds' ratios: {:.3f} ({:.3f} .. {:.3f})".format(*paired))
    return results | {"paired": paired}


def make_subject(config: ConfigDict) -> Subject:
    """Of `config.model`, a preset; errors as `preset`."""
    model, _ = preset(config.model)
    shape = (config.batch, config.seq_len + 1)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, shape, dtype=np.int32)
    options = RunOptions(
        compute_dtype=jnp.dtype(config.compute_dtype), remat=config.remat, unroll=config.unroll
    )
    return Subject(model, causal_lm.init(model, jax.random.key(0)), tokens, options)


def _measure(config: ConfigDict, calls: dict[str, Call], pairs: list[tuple[str, str]]) -> dict:
    """Prints medians, and how much longer the second of each pair takes than the first."""
    print(f"compiling and warming up: {', '.join(calls)}", file=sys.stderr)
    seconds = take_turns(calls, config.repetitions)
    tokens = config.batch * config.seq_len
    rows = [
        (name, f"{np.median(one):.3f} s", f"{tokens / np.median(one):,.0f}")
        for name, one in seconds.items()
    ]
    print(f"{markdown_table(('call', 'median', 'tokens/s'), rows)}\n")
    ratios = {
        f"{reference} / {ours}": ratio_interval(seconds[reference], seconds[ours])
        for ours, reference in pairs
    }
    print_ratios(ratios)
    return {"seconds": seconds, "ratios": ratios, "tokens_per_call": tokens}


def forward_call(subject: Subject) -> Call:
    """Logits of the batch."""
    model, params, tokens, options = subject

    @jax.jit
    def logits(params, tokens):
        outputs = causal_lm.forward(model, params, {"tokens": tokens}, options=options)
        return causal_lm.logits(model, params, outputs["hidden"])

    inputs = jnp.asarray(tokens[:, :-1])
    return lambda: logits(params, inputs)


def train_call(subject: Subject, *added: LossTerm) -> Call:
    """One step of AdamW on the NLL and the terms added, each with weight 1."""
    model, params, tokens, options = subject

    forward = functools.partial(causal_lm.forward, model, options=options)
    trainable = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), params, trainable)
    terms = (nll_term(TermContext("nll", model=model)), *added)
    step = make_train_step(forward, terms, optimizer, trainable)
    batch = {
        "tokens": tokens[None, :, :-1],
        "targets": tokens[None, :, 1:],
        "loss_mask": np.ones((1, *tokens[:, 1:].shape), bool),
    }
    hyper = {"learning_rate": jnp.float32(LEARNING_RATE)}
    holder = [create_state(params, optimizer, trainable)]

    def call():
        holder[0], metrics = step(holder[0], batch, hyper)
        return metrics["loss"]

    return call


def peer_calls(subject: Subject) -> dict[str, Call]:
    """Forward and train step by torch `transformers`, on the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model, params, tokens, _ = subject
    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, params, f"{directory}/model")
        peer = AutoModelForCausalLM.from_pretrained(f"{directory}/model", dtype=torch.float32)
    inputs = torch.tensor(tokens[:, :-1].astype(np.int64))
    targets = torch.tensor(tokens[:, 1:].astype(np.int64))
    optimizer = torch.optim.AdamW(peer.parameters(), lr=LEARNING_RATE, fused=True)

    def forward():
        with torch.no_grad():
            return peer(input_ids=inputs, use_cache=False).logits

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = peer(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"peer forward": forward, "peer train step": step}
