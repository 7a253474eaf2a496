"""GPT-2: rows padded on the left and generation against torch, its files, rejected configs."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import our_logits, random_params, tiny_of, torch_logits, torch_model
from tiny_runs import refused

from ffn_heterogeneity.io.hf.export import loads_in, save_pretrained
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.families import config_from_hf, config_to_hf
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.surgery import SURGERIES

pytestmark = pytest.mark.usefixtures("compiled_quickly")

TINY = tiny_of("gpt2", layers=3)
PARAMS = random_params(TINY)


def test_padded_rows_and_greedy_tokens_are_torchs_up_to_the_last_position(torch, tmp_path):
    """24 positions hold the longest prompt and 13 tokens; buckets would be 16 and 16 columns."""
    save_pretrained(TINY, PARAMS, tmp_path / "m")
    assert loads_in(tmp_path / "m").startswith("loads in: transformers, vLLM")
    theirs, width, new = torch_model(torch, tmp_path / "m"), 11, 13
    prompts = [[0, 5, 9, 4, 2, 7, 11, 3, 8, 20, 17], [7, 6], [4, 1, 28, 2, 9]]
    ids, mask = torch.zeros(2, 3, width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    batch = {"tokens": ids.numpy(), "segment_ids": mask.numpy()}
    ours = causal_lm.logits(TINY, PARAMS, causal_lm.forward(TINY, PARAMS, batch)["hidden"])
    with torch.no_grad():
        places = (mask.cumsum(1) - 1).clamp(0)
        expected = theirs(ids, attention_mask=mask, position_ids=places).logits.numpy()
    real = mask.numpy() > 0
    np.testing.assert_allclose(np.asarray(ours)[real], expected[real], atol=1e-4, rtol=0)

    # No token ends a text: both may generate any token.
    theirs.generation_config.eos_token_id = None
    counts = {"min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    said = theirs.generate(ids, attention_mask=mask, do_sample=False, **counts)[:, width:]
    generator = Generator(TINY, PARAMS, batch_size=4)
    generations = generator(prompts, Sampling(max_new_tokens=new), progress=None)
    assert [one.tokens for one in generations] == said.tolist()
    with pytest.raises(ValueError, match="more than the 24 positions of the model"):
        generator(prompts, Sampling(max_new_tokens=new + 1), progress=None)


def test_files_without_the_prefix_and_with_the_buffers_of_old_ones_are_read(tmp_path, capfd):
    """Files of GPT2Model and of the hub; a head in addition to the tied embedding is a copy."""
    save_pretrained(TINY, PARAMS, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    before = load_file(path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in before.items()}
    old = {"h.0.attn.bias": np.tril(np.ones((1, 1, 24, 24), np.uint8))}
    old |= {"h.0.attn.masked_bias": np.array(-1e4, "f"), "lm_head.weight": tensors["wte.weight"]}
    save_file(tensors | old, path, metadata={"format": "pt"})
    capfd.readouterr()
    config, again = read_pretrained(tmp_path / "m")
    assert config == TINY and not capfd.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, again, PARAMS)


REFUSED = {
    "scale_attn_weights": (False, "scale_attn_weights=False: gpt2 is supported only with True"),
    "scale_attn_by_inverse_layer_idx": (
        True,
        "inverse_layer_idx=True: gpt2 is supported only with F",
    ),
    "add_cross_attention": (True, "add_cross_attention=True: "),
    "n_inner": (0, "intermediate_size=0 is not a positive whole number"),
}


def test_what_config_json_leaves_out_and_what_is_refused():
    values = config_to_hf(TINY)
    bare = {key: values[key] for key in ("model_type", "vocab_size", "n_embd", "n_layer", "n_head")}
    config = config_from_hf(bare | {"n_inner": None, "intermediate_size": 5})
    assert config.ffn_widths == (64,) * 3 and config.max_position == 1024 and config.tied
    assert (config.activation, config.eos_id, config.norm_eps) == ("gelu_tanh", 50_256, 1e-5)
    assert config_from_hf(bare | {"n_ctx": 7}).max_position == 7
    assert not config_from_hf(bare | {"attn_pdrop": 0.0}).attention_dropout
    assert config_from_hf(bare | {"reorder_and_upcast_attn": True}) == config
    for key, (value, words) in REFUSED.items():
        refused(words, config_from_hf, values | {key: value}, error=ConfigError)


def test_a_fused_model_loads_in_torch(torch, tmp_path):
    model, report = SURGERIES["fuse"](Model(TINY, PARAMS, None, ""), {"ratio": 0.5})
    assert model.config.ffn_widths == (6,) * 3 and report["inertia_share"] > 0
    save_pretrained(model.config, model.params, tmp_path)
    tokens = np.arange(9)[None]
    theirs = torch_logits(torch, torch_model(torch, tmp_path), tokens)
    ours = our_logits(model.config, model.params, tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    assert np.abs(ours - our_logits(TINY, PARAMS, tokens)).max() > 0.1
