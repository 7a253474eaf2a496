"""SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder-0.5B against torch and float64 oracles."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from tiny_models import config_of, mask_neurons, our_logits, torch_logits, torch_model, torch_nll

from ffn_heterogeneity.evaluate import run as evaluate
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.io.fetch import SOURCES, models_directory
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.models.generate import Generator
from ffn_heterogeneity.models.sampling import Sampling
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan

WINDOW, WINDOWS = 512, 40


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load_model(smollm2_gguf)


@pytest.fixture(scope="module")
def wikitext(shared_data):
    return shared_data / "wikitext2" / "test.raw.txt"


@pytest.fixture(scope="module")
def tokens(smollm2, wikitext):
    """bos and 63 tokens of real text."""
    ids = smollm2.tokenizer.encode(wikitext.read_text()[:2000], add_special_tokens=False)
    return np.array([[smollm2.tokenizer.bos_token_id, *ids[:63]]])


def highest_entropy(kernel_md, count) -> list[int]:
    """The `count` rows of highest H(r), float64, from the formula; ties by index."""
    w = np.abs(kernel_md.astype(np.float64))
    r = w / w.sum(axis=1, keepdims=True)
    logs = np.log(r, where=r > 0, out=np.zeros_like(r))
    entropy = -(r * logs).sum(axis=1)
    assert np.unique(entropy).size == entropy.size, "the oracle has no ties to break"
    return sorted(np.argsort(-entropy)[:count].tolist())


@pytest.fixture(scope="module")
def reduced(smollm2):
    return reduce_model(smollm2.config, smollm2.params, RemovalPlan("entropy", ratio=0.25))


def test_entropy_choice_equals_the_oracle_in_every_layer(smollm2, reduced):
    removed = reduced[2]
    layers = unstack(smollm2.params)["layers"]
    assert sorted(removed) == list(range(30))
    for index, layer in enumerate(layers):
        kernel = layer["ffn"]["down"]["kernel"]
        assert kernel.shape == (1536, 576)
        assert removed[index].tolist() == highest_entropy(kernel, 384), f"layer {index}"


def test_removal_equals_masking(smollm2, reduced, tokens):
    """Removed neurons, or their rows of W set to 0."""
    config, smaller, removed, _ = reduced
    pruned = our_logits(config, restack(config, smaller), tokens)
    tree = restack(smollm2.config, mask_neurons(smollm2.params, removed))
    masked = our_logits(smollm2.config, tree, tokens)
    difference, bound = np.abs(pruned - masked).max(), 5e-6 * np.abs(masked).max()
    print(f"\nremoval against masking: {difference:.2e}, bound {bound:.2e}")
    assert difference <= bound
    full = our_logits(smollm2.config, smollm2.params, tokens)
    assert np.abs(pruned - full).max() > 1, "removal changed nothing: the test cannot fail"


def test_analysis_equals_the_oracle(smollm2, smollm2_gguf, tmp_path):
    results = evaluation.run(config_of("analyze", model=str(smollm2_gguf)), tmp_path)
    for layer, measured in zip(unstack(smollm2.params)["layers"], results["layers"], strict=True):
        w = np.abs(layer["ffn"]["down"]["kernel"].astype(np.float64))
        r = w / w.sum(axis=1, keepdims=True)
        logs = np.log(r, where=r > 0, out=np.zeros_like(r))
        oracle = {
            "entropy": -(r * logs).sum(),
            "gini": (1 - (r * r).sum(axis=1)).sum(),
            "mstd": -np.sqrt(((r - 1 / 576) ** 2).mean(axis=1)).sum(),
        }
        for name, value in oracle.items():
            assert math.isclose(measured[name], value, rel_tol=1e-12), name
    assert len(results["layers"]) == 30 and (tmp_path / "connectivity.png").stat().st_size > 5000


def test_a_pruned_model_loads_in_transformers_and_agrees(
    torch, smollm2, smollm2_gguf, reduced, tokens, tmp_path
):
    results = compress.run(config_of("prune", model=str(smollm2_gguf)), tmp_path)
    assert results["removed"] == [reduced[2][i].tolist() for i in range(30)]
    assert results["parameters_before"] == 134_515_008
    assert results["parameters_before"] - results["parameters_after"] == 30 * 3 * 576 * 384
    theirs = torch_model(torch, tmp_path / "model")
    assert sum(p.numel() for p in theirs.parameters()) == results["parameters_after"]
    smaller = load_model(tmp_path / "model")
    ours = our_logits(smaller.config, smaller.params, tokens)
    reference = torch_logits(torch, theirs, tokens)
    difference, bound = np.abs(ours - reference).max(), 5e-5 * np.abs(reference).max() + 1e-3
    print(f"\npruned, ours against transformers: {difference:.2e}, bound {bound:.2e}")
    assert difference <= bound
    np.testing.assert_array_equal(ours.argmax(-1), reference.argmax(-1))
    ids = smaller.tokenizer.encode("The same tokenizer, 1234!")
    assert ids == smollm2.tokenizer.encode("The same tokenizer, 1234!")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_the_model_rewritten_as_another_family(torch, smollm2, tokens, tmp_path, family):
    """The family has Llama's block: the same bits here, the same logits with its code in torch."""
    config = dataclasses.replace(smollm2.config, family=family)
    save_pretrained(config, smollm2.params, tmp_path, tokenizer=smollm2.tokenizer)
    read = load_model(tmp_path)
    assert read.config == config
    ours = our_logits(smollm2.config, smollm2.params, tokens)
    np.testing.assert_array_equal(our_logits(read.config, read.params, tokens), ours)
    theirs = torch_model(torch, tmp_path)
    assert type(theirs).__name__.lower() == f"{family}forcausallm"
    reference = torch_logits(torch, theirs, tokens)
    assert np.abs(ours - reference).max() <= 1e-4 * np.abs(reference).max()


