"""Pieces of all five papers in one training step: any subset, on tiny models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    config_of,
    random_params,
    save_tiny_reader,
    starting_from,
    stopped_and_resumed,
    tiny_of,
)
from tiny_runs import refused, write_halves

import ffn_heterogeneity as fh
from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.bench.steps import benchmark_steps
from ffn_heterogeneity.evaluate.displacement import describe, displacements
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses.nucl import layer_statistics
from ffn_heterogeneity.models.linear import effective_kernel
from ffn_heterogeneity.models.stack import tree_segments, unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.fuse import METHODS
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.shared import Shared
from ffn_heterogeneity.train.source import starting_model
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
ALL = ("fuse", "dora", "macdrop", "p32", "nucl", "jreg", "layerwise")
RATE = 1000.0  # so large that a step is larger than the rounding of the weights
LOSSES = {"nucl", "jreg", "layerwise"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("five"))


def write(root):
    save_tiny_reader(root / "llama", "llama")
    write_halves(root, rows=48, held_out=48)
    return root


def config_for(files, pieces=ALL, **changes):
    settings = {
        "data__path": str(files / "rows.jsonl"),
        "data__validation_path": str(files / "held_out.jsonl"),
        "fields": "sentence",
        "lengths": (32,),
        "together": 1,
        "batch_size": 8,
        "steps": 4,
        "compute_dtype": "float32",
        "tensorboard": False,
    }
    if "fuse" in pieces:
        settings["fuse__ratio"] = 0.5
    if "macdrop" in pieces:
        settings["macdrop__k"] = 2
    settings |= {f"{name}__rank": 2 for name in ("lora", "dora") if name in pieces}
    return config_of(
        "five", ",".join((f"{files / 'llama'}", "labels", *pieces)), **(settings | changes)
    )


def mesh(*shape):
    shape = shape or (1, 1, 1)
    return partition.make_mesh(*shape, devices=jax.devices()[: np.prod(shape)])


def batch_of(seed=1):
    rng = np.random.default_rng(seed)
    segments = (np.arange(32) < rng.integers(6, 32, (8, 1))).astype(np.int32)
    tokens = rng.integers(3, 250, (8, 32)).astype(np.int32) * segments
    return {
        "tokens": tokens,
        "segment_ids": segments,
        "target": (np.arange(8) % 2).astype(np.float32),
        "valid": np.ones(8, bool),
    }


def subsets(count: int) -> list[tuple[str, ...]]:
    rng, drawn = np.random.default_rng(16), {}
    while len(drawn) < count:
        chosen = {name for name in (*ALL, "lora") if rng.random() < 0.5}
        chosen -= {"lora"} if "dora" in chosen else set()
        chosen -= {"layerwise"} if "fuse" not in chosen else set()
        drawn[tuple(name for name in (*ALL, "lora") if name in chosen) or ("head",)] = True
    return list(drawn)


@pytest.mark.parametrize("pieces", subsets(24), ids="+".join)
def test_any_subset(files, pieces):
    """The pieces alone determine losses, leaves, trained leaves and widths."""
    built = plan(read(config_for(files, pieces)), mesh())
    assert {term.name for term in built.terms} == {"classification", *LOSSES & {*pieces}}
    trains = {path for path, yes in built.trainable.items() if np.any(yes)}
    shapes = flatten(built.state.params)
    thin = bool({"lora", "dora"} & {*pieces})
    for path in trains:
        assert not path.startswith("teacher/") and "neuron_scale" not in path
        assert path.startswith("task_head/") or not thin or "lora_" in path or "dora_m" in path
    assert ("task_head/lambda" in shapes) == ("p32" in pieces)
    scaled = [path for path in shapes if path.endswith("neuron_scale")]
    assert bool(scaled) == ("fuse" in pieces)
    assert any(path.startswith("teacher/") for path in shapes) == ("layerwise" in pieces)
    # Only the massive layer keeps its width; for shapes, the first layer.
    widths = built.model.ffn_widths
    assert len(set(widths)) == (2 if "fuse" in pieces else 1) and widths[1] == widths[2]


def scans(jaxpr) -> int:
    count = 0
    for equation in jaxpr.eqns:
        inner = jax.tree.leaves(
            tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        count += equation.primitive.name == "scan"
        count += sum(scans(getattr(x, "jaxpr", x)) for x in inner
                     if hasattr(getattr(x, "jaxpr", x), "eqns"))  # fmt: skip
    return count


def test_all_pieces_run_in_the_scans_of_the_plain_model(files):
    """One scan over each run of equal layers, forward and backward; pieces add none."""
    counts = {}
    for pieces in (("fuse", "dora"), ("fuse", "dora", "macdrop"), ALL[:-1], ALL):
        built = plan(read(config_for(files, pieces)), mesh())

        def loss(params, batch, built=built):
            outputs = built.forward(params, batch)
            return sum(jnp.sum(x) for x in jax.tree.leaves(outputs) if x.dtype == jnp.float32)

        gradient = jax.make_jaxpr(jax.grad(loss, allow_int=True))
        counts[pieces] = scans(gradient(built.state.params, batch_of()).jaxpr)
    segments = len(tree_segments(built.state.params["stack"]))
    assert set(counts.values()) == {2 * segments}


def test_what_pieces_cost_is_timed_in_turns(files):
    config = config_of("benchmark", configs=("d/all.py:m", "d/few.py:m"), batch=4, seq_len=32,
                       repetitions=2)  # fmt: skip
    pieces = {"d/all.py:m": ("dora", "p32", "jreg"), "d/few.py:m": ("dora",)}
    results = benchmark_steps(config, lambda spec: config_for(files, pieces[spec]))
    (label, (_, low, high)) = next(iter(results["ratios"].items()))
    assert label == "all.py:m / few.py:m" and 0 < low <= high
    every, few = (results["programs"][name] for name in ("all.py:m", "few.py:m"))
    assert every["bytes"] > few["bytes"] > every["temporary_mb"]
    config.configs = config.configs[:1]
    refused("name two training configs", benchmark_steps, config, config_for)


def gradients(built, config, params, batch, weights=None):
    """{path: gradient}, from a step of SGD with only these losses and weights."""
    state = create_state(params, built.optimizer, built.trainable, shardings=built.shardings[0])
    hyper = {name: jnp.float32(x) for name, x in config.hyper(built.objective.terms)(0).items()}
    if weights is not None:
        hyper |= {name: jnp.float32(0) for name in hyper if name.startswith("losses.")}
        hyper |= {f"losses.{name}.weight": jnp.float32(x) for name, x in weights.items()}
    cut = {name: leaf[None] for name, leaf in batch.items()}
    after, metrics = built.train_step(state, cut, hyper)
    before, after = flatten(params), flatten(after.params)
    moved = {path: (np.float64(before[path]) - np.float64(after[path])) / RATE for path in before}
    return moved, {name: float(x) for name, x in metrics.items() if np.ndim(x) == 0}


def sgd(files, pieces=ALL, **changes):
    settings = {"optimizer__name": "sgd", "optimizer__learning_rate": RATE, "dropout": 0.0}
    settings |= {
        "optimizer__schedule": "constant",
        "optimizer__warmup_steps": 0,
        "lambda_rate": None,
    }
    config = config_for(files, pieces, **(settings | changes))
    config.optimizer.clip_norm = None
    return read(config)


def test_the_gradient_is_the_sum_of_its_parts(files):
    """One program, with the weights as inputs. A weight of 0 equals a loss that is left out."""
    config = sgd(files, macdrop__p0=0.0)
    model = starting_from(config)
    built = plan(config, mesh(), model)
    names = [term.name for term in built.terms]
    assert set(names) == {"classification", *LOSSES}
    weights = dict(zip(names, (1.0, 0.7, 1.3, 0.5), strict=True))
    total, _ = gradients(built, config, model.params, batch_of(), weights)
    parts = [
        gradients(built, config, model.params, batch_of(), {name: weights[name]})[0]
        for name in names
    ]
    for path, gradient in total.items():
        summed = sum(summand[path] for summand in parts)
        scale = max(np.abs(gradient).max(), 1e-3)
        assert np.abs(gradient - summed).max() <= 1e-5 * scale, path
    assert built.train_step._cache_size() == 1
    # Without nucl and jreg in the config, and with weights of 0.
    few = sgd(files, ("fuse", "dora", "macdrop", "p32", "layerwise"), macdrop__p0=0.0)
    fewer = plan(few, mesh(), model)
    few_weights = {"classification": 1.0, "layerwise": 0.5}
    one, _ = gradients(built, config, model.params, batch_of(), few_weights)
    other, _ = gradients(fewer, few, model.params, batch_of(), few_weights)
    for path, gradient in one.items():
        assert np.abs(gradient - other[path]).max() <= 1e-6 * max(np.abs(gradient).max(), 1), path


def test_at_the_first_step_every_number_is_that_of_its_own_command(files):
    """Entropy, jumps, massive neurons, P, and average pooling at lambda = 0."""
    config = sgd(files, ALL[:-1], macdrop__p0=0.0)
    model = starting_from(config)
    dense = fh.load_model(files / "llama")
    alone, report = SURGERIES["fuse"](dense, {"ratio": 0.5, "skip": "massive"})
    ours, expected = (flatten(unstack(one.params)) for one in (model, alone))
    scales = [path for path in expected if path.endswith("neuron_scale")]
    assert len(scales) == 2
    for path in expected:
        np.testing.assert_array_equal(ours[path], expected[path])
    massive = massive_weights(alone.config, alone.params)
    assert massive.layer == report["layer_index"]
    rows = next(leaf for path, leaf in ours.items() if path.endswith("gate/macdrop_rows"))
    assert sorted(massive.indices[:2]) == rows.tolist()
    batch = batch_of()
    built = plan(config, mesh(), model)
    _, seen = gradients(built, config, model.params, batch, {"classification": 1.0})
    statistics = layer_statistics(alone.params)
    assert seen["nucl"] == pytest.approx(sum(one["mstd"] for one in statistics), rel=1e-5)
    lengths = batch["segment_ids"].sum(1)
    rows = [row[:length] for row, length in zip(batch["tokens"], lengths, strict=True)]
    psi = describe(displacements(alone.config, alone.params, rows, progress=None))
    for name in ("zeta_L", "zeta_L-1"):
        wanted = psi["before_final_norm"][name]
        assert seen[f"jreg/{name}"] == pytest.approx(wanted, rel=1e-5)
    # lambda = 0 is the average of the layers.
    other = sgd(files, [piece for piece in ALL[:-1] if piece != "p32"], pooling="average")
    head = {name: leaf for name, leaf in model.params["task_head"].items() if name != "lambda"}
    shapes = starting_from(other)
    mean = plan(other, mesh(), shapes).forward({**model.params, "task_head": head}, batch)
    ours = built.forward(model.params, batch)
    np.testing.assert_allclose(ours["predictions"], mean["predictions"], rtol=1e-5, atol=1e-6)


def test_stopped_resumed_exported_and_planned(files, tmp_path, monkeypatch):
    config = config_for(files, checkpoint__every=2, export__weights="last")
    together = Shared(keep_model=False)
    training.run(config, tmp_path / "run", together)
    stopped_and_resumed(config, tmp_path, monkeypatch, together)
    assert together.compilations == 1
    leaves = flatten(unstack(fh.load_model(tmp_path / "run" / "model").params))
    assert [path for path in leaves if path.endswith("neuron_scale")]
    assert not [path for path in leaves if path.startswith("teacher")]
    plan = training.run(config_for(files, dry_run="h100:8"), tmp_path / "plan")
    assert plan["verdict"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_fusion_of_shapes_is_that_of_weights(family, method):
    """Gated blocks without biases, and plain blocks with biases."""
    config = tiny_of(family, layers=3)

    def shapes(params):
        model = Model(config, params, None, "")
        made, _ = SURGERIES["fuse"](model, {"method": method, "ratio": 0.5, "steps": 1})
        return made.params

    params = random_params(config)
    planned, made = flatten(jax.eval_shape(shapes, params)), flatten(shapes(params))
    assert {path: (x.shape, x.dtype) for path, x in planned.items()} == {
        path: (x.shape, x.dtype) for path, x in made.items()
    }


def test_a_mixtral_trains_with_all_pieces(files, tmp_path):
    """Finite losses; masks act in training alone, and on the massive expert alone."""
    save_tiny_reader(tmp_path / "llama", "mixtral")
    write_halves(tmp_path, rows=16, held_out=16)
    losses = ("nucl", "jreg", "load_balance")
    config = config_for(tmp_path, ("fuse", "dora", "macdrop", "p32", *losses), steps=2)
    results = training.run(config, tmp_path / "run")
    for name in ("classification", *losses):
        values = [results[when][f"validation/{name}"] for when in ("first", "final")]
        assert np.isfinite(values).all(), name
    assert "macdrop" not in str([*flatten(fh.load_model(tmp_path / "run/model").params)])
    fused, _ = SURGERIES["fuse"](
        fh.load_model(tmp_path / "llama"), {"ratio": 0.5, "skip": "massive"}
    )
    massive, kernels = massive_weights(fused.config, fused.params), []
    assert massive.expert
    params, hyper = starting_model(read(config).source, None).params, {"macdrop": 0.8}
    for train in (True, False):
        tree = unstack(REFRESHES["macdrop"]({})(params, 0, jax.random.key(0), hyper, train))
        up = tree["layers"][massive.layer]["ffn"]["up"]
        assert ("macdrop_keep" in up) == train
        kernels.append(np.asarray(effective_kernel(up)))
    changed = kernels[0] != kernels[1]
    assert np.flatnonzero(changed.any((1, 2))).tolist() == [massive.expert]
    assert np.flatnonzero(changed.any((0, 1))).tolist() == sorted(massive.indices[:2])
    taught = read(config_for(tmp_path, ("fuse", "layerwise")))
    experts_taught = [p for p in flatten(plan(taught, mesh()).params) if p.startswith("teacher/")]
    assert [path for path in experts_taught if path.endswith("/ffn/router/kernel")]
    dense = read(config_for(files, ("head", "load_balance")))
    refused("load_balance' needs a model with experts", plan, dense, mesh())


def test_a_massive_layer_that_moved_is_said(files, capsys):
    starting_model(read(config_for(files, macdrop__layer=1)).source, None)
    assert "moved on the way" not in capsys.readouterr().err
    starting_model(read(config_for(files, macdrop__layer=2)).source, None)
    assert "moved on the way (from 0): 1 for fuse, 2 for macdrop" in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "told"), [
    ("m,labels,layerwise", "layerwise needs fuse"),
    ("m,labels,nucle", "pieces of fuse, dora"),
    ("m", "<model>,<task>"),
])  # fmt: skip
def test_what_is_wrong_is_said(argument, told):
    refused(told, config_of, "five", argument)
