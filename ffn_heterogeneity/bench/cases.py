"""Benchmarks of losses and models: each builds its programs, and `timing` interleaves them."""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from ffn_heterogeneity.bench import timing
from ffn_heterogeneity.bench.peer import LEARNING_RATE, NEW, PEERS, PROMPT, Torch
from ffn_heterogeneity.bench.timing import Interval, compiled, machine, ratio_interval
from ffn_heterogeneity.evaluate.perplexity import perplexity
from ffn_heterogeneity.io.load import Model, load_config
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.losses.nucl import nucl
from ffn_heterogeneity.losses.nucl_listing import compute_nucl_listing
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.options import RunOptions, choose_dtype, products
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import make_refresh
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.wording import check_choice

# Trained leaves of models with adapters.
ADAPTERS = r"/(lora_[ab]|dora_m)$|^task_head/"


def time_nucl(config: Any, *_: Any, shape: tuple[int, ...] = (26, 2304, 576)) -> dict[str, Any]:
    """Time and memory that NUCL (mstd) adds to a donated SGD update W <- W - lr (g + alpha dNUCL).

    The programs are the update alone, with the paper's listing, and with the closed form; and a
    row sum, which reads W once (the lower bound). Ratios are between added times.

    Args:
      shape: [layers, m, n] of the float32 stack of outgoing kernels.
    """
    w = 0.02 * jax.random.normal(jax.random.key(0), shape, jnp.float32)
    held, gradient, alpha = [w], 0.1 * w, jnp.float32(1e-3)
    updates = {
        "update alone": donated_update(),
        "mstd listing": donated_update(lambda w: compute_nucl_listing(w)[2]),
        "mstd closed form": donated_update(functools.partial(nucl, variant="mstd")),
    }
    programs = {name: compiled(one, held, gradient, alpha) for name, one in updates.items()}
    row_sum = jax.jit(functools.partial(jnp.sum, axis=-1))
    programs["row sum"] = compiled(row_sum, [], gradient)

    def ratios(seconds: Mapping[str, np.ndarray]) -> dict[str, Interval]:
        base, listing, closed, floor = seconds.values()
        return {
            "mstd: listing / closed form": ratio_interval(listing, closed, base),
            "mstd: closed form / row sum": ratio_interval(closed - base, floor),
        }

    title = f"donated SGD update of W {list(shape)} float32; ratios of what is added to it"
    return timing.compare(title, programs, config.repetitions, ratios)


def donated_update(loss: Callable[[jax.Array], jax.Array] | None = None) -> Any:
    """Jitted (W, gradient, alpha) -> (W after an SGD step on gradient + alpha * dloss/dW, {})."""

    @functools.partial(jax.jit, donate_argnums=0)
    def update(w, gradient, alpha):
        if loss is not None:
            gradient = gradient + jax.grad(lambda w, loss=loss: alpha * loss(w))(w)
        return w - 1e-3 * gradient, {}

    return update


