"""Files of encoders: prefixes, old names, ignored heads, errors, a real model."""

import functools
import json
import re

import jax
import numpy as np
import pytest
from encoder_tools import kind_of, torch_encoder
from safetensors.numpy import load_file, save_file
from tiny_models import random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf import export as gguf_export
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import read_config, read_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.families import config_from_hf, config_to_hf, family_from_gguf
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
WEIGHTS = "model.safetensors"


def rename(directory, change):
    """Renames the file's tensors by `change`."""
    tensors = load_file(directory / WEIGHTS)
    tensors = {change(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


# architecture -> (whether its file has a pooler, heads in it)
ARCHITECTURES = {
    "BertModel": (True, 0),
    "BertForPreTraining": (True, 7),
    "BertForMaskedLM": (False, 5),
    "RobertaModel": (True, 0),
    "RobertaForMaskedLM": (False, 5),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_files_are_read_written_and_read_again_to_the_bit(torch, tmp_path, capfd, architecture):
    import transformers

    pooler, heads = ARCHITECTURES[architecture]
    torch_encoder(torch, architecture).save_pretrained(tmp_path / "theirs")
    capfd.readouterr()
    config, params = read_pretrained(tmp_path / "theirs")
    said = capfd.readouterr().err.splitlines()
    assert config.pooler == pooler == ("pooler" in params)
    assert read_config(tmp_path / "theirs") == config
    assert len(said) == bool(heads)
    assert all(line.startswith(f"left out: {heads} tensors that the model") for line in said)

    save_pretrained(config, params, tmp_path / "ours")
    values = json.loads((tmp_path / "ours" / "config.json").read_text())
    kind = kind_of(architecture)
    assert values["architectures"] == [f"{kind}Model"] and "ffn_heterogeneity" not in values
    before = load_file(tmp_path / "theirs" / WEIGHTS)
    for name, tensor in load_file(tmp_path / "ours" / WEIGHTS).items():
        full_name = name if name in before else f"{kind.lower()}.{name}"
        assert tensor.tobytes() == before[full_name].tobytes(), name
    again_config, again = read_pretrained(tmp_path / "ours")
    assert again_config == config and not capfd.readouterr().err
    jax.tree.map(np.testing.assert_array_equal, again, params)

    theirs = getattr(transformers, f"{kind}Model").from_pretrained(tmp_path / "ours").eval()
    tokens = np.random.default_rng(0).integers(3, 97, (2, 9))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).last_hidden_state.numpy()
    ours = causal_lm.forward(config, params, {"tokens": tokens})["hidden"]
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)


def test_old_names_and_the_buffer_of_positions_are_read(torch, tmp_path):
    torch_encoder(torch, "BertForMaskedLM").save_pretrained(tmp_path)
    config, params = read_pretrained(tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    pattern = "|".join(old)
    rename(tmp_path, lambda name: re.sub(pattern, lambda match: old[match[0]], name))
    tensors = load_file(tmp_path / WEIGHTS) | {"bert.embeddings.position_ids": np.arange(20)}
    assert "bert.embeddings.LayerNorm.beta" in tensors
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    again_config, again = read_pretrained(tmp_path)
    assert again_config == config
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_what_a_file_may_not_hold(torch, tmp_path):
    """A classifier or one of two copies may not be missing, nor a pooler that the config has."""
    torch_encoder(torch, "BertForSequenceClassification").save_pretrained(tmp_path)
    assert read_pretrained(tmp_path)[0].head.settings["labels"] == ["LABEL_0", "LABEL_1"]
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("BertForSequenceClassification", "BertModel"))
    with pytest.raises(CheckpointError, match="no place for: 'classifier.(bias|weight)'"):
        read_pretrained(tmp_path)
    rename(tmp_path, lambda name: name.replace("classifier.weight", "pooler.dense.weight"))
    refused("are the same tensor of the model", read_pretrained, tmp_path, error=CheckpointError)
    config = tiny_of("bert", layers=2)
    save_pretrained(config, random_params(config), tmp_path, overwrite=True)
    rename(tmp_path, lambda name: name.replace("pooler.dense.weight", "cls.weight"))
    with pytest.raises(CheckpointError, match=r"missing tensors: 'pooler\.dense\.weight'"):
        read_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_configs_that_are_refused(family):
    for changes, words in (
        ({"position_embedding_type": "relative_key"}, "'relative_key': only absolute is supported"),
        ({"is_decoder": True}, "is_decoder=true: "),
        ({"add_cross_attention": True}, "add_cross_attention=true: "),
    ):
        refused(words, config_from_hf, config_to_hf(tiny_of(family)) | changes, error=ConfigError)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_there_is_no_gguf_without_a_rotary_embedding(tmp_path, name):
    config = tiny_of(name, layers=2)
    with pytest.raises(CheckpointError, match=f"cannot express this {name} model: .* no rotary"):
        gguf_export.save_gguf(config, random_params(config), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=f"GGUF architecture '{name}' is not known: llama, "):
        family_from_gguf(name)


def test_minilm_agrees_on_real_sentences(torch, minilm_dir, shared_data):
    import transformers

    model = load_model(minilm_dir)
    lines = (shared_data / "glue_mrpc" / "test.jsonl").read_text().splitlines()[:32]
    pairs = [(json.loads(line)["#1 String"], json.loads(line)["#2 String"]) for line in lines]
    texts = [pair if i % 2 else pair[0] for i, pair in enumerate(pairs)]
    given = model.tokenizer(texts, padding=True, return_token_type_ids=True)
    tokens, real, types = (
        np.asarray(given[name]) for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    theirs = transformers.BertModel.from_pretrained(minilm_dir).eval()
    with torch.no_grad():
        expected = theirs(**{name: torch.tensor(np.asarray(x)) for name, x in given.items()})
    batch = {"tokens": tokens, "segment_ids": real, "token_types": types}
    ours = jax.jit(functools.partial(causal_lm.forward, model.config))(model.params, batch)
    real = real > 0
    assert types.mean() > 0 and real.mean() < 1
    np.testing.assert_allclose(
        ours["hidden"][real], expected.last_hidden_state[real], atol=1e-4, rtol=0
    )
    np.testing.assert_allclose(ours["pooled"], expected.pooler_output, atol=1e-4, rtol=0)


def test_minilm_loses_a_quarter_of_its_neurons(minilm_dir, tmp_path):
    model = load_model(minilm_dir)
    plan = RemovalPlan("entropy", ratio=0.25)
    config, params, removed, _ = reduce_model(model.config, model.params, plan)
    assert config.ffn_widths == (1152,) * 6 and all(len(gone) == 384 for gone in removed.values())
    save_pretrained(config, params, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 1152
    assert set(flatten(read_pretrained(tmp_path)[1])) == set(flatten(model.params))
