"""The train step on meshes: lowered at full size for eight abstract devices, run on eight fakes."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import REPOSITORY, batch_of, random_params, tiny_of

from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.train import partition
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state, create_state, state_shardings
from ffn_heterogeneity.train.step import make_train_step

GEMMA2 = tiny_of("gemma2", layers=4)


def lower_train_step(config, mesh):
    """The train step with NLL and NUCL, lowered for abstract arrays on a mesh."""
    params = causal_lm.abstract_params(config)
    trainable = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig(name="adamw"), params, trainable)
    state = abstract_state(params, optimizer, trainable)
    options = causal_lm.RunOptions(compute_dtype=jnp.bfloat16, remat="full")

    def forward(params, batch, *, probes, dropout):
        return causal_lm.forward(
            config, params, batch, options=options, probes=probes, dropout=dropout
        )

    placed = (
        state_shardings(mesh, state),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    step = make_train_step(
        forward, (nll_term(config), nucl_term("mstd")), optimizer, trainable,
        accumulation=2, dropout=True, shardings=placed,
    )  # fmt: skip
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
        "llama3_1_405b",
        pytest.param("gemma3_1b", marks=pytest.mark.slow),
    ],
)
def test_full_size_train_step_lowers_on_eight_abstract_devices(name):
    config, _ = families.preset(name)
    mesh = jax.sharding.AbstractMesh(
        (2, 2, 2), partition.MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    text = lower_train_step(config, mesh).as_text()
    assert "num_partitions = 8" in text


EIGHT_DEVICES = """
import sys
sys.path.insert(0, {tests!r})
import test_meshes
test_meshes.train_on_meshes()
"""


def train_on_meshes():
    """Losses of three steps on one device and on meshes of eight; run where there are eight."""
    config = dataclasses.replace(GEMMA2, vocab_size=32)
    assert jax.device_count() == 8
    results = {}
    for shape in ((1, 1, 1), (2, 2, 2)):
        mesh = partition.make_mesh(*shape)
        params = random_params(config)
        trainable = dict.fromkeys(flatten(params), True)
        optimizer = make_optimizer(OptimizerConfig(name="adamw"), params, trainable)
        state = create_state(params, optimizer, trainable)

        def forward(params, batch, *, probes, dropout):
            return causal_lm.forward(config, params, batch, probes=probes, dropout=dropout)

        placed = (
            state_shardings(mesh, state),
            partition.batch_sharding(mesh),
            partition.replicated(mesh),
        )
        step = make_train_step(
            forward, (nll_term(config), nucl_term("mstd")), optimizer, trainable, shardings=placed
        )
        state = jax.device_put(state, placed[0])
        hyper = {"learning_rate": jnp.float32(1e-2), "alpha": jnp.float32(0.1)}
        losses = []
        for i in range(3):
            batch = batch_of(config.vocab_size, rows=8, seed=i)
            batch = {name: leaf[None] for name, leaf in batch.items()}
            state, metrics = step(state, jax.device_put(batch, placed[1]), hyper)
            losses.append(float(metrics["loss"]))
        results[shape] = losses
        down = state.params["stack"]["segment_0"]["slot_0"]["ffn"]["down"]["kernel"]
        assert len(down.sharding.device_set) == np.prod(shape)
        assert down.addressable_shards[0].data.size * shape[1] * shape[2] == down.size
    print("LOSSES", results)


def test_eight_devices_train_as_one():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    code = EIGHT_DEVICES.format(tests=str(REPOSITORY / "tests"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shown = done.stdout.split("LOSSES ")[1]
    runs = [[float(x) for x in part.split(",")] for part in re.findall(r"\[(.*?)\]", shown)]
    assert len(runs) == 2 and len(runs[0]) == 3
    assert runs[0][0] != runs[0][1] != runs[0][2]
    for losses in runs[1:]:
        np.testing.assert_allclose(losses, runs[0], rtol=1e-6)
