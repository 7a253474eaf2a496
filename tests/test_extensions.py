"""Mistakes in new pieces: an error of one line says what it must return, and where it is."""

import contextlib
import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from tiny_models import LLAMA, batch_of, config_of, random_params, save_tiny

from ffn_heterogeneity import adapters
from ffn_heterogeneity.launch import cli, compress
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.criteria import CRITERIA
from ffn_heterogeneity.train.build import make_terms
from ffn_heterogeneity.train.source import prepared
from ffn_heterogeneity.train.step import make_eval_step, make_params_metrics, make_train_step
from ffn_heterogeneity.tree import Leaf

ONE = jnp.float32(1)


@contextlib.contextmanager
def refused(*parts):
    """Checks that the block ends in an error of one line with these parts, as scripts print it."""
    with pytest.raises(ValueError) as bad:
        yield
    assert re.search(".*".join(parts), cli.one_line(bad.value)), cli.one_line(bad.value)
    assert "\n" not in str(bad.value)


@pytest.mark.parametrize(
    ("returned", "shapes"),
    [
        (ONE, r"shapes \(\)"),
        ((ONE, ONE), r"shapes \(\(\), \(\)\)"),
        (None, "shapes None"),
        (TermValue(jnp.ones(3), ONE), r"total=\(3,\)"),
        (TermValue(ONE, jnp.ones((1, 1))), r"denominator=\(1, 1\)"),
        (TermValue(ONE, ONE, ONE), r"metrics=\(\)"),
        ({"total": ONE}, "'total'"),
    ],
)
def test_a_term_that_returns_something_else(returned, shapes):
    """Terms are called in the step, in validation, and for parameters."""
    message = ("loss term 'mine' returned", shapes, "must return TermValue", "losses/terms.py")
    nothing = {name: np.zeros((2, 3), np.int32) for name in ("tokens", "segment_ids")}

    def forward(params, batch, *, probes, dropout):
        return {"hidden": params["w"], "probes": {}}

    on_outputs = LossTerm("mine", lambda params, outputs, batch: returned, 1.0)
    on_params = LossTerm("mine", lambda params: returned, 1.0, on="params")
    with refused(*message):
        make_eval_step(forward, [on_outputs]).lower({"w": ONE}, nothing)
    with refused(*message):
        make_params_metrics([on_params]).lower({"w": ONE})
    state = types.SimpleNamespace(params={"w": ONE}, step=0, key=np.zeros(2, np.uint32))
    batches, hyper = {k: v[None] for k, v in nothing.items()}, {"learning_rate": ONE}
    for term in (on_outputs, on_params):
        step = make_train_step(forward, [term], None, {"w": True}).__wrapped__
        with refused(*message):
            step(state, batches, hyper)


def test_a_probe_that_a_term_forgot():
    def function(params, outputs, batch):
        return TermValue(jnp.sum(outputs["probes"]["norms"]["sum"]), ONE)

    def forward(params, batch, *, probes, dropout):
        return jax.eval_shape(lambda p: causal_lm.forward(LLAMA, p, batch, probes=probes), params)

    step = make_eval_step(forward, [LossTerm("mine", function, 1.0)]).__wrapped__
    message = ("loss term 'mine' reads 'norms'", r"LossTerm\(probes=", "losses/terms.py")
    with refused(*message):
        step(random_params(LLAMA), batch_of(LLAMA.vocab_size))
    with refused("'mine'", r"probes=\('norms',\)", "type Probe"):
        LossTerm("mine", function, 1.0, probes=("norms",))


@pytest.mark.parametrize(
    ("kind", "group", "message"),
    [
        ("losses", {"weight": 1.0}, ("losses.mine: unknown term 'mine'", "TERMS .losses/__init__")),
        ("monitors", {}, ("monitors.mine: unknown term 'mine'", "a probe probe=<its name>")),
        ("monitors", {"probe": "norm"}, ("monitors.mine: unknown probe 'norm'", "PROBES .probes/")),
        ("losses", {"weight": 1.0, "term": "bad"}, ("mine: term 'bad' returned .*a LossTerm",)),
    ],
)
def test_a_group_without_its_piece(monkeypatch, kind, group, message):
    monkeypatch.setitem(TERMS, "bad", lambda context: context.name)
    config = config_of("nucl_finetune", "smollm2_135m,text")
    with config.unlocked():
        config[kind].mine = ConfigDict(group)
    with refused(*message):
        make_terms(config[kind], LLAMA, None, kind == "losses")


def test_a_criterion_of_another_length(monkeypatch, tmp_path):
    monkeypatch.setitem(CRITERIA, "entropy", lambda ffn, rng: rng.normal(size=(16,)))
    config = config_of("prune", model=str(save_tiny(tmp_path / "model")), criterion="entropy")
    message = ("layer 0: criterion 'entropy' returned the shape .16,.", "24 neurons", "CRITERIA")
    with refused(*message):
        compress.run(config, tmp_path / "out")


@pytest.mark.parametrize("returned", [lambda m: m, lambda m: (m, None), lambda m: (m, {}, 1)])
def test_a_surgery_without_a_report(monkeypatch, tmp_path, returned):
    mine = dataclasses.replace(SURGERIES["fold"], function=lambda model, *_, **__: returned(model))
    monkeypatch.setitem(SURGERIES, "fold", mine)
    message = ("surgery 'fold' returned", r"must return \(model, report\)", "surgery/__init__")
    config = config_of("adapt", "fold", model=str(save_tiny(tmp_path / "model")))
    with refused(*message):
        compress.run(config, tmp_path / "out")
    with refused(*message):
        prepared(types.SimpleNamespace(prepare={"fold": {}}, seed=0), "model")


def test_an_adapter_that_no_kernel_is_read_from(monkeypatch):
    mine = adapters.Adapter("mine", {"gain": Leaf(("one",))}, product=lambda y, *_: y)
    monkeypatch.setitem(adapters.ADAPTERS, "mine", mine)
    leaves = {"kernel": np.ones((2, 2), np.float32), "gain": np.ones(1, np.float32)}
    with refused("adapter 'mine' needs kernel= or base=", "adapters/__init__"):
        effective_kernel(leaves)
