"""Merged experts against oracles written from the formulas, with all permutations tried."""

import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, our_logits, random_params, with_experts
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.hf.export import transformers_class
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import token_batches
from ffn_heterogeneity.surgery import SURGERIES, alignment
from ffn_heterogeneity.surgery.calibration import write_rows

pytestmark = pytest.mark.usefixtures("compiled_quickly")
MIXTRAL = dataclasses.replace(LLAMA, family="mixtral", layers=LLAMA.layers[:3])
E, NAMES = 6, ("gate", "up", "down")
TOKENS = np.arange(60).reshape(3, 20) * 7 % 258


def model_of(config=MIXTRAL, experts=E, edit=None, dtype=np.float32, **settings) -> Model:
    """A model of random experts; `edit` changes each layer's feed-forward leaves in place."""
    config = with_experts(config, experts, **settings)
    tree = unstack(jax.tree.map(np.array, random_params(config, dtype=dtype)))
    for layer in tree["layers"] if edit else ():
        edit(layer["ffn"])
    return Model(config, restack(config, tree), byte_tokenizer(), "tiny")


def copies(ffn):
    """Every expert that is not shared becomes the last one, with its neurons permuted."""
    rng = np.random.default_rng(5)
    for leaves in (ffn[name] for name in NAMES):
        for leaf in leaves.values():
            leaf[-E:] = leaf[-1]
    for expert in range(-E, 0):
        shuffle(ffn, expert, rng.permutation(ffn["down"]["kernel"].shape[1]))


def shuffle(ffn, expert, order):
    for name in NAMES:
        kernel = ffn[name]["kernel"][expert]
        kernel[:] = kernel[order] if name == "down" else kernel[:, order]
        if name != "down" and "bias" in ffn[name]:
            ffn[name]["bias"][expert] = ffn[name]["bias"][expert][order]


@pytest.fixture
def text(tmp_path):
    """Saved rows of unlike lengths, so that batches are padded."""
    rng = np.random.default_rng(0)
    rows = [np.r_[0, rng.integers(2, 258, 20 + 9 * i)].astype(np.int32) for i in range(5)]
    write_rows(tmp_path / "rows.jsonl", rows)
    return {"calibration": str(tmp_path / "rows.jsonl")}, rows


def ffns(model):
    return [layer["ffn"] for layer in unstack(model.params)["layers"]]


def same(one, other, atol=1e-5):
    logits = [our_logits(model.config, model.params, TOKENS) for model in (one, other)]
    np.testing.assert_allclose(*logits, atol=atol * np.abs(logits[1]).max())


@pytest.mark.parametrize("method", ["m_smoe", "ream"])
@pytest.mark.parametrize("more", [{}, {"shared": 1}])
def test_permuted_copies_lose_nothing(method, more, text, tmp_path):
    config = dataclasses.replace(MIXTRAL, ffn_bias=bool(more))
    model = model_of(config, E + more.get("shared", 0), copies, **more)
    merged, report = fh.merge_experts(model, method, **text[0])
    same(merged, model)
    shared = more.get("shared", 0)
    assert report["experts_after"] == [3 + shared] * 3
    for old, new in zip(ffns(model), ffns(merged), strict=True):
        assert new["router"]["kernel"].shape == (16, E) and min(new["expert_of"]) == shared
        np.testing.assert_array_equal(new["up"]["kernel"][:shared], old["up"]["kernel"][:shared])
    if more:
        return  # no family's files have them
    for export in ("auto", "padded"):
        fh.save_model(merged, tmp_path / export, export=export, structure="fold")
        same(fh.load_model(tmp_path / export), model)
    few, _ = fh.merge_experts(model, method, columns="dominant", **text[0])
    same(few, model)  # all experts are alike
    fh.save_model(few, tmp_path / "few")
    assert transformers_class(tmp_path / "few") == "AutoModelForCausalLM"
    same(fh.load_model(tmp_path / "few"), model)


