"""The promised costs of the losses, and the benchmark that prints them."""

import dataclasses
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from ml_collections import ConfigDict
from tiny_models import config_of, tiny_of

from ffn_heterogeneity import papers
from ffn_heterogeneity.bench import cases, compressed, timing
from ffn_heterogeneity.bench.run import run
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.workdir import prepare_workdir
from ffn_heterogeneity.losses.nucl import nucl
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.report.paper import draw_all, gather
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.step import update_leaves
from ffn_heterogeneity.tree import flatten

PROMISED = (26, 2304, 576)


def test_paired_ratios_take_out_what_both_share():
    rng = np.random.default_rng(0)
    speed = rng.uniform(1, 3, 30)
    median, low, high = timing.paired_interval(1.02 * speed, speed)
    assert median == pytest.approx(1.02) and high - low < 1e-9
    loose = timing.ratio_interval(1.02 * speed, rng.permutation(speed))
    assert loose[2] - loose[1] > 0.1


@pytest.mark.parametrize("axis", [-1, -2])
def test_nucl_adds_under_10_megabytes_to_a_donated_update(axis):
    update = cases.donated_update(lambda w: nucl(w, "mstd", axis=axis))
    w = jax.ShapeDtypeStruct(PROMISED, jnp.float32)
    memory = update.lower(w, w, jax.ShapeDtypeStruct((), jnp.float32)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 10e6
    assert memory.alias_size_in_bytes == 4 * np.prod(PROMISED)  # really donated


def test_nucl_benchmark_prints_and_returns_its_figures(capsys):
    result = cases.time_nucl(ConfigDict({"repetitions": 3}), shape=(2, 32, 64))
    printed = capsys.readouterr().out
    assert "mstd listing" in printed and "mstd closed form" in printed
    ratio, low, high = result["ratios"]["mstd: listing / closed form"]
    assert low <= ratio <= high
    assert result["programs"]["row sum"]["median_ms"] > 0
    json.dumps(result)


def test_nll_benchmark_prints_and_returns_its_figures(capsys):
    result = cases.time_nll(ConfigDict({"repetitions": 2}), shape=(2, 16, 8, 64))
    assert "chunked / three products" in capsys.readouterr().out
    few = {f"1 target in {share}" for share in (10, 100)}
    assert set(result["programs"]) == {"plain", "chunked", "three products", *few}
    json.dumps(result)


def test_ratio_of_added_times_and_its_interval():
    base, rng = np.full(200, 1.0), np.random.default_rng(0)
    slow, fast = 5 + 0.01 * rng.normal(size=200), 2 + 0.01 * rng.normal(size=200)
    ratio, low, high = timing.ratio_interval(slow, fast, base)
    assert low < ratio < high and abs(ratio - 4) < 0.05 and high - low < 0.1
    assert timing.ratio_interval(slow, base, base)[0] == np.inf
    assert timing.ratio_interval(slow, fast)[0] == pytest.approx(2.5, rel=0.01)


def test_turns_are_interleaved_and_warmed_up():
    """The second run of each turn is timed."""
    calls = []

    def called(name):
        time.sleep(0.05 * (not calls or calls[-1] != name))
        calls.append(name)

    seconds = timing.take_turns({name: lambda name=name: called(name) for name in "ab"}, rounds=3)
    assert calls == ["a", "b"] + ["a", "a", "b", "b"] * 3
    assert all(len(times) == 3 and min(times) < 0.05 for times in seconds.values())


@pytest.mark.slow
def test_the_tail_of_a_step_costs_little_more_than_the_optimiser(capsys):
    """At most 1.6 times optax alone, and no memory for the norm of the update."""
    model = preset("smollm2_135m")[0]
    shapes = flatten(params := causal_lm.abstract_params(model))
    rng, trainable = np.random.default_rng(0), dict.fromkeys(shapes, True)
    grads, train = (
        {path: jnp.asarray(rng.standard_normal(x.shape, np.float32)) for path, x in shapes.items()}
        for _ in range(2)
    )
    clipped = OptimizerConfig(name="adamw", weight_decay=0.1, clip_norm=1.0)
    optimizer = make_optimizer(clipped, shapes, trainable, declared(model, params))
    rate = jnp.float32(1e-4)

    def tail(state, grads):
        more = {"loss": jnp.zeros(()), "learning_rate": rate}
        *state, metrics = update_leaves(optimizer, trainable, *state, grads, **more)
        return tuple(state), metrics

    def alone(state, grads):
        updates, opt_state = optimizer.update(grads, state[1], state[0], learning_rate=rate)
        return (optax.apply_updates(state[0], updates), opt_state), {}

    programs = {}
    for function in (tail, alone):
        leaves = jax.tree.map(jnp.copy, train)
        state, name = (leaves, optimizer.init(leaves)), function.__name__
        programs[name] = timing.compiled(jax.jit(function, donate_argnums=0), [state], grads)
    ratios = timing.ratios_of([("tail", "alone")])
    result = timing.compare("a step's tail", programs, 12, ratios)
    assert result["ratios"]["tail / alone"][0] <= 1.6
    assert "alone" in capsys.readouterr().out
    temporary = {name: row["temporary_mb"] for name, row in result["programs"].items()}
    assert temporary["tail"] <= 1.01 * temporary["alone"]


@pytest.mark.parametrize(
    ("family", "methods"),
    [
        ("bert", compressed.METHODS[2:]),
        ("llama", ("LoRA", "fusion")),
        ("switch", ("mlp_lora", "fusion")),
    ],
)
@pytest.mark.usefixtures("compiled_quickly")
def test_compressed_models_are_timed_beside_the_whole_one(family, methods, tmp_path):
    """Fewer operations and no more memory; LoRA's step needs no gradients of kernels."""
    shape = dataclasses.replace(tiny_of(family, 2), d_model=32)
    shape = shape.with_widths([256] * 2)
    if family == "switch":  # experts in every layer, or none is compressed
        sparse = tiny_of(family, 4).layers[1::2]
        shape = dataclasses.replace(
            shape,
            layers=tuple(dataclasses.replace(layer, ffn_width=256) for layer in sparse),
        )
    model, tmp_path = str(tmp_path / family), tmp_path / "run"
    save_pretrained(shape, causal_lm.init(shape, jax.random.key(0)), model)
    config = config_of("benchmark", model=model, batch=4, seq_len=8, repetitions=2)
    config.methods, config.name = methods, "fusion"
    config.optimizer = "sgd" if family == "switch" else "adamw"
    if family == "bert":
        config.calls = ("forward",)
    prepare_workdir(tmp_path, config.to_dict())
    result = run(config, epath.Path(tmp_path))
    programs = result["programs"]
    kinds = ("forward",) if family == "bert" else ("step", "forward")
    named = {f"{name}, {kind} / whole, {kind}" for name in methods for kind in kinds}
    assert set(result["ratios"]) == named
    for kind in kinds:
        dense = programs[f"whole, {kind}"]
        for name in {"fusion", "structured"} & {*methods}:
            assert programs[f"{name}, {kind}"]["gflop"] < 0.75 * dense["gflop"]
            assert programs[f"{name}, {kind}"]["temporary_mb"] <= 1.01 * dense["temporary_mb"]
    for name in {"LoRA", "mlp_lora"} & {*methods}:
        assert programs[f"{name}, step"]["gflop"] < programs["whole, step"]["gflop"]
        assert result["models"][name]["trainable"] < result["models"]["whole"]["trainable"]
    sizes = {name: row["parameters"] for name, row in result["models"].items()}
    assert "fusion" not in sizes or sizes["fusion"] < sizes["whole"]
    if family == "switch":  # MLP Fusion's Tables VII and VIII, from the run's directory
        paper = papers.load("mlp_fusion")
        drawn = {one.key: one for one in draw_all(paper, gather(paper, [str(tmp_path)])[1])}
        for key, program in (("table_7", "step"), ("table_8", "forward")):
            header, rows = drawn[key].header, [x for x in drawn[key].rows if "sgd" in str(x[1])]
            made = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
            assert set(made) == {"Full", "LoRA", "MLP Fusion"}
            ratio = result["ratios"][f"fusion, {program} / whole, {program}"][0]
            assert made["MLP Fusion"]["Runtime / Full"].mean == pytest.approx(ratio)
            assert made["Full"]["Params (M)"] == pytest.approx(sizes["whole"] / 1e6)
            gflop = programs[f"mlp_lora, {program}"]["gflop"]
            assert made["LoRA"]["TFLOPs/Model"] == pytest.approx(gflop / 1e3)


@pytest.mark.slow
def test_nucl_adds_an_eighth_of_the_listings_time():
    programs = cases.time_nucl(ConfigDict({"repetitions": 25}))["programs"]
    # The fastest round of each, because other load on the machine only adds time.
    fastest = {name: row["fastest_ms"] for name, row in programs.items()}
    listing = fastest["mstd listing"] - fastest["update alone"]
    closed = fastest["mstd closed form"] - fastest["update alone"]
    assert closed > 0 and listing >= 8 * closed, fastest
