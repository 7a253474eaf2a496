"""Parity with torch `transformers`: logits, gradients, checkpoints out and in, real models.

Tiny models have random weights (norms too), more tokens than their windows, float32.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_models import our_logits, torch_logits

from ffn_heterogeneity.io.assemble import Stored, assemble
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import parts, read_config, read_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.io.safetensors import open_directory, open_file
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.families import expected_shapes, family_by_name
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.tree import flatten

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SIZES |= {"attn_implementation": "eager"}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
# name -> (transformers' name, what differs from SIZES)
TINY = {
    "llama": ("Llama", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "llama_untied": ("Llama", {"num_hidden_layers": 2, "tie_word_embeddings": False}),
    "llama_biases": ("Llama", {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("Llama", {"num_hidden_layers": 2, "rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": (
        "Llama",
        {
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "gemma": ("Gemma", {"num_hidden_layers": 2, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 8, "sliding_window": 5, "query_pre_attn_scalar": 6},
    ),
    "gpt_neox": ("GPTNeoX", {"num_hidden_layers": 3, "rotary_pct": 0.25}),
    "gpt_neox_sequential": (
        "GPTNeoX",
        {
            "num_hidden_layers": 2,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 5e3,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "gpt2": ("GPT2", {"num_hidden_layers": 3, "n_inner": 48}),
    "gpt2_relu_untied": (
        "GPT2",
        {"num_hidden_layers": 2, "activation_function": "relu", "tie_word_embeddings": False},
    ),
    "phi3": ("Phi3", {"num_hidden_layers": 2, "partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "olmo": ("Olmo", {"num_hidden_layers": 3, "clip_qkv": 0.5, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"num_hidden_layers": 3, **WINDOWS}),
    "qwen2_tied": ("Qwen2", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_hidden_layers": 2, "head_dim": 12, **WINDOWS}),
    "mixtral": ("Mixtral", {"num_hidden_layers": 3, "num_local_experts": 4, "sliding_window": 5}),
    "qwen3_moe": ("Qwen3Moe", {"num_hidden_layers": 2, **EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_dense_layer": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 5,
            **EXPERTS,
        },
    ),
}
# The entries of SIZES that a family does not have.
NOT_TAKEN = {
    "GPT2": ("num_key_value_heads", "head_dim", "intermediate_size"),
    "GPTNeoX": ("num_key_value_heads", "head_dim"),
    "Olmo": ("head_dim",),
    "Phi3": ("head_dim",),
}
TOKENS = np.random.default_rng(7).integers(3, 97, (2, 24))


@functools.cache
def torch_model(name):
    import torch
    import transformers

    kind, changes = TINY[name]
    sizes = {k: v for k, v in SIZES.items() if k not in NOT_TAKEN.get(kind, ())}
    config = getattr(transformers, f"{kind}Config")(**(sizes | changes))
    others = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    architecture = others.get(kind, f"{kind}ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too: zeros and ones would hide mistakes.
            noise = torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15)
            parameter.copy_(noise + (0.0 if "Gemma" in kind or parameter.ndim > 1 else 1.0))
    return model


@pytest.fixture(params=TINY)
def tiny(request, torch, tmp_path):
    """(torch model, its directory, saved by transformers)."""
    model = torch_model(request.param)
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


def reread(directory):
    """Outputs of transformers on our files."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(directory, attn_implementation="eager").eval()


