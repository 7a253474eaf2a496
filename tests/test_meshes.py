"""The train step on meshes: lowered at full size for eight abstract devices, run on eight fakes."""

import dataclasses
import functools
import json
import math
import os
import sys

import jax
import jax.numpy as jnp
import pytest
from tiny_models import LLAMA, REPOSITORY, batch_of, random_params, tiny_of
from tiny_runs import run_program

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state, state_shardings
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.tree import flatten

GEMMA2 = tiny_of("gemma2", layers=4)


def lower_train_step(config, mesh):
    """The train step with NLL and NUCL, lowered for abstract arrays on a mesh."""
    params = causal_lm.abstract_params(config)
    trainable = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), params, trainable)
    state = abstract_state(params, optimizer, trainable)
    options = causal_lm.RunOptions(compute_dtype=jnp.bfloat16, remat="full")

    forward = functools.partial(causal_lm.forward, config, options=options)
    placed = (
        state_shardings(mesh, state, declared(config, params)),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    text = nll_term(TermContext("nll", model=config))
    terms = (text, nucl_term(TermContext("nucl", "alpha")))
    settings = {"accumulation": 2, "dropout": True, "shardings": placed}
    step = make_train_step(forward, terms, optimizer, trainable, **settings)
    shape = (2, 8, 2048)
    batch = {
        name: jax.ShapeDtypeStruct(shape, leaf.dtype)
        for name, leaf in batch_of(config.vocab_size).items()
    }
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    hyper = {"learning_rate": scalar, "alpha": scalar, "dropout": scalar}
    return step.trace(state, batch, hyper).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize(
    "name",
    [
        "gemma2_27b",
        pytest.param("llama3_1_405b", marks=pytest.mark.slow),
        pytest.param("gemma3_1b", marks=pytest.mark.slow),
    ],
)
def test_full_size_train_step_lowers_on_eight_abstract_devices(name):
    config, _ = families.preset(name)
    mesh = partition.abstract_mesh(2, 2, 2)
    text = lower_train_step(config, mesh).as_text()
    assert "num_partitions = 8" in text


def on_eight_devices(*programs: str, fast_compile: bool = True) -> dict:
    """The output of tests/mesh_program.py, from a separate process with eight fake devices."""
    env = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
    env["XLA_FLAGS"] = f"{os.getenv('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(fast_compile))
    program = REPOSITORY / "tests" / "mesh_program.py"
    done = run_program(sys.executable, program, *programs, **env)
    assert done.code == 0, done.err[-3000:]
    return json.loads(done.out.splitlines()[-1])


def check_meshes(errors: dict) -> None:
    for name, error in errors.items():
        assert max(error["loss"], error["gradient"]) <= 1e-7, (name, error)
        # Adafactor's steps do not depend on the gradient's size, so they amplify its rounding.
        assert error["params"] <= (1e-6 if "adafactor" in name else 1e-7), (name, error)


@pytest.fixture(scope="module")
def some_meshes() -> dict:
    return on_eight_devices("some_meshes", "encoders", "experts", "clusters", "generation", "five")


def test_meshes_train_as_one_device(some_meshes):
    errors = some_meshes["some_meshes"]
    assert len(errors) == 1
    check_meshes(errors)


def test_meshes_encode_as_one_device(some_meshes):
    errors = some_meshes["encoders"]
    assert len(errors) == 4 and max(errors.values()) <= 1e-7, errors


def test_meshes_train_experts_as_one_device(some_meshes):
    """With LoRA; no device gathers kernels over "tensor", neither of experts nor of neurons."""
    assert len(some_meshes["experts"]) == 3
    for name, result in some_meshes["experts"].items():
        assert result["loss"] <= 1e-12 and result["gradient"] <= 1e-12, (name, result)
        kernels = [shape for shape in result["gathered"] if len(shape) == 4 and shape[0] == 1]
        assert kernels, "nothing was gathered over fsdp"
        whole = (lambda s: s[1] == 8) if name.startswith("8") else (lambda s: 24 in s[2:])
        assert not [shape for shape in kernels if whole(shape)], (name, kernels)


def test_meshes_train_five_papers_as_one_device(some_meshes):
    errors = some_meshes["five"]
    assert errors["loss"] <= 1e-6 and errors["gradient"] <= 1e-5, errors


def test_meshes_cluster_as_one_device(some_meshes):
    """Every device holds 1/8 of the products of all pairs; the surgery uses all devices."""
    result = some_meshes["clusters"]
    _, report = SURGERIES["fuse"](Model(LLAMA, random_params(LLAMA), None, ""), {"ratio": 0.5})
    assert result["inertia_share"] == pytest.approx(report["inertia_share"], rel=1e-6)
    assert (result["differ"], result["shares"]) == (0, [[240, 30]] * 8)


def test_meshes_generate_as_one_device(some_meshes):
    """The same tokens from every mesh; (1, 2, 4) has more tensor shards than key heads."""
    for case, by_mesh in some_meshes["generation"].items():
        assert len(by_mesh) == 3 and len(by_mesh["None"]) == 5
        assert all(tokens == by_mesh["None"] for tokens in by_mesh.values()), (case, by_mesh)
    for family in ("gemma2", "t5"):
        drawn, greedy = (some_meshes["generation"][f"{family} {t}"]["None"] for t in ("1.0", "0.0"))
        assert drawn != greedy


@pytest.mark.slow
def test_every_mesh_trains_as_one_device():
    errors = on_eight_devices("meshes")["meshes"]
    assert len(errors) == 20
    check_meshes(errors)


def test_fake_devices_get_threads_of_their_own(monkeypatch):
    """With one thread per device, collectives can deadlock (seen under load)."""
    for flags, given, devices, threads in (
        ("", None, 0, None),
        ("--xla_cpu_enable_fast_math=false", None, 0, None),
        ("--xla_force_host_platform_device_count=8", None, 8, "32"),
        ("--xla_force_host_platform_device_count=8", "5", 8, "5"),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.delenv("NPROC", raising=False)
        if given:
            monkeypatch.setenv("NPROC", given)
        assert distributed.give_fake_devices_threads() == devices
        assert os.getenv("NPROC") == threads


@pytest.mark.slow
def test_what_moves_between_devices():
    """NUCL: two all-reduces of one number per row, no weights. FSDP: one layer's kernels at a time.

    Cross-entropy: the kernel gathered once, its gradient reduced once, however many chunks.
    """
    traffic = on_eight_devices("nucl", "fsdp", "nll", fast_compile=False)
    layers, m = 4, 64
    for name, moved in traffic["nucl"].items():
        if not name.startswith("ours"):
            continue
        assert {kind for kind, _ in moved} <= {"all-reduce"}, name
        rows = [shapes for _, shapes in moved if any(math.prod(s) > layers for s in shapes)]
        assert len(rows) <= 2, name
        assert all(len(s) == 1 and math.prod(s[0]) <= layers * m for s in rows), name
    assert len(traffic["nucl"]["listing (1, 8, 1)"]) == 5
    gathered = [s for kind, shapes in traffic["fsdp"] if kind == "all-gather" for s in shapes]
    stacked = [shape for shape in gathered if len(shape) == 3 and shape[0] == 6]
    assert [16, 24] in gathered and not stacked, gathered
    for sizes, tensor in (("(1, 8, 1)", 1), ("(2, 2, 2)", 2)):
        kernel_moves = [
            (kind, inside)
            for kind, shapes, inside in traffic["nll"][sizes]
            if any(math.prod(shape) == 64 // tensor * 32 for shape in shapes)
        ]
        assert not any(inside for _, inside in kernel_moves), kernel_moves
        assert [kind for kind, _ in kernel_moves].count("all-gather") == 1, kernel_moves
        assert len(kernel_moves) <= 2, kernel_moves


def test_adafactor_state_is_cut_as_its_parameter_without_the_reduced_axis():
    config = dataclasses.replace(GEMMA2, vocab_size=32)
    params = causal_lm.abstract_params(config)
    trainable = dict.fromkeys(flatten(params), True)
    settings = OptimizerConfig(name="adafactor", min_dim_size_to_factor=8)
    optimizer = make_optimizer(settings, params, trainable)
    mesh = partition.abstract_mesh(2, 2, 2)
    state = abstract_state(params, optimizer, trainable)
    placed = state_shardings(mesh, state, declared(config, params))
    specs = {
        jax.tree_util.keystr(path): (leaf.spec, shape.shape)
        for (path, leaf), (_, shape) in zip(
            jax.tree_util.tree_leaves_with_path(placed.opt_state),
            jax.tree_util.tree_leaves_with_path(state.opt_state),
            strict=True,
        )
    }
    for path, (spec, shape) in specs.items():
        if "ffn/down/kernel" not in path:
            continue
        if shape[1:] == (8,):  # [L, D]: the mean over the neurons
            assert spec == jax.sharding.PartitionSpec(None, "fsdp"), path
        if shape[1:] == (12,):
            assert spec == jax.sharding.PartitionSpec(None, "tensor"), path
    assert any(spec == jax.sharding.PartitionSpec(None, "fsdp") for spec, _ in specs.values())


def test_what_cannot_be_cut_is_named():
    params = causal_lm.abstract_params(GEMMA2)  # vocabulary of 29
    mesh = partition.abstract_mesh(1, 1, 8)
    with pytest.raises(partition.RuleError, match="'embed/embedding'.*29 cannot be cut into 8"):
        partition.shardings(mesh, params, declared(GEMMA2, params))
