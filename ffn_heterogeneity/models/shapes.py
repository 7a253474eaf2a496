"""Names and shapes of every leaf of an unstacked tree, and parameter counts, from a config alone.

Pure arithmetic: a 405B model is counted in milliseconds. The checkpoint readers use
`expected_shapes` to hold every tensor to the one shape it may have.
"""

from __future__ import annotations

import math

from ffn_heterogeneity.models.config import LayerConfig, ModelConfig


def _linear(path: str, fan_in: int, fan_out: int, bias: bool) -> dict[str, tuple[int, ...]]:
    leaves = {f"{path}/kernel": (fan_in, fan_out)}
    if bias:
        leaves[f"{path}/bias"] = (fan_out,)
    return leaves


def _norm(path: str, size: int, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = {"rms": ("scale",), "layer": ("scale", "bias"), "layer_without_parameters": ()}
    return {f"{path}/{name}": (size,) for name in leaves[config.norm_kind]}


def layer_shapes(config: ModelConfig, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    """`{path inside the layer: shape}` of one layer; kernels are [in, out]."""
    d, m = config.d_model, layer.ffn_width
    query, key = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = _norm("attention_norm", d, config)
    shapes |= _linear("attention/q", d, query, config.attention_bias)
    shapes |= _linear("attention/k", d, key, config.attention_bias)
    shapes |= _linear("attention/v", d, key, config.attention_bias)
    shapes |= _linear("attention/out", query, d, config.attention_out_bias)
    if config.qk_norm:
        shapes |= _norm("attention/q_norm", config.head_dim, config)
        shapes |= _norm("attention/k_norm", config.head_dim, config)
    if config.post_norms:
        shapes |= _norm("post_attention_norm", d, config)
    shapes |= _norm("ffn_norm", d, config)
    if layer.ffn_kind == "gated":
        shapes |= _linear("ffn/gate", d, m, config.ffn_bias)
    shapes |= _linear("ffn/up", d, m, config.ffn_bias)
    shapes |= _linear("ffn/down", m, d, config.ffn_bias)
    if config.post_norms:
        shapes |= _norm("post_ffn_norm", d, config)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """`{path: shape}` of the whole unstacked tree ("layers/3/ffn/down/kernel": (m_3, d))."""
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (config.vocab_size, config.d_model)}
    if config.position_rows:
        shapes["embed/position"] = (config.position_rows, config.d_model)
    if config.token_types:
        shapes["embed/token_type"] = (config.token_types, config.d_model)
    if config.embedding_norm:
        shapes |= _norm("embed/norm", config.d_model, config)
    for i, layer in enumerate(config.layers):
        shapes |= {f"layers/{i}/{p}": s for p, s in layer_shapes(config, layer).items()}
    if config.final_norm:
        shapes |= _norm("final_norm", config.d_model, config)
    if config.lm_head and not config.tied:
        shapes["head/kernel"] = (config.d_model, config.vocab_size)
    if config.pooler:
        shapes |= _linear("pooler", config.d_model, config.d_model, bias=True)
    return shapes


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers of parameters: `total` and its parts.

    Parts: `embedding` (the tables, counted once when tied), `head` (0 when tied; or a pooler),
    `attention` (projections, biases, QK-norms), `ffn` (projections, biases), `norms` (all others).
    """
    names = ("total", "embedding", "head", "attention", "ffn", "norms")
    counts: dict[str, int] = dict.fromkeys(names, 0)
    for path, shape in expected_shapes(config).items():
        size = math.prod(shape)
        parts = path.split("/")
        if parts[0] == "embed" and parts[1] != "norm":
            counts["embedding"] += size
        elif parts[0] in ("head", "pooler"):
            counts["head"] += size
        elif "attention" in parts:
            counts["attention"] += size
        elif "ffn" in parts:
            counts["ffn"] += size
        else:
            counts["norms"] += size
        counts["total"] += size
    return counts
