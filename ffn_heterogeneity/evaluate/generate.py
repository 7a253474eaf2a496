"""Text out of a model: batches of unequal prompts, greedy or sampled, one program per size.

A batch is padded on the left to a bucket of lengths; its prompts run once through the model
(prefill), then tokens come one by one from a cache of keys and values (models/decoding.py), CHUNK
of them a call. Between calls the host looks for stop strings. Temperature, top-p and the number of
tokens are arrays, so a program is compiled once per (rows, prompt bucket, new-token bucket).
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.decoding import forward_cached, layers_apart, make_cache
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.paths import path_str

CHUNK, MIN_BUCKET = 16, 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop.

    Attributes:
      max_new_tokens: at most so many.
      temperature: 0: the likeliest token (greedy); else logits are divided by it and drawn from.
      top_p: draw among the likeliest tokens only, as few as reach this probability together.
      seed: of the draws. Row i's draws depend on (seed, i, number of the token) alone, not on the
        batch it is in.
      stop: strings that end a text (they may hold special tokens); the first of them and all
        after it are cut off.
      eos: token ids that end a text, besides the model's own.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]")
        if any(not text for text in self.stop):
            raise ValueError("an empty stop string would stop before the first token")


class Generation(NamedTuple):
    """What came out for one prompt.

    Attributes:
      text: without the stop string and special tokens; "" without a tokenizer.
      tokens: all that were generated, eos and those of the stop string included.
      finish: "stop", "eos" or "length".
    """

    text: str
    tokens: list[int]
    finish: str


def bucket(size: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96 ... that holds `size`."""
    power = MIN_BUCKET
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power


