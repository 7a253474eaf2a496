"""Text generation: batches of unequal prompts, greedy or sampled, one program per size.

A batch is padded on the left to a bucket of lengths (an encoder's on the right). Its prompts run
once through the model (prefill); then tokens are generated one by one with a cache of keys and
values (models/decoding.py), CHUNK tokens per call. Between calls the host looks for stop strings.
Temperature, top-p and the number of tokens are arrays, so a program is compiled once per (rows,
prompt bucket, new-token bucket).
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.causal_lm import RunOptions
from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.models.decoding import (
    forward_cached,
    layers_apart,
    make_cache,
    require_predictions,
)
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.sampling import AnswerSoFar, Generation, Sampling, choose
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.progress import bar
from ffn_heterogeneity.tree import path_str
from ffn_heterogeneity.wording import check_number

CHUNK, MIN_BUCKET = 16, 16


def bucket(size: int, most: int = sys.maxsize) -> int:
    """Smallest of 16, 24, 32, 48, 64, 96 ... that is at least `size`; at most `most`."""
    power = MIN_BUCKET
    while power < size:
        if power * 3 // 2 >= size:
            return min(power * 3 // 2, most)
        power *= 2
    return min(power, most)


class Generator:
    """A model ready to generate, with its parameters on the devices in the compute dtype.

    Args:
      params: stacked tree.
      tokenizer: decodes texts and finds stop strings; None: tokens only.
      batch_size: maximum number of rows per batch.
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
        require_predictions(config)
        check_number("batch_size", batch_size, "[1, inf)")
        self.config, self.tokenizer, self.batch_size = config, tokenizer, batch_size
        self.options, self.mesh = options, mesh
        placed = None
        if mesh is not None and mesh.size > 1:
            heads = "tensor" if config.n_kv_heads % mesh.shape["tensor"] == 0 else None
            cache = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), heads))
            on_mesh = partition.run_shardings(mesh)
            self.options = dataclasses.replace(options, cache=cache, **on_mesh)
            placed = partition.shardings(mesh, params, declared(config, params))
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
        """Generate a continuation of each prompt, in the prompts' order.

        An encoder-decoder's encoder reads the prompt; its answer begins with `bos_id`.

        Args:
          prompts: token ids, including bos if the model needs it.
          sampling: one for all, or one per prompt (prompts that differ in settings other than
            `stop` and `eos` are generated in different batches).
          truncate: remove the oldest tokens (except the first, usually bos) of a prompt that is too
            long for max_new_tokens within the model's positions; otherwise it is an error.
          progress: label of the progress bar; None: no bar; or a function that is called after each
            batch with the number of its prompts (for a caller's bar).

        Raises:
          ValueError: an empty prompt, an id outside the vocabulary, a prompt too long for the
            model, or stop strings without a tokenizer.
        """
        wanted = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(wanted) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(wanted)} samplings")
        rows = [
            self._checked(i, prompt, s, truncate)
            for i, (prompt, s) in enumerate(zip(prompts, wanted, strict=True))
        ]
        batches = list(_batches(rows, wanted, self.batch_size))
        # Minimum number of columns of each batch.
        lengths = [self._columns(batch, rows, wanted)[1] for batch in batches]
        answers: dict[int, Generation] = {}
        label = progress if isinstance(progress, str) else None
        with bar(label, total=len(rows)) as shown:
            advance = progress if callable(progress) else shown.update
            for batch, needed in zip(batches, lengths, strict=True):
                # One length for all, and so one program, unless that doubles the cache.
                length = max((n for n in lengths if n <= 2 * needed), default=needed)
                answers |= self._generate(batch, rows, wanted, length)
                advance(len(batch))
        return [answers[i] for i in range(len(rows))]

    def room(self, new: int) -> int:
        """Most tokens of a prompt after which the model's positions hold `new` more."""
        relative = self.config.positions == "relative"
        return (sys.maxsize if relative else self.config.max_position) - new

    def _checked(self, i: int, prompt: Sequence[int], sampling: Sampling, truncate: bool):
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model has none")
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: give at least a bos token")
        ids = np.asarray(prompt)
        check_vocabulary(ids, self.config.vocab_size, f"prompt {i}: ")
        room = self.room(sampling.max_new_tokens)
        if len(ids) <= room:
            return ids
        if not truncate or room < 2:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, and with max_new_tokens="
                f"{sampling.max_new_tokens} that is more than the {self.config.max_position}"
                " positions of the model: shorten it, or allow truncation (truncate)"
            )
        return np.concatenate([ids[:1], ids[len(ids) - room + 1 :]])

    def _columns(self, batch: Sequence[int], rows, wanted: Sequence[Sampling]) -> tuple[int, int]:
        """(columns of a batch's prompts, columns of prompts and new tokens)."""
        limit, new = self.config.row_limit, wanted[batch[0]].max_new_tokens
        width = bucket(max(len(rows[i]) for i in batch), limit - new)
        if self.config.kind == "encoder_decoder":
            return width, 1 + bucket(new)
        return width, width + bucket(new, limit - width)

    def _generate(self, batch, rows, wanted, length: int) -> dict[int, Generation]:
        first = wanted[batch[0]]
        width, _ = self._columns(batch, rows, wanted)
        tokens = np.zeros((self.batch_size, width), np.int32)
        pads = np.full(self.batch_size, width - 1, np.int32)
        for place, i in enumerate(batch):
            pads[place] = width - len(rows[i])
            # Padding before a prompt would fill the places of a Switch's experts.
            start = 0 if self.config.kind == "encoder_decoder" else pads[place]
            tokens[place, start : start + len(rows[i])] = rows[i]
        ids = np.zeros(self.batch_size, np.uint32)
        ids[: len(batch)] = batch
        hyper = {
            "temperature": np.float32(first.temperature),
            "top_p": np.float32(first.top_p),
            "seed": np.uint32(first.seed & 0xFFFFFFFF),
            "rows": ids,
        }
        if self.mesh is not None and self.mesh.size > 1:
            rows_over = partition.batch_sharding(self.mesh, accumulated=False)
            tokens, pads = jax.device_put(tokens, rows_over), jax.device_put(pads, rows_over)
        watch = [AnswerSoFar(self.config, self.tokenizer, wanted[i]) for i in batch]
        state = _prefill(self.config, self.options, length, self.params, tokens, pads, hyper)
        if self.config.kind == "encoder_decoder":
            pads = np.zeros_like(pads)  # the prompts are in the cache
        for new in self._chunks(state, pads, hyper, first.max_new_tokens, watch):
            for one, row in zip(watch, new, strict=False):
                one.take(row)
        return {i: one.result() for i, one in zip(batch, watch, strict=True)}

    def _chunks(self, state, pads, hyper, count, watch) -> Iterator[np.ndarray]:
        """Yield new tokens [B, up to CHUNK] until all rows are done."""
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


