"""`scripts/compress.py` end to end: removed neurons, written files, transformers' results."""

import json

import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    config_of,
    our_logits,
    random_params,
    run_script,
    save_tiny,
    tiny_of,
    torch_logits,
    torch_model,
)

from ffn_heterogeneity.io import load
from ffn_heterogeneity.io.hf import export
from ffn_heterogeneity.launch import compress
from ffn_heterogeneity.models.stack import restack, unstack

pytestmark = pytest.mark.usefixtures("compiled_quickly")
TOKENS = np.random.default_rng(3).integers(2, 258, (2, 20))


def entropies(config=LLAMA) -> list[np.ndarray]:
    """H of every row of W, layer by layer, float64."""
    result = []
    for layer in unstack(random_params(config))["layers"]:
        r = np.abs(layer["ffn"]["down"]["kernel"].astype(np.float64))
        r /= r.sum(axis=1, keepdims=True)
        result.append(-(r * np.log(r)).sum(axis=1))
    return result


def masked_logits(config, removed, tokens) -> np.ndarray:
    """The full model with the removed neurons' rows of W set to 0, in float32."""
    tree = unstack(random_params(config))
    for layer, indices in zip(tree["layers"], removed, strict=True):
        layer["ffn"]["down"]["kernel"][indices] = 0
    return our_logits(config, restack(config, tree), tokens)


def parameters(widths, config=LLAMA) -> int:
    """Counted by hand: Llama, tied, no biases."""
    d, head = config.d_model, config.head_dim
    attention = 2 * d * config.n_heads * head + 2 * d * config.n_kv_heads * head
    layers = sum(attention + 2 * d + 3 * d * width for width in widths)
    return config.vocab_size * d + d + layers


def test_a_quarter_by_entropy(torch, model, tmp_path):
    config = config_of("prune", model=str(model))
    assert (config.criterion, config.ratio, config.layers) == ("entropy", 0.25, "all")
    results = compress.run(config, tmp_path)
    expected = [sorted(np.argsort(-h)[:6].tolist()) for h in entropies()]
    assert results["removed"] == expected
    assert (results["ffn_widths_before"], results["ffn_widths_after"]) == ([24] * 4, [18] * 4)
    assert results["parameters_before"] == parameters([24] * 4)
    assert results["parameters_after"] == parameters([18] * 4)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    written = json.loads((tmp_path / "model" / "removed_neurons.json").read_text())
    assert written["removed"] == expected

    theirs = torch_model(torch, tmp_path / "model")
    assert theirs.config.intermediate_size == 18
    assert sum(p.numel() for p in theirs.parameters()) == results["parameters_after"]
    smaller = load.load_model(str(tmp_path / "model"))
    assert smaller.tokenizer.encode("text") == load.load_model(str(model)).tokenizer.encode("text")
    ours = our_logits(smaller.config, smaller.params, TOKENS)
    np.testing.assert_allclose(ours, torch_logits(torch, theirs, TOKENS), atol=1e-4, rtol=0)
    masked = masked_logits(LLAMA, expected, TOKENS)
    assert np.abs(ours - masked).max() <= 5e-6 * np.abs(masked).max()
    full = our_logits(LLAMA, random_params(LLAMA), TOKENS)
    assert np.abs(ours - full).max() > 0.2, "removal changed nothing: the test cannot fail"


@pytest.mark.parametrize("export", ["auto", "padded", "native"])
def test_exports_of_unequal_widths(torch, model, tmp_path, export):
    config = config_of("prune", model=str(model), layers="1,3", ratio=0.5, export=export)
    results = compress.run(config, tmp_path)
    widths = [24, 12, 24, 12]
    assert results["ffn_widths_after"] == widths
    assert [len(indices) for indices in results["removed"]] == [0, 12, 0, 12]
    assert results["parameters_after"] == parameters(widths)
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    native = values.get("ffn_heterogeneity", {})
    masked = masked_logits(LLAMA, results["removed"], TOKENS)
    smaller = load.load_model(str(tmp_path / "model"))
    ours = our_logits(smaller.config, smaller.params, TOKENS)
    assert np.abs(ours - masked).max() <= 5e-6 * np.abs(masked).max()
    if export == "padded":
        assert "ffn_widths" not in native and values["intermediate_size"] == 24
        theirs = torch_logits(torch, torch_model(torch, tmp_path / "model"), TOKENS)
        np.testing.assert_allclose(theirs, masked, atol=1e-4, rtol=0)
    else:
        layers = values["per_layer_config"]
        assert [layers[str(i)]["intermediate_size"] for i in range(4)] == widths
        assert native.get("ffn_widths") == (widths if export == "native" else None)
        assert smaller.config.ffn_widths == tuple(widths)