class Generator:
    """A model ready to generate: its parameters on the devices, in the dtype they compute in.

    Args:
      params: stacked tree.
      tokenizer: decodes texts and finds stop strings; None: tokens only.
      batch_size: rows computed at once.
      mesh: parameters and rows are sharded over it as in training; None: one device.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        tokenizer: Any = None,
        *,
        options: RunOptions = RunOptions(),
        batch_size: int = 8,
        mesh: Mesh | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.config, self.tokenizer, self.batch_size = config, tokenizer, batch_size
        self.options, self.mesh = options, mesh
        placed = None
        if mesh is not None and mesh.size > 1:
            self.options = _sharded(config, options, mesh)
            placed = partition.shardings(mesh, params)
            share = mesh.shape["data"] * mesh.shape["fsdp"]
            self.batch_size = -(-batch_size // share) * share
        # Kernels are cast once instead of at every token.
        params = jax.device_put(_computable(params, options.compute_dtype), placed)
        one_cpu = placed is None and causal_lm.platform_of(mesh) == "cpu"
        self.params = layers_apart(params) if one_cpu else params

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] = Sampling(),
        *,
        truncate: bool = False,
        progress: str | Callable[[int], Any] | None = "generate",
    ) -> list[Generation]:
        """A continuation of each prompt, in the prompts' order.

        Args:
          prompts: token ids, bos included where the model wants one.
          sampling: for all, or one for each prompt (prompts that differ in anything but `stop` and
            `eos` are generated in different batches).
          truncate: a prompt that leaves no room for max_new_tokens within the model's positions
            loses its oldest tokens (its first one, usually bos, stays); otherwise it is an error.
          progress: label of the progress bar; None: no bar; or a function that is told after each
            batch how many prompts it answered (a caller's own bar).

        Raises:
          ValueError: an empty prompt, an id outside the vocabulary, a prompt too long for the
            model, or stop strings without a tokenizer.
        """
        from tqdm import tqdm

        wanted = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(wanted) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(wanted)} samplings")
        rows = [
            self._checked(i, prompt, s, truncate)
            for i, (prompt, s) in enumerate(zip(prompts, wanted, strict=True))
        ]
        batches = list(_batches(rows, wanted, self.batch_size))
        lengths = [self._length(batch, rows, wanted) for batch in batches]
        found: dict[int, Generation] = {}
        label = progress if isinstance(progress, str) else None
        off = None if label else True
        with tqdm(total=len(rows), desc=label, disable=off, file=sys.stderr) as bar:
            told = progress if callable(progress) else bar.update
            for batch, own in zip(batches, lengths, strict=True):
                # One length for all, unless that doubles the cache: tokens come by one program.
                length = max((n for n in lengths if n <= 2 * own), default=own)
                found |= self._generate(batch, rows, wanted, length)
                told(len(batch))
        return [found[i] for i in range(len(rows))]

    def _checked(self, i: int, prompt: Sequence[int], sampling: Sampling, truncate: bool):
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none")
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: give at least a bos token")
        ids = np.asarray(prompt)
        outside = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if outside.size:
            raise ValueError(
                f"prompt {i}: token id {outside[0]} is outside the vocabulary of "
                f"{self.config.vocab_size}"
            )
        room = self.config.max_position - sampling.max_new_tokens
        if len(ids) <= room:
            return ids
        if not truncate or room < 2:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, and with max_new_tokens="
                f"{sampling.max_new_tokens} that is more than the {self.config.max_position}"
                " positions of the model: shorten it, or let its beginning be cut off (truncate)"
            )
        return np.concatenate([ids[:1], ids[len(ids) - room + 1 :]])

    def _length(self, batch, rows, wanted) -> int:
        """Columns that a batch needs at least."""
        return self._width(batch, rows) + bucket(wanted[batch[0]].max_new_tokens)

    def _width(self, batch, rows) -> int:
        return bucket(max(len(rows[i]) for i in batch))

    def _generate(self, batch, rows, wanted, length: int) -> dict[int, Generation]:
        first = wanted[batch[0]]
        width = self._width(batch, rows)
        tokens = np.zeros((self.batch_size, width), np.int32)
        pads = np.full(self.batch_size, width - 1, np.int32)
        for place, i in enumerate(batch):
            pads[place] = width - len(rows[i])
            tokens[place, pads[place] :] = rows[i]
        ids = np.zeros(self.batch_size, np.uint32)
        ids[: len(batch)] = batch
        hyper = {
            "temperature": np.float32(first.temperature),
            "top_p": np.float32(first.top_p),
            "seed": np.uint32(first.seed & 0xFFFFFFFF),
            "rows": ids,
        }
        hyper, tokens, pads = self._place(hyper, tokens, pads)
        watch = [_AnswerSoFar(self.config, self.tokenizer, wanted[i]) for i in batch]
        state = _prefill(self.config, self.options, length, self.params, tokens, pads, hyper)
        for new in self._chunks(state, pads, hyper, first.max_new_tokens, watch):
            for one, row in zip(watch, new, strict=False):
                one.take(row)
        return {i: one.result() for i, one in zip(batch, watch, strict=True)}

    def _chunks(self, state, pads, hyper, count, watch) -> Iterator[np.ndarray]:
        """New tokens [B, up to CHUNK] a time, until all rows are done."""
        yield np.asarray(state["token"])
        produced = 1
        while produced < count and not all(one.finish for one in watch):
            done = np.ones(self.batch_size, bool)
            done[: len(watch)] = [bool(one.finish) for one in watch]
            eos = np.asarray(sorted({e for one in watch for e in one.shared_eos}), np.int32)
            todo = np.int32(min(CHUNK, count - produced))
            state, new, taken = _decode(
                self.config, self.options, self.params, state, pads, hyper, done, eos, todo
            )
            taken = int(taken)
            yield np.asarray(new)[:, :taken]
            produced += taken

    def _place(self, hyper, tokens, pads):
        if self.mesh is None or self.mesh.size == 1:
            return hyper, tokens, pads
        rows = partition.batch_sharding(self.mesh, accumulated=False)
        return hyper, jax.device_put(tokens, rows), jax.device_put(pads, rows)


class _AnswerSoFar:
    """One row's tokens so far, and why it ended."""

    def __init__(self, config: ModelConfig, tokenizer: Any, sampling: Sampling):
        own = config.eos_id if isinstance(config.eos_id, tuple) else (config.eos_id,)
        self.eos = {e for e in (*own, *sampling.eos) if e is not None}
        # Those that may end the row inside a chunk without a look at its text.
        self.shared_eos = {e for e in own if e is not None}
        self.tokenizer, self.sampling = tokenizer, sampling
        self.special = tokenizer.all_special_tokens if sampling.stop else []
        # These are never in the text as it is shown.
        self.hidden = [stop for stop in sampling.stop if any(name in stop for name in self.special)]
        self.tokens: list[int] = []
        self.text, self.finish = "", ""

    def take(self, new: np.ndarray) -> None:
        if self.finish:
            return
        for token in new.tolist():
            self.tokens.append(token)
            if token in self.eos:
                self.finish = "eos"
            elif len(self.tokens) == self.sampling.max_new_tokens:
                self.finish = "length"
            if self.finish:
                break
        if self.tokenizer is None:
            return
        self.text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        found = [self.text.partition(stop)[0] for stop in self.sampling.stop if stop in self.text]
        if self.hidden:
            whole = self.tokenizer.decode(self.tokens, skip_special_tokens=False)
            found += [self._shown(whole.partition(s)[0]) for s in self.hidden if s in whole]
        if found:
            self.text, self.finish = min(found, key=len), "stop"

    def _shown(self, text: str) -> str:
        for name in self.special:
            text = text.replace(name, "")
        return text

    def result(self) -> Generation:
        return Generation(self.text, self.tokens, self.finish)


def _batches(rows, wanted: Sequence[Sampling], size: int) -> Iterator[list[int]]:
    """Indices of rows: like with like, long prompts first (a failure of memory comes at once)."""

    def kind(i: int):
        s = wanted[i]
        return s.max_new_tokens, s.temperature, s.top_p, s.seed

    order = sorted(range(len(rows)), key=lambda i: (kind(i), -len(rows[i])))
    start = 0
    while start < len(order):
        batch = [i for i in order[start : start + size] if kind(i) == kind(order[start])]
        yield batch
        start += len(batch)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _prefill(config, options, length, params, tokens_bt, pads_b, hyper) -> dict:
    """The state after the prompt: its cache, the first new token [B, 1], where it will stand."""
    cache = make_cache(config, params["stack"], tokens_bt.shape[0], length, options)
    hidden, cache = forward_cached(
        config, params, tokens_bt, pads_b, cache, fresh=True, options=options
    )
    token = _choose(config, params, hidden[:, -1], hyper, 0)
    width = jnp.int32(tokens_bt.shape[1])
    return {"cache": cache, "token": token[:, None], "column": width, "count": jnp.int32(1)}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(config, options, params, state, pads_b, hyper, done_b, eos, todo):
    """(state, new tokens [B, CHUNK], how many of them): up to `todo`, until all rows are done."""
    new_bc = jnp.zeros((pads_b.shape[0], CHUNK), jnp.int32)

    def go_on(carry):
        _, _, done_b, i = carry
        return (i < todo) & ~jnp.all(done_b)

    def one(carry):
        state, new_bc, done_b, i = carry
        hidden, cache = forward_cached(
            config, params, state["token"], pads_b, state["cache"], state["column"], options=options
        )
        token = _choose(config, params, hidden[:, -1], hyper, state["count"])
        new_bc = jax.lax.dynamic_update_slice(new_bc, token[:, None], (0, i))
        done_b = done_b | jnp.isin(token, eos)
        state = {
            "cache": cache,
            "token": token[:, None],
            "column": state["column"] + 1,
            "count": state["count"] + 1,
        }
        return state, new_bc, done_b, i + 1

    start = (state, new_bc, done_b, jnp.int32(0))
    state, new_bc, _, taken = jax.lax.while_loop(go_on, one, start)
    return state, new_bc, taken


def _choose(config, params, hidden_bd, hyper, count) -> jax.Array:
    """The next token of each row, int32 [B]."""
    logits_bv = causal_lm.logits(config, params, hidden_bd)

    def draw(logits_bv):
        scaled_bv = logits_bv / jnp.maximum(hyper["temperature"], 1e-6)
        scaled_bv = jax.lax.cond(
            hyper["top_p"] < 1, lambda x: nucleus(x, hyper["top_p"]), lambda x: x, scaled_bv
        )
        key = jax.random.key(hyper["seed"])

        def one(row, logits_v):
            return jax.random.categorical(
                jax.random.fold_in(jax.random.fold_in(key, row), count), logits_v
            )

        return jax.vmap(one)(hyper["rows"], scaled_bv).astype(jnp.int32)

    def greedy(logits_bv):
        return jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)

    return jax.lax.cond(hyper["temperature"] > 0, draw, greedy, logits_bv)