def check_vocabulary(ids: Sequence[int] | np.ndarray, vocab_size: int, where: str = "") -> None:
    """Raise ValueError for the first token id outside the vocabulary; `where` is its place."""
    ids = np.asarray(ids)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"{where}token id {outside[0]} is outside the vocabulary of {vocab_size}")


def _batches(rows, wanted: Sequence[Sampling], size: int) -> Iterator[list[int]]:
    """Indices of rows per batch, equal settings together, long prompts first.

    So a lack of memory shows at once.
    """

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
    """Return the state after the prompt: cache, first new token [B, 1] and its column."""
    memory = None
    if config.kind == "encoder_decoder":
        width = tokens_bt.shape[1]
        real = jnp.arange(width) < width - pads_b[:, None]
        batch = {"tokens": tokens_bt, "segment_ids": real.astype(jnp.int32)}
        memory = causal_lm.encode(config, params, batch, options), real
        tokens_bt = jnp.full((len(tokens_bt), 1), config.bos_id, jnp.int32)
        pads_b = jnp.zeros_like(pads_b)
    cache = make_cache(config, params["stack"], tokens_bt.shape[0], length, options, memory)
    hidden, cache = forward_cached(
        config, params, tokens_bt, pads_b, cache, fresh=True, options=options
    )
    token = choose(causal_lm.logits(config, params, hidden[:, -1]), hyper, 0)
    width = jnp.int32(tokens_bt.shape[1])
    return {"cache": cache, "token": token[:, None], "column": width, "count": jnp.int32(1)}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _decode(config, options, params, state, pads_b, hyper, done_b, eos, todo):
    """Return (state, new tokens [B, CHUNK], their number), up to `todo` or until all are done."""
    new_bc = jnp.zeros((pads_b.shape[0], CHUNK), jnp.int32)

    def go_on(carry):
        _, _, done_b, i = carry
        return (i < todo) & ~jnp.all(done_b)

    def one(carry):
        state, new_bc, done_b, i = carry
        hidden, cache = forward_cached(
            config, params, state["token"], pads_b, state["cache"], state["column"], options=options
        )
        logits_bv = causal_lm.logits(config, params, hidden[:, -1])
        token = choose(logits_bv, hyper, state["count"])
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


def _computable(params: dict, dtype: Any) -> dict:
    """Cast kernels and embeddings to the compute dtype; norms, biases and routers are unchanged.

    A router of rounded weights would choose other experts than in `causal_lm.forward`.
    """

    def cast(path, leaf):
        path = path_str(path)
        rounded = path.endswith(("/kernel", "/embedding")) and "/router/" not in path
        return leaf.astype(dtype) if rounded else leaf

    return jax.tree_util.tree_map_with_path(cast, params)
