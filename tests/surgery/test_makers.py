"""Experts from dense models: `partition` with every router, and `upcycle`."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from tiny_models import (
    LLAMA,
    TEXT,
    byte_tokenizer,
    random_params,
    run_script,
    save_tiny,
    tiny_of,
    torch_logits,
    torch_model,
)
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.surgery import SURGERIES, moefication, seen
from ffn_heterogeneity.surgery.calibration import calibration_rows, write_rows
from ffn_heterogeneity.surgery.kmeans import balanced
from ffn_heterogeneity.tree import flatten

TOKENS = np.random.default_rng(1).integers(2, 29, (3, 9)).astype(np.int32)
pytestmark = pytest.mark.usefixtures("compiled_quickly")
KINDS = pytest.mark.parametrize("family", ["llama", "gpt_neox"])
CASES = [("llama", 0), ("llama", 1), ("gpt_neox", 0), ("gpt2", 1), ("bert", 0), ("bert", 1)]


@pytest.fixture
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rows(tmp_path):
    """Calibration rows in a file: ids of every tiny family."""
    draw = np.random.default_rng(4)
    path = tmp_path / "rows.jsonl"
    write_rows(path, [np.insert(draw.integers(2, 29, 19), 0, 0) for _ in range(30)])
    return str(path)


def model_of(family="llama", dtype=np.float64, **changes):
    config = dataclasses.replace(tiny_of(family, 3), **changes)
    return Model(config, random_params(config, dtype=dtype), None, "tiny")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _hidden(config, dtype, params, tokens):
    options = causal_lm.RunOptions(compute_dtype=dtype)
    return causal_lm.forward(config, params, {"tokens": tokens}, options=options)["hidden"]


def hidden(model, dtype=np.float64, tokens=TOKENS):
    return np.asarray(_hidden(model.config, dtype, model.params, tokens))


def same(one, other, atol=1e-12):
    np.testing.assert_allclose(hidden(one), hidden(other), atol=atol, rtol=0)


def ffns(model):
    return [jax.tree.map(np.asarray, layer["ffn"]) for layer in unstack(model.params)["layers"]]


def columns(ffn):
    """gate's columns, or up's, as rows: of experts [E, m / E, d]."""
    return np.swapaxes(ffn.get("gate", ffn["up"])["kernel"], -1, -2)


# ---- the dense model


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("family, shared", CASES)
def test_all_experts_are_the_dense_model(family, shared, rows, tmp_path):
    dense = model_of(family)
    model, report = fh.partition(dense, 4, shared=shared, calibration=rows if shared else "")
    same(model, dense)
    layer = model.config.layers[0]
    assert (layer.experts, layer.top_k, layer.shared) == (4, 4 - shared, shared)
    assert report["ffn_widths_after"] == [3] * 3 and report["top_k"] == 4 - shared
    fh.save_model(model, tmp_path / "model")
    read = load_model(tmp_path / "model")
    assert read.config == model.config
    one, other = flatten(read.params), flatten(model.params)
    assert all(np.array_equal(one[path], leaf) for path, leaf in other.items())
    for before, after in zip(ffns(dense), ffns(model), strict=True):
        points = columns(after).reshape(12, -1)
        # Every neuron is in one expert, with its own bias and row of down.
        order = np.array([np.flatnonzero((columns(before) == point).all(1)) for point in points])
        assert sorted(order.ravel()) == list(range(12))
        factor = np.where(np.arange(4) < shared, 1, 4 - shared)[:, None, None]
        down = (after["down"]["kernel"] / factor).reshape(12, -1)
        np.testing.assert_allclose(down, before["down"]["kernel"][order.ravel()], rtol=1e-15)
        if "bias" in before["up"]:
            np.testing.assert_array_equal(
                after["up"]["bias"].ravel(), before["up"]["bias"][order.ravel()]
            )


@pytest.mark.usefixtures("wide")
@KINDS
@pytest.mark.parametrize("top_k", [1, 2])
def test_copies_are_the_dense_model(family, top_k):
    dense = model_of(family)
    for noise in (0.0, 1.0):
        model, report = fh.upcycle(dense, 3, top_k, noise=noise, layers="1-2")
        same(model, dense)
        assert [layer.experts for layer in model.config.layers] == [None, 3, 3]
        routers = [ffn["router"]["kernel"] for ffn in ffns(model)[1:]]
        assert report["noise"] == noise and [np.any(x) for x in routers] == [noise > 0] * 2
    assert not np.array_equal(*routers) and 0.6 < np.std(routers) < 1.4


def test_balanced_clusters():
    """m / c points in each, no swap of two points helps, and separate clusters are found."""
    draw = np.random.default_rng(0)
    points = draw.normal(size=(60, 4)) + 9 * np.eye(4)[np.arange(60) % 3]
    assert {tuple(np.unique(balanced(points, 3)[0][i::3])) for i in range(3)} == {(0,), (1,), (2,)}
    points = draw.normal(size=(24, 5))
    labels, share = balanced(points, 6)
    assert np.array_equal(np.bincount(labels), [4] * 6)
    centroids = np.stack([points[labels == one].mean(0) for one in range(6)])
    costs = ((points[:, None] - centroids) ** 2).sum(-1)
    own = costs[np.arange(24), labels]
    assert share == pytest.approx(own.sum() / (points**2).sum())
    swapped = costs[:, labels]
    assert (swapped + swapped.T >= own[:, None] + own[None] - 1e-9).all()


def test_neurons_of_one_direction_are_one_expert():
    """Lengths do not matter: columns of four directions, scaled."""
    model = model_of(dtype=np.float32)
    draw, kinds = np.random.default_rng(2), np.arange(12) % 4
    for slot in model.params["stack"].values():
        for layer in slot.values():
            kernel = np.array(layer["ffn"]["gate"]["kernel"])
            layer["ffn"]["gate"]["kernel"] = kernel[..., kinds] * draw.uniform(0.1, 9, 12)
    for ffn in ffns(fh.partition(model, 4)[0]):
        units = columns(ffn) / np.linalg.norm(columns(ffn), axis=-1, keepdims=True)
        np.testing.assert_allclose(units, units[:, :1].repeat(3, 1), atol=1e-6)


# ---- routers


@pytest.mark.usefixtures("wide")
@KINDS
def test_means_and_fewer_experts(family):
    dense = model_of(family)
    model, _ = fh.partition(dense, 4, 2, "means")
    for ffn in ffns(model):
        means = columns(ffn).mean(1).T
        np.testing.assert_allclose(ffn["router"]["kernel"], means, atol=1e-15)
    assert np.isfinite(hidden(model)).all()
    assert np.abs(hidden(model) - hidden(dense)).max() > 1e-3
    few = fh.partition(dense, 4, 2)[0]
    assert np.abs(hidden(few) - hidden(dense)).max() > 1e-3


def test_shared_experts_have_the_highest_activation_rates(rows):
    model = model_of("gpt_neox", np.float32)
    new, _ = fh.partition(model, 4, shared=2, calibration=rows)
    given = calibration_rows(model, rows)
    rates = seen.activation_rates(model.config, model.params, given)
    for rate, before, after in zip(rates, ffns(model), ffns(new), strict=True):
        assert rate.sum() == pytest.approx(10)  # active neurons per token
        first = np.sort(np.argsort(-rate, kind="stable")[:6])
        wanted = columns(before)[first].reshape(2, 3, -1)
        np.testing.assert_array_equal(columns(after)[:2], wanted)
        assert np.any(after["down"]["bias"][0]) and not np.any(after["down"]["bias"][1:])


def moefied(torch, ffn, top_k):
    """Moefication's block in PyTorch, written on all neurons at once: others are zeroed."""
    leaf = {path: torch.tensor(np.asarray(x)) for path, x in flatten(ffn).items()}
    experts = len(leaf["up/kernel"])

    def block(x):
        unit = x / x.norm(dim=-1, keepdim=True)
        scores = torch.tanh(unit @ leaf["router/hidden/kernel"]) @ leaf["router/kernel"]
        mask = torch.zeros_like(scores).scatter(-1, scores.topk(top_k)[1], 1.0)
        up = leaf["up/kernel"].permute(1, 0, 2).flatten(1)
        h = torch.nn.functional.gelu(x @ up + leaf["up/bias"].flatten())
        h = h * mask.repeat_interleave(up.shape[1] // experts, dim=-1)
        return h @ leaf["down/kernel"].flatten(0, 1) + leaf["down/bias"][0] * top_k

    return block


def agrees_with_torch(torch, theirs, model, tokens):
    """The last hidden states of transformers' encoder with its blocks replaced."""
    for layer, ffn in zip(theirs.encoder.layer, ffns(model), strict=True):
        block = moefied(torch, ffn, model.config.layers[0].top_k)
        layer.intermediate.forward = lambda x: x
        layer.output.dense.forward = block
        layer.output.dropout.p = 0.0
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens).long()).last_hidden_state.numpy()
    ours = hidden(model, np.float32, tokens)
    np.testing.assert_allclose(ours, wanted, atol=1e-5 * np.abs(wanted).max(), rtol=0)