def time_nll(config: Any, *_: Any, shape: tuple[int, ...] = (4, 512, 576, 49_152)) -> dict:
    """Value and gradient of the NLL of a tied head: chunked compared with plain, time and memory.

    Also timed: only the three products of the same size (the lower bound), and the chunked form
    with one target in 10 or in 100 positions.

    Args:
      shape: [B, T, D, V], float32.
    """
    b, t, d, v = shape
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, kernel = jax.random.normal(keys[0], (b, t, d)), jax.random.normal(keys[1], (v, d))
    arguments = hidden, 0.02 * kernel, jax.random.randint(keys[2], (b, t), 0, v)
    plain, chunked = (jax.jit(jax.value_and_grad(f, (0, 1))) for f in (_plain_nll, _chunked_nll))
    programs = {
        "plain": compiled(plain, [], *arguments),
        "chunked": compiled(chunked, [], *arguments),
        "three products": compiled(jax.jit(_products), [], *arguments[:2]),
    }
    pairs = [("plain", "chunked"), ("chunked", "three products")]
    for every in (10, 100):
        mask = jax.random.permutation(keys[2], jnp.arange(b * t) < b * t // every).reshape(b, t)
        programs[f"1 target in {every}"] = compiled(chunked, [], *arguments, mask)
        pairs.append((f"1 target in {every}", "chunked"))
    title = f"value and gradient of the NLL, [B, T, D, V] = {list(shape)} float32"
    ratios = timing.ratios_of(pairs, ratio_interval)
    return timing.compare(title, programs, config.repetitions, ratios)


def _plain_nll(hidden_btd, kernel_vd, targets_bt):
    logits_btv = jnp.einsum("btd,vd->btv", hidden_btd, kernel_vd)
    log_p_btv = jax.nn.log_softmax(logits_btv, axis=-1)
    return -jnp.sum(jnp.take_along_axis(log_p_btv, targets_bt[..., None], axis=-1))


def _chunked_nll(hidden_btd, kernel_vd, targets_bt, mask_bt=None):
    return chunked_nll(hidden_btd, kernel_vd, targets_bt, mask_bt, layout="vd").total


def _products(hidden_btd, kernel_vd):
    hidden_nd = hidden_btd.reshape(-1, hidden_btd.shape[-1])
    logits_nv = hidden_nd @ kernel_vd.T
    return logits_nv @ kernel_vd, logits_nv.T @ hidden_nd


def trained_leaves(model: Model, freeze: tuple[str, ...] = ()) -> dict[str, bool]:
    """{path: whether the leaf trains}; of adapters only they do, if nothing is frozen by name."""
    leaves = declared(model.config, model.params)
    adapted = not freeze and any(path.endswith("/lora_a") for path in leaves)
    return partition.trainable_mask(leaves, freeze, (ADAPTERS,) if adapted else ())


def train_step(
    model: Model,
    forward: Any,
    names: list[str],
    batch: dict,
    held: list,
    optimizer: str = "adamw",
    freeze: tuple[str, ...] = (),
    **more: Any,
) -> tuple:
    """(jitted step, `held` with its state, batch, hyper) for `trained_leaves`.

    Args:
      names: names in `losses.TERMS`.
      held: an empty list, or one with a state of this model, which is then shared.
      optimizer: a name of `OPTIMIZERS`.
      freeze: regexes of leaves that do not train.
      more: further arguments of `make_train_step`.
    """
    trainable = trained_leaves(model, freeze)
    update = make_optimizer(OptimizerConfig(name=optimizer), model.params, trainable)
    terms = [TERMS[name](TermContext(name, model=model.config)) for name in names]
    if not held:
        held.append(create_state(model.params, update, trainable))
    micro = {name: leaf[None] for name, leaf in batch.items()}
    hyper = {"learning_rate": LEARNING_RATE, "macdrop": 0.8}
    return make_train_step(forward, terms, update, trainable, **more), held, micro, hyper


LORA = {"rank": 16, "alpha": 16.0, "targets": "attention/|ffn/"}
DROP = {"k": 5, "scope": "massive", "layer": 0, "token": 0}
OF_LORA = "train step of LoRA"
# name -> (terms, surgeries with their settings, the step that it is compared with).
STEPS = {
    "train step": (["nll"], {}, ""),
    "train step + NUCL": (["nll", "nucl"], {}, "train step"),
    "train step + JREG": (["nll", "jreg"], {}, "train step"),
    OF_LORA: (["nll"], {"lora": LORA}, ""),
    "train step of LoRA + MacDrop": (["nll"], {"lora": LORA, "macdrop": DROP}, OF_LORA),
    "train step of DoRA": (["nll"], {"dora": LORA}, OF_LORA),
}
CALLS = ("forward", *STEPS, "perplexity", "generate 1", "generate 8", "generate 32")
DTYPES = ("float32", "bfloat16")


def time_model(
    config: Any, workdir: epath.Path, *_: Any, model: ModelConfig | None = None
) -> dict[str, Any]:
    """Time `config.calls` in each of `config.dtypes`, ours and the peer's interleaved.

    Weights and tokens are random. "forward" computes the logits of a batch [batch, seq_len]; for an
    encoder-decoder these are the encoder's tokens, and the decoder has a quarter of them. "train
    step" is forward, backward and AdamW on it, with the NLL alone, with NUCL (mstd) or JREG, or
    with only adapters trained; "perplexity" uses `config.windows` windows; "generate n" continues n
    prompts of 64 tokens by 32, greedily. Finished rounds are saved in `workdir`; a rerun reads
    them. The calls of a second model, `config.beside`, take their turns between them: with a peer
    each model is compared with its own, without one the two with each other.

    Args:
      model: None: `config.model`.

    Raises:
      ValueError: an unknown peer, model, call or dtype, or one that the model does not support.
    """
    check_choice("peer", config.peer, ("", *PEERS))
    for key, choices in (("calls", CALLS), ("dtypes", DTYPES)):
        for name in config[key]:
            check_choice(key, name, choices)
    about, calls = machine(), {}
    models = {"": model or load_config(config.model)}
    models |= {f"{config.beside}: ": load_config(config.beside)} if config.beside else {}
    for prefix, one in models.items():
        new, facts = _calls(one, config)
        calls |= {prefix + name: call for name, call in new.items()}
        about |= facts
    seconds = timing.take_turns(calls, config.repetitions, workdir / "rounds")
    return {"machine": about, "seconds": seconds, "tables": _tables(seconds, config)}


def _calls(model: ModelConfig, config: Any) -> tuple[dict[str, Callable[[], Any]], dict]:
    """{call and dtype: ours, "torch: " and the same: the peer's}, facts about the peer."""
    if "perplexity" in config.calls:
        causal_lm.require_decoder(model, "perplexity")
    ours, peer, about, calls = Ours(model, config), None, {}, {}
    if config.peer:
        peer = Torch(model, ours.params, config.batch, config.peer)
        about = {"peer": config.peer} | peer.about()
    for call, dtype in itertools.product(config.calls, config.dtypes):
        rows = ours.rows(call)
        calls[f"{call}, {dtype}"] = products(dtype)(ours.call(call, dtype, rows))
        if peer and call not in [*STEPS][1:]:
            calls[f"torch: {call}, {dtype}"] = peer.call(call, dtype, rows)
    return calls, about


class Ours:
    """The calls of this package on a model with random weights."""

    def __init__(self, model: ModelConfig, config: Any):
        self.model, self.params = model, causal_lm.init(model, jax.random.key(0))
        self.config, self.states = config, {}
        draw = functools.partial(np.random.default_rng(0).integers, 0, model.vocab_size)
        length = config.seq_len
        self.batch = {}
        if model.kind == "encoder_decoder":  # targets as in span corruption: about a quarter
            self.batch["encoder_tokens"] = draw((config.batch, length), np.int32)
            length = -(-length // 4)
        tokens = draw((config.batch, length + 1), np.int32)
        self.batch |= {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        self.windows = draw((config.windows, config.window), np.int32)

    def rows(self, call: str) -> Any:
        """The tokens that a call reads: a batch, or rows."""
        if call.startswith("generate"):
            return np.resize(self.windows, (int(call.split()[1]), PROMPT))
        return self.windows if call == "perplexity" else self.batch

    def call(self, name: str, dtype: str, rows: Any) -> Callable[[], Any]:
        """The call, which compiles the first time."""
        model_args, config, kind = (self.model, self.params), self.config, jnp.dtype(dtype)
        options = RunOptions(remat=config.remat, unroll=config.unroll, compute_dtype=kind)
        if name == "perplexity":
            more = {"batch_size": config.batch, "options": options, "progress": None}
            return functools.partial(perplexity, *model_args, rows, **more)
        if name.startswith("generate"):
            generator = Generator(*model_args, options=options, batch_size=len(rows))
            greedy = Sampling(max_new_tokens=NEW, eos=())
            return functools.partial(generator, list(rows), greedy, progress=None)
        forward = functools.partial(causal_lm.forward, self.model, options=options)
        if name == "forward":
            return functools.partial(_logits, self.model, options, self.params, rows)
        batch = rows | {"loss_mask": np.ones(rows["tokens"].shape, bool)}
        (terms, surgeries, _base), model = STEPS[name], Model(*model_args, None, "")
        for surgery, settings in surgeries.items():
            model = SURGERIES[surgery](model, settings)[0]
        drops = make_refresh({"macdrop": {}} if "macdrop" in surgeries else {})
        # Steps of the same tree share one state, which they donate.
        held = self.states.setdefault(tuple(surgeries), [])
        step = timing.stepping(*train_step(model, forward, terms, batch, held, refresh=drops))
        return lambda: step()[1]["loss"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(model, options, params, batch):
    hidden = causal_lm.forward(model, params, batch, options=options)["hidden"]
    return causal_lm.logits(model, params, hidden)


def _tables(seconds: Mapping[str, np.ndarray], config: Any) -> list[dict]:
    """Tables of medians and the peer's; ratios of ours: with/without a term, float32/bfloat16."""
    rows, ratios, paired = [], {}, timing.paired_interval
    # On a machine without such units, PyTorch and XLA emulate bfloat16.
    emulated = "" if choose_dtype("auto") == jnp.bfloat16 else " (no bfloat16 units)"
    for call, dtype in itertools.product(config.calls, config.dtypes):
        name, full, cells = f"{call}, {dtype}", f"{call}, float32", ("-", "-")
        ours, peer, half = seconds[name], seconds.get(f"torch: {name}"), dtype == "bfloat16"
        if peer is not None:
            cells = f"{np.median(peer):.3f}", timing.said(paired(peer, ours))
        rows.append((name + emulated if half else name, f"{np.median(ours):.3f}", *cells))
        base = f"{STEPS[call][-1]}, {dtype}" if call in STEPS else ""
        if base in seconds:
            ratios[f"{name} / {base}"] = paired(ours, seconds[base])
        if half and full in seconds:
            ratios[f"{full} / {dtype}"] = paired(seconds[full], ours)
        its = seconds.get(f"{config.beside}: {name}")
        if its is not None and peer is None:
            ratios[f"{name} over {config.beside}"] = paired(ours, its)
        elif its is not None:
            ahead = seconds[f"{config.beside}: torch: {name}"] / its
            ratios[f"{name} / {config.beside}'s"] = paired(peer / ours, ahead)
    size = f"{config.batch} x {config.seq_len} tokens"
    title = f"{config.model}, {size}, perplexity of {config.windows} windows of {config.window}; "
    title += f"{config.repetitions} rounds, medians in seconds, ratios of each round's own"
    columns = ("call", "ours", "peer", "peer / ours (95% interval)")
    made = [timing.table(title, columns, rows)]
    return [*made, timing.table_of_ratios(ratios)] if ratios else made
