"""The feed-forward block of a layer without experts."""

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
    """Compute `function` at least in float32: CPUs round bfloat16 after every operation."""

    def call(x: jax.Array) -> jax.Array:
        return function(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    return call


def gelu(x: jax.Array) -> jax.Array:
    """x Phi(x) = x (1 + erf(x / sqrt 2)) / 2; `jax.nn.gelu` uses erfc, which is slower on CPUs."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": _wide(jax.nn.silu),
    "gelu": _wide(gelu),
    "gelu_tanh": _wide(functools.partial(jax.nn.gelu, approximate=True)),
    "relu": jax.nn.relu,
}


class FeedForward(nn.Module):
    """h = act(x G) * (x U) (gated) or act(x U) (plain);  y = (h * P) W.

    P [M] is the product of the block's leaves of `adapters.FFN_LEAVES` (MLP Fusion's cluster sizes,
    gates), if any, applied after the activation. Row i of W = down/kernel has the outgoing weights
    of inner neuron i.
    """

    config: ModelConfig
    layer: LayerConfig
    options: RunOptions = RunOptions()

    @nn.compact
    def __call__(self, x_btd: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x [B, T, D] -> (y [B, T, D], intermediate state h [B, T, M])."""
        config, width = self.config, self.layer.ffn_width
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
        # `causal_lm.nudged` adds a zero here, whose gradient is that of the output.
        return self.perturb("output", y_btd), state_btm