def test_logits_agree(torch, tiny):
    model, directory = tiny
    config, params = read_pretrained(directory)
    ours, theirs = our_logits(config, params, TOKENS), torch_logits(torch, model, TOKENS)
    assert np.abs(theirs).max() > 0.5, "the reference must say something"
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("where", ["top", "both", "neither"])
@pytest.mark.parametrize("name", ["phi3", "llama", "gpt_neox"])
def test_where_a_config_says_how_much_is_rotated(torch, tmp_path, name, where):
    """Phi-3 reads it next to rope_parameters, too, and prefers those; others do not."""
    torch_model(name).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    rope = values["rope_parameters"]
    rope.pop("partial_rotary_factor", None), values.pop("partial_rotary_factor", None)
    if where == "both":
        rope["partial_rotary_factor"] = 1.0
    if where != "neither":
        values["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = reread(tmp_path)
    config, params = read_pretrained(tmp_path)
    theirs = torch_logits(torch, model, TOKENS)
    np.testing.assert_allclose(our_logits(config, params, TOKENS), theirs, atol=1e-4, rtol=0)
    rotated = {"phi3": 0.5 if where == "top" else 1.0, "llama": 1.0}
    assert config.layers[0].rope.fraction == rotated.get(name, 1.0 if where == "both" else 0.25)


# The others' layers are made of the same parts.
OFTEN = (
    "llama",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen3_moe_dense_layer",
)


@pytest.mark.parametrize(
    "tiny",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in TINY],
    indirect=True,
)
def test_gradients_agree_leaf_by_leaf(torch, tiny, tmp_path):
    model, directory = tiny
    config, params = read_pretrained(directory)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:]

    def loss(params):
        hidden = causal_lm.forward(config, params, {"tokens": jnp.asarray(inputs)})["hidden"]
        log_p = jax.nn.log_softmax(causal_lm.logits(config, params, hidden))
        return -jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], axis=-1).mean()

    value, ours = jax.jit(jax.value_and_grad(loss))(params)
    model.zero_grad()
    their_logits = model(torch.tensor(inputs)).logits
    their_loss = torch.nn.functional.cross_entropy(
        their_logits.flatten(0, 1), torch.tensor(targets).flatten()
    )
    their_loss.backward()
    assert abs(float(value) - their_loss.item()) < 1e-5

    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    if config.family == "gpt_neox" and not config.tied:
        # Files say "embed_out"; transformers 5 renames it when it reads and writes them.
        grads["embed_out.weight"] = grads.pop("lm_head.weight")
    family = family_by_name(config.family)
    save_file(grads, tmp_path / "grads.safetensors")
    named = open_file(tmp_path / "grads.safetensors").items()
    each = [x for name, g in named for x in parts(family, family.own_name(name), g)]
    stored = {name: Stored(g.shape, "grad", g.load) for name, g in each}
    theirs = assemble(config, family.rules(config), stored)
    ours, theirs = (flatten(unstack(tree)) for tree in (ours, theirs))
    assert set(ours) == set(theirs) == set(expected_shapes(config))
    for path, reference in theirs.items():
        norm = np.linalg.norm(reference)
        if path.endswith("/k/bias") and config.position_rows:
            # One number for all logits of a query: only rounding.
            assert max(norm, np.linalg.norm(ours[path])) < 1e-6, path
            continue
        assert norm > 0, path
        assert np.linalg.norm(np.asarray(ours[path]) - reference) < 1e-4 * norm, path


def test_round_trip_is_bit_exact_and_transformers_reads_it(torch, tiny, tmp_path):
    model, directory = tiny
    config, params = read_pretrained(directory)
    save_pretrained(config, params, tmp_path / "ours")
    before, after = open_directory(directory), open_directory(tmp_path / "ours")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert tensor.load().tobytes() == after[name].load().tobytes(), name
    assert read_config(tmp_path / "ours") == config
    again = reread(tmp_path / "ours")
    assert type(again) is type(model)
    assert again.dtype == torch.float32
    np.testing.assert_array_equal(
        torch_logits(torch, again, TOKENS), torch_logits(torch, model, TOKENS)
    )