def test_a_global_budget(model, tmp_path):
    config = config_of("prune", model=str(model), budget="global", ratio=0.25, layers="0-2")
    results = compress.run(config, tmp_path)
    scores = entropies()[:3]
    everywhere = sorted(((-h, layer, i) for layer, s in enumerate(scores) for i, h in enumerate(s)))
    expected = [[], [], [], []]
    for _, layer, i in everywhere[:18]:
        expected[layer].append(i)
    assert results["removed"] == [sorted(indices) for indices in expected]
    assert len({len(indices) for indices in results["removed"][:3]}) > 1, "budgets must differ"


def test_count_reverse_and_random(model, tmp_path):
    changes = {"count": 3, "reverse": True, "ratio": 0.9}
    results = compress.run(config_of("prune", model=str(model), **changes), tmp_path / "a")
    expected = [sorted(np.argsort(h)[:3].tolist()) for h in entropies()]
    assert results["removed"] == expected
    assert results["ratio"] is None and results["count"] == 3
    seeds = [
        compress.run(
            config_of("prune", model=str(model), criterion="random", seed=seed), tmp_path / name
        )["removed"]
        for name, seed in (("b", 0), ("c", 0), ("d", 1))
    ]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt2"])
def test_other_families(torch, tmp_path, family):
    config = tiny_of(family)
    directory = save_tiny(tmp_path / "model", config)
    prune = config_of("prune", model=str(directory), criterion="magnitude")
    results = compress.run(prune, tmp_path / "run")
    for layer, indices in zip(
        unstack(random_params(config))["layers"], results["removed"], strict=True
    ):
        norms = (layer["ffn"]["down"]["kernel"].astype(np.float64) ** 2).sum(axis=1)
        assert indices == sorted(np.argsort(norms)[:3].tolist())
    tokens = TOKENS % 29
    masked = masked_logits(config, results["removed"], tokens)
    theirs = torch_model(torch, tmp_path / "run" / "model")
    np.testing.assert_allclose(torch_logits(torch, theirs, tokens), masked, atol=1e-4, rtol=0)


def test_written_in_another_dtype(model, tmp_path):
    compress.run(config_of("prune", model=str(model), dtype="bfloat16"), tmp_path)
    params = load.load_model(str(tmp_path / "model")).params
    assert params["embed"]["embedding"].dtype == np.dtype("bfloat16")


def test_nothing_removed_is_the_same_model(model, tmp_path):
    results = compress.run(config_of("prune", model=str(model), ratio=0.0), tmp_path)
    assert results["removed"] == [[], [], [], []]
    assert results["parameters_before"] == results["parameters_after"]
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (model / name).read_bytes()


NOWHERE, SIMILAR = "--config.model=nowhere.gguf", ["--config.criterion=similarity"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.ratio=1"], ["ratio=1.0 must be a number in [0, 1)"]),
        (["--config.count=24"], ["count=24", "24 neurons"]),
        (["--config.layers=2,9"], ["layer 9 is out of range", "0 to 3"]),
        (["--config.criterion=entropie"], ["'entropie'", "entropy"]),
        # Before the model is looked for:
        ([NOWHERE, "--config.budget=all"], ["budget='all'", "global"]),
        ([NOWHERE, "--config.compensation=lstsq"], ["compensation='lstsq'", "least_squares"]),
        ([NOWHERE, *SIMILAR, "--config.budget=global"], ["budget='global'", "budget='layer'"]),
        (["--config.export=onnx"], ["export='onnx'", "padded"]),
        (["--config.dtype=int8"], ["dtype='int8'", "bfloat16"]),
        (["--config.revision=main"], ["revision='main'"]),
    ],
)
def test_bad_settings_are_one_clear_line(model, tmp_path, flags, words):
    workdir = tmp_path / "run"
    error = run_script("compress", f"--config.model={model}", *flags, f"--workdir={workdir}").error
    assert all(word in error for word in words), error
    assert not workdir.exists()


def test_an_interrupted_write_leaves_nothing(model, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(export, "save_tokenizer", broken)
    flags = [f"--config.model={model}", f"--workdir={tmp_path / 'run'}"]
    assert "disk full" in run_script("compress", *flags).error
    assert not (tmp_path / "run").exists(), list((tmp_path / "run").rglob("*"))