def test_moefication_of_a_tiny_bert(torch, tmp_path, rows):
    import transformers

    dense = model_of("bert", np.float32)
    fh.save_model(dense, tmp_path / "bert")
    theirs = transformers.BertModel.from_pretrained(tmp_path / "bert").eval()
    model, report = fh.partition(dense, 4, 1, "trained", calibration=rows)
    layer = model.config.layers[0]
    assert (layer.router, layer.gates, layer.top_k, layer.ffn_width) == ("mlp", "none", 1, 3)
    agrees_with_torch(torch, theirs, model, TOKENS)
    fh.save_model(model, tmp_path / "model")
    np.testing.assert_array_equal(hidden(load_model(tmp_path / "model")), hidden(model))
    for i in range(3):
        assert report["router_loss"][i] < report["router_loss_start"][i]
        assert report["captured"][i] <= report["captured_most"][i] <= 1
    whole, _ = fh.partition(dense, 4, router="trained", calibration=rows)
    same(whole, dense, 1e-5)


def loss_of(model):
    def loss(params):
        states = causal_lm.forward(model.config, params, {"tokens": TOKENS})["hidden"]
        return ((states - 1) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss))


def test_a_moefied_model_trains(rows):
    model, _ = fh.partition(model_of("bert", np.float32), 4, 1, "trained", calibration=rows)
    losses, params, step = [], model.params, loss_of(model)
    for _ in range(8):
        value, gradient = step(params)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
        params = jax.tree.map(lambda x, g: x - 0.05 * g, params, gradient)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]
    up = flatten(gradient)["stack/segment_0/slot_0/ffn/up/kernel"]
    assert np.sum(np.any(up, axis=(0, 2, 3))) >= 2  # experts that got tokens


