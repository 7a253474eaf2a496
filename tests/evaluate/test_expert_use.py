"""Shares of texts and cosines of experts, against a computation expert by expert."""

import dataclasses
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, byte_tokenizer, config_of, random_params, with_experts
from tiny_runs import refused

from ffn_heterogeneity.data.windows import text_windows
from ffn_heterogeneity.evaluate.run import run
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.tree import flatten, unflatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
MIXTRAL = with_experts(dataclasses.replace(LLAMA, family="mixtral", layers=LLAMA.layers[:2]), 3)
MIXTRAL = dataclasses.replace(MIXTRAL, layers=(LLAMA.layers[0], MIXTRAL.layers[1]))


def leaves(edit=lambda path, leaf: leaf, seed=0):
    """Random parameters, all norms 1 (so that the stream's axes may be turned), then edited."""
    made = flatten(jax.tree.map(np.array, random_params(MIXTRAL, seed)))
    made = {k: np.ones_like(x) if k.endswith("scale") else x for k, x in made.items()}
    return unflatten({path: edit(path, leaf) for path, leaf in made.items()})


def turned(path, leaf):
    """The parameters of the same function, whose residual stream is turned."""
    random = np.random.default_rng(1).normal(size=(MIXTRAL.d_model, MIXTRAL.d_model))
    turn = np.linalg.qr(random)[0].astype(np.float32)
    if path.endswith("scale"):
        return leaf
    if any(name in path for name in ("embed", "down/", "attention/out/")):
        return leaf @ turn
    return np.swapaxes(np.swapaxes(leaf, -2, -1) @ turn, -1, -2)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "words.txt").write_text("the quick brown fox " * 9)
    (folder / "digits.txt").write_text("0123456789" * 15)
    return folder


def saved(tmp_path, name, params):
    place = tmp_path / name
    save_pretrained(MIXTRAL, params, place, tokenizer=byte_tokenizer())
    return str(place)


def measured(tmp_path, texts, params, others=None):
    models = [
        saved(tmp_path, name, one) for name, one in ({"model": params} | (others or {})).items()
    ]
    keys = {"text": str(texts), "window": 20, "against": tuple(models[1:])}
    return run(config_of("analyze", "experts", model=models[0], **keys), tmp_path / "run")


def test_loads_and_cosines_equal_those_of_one_expert_after_another(tmp_path, texts):
    params = leaves()
    results = measured(tmp_path, texts, params)
    (row,) = results["layers"]
    assert row["layer"] == 2 and not {"against"} & set(results)
    seen = Probe("inputs", lambda seen, *_: (seen.ffn_input, columns_of(seen)), kind="example")
    ffn = unstack(params)["layers"][1]["ffn"]
    counts, cosines = {}, []
    for name in ("digits", "words"):
        text = (texts / f"{name}.txt").read_text()
        rows = text_windows(text, byte_tokenizer(), 20, bos="auto")
        made = observe(MIXTRAL, params, token_batches(rows, len(rows)), seen)["inputs"]
        x, chosen = (np.asarray(one)[1].astype(np.float64) for one in made)
        counts[name] = np.bincount(chosen.astype(int).ravel(), minlength=3)
        y = [expert(ffn, e, x.reshape(-1, x.shape[-1])) for e in range(3)]
        for a, b in itertools.combinations(y, 2):
            norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            cosines.append(np.sum(a * b, 1) / norms)
    assert row["expert_cosine"] == pytest.approx(np.concatenate(cosines).mean(), abs=1e-5)
    loads = np.array([*counts.values()], float)
    p = loads / loads.sum()
    q = p.sum(1, keepdims=True) * p.sum(0)
    assert row["text_information"] == pytest.approx(np.sum(p[p > 0] * np.log((p / q)[p > 0])))
    assert [row["load_min"], row["load_max"]] == pytest.approx([p.sum(0).min(), p.sum(0).max()])
    lines = (tmp_path / "run/experts.csv").read_text().splitlines()
    tokens = loads.sum(1, keepdims=True) / MIXTRAL.layers[1].top_k
    shares = (loads / tokens).ravel()
    assert lines[0] == "layer,expert,text,share"
    assert [float(line.split(",")[3]) for line in lines[1:]] == pytest.approx(shares, rel=1e-5)
    assert lines[1].startswith("2,0,digits,") and (tmp_path / "run/experts.png").exists()
    rows = [json.loads(x) for x in (tmp_path / "run/rows.jsonl").read_text().splitlines()]
    assert {"what": "expert_cosine", "layer": 2, "value": row["expert_cosine"]} in rows


def columns_of(seen):
    if seen.routing is None:
        return jnp.zeros((*seen.ffn_input.shape[:2], 2), jnp.int32)
    return seen.routing.columns


def expert(ffn, e, x):
    gate, up, down = (ffn[name]["kernel"][e].astype(np.float64) for name in ("gate", "up", "down"))
    z = x @ gate
    return (z / (1 + np.exp(-z)) * (x @ up)) @ down


def test_experts_of_other_models_are_matched_and_their_streams_aligned(tmp_path, texts):
    params = leaves()
    order = [2, 0, 1]

    def reordered(path, leaf):
        if "ffn" not in path or leaf.shape[1:2] != (3,) and not path.endswith("router/kernel"):
            return leaf
        return leaf[..., order] if path.endswith("router/kernel") else leaf[:, order]

    others = {
        "shuffled": unflatten({k: reordered(k, x) for k, x in flatten(params).items()}),
        "turned": unflatten({k: turned(k, x) for k, x in flatten(params).items()}),
        "strange": leaves(seed=1),
    }
    found = measured(tmp_path, texts, params, others)["against"]
    assert found["shuffled"]["matched_cosine"] == pytest.approx(1, abs=1e-5)
    assert found["turned"]["aligned_cosine"] == pytest.approx(1, abs=1e-4)
    assert abs(found["turned"]["matched_cosine"]) < 0.5
    assert found["strange"]["aligned_cosine"] < 0.9


def test_models_that_cannot_be_compared_are_rejected(tmp_path, texts):
    params = leaves()
    other = dataclasses.replace(MIXTRAL, layers=MIXTRAL.layers[::-1])
    save_pretrained(other, random_params(other), tmp_path / "b", tokenizer=byte_tokenizer())
    one = saved(tmp_path, "a", params)
    keys = {"text": str(texts), "window": 20}
    config = config_of("analyze", "experts", model=one, against=(str(tmp_path / "b"),), **keys)
    refused("other numbers of experts", run, config, tmp_path / "run")
    dense = dataclasses.replace(MIXTRAL, layers=LLAMA.layers[:2], family="llama")
    save_pretrained(dense, random_params(dense), tmp_path / "c", tokenizer=byte_tokenizer())
    config = config_of("analyze", "experts", model=str(tmp_path / "c"), **keys)
    refused("no layer with experts", run, config, tmp_path / "dense")
