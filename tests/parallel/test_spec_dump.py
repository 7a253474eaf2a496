"""Every leaf's shape, dtype, place on a mesh and bytes a device, as committed in specs.json.

Covers the whole `TrainState` (parameters, the optimiser's state, step, key) of every preset under
AdamW and Adafactor, and of `configs/nucl_finetune.py`. A change of a rule, of a leaf's name or of
a moment's layout shows in the diff of that file. If it is meant:

    python tests/parallel/test_spec_dump.py --write
"""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.state import abstract_state, create_state, state_shardings
from ffn_heterogeneity.tree import flatten

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("specs.json")
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
OPTIMIZERS = ("adamw", "adafactor")
# Small leaves that are not sharded: vectors, and an encoder's small tables.
WHOLE = "norm/|bias/|embed/(position|token_type)/"


def abstract_mesh(data: int, fsdp: int, tensor: int) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), partition.MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def describe_state(model, settings, mesh, freeze=(), train_only=()) -> dict:
    params = causal_lm.abstract_params(model)
    leaves = declared(model, params)
    mask = partition.trainable_mask(leaves, freeze, train_only)
    optimizer = make_optimizer(settings, params, mask)
    state = abstract_state(params, optimizer, mask)
    return partition.describe_shardings(state, state_shardings(mesh, state, leaves))


# ---- the dump


def by_pattern(described: dict) -> dict[str, str]:
    """{path with * for its segment and slot: "dtype spec"}; an error if layers differ."""
    patterns: dict[str, str] = {}
    for path, leaf in described.items():
        pattern = re.sub(r"segment_\d+/slot_\d+", "*", path)
        entry = f"{leaf['dtype']} {leaf['spec']}"
        assert patterns.setdefault(pattern, entry) == entry, f"{path}: layers differ"
    return patterns


def dump_presets() -> dict:
    """{optimizer: {"totals": each preset's, "groups": presets that agree in every spec}}."""
    dump = {}
    for optimizer in OPTIMIZERS:
        totals, groups = {}, []
        for name in families.PRESETS:
            config, _ = families.preset(name)
            # RoBERTa's and GPT-2's vocabularies are odd, so they are not sharded.
            sizes = MESH if config.vocab_size % 2 == 0 else {"data": 4, "fsdp": 2, "tensor": 1}
            described = describe_state(config, OptimizerConfig(optimizer), abstract_mesh(**sizes))
            size = sum(leaf["bytes_per_device"] for leaf in described.values())
            totals[name] = f"{len(described)} leaves, {size} bytes a device"
            specs = by_pattern(described)
            group = next((group for group in groups if group["specs"] == specs), None)
            if group is None:
                groups.append(group := {"presets": [], "specs": specs})
            group["presets"].append(name)
        dump[optimizer] = {"totals": totals, "groups": groups}
    return dump


def dump_training_config() -> dict[str, str]:
    """{path: "shape dtype spec bytes"} of the shipped training config's state on eight devices."""
    path = REPOSITORY / "configs" / "nucl_finetune.py"
    config = runpy.run_path(str(path))["get_config"]()
    model = next(model for model, hub_id in families.PRESETS.values() if hub_id == config.model)
    sizes = {name: 8 if size == -1 else size for name, size in config.mesh.items()}
    chosen = (tuple(config.freeze), tuple(config.train_only))
    described = describe_state(model, read(config).optimizer, abstract_mesh(**sizes), *chosen)
    return {
        path: f"{leaf['shape']} {leaf['dtype']} {leaf['spec']} {leaf['bytes_per_device']}"
        for path, leaf in described.items()
    }


def make_dump() -> dict:
    return {"mesh": MESH, **dump_presets(), "nucl_finetune": dump_training_config()}


@pytest.fixture(scope="module")
def committed() -> dict:
    return json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def found() -> dict:
    return json.loads(json.dumps(make_dump()))


