"""Tables of tensor names: Llama's, with experts, Gemma's with post-norms, llama.cpp's, BERT's."""

from collections.abc import Mapping


def name_table(
    table: Mapping[str, str], layer_prefix: str, layers: Mapping[str, str]
) -> dict[str, str]:
    """A full table from `{path: name}`, and `{module path: module name}` inside a layer.

    Module entries ("attention/q": "self_attn.q_proj") become ".weight" and ".bias" entries.
    """
    names = dict(table)
    for path, name in layers.items():
        leaf = "scale" if path.endswith("norm") else "kernel"
        names[f"layers/{{i}}/{path}/{leaf}"] = f"{layer_prefix}{name}.weight"
        names[f"layers/{{i}}/{path}/bias"] = f"{layer_prefix}{name}.bias"
    return names


_HF_TOP = {
    "embed/embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
}
_HF_LAYER = {
    "attention_norm": "input_layernorm",
    "attention/q": "self_attn.q_proj",
    "attention/k": "self_attn.k_proj",
    "attention/v": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn/gate": "mlp.gate_proj",
    "ffn/up": "mlp.up_proj",
    "ffn/down": "mlp.down_proj",
}
_HF_POST_NORMS = {
    "attention/q_norm": "self_attn.q_norm",
    "attention/k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
}
_HF_QK_NORMS = {k: v for k, v in _HF_POST_NORMS.items() if k.startswith("attention/")}
HF_NAMES = name_table(_HF_TOP, "model.layers.{i}.", _HF_LAYER | _HF_QK_NORMS)


def hf_expert_names(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    """Llama's table with experts in the module `block`, each with modules of those names.

    Other libraries have no `expert_of`, no constants and no router's hidden layer.
    """
    modules = {"ffn/router": f"{block}.gate", "ffn/router/hidden": f"{block}.gate.hidden"}
    for leaf, name in (("gate", gate), ("up", up), ("down", down)):
        modules[f"experts/{{e}}/ffn/{leaf}"] = f"{block}.experts.{{e}}.{name}"
    own = ("expert_of", "constant")
    names = {f"layers/{{i}}/ffn/{name}": f"model.layers.{{i}}.{block}.{name}" for name in own}
    return HF_NAMES | names | name_table({}, "model.layers.{i}.", modules)


HF_POST_NORM_NAMES = name_table(_HF_TOP, "model.layers.{i}.", _HF_LAYER | _HF_POST_NORMS)
GGUF_NAMES = name_table(
    {
        "embed/embedding": "token_embd.weight",
        "final_norm/scale": "output_norm.weight",
        "final_norm/bias": "output_norm.bias",
        "head/kernel": "output.weight",
    },
    "blk.{i}.",
    {
        "attention_norm": "attn_norm",
        "attention/q": "attn_q",
        "attention/k": "attn_k",
        "attention/v": "attn_v",
        "attention/out": "attn_output",
        "attention/q_norm": "attn_q_norm",
        "attention/k_norm": "attn_k_norm",
        "post_attention_norm": "post_attention_norm",
        "ffn_norm": "ffn_norm",
        "ffn/gate": "ffn_gate",
        "ffn/up": "ffn_up",
        "ffn/down": "ffn_down",
        "post_ffn_norm": "post_ffw_norm",
    },
)
# llama.cpp has all experts of a layer in one tensor.
_GGUF_EXPERTS = {f"experts/{{e}}/ffn/{name}": f"ffn_{name}_exps" for name in ("gate", "up", "down")}
GGUF_EXPERT_NAMES = GGUF_NAMES | name_table(
    {}, "blk.{i}.", {"ffn/router": "ffn_gate_inp", **_GGUF_EXPERTS}
)
# Names in a model without a head; a model with a head prepends its name and a dot.
BERT_NAMES = name_table(
    {
        "embed/embedding": "embeddings.word_embeddings.weight",
        "embed/position": "embeddings.position_embeddings.weight",
        "embed/token_type": "embeddings.token_type_embeddings.weight",
        "embed/norm/scale": "embeddings.LayerNorm.weight",
        "embed/norm/bias": "embeddings.LayerNorm.bias",
        "pooler/kernel": "pooler.dense.weight",
        "pooler/bias": "pooler.dense.bias",
    },
    "encoder.layer.{i}.",
    {
        "attention/q": "attention.self.query",
        "attention/k": "attention.self.key",
        "attention/v": "attention.self.value",
        "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "ffn/up": "intermediate.dense",
        "ffn/down": "output.dense",
        "ffn_norm": "output.LayerNorm",
    },
)