def nucleus(logits_bv: jax.Array, top_p: jax.Array) -> jax.Array:
    """Logits with -inf outside the nucleus: the likeliest tokens, as few as reach `top_p`.

    The likeliest token always stays; tokens as likely as the last of the nucleus stay too.
    """
    ordered_bv = jnp.sort(logits_bv, axis=-1, descending=True)
    before_bv = jnp.cumsum(jax.nn.softmax(ordered_bv, axis=-1), axis=-1)
    before_bv = jnp.pad(before_bv, ((0, 0), (1, 0)))[:, :-1]
    # The least logit whose predecessors do not reach top_p (1 is reached by rounding alone).
    inside_bv = (before_bv < top_p) | (top_p >= 1)
    least_b = jnp.min(jnp.where(inside_bv, ordered_bv, jnp.inf), axis=-1)
    return jnp.where(logits_bv >= least_b[:, None], logits_bv, -jnp.inf)


def _sharded(config: ModelConfig, options: RunOptions, mesh: Mesh) -> RunOptions:
    heads = "tensor" if config.n_kv_heads % mesh.shape["tensor"] == 0 else None
    cache = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), heads))
    return dataclasses.replace(options, cache=cache, **partition.run_shardings(mesh))


def _computable(params: dict, dtype: Any) -> dict:
    """Kernels and embeddings in the compute dtype; norms and biases stay as they are."""

    def cast(path, leaf):
        return leaf.astype(dtype) if path_str(path).endswith(("/kernel", "/embedding")) else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
