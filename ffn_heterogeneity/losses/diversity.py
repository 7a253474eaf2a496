"""Inter-neuron diversity: similarity of the outgoing distributions of a layer's neurons.

NUCL makes each neuron's outgoing distribution r_i = |W_i| / sum_j |W_ij| less uniform, one neuron
at a time. The paper names diversity between the neurons of a layer as future work, without a
formula. The formula here is ours: the mean cosine similarity over the pairs of a layer's neurons,

    u_i = r_i / ||r_i||_2 = |W_i| / ||W_i||_2,      s = sum_i u_i,
    D = mean over pairs i != j of u_i . u_j = (||s||^2 - k) / (k (k - 1)),

where k is the number of rows that are not all-zero: a sum over pairs in O(m n), not O(m^2 n). D is
in [0, 1]: 0 if no two neurons write to a common output, 1 if all have the same distribution;
Gaussian weights have about 2 / pi. It does not depend on the rows' scales. Its gradient:

    dD/dw_ij = 2 sign(w_ij) (s_j - (s . u_i) u_ij) / (k (k - 1) ||W_i||_2).

Conventions: an all-zero row (a removed or padded neuron) does not count as a neuron, so it
contributes 0 with gradient 0 and a padded model has the same D; with fewer than two neurons D is 0;
sign(0) = 0, so removed weights stay 0; rows whose largest weight is below about 1e-30 count as
all-zero, as in NUCL. The penalty is the sum over layers.

Cost: the forward pass reads W three times (the rows' scales, their norms, s), the backward pass
twice, and it writes the gradient once: 6 x 4 bytes per weight, in Gemma-2 2B (552M outgoing
weights) 13 GB per step. Layers are processed one at a time; saved between the passes are two
numbers per row and n per layer. On a mesh three numbers per row and n per layer are all-reduced; no
weights are gathered.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.losses.kernels import by_layer, kernels, pattern
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue

PLACE = "ffn/down"


def similarity(w: jax.Array) -> jax.Array:
    """D of every matrix of a stack, differentiable in closed form.

    Args:
      w: [..., m, n] of any float dtype; row i holds the outgoing weights of neuron i.

    Returns:
      [...], float32 (float64 for float64 weights).

    Raises:
      ValueError: fewer than two axes, or empty rows.
      TypeError: the weights are not real floating point numbers.
    """
    w = jnp.asarray(w)
    if w.ndim < 2 or w.shape[-1] == 0:
        raise ValueError(f"weights {w.shape}; expected [..., m, n] with n >= 1")
    if not jnp.issubdtype(w.dtype, jnp.floating):
        raise TypeError(f"diversity needs floating point weights, got {w.dtype}")
    return _similarity(w)


# Jitted so that a call outside of jit compiles once a shape; inside, XLA inlines it.
@jax.jit
@jax.custom_vjp
def _similarity(w):
    return _forward(w)[0]


# Layer by layer: some compilers save common subexpressions between the passes over W, which should
# have the size of a layer, not of the stack.


def _forward(w):
    value, saved = _by_matrix(_forward_one, w)
    return value, (w, saved)


def _backward(residuals, cotangent):
    w, saved = residuals
    return (_by_matrix(_backward_one, w, saved, cotangent),)


def _by_matrix(function, w, *more):
    if w.ndim == 2:
        return function(w, *more)
    lead = w.shape[:-2]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), (w, *more))
    result = jax.lax.map(lambda x: function(*x), flat)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), result)


def _forward_one(w):
    """(D, residuals of the backward pass other than W) of one [m, n]."""
    a = _magnitude(w)
    top = jnp.max(a, -1, keepdims=True, initial=0)
    tiny = float(jnp.finfo(a.dtype).tiny)
    alive = ~(top < tiny**0.8)  # written so that a row with NaN counts, and the NaN propagates
    # About 1 / top: squares of a * scale stay in range. The reciprocal of the hugest would be
    # subnormal, which processors flush to 0.
    scale = jnp.where(alive, 1 / jnp.clip(top, tiny**0.8, 0.125 / tiny), 0)
    square = jnp.sum(jnp.square(a * scale), -1, keepdims=True)
    # Two factors, scale and this: their product could leave float32.
    norm = jnp.where(alive, 1 / jnp.sqrt(jnp.where(alive, square, 1)), 0)
    s = jnp.sum(a * scale * norm, -2, keepdims=True)
    k = jnp.sum(alive).astype(a.dtype)
    pairs = jnp.where(k > 1, 1 / jnp.where(k > 1, k * (k - 1), 1), 0)
    return (jnp.sum(jnp.square(s)) - k) * pairs, (scale, norm, s, pairs)


def _backward_one(w, saved, cotangent):
    scale, norm, s, pairs = saved
    u = _magnitude(w) * scale * norm
    along = jnp.sum(s * u, -1, keepdims=True)
    slopes = (s - along * u) * (2 * cotangent * pairs) * norm * scale
    return (jnp.sign(w) * slopes).astype(w.dtype)


_similarity.__wrapped__.defvjp(_forward, _backward)


def _magnitude(w):
    return jnp.abs(w).astype(jnp.promote_types(w.dtype, jnp.float32))


def diversity_term(context: TermContext) -> LossTerm:
    """The sum over layers of D of the FFN's outgoing weights: a term on parameters.

    It reads the EFFECTIVE kernels (masks and adapters applied, one layer at a time); neuron factors
    scale whole rows and cancel. Metrics: "layer_mean" [L], D of each layer, and "mean" over the
    layers.
    """

    def function(params: dict) -> TermValue:
        stacks = kernels(params, PLACE)
        values = [by_layer(stack, similarity) for stack in stacks]
        # For a layer with experts, the sum over their matrices.
        values = jnp.concatenate([x if x.ndim == 1 else jnp.sum(x, 1) for x in values])
        order = np.argsort([layer for stack in stacks for layer in stack.layers])
        layers = jax.lax.stop_gradient(values)[order]
        metrics = {"layer_mean": layers, "mean": jnp.mean(layers)}
        return TermValue(jnp.sum(values), jnp.ones((), jnp.float32), metrics)

    targets = (pattern(PLACE, None),)
    return LossTerm(context.name, function, context.weight, on="params", targets=targets)