# ---- oracles


INPUTS = Probe("inputs", lambda seen, batch, _: seen.ffn_input, kind="example")


def cosine(one, other):
    return np.vdot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)


def observed(model, ffn, x):
    """(logits [N, E], usage, REAP scores, gated outputs of all experts on all tokens, states)."""
    z = x @ ffn["router"]["kernel"]
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    a = np.einsum("nd,edm->enm", x, ffn["gate"]["kernel"])
    h = a / (1 + np.exp(-a)) * np.einsum("nd,edm->enm", x, ffn["up"]["kernel"])
    y = np.einsum("enm,emd->end", h, ffn["down"]["kernel"])
    usage, gated = np.zeros(E), np.zeros(E)
    for n in range(len(x)):
        chosen = np.argsort(-z[n])[: model.config.layers[0].top_k]
        for e in chosen:
            usage[e] += 1
            gated[e] += p[n, e] / p[n, chosen].sum() * np.linalg.norm(y[e, n])
    return z, usage, gated / usage, p.T[:, :, None] * y, h


def best_order(gain, m):
    """The permutation of the highest gain, of all."""
    return np.array(max(itertools.permutations(range(m)), key=lambda o: gain[range(m), o].sum()))


def distances(one, other):
    one, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, other))
    return np.linalg.norm(one[:, None] - other[None], axis=-1)


@pytest.mark.parametrize("method", ["m_smoe", "ream", "ream:score"])
def test_statistics_groups_and_means_are_the_formulas(method, text):
    """Layers are observed on the old model (m_smoe), or on the merged one (ream)."""
    narrow = MIXTRAL.with_widths([4] * 3)
    model, (method, _, score) = model_of(narrow, dtype=np.float64), method.partition(":")
    settings = {"group": 2} if method == "ream" else {}
    settings |= {"weighting": "score"} if score else {}
    merged, report = fh.merge_experts(model, method, 0.5, **settings, **text[0])
    (batch,) = token_batches(text[1], 8)
    on = model if method == "m_smoe" else merged
    seen = causal_lm.forward(on.config, on.params, batch, probes=(INPUTS,))["probes"]["inputs"]
    inputs = np.asarray(seen, np.float64)[:, batch["segment_ids"] > 0]
    for ffn, new, x, facts in zip(ffns(model), ffns(merged), inputs, report["merged"], strict=True):
        z, usage, scores, outputs, h = observed(model, ffn, x)
        assert facts["usage"] == usage.tolist() and sum(usage) == 2 * sum(map(len, text[1]))
        np.testing.assert_allclose(facts["scores"], scores, rtol=1e-4)
        alike = np.array([[cosine(a, b) for a in z.T] for b in z.T])
        if method == "m_smoe":
            alike = (alike + 1) / 2
            groups = {e: [e] for e in sorted(np.argsort(-usage, kind="stable")[:3].tolist())}
            for e in sorted(set(range(E)) - set(groups)):
                groups[max(groups, key=lambda d, e=e: (alike[e, d], -d))].append(e)
        else:
            alike = (alike + [[cosine(a, b) for a in outputs] for b in outputs]) / 2
            groups = {e: [e] for e in np.argsort(-scores)[:3].tolist()}
            free = set(range(E)) - set(groups)
            for centroid, group in groups.items():
                group += sorted(free, key=lambda e, c=centroid: -alike[c, e])[:2]
                free -= set(group)
        wanted = sorted(groups.values())
        assert sorted(facts["groups"]) == wanted
        mean = np.mean([alike[group[0], e] for group in wanted for e in group[1:]])
        np.testing.assert_allclose(facts["similarity"], mean, atol=1e-5)
        for number, group in enumerate(facts["groups"]):
            assert (new["expert_of"][group] == number).all()
            rows = [np.hstack([ffn["gate"]["kernel"][e].T, ffn["up"]["kernel"][e].T,
                               ffn["down"]["kernel"][e]]) for e in group]  # fmt: skip
            total, weights = 0, scores if score else usage
            for e, points in zip(group, rows, strict=True):
                gain = rows[0] @ points.T
                if method == "ream":
                    gain = -distances(rows[0], points) - distances(h[group[0]].T, h[e].T)
                total = total + weights[e] * points[best_order(gain, 4)]
            kernels = [new[name]["kernel"][number] for name in NAMES]
            points = np.hstack([kernels[0].T, kernels[1].T, kernels[2]])
            atol = 1e-4 if score else 1e-12  # scores are sums in float32
            np.testing.assert_allclose(points, total / weights[group].sum(), rtol=0, atol=atol)


