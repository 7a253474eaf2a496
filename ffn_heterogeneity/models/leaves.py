"""Declarations of a model's leaves: their role, axes by name, and initialization.

Shapes, fresh weights, sharding, weight decay, which leaves train, how a removal cuts them,
parameter counts and the checks of readers follow from the declarations (and from `adapters`, for
leaves next to kernels). A family or a feature adds its leaf in `inner_leaves` or `outer_leaves`,
and in the module that reads it.
"""

import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ffn_heterogeneity.adapters import FFN_LEAVES, adapter_leaves
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.stack import segmentation, slots
from ffn_heterogeneity.tree import AUXILIARY, Leaf, LeafError, data, flatten, unflatten, weights

Declared = Iterator[tuple[str, Leaf]]
# Further roots of a tree -> functions that declare the leaves below them (heads add theirs).
ROOTS: dict[str, Callable[[ModelConfig], Mapping[str, Leaf]]] = {}
# Initial standard deviation, that of most families' configs in transformers; T5's: `std_of`.
STD = 0.02


def _linear(
    path: str, fan_in: str, fan_out: str, bias: bool, *lead: str, reads: float = 1.0, **more: Any
) -> Declared:
    yield f"{path}/kernel", weights(*lead, fan_in, fan_out, reads=reads)
    if bias:
        yield f"{path}/bias", Leaf((*lead, fan_out), 0.0, **more)


def _norm(path: str, dimension: str, config: ModelConfig) -> Declared:
    names = {"rms": ("scale",), "layer": ("scale", "bias"), "layer_without_parameters": ()}
    for name in names[config.norm_kind]:
        start = 1.0 - config.norm_offset if name == "scale" else 0.0
        yield f"{path}/{name}", Leaf((dimension,), start, cut=False)


def inner_leaves(config: ModelConfig, layer: LayerConfig) -> Declared:
    """(path inside the layer, declaration) of one layer's leaves; kernels are [in, out].

    In a layer with experts, leaves that each expert has have "expert" as their first axis.
    """
    lead = () if layer.experts is None else ("expert",)
    reads = {"reads": layer.read_share}
    yield from _norm("attention_norm", "d_model", config)
    for name, out in (("q", "queries"), ("k", "keys"), ("v", "keys")):
        yield from _linear(f"attention/{name}", "d_model", out, config.attention_bias)
    yield from _linear("attention/out", "queries", "d_model", config.attention_out_bias)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        yield from _norm(f"attention/{name}", "head", config)
    if config.post_norms:
        yield from _norm("post_attention_norm", "d_model", config)
    if layer.cross_attention:
        yield from _norm("cross_norm", "d_model", config)
        for name, out in (("q", "queries"), ("k", "keys"), ("v", "keys")):
            yield from _linear(f"cross_attention/{name}", "d_model", out, config.attention_bias)
        bias = config.attention_out_bias
        yield from _linear("cross_attention/out", "queries", "d_model", bias)
    yield from _norm("ffn_norm", "d_model", config)
    if lead:
        yield from _router(layer)
    for name in ("gate", "up") if layer.ffn_kind == "gated" else ("up",):
        yield from _linear(f"ffn/{name}", "d_model", "neurons", config.ffn_bias, *lead, **reads)
    yield from _linear("ffn/down", "neurons", "d_model", config.ffn_bias, *lead, **reads)
    if config.post_norms:
        yield from _norm("post_ffn_norm", "d_model", config)
    for name, leaf in FFN_LEAVES.items():
        yield f"ffn/{name}", leaf.of(axes=(*lead, *leaf.axes), optional=True)


def _router(layer: LayerConfig) -> Declared:
    columns = "d_model"
    if layer.router == "mlp":
        yield from _linear("ffn/router/hidden", columns, columns := "route", bias=False)
    yield from _linear("ffn/router", columns, "route", bias=False)
    if layer.constants:
        yield "ffn/constant", weights("constant", "d_model", cut=False)
    merged = layer.routes is not None
    yield "ffn/expert_of", data("route", numbers="expert", dtype=np.int32, optional=not merged)


