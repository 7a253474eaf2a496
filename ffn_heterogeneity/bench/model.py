"""The measured cost of a model: forward, training step, perplexity, generation, beside a peer's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.bench.peer import PEERS, Torch
from ffn_heterogeneity.bench.timing import Questions, machine, paired_interval, said
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.jreg import jreg_term
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.options import RunOptions, choose_dtype, products
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.wording import check_choice

STEP = "train step"
TERMS = {f"{STEP} + NUCL": nucl_term, f"{STEP} + JREG": jreg_term}
# Steps of adapters alone, rank 16 on all linear layers; MacDrop at five massive neurons.
ADAPTED = {
    f"{STEP} of LoRA": ("lora",),
    f"{STEP} of LoRA + MacDrop": ("lora", "macdrop"),
    f"{STEP} of DoRA": ("dora",),
}
LORA = {"rank": 16, "alpha": 16.0, "targets": "attention/|ffn/"}
MACDROP = {"k": 5, "scope": "massive", "layer": 0, "token": 0}
SETTINGS = {"lora": LORA, "dora": LORA, "macdrop": MACDROP}
CALLS = ("forward", STEP, *TERMS, *ADAPTED, "perplexity", "generate 1", "generate 8", "generate 32")
DTYPES = ("float32", "bfloat16")
LEARNING_RATE = 1e-6
PROMPT, NEW = 64, 32  # tokens a row of generation
PEER = "torch: "
BESIDE = "Torch's time / ours"
GENERATED = f"{BESIDE}; `generate n` continues n prompts of {PROMPT} tokens by {NEW}"
SHAPE, WHOLE = r"^[^,]+|\d+ x \d+ tokens", r"^[^;]+"
QUESTIONS: Questions = {
    "Is a training step as fast as torch's?": (BESIDE, rf"{STEP}, (\w+)", SHAPE),
    "Is a forward pass as fast as torch's?": (BESIDE, r"forward, (\w+)", SHAPE),
    "Is perplexity as fast as torch's?": (BESIDE, r"perplexity, (\w+)", WHOLE),
    "Is generating as fast as torch's?": (GENERATED, r"(generate \d+, \w+)", r"^[^,]+"),
    "Do NUCL and JREG slow a step?": ("With / without", rf"{STEP} \+ (.*) / {STEP}, .*", SHAPE),
    "Do MacDrop and DoRA slow LoRA steps?": ("Time / LoRA's", rf"{STEP} of (.*) / {STEP}.*", SHAPE),
    # Of the calls themselves: those with a term have a "+".
    "Is bfloat16 faster?": ("Time in float32 / bfloat16", r"([^+]+), float32 / bfloat16", WHOLE),
}


def benchmark_model(config: Any, workdir: epath.Path, model: ModelConfig | None = None) -> dict:
    """Times `config.calls` in each of `config.dtypes`, ours and the peer's in turn.

    Of a model of random weights on random tokens: "forward" gives the logits of a batch [batch,
    seq_len]; "train step" is forward, backward and AdamW on it, with the NLL alone, NUCL (mstd) or
    JREG added, or of adapters alone; "perplexity" is of `config.windows` windows, a batch at once;
    "generate n" continues n prompts of 64 tokens by 32, greedily.

    Args:
      model: None: the preset `config.model`.

    Raises:
      ValueError: an unknown peer, model, call or dtype.
    """
    check_choice("peer", config.peer, ("", *PEERS))
    for key, choices in (("calls", CALLS), ("dtypes", DTYPES)):
        for name in config[key]:
            check_choice(key, name, choices)
    model = model or preset(config.model)[0]
    ours, peer, about, calls = Ours(model, config), None, machine(), {}
    if config.peer:
        sizes = {"batch": config.batch, "new": NEW, "learning_rate": LEARNING_RATE}
        peer = Torch(model, ours.params, **sizes, peer=config.peer)
        about |= {"peer": config.peer} | peer.about()
    for call in config.calls:
        for dtype in config.dtypes:
            arguments = call, dtype, ours.rows(call)
            calls[f"{call}, {dtype}"] = products(dtype)(ours.call(*arguments))
            if peer and call not in (*TERMS, *ADAPTED):
                calls[f"{PEER}{call}, {dtype}"] = peer.call(*arguments)
    print(f"{len(calls)} calls in {config.repetitions} rounds; kept in {workdir / 'rounds'}")
    seconds = timing.take_turns(calls, config.repetitions, workdir / "rounds")
    return {"machine": about, "seconds": seconds, "tables": tables(seconds, config)}


class Ours:
    """The calls of this package on a model of random weights."""

    def __init__(self, model: ModelConfig, config: Any):
        self.model, self.params = model, causal_lm.init(model, jax.random.key(0))
        self.options = RunOptions(remat=config.remat, unroll=config.unroll)
        rng, self.batch = np.random.default_rng(0), config.batch
        draw = functools.partial(rng.integers, 0, model.vocab_size, dtype=np.int32)
        self.tokens = draw((config.batch, config.seq_len + 1))
        self.windows = draw((config.windows, config.window))
        self.states: dict[str, list] = {}

    def rows(self, call: str) -> np.ndarray:
        """The tokens that a call reads."""
        if call.startswith("generate"):
            return np.resize(self.windows, (int(call.split()[1]), PROMPT))
        return self.windows if call == "perplexity" else self.tokens

    def call(self, name: str, dtype: str, rows: np.ndarray) -> Callable[[], Any]:
        """The call, compiled when it is first called."""
        options = dataclasses.replace(self.options, compute_dtype=jnp.dtype(dtype))
        if name == "perplexity":
            measured = functools.partial(perplexity, self.model, self.params, rows, progress=None)
            return functools.partial(measured, batch_size=self.batch, options=options)
        if name == "forward":
            return functools.partial(_logits, self.model, options, self.params, rows[:, :-1])
        if name in (STEP, *TERMS, *ADAPTED):
            return self._step(name, options, rows)
        generator = Generator(self.model, self.params, options=options, batch_size=len(rows))
        greedy = Sampling(max_new_tokens=NEW, eos=())
        return functools.partial(generator, list(rows), greedy, progress=None)

    def _step(self, name: str, options: RunOptions, rows: np.ndarray) -> Callable[[], Any]:
        prepared, thin = Model(self.model, self.params, None, ""), name in ADAPTED
        for surgery in ADAPTED.get(name, ()):
            prepared, _ = SURGERIES[surgery](prepared, SETTINGS[surgery])
        params, patterns = prepared.params, (r"/(lora_[ab]|dora_m)$",) if thin else ()
        trainable = partition.trainable_mask(declared(self.model, params), (), patterns)
        optimizer = make_optimizer(OptimizerConfig(name="adamw"), params, trainable)
        terms = [nll_term(TermContext("nll", model=self.model))]
        if name in TERMS:
            terms.append(TERMS[name](TermContext("added")))
        forward = functools.partial(causal_lm.forward, self.model, options=options)
        drops = REFRESHES["macdrop"]({}) if "macdrop" in ADAPTED.get(name, ()) else None
        step = make_train_step(forward, terms, optimizer, trainable, refresh=drops)
        # Steps of everything share one state, which they donate.
        held = self.states.setdefault(name if thin else STEP, [])
        if not held:
            held.append(create_state(params, optimizer, trainable))
        mask = np.ones((1, *rows[:, 1:].shape), bool)
        batch = {"tokens": rows[None, :, :-1], "targets": rows[None, :, 1:], "loss_mask": mask}
        hyper = {"learning_rate": LEARNING_RATE, "macdrop": 0.8}
        call = timing.stepping(step, held, batch, hyper)
        return lambda: call()[1]["loss"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(model, options, params, tokens):
    hidden = causal_lm.forward(model, params, {"tokens": tokens}, options=options)["hidden"]
    return causal_lm.logits(model, params, hidden)


def tables(seconds: dict[str, np.ndarray], config: Any) -> list[dict]:
    """Medians beside the peer's, and ratios inside ours: terms added, bfloat16 for float32."""
    rows, ratios, lora = [], {}, next(iter(ADAPTED))
    beside = dict.fromkeys(TERMS, STEP) | {one: lora for one in ADAPTED if one != lora}
    # On a machine without such units bfloat16 is emulated, by torch as by XLA.
    emulated = "" if choose_dtype("auto") == jnp.bfloat16 else " (no bfloat16 units)"
    for call in config.calls:
        for dtype in config.dtypes:
            name, plain = f"{call}, {dtype}", f"{beside.get(call)}, {dtype}"
            ours, peer, cells = seconds[name], seconds.get(PEER + name), ("-", "-")
            if peer is not None:
                cells = f"{np.median(peer):.3f}", said(paired_interval(peer, ours))
            label = name + emulated if dtype == "bfloat16" else name
            rows.append((label, f"{np.median(ours):.3f}", *cells))
            if plain in seconds:
                ratios[f"{name} / {plain}"] = paired_interval(ours, seconds[plain])
        if set(DTYPES) <= set(config.dtypes):
            full, half = (seconds[f"{call}, {dtype}"] for dtype in DTYPES)
            ratios[f"{call}, float32 / bfloat16"] = paired_interval(full, half)
    size = f"{config.batch} x {config.seq_len} tokens"
    title = f"{config.model}, {size}, perplexity of {config.windows} windows of {config.window}; "
    title += f"{config.repetitions} rounds, medians in seconds, ratios of each round's own"
    columns = ("call", "ours", "peer", "peer / ours (95% interval)")
    made = [timing.table(title, columns, rows)]
    return [*made, timing.table_of_ratios(ratios)] if ratios else made