def test_the_mean_has_all_biases():
    rng = np.random.default_rng(0)
    shapes = {"up": (3, 4), "down": (4, 3)}
    blocks = [
        {name: {"kernel": rng.normal(size=shape), "bias": rng.normal(size=shape[1])}
         for name, shape in shapes.items()} for _ in range(2)
    ]  # fmt: skip
    orders = [np.arange(4), np.array([2, 0, 3, 1])]
    mean = alignment.weighted_mean(blocks, np.array([3, 1]), orders, 0)
    for name, axis in (("up", 1), ("down", 0)):
        one, other = (block[name] for block in blocks)
        kernel = (3 * one["kernel"] + other["kernel"].take(orders[1], axis)) / 4
        np.testing.assert_allclose(mean[name]["kernel"], kernel, atol=1e-14)
        bias = other["bias"] if name == "down" else other["bias"][orders[1]]
        np.testing.assert_allclose(mean[name]["bias"], (3 * one["bias"] + bias) / 4, atol=1e-14)


def never_chosen(*experts):
    """A logit between those of experts 0 and 1 is never the largest."""

    def edit(ffn):
        kernel = ffn["router"]["kernel"]
        for i, e in enumerate(experts):
            share = (i + 1) / (len(experts) + 1)
            kernel[:, e] = share * kernel[:, 0] + (1 - share) * kernel[:, 1]

    return edit


