"""Contracts of every config, family, preset, probe, loss term and criterion.

All of them are discovered, so that none can be added without meeting its contract. Those that need
an example (a term's arguments) fail here until the tables below have one. Adapters have theirs in
test_adapter_contract.py.
"""

import functools
import importlib
import pkgutil
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from ml_collections import config_flags
from tiny_models import (
    REPOSITORY,
    MeanForward,
    batch_of,
    config_of,
    random_params,
    tiny_of,
    with_experts,
)

import ffn_heterogeneity.probes
from ffn_heterogeneity.io.files import plain
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.io.rows import flatten_config
from ffn_heterogeneity.launch.help import comments_of
from ffn_heterogeneity.losses import TERMS
from ffn_heterogeneity.losses.terms import LossTerm, TermContext, TermValue
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.models.unused import unused_leaves
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.probes.base import NEEDS, Probe
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.criteria import CRITERIA, layer_scores
from ffn_heterogeneity.tree import flatten

# Nothing here is large.
pytestmark = pytest.mark.usefixtures("compiled_quickly")
CONFIGS = sorted(path.stem for path in (REPOSITORY / "configs").glob("*.py"))
LLAMA, GEMMA2 = tiny_of("llama", layers=3), tiny_of("gemma2", layers=4)
BERT = tiny_of("bert", layers=3)


def modules_of(package) -> list:
    return [
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.walk_packages(package.__path__)
    ]


def with_zeros(config, params) -> dict:
    """Parameters with a zero row of W, in another layer a zero neuron, and a zero embedding."""
    tree = unstack(jax.tree.map(np.array, params))
    tree["layers"][0]["ffn"]["down"]["kernel"][..., 2, :] = 0
    ffn = tree["layers"][1]["ffn"]
    ffn["down"]["kernel"][..., 5, :] = 0
    for name in {"gate", "up"} & set(ffn):
        ffn[name]["kernel"][..., 5] = 0
    tree["embed"]["embedding"][3] = 0
    return restack(config, tree)


def assert_finite(tree):
    for path, leaf in flatten(tree).items():
        assert np.isfinite(np.asarray(leaf)).all(), path


# ---- configs


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name):
    header = (REPOSITORY / "configs" / f"{name}.py").read_text().split('"""')[1]
    for word in ("Command:", "Hardware:", "Hours:"):
        assert word in header, f"the header of configs/{name}.py lacks {word}"
    command = re.search(r"Command:\s+python (scripts/\w+\.py)", header)
    assert command and (REPOSITORY / command[1]).is_file()
    config = config_of(name)
    names = flatten_config(config.to_dict())
    # The config of all papers has the settings of every piece; other logged values are free.
    set_by_users = [key for key in names if not key.startswith("monitors.")]
    assert 1 <= len(set_by_users) <= (90 if name == "five" else 60)
    assert plain(config.to_dict()), "plain data only: it is written to config.json"
    said = comments_of(str(REPOSITORY / "configs" / f"{name}.py"), config)
    bare = [key for key in names if not said[key]]
    assert not bare, f"--help has no comment for {bare}"
    for key in re.findall(r"--config\.([\w.]+)", header):
        assert key in names, f"the header of configs/{name}.py shows --config.{key}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_can_be_set_on_the_command_line(name):
    path = str(REPOSITORY / "configs" / f"{name}.py")
    values = {}
    for key in flatten_config(config_of(name).to_dict()):
        value = functools.reduce(
            lambda node, segment: node[segment], key.split("."), config_of(name)
        )
        values[key] = "1" if value is None else value
    argv = ["x", f"--config={path}", *(f"--config.{k}={v}" for k, v in values.items())]
    flag_values = flags.FlagValues()
    holder = config_flags.DEFINE_config_file("config", path, flag_values=flag_values, sys_argv=argv)
    flag_values(argv)
    before, after = (flatten_config(plain(c.to_dict())) for c in (config_of(name), holder.value))
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert after[key] in ((1, 1.0, "1") if value is None else (value,)), key


