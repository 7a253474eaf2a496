"""The feed-forward block: the subject of every paper here."""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from ffn_heterogeneity.adapters import FFN_LEAVES, neuron_factor
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.linear import Linear, optional_leaf
from ffn_heterogeneity.models.options import RunOptions


def _wide(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`function` computed in float32 at least: a CPU rounds bfloat16 after every operation."""

    def call(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    return call


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x) = x (1 + erf(x / sqrt 2)) / 2; `jax.nn.gelu` takes erfc, slower on CPUs."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": _wide(jax.nn.silu),
    "gelu": _wide(gelu),
    "gelu_tanh": _wide(functools.partial(jax.nn.gelu, approximate=True)),
    "relu": jax.nn.relu,
}


class FeedForward(nn.Module):
    """h = act(x G) * (x U) (gated) or act(x U) (plain);  y = (h * P) W.

    P is the product of the block's own leaves, if it has any (`adapters.FFN_LEAVES`: MLP Fusion's
    cluster sizes, gates), [M], applied after the activation. Row i of W = down/kernel holds the
    outgoing weights of inner neuron i.
    """

    config: ModelConfig
    layer: LayerConfig
    options: RunOptions = RunOptions()

    @nn.compact
    def __call__(self, x_btd: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> (y [B, T, D], intermediate state h [B, T, M])."""
        config, width = self.config, self.layer.ffn_width
        if self.layer.experts is not None:
            raise ValueError(f"experts={self.layer.experts}: no forward pass reads experts yet")
        act = ACTIVATIONS[config.activation]
        linear = functools.partial(Linear, options=self.options)
        up_btm = linear(width, config.ffn_bias, name="up")(x_btd)
        if self.layer.ffn_kind == "gated":
            state_btm = act(linear(width, config.ffn_bias, name="gate")(x_btd)) * up_btm
        else:
            state_btm = act(up_btm)
        scale = neuron_factor({name: optional_leaf(self, name) for name in FFN_LEAVES})
        scaled_btm = state_btm if scale is None else state_btm * scale.astype(state_btm.dtype)
        y_btd = linear(config.d_model, config.ffn_bias, name="down")(scaled_btm)
        # `causal_lm.nudged` adds a zero here, whose gradient is the output's own.
        return self.perturb("output", y_btd), state_btm
