"""Experts: a layer with several feed-forward blocks, of which a router chooses some per token.

    p = softmax(x R);   y = sum over the top_k columns r of g_r FFN_e(r)(x)

in float32 for the router, with g_r = p_r / (sum of the chosen p) ("renormalized"), p_r ("softmax")
or 1 ("none"), and e(r) = shared + r, or the leaf `expert_of`. Shared experts see every token with
gate 1. No token is dropped, unless the layer has a `capacity` (Switch). The last `constants`
columns have a vector, a row of the leaf `constant`, in place of an expert's output (MoNE,
2507.00390).
"""

import functools
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ffn_heterogeneity.adapters import FFN_LEAVES, adapters_of, is_linear, neuron_factor
from ffn_heterogeneity.adapters.rows import of_rows
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.dispatch import (
    chosen_dispatch,
    grouped_product,
    grouping,
    permuted,
)
from ffn_heterogeneity.models.feed_forward import ACTIVATIONS
from ffn_heterogeneity.models.leaves import find, inner_leaves, shape_of, sizes
from ffn_heterogeneity.models.linear import DROP, applied, dropout, product
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.parallel.partition import batch_sharding, spec_of
from ffn_heterogeneity.tree import LeafError, flatten, subtree, unflatten

# The random stream of routers' noise.
JITTER = "router"


class Rows(NamedTuple):
    """States and outputs of the chosen experts: N = B T k rows (k with the shared ones), by expert.

    Attributes:
      states: h, before `neuron_scale`, [N, m].
      outputs: of the experts, before the gates, [N, D].
      experts: int32 [N]; -1 of rows that belong to none (constants), whose outputs are 0.
      gates: float32 [N].
      tokens: the rows' tokens, 0 to B T - 1, int32 [N].
    """

    states: jax.Array
    outputs: jax.Array
    experts: jax.Array
    gates: jax.Array
    tokens: jax.Array


class Routing(NamedTuple):
    """Choices of a router with R columns, k of them per token.

    Attributes:
      logits: float32 [B, T, R].
      columns: the chosen columns, int32 [B, T, k].
      gates: the factors of the experts' outputs, float32 [B, T, k].
      accepted: False for choices beyond the capacity, bool [B, T, k]; None without a capacity.
      rows: what the experts computed; None on a mesh. XLA removes what is not read.
    """

    logits: jax.Array
    columns: jax.Array
    gates: jax.Array
    accepted: jax.Array | None = None
    rows: Rows | None = None


def route(
    layer: LayerConfig, router: Mapping[str, Any], x_btd: jax.Array, key: jax.Array | None = None
) -> Routing:
    """Choose the columns of each token.

    Args:
      router: leaves of `ffn/router`, with adapters.
      key: for the layer's `jitter`; None: without.
    """
    x = x_btd.reshape(-1, x_btd.shape[-1])
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if key is not None:
        least, most = 1.0 - layer.jitter, 1.0 + layer.jitter
        x = x * jax.random.uniform(key, x.shape, x.dtype, least, most)
    if layer.router == "mlp":
        squares = jnp.sum(x * x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.maximum(squares, jnp.finfo(x.dtype).tiny))
        x = jnp.tanh(product(router["hidden"], x, _wide_dot))
    logits = product({k: v for k, v in router.items() if k != "hidden"}, x, _wide_dot)
    logits = logits.reshape(*x_btd.shape[:-1], -1)
    gates, columns = jax.lax.top_k(jax.nn.softmax(logits), layer.top_k)
    if layer.gates == "renormalized":
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    elif layer.gates == "none":
        gates = jnp.ones_like(gates)
    if layer.capacity is None:
        return Routing(logits, columns, gates)
    chosen = jax.nn.one_hot(columns, layer.columns, dtype=jnp.int32)
    in_order = chosen.reshape(len(x_btd), -1, layer.columns)
    before = (jnp.cumsum(in_order, axis=1) - in_order).reshape(chosen.shape)
    return Routing(logits, columns, gates, jnp.sum(before * chosen, axis=-1) < layer.capacity)