# ---- families and presets


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_family(name):
    config = tiny_of(name)
    params = random_params(config)
    assert unused_leaves(config, params) == ()
    batch = batch_of(config.vocab_size, encoder=7 * (config.kind == "encoder_decoder"))

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(params):
        outputs = causal_lm.forward(config, params, batch)
        states = outputs["hidden"]
        if config.lm_head:
            states = causal_lm.logits(config, params, states)
        pooled = jnp.sum(outputs["pooled"]) if config.pooler else 0
        return jnp.sum(jax.nn.log_softmax(states)[..., 0]) + pooled

    value, gradient = loss_and_gradient(params)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))
    for result in ((value, gradient), loss_and_gradient(with_zeros(config, params))):
        assert_finite(result)
    again = restack(config, unstack(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    initial = causal_lm.abstract_params(config)
    assert jax.tree.map(lambda x: x.shape, initial) == jax.tree.map(jnp.shape, params)


# All in `make test-all`, otherwise the first and the last of each family.
ENDS = {list(one.presets)[end] for one in families.FAMILIES.values() for end in (0, -1)}
EACH = [x if x in ENDS else pytest.param(x, marks=pytest.mark.slow) for x in families.PRESETS]


@pytest.mark.parametrize("name", EACH)
def test_preset(name):
    config, hub_id = families.preset(name)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", hub_id)
    abstract = causal_lm.abstract_params(config)
    assert all(partition.trainable_mask(declared(config, abstract)).values())
    leaves = flatten(jax.eval_shape(unstack, abstract))
    assert {path: leaf.shape for path, leaf in leaves.items()} == families.expected_shapes(config)


# ---- probes

PROBES = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in modules_of(ffn_heterogeneity.probes)
    for name, value in vars(module).items()
    if isinstance(value, Probe)
}


def test_probes_are_found_and_distinct():
    assert PROBES
    names = [probe.name for probe in {id(probe): probe for probe in PROBES.values()}.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("config", [GEMMA2, BERT], ids=["gemma2", "bert"])
def test_probe(name, config):
    probe = PROBES[name]
    assert probe.name and probe.needs <= NEEDS
    batch = batch_of(config.vocab_size)
    batch["tokens"][0, 0] = 3  # the zero embedding

    def results(params, batch):
        outputs = causal_lm.forward(config, params, batch, probes=(probe,))
        return outputs["probes"][probe.name]

    @jax.jit
    def results_and_gradient(params, batch):
        def total(params):
            seen = results(params, batch)
            return sum(jnp.sum(x) for x in jax.tree.leaves(seen)), seen

        gradient, seen = jax.grad(total, has_aux=True)(params)
        return seen, gradient

    def only(rows):
        live = np.isin(np.arange(3), rows)[:, None]
        return {**batch, "segment_ids": np.where(live, batch["segment_ids"], 0)}

    for params in (random_params(config), with_zeros(config, random_params(config))):
        seen, gradient = results_and_gradient(params, batch)
        assert jax.tree.leaves(seen)
        for path, leaf in flatten(seen).items():
            assert leaf.shape[0] == config.n_layers, path
            assert jnp.issubdtype(leaf.dtype, jnp.floating) or probe.kind == "example", path
        assert_finite((seen, gradient))
        parts = [results_and_gradient(params, only(rows))[0] for rows in ([0], [1, 2])]
        if probe.kind == "sum":  # the parts of a batch add up to the whole
            combined = jax.tree.map(jnp.add, *parts)
        else:  # a row's result does not depend on the other rows
            combined = jax.tree.map(lambda a, b: jnp.concatenate([a[:, :1], b[:, 1:]], 1), *parts)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
        jax.tree.map(close, seen, combined)
        # Padding says nothing.
        tokens = np.where(batch["segment_ids"] == 0, 5, batch["tokens"])
        other, _ = results_and_gradient(params, {**batch, "tokens": tokens})
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), seen, other
        )


# ---- loss terms

# Every term is tried with its defaults, and with these settings.
SETTINGS = {
    "jreg": [{"alpha": 0.0, "final_norm": True, "positions": "last"}],
    "layerwise": [{"states": "ffn", "sum_hidden": True}],
    "nll": [{"reduction": "sum"}],
    "load_balance": [{"pooled": True}],
    "size": [{"target": 0.5}],
    "nucl": [
        {"variant": "ent"},
        {"variant": "gini"},
        {"targets": ("ffn_in_linear", "ffn_in_gated", "attention_out")},
        {"variant": "ent", "targets": ("ffn_in_linear",), "axis": "outputs", "layers": [1]},
    ],
}
CALLS = [(name, {}, "gemma2") for name in TERMS]
CALLS += [(name, own, "llama") for name in TERMS for own in ({}, *SETTINGS.get(name, ()))]


def evaluate_term(term, config, params, batch) -> TermValue:
    if term.on == "params":
        return term.function(params)
    forward = MeanForward(config, 3)
    given = {"per_layer": term.per_layer(params, batch, forward)} if term.per_layer else {}
    outputs = forward(params, batch, probes=term.probes, **given)
    return term.function(params, outputs, batch)