def test_the_router_learns_on_held_out_tokens():
    """Sums that the inputs determine: better than always the same expert, and than the start."""
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(3000, 8)).astype(np.float32), draw.normal(size=(8, 4, 6))
    sums = np.maximum(np.einsum("nd,dem->nem", x, w), 0).sum(-1).astype(np.float32)
    centroids = draw.normal(size=(4, 8)).astype(np.float32)
    router, facts = moefication.train_router(x, sums, centroids, top_k=1)
    held, total = slice(2850, None), sums[2850:].sum(1)  # the 150 before it choose the epoch
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    scores = np.tanh(unit @ router["hidden"]["kernel"]) @ router["kernel"]
    chosen = np.argmax(scores[held], 1)
    captured = np.mean(sums[held][np.arange(150), chosen] / total)
    assert facts["captured"] == pytest.approx(captured, rel=1e-5)
    assert facts["captured_most"] == pytest.approx(np.mean(sums[held].max(1) / total), rel=1e-5)
    always = np.mean(sums[held] / total[:, None], 0).max()
    assert captured > max(always, facts["captured_start"]) + 0.05
    assert facts["router_loss"] < facts["router_loss_start"]
    target = sums[held] / sums[held].max()
    z = scores[held]
    loss = np.mean(np.logaddexp(0, z) - target * z)
    assert facts["router_loss"] == pytest.approx(loss, rel=1e-4)


def test_an_experts_sum_is_that_of_its_neurons(rows):
    """routed_sums against |h| of the partitioned leaves, computed here."""
    model = model_of(dtype=np.float32)
    given = calibration_rows(model, rows)
    inputs, sums = moefication.routed_sums(model.config, model.params, given, 4)
    assert inputs.shape == (3, 30 * 19, 8) and sums.shape == (3, 30 * 19, 4)
    for x, total, ffn in zip(inputs, sums, ffns(model), strict=True):
        a = x @ ffn["gate"]["kernel"]
        h = np.abs(a / (1 + np.exp(-a)) * (x @ ffn["up"]["kernel"]))
        np.testing.assert_allclose(total, h.reshape(-1, 4, 3).sum(-1), rtol=2e-4)


# ---- files, shapes, errors


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_transformers_loads_the_experts(torch, tmp_path, family):
    dense = model_of(family, np.float32)
    model, report = fh.partition(dense, 3)  # 4 neurons: torch needs rows of 16 bytes
    fh.save_model(model, tmp_path / "model")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    assert values["model_type"] == report["family"] == model.config.family
    assert "ffn_heterogeneity" not in values
    assert model.config.family == ("qwen3_moe" if family == "qwen3" else "mixtral")
    theirs = torch_logits(torch, torch_model(torch, tmp_path / "model"), TOKENS)
    np.testing.assert_allclose(theirs, model(TOKENS), atol=1e-4, rtol=0)
    some = fh.partition(dense, 3, layers="0")[0].config.family
    assert some == (family if family != "qwen3" else "qwen3_moe")
    biased = model_of(family, np.float32, ffn_bias=True)
    assert fh.partition(biased, 3)[0].config.family == family