def pruned(config, params, widths):
    """The model with the first `widths[i]` neurons of each layer, from the definition."""
    layers = []
    for layer, width in zip(unstack(params)["layers"], widths, strict=True):
        ffn = layer["ffn"]
        incoming = {name: ffn[name] for name in ("gate", "up") if name in ffn}
        smaller = {
            name: {key: leaf[..., :width] for key, leaf in leaves.items()}
            for name, leaves in incoming.items()
        }
        smaller["down"] = {**ffn["down"], "kernel": ffn["down"]["kernel"][:width]}
        layers.append({**layer, "ffn": smaller})
    rest = {k: v for k, v in params.items() if k != "stack"}
    config = config.with_widths(widths)
    return config, restack(config, {**rest, "layers": layers})


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_unequal_widths_padded_for_transformers_or_by_layer(torch, tmp_path, name):
    import transformers

    torch_model(name).save_pretrained(tmp_path / "theirs")
    config, params = read_pretrained(tmp_path / "theirs")
    config, params = pruned(config, params, [48, 7, 30, 31, 9][: config.n_layers])
    save_pretrained(config, params, tmp_path / "padded", export="padded")
    theirs = reread(tmp_path / "padded")
    ours = our_logits(config, params, TOKENS)
    np.testing.assert_allclose(ours, torch_logits(torch, theirs, TOKENS), atol=1e-4, rtol=0)

    save_pretrained(config, params, tmp_path / "uneven")
    read = transformers.AutoConfig.from_pretrained(tmp_path / "uneven")
    key = "n_inner" if name == "gpt2" else "intermediate_size"
    assert [getattr(each, key) for each in read.per_layer_config] == list(config.ffn_widths)
    again_config, again = read_pretrained(tmp_path / "uneven")
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    # transformers reads the widths, but builds layers of one width.
    with pytest.raises((RuntimeError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "uneven")


def test_uniformly_pruned_model_is_plain(torch, tmp_path):
    torch_model("llama").save_pretrained(tmp_path / "theirs")
    config, params = pruned(*read_pretrained(tmp_path / "theirs"), [11, 11, 11])
    save_pretrained(config, params, tmp_path / "plain")
    values = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert values["intermediate_size"] == 11 and "ffn_heterogeneity" not in values
    theirs = reread(tmp_path / "plain")
    np.testing.assert_allclose(
        our_logits(config, params, TOKENS), torch_logits(torch, theirs, TOKENS), atol=1e-4, rtol=0
    )


def test_masks_and_neuron_scales_are_folded(torch, tmp_path):
    torch_model("llama").save_pretrained(tmp_path / "theirs")
    config, params = read_pretrained(tmp_path / "theirs")
    rng, tree = np.random.default_rng(0), unstack(params)
    for layer in tree["layers"]:
        ffn = layer["ffn"]
        ffn["neuron_scale"] = rng.uniform(0.5, 2.0, 48).astype(np.float32)
        for kernel in (ffn["down"], ffn["up"], layer["attention"]["q"]):
            kernel["mask"] = (rng.random(kernel["kernel"].shape) < 0.7).astype(np.float32)
    params = restack(config, tree)
    save_pretrained(config, params, tmp_path / "folded")
    theirs = reread(tmp_path / "folded")
    ours = our_logits(config, params, TOKENS)
    np.testing.assert_allclose(ours, torch_logits(torch, theirs, TOKENS), atol=1e-4, rtol=0)
    assert np.abs(ours - torch_logits(torch, torch_model("llama"), TOKENS)).max() > 0.1


def test_bfloat16_and_shards_written_by_transformers(torch, tmp_path):
    model = torch_model("gemma2")
    model.save_pretrained(tmp_path / "one")
    import transformers

    half = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype="bfloat16")
    half.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    config, params = read_pretrained(tmp_path / "shards")
    assert params["embed"]["embedding"].dtype == jnp.bfloat16
    theirs = half.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(params["embed"]["embedding"].astype(np.float32), theirs)
    save_pretrained(config, params, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    for (name, a), b in zip(half.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_real_model_agrees(torch, request, name, shared_data, tmp_path):
    """64 real tokens, the same dequantised weights in float32."""
    import transformers

    model = load_model(request.getfixturevalue(f"{name}_gguf"))
    text = (shared_data / "wikitext2" / "test.raw.txt").read_text()[:2000]
    save_pretrained(model.config, model.params, tmp_path / name, tokenizer=model.tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
    assert theirs.dtype == torch.float32
    ids = model.tokenizer.encode(text, add_special_tokens=False)[:63]
    tokens = np.array([[model.tokenizer.bos_token_id, *ids]])
    ours, reference = (
        our_logits(model.config, model.params, tokens),
        torch_logits(torch, theirs, tokens),
    )
    bound = 5e-5 * np.abs(reference).max() + 1e-3
    assert np.abs(ours - reference).max() <= bound
    np.testing.assert_array_equal(ours.argmax(-1), reference.argmax(-1))
    # Weights in wrong places would agree in both: real text must also be likely.
    log_p = jax.nn.log_softmax(ours[0, :-1])
    assert -log_p[np.arange(63), tokens[0, 1:]].mean() < 5.0
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
    assert their_tokenizer.encode(text) == model.tokenizer.encode(text)
