"""Path rules: order, strictness in both directions, declarations of a full model."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny_runs import refused

from ffn_heterogeneity.losses.cross_entropy import KERNEL_SPECS
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.models.leaves import declared, outer_leaves
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.partition import RuleError, match_rules, trainable_mask
from ffn_heterogeneity.tree import Leaf, LeafError, data, flatten

PATHS = ["embed/embedding", "stack/a/ffn/down/kernel", "stack/a/ffn/down/bias"]


def full_config():
    """Every kind of leaf a decoder can have, and two segments."""
    layers = (LayerConfig(24), LayerConfig(24, window=4), LayerConfig(16), LayerConfig(20, "plain"))
    settings = {"vocab_size": 32, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    settings |= {"post_norms": True, "qk_norm": True, "attention_bias": True, "ffn_bias": True}
    return ModelConfig("gemma3", layers=layers, attention_out_bias=True, tied=False, **settings)


def matched(rules, default=2):
    return match_rules(rules, {path: (path,) for path in PATHS}, default)


def test_first_match_wins_and_order_is_kept():
    assert matched([(r"bias$", 0), (r"^stack/", 1)]) == {PATHS[0]: 2, PATHS[1]: 1, PATHS[2]: 0}


def test_layers_of_a_stacked_leaf_may_differ():
    names = {"stack/a/down": ("layers/0/down", "layers/1/down"), "embed": ("embed",)}
    assert match_rules([("^layers/1/", 3)], names, 1) == {"stack/a/down": (1, 3), "embed": 1}
    assert match_rules([("^stack/", 3)], names, 1) == {"stack/a/down": 3, "embed": 1}


def test_rule_without_leaf_is_named():
    with pytest.raises(RuleError, match=r"'\^stacc/' decides nothing: it matches none"):
        matched([(r"^stacc/", 0), (r"", 1)])


def test_shadowed_rule_is_named():
    with pytest.raises(RuleError, match="'bias' decides nothing: every leaf it matches"):
        matched([(r"", 0), (r"bias", 1)])


def test_bad_regex_is_named():
    refused(r"'\(' is not a regular expression", matched, [("(", 0)], error=RuleError)


def test_trainable_mask():
    leaves = {path: Leaf(("own",)) for path in PATHS} | {"stack/a/ffn/down/mask": data("own")}
    leaves["teacher/embed/embedding"] = Leaf(("own",))
    assert list(trainable_mask(leaves).values()) == [True, True, True, False, False]
    frozen = trainable_mask(leaves, freeze=("^embed/",))
    assert list(frozen.values()) == [False, True, True, False, False]
    only = trainable_mask(leaves, train_only=("bias$",))
    assert list(only.values()) == [False, False, True, False, False]
    refused("no leaf is left", trainable_mask, leaves, error=RuleError, freeze=("",))
    refused("decides nothing", trainable_mask, leaves, error=RuleError, freeze=("embedd$",))


def test_what_a_full_model_decays_and_where_it_is_cut():
    params = causal_lm.abstract_params(full_config())
    leaves = declared(full_config(), params)
    mesh, arrays = partition.abstract_mesh(2, 2, 2), flatten(params)
    specs = {
        path: partition.spec_of(leaf, arrays[path].shape, mesh) for path, leaf in leaves.items()
    }
    assert set(specs) == set(arrays)
    slot = "stack/segment_0/slot_0"
    assert specs[f"{slot}/ffn/down/kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs[f"{slot}/ffn/gate/kernel"] == PartitionSpec(None, "fsdp", "tensor")
    assert specs[f"{slot}/attention/q_norm/scale"] == PartitionSpec()
    assert specs["embed/embedding"] == PartitionSpec("tensor", "fsdp")
    for path, leaf in leaves.items():
        assert leaf.decays == path.endswith(("kernel", "embedding")), path
        if path.endswith("kernel"):
            assert [a for a in specs[path] if a], f"{path} is not sharded at all"


def test_the_cross_entropy_cuts_its_kernel_as_it_is_declared():
    leaves, mesh = outer_leaves(full_config()), partition.abstract_mesh(2, 2, 2)
    paths = ("embed/embedding", "head/kernel")
    specs = {path: partition.spec_of(leaves[path], (32, 32), mesh) for path in paths}
    assert specs == {"embed/embedding": KERNEL_SPECS["vd"], "head/kernel": KERNEL_SPECS["dv"]}


def test_an_unknown_leaf_is_refused():
    tree = {"stack": {"segment_0": {"slot_0": {"ffn": {"down": {"kernal": np.zeros((2, 3, 4))}}}}}}
    with pytest.raises(LeafError, match="nothing declares the leaf 'layers/0/ffn/down/kernal'"):
        declared(full_config(), tree)
    tree["stack"]["segment_0"]["slot_0"]["ffn"]["down"] = {"kernel": np.zeros((2, 3, 4, 5))}
    with pytest.raises(LeafError, match=r"\(2, 3, 4, 5\), its axes are \('layer', 'neurons'"):
        declared(full_config(), tree)


def test_what_changes_its_meaning_with_some_of_the_neurons():
    intact = (Leaf(("neurons", "d_model")), Leaf(("neurons",), sums=("d_model",)), Leaf(("rank",)))
    assert not any(leaf.depends_on("neurons") for leaf in intact)
    lost = (Leaf(("own",), numbers="neurons"), Leaf(("d_model",), sums=("neurons",)))
    lost += (Leaf(("half", "out")).beside(Leaf(("neurons", "d_model"))),)
    assert all(leaf.depends_on("neurons") for leaf in lost)


@pytest.mark.parametrize(
    ("sizes", "node_of"),
    [
        ((1, 32, 1), lambda data, fsdp, tensor: fsdp // 8),
        ((4, 8, 1), lambda data, fsdp, tensor: data),
        ((2, 8, 2), lambda data, fsdp, tensor: 2 * data + fsdp // 4),
        ((1, 4, 8), lambda data, fsdp, tensor: fsdp),
    ],
)
def test_inner_axes_stay_within_a_node(sizes, node_of):
    """32 GPUs of four nodes: JAX calls each node a slice, and its make_mesh takes one alone."""
    gpus = [
        SimpleNamespace(id=i, slice_index=i % 4, platform="gpu", device_kind="H100")
        for i in range(32)
    ]
    made = partition.arranged(sizes, gpus)
    assert made.shape == sizes and {one.id for one in made.ravel()} == {*range(32)}
    assert all(one.slice_index == node_of(*at) for at, one in np.ndenumerate(made))
    assert partition.arranged((8, 1, 1), gpus[::4]).shape == (8, 1, 1)  # one node
    assert partition.arranged((5, 1, 1), gpus[:5]).shape == (5, 1, 1)  # unequal parts of nodes


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
@pytest.mark.parametrize("sizes", [(1, 16, 4), (4, 16, 1), (1, 32, 2), (64, 1, 1)])
def test_axes_split_those_of_a_torus(kind, sizes):
    chips = [
        SimpleNamespace(
            id=8 * y + x,
            coords=(x, y, 0),
            core_on_chip=0,
            slice_index=0,
            process_index=4 * (y // 2) + x // 2,
            platform="tpu",
            device_kind=kind,
        )
        for y in range(8)
        for x in range(8)
    ]
    made = partition.arranged(sizes, chips)
    assert made.shape == sizes and {one.id for one in made.ravel()} == {*range(64)}


def test_mesh_larger_than_the_machine():
    refused("devices", partition.make_mesh, data=len(jax.devices()) + 1)