def _wide_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w in float32 on every device: rounded factors send tokens to other experts."""
    return jnp.matmul(x, w.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


class Experts(nn.Module):
    """The sum of the chosen experts' outputs, each h W with h = act(x G) * (x U) or act(x U).

    On a mesh (`options.activations`) every device computes its examples' rows with its experts, or
    with its neurons of all experts if the mesh's "tensor" axis does not divide their number; one
    sum over "tensor" follows.
    """

    config: ModelConfig
    layer: LayerConfig
    options: RunOptions = RunOptions()

    @nn.compact
    def __call__(self, x_btd: jax.Array) -> tuple[jax.Array, Routing]:
        """x [B, T, D] -> (y [B, T, D], Routing)."""
        layer, leaves = self.layer, self._leaves()
        noise = self.make_rng(JITTER) if layer.jitter and self.has_rng(JITTER) else None
        routing = route(layer, leaves.pop("router"), x_btd, noise)
        constants = leaves.pop("constant", None)
        expert_of = leaves.pop("expert_of", layer.shared + jnp.arange(layer.columns))
        experts, gates = jnp.asarray(expert_of)[routing.columns], routing.gates
        if routing.accepted is not None:
            experts = jnp.where(routing.accepted, experts, -1)  # of no expert
        if layer.shared:  # as further choices of every token
            always = jnp.broadcast_to(
                jnp.arange(layer.shared, dtype=experts.dtype), (*experts.shape[:-1], layer.shared)
            )
            experts = jnp.concatenate([experts, always], axis=-1)
            gates = jnp.concatenate([gates, jnp.ones(always.shape, gates.dtype)], axis=-1)
        # Adapters of kernels are applied here, because codes cannot be sharded like kernels.
        leaves = {name: applied(x) if isinstance(x, dict) else x for name, x in leaves.items()}
        key = self.make_rng(DROP) if self.options.adapter_dropout and self.has_rng(DROP) else None
        mesh = getattr(self.options.activations, "mesh", None)
        run = functools.partial(_chosen_experts, self.config, layer, self.options)
        if mesh is None:
            y_btd, rows = run(leaves, x_btd, experts, gates, key)
            routing = routing._replace(rows=rows)
        else:
            leaves = {name: _narrowed(leaf, x_btd.dtype) for name, leaf in leaves.items()}
            y_btd = self._on_mesh(run, mesh, leaves)(leaves, x_btd, experts, gates, key)
        if constants is not None:
            y_btd = y_btd + _constant_outputs(constants, routing).astype(y_btd.dtype)
        if routing.accepted is not None and layer.overflow == "input":
            dropped_bt = jnp.sum(jnp.where(routing.accepted, 0, routing.gates), axis=-1)
            y_btd = y_btd + (dropped_bt[..., None] * x_btd).astype(y_btd.dtype)
        return self.perturb("output", y_btd), routing

    def _leaves(self) -> dict[str, Any]:
        """Leaves of the layer, nested.

        Raises:
          ValueError: one is missing, or has another shape.
        """
        given, sized = self.variables["params"], sizes(self.config, self.layer)
        for path, leaf in inner_leaves(self.config, self.layer):
            if leaf.optional or not path.startswith("ffn/"):
                continue
            path, shape = path.removeprefix("ffn/"), shape_of(leaf, sized)
            value, module = subtree(given, path), subtree(given, path.rpartition("/")[0])
            if value is None and module and is_linear(module):
                continue  # codes or factors in place of a kernel
            name = "/".join((*self.path, path))
            if value is None:
                raise ValueError(f"missing parameter {name} of shape {shape}")
            if value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}, expected {shape}")
        return dict(given)

    def _on_mesh(self, run: Any, mesh: Mesh, leaves: dict[str, Any]) -> Any:
        """The function `run` on every device with its examples and its part of the leaves.

        Raises:
          LeafError: neurons are sharded, and a leaf depends on all of them.
        """
        table, specs = dict(inner_leaves(self.config, self.layer)), {}
        for path, array in flatten(leaves).items():
            leaf = find(table, f"ffn/{path}")
            assert leaf is not None
            cut = [axis == "tensor" for axis in spec_of(leaf, array.shape, mesh)]
            specs[path] = PartitionSpec(*("tensor" if one else None for one in cut))
            of_neurons = leaf.depends_on("neurons") or path == "down/bias"
            if mesh.shape["tensor"] > 1 and of_neurons and "expert" in leaf.axes and not any(cut):
                raise LeafError(
                    f"ffn/{path} depends on all neurons, which the mesh shards: choose a tensor "
                    f"axis that divides the {self.layer.experts} experts"
                )
        parts = mesh.shape["tensor"]
        parts = 1 if (self.layer.experts or 0) % parts else parts  # 1: neurons are sharded

        def local(leaves: Any, x_btd: jax.Array, experts: Any, gates: Any, key: Any) -> jax.Array:
            part = jax.lax.axis_index("tensor") if parts > 1 else 0
            if key is not None:
                key = jax.random.fold_in(key, jax.lax.axis_index(mesh.axis_names))
            y_btd, _ = run(leaves, x_btd, experts, gates, key, part, parts)
            return jax.lax.psum(y_btd, "tensor")

        batch = batch_sharding(mesh, accumulated=False).spec
        in_specs = (unflatten(specs), batch, batch, batch, PartitionSpec())
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=batch, check_vma=False)


def _narrowed(leaves: Any, dtype: Any) -> Any:
    """The leaves with the kernel, if any, in the compute dtype: a mesh gathers half the bytes.

    Not if an adapter reads the kernel. (Without a mesh only used experts are cast.)
    """
    if not isinstance(leaves, Mapping) or "kernel" not in leaves:
        return leaves
    if any(adapter.reads_kernel for adapter in adapters_of(leaves)):
        return leaves
    return {**leaves, "kernel": leaves["kernel"].astype(dtype)}


def _chosen_experts(
    config: ModelConfig,
    layer: LayerConfig,
    options: RunOptions,
    leaves: Mapping[str, Any],
    x_btd: jax.Array,
    experts_btk: jax.Array,
    gates_btk: jax.Array,
    key: jax.Array | None,
    part: Any = 0,
    parts: int = 1,
) -> tuple[jax.Array, Rows]:
    """(Sum of gate times output over each token's experts, [B, T, D]; the experts' rows).

    Args:
      leaves: those of all experts, or of a device's.
      key: for the adapters' dropout, or None.
      part: which of `parts` equal parts of the experts the leaves are of; the outputs of the others
        are left out.
    """
    copies, width = experts_btk.shape[-1], x_btd.shape[-1]
    count = (layer.experts or 0) // parts
    local = experts_btk.reshape(-1) - part * count
    local = jnp.where((local >= 0) & (local < count), local, count)
    dispatch = chosen_dispatch(options.dispatch, options.on)
    groups = grouping(local, count, dispatch)
    dot = functools.partial(grouped_product, groups=groups, dispatch=dispatch)
    draws = itertools.count()

    def drop(x: jax.Array) -> jax.Array:
        if key is None:
            return x
        return dropout(
            x, jax.random.fold_in(key, next(draws)), jnp.float32(options.adapter_dropout)
        )

    def linear(name: str, x: jax.Array) -> jax.Array:
        y = product(leaves[name], x, dot, drop)
        bias = leaves[name].get("bias")
        return y if bias is None else y + of_rows(bias, y, dot)

    rows = permuted(x_btd.reshape(-1, width), groups.order, groups.inverse, copies)
    act = ACTIVATIONS[config.activation]
    up = linear("up", rows)
    state = act(linear("gate", rows)) * up if layer.ffn_kind == "gated" else act(up)
    scale = neuron_factor({name: leaves.get(name) for name in FFN_LEAVES})
    scaled = state if scale is None else state * of_rows(scale, state, dot)
    outputs = linear("down", scaled)
    y_nkd = permuted(outputs, groups.inverse, groups.order, 1).reshape(-1, copies, width)
    gates_nk = gates_btk.reshape(-1, copies)
    y_nd = jnp.einsum("nkd,nk->nd", y_nkd, gates_nk, preferred_element_type=gates_nk.dtype)
    order = groups.order[: len(local)]
    sorted_rows = state[: len(local)], outputs[: len(local)]
    expert_n = jnp.where(local[order] < count, local[order], -1)
    seen = Rows(*sorted_rows, expert_n, gates_nk.reshape(-1)[order], order // copies)
    return y_nd.astype(x_btd.dtype).reshape(x_btd.shape), seen


def _constant_outputs(constants: jax.Array, routing: Routing) -> jax.Array:
    """Sum of gate times vector over each token's columns that have one, [B, T, D]."""
    first = routing.logits.shape[-1] - len(constants)
    chosen = jax.nn.one_hot(routing.columns - first, len(constants), dtype=routing.gates.dtype)
    gates = routing.gates
    if routing.accepted is not None:
        gates = jnp.where(routing.accepted, gates, 0)
    weights_btc = jnp.einsum("btkc,btk->btc", chosen, gates)
    return weights_btc @ constants.astype(weights_btc.dtype)