def test_an_expert_without_tokens_has_no_weight(text):
    def other(ffn):
        never_chosen(3)(ffn)
        for name in NAMES:
            ffn[name]["kernel"][3] += 100

    made = [
        fh.merge_experts(model_of(edit=edit, top_k=1), **text[0])
        for edit in (never_chosen(3), other)
    ]
    (one, report), (two, _) = made
    assert [facts["usage"][3] for facts in report["merged"]] == [0] * 3
    for a, b in zip(ffns(one), ffns(two), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    few = model_of(edit=never_chosen(2, 3, 4), top_k=1)
    message = r"layer 0: expert 2 remains, and none of the 195 tokens.*3 of 6 experts are used"
    refused(message, fh.merge_experts, few, ratio=0.2, **text[0])


# ---- residuals


@pytest.mark.parametrize(("residual", "whole"), [("pruned", 1.0), ("svd", 2.0)])
def test_residuals_in_full_are_the_model_and_fewer_are_worse(residual, whole, tmp_path):
    model, errors = model_of(shared=1), []
    for share in (whole, 0.5, 0.25, 0.0):
        made, report = fh.merge_experts(model, "resmoe", residual=residual, share=share)
        first = report["merged"][0]
        errors.append(first["error"])
        n, m, p = E - 1, 24, 3 * 16
        rank = min(m, int(share * m * p / (m + p)))
        part = round(share * m * p) if residual == "pruned" else rank * (m + p)
        assert first["stored_parameters"] == 16 * n + 2 * m * p + n * part  # router, shared, mean
        assert made.config == model.config and report["parameters_removed_percent"] == 0
        if share == whole:
            same(made, model)
    assert errors[0] < 1e-12 and errors == sorted(errors) and errors[1] > 0.1
    copied, report = fh.merge_experts(model_of(edit=copies), "resmoe", share=0.0)
    same(copied, model_of(edit=copies))
    saved = fh.load_model(fh.save_model(copied, tmp_path / "model"))
    same(saved, copied, 0)


def test_a_truncated_residual_is_the_best_of_its_rank():
    model = model_of(dtype=np.float64)
    made, _ = fh.merge_experts(model, "resmoe", residual="svd", share=0.25)
    rows = [np.concatenate([np.swapaxes(ffn["gate"]["kernel"], 1, 2),
                            np.swapaxes(ffn["up"]["kernel"], 1, 2), ffn["down"]["kernel"]], -1)
            for ffn in (ffns(model)[1], ffns(made)[1])]  # fmt: skip
    center, aligned = alignment.barycenter(rows[0])
    values = np.linalg.svd(aligned - center, compute_uv=False)
    np.testing.assert_allclose(
        np.linalg.norm(rows[1] - aligned, axis=(1, 2)),
        np.sqrt(np.sum(values[:, 4:] ** 2, axis=1)),
        rtol=1e-12,
    )


@pytest.mark.parametrize("expert", [0, 2])
def test_a_barycenter_ignores_the_order_of_neurons(expert):
    rng = np.random.default_rng(0)
    experts = rng.normal(size=(4, 12, 5)) / 4 + rng.normal(size=(12, 5))
    center, aligned = alignment.barycenter(experts)
    experts[expert] = experts[expert][rng.permutation(12)]
    other, _ = alignment.barycenter(experts)
    order = alignment.matched(center, other)
    np.testing.assert_allclose(other[order], center, atol=1e-14)
    np.testing.assert_allclose(center, aligned.mean(0), atol=1e-14)
    assert np.sum((aligned - center) ** 2) < np.sum((experts - experts.mean(0)) ** 2)


# ---- limits


def test_what_cannot_be_merged_is_named(text):
    def scaled(ffn):
        ffn["neuron_scale"] = np.ones((E, 24), np.float32)

    calibration, model = text[0], model_of()
    merged, report = fh.merge_experts(model, **calibration, layers="0,2")
    assert json.loads(json.dumps(report)) == report and report["experts_after"] == [3, 6, 3]
    mixed = dataclasses.replace(model.config, layers=(*LLAMA.layers[:2], *model.config.layers[2:]))
    mixed = Model(mixed, random_params(mixed), None, "mixed")
    assert fh.merge_experts(mixed, layers="2", **calibration)[1]["experts_after"] == [0, 0, 3]
    adapted, _ = SURGERIES["lora"](model, {"targets": "ffn/router"}, key=jax.random.key(0))
    for given, settings, message in (
        (adapted, {"columns": "dominant"}, "layer 0: its router has adapters: fold"),
        (mixed, {}, "layers 0, 1 have no experts"),
        (merged, {"layers": "1-2"}, "layer 2 has merged experts already"),
        (model_of(edit=scaled), {}, "layer 0 has ffn/neuron_scale: fold the model first"),
        (model_of(constants=1), {}, "layer 0 has 1 constants"),
        (model, {"columns": "dominant", "ratio": 0.9}, "1 of 6 columns remain.*top_k=2"),
        (model, {"method": "ream", "group": 1, "ratio": 0.7}, "2 centroids take at most 1"),
    ):
        refused(message, fh.merge_experts, given, **(calibration | settings))
    for settings, message in (
        ({"calibration": ""}, "'m_smoe' needs calibration text"),
        ({"weighting": "score"}, "only with method='ream'"),
        ({"method": "resmoe", "ratio": 0.25}, "resmoe removes no expert: set share"),
        ({"method": "resmoe", "share": 1.5}, "share=1.5 must be a number in .0, 1."),
        ({"ratio": 1.0}, "ratio=1.0"),
    ):
        refused(message, SURGERIES["merge_experts"].check, settings)
