"""Every leaf of a `TrainState`: its place on a mesh, and bytes a device, of every preset."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from tiny_runs import refused

from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state, create_state, state_shardings
from ffn_heterogeneity.tree import flatten

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIMIZERS = ("adamw", "adafactor")
# Small leaves that no mesh cuts: vectors, small tables of encoders, tables of biases by distance.
WHOLE = "norm/|bias/|embed/(position|token_type)/|relative/"


def describe_state(model, settings, mesh) -> dict:
    params = causal_lm.abstract_params(model)
    leaves = declared(model, params)
    mask = partition.trainable_mask(leaves)
    optimizer = make_optimizer(settings, params, mask)
    state = abstract_state(params, optimizer, mask)
    return partition.describe_shardings(state, state_shardings(mesh, state, leaves))


# ---- every preset


def by_pattern(described: dict) -> dict[str, str]:
    """{path with * for its segment and slot: "dtype spec"}: the same in all layers, or it stops.

    Experts' kernels have an axis more than a dense layer's of the same name: two patterns.
    """
    patterns: dict[str, str] = {}
    for path, leaf in described.items():
        block = re.match(r".*segment_\d+/slot_\d+/", path)
        experts = block and any(other.startswith(f"{block[0]}ffn/router/") for other in described)
        pattern = re.sub(r"segment_\d+/slot_\d+", "*experts" if experts else "*", path)
        entry = f"{leaf['dtype']} {leaf['spec']}"
        assert patterns.setdefault(pattern, entry) == entry, f"{path}: layers differ"
    return patterns


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_large_leaves_are_cut_and_only_known_small_ones_are_whole(optimizer):
    """Every preset's state: kernels, embeddings and their moments are on both axes."""
    for config, _ in families.PRESETS.values():
        # RoBERTa's and GPT-2's vocabularies are odd: meshes that train them do not cut those.
        sizes = (2, 2, 2) if config.vocab_size % 2 == 0 else (4, 2, 1)
        mesh = partition.abstract_mesh(*sizes)
        described = describe_state(config, OptimizerConfig(optimizer), mesh)
        for path, entry in by_pattern(described).items():
            *_, last = path.split("/")
            bias = re.search(r"/(q|k|v|out|gate|up|down)/bias(/0/v)?$", path)
            if "/ffn/router/" in path:
                assert "'tensor'" not in entry and ("'fsdp'" in entry or last != "kernel"), path
            elif bias:
                # On the axis of its kernel's outputs.
                axis = "fsdp" if bias[1] in ("out", "down") else "tensor"
                assert f"(None, '{axis}')" in entry, (path, entry)
            elif re.search(r"(kernel|embedding)$", path):
                assert "'fsdp'" in entry and "'tensor'" in entry, (path, entry)
            elif last in ("v_row", "v_col") and not re.search(WHOLE, path):
                experts = "*experts/ffn/" in path
                one = ("'fsdp'" in entry) != ("'tensor'" in entry)
                assert "'tensor'" in entry if experts else one, (path, entry)
            else:
                assert "'" not in entry, (path, entry)


# ---- describe_shardings


def leaf(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_describe_by_hand():
    model = small_gemma2()
    tree = {
        "embed": {"embedding": leaf(32, 8)},
        "final_norm": {"scale": leaf(8, dtype=jnp.bfloat16)},
        "stack": {"segment_0": {"slot_0": {"ffn": {"down": {"kernel": leaf(3, 12, 8)}}}}},
    }
    leaves = declared(model, tree)
    placed = partition.shardings(partition.abstract_mesh(2, 4, 2), tree, leaves)
    found = partition.describe_shardings(tree, placed)
    keys = ("shape", "dtype", "spec", "bytes_per_device")
    down = ([3, 12, 8], "float32", "(None, 'tensor', 'fsdp')", 3 * 6 * 2 * 4)
    wanted = {"embed/embedding": ([32, 8], "float32", "('tensor', 'fsdp')", 16 * 2 * 4)}
    wanted["final_norm/scale"] = ([8], "bfloat16", "()", 16)
    wanted["stack/segment_0/slot_0/ffn/down/kernel"] = down
    assert found == {path: dict(zip(keys, x, strict=True)) for path, x in wanted.items()}
    assert json.loads(json.dumps(found)) == found
    placed = partition.shardings(partition.make_mesh(), tree, leaves)
    alone = partition.describe_shardings(tree, placed)
    sizes = {path: x.size * x.dtype.itemsize for path, x in flatten(tree).items()}
    assert {path: entry["bytes_per_device"] for path, entry in alone.items()} == sizes


def test_describe_refuses():
    mesh = partition.abstract_mesh(1, 3, 1)
    tree = {"embed": {"embedding": leaf(6, 8)}, "layers": []}
    with pytest.raises(partition.RuleError, match="axis 'd_model' of 8 cannot be cut into 3"):
        partition.shardings(mesh, tree, declared(small_gemma2(), tree))
    del tree["layers"]
    placed = {"embed": {"embedding": jax.sharding.NamedSharding(mesh, PartitionSpec(None, "fsdp"))}}
    with pytest.raises(ValueError, match=r"leaf 'embed/embedding' of shape \(6, 8\): "):
        partition.describe_shardings(tree, placed)
    refused("those of another tree", partition.describe_shardings, tree, placed["embed"])


@pytest.mark.slow
def test_a_mesh_of_eight_devices_holds_what_is_described():
    """The bytes that lie on each fake device, from a process that has eight."""
    own = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    own |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    own |= {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests")))}
    told = subprocess.check_output([sys.executable, __file__], env=os.environ | own)
    found = json.loads(told.splitlines()[-1])
    assert set(found) == set(OPTIMIZERS)
    for described, held in found.values():
        assert len(held) == 8 and len(described) > 70
        for device, leaves in held.items():
            assert leaves == described, device


def small_gemma2():
    """Two kinds of layers, every size a multiple of the mesh's."""
    config, _ = families.preset("gemma2_2b")
    layers = tuple(dataclasses.replace(layer, ffn_width=24) for layer in config.layers[:4])
    return dataclasses.replace(
        config, layers=layers, vocab_size=32, d_model=16, n_heads=4, n_kv_heads=2, head_dim=4
    )


def described_and_held(name: str) -> tuple[dict, dict]:
    """({path: bytes described}, {device: {path: bytes held}}) of a state on the real mesh."""
    mesh, model = partition.make_mesh(2, 2, 2), small_gemma2()
    settings = OptimizerConfig(name, min_dim_size_to_factor=8)
    params = causal_lm.init(model, jax.random.key(0))
    leaves = declared(model, params)
    mask = partition.trainable_mask(leaves)
    optimizer = make_optimizer(settings, params, mask)
    placed = state_shardings(mesh, abstract_state(params, optimizer, mask), leaves)
    state = create_state(params, optimizer, mask, shardings=placed)
    held: dict[str, dict[str, int]] = {}
    for path, array in flatten(state).items():
        for shard in array.addressable_shards:
            held.setdefault(str(shard.device), {})[path] = shard.data.nbytes
    described = describe_state(model, settings, partition.abstract_mesh(2, 2, 2))
    return {path: entry["bytes_per_device"] for path, entry in described.items()}, held


if __name__ == "__main__":
    print(json.dumps({name: described_and_held(name) for name in OPTIMIZERS}))