def _before(config: ModelConfig) -> Declared:
    yield "embed/embedding", weights("vocab", "d_model", reads=0.0)
    if config.position_rows:
        yield "embed/position", weights("positions", "d_model", reads=0.0, cut=False)
    if config.token_types:
        yield "embed/token_type", weights("types", "d_model", reads=0.0, cut=False)
    if config.embedding_norm:
        yield from _norm("embed/norm", "d_model", config)
    for stack in config.stacks if config.positions == "relative" else ():
        yield f"relative/{stack}", weights("buckets", "heads", reads=0.0, cut=False)


def _behind(config: ModelConfig) -> Declared:
    if config.kind == "encoder_decoder":
        yield from _norm("encoder_norm", "d_model", config)
    if config.final_norm:
        yield from _norm("final_norm", "d_model", config)
    if config.lm_head and not config.tied:
        yield "head/kernel", weights("d_model", "vocab")
    if config.pooler:
        yield from _linear("pooler", "d_model", "pooled", True, cut=False)


def outer_leaves(config: ModelConfig) -> dict[str, Leaf]:
    """{path: declaration} of the leaves outside the layers, embeddings first."""
    return dict([*_before(config), *_behind(config)])


def sizes(config: ModelConfig, layer: LayerConfig | None = None) -> dict[str, int]:
    """{dimension: its size}, including a layer's dimensions if one is given."""
    dimensions = {
        "d_model": config.d_model,
        "queries": config.n_heads * config.head_dim,
        "keys": config.n_kv_heads * config.head_dim,
        "head": config.head_dim,
        "vocab": config.vocab_size,
        "positions": config.position_rows,
        "types": config.token_types,
        "buckets": config.relative_buckets,
        "heads": config.n_heads,
        "pooled": config.d_model,
        "layers": config.n_layers,
    }
    if layer is not None:
        dimensions |= {"neurons": layer.ffn_width, "expert": layer.experts or 0}
        dimensions |= {"route": layer.columns, "constant": layer.constants}
    return dimensions


