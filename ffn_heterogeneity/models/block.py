"""One transformer block: attention and feed-forward on a residual stream."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name

from ffn_heterogeneity.models.attention import Attention
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.experts import Experts, Routing
from ffn_heterogeneity.models.feed_forward import FeedForward
from ffn_heterogeneity.models.kept import keep
from ffn_heterogeneity.models.linear import dropout as dropout
from ffn_heterogeneity.models.norms import Norm
from ffn_heterogeneity.models.options import RunOptions

# Parts of a layer's dropout key: the branches use 0 and 1, adapters 2.
_PROBABILITIES, _CROSS = 3, 4


@dataclasses.dataclass(frozen=True)
class LayerIO:
    """The tensors of one layer that a probe may read; XLA removes unread ones.

    In a layer with `norm_placement` "post" the residual stream consists of the norms' outputs:
    attention_input is block_input, ffn_input is middle, and block_output is normed.

    Attributes:
      block_input, block_output: the residual stream before and after the block, [B, T, D].
      attention_input, attention_output: the attention's input (after its norm) and output (before
        its post-norm), [B, T, D].
      middle: the residual stream between the two branches, [B, T, D].
      ffn_input: the FFN's input (after its norm), [B, T, D].
      ffn_state: h, the intermediate state, before `neuron_scale`, [B, T, M]; None in a layer with
        experts (`require_state`).
      ffn_output: the FFN's output, before its post-norm, [B, T, D].
      cross_output: the output of the attention on the encoder's states, which `middle` includes;
        None without such an attention.
      attention_weights: float32 [B, K, N/K, T, S]; None unless a probe needs "attention_weights".
      sink_weights: attention to the row's first token, float32 [B, T, N]; None unless a probe needs
        "sink_weights" (and none "attention_weights").
      cache: the layer's keys and values after the call (models/decoding.py), if a cache was given.
      block_cosine: cos(block_input, block_output), float32 [B, T]; None unless a probe needs
        "block_cosine". Its gradient recomputes nothing (models/block_cosine.py).
      is_last: whether this is the model's last layer; a traced bool, since repeats share a body.
      final_norm: the model's final norm, x [..., D] -> [..., D].
      routing: the router's choices, in a layer with experts.
    """

    block_input: jax.Array
    attention_input: jax.Array
    attention_output: jax.Array
    middle: jax.Array
    block_output: jax.Array
    ffn_input: jax.Array
    ffn_state: jax.Array | None
    ffn_output: jax.Array
    attention_weights: jax.Array | None = None
    sink_weights: jax.Array | None = None
    cache: Any = None
    block_cosine: jax.Array | None = None
    is_last: jax.Array | None = None
    final_norm: Callable[[jax.Array], jax.Array] | None = None
    routing: Routing | None = None
    cross_output: jax.Array | None = None

    def require_state(self) -> jax.Array:
        """Return `ffn_state`.

        Raises:
          ValueError: the layer has experts, and each has a state of the tokens sent to it.
        """
        if self.ffn_state is None:
            raise ValueError(
                "a layer with experts has no intermediate state of all tokens, which this analysis "
                "or surgery reads: it supports dense models"
            )
        return self.ffn_state


class Block(nn.Module):
    """x + [post_norm](attention(norm(x))), then x + [post_norm](ffn(norm(x))).

    With `parallel_residual` both branches read the block's input:
    x + attention(norm_1(x)) + ffn(norm_2(x)). With `cross_attention` a third branch stands between
    the two: x + attention(norm(x), memory). With `norm_placement` "post" the norms come after the
    sums: x = norm_1(x + attention(x)), then norm_2(x + ffn(x)).

    Dropout applies to the two branches' outputs (NUCL uses 0.1 but does not state where; this is
    our choice), and with `attention_dropout` to the attention's probabilities.
    """

    config: ModelConfig
    layer: LayerConfig
    options: RunOptions = RunOptions(attention="xla")
    with_attention_weights: bool = False
    with_sinks: bool = False

    @nn.compact
    def __call__(
        self, x_btd, rotary, mask, drop=None, cache=None, bias=None, memory=None
    ) -> tuple[jax.Array, LayerIO]:
        """x [B, T, D] and a mask -> (x [B, T, D], LayerIO).

        Args:
          drop: (key, rate), or None.
          bias: as of `Attention`.
          memory: (the encoder's states [B, S, D], or their keys and values as in `Attention`; their
            mask [B or 1, T or 1, S]), for cross-attention.
        """
        config = self.config
        before = self.layer.norm_placement == "pre"

        def norm(name: str) -> Norm:
            return Norm(config, name=name)

        def branch(y_btd: jax.Array, post_norm: str, index: int) -> jax.Array:
            if config.post_norms:
                y_btd = norm(post_norm)(y_btd)
            if drop is not None:
                y_btd = dropout(y_btd, jax.random.fold_in(drop[0], index), drop[1])
            return y_btd

        attention = Attention(
            config, self.options, self.with_attention_weights, self.with_sinks, name="attention"
        )
        drop_weights = None
        if drop is not None and config.attention_dropout:
            drop_weights = (jax.random.fold_in(drop[0], _PROBABILITIES), drop[1])
        attention_input = norm("attention_norm")(x_btd) if before else x_btd
        given = (rotary, mask, cache, drop_weights, bias)
        attended, weights, cache = attention(attention_input, *given)
        name = keep if self.options.wide_products else checkpoint_name
        attended = name(attended, "attention_output")
        middle, crossed = x_btd + branch(attended, "post_attention_norm", 0), None
        if self.layer.cross_attention:
            assert memory is not None
            cross = Attention(config, self.options, name="cross_attention")
            drawn = drop_weights and (jax.random.fold_in(drop_weights[0], 1), drop_weights[1])
            given = (None, memory[1], None, drawn, None, memory[0])
            crossed, _, _ = cross(norm("cross_norm")(middle), *given)
            middle = middle + branch(crossed, "", _CROSS)
        if before:
            ffn_input = norm("ffn_norm")(x_btd if config.parallel_residual else middle)
        else:
            ffn_input = middle = norm("attention_norm")(middle)
        feed_forward = FeedForward if self.layer.experts is None else Experts
        ffn_output, inside = feed_forward(config, self.layer, self.options, name="ffn")(ffn_input)
        routing = inside if isinstance(inside, Routing) else None
        output = middle + branch(ffn_output, "post_ffn_norm", 1)
        if not before:
            output = norm("ffn_norm")(output)
        seen = LayerIO(
            x_btd,
            attention_input,
            attended,
            middle,
            output,
            ffn_input,
            None if routing else inside,
            ffn_output,
            weights if self.with_attention_weights else None,
            weights if self.with_sinks else None,
            cache,
            routing=routing,
            cross_output=crossed,
        )
        return output, seen
