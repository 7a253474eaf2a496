"""Runs that begin with a surgery that changes shapes, or with a teacher: planned,
trained, stopped, resumed, exported."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from test_adapted import config_for
from tiny_models import LLAMA, random_params, stopped_and_resumed
from tiny_runs import refused

from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermValue
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import SURGERIES, Surgery
from ffn_heterogeneity.surgery.adapt import Nothing
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.train import dry_run, fit
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
# The top two of four layers, in every way wider than the student.
TOP = dataclasses.replace(LLAMA, d_model=32, head_dim=8, layers=(LayerConfig(40),) * 2)


def prepared_with(files, **changes):
    config = config_for(*files, checkpoint__every=2, **changes)
    with config.unlocked():
        config.prepare, config.own = ("own",), {}
    return config


def add_surgery(monkeypatch, function):
    monkeypatch.setitem(SURGERIES, "own", Surgery("own", function, Nothing, abstract=True))


def built_of(config):
    return plan(read(config), partition.make_mesh(**config.mesh))


@pytest.mark.parametrize("widths", [(24, 24, 12, 12), (24, 24)], ids=["narrower", "shorter"])
def test_another_shape_from_a_surgery(files, tmp_path, monkeypatch, widths):
    def reshape(model, settings, data=None, key=None):
        config = dataclasses.replace(model.config, layers=model.config.layers[: len(widths)])
        config, tree = config.with_widths(widths), unstack(model.params)
        layers = zip(tree["layers"], widths, strict=False)
        layers = [
            one | {"ffn": take_neurons(LLAMA, Place(i, None, "ffn"), one["ffn"], np.arange(m))}
            for i, (one, m) in enumerate(layers)
        ]
        params = restack(config, tree | {"layers": layers})
        return dataclasses.replace(model, config=config, params=params), {}

    add_surgery(monkeypatch, reshape)
    config = prepared_with(files)
    assert LLAMA.ffn_widths == (24,) * 4
    planned = built_of(config).state.params
    results = training.run(config, tmp_path / "run", together := Shared(keep_model=False))
    assert load_model(tmp_path / "run/model").config.ffn_widths == widths
    assert results["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(planned))
    assert results["final"]["validation/nll"] < results["first"]["validation/nll"]
    plan = training.run(prepared_with(files, dry_run="here"), tmp_path / "plan")
    assert plan["parameters"] == results["parameters"] and plan["compiled"]
    stopped_and_resumed(config, tmp_path, monkeypatch, together)


# ---- a teacher next to the model


def teach(model, settings, data=None, key=None):
    teacher = jax.tree.map(jnp.asarray, random_params(TOP, seed=5))
    return dataclasses.replace(model, params={**model.params, "teacher": teacher}), {}


def likeness(context):
    """Mean squared difference between the tokens' similarities in the student and the teacher."""

    def gram(hidden):
        unit = hidden / jnp.linalg.norm(hidden, axis=-1, keepdims=True)
        return jnp.einsum("btd,bsd->bts", unit, unit)

    def function(params, outputs, batch):
        taught = causal_lm.forward(TOP, params["teacher"], batch)["hidden"]
        error = (gram(outputs["hidden"]) - gram(jax.lax.stop_gradient(taught))) ** 2
        return TermValue(jnp.sum(error), jnp.float32(error.size))

    return LossTerm(context.name, function, context.weight)


@pytest.fixture
def taught(files, monkeypatch):
    add_surgery(monkeypatch, teach)
    monkeypatch.setitem(TERMS, "likeness", likeness)

    def config(weight=5.0, **changes):
        made = prepared_with(files, **changes)
        with made.unlocked():
            made.losses.likeness = {"weight": weight}
        return made

    return config


def test_a_teacher_is_read_frozen_sealed_and_never_exported(taught, files, tmp_path, monkeypatch):
    size = sum(leaf.size for leaf in jax.tree.leaves(random_params(TOP)))
    built, alone = built_of(taught()), built_of(config_for(*files))
    paths = {path for path in flatten(built.state.params) if path.startswith("teacher/")}
    assert len(paths) == len(flatten(random_params(TOP)))
    assert not any(built.trainable[path] for path in paths)
    assert set(built.trainable) - paths == set(alone.trainable)
    held, without = fit.state_bytes(built), fit.state_bytes(alone)
    assert held.pop("frozen parameters") == 4 * size and without.pop("frozen parameters") == 0
    assert held == without, "no moment, no gradient"
    assert dry_run._weight_bytes(built) == dry_run._weight_bytes(alone) + 4 * size, "it is read"
    plan = training.run(taught(dry_run="here"), tmp_path / "plan")
    results = training.run(taught(), tmp_path / "run", together := Shared(keep_model=False))
    student = sum(leaf.size for leaf in jax.tree.leaves(random_params(LLAMA)))
    for facts in (plan, results):
        assert facts["parameters"] == facts["trainable_parameters"] == student
    first, last = results["first"], results["final"]
    assert last["validation/likeness"] < first["validation/likeness"], "the student moves"
    model = tmp_path / "run/model"
    assert "teacher" not in load_model(model).params
    assert "teacher" not in (model / "config.json").read_text()
    for file in model.rglob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            assert not [name for name in tensors.keys() if "teacher" in name]  # noqa: SIM118
    stopped_and_resumed(taught(), tmp_path, monkeypatch, together)


def test_no_pattern_sees_a_teacher(taught):
    frozen = built_of(taught(freeze=(r"ffn/up",)))
    assert not frozen.trainable["stack/segment_0/slot_0/ffn/up/kernel"]
    for changes in ({"freeze": ("^teacher/",)}, {"train_only": ("^teacher/",)}):
        refused("matches none", built_of, taught(**changes), error=partition.RuleError)
    refused("never used .*teacher/embed", built_of, taught(weight=None))


def test_a_teacher_is_cut_over_a_mesh_as_a_model(taught):
    built = plan(read(taught()), partition.abstract_mesh(1, 2, 2))
    placed = flatten(built.shardings[0].params)
    for path in ("embed/embedding", "stack/segment_0/slot_0/ffn/down/kernel"):
        assert placed[f"teacher/{path}"].spec == placed[path].spec