@pytest.mark.parametrize("router", ["zeros", "trained"])
def test_the_command(tmp_path, router):
    model, text = save_tiny(tmp_path / "tiny", LLAMA), tmp_path / "text.txt"
    text.write_text(TEXT * 4)
    command = ("--config=configs/experts.py:partition", f"--workdir={tmp_path / 'run'}")
    keys = {"experts": 4, "calibration": text, "router": router, "model": model}
    done = run_script("compress", *command, **keys)
    assert done.code == 0, done.err
    assert "partition: 4 experts, 4 per token" in done.out
    same(load_model(tmp_path / "run" / "model"), load_model(model), 1e-4)


@pytest.mark.parametrize("name", ["partition", "upcycle"])
@pytest.mark.parametrize("settings", [{}, {"router": "trained", "calibration": "own", "shared": 1}])
def test_shapes_alone(name, settings):
    dense, settings = model_of(dtype=np.float32), {"experts": 4} | settings
    settings = {k: v for k, v in settings.items() if name == "partition" or k == "experts"}
    configs = []

    def run(params):
        model, _ = SURGERIES[name].function(dataclasses.replace(dense, params=params), settings)
        configs.append(model.config)
        return model.params

    shapes = {path: leaf.shape for path, leaf in flatten(jax.eval_shape(run, dense.params)).items()}
    fresh = flatten(causal_lm.abstract_params(configs[0]))
    assert shapes == {path: leaf.shape for path, leaf in fresh.items()}


def test_errors_name_the_way_out():
    dense = model_of(dtype=np.float32)
    refused("layer 0: experts=5 does not divide the 12 neurons.*4 or 6", fh.partition, dense, 5)
    refused("top_k=5: expected 1 to 4", fh.partition, dense, 4, 5)
    refused("top_k=4: expected 1 to 3", fh.partition, dense, 4, 4, shared=1, calibration="own")
    refused("top_k=4: expected 1 to 3", fh.upcycle, dense, 3, 4)
    refused("router='mean'.*'means'", fh.partition, dense, 4, router="mean")
    refused("router 'trained' needs calibration text", fh.partition, dense, 4, router="trained")
    refused("shared=1 needs calibration text", fh.partition, dense, 4, shared=1)
    refused("shared=4 must be a number in .0, 4", fh.partition, dense, 4, shared=4)
    sparse, _ = fh.partition(dense, 4)
    for again in (fh.partition, fh.upcycle):
        refused("layer 0 already has 4 experts", again, sparse, 2)
    refused("lora_a: fold the model first", fh.partition, fh.lora(dense, 2, targets="ffn/")[0], 4)
    bert = dataclasses.replace(model_of("bert", np.float32), tokenizer=byte_tokenizer())
    refused("is an encoder and writes nothing", fh.partition, bert, 4, shared=1, calibration="own")
    few = np.ones((9, 2)), np.ones((9, 2)), np.ones((2, 2)), 1
    refused("9 tokens: a router needs at least 20", moefication.train_router, *few)


# ---- published models


@pytest.mark.slow
def test_moefication_of_minilm(torch, minilm_dir, shared_data):
    import transformers

    dense = load_model(minilm_dir)
    text = str(shared_data / "wikitext2" / "validation.txt")
    model, report = fh.partition(dense, 4, 1, "trained", calibration=text, calibration_tokens=8192)
    theirs = transformers.BertModel.from_pretrained(minilm_dir).eval()
    tokens = np.stack(calibration_rows(dense, text, 8192)[:2])[:, :64]
    agrees_with_torch(torch, theirs, model, tokens)
    starts = report["captured_start"]
    print("captured", starts, report["captured"], report["captured_most"])
    assert np.mean(report["captured"]) > np.mean(starts) and min(report["captured"]) > 0.25


@pytest.mark.slow
def test_smollm2_of_eight_experts(smollm2_gguf, shared_data, tmp_path):
    dense = load_model(smollm2_gguf)
    fh.save_model(fh.partition(dense, 8, 8)[0], tmp_path / "model")
    model = load_model(tmp_path / "model")
    assert model.config.family == "mixtral" and set(model.config.ffn_widths) == {192}
    settings = {"path": shared_data / "wikitext2" / "test.raw.txt", "bos": "segment"}
    assert fh.perplexity(model, max_windows=40, **settings) == pytest.approx(28.9650, rel=1e-4)