def taught_params(config, seed=0):
    """Random parameters, with other blocks as a teacher."""
    other = random_params(config, seed=7)["stack"]
    for name, slots in other.items():
        other[name] = {slot: {"ffn": tree["ffn"]} for slot, tree in slots.items()}
    return random_params(config, seed=seed) | {"teacher": {"stack": other}}


# The part of the model that a term reads.
PREPARED = {"size": "gates", "score_norm": "scores"}


def params_of(name, config, seed=0):
    """Random parameters with all leaves that the term reads, and random multipliers."""
    params = taught_params(config, seed)
    if name in PREPARED:
        model, key = Model(config, params, None, ""), jax.random.key(seed)
        params = SURGERIES[PREPARED[name]](model, {"targets": "attention/"}, key=key)[0].params
        spread = jax.random.normal(key, (2,)) * np.float32(0.1)
        params = jax.tree.map_with_path(
            lambda path, x: x + spread if "multipliers" in str(path) else x, params
        )
    return params


@pytest.mark.parametrize(("name", "settings", "family"), CALLS, ids=str)
def test_term(name, settings, family):
    config = {"llama": LLAMA, "gemma2": GEMMA2}[family]
    config = with_experts(config) if name in ("load_balance", "router_z") else config
    term = TERMS[name](TermContext("its_name", "its.weight", config), **settings)
    assert isinstance(term, LossTerm) and (term.name, term.weight) == ("its_name", "its.weight")
    batch, params = batch_of(config.vocab_size), params_of(name, config)
    batch |= {"target": np.ones(3, np.float32), "valid": np.ones(3, bool)}

    @jax.jit
    def evaluate(params, batch):
        def loss(params):
            value = evaluate_term(term, config, params, batch)
            return value.total / jnp.maximum(value.denominator, 1), value

        return jax.grad(loss, has_aux=True)(params)[::-1]

    value, gradient = evaluate(params, batch)
    assert value.total.shape == value.denominator.shape == ()
    assert value.total.dtype == value.denominator.dtype == jnp.float32
    assert value.denominator > 0 and value.total != 0
    other, _ = evaluate(params_of(name, config, seed=1), batch)
    assert other.denominator == value.denominator, "denominators must not depend on parameters"
    assert other.total != value.total
    for tree in (params, with_zeros(config, params), jax.tree.map(jnp.zeros_like, params)):
        assert_finite(evaluate(tree, batch))
    active = {path: bool(np.any(leaf)) for path, leaf in flatten(gradient).items()}
    if term.on == "params":
        for pattern in term.targets:
            assert any(active[path] for path in active if re.search(pattern, path)), pattern
        for path, acts in active.items():
            assert not acts or any(re.search(pattern, path) for pattern in term.targets), path
    else:
        # A term may read only the layers, before the final norm and the head.
        assert all(acts for path, acts in active.items() if path.startswith(("stack/", "embed/")))
        nothing = {**batch, "valid": np.zeros_like(batch["valid"])}
        nothing = {**nothing, "loss_mask": np.zeros_like(batch["loss_mask"])}
        nothing["segment_ids"] = np.zeros_like(batch["segment_ids"])
        empty, _ = evaluate(params, nothing)
        assert empty.total == 0 and empty.denominator == 0, "a batch without targets adds nothing"


# ---- surgery


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_criterion(name, dtype):
    rng = np.random.default_rng(0)
    ffn = {
        "gate": {"kernel": rng.normal(size=(9, 12)).astype(dtype)},
        "up": {"kernel": rng.normal(size=(9, 12)).astype(dtype)},
        "down": {"kernel": rng.normal(size=(12, 9)).astype(dtype)},
    }
    ffn["down"]["kernel"][4] = 0
    seen = {key: rng.random(12) for key in ("bos", "mean", "signed")}
    seen |= {"norm": 10 + rng.random(12), "tokens": 50}
    arguments = {"layer": 0, "activations": seen}
    before = jax.tree.map(np.copy, ffn)
    scores = layer_scores(name, ffn, **arguments)
    assert scores.shape == (12,) and scores.dtype == np.float64
    assert np.isfinite(np.delete(scores, 4)).all() and not np.isnan(scores[4])
    np.testing.assert_array_equal(scores, layer_scores(name, ffn, **arguments))
    jax.tree.map(np.testing.assert_array_equal, ffn, before)
    assert len(set(scores)) == 12, "this is no constant"
    alive = np.delete(np.arange(12), 4)
    reverse = layer_scores(name, ffn, **arguments, reverse=True)
    assert np.argsort(reverse[alive]).tolist() == np.argsort(scores[alive])[::-1].tolist()
    listed = (REPOSITORY / "configs" / "prune.py").read_text()
    assert re.search(rf"#.*\b{name}\b", listed), "configs/prune.py names every criterion"
