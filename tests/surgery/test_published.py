"""FLAP and Wanda-sp as published, against numpy on states of single rows; widths in multiples."""

import dataclasses

import numpy as np
import pytest
from test_states import down_of, model_of, rows_of, states_of
from tiny_models import (
    REPOSITORY,
    config_of,
    random_params,
    tiny_of,
    torch_logits,
    torch_model,
    with_experts,
)
from tiny_runs import refused

from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import sweep_run
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.calibration import write_rows
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.selection import rounded_count
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
PRUNE = SURGERIES["prune"]
LLAMA = dataclasses.replace(tiny_of("llama", layers=3), vocab_size=258)
FLAP = {"criterion": "flap_published", "budget": "global", "compensation": "bias"}


@pytest.fixture
def calibration(tmp_path):
    write_rows(tmp_path / "rows.jsonl", rows_of(LLAMA, 16))
    return {"calibration": str(tmp_path / "rows.jsonl")}


def all_states(config, params, layer):
    return np.concatenate(states_of(config, params, rows_of(LLAMA, 16), layer, places=slice(None)))


@pytest.mark.parametrize("changes", [{}, {"layers": "top"}, {"count": 9}, {"multiple": 8}])
def test_whole_blocks_hold_as_many_parameters_as_the_rules_remove(tmp_path, changes):
    config = tiny_of("llama", layers=6)
    config = config.with_widths([24, 48, 24, 48, 24, 48])
    save_pretrained(config, random_params(config), tmp_path)
    asked = {"ratio": 0.9} | changes
    settings = config_of("prune_table", model=str(tmp_path), **asked)
    spec = str(REPOSITORY / "configs/prune_table.py")
    _, points = sweep_run.points_of(spec, "shrink", settings)
    blocks = next(x.settings["blocks"] for x in points if x.name.startswith("depth"))
    whole = load_model(tmp_path)
    report = PRUNE(whole, {"criterion": "entropy", **asked})[1]
    lost = report["parameters_before"] - report["parameters_after"]
    mean = sum(x.size for x in flatten(unstack(whole.params)["layers"]).values()) / 6
    assert abs(lost - blocks * mean) <= mean / 2


@pytest.mark.parametrize("count", [1, 5, 11])
def test_flap_searches_all_layers(calibration, count):
    params = random_params(LLAMA)
    scores = []
    for layer in range(3):
        h, w = all_states(LLAMA, params, layer), down_of(params, layer)
        raw = h.var(0) * (w**2).sum(1)
        scores.append((raw - raw.mean()) / raw.std(ddof=1))
    order = np.argsort(np.concatenate(scores), kind="stable")
    wanted = [sorted(order[:count][order[:count] // 12 == i] % 12) for i in range(3)]
    smaller, report = PRUNE(
        model_of(params=params, config=LLAMA), {**FLAP, **calibration, "count": count}
    )
    assert report["removed"] == [list(map(int, gone)) for gone in wanted]
    assert smaller.config.ffn_bias and smaller.config.ffn_widths != LLAMA.ffn_widths


@pytest.mark.parametrize("count", [1, 5, 9])
def test_wanda_sp_goes_on_with_the_pruned_model(calibration, count):
    params = random_params(LLAMA)
    tree, removed = unstack(params), []
    for layer in range(3):
        masked = restack(LLAMA, tree)
        score = np.linalg.norm(all_states(LLAMA, masked, layer), axis=0)
        score = score * np.abs(down_of(params, layer)).mean(1)
        gone = sorted(np.argsort(score)[:count].tolist())
        removed.append(gone)
        tree["layers"][layer]["ffn"]["down"]["kernel"] = np.array(
            tree["layers"][layer]["ffn"]["down"]["kernel"]
        )
        tree["layers"][layer]["ffn"]["down"]["kernel"][gone] = 0
    asked = {"criterion": "wanda_sp_published", "count": count, **calibration}
    _, report = PRUNE(model_of(params=params, config=LLAMA), asked)
    assert report["removed"] == removed


def test_flaps_biases_are_in_the_file_and_in_transformers(torch, tmp_path, calibration):
    model = model_of(config=LLAMA)
    asked = {**FLAP, **calibration, "ratio": 0.3, "budget": "layer", "criterion": "flap"}
    smaller, report = PRUNE(model, asked)
    bias = unstack(smaller.params)["layers"][0]["ffn"]["down"]["bias"]
    h, gone = (
        np.concatenate(states_of(LLAMA, model.params, rows_of(LLAMA, 16), 0)),
        report["removed"],
    )
    added = h.mean(0)[gone[0]] @ down_of(model.params, 0)[gone[0]]
    np.testing.assert_allclose(bias, added, atol=1e-6)
    save_pretrained(smaller.config, smaller.params, tmp_path / "model")
    again, tokens = load_model(str(tmp_path / "model")), rows_of(LLAMA, 1)[0][None]
    hidden = causal_lm.forward(again.config, again.params, {"tokens": tokens})["hidden"]
    ours = causal_lm.logits(again.config, again.params, hidden)
    theirs = torch_logits(torch, torch_model(torch, tmp_path / "model"), tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert report["parameters_after"] == sum(leaf.size for leaf in flatten(again.params).values())


def test_what_is_wrong_is_said(calibration):
    for asked, words in (
        ({"criterion": "flap_published"}, "is one with budget='global'"),
        ({"criterion": "wanda_sp_published", "budget": "global"}, "is one with budget='layer'"),
        ({"criterion": "wanda_sp_published", "protect": "bos:2"}, "protect='bos:2': criterion"),
        ({"criterion": "wanda_sp_published", "reverse": True}, "reverse=True: criterion"),
        ({"multiple": 0}, "multiple=0"),
        ({"multiple": 13}, "multiple=13: a layer has 12 neurons"),
    ):
        refused(words, PRUNE, model_of(config=LLAMA), {**calibration, **asked})
    refused(
        "needs calibration text",
        PRUNE.check,
        {"criterion": "wanda_sp_published", "calibration": ""},
    )
    moe = with_experts(dataclasses.replace(LLAMA, family="mixtral"))
    asked = {"criterion": "wanda_sp_published", **calibration}
    refused("has experts", PRUNE, model_of(moe), asked)
    gemma = dataclasses.replace(tiny_of("gemma2", layers=2), vocab_size=258)
    refused("format has none", PRUNE, model_of(gemma), {**FLAP, **calibration})


def test_what_stays_is_a_multiple():
    assert [rounded_count(100, n, 16) for n in (0, 3, 4, 12, 13, 99)] == [0, 4, 4, 4, 20, 84]
    model = model_of(config=LLAMA)
    for asked, widths in (
        ({"ratio": 0.25, "multiple": 4}, (8, 8, 8)),  # 9 -> 8
        ({"ratio": 0.2, "multiple": 4}, (12, 12, 12)),  # 10 -> 12
        ({"ratio": 0.9, "multiple": 8}, (8, 8, 8)),
    ):
        smaller, _ = PRUNE(model, {"criterion": "magnitude", **asked})
        assert smaller.config.ffn_widths == widths
    plan = {"criterion": "magnitude", "ratio": 0.3, "budget": "global"}
    free, fixed = (PRUNE(model, plan | {"multiple": n})[1]["removed"] for n in (1, 4))
    for some, rounded in zip(free, fixed, strict=True):
        assert (12 - len(rounded)) % 4 == 0
        assert set(some) <= set(rounded) or set(rounded) <= set(some)
    assert RemovalPlan("entropy", ratio=0.5, multiple=64).count_of(1536) == 768