def perplexity_against_torch(torch, gguf, wikitext, directory):
    """Ours by the script's function on the .gguf; torch's on windows cut here."""
    settings = {"window": WINDOW, "max_windows": WINDOWS, "bos": "segment"}
    config = config_of("perplexity", model=str(gguf), text=str(wikitext), **settings)
    results = evaluate.run(config, directory / "run")
    assert json.loads((directory / "run" / "results.json").read_text()) == results
    model = load_model(gguf)
    ids = model.tokenizer.encode(wikitext.read_text(), add_special_tokens=False)
    rows = np.reshape(ids[: WINDOWS * WINDOW], (WINDOWS, WINDOW))
    rows = np.insert(rows, 0, model.tokenizer.bos_token_id, axis=1)
    save_pretrained(model.config, model.params, directory / "model", tokenizer=model.tokenizer)
    total, count = torch_nll(torch, torch_model(torch, directory / "model"), rows)
    theirs = math.exp(total / count)
    print(f"\n{gguf.name}: {results['perplexity']:.6f}, torch {theirs:.6f}, {count} tokens")
    assert results["tokens"] == count == WINDOW * WINDOWS
    assert abs(results["perplexity"] / theirs - 1) < 1e-3
    assert results["perplexity"] < 100


@pytest.mark.slow
def test_perplexity_of_smollm2(torch, smollm2_gguf, wikitext, tmp_path):
    perplexity_against_torch(torch, smollm2_gguf, wikitext, tmp_path)


@pytest.mark.slow
def test_perplexity_of_gemma3(torch, gemma3_gguf, wikitext, tmp_path):
    perplexity_against_torch(torch, gemma3_gguf, wikitext, tmp_path)


QWEN = models_directory() / SOURCES["qwen2.5-coder"].target
# Computed in PyTorch, float32, through transformers' GGUF reader.
QWEN_NLL = 4.3953
QWEN_GREEDY = """262 421 308 2651 220 15 510 286 470 220 15 198 262 4409 308 621 220 16 510 286 470
    220 16 198 262 770 510 286 264 11 293 284"""


@pytest.mark.slow
@pytest.mark.skipif(not QWEN.exists(), reason=f"{QWEN} is missing (fetch_models.py)")
def test_qwen_agrees_with_transformers_gguf_reader(wikitext, tmp_path):
    from transformers import AutoTokenizer

    model, (published, _) = load_model(QWEN), preset("qwen2_5_coder_0_5b_instruct")
    assert model.config == dataclasses.replace(published, tied=False, pad_id=151_643)
    theirs = AutoTokenizer.from_pretrained(QWEN.parent, gguf_file=QWEN.name)
    prompt = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'
    chat = [{"role": "user", "content": f"{prompt}\t\r 12<|fim_pad|>\u0301"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    chats = [x.apply_chat_template(chat, **options) for x in (model.tokenizer, theirs)]
    assert chats[0] == chats[1]
    for text in (chats[0], Path(__file__).read_text(), wikitext.read_text()):
        assert model.tokenizer.encode(text) == theirs.encode(text), text[:80]
    sampling = Sampling(max_new_tokens=32, temperature=0.0)
    (answer,) = Generator(model.config, model.params)([model.tokenizer.encode(prompt)], sampling)
    assert answer.tokens == [int(i) for i in QWEN_GREEDY.split()]
    settings = {"text": str(wikitext), "window": WINDOW, "max_windows": WINDOWS, "bos": "segment"}
    config = config_of("perplexity", model=str(QWEN), **settings)
    results = evaluate.run(config, tmp_path, load=lambda *_, **__: model)
    print(f"\n{QWEN.name}: NLL {results['nll']:.6f}, reference {QWEN_NLL}")
    assert abs(results["perplexity"] / math.exp(QWEN_NLL) - 1) < 1e-3
