"""Path rules: order, strictness in both directions, the shipped defaults."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ffn_heterogeneity.losses.cross_entropy import KERNEL_SPECS
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig, ModelConfig
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel.partition import DEFAULTS, RuleError, match_rules, trainable_mask
from ffn_heterogeneity.paths import flatten

PATHS = ["embed/embedding", "stack/a/ffn/down/kernel", "stack/a/ffn/down/bias"]


def full_config():
    """Every kind of leaf a decoder can have, and two segments."""
    layers = (LayerConfig(24), LayerConfig(24, window=4), LayerConfig(16), LayerConfig(20, "plain"))
    own = {"vocab_size": 32, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4}
    own |= {"post_norms": True, "qk_norm": True, "attention_bias": True, "ffn_bias": True}
    return ModelConfig("gemma3", layers=layers, attention_out_bias=True, tied=False, **own)


def test_first_match_wins_and_order_is_kept():
    rules = [(r"bias$", 0), (r"^stack/", 1), (r"", 2)]
    assert match_rules(rules, PATHS) == {PATHS[0]: 2, PATHS[1]: 1, PATHS[2]: 0}


def test_leaf_without_rule_is_named():
    with pytest.raises(RuleError, match="no rule covers the leaf 'embed/embedding'"):
        match_rules([(r"^stack/", 1)], PATHS)


def test_rule_without_leaf_is_named():
    with pytest.raises(RuleError, match=r"'\^stacc/' decides nothing: it matches none"):
        match_rules([(r"^stacc/", 0), (r"", 1)], PATHS)


def test_shadowed_rule_is_named():
    with pytest.raises(RuleError, match="'bias' decides nothing: every leaf it matches"):
        match_rules([(r"", 0), (r"bias", 1)], PATHS)


def test_rules_after_the_marker_may_match_nothing():
    matched = match_rules([(r"^embed", 0), DEFAULTS, (r"lora", 1), (r"", 2)], PATHS)
    assert matched == {PATHS[0]: 0, PATHS[1]: 2, PATHS[2]: 2}


def test_bad_regex_is_named():
    with pytest.raises(RuleError, match=r"'\(' is not a regular expression"):
        match_rules([("(", 0)], PATHS)


def test_trainable_mask():
    paths = [*PATHS, "stack/a/ffn/down/mask"]
    assert trainable_mask(paths) == dict(zip(paths, [True, True, True, False], strict=True))
    frozen = trainable_mask(paths, freeze=("^embed/",))
    assert [frozen[p] for p in paths] == [False, True, True, False]
    only = trainable_mask(paths, train_only=("bias$",))
    assert [only[p] for p in paths] == [False, False, True, False]
    with pytest.raises(RuleError, match="no leaf is left"):
        trainable_mask(PATHS, freeze=("",))
    with pytest.raises(RuleError, match="decides nothing"):
        trainable_mask(PATHS, freeze=("embedd$",))


def test_default_decay_rules_cover_a_full_model():
    paths = flatten(causal_lm.abstract_params(full_config()))
    decays = match_rules(partition.DEFAULT_DECAY_RULES, paths)
    for path, decay in decays.items():
        assert decay == path.endswith(("kernel", "embedding")), path
    for path in ("stack/a/ffn/neuron_scale", "head/lambda", "stack/a/attention/q/lora_scale"):
        assert match_rules(partition.DEFAULT_DECAY_RULES, [path]) == {path: False}
    assert match_rules(partition.DEFAULT_DECAY_RULES, ["s/ffn/gate/kernel"])["s/ffn/gate/kernel"]


def test_default_sharding_rules_cover_a_full_model():
    params = causal_lm.abstract_params(full_config())
    mesh = partition.make_mesh()
    specs = {p: s.spec for p, s in flatten(partition.shardings(mesh, params)).items()}
    assert set(specs) == set(flatten(params))
    slot = "stack/segment_0/slot_0"
    assert specs[f"{slot}/ffn/down/kernel"] == PartitionSpec(None, "tensor", "fsdp")
    assert specs[f"{slot}/ffn/gate/kernel"] == PartitionSpec(None, "fsdp", "tensor")
    assert specs[f"{slot}/attention/q_norm/scale"] == PartitionSpec()
    assert specs["embed/embedding"] == PartitionSpec("tensor", "fsdp")
    for path, leaf in flatten(params).items():
        if path.endswith("kernel"):
            assert [a for a in specs[path] if a], f"{path} is not sharded at all"
        assert len(specs[path]) <= leaf.ndim


def test_the_cross_entropy_cuts_its_kernel_as_the_rules_do():
    rules = match_rules(partition.DEFAULT_SHARDING_RULES, ["embed/embedding", "head/kernel"])
    assert rules == {"embed/embedding": KERNEL_SPECS["vd"], "head/kernel": KERNEL_SPECS["dv"]}


def test_an_unknown_leaf_has_no_sharding():
    tree = {"stack": {"segment_0": {"slot_0": {"ffn": {"down": {"kernal": np.zeros((2, 3, 4))}}}}}}
    with pytest.raises(RuleError, match="no rule covers the leaf 'stack/.*kernal'"):
        partition.shardings(partition.make_mesh(), tree)


def test_spec_longer_than_its_leaf():
    tree = {"x": np.zeros(3)}
    with pytest.raises(RuleError, match="names more axes"):
        partition.shardings(partition.make_mesh(), tree, [("x", PartitionSpec(None, "fsdp"))])
    with pytest.raises(RuleError, match="not in"):
        partition.shardings(partition.make_mesh(), tree, [("x", PartitionSpec("model"))])


def test_mesh_larger_than_the_machine():
    with pytest.raises(ValueError, match="devices"):
        partition.make_mesh(data=len(jax.devices()) + 1)
