"""Timed training steps of configs with separate settings: shared states, FLOPs, skipped configs."""

import re

import pytest
from tiny_models import config_of
from tiny_runs import refused

from ffn_heterogeneity.bench import steps
from ffn_heterogeneity.launch.configs import load_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")
BASE = "configs/jreg_pretrain.py:local accumulation=1 shape.vocab_size=64 "
SPECS = (BASE + "batch_size=4 remat=none unroll=0", BASE + "remat=full unroll=1")


def run(monkeypatch, *specs, **keys):
    made = []
    plain = steps._random
    monkeypatch.setattr(steps, "_random", lambda built: made.append(1) or plain(built))
    config = config_of("benchmark", configs=specs, batch=2, seq_len=32, repetitions=2, **keys)
    return steps.benchmark_steps(config, load_config), len(made)


@pytest.fixture(scope="module")
def found():
    """(results of three steps, number of states)."""
    with pytest.MonkeyPatch.context() as patch:
        return run(patch, *SPECS, BASE + "batch_size=8")


def test_steps_of_one_model_share_a_state_and_count_the_same_work(found):
    """6 FLOPs per weight of a product and token, the tied head's included, and causal attention's
    two products three times; rematerialization is not counted."""
    found, states = found
    four, two, _ = found["programs"].values()
    assert states == 1 and four["tokens"] == 2 * two["tokens"] == 128
    weights = 6 * (4 * 128**2 + 3 * 128 * 344) + 128 * 64
    attention = 3 * 6 * 2 * 2 * (32 * 33 / 2) * 128
    assert 1e9 * two["gflop"] == pytest.approx(6 * weights * 64 + 2 * attention)
    seconds, peak = two["median_ms"] / 1e3, found["machine"]["peak_flops"]
    assert two["gflop"] == four["gflop"] / 2
    assert two["mfu"] == pytest.approx(1e9 * two["gflop"] / seconds / peak)
    assert [row[0] for row in found["tables"][-1]["rows"]] == [*found["programs"]]


def test_steps_that_do_not_fit_or_come_too_late_are_named(found, monkeypatch):
    large = max(one["bytes"] for one in found[0]["programs"].values())
    monkeypatch.setattr(steps, "memory_of", lambda devices: large - 1)
    with pytest.raises(ValueError, match=r"fewer than two steps.*batch_size=8.*needs 0\.0 of 0\.0"):
        run(monkeypatch, SPECS[1], BASE + "batch_size=8")
    with pytest.raises(ValueError, match=r"not compiled within compile_limit=1e-09 s"):
        run(monkeypatch, *SPECS, compile_limit=1e-9)


@pytest.mark.parametrize("wrong", ["batchsize=4", "remat=3"])
def test_a_wrong_setting_is_an_error_that_names_its_entry(monkeypatch, wrong):
    refused(re.escape(f"configs: '{BASE}{wrong}'"), run, monkeypatch, BASE + wrong, BASE)
