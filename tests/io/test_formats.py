"""SmolLM2 without 25% of its upper half's neurons, in every format that we write."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_models import config_of, our_logits, torch_model

from ffn_heterogeneity.io.gguf.export import save_gguf
from ffn_heterogeneity.io.hf.export import NATIVE_KEY, save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.generate import Generator, Sampling

pytestmark = pytest.mark.slow
PROMPT = "The neurons of a feed-forward layer"
UPPER = [1536] * 15 + [1152] * 15


@pytest.fixture(scope="module")
def pruned(smollm2_gguf, tmp_path_factory):
    directory = tmp_path_factory.mktemp("forms")
    compress.run(config_of("prune", model=str(smollm2_gguf), layers="top"), directory / "run")
    return load_model(directory / "run" / "model")


def size(path) -> int:
    files = [path] if path.is_file() else path.iterdir()
    return sum(f.stat().st_size for f in files)


def ids_of(model) -> list[int]:
    return model.tokenizer.encode(PROMPT, add_special_tokens=False)


@pytest.fixture(scope="module")
def forms(pruned, tmp_path_factory):
    """{form: its path}."""
    root = tmp_path_factory.mktemp("written")
    options = {"tokenizer": pruned.tokenizer}
    paths = {
        form: save_pretrained(pruned.config, pruned.params, root / form, export=form, **options)
        for form in ("native", "padded")
    }
    paths["per_layer_config"] = save_pretrained(
        pruned.config, pruned.params, root / "plain", **options
    )
    for kind in ("f32", "f16", "q8_0"):
        path = root / f"{kind}.gguf"
        paths[kind] = save_gguf(pruned.config, pruned.params, path, type=kind, **options)
    print()
    for form, path in paths.items():
        print(f"{form:17s} {size(Path(path)):>12,} bytes")
    return paths


@pytest.mark.parametrize("form", ["native", "per_layer_config", "padded", "f32"])
def test_read_back_equal(pruned, forms, form):
    assert list(pruned.config.ffn_widths) == UPPER
    if form == "per_layer_config":
        values = json.loads((forms[form] / "config.json").read_text())
        assert "config" not in values.get(NATIVE_KEY, {}), "nothing but what transformers writes"
        assert values["per_layer_config"]["29"] == {"intermediate_size": 1152}
    read = load_model(forms[form])
    assert list(read.config.ffn_widths) == ([1536] * 30 if form == "padded" else UPPER)
    tokens = np.array([ids_of(pruned)])
    expected = our_logits(pruned.config, pruned.params, tokens)
    difference = np.abs(our_logits(read.config, read.params, tokens) - expected).max()
    assert difference <= 1e-6 * np.abs(expected).max()


def test_padded_in_transformers(torch, pruned, forms):
    """Float64: rounding of the two programs cannot hide an effect of padding."""
    tokens = np.array([ids_of(pruned)])
    with torch.no_grad():
        theirs = torch_model(torch, forms["padded"]).double()(torch.tensor(tokens)).logits.numpy()
    with jax.enable_x64(True):
        ours = our_logits(pruned.config, pruned.params, tokens, np.float64)
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_llama_cpp_goes_on_with_the_same_tokens(llama_cpp, pruned, forms, kind):
    ids = ids_of(pruned)
    generator = Generator(pruned.config, pruned.params, pruned.tokenizer, batch_size=1)
    (ours,) = generator([ids], Sampling(32), progress=None)
    theirs = llama_cpp.Llama(str(forms[kind]), n_ctx=256, verbose=False)
    assert theirs.tokenize(PROMPT.encode(), add_bos=False) == ids
    tokens = []
    for token in theirs.generate(ids, temp=0.0):
        tokens.append(token)
        if len(tokens) == 32:
            break
    assert tokens == list(ours.tokens)