def shape_of(leaf: Leaf, sized: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a leaf whose axes are all dimensions of the model."""
    return tuple(sized[axis] for axis in leaf.axes)


def required(config: ModelConfig) -> Iterator[tuple[str, Leaf, LayerConfig | None]]:
    """(path in the unstacked tree, declaration, its layer) of the leaves that a model must have."""
    yield from ((path, leaf, None) for path, leaf in _before(config))
    for i, layer in enumerate(config.layers):
        for path, leaf in inner_leaves(config, layer):
            if not leaf.optional:
                yield f"layers/{i}/{path}", leaf, layer
    yield from ((path, leaf, None) for path, leaf in _behind(config))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return `{path: shape}` of the unstacked tree ("layers/3/ffn/down/kernel": (m_3, d)).

    It is pure arithmetic: a 405B model takes milliseconds. Checkpoint readers compare every tensor
    with its shape.
    """
    sized = {layer: sizes(config, layer) for layer in (None, *config.layers)}
    return {path: shape_of(leaf, sized[layer]) for path, leaf, layer in required(config)}


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Count parameters: `total`, its parts, and `active`.

    Parts: `embedding` (the tables, counted once if tied), `head` (0 if tied; or a pooler),
    `attention` (projections, biases, QK-norms), `ffn` (projections, biases, routers), `norms` (all
    others). `active` are those that one token uses: of experts only the chosen and shared ones.
    """
    names = ("total", "embedding", "head", "attention", "ffn", "norms", "active")
    counts: dict[str, int] = dict.fromkeys(names, 0)
    shapes = expected_shapes(config)
    for path, leaf, layer in required(config):
        parts, size = path.split("/"), math.prod(shapes[path]) * leaf.holds
        share = layer.read_share if layer and "expert" in leaf.axes else 1.0
        blocks = {"attention": "attention", "cross_attention": "attention", "ffn": "ffn"}
        blocks["relative"] = "attention"
        kind = next((kind for name, kind in blocks.items() if name in parts), "norms")
        if parts[0] == "embed" and parts[1] != "norm":
            kind = "embedding"
        elif parts[0] in ("head", "pooler"):
            kind = "head"
        counts[kind] += size
        counts["total"] += size
        counts["active"] += round(size * share)
    return counts


def parameters_text(config: ModelConfig) -> str:
    """Return e.g. "46,702,792,704 parameters, 12,879,925,248 active per token"."""
    counts = count_parameters(config)
    total, active = counts["total"], counts["active"]
    return f"{total:,} parameters" + (f", {active:,} active per token" if active < total else "")


# ---- the leaves of a tree


def _any() -> dict[str, Leaf]:
    """All leaves that a model without experts may have, by their path inside or outside a layer."""
    sizes = dict.fromkeys(("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim"), 2)
    parts = ("post_norms", "qk_norm", "attention_bias", "attention_out_bias", "ffn_bias")
    parts += ("embedding_norm", "pooler")
    settings = {"norm_kind": "layer", "tied": False, "positions": "learned", "token_types": 2}
    layer = LayerConfig(2, rope=None)
    config = ModelConfig("any", layers=(layer,), **sizes, **settings, **dict.fromkeys(parts, True))
    return outer_leaves(config) | dict(inner_leaves(config, layer))


class Place(NamedTuple):
    """The place of a subtree in a model, e.g. "ffn/down" of layer 3; "" is the whole layer.

    The expert is None for leaves outside experts, or for all experts of a layer together.
    """

    layer: int
    expert: int | None
    name: str

    @property
    def path(self) -> str:
        """Name for patterns: "layers/3/ffn/down", "layers/3/experts/5/ffn/down"."""
        expert = "" if self.expert is None else f"/experts/{self.expert}"
        return f"layers/{self.layer}{expert}/{self.name}".rstrip("/")


def declared(config: ModelConfig, tree: Any) -> dict[str, Leaf]:
    """Return {path: declaration} of every leaf of a tree, stacked or not, with adapters and heads.

    The meaning of an adapter's axes depends on its kernel; the first axis of a stacked leaf is
    "layer". A second model in the tree (a teacher) may have other shapes; experts, where this model
    has some.

    Raises:
      LeafError: an undeclared leaf, or one with another number of axes.
    """
    outer, by_path = outer_leaves(config), {}
    for root in ROOTS:
        if root in tree:
            outer |= {f"{root}/{path}": leaf for path, leaf in ROOTS[root](config).items()}
    for slot in slots(tree):
        known = declared_at(config, Place(slot.layers[0], None, ""), slot.tree, slot.stacked)
        by_path |= {f"{slot.path}/{path}": leaf for path, leaf in known.items()}
    layers = {slot.path: config.layers[slot.layers[0]] for slot in slots(tree)}
    for root in AUXILIARY:
        other, leaves = _any() if root in tree else {}, flatten(tree.get(root, {}))
        for path, leaf in leaves.items():
            place = re.match(r"(layers/\d+|(stack)/segment_\d+/slot_\d+)/", path)
            table = other
            if place and any(name.startswith(f"{place[0]}ffn/router/") for name in leaves):
                table = dict(inner_leaves(config, layers[place[1]]))
            known = find(table, path[place.end() :] if place else path)
            lead = ("layer",) if place and place[2] else ()
            known = known and known.of(axes=(*lead, *known.axes))
            by_path[f"{root}/{path}"] = _fitting(f"{root}/{path}", leaf, known)
    rest = {path: leaf for path, leaf in flatten(tree).items() if path not in by_path}
    return by_path | {path: _fitting(path, leaf, outer.get(path)) for path, leaf in rest.items()}


def declared_at(
    config: ModelConfig, place: Place, tree: dict, stacked: bool = False
) -> dict[str, Leaf]:
    """Return {path in the tree: declaration} of the leaves at a place; errors as `declared`.

    Args:
      stacked: whether the first axis of the leaves is "layer".
    """
    layer, by_path = config.layers[place.layer], {}
    if place.expert is not None:  # one expert has the leaves of a layer without experts
        layer = dataclasses.replace(layer, experts=None)
    table = dict(inner_leaves(config, layer))
    for path, leaf in flatten(tree).items():
        known = find(table, f"{place.name}/{path}".lstrip("/"))
        if known is not None:
            missing = max(0, len(known.axes) + stacked - len(leaf.shape)) if known.broadcasts else 0
            known = known.of(axes=(*("layer",) * stacked, *known.axes[missing:]))
        by_path[path] = _fitting(f"{place.path}/{path}", leaf, known)
    return by_path


def _fitting(path: str, leaf: Any, declaration: Leaf | None) -> Leaf:
    if declaration is None:
        way = "declare it (models/leaves.py; for an adapter adapters/__init__.py)"
        raise LeafError(f"nothing declares the leaf {path!r}: {way}")
    if len(declaration.axes) != len(leaf.shape):
        raise LeafError(
            f"leaf {path!r} has the shape {tuple(leaf.shape)}, its axes are {declaration.axes}"
        )
    return declaration


def find(table: Mapping[str, Leaf], path: str) -> Leaf | None:
    """The declaration at `path`: the table's, or that of an adapter of one of its kernels."""
    if path in table:
        return table[path]
    module, _, name = path.rpartition("/")
    kernel, adapter_leaf = table.get(f"{module}/kernel"), adapter_leaves().get(name)
    return None if kernel is None or adapter_leaf is None else adapter_leaf.beside(kernel)


# ---- fresh models


# Compiled as one program: op by op it takes ten times as long.
@functools.partial(jax.jit, static_argnums=(0, 2))
def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> dict:
    """Initialize random parameters, stacked: kernels and tables N(0, 0.02^2), norms 1, biases 0.

    T5 and Switch begin as in transformers: the embedding N(0, 1), kernels N(0, 1 / inputs), queries
    N(0, 1 / (inputs head_dim)), because attention has no scale; routers as in Flaxformer, N(0,
    0.02^2). Where transformers has more (untied heads, routers, experts' second kernels), 1 /
    inputs [ours].

    A leaf's values depend only on the key, its layer and its path, not on the stacking of layers.
    """
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(config.n_layers))
    made = drawn(config, outer_leaves(config), sizes(config), key)
    for i, segment in enumerate(segmentation(config.layers)):
        for slot in range(segment.slots):
            layer = config.layers[segment.layer(slot)]
            required = {p: leaf for p, leaf in inner_leaves(config, layer) if not leaf.optional}
            draw = functools.partial(drawn, config, required, sizes(config, layer))
            places = jnp.asarray([segment.layer(slot, j) for j in range(segment.repeats)])
            for path, leaf in jax.vmap(draw)(keys[places]).items():
                made[f"stack/segment_{i}/slot_{slot}/{path}"] = leaf
    floats = {p: x.astype(dtype) for p, x in made.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    return unflatten(made | floats)


def std_of(config: ModelConfig, path: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of a leaf's initial values, as in `init`; tables have rows of d_model."""
    if config.positions != "relative" or "router" in path:
        return STD
    if path == "embed/embedding":
        return 1.0
    inputs = config.d_model if path.startswith("relative/") else shape[-2]
    return (inputs * (config.head_dim if path.endswith("/q/kernel") else 1)) ** -0.5


def drawn(
    config: ModelConfig, leaves: Mapping[str, Leaf], sized: Mapping[str, int], key: jax.Array
) -> dict[str, jax.Array]:
    """{path: initial values, float32 or indices}; each depends only on `key` and its path."""

    def values(path: str, leaf: Leaf) -> jax.Array:
        shape = shape_of(leaf, sized)
        if leaf.numbers:
            return jnp.broadcast_to(jnp.arange(shape[-1]) % sized[leaf.numbers], shape)
        if leaf.init is not None:
            return jnp.full(shape, leaf.init, jnp.float32)
        leaf_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        normal = jax.nn.initializers.normal(std_of(config, path, shape))
        return normal(leaf_key, shape, jnp.float32)

    return {path: values(path, leaf) for path, leaf in leaves.items()}


def neuron_axis(path: str, leaf: Leaf) -> int | None:
    """The axis over inner neurons, counted from the right; None if the leaf has no such axis.

    Raises:
      LeafError: a removal would change the meaning of the leaf's values.
    """
    if leaf.depends_on("neurons"):
        # Indices of neurons, norms of columns over them, codes that hold two of them.
        raise LeafError(
            f"{path} {leaf.axes} depends on neurons to be removed: fold the model first (surgery "
            "fold)"
        )
    return leaf.axis("neurons")


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> dict:
    """Shapes and dtypes of `init`, without computing values (27B parameters take a second)."""
    return jax.eval_shape(lambda key: init(config, key, dtype), jax.random.key(0))
