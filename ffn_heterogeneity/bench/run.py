"""`scripts/benchmark.py`; its step: forward and training step, ours and a peer's in turn."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from ml_collections import ConfigDict

from ffn_heterogeneity.bench.losses import (
    benchmark_nll,
    benchmark_nucl,
    paired_interval,
    ratio_interval,
    take_turns,
)
from ffn_heterogeneity.bench.similarity import benchmark_similarity
from ffn_heterogeneity.bench.streaming import benchmark_streaming
from ffn_heterogeneity.io.export import save_pretrained
from ffn_heterogeneity.io.files import write_json
from ffn_heterogeneity.losses.jreg import jreg_term
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.report.tables import markdown_table
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_train_step

LEARNING_RATE = 1e-6


def benchmark_step(config: ConfigDict) -> dict:
    """Times forward (logits) and forward + backward + AdamW of one batch [batch, seq_len].

    The peer ("transformers": torch on the same weights, its default attention, fused AdamW) takes
    turns with ours in one process; ratios above 1 mean that ours is faster. The step with NUCL
    (mstd) beside the one without shows what the term adds.

    Raises:
      ValueError: an unknown peer or model.
    """
    if config.peer not in ("", "transformers"):
        raise ValueError(f"peer={config.peer!r}: choose 'transformers' or none")
    model, params, tokens, options = _inputs(config)
    cases: dict[str, Callable[[], object]] = {}
    if config.peer:
        # Before our steps, which donate their state.
        cases |= peer_calls(model, params, tokens)
    cases |= our_calls(model, params, tokens, options)
    print(f"compiling and warming up: {', '.join(cases)}", file=sys.stderr)
    times = take_turns(cases, config.repetitions)
    pairs = [("train step + NUCL", "train step")]
    if config.peer:
        pairs += [("forward", "peer forward"), ("train step", "peer train step")]
    return _report(config, times, pairs)


def benchmark_jreg(config: ConfigDict) -> dict:
    """Times the training step with JREG and without, in turn: what the term adds.

    Raises:
      ValueError: an unknown model.
    """
    model, params, tokens, options = _inputs(config)
    terms = {"train step": (), "train step + JREG": (jreg_term(TermContext("jreg")),)}
    calls = our_calls(model, params, tokens, options, terms)
    cases = {name: calls[name] for name in terms}
    print(f"compiling and warming up: {', '.join(cases)}", file=sys.stderr)
    times = take_turns(cases, config.repetitions)
    results = _report(config, times, [("train step", "train step + JREG")])
    paired = paired_interval(times["train step + JREG"], times["train step"])
    print("median of the rounds' ratios: {:.3f} ({:.3f} .. {:.3f})".format(*paired))
    return results | {"paired": paired}


def _inputs(config: ConfigDict) -> tuple[ModelConfig, dict, np.ndarray, RunOptions]:
    """(model, random parameters, random tokens [batch, seq_len + 1], options)."""
    model, _ = preset(config.model)
    tokens = np.random.default_rng(0).integers(
        0, model.vocab_size, (config.batch, config.seq_len + 1), dtype=np.int32
    )
    options = RunOptions(
        compute_dtype=jnp.dtype(config.compute_dtype), remat=config.remat, unroll=config.unroll
    )
    return model, causal_lm.init(model, jax.random.key(0)), tokens, options


def _report(config: ConfigDict, times: dict, pairs: list[tuple[str, str]]) -> dict:
    """Prints medians, and how much longer the second of each pair takes than the first."""
    tokens_per_call = config.batch * config.seq_len
    rows = [
        (name, f"{np.median(t):.3f} s", f"{tokens_per_call / np.median(t):,.0f}")
        for name, t in times.items()
    ]
    print(markdown_table(("call", "median", "tokens/s"), rows))
    ratios = {}
    for ours, reference in pairs:
        ratios[f"{reference} / {ours}"] = ratio_interval(times[reference], times[ours])
    print()
    print(
        markdown_table(
            ("ratio of times", "median", "95% interval"),
            [(n, f"{m:.3f}", f"{low:.3f} .. {high:.3f}") for n, (m, low, high) in ratios.items()],
        )
    )
    return {"seconds": times, "ratios": ratios, "tokens_per_call": tokens_per_call}


def our_calls(
    model: ModelConfig,
    params: dict,
    tokens: np.ndarray,
    options: RunOptions,
    steps: dict[str, tuple] | None = None,
) -> dict[str, Callable[[], object]]:
    """ "forward", and train steps of one batch: name -> terms beside the NLL (default: with NUCL
    and without)."""
    if steps is None:
        steps = {"train step": (), "train step + NUCL": (nucl_term(TermContext("nucl")),)}

    @jax.jit
    def logits(params, tokens):
        outputs = causal_lm.forward(model, params, {"tokens": tokens}, options=options)
        return causal_lm.logits(model, params, outputs["hidden"])

    def forward(params, batch, *, probes, dropout):
        return causal_lm.forward(
            model, params, batch, options=options, probes=probes, dropout=dropout
        )

    trainable = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), params, trainable)
    batch = {
        "tokens": tokens[None, :, :-1],
        "targets": tokens[None, :, 1:],
        "loss_mask": np.ones((1, *tokens[:, 1:].shape), bool),
    }
    hyper = {"learning_rate": jnp.float32(LEARNING_RATE)}

    def step_call(terms) -> Callable[[], object]:
        step = make_train_step(forward, terms, optimizer, trainable)
        state = create_state(params, optimizer, trainable)
        holder = [state]

        def call():
            holder[0], metrics = step(holder[0], batch, hyper)
            return jax.block_until_ready(metrics["loss"])

        return call

    inputs, text = jnp.asarray(tokens[:, :-1]), nll_term(TermContext("nll", model=model))
    return {
        "forward": lambda: jax.block_until_ready(logits(params, inputs)),
        **{name: step_call((text, *terms)) for name, terms in steps.items()},
    }


def peer_calls(
    model: ModelConfig, params: dict, tokens: np.ndarray
) -> dict[str, Callable[[], object]]:
    """The same two calls by torch `transformers`, on the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, params, f"{directory}/model")
        peer = AutoModelForCausalLM.from_pretrained(
            f"{directory}/model", dtype=torch.float32, trust_remote_code=False
        )
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


BENCHMARKS: dict[str, Callable[[ConfigDict], dict]] = {
    "nucl": lambda config: benchmark_nucl(),
    "nll": lambda config: benchmark_nll(),
    "step": benchmark_step,
    "jreg": benchmark_jreg,
    "streaming": lambda config: benchmark_streaming(
        preset(config.model)[0], config.repetitions, directory=config.directory or None
    ),
    "similarity": lambda config: benchmark_similarity(preset(config.model)[0], config.repetitions),
}


def run(config: ConfigDict, workdir: epath.Path) -> dict:
    """Runs the benchmark `config.name`; returns what `results.json` holds.

    Raises:
      ValueError: no such benchmark.
    """
    if config.name not in BENCHMARKS:
        raise ValueError(
            f"benchmark {config.name!r}: write scripts/benchmark.py {'|'.join(BENCHMARKS)}"
        )
    results = BENCHMARKS[config.name](config)
    write_json(workdir / "results.json", results)
    return results