def differences(before, now, where="") -> list[str]:
    """One line for each place in which two dumps differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys((*before, *now))
        return [
            line
            for key in keys
            for line in differences(before.get(key), now.get(key), f"{where} {key}".strip())
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = zip(before, now, strict=True)
        return [
            line for i, (a, b) in enumerate(pairs) for line in differences(a, b, f"{where} {i}")
        ]
    return [] if before == now else [f"{where}: committed {before}, now {now}"]


@pytest.mark.parametrize("part", ["mesh", *OPTIMIZERS, "nucl_finetune"])
def test_specs_are_the_committed_ones(part, committed, found):
    changed = differences(committed[part], found[part])
    how = (
        f"{len(changed)} differ; if that is meant: python tests/parallel/test_spec_dump.py --write"
    )
    assert not changed, "\n".join([how, *changed])


def test_every_preset_is_in_the_dump_once(committed):
    assert set(committed) == {"mesh", *OPTIMIZERS, "nucl_finetune"}
    for optimizer in OPTIMIZERS:
        names = [name for group in committed[optimizer]["groups"] for name in group["presets"]]
        assert sorted(names) == sorted(families.PRESETS) == sorted(committed[optimizer]["totals"])


def test_large_leaves_are_cut_and_only_known_small_ones_are_whole(committed):
    """In the committed file, kernels, embeddings and their moments are sharded over both axes."""
    for optimizer in OPTIMIZERS:
        for group in committed[optimizer]["groups"]:
            for path, entry in group["specs"].items():
                *_, last = path.split("/")
                bias = re.search(r"/(q|k|v|out|gate|up|down)/bias(/0/v)?$", path)
                if bias:
                    # On the axis of its kernel's outputs.
                    axis = "fsdp" if bias[1] in ("out", "down") else "tensor"
                    assert f"(None, '{axis}')" in entry, (path, entry)
                elif re.search(r"(kernel|embedding)$", path):
                    assert "'fsdp'" in entry and "'tensor'" in entry, (path, entry)
                elif last in ("v_row", "v_col") and not re.search(WHOLE, path):
                    assert ("'fsdp'" in entry) != ("'tensor'" in entry), (path, entry)
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
    placed = partition.shardings(abstract_mesh(2, 4, 2), tree, leaves)
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
    mesh = abstract_mesh(1, 3, 1)
    tree = {"embed": {"embedding": leaf(6, 8)}, "layers": []}
    with pytest.raises(partition.RuleError, match="axis 'd_model' of 8 cannot be cut into 3"):
        partition.shardings(mesh, tree, declared(small_gemma2(), tree))
    del tree["layers"]
    placed = {"embed": {"embedding": jax.sharding.NamedSharding(mesh, PartitionSpec(None, "fsdp"))}}
    with pytest.raises(ValueError, match=r"leaf 'embed/embedding' of shape \(6, 8\): "):
        partition.describe_shardings(tree, placed)
    with pytest.raises(ValueError, match="those of another tree"):
        partition.describe_shardings(tree, placed["embed"])


@pytest.mark.slow
def test_a_mesh_of_eight_devices_holds_what_is_described():
    """The bytes on each fake device, from a process with eight devices."""
    own = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    own |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PYTHONPATH": str(REPOSITORY)}
    told = subprocess.check_output([sys.executable, __file__, "--held"], env=os.environ | own)
    found = json.loads(told.splitlines()[-1])
    assert set(found) == set(OPTIMIZERS)
    for described, held in found.values():
        assert len(held) == 8 and len(described) > 70
        for device, leaves in held.items():
            assert leaves == described, device


def small_gemma2():
    """Two kinds of layers; every size is a multiple of the mesh's."""
    config, _ = families.preset("gemma2_2b")
    layers = tuple(dataclasses.replace(layer, ffn_width=24) for layer in config.layers[:4])
    return dataclasses.replace(
        config, layers=layers, vocab_size=32, d_model=16, n_heads=4, n_kv_heads=2, head_dim=4
    )


def described_and_held(name: str) -> tuple[dict, dict]:
    """({path: bytes described}, {device: {path: bytes held}}) of a state on the real mesh."""
    mesh, model = partition.make_mesh(**MESH), small_gemma2()
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
    described = describe_state(model, settings, abstract_mesh(**MESH))
    return {path: entry["bytes_per_device"] for path, entry in described.items()}, held


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(json.dumps(make_dump(), indent=1) + "\n")
    elif sys.argv[1:] == ["--held"]:
        print(json.dumps({name: described_and_held(name) for name in OPTIMIZERS}))
    else:
        sys.exit(__doc__)
