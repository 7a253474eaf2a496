"""Mistyped settings in Python: an unknown setting is rejected, and the right one is suggested."""

import dataclasses
import inspect
import re

import pytest
from tiny_models import LLAMA, config_of, random_params
from tiny_runs import refused

from configs.parts.adapters import PARTS
from configs.parts.losses import LOSSES
from ffn_heterogeneity.adapters import RATES, REFRESHES
from ffn_heterogeneity.evaluate.inputs import TextSettings
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import make_terms
from ffn_heterogeneity.wording import settings_from

SEEN = [
    ("prune", "layer", "layers"),  # before, this removed neurons of every layer
    ("prune", "protct", "protect"),  # spared nobody
    ("lora", "dropuot", "dropout"),
    ("macdrop", "scoep", "scope"),
]
SLIPS = [
    (name, f"{field.name}{field.name[-1]}", field.name)
    for name, surgery in SURGERIES.items()
    for field in dataclasses.fields(surgery.settings)
]
# Every group of configs/parts/, except those that are always present.
EVERYTHING = ",".join(["model,text", *PARTS, *(set(LOSSES) - {"nll", "nucl"})])


@pytest.mark.parametrize(("name", "typed", "meant"), [*SEEN, *SLIPS])
def test_a_surgery_refuses_a_slip(name, typed, meant):
    """The error comes before the model is read."""
    for call in (lambda given: SURGERIES[name].function(None, given), SURGERIES[name].check):
        refused(f"unknown setting '{typed}', did you mean '{meant}'", call, {typed: 1})


@pytest.mark.parametrize("name", SURGERIES)
def test_what_is_left_out_is_as_in_the_config(name):
    if name in ("prune", "attack", "fuse"):
        config = config_of(name)
    elif name in ("partition", "upcycle"):
        config = config_of("experts", name)
    else:
        config = config_of("nucl_finetune", EVERYTHING).get(name, {})
    assert SURGERIES[name].read(config) == SURGERIES[name].check({})


def test_settings_are_read_from_a_config_that_has_more():
    """A key that has a default may be absent; one without is named."""
    config = config_of("perplexity", model="m", text="a.txt").to_dict() | {"own": 1}
    del config["revision"], config["compute_dtype"]
    settings = settings_from(TextSettings, config, window=7)
    assert (settings.window, settings.batch_size) == (7, 4)
    assert (settings.revision, settings.compute_dtype) == (None, "auto")
    del config["bos"]
    refused("bos", settings_from, TextSettings, config, error=KeyError)


def test_a_removal_without_a_word():
    """The default removes 25% of each layer by entropy, as in the config; `count` has priority."""
    model = Model(LLAMA, random_params(LLAMA), None, "tiny")
    smaller, report = SURGERIES["prune"].function(model, {})
    assert (report["criterion"], report["ratio"]) == ("entropy", 0.25)
    assert smaller.config.ffn_widths == tuple(n - n // 4 for n in LLAMA.ffn_widths)
    _, report = SURGERIES["prune"].function(model, {"count": 2})
    assert [len(gone) for gone in report["removed"]] == [2] * LLAMA.n_layers


@pytest.mark.parametrize("name", TERMS)
def test_a_term_refuses_a_slip(name):
    """The defaults of its group in a config are its own defaults."""
    known = inspect.signature(TERMS[name]).parameters
    group = config_of("nucl_finetune", EVERYTHING).losses[name].to_dict()
    del group["weight"]
    assert group == {key: known[key].default for key in group}
    for slip, more in {"xyzzy": r"\. Known: "}.items() | {
        (f"{key}_", f", did you mean '{key}'") for key in group
    }:
        with pytest.raises(ValueError, match=f"losses.{name}: unknown setting '{slip}'{more}"):
            make_terms({name: {"weight": 1.0, slip: 1}}, LLAMA, None)


def test_monitors_adapters_criteria_and_fold_refuse_a_slip():
    config = config_of("jreg_pretrain", "local")
    with config.unlocked():
        config.monitors.seen = {"probe": "displacement", "positons": "last"}
    curve = {"curiculum": "exp"}
    for call, message in (
        (lambda: make_terms(config.monitors, LLAMA, None, False), "setting 'positons'"),
        (lambda: RATES["macdrop"](curve, 10), "'curiculum', did you mean 'curriculum'"),
        (lambda: REFRESHES["macdrop"](curve), "'curiculum', did you mean 'curriculum'"),
        (lambda: SURGERIES["prune"].check({"criterion": "entrpy"}), "did you mean 'entropy'"),
        (lambda: SURGERIES["fold"].function(None, {"layers": "top"}), "Known: none"),
    ):
        refused(f"unknown .*{message}", call)


@pytest.mark.parametrize(("name", "given", "message"), [
    ("prune", {"reverse": "False"}, "reverse='False'; expected bool"),
    ("prune", {"count": 2.7}, "count=2.7; expected int | None"),
    ("prune", {"criterion": None}, "criterion=None; expected str"),
    ("prune", {"protect": "bos:inf"}, "protect='bos:inf'"),
    ("lora", {"dropout": 5}, "dropout=5"),
    ("macdrop", {"epochs": 2.5}, "epochs=2.5; expected int"),
    ("macdrop", {"a": float("nan")}, "a=nan"),
    ("score_mask", {"ratio": 1.0}, "ratio=1.0"),
    ("gates", {"rank": -1}, "rank=-1"),
    ("scores", {"targets": "ffn/("}, "targets='ffn/('"),
])  # fmt: skip
def test_a_value_of_another_kind_is_refused(name, given, message):
    refused(re.escape(message), SURGERIES[name].check, given)
