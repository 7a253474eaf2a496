"""Slips in Python: a setting that is not there is refused, and the one that was meant is named."""

from __future__ import annotations

import dataclasses
import inspect
import runpy

import jax
import pytest
from tiny_models import LLAMA, REPOSITORY, byte_tokenizer, config_of, random_params

from ffn_heterogeneity.adapters import RATES, REFRESHES
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import make_terms

SLIPS = [
    (name, f"{field.name}{field.name[-1]}", field.name)
    for name, surgery in SURGERIES.items()
    for field in dataclasses.fields(surgery.settings)
]
SEEN = [
    ("prune", "layer", "layers"),  # took neurons of every layer
    ("prune", "protct", "protect"),  # spared nobody
    ("lora", "dropuot", "dropout"),
    ("macdrop", "scoep", "scope"),
]
GROUPS = {
    name: runpy.run_path(str(REPOSITORY / "configs" / "parts" / f"{name}.py"))
    for name in ("adapters", "losses")
}


@pytest.mark.parametrize(("name", "typed", "meant"), [*SEEN, *SLIPS])
def test_a_surgery_refuses_a_slip(name, typed, meant):
    """Before it looks at the model."""
    for call in (lambda given: SURGERIES[name].function(None, given), SURGERIES[name].check):
        with pytest.raises(ValueError, match=f"unknown setting '{typed}', did you mean '{meant}'"):
            call({typed: 1})


def test_fold_has_no_settings():
    with pytest.raises(ValueError, match="unknown setting 'layers'. Known: none"):
        SURGERIES["fold"].function(None, {"layers": "top"})


@pytest.mark.parametrize("name", ["prune", "attack", "lora", "dora", "nf4", "macdrop"])
def test_what_is_left_out_is_as_in_the_config(name):
    if name in ("prune", "attack"):
        config = config_of(name)
    else:
        config = GROUPS["adapters"]["PARTS"][name][0]()
    assert SURGERIES[name].read(config) == SURGERIES[name].check({})


def test_a_surgery_without_a_word():
    """A quarter of each layer's neurons by entropy, as `compress.py --config=configs/prune.py`."""
    model = Model(LLAMA, random_params(LLAMA), byte_tokenizer(), "tiny")
    smaller, report = SURGERIES["prune"].function(model, {})
    assert (report["criterion"], report["ratio"]) == ("entropy", 0.25)
    assert smaller.config.ffn_widths == tuple(n - n // 4 for n in LLAMA.ffn_widths)
    _, report = SURGERIES["prune"].function(model, {"count": 2})
    assert [len(gone) for gone in report["removed"]] == [2] * LLAMA.n_layers
    adapted, _ = SURGERIES["lora"].function(model, {})
    ranks = {x.shape[-1] for path, x in jax.tree.leaves_with_path(adapted.params)
             if "lora_a" in jax.tree_util.keystr(path)}  # fmt: skip
    assert ranks == {16}


@pytest.mark.parametrize("name", TERMS)
def test_a_term_refuses_a_slip(name):
    known = [*inspect.signature(TERMS[name]).parameters][1:]
    with pytest.raises(ValueError, match="unknown setting 'xyzzy'. Known: "):
        TERMS[name](TermContext(name), xyzzy=1)
    for meant in known:
        message = f"unknown setting '{meant}_', did you mean '{meant}'"
        with pytest.raises(ValueError, match=message):
            TERMS[name](TermContext(name), **{f"{meant}_": 1})
    defaults = inspect.signature(TERMS[name]).parameters
    group = GROUPS["losses"]["LOSSES"][name]().to_dict()
    assert {k: v for k, v in group.items() if k != "weight"} == {
        k: defaults[k].default for k in known if k in group
    }


def test_a_monitor_refuses_a_slip():
    config = config_of("jreg_pretrain", "local")
    with config.unlocked():
        config.monitors.seen = {"probe": "displacement", "positons": "last"}
    with pytest.raises(ValueError, match="unknown setting of monitors.seen 'positons'"):
        make_terms(config, LLAMA, None)


def test_an_adapter_refuses_a_slip():
    for call in (lambda given: RATES["macdrop"](given, 10), REFRESHES["macdrop"]):
        with pytest.raises(ValueError, match="'curiculum', did you mean 'curriculum'"):
            call({"curiculum": "exp"})
    assert RATES["macdrop"]({"curriculum": "constant"}, 10)(3) == 0.8


def test_a_criterion_is_named_where_it_is_near():
    with pytest.raises(ValueError, match="unknown criterion 'entrpy', did you mean 'entropy'"):
        SURGERIES["prune"].check({"criterion": "entrpy"})
