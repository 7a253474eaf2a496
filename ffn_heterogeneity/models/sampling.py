"""Sampling of the next token, and stopping rules."""

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.models.config import ModelConfig
from ffn_heterogeneity.wording import check_numbers


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of sampling and stopping.

    Attributes:
      max_new_tokens: maximum number of new tokens.
      temperature: 0: the likeliest token (greedy); otherwise logits are divided by it.
      top_p: sample from the smallest set of likeliest tokens with at least this total probability.
      seed: random seed. The draws of row i depend only on (seed, i, index of the token), not on the
        batch.
      stop: one or several strings that end a text (special tokens are allowed); the text is cut
        before the first of them.
      eos: token ids that end a text, in addition to the model's.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        check_numbers(
            self, max_new_tokens="[1, inf)", temperature="[0, inf), 0 for greedy", top_p="(0, 1]"
        )
        if self.max_new_tokens != int(self.max_new_tokens):
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r}: expected a whole number")
        object.__setattr__(self, "max_new_tokens", int(self.max_new_tokens))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not text for text in self.stop):
            raise ValueError("an empty stop string would stop before the first token")


# Settings of generation_config.json that are not used here, with values that change nothing.
_SAMPLED = {"top_k": 0, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
_DEFAULTS = {"top_k": 50}  # of transformers, where the file names none
_UNREAD = {"repetition_penalty": 1, "no_repeat_ngram_size": 0, "num_beams": 1, "min_length": 0}
_UNREAD |= {"min_new_tokens": 0, "guidance_scale": 1, "penalty_alpha": 0}
_UNREAD |= {"encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0}
_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings")
_LISTS += ("sequence_bias", "forced_bos_token_id", "forced_eos_token_id")
_UNREAD |= dict.fromkeys((*_LISTS, "exponential_decay_length_penalty"))


def sampling_settings(
    config: ModelConfig, given: Mapping[str, Any], do_sample: bool | None
) -> dict[str, Any]:
    """Settings of `Sampling`: those given, else the model's (`own_settings`).

    Raises:
      ValueError: sampling at temperature 0.
    """
    settings = own_settings(config, do_sample) | dict(given)
    if do_sample and settings["temperature"] == 0:
        raise ValueError("do_sample=True at temperature=0: raise it, or set do_sample=False")
    return settings | {"temperature": 0.0} if do_sample is False else settings


def own_settings(config: ModelConfig, do_sample: bool | None = None) -> dict[str, float]:
    """Settings of `Sampling` from the model's generation_config.json; {} if it is greedy.

    Unused settings are listed on stderr.

    Args:
      do_sample: overrides the file's.
    """
    values = json.loads(config.generation or "{}")
    sampled = bool(values.get("do_sample")) if do_sample is None else do_sample
    off = _UNREAD | (_SAMPLED if sampled else {})
    given = _DEFAULTS | {name: value for name, value in values.items() if value is not None}
    unread = [f"{k}={given[k]}" for k in off if given.get(k, off[k]) != off[k]]
    if unread:
        print(f"generation_config.json: not used here: {', '.join(unread)}", file=sys.stderr)
    settings = {"temperature": values.get("temperature"), "top_p": values.get("top_p")}
    settings = {name: 1.0 if value is None else value for name, value in settings.items()}
    return settings if sampled else {}


class Generation(NamedTuple):
    """One prompt's text, and why it ended.

    Attributes:
      text: without the stop string and special tokens; "" without a tokenizer.
      tokens: all generated tokens, including eos and those of the stop string.
      finish: "stop", "eos" or "length".
    """

    text: str
    tokens: list[int]
    finish: str


class AnswerSoFar:
    """Generated tokens of one row, and why it ended."""

    def __init__(self, config: ModelConfig, tokenizer: Any, sampling: Sampling):
        # Ids that can end the row inside a chunk, without checking its text.
        self.shared_eos = {*config.stop_ids}
        self.eos = self.shared_eos | {*sampling.eos}
        self.tokenizer, self.sampling = tokenizer, sampling
        self.special = tokenizer.all_special_tokens if sampling.stop else []
        # These never appear in the text.
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
        # Not every tokenizer that has the eos calls it special.
        shown = self.tokens[:-1] if self.finish == "eos" else self.tokens
        self.text = self.tokenizer.decode(shown, skip_special_tokens=True)
        cuts = [self.text.partition(stop)[0] for stop in self.sampling.stop if stop in self.text]
        if self.hidden:
            full_text = self.tokenizer.decode(self.tokens, skip_special_tokens=False)
            cuts += [self._shown(full_text.partition(s)[0]) for s in self.hidden if s in full_text]
        if cuts:
            self.text, self.finish = min(cuts, key=len), "stop"

    def _shown(self, text: str) -> str:
        for name in self.special:
            text = text.replace(name, "")
        return text

    def result(self) -> Generation:
        return Generation(self.text, self.tokens, self.finish)


def choose(logits_bv: jax.Array, hyper: dict, count: jax.Array | int) -> jax.Array:
    """Choose the next token of each row, int32 [B].

    Args:
      hyper: "temperature", "top_p" and "seed" of all rows, and "rows": the index of each row.
      count: number of tokens that the rows already have.
    """

    def draw(logits_bv):
        scaled_bv = logits_bv / jnp.maximum(hyper["temperature"], 1e-6)
        top_p = hyper["top_p"]
        scaled_bv = jax.lax.cond(top_p < 1, lambda x: nucleus(x, top_p), lambda x: x, scaled_bv)
        key = jax.random.key(hyper["seed"])

        def one(row, logits_v):
            row_key = jax.random.fold_in(jax.random.fold_in(key, row), count)
            return jax.random.categorical(row_key, logits_v)

        return jax.vmap(one)(hyper["rows"], scaled_bv).astype(jnp.int32)

    def greedy(logits_bv):
        return jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)

    return jax.lax.cond(hyper["temperature"] > 0, draw, greedy, logits_bv)


def nucleus(logits_bv: jax.Array, top_p: jax.Array) -> jax.Array:
    """Set logits outside the nucleus (the fewest likeliest tokens that reach `top_p`) to -inf.

    The likeliest token is always kept, and so are tokens as likely as the last of the nucleus.
    """
    ordered_bv = jnp.sort(logits_bv, axis=-1, descending=True)
    before_bv = jnp.cumsum(jax.nn.softmax(ordered_bv, axis=-1), axis=-1)
    before_bv = jnp.pad(before_bv, ((0, 0), (1, 0)))[:, :-1]
    # The least logit whose predecessors do not reach top_p (only rounding can reach 1).
    inside_bv = (before_bv < top_p) | (top_p >= 1) | (before_bv == 0)  # 1e-50 is 0 in float32
    least_b = jnp.min(jnp.where(inside_bv, ordered_bv, jnp.inf), axis=-1)
    return jnp.where(logits_bv >= least_b[:, None], logits_bv, -jnp.inf)
