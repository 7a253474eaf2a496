"""Leaves of experts, [E, in, out]: code that uses axis names, where positions would be wrong.

Leaves are declared, so one that an operation does not support is an error.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, WIDE, batch_of, random_params, tiny_of, with_experts
from tiny_runs import refused

from ffn_heterogeneity.adapters import nf4
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.gguf.export import save_gguf
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.io.hf.structure import fold
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.nucl import nucl, nucl_term
from ffn_heterogeneity.losses.nucl_exact import distributions, row_statistics
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.models.config import ConfigError, ModelConfig
from ffn_heterogeneity.models.leaves import Place, count_parameters, declared
from ffn_heterogeneity.models.stack import layer_names, restack, unstack
from ffn_heterogeneity.models.walk import ffn_blocks, linears
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery.adapt import insert_lora, insert_macdrop
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.tree import LeafError, flatten, unflatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
E, L, M, D = 4, 4, 24, 16  # as many experts as layers, so that a mistaken axis has the right size


def all_differ(leaf) -> bool:
    """True if no two matrices of [L, E, n, m] are alike."""
    return len({np.asarray(x).tobytes() for row in leaf for x in row}) == L * E


SPARSE = with_experts()
WHOLE = Place(1, None, "ffn")


def tree_of(config: ModelConfig = SPARSE) -> dict:
    return jax.tree.map(np.asarray, unstack(random_params(config)))


def test_what_is_declared_is_what_a_fresh_model_has():
    params = causal_lm.init(SPARSE, jax.random.key(0))
    up = params["stack"]["segment_0"]["slot_0"]["ffn"]["up"]["kernel"]
    assert up.shape == (L, E, D, M) and all_differ(up)
    sizes = {path: leaf.size for path, leaf in flatten(params).items()}
    assert count_parameters(SPARSE)["total"] == sum(sizes.values())
    mixed = dataclasses.replace(LLAMA, layers=(*LLAMA.layers[:2], *SPARSE.layers[2:]))
    refused("layer 0: experts=0", with_experts, error=ConfigError, experts=0)
    assert set(causal_lm.init(mixed, jax.random.key(0))["stack"]) == {"segment_0", "segment_1"}


def test_a_layer_loses_neurons_and_no_experts():
    ffn, survivors = tree_of()["layers"][1]["ffn"], np.arange(E)
    ffn["neuron_scale"] = np.ones((E, M), np.float32)
    taken = take_neurons(SPARSE, WHOLE, ffn, survivors)
    np.testing.assert_array_equal(taken["up"]["kernel"], ffn["up"]["kernel"][:, :, survivors])
    np.testing.assert_array_equal(taken["down"]["kernel"], ffn["down"]["kernel"][:, survivors])
    assert taken["neuron_scale"].shape == (E, E)
    assert taken["router"]["kernel"] is ffn["router"]["kernel"]


def test_the_factors_of_experts_are_folded_into_their_own_rows():
    """m = d_model = E: every wrong way to broadcast P has a legal shape, too."""
    config = dataclasses.replace(
        with_experts(experts=D), layers=with_experts(experts=D).with_widths([D] * L).layers
    )
    tree, rng = tree_of(config), np.random.default_rng(0)
    factor = rng.uniform(0.5, 2, (D, D)).astype(np.float32)
    tree["layers"][2]["ffn"]["neuron_scale"] = factor
    before = tree["layers"][2]["ffn"]["down"]["kernel"].astype(np.float64)
    after = fold(config, tree)["layers"][2]["ffn"]
    wanted = np.einsum("em,emd->emd", factor.astype(np.float64), before)
    np.testing.assert_allclose(after["down"]["kernel"], wanted, rtol=1e-6)
    assert "neuron_scale" not in after
    tree["layers"][2]["ffn"]["neuron_scale"] = factor[0]
    refused("neuron_scale.*axes are .'expert', 'neurons'", fold, config, tree, error=LeafError)


@pytest.mark.parametrize("target", ["ffn_out", "ffn_in_linear"])
def test_nucl_of_chosen_layers_is_of_all_their_experts(target):
    params, name = random_params(SPARSE), {"ffn_out": "down", "ffn_in_linear": "up"}[target]
    term = nucl_term(TermContext("nucl"), variant="gini", targets=target, layers=(1, 3))
    result = term.function(params)
    totals = []
    for layer in unstack(params)["layers"]:
        kernels = np.asarray(layer["ffn"][name]["kernel"], np.float64)
        kernels = kernels if name == "down" else np.swapaxes(kernels, 1, 2)
        totals.append([row_statistics(*distributions(w))["gini"].sum() for w in kernels])
    totals = np.sum(totals, axis=1)
    np.testing.assert_allclose(result.total, totals[1] + totals[3], rtol=1e-5)
    means = {key.rpartition("/")[2]: value for key, value in result.metrics.items()}
    np.testing.assert_allclose(means["layer_mean"], totals / (E * M), rtol=1e-5)
    np.testing.assert_allclose(means["mean"], (totals[1] + totals[3]) / (2 * E * M), rtol=1e-5)


@pytest.mark.parametrize("experts, cut", [(4, "expert"), (5, "neurons")])
def test_a_mesh_cuts_experts_or_their_neurons(experts, cut):
    config = with_experts(dataclasses.replace(LLAMA, vocab_size=32), experts)
    params = causal_lm.abstract_params(config)
    mesh = partition.abstract_mesh(2, 2, 2)
    leaves = declared(config, params)
    placed = flatten(partition.shardings(mesh, params, leaves))
    slot = "stack/segment_0/slot_0/ffn"
    for name in ("up", "down"):
        axes = leaves[f"{slot}/{name}/kernel"].axes
        wanted = tuple({cut: "tensor", "d_model": "fsdp"}.get(axis) for axis in axes)
        assert tuple(placed[f"{slot}/{name}/kernel"].spec) == wanted
    assert tuple(placed[f"{slot}/router/kernel"].spec) == (None, "fsdp", None)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_writes_experts_and_reads_them(tmp_path, name):
    """Families without experts use names of our own, also next to dense layers; no GGUF."""
    sparse = with_experts(tiny_of(name, 4), router="mlp", gates="none", shared=1)
    config = dataclasses.replace(sparse, layers=(tiny_of(name).layers[0], *sparse.layers[1:]))
    save_pretrained(config, params := random_params(config), tmp_path / "model")
    read, again = read_pretrained(tmp_path / "model")
    assert read == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    sparse = with_experts(tiny_of(name, 4), shared=1)
    with pytest.raises(CheckpointError, match=f"cannot express this {name} model"):
        save_gguf(sparse, random_params(sparse), tmp_path / "model.gguf")


def test_every_expert_draws_its_own_lora():
    model = Model(SPARSE, random_params(SPARSE), None, "")
    adapted, report = insert_lora(model, {"rank": 2, "targets": r"ffn/up"})
    assert report["adapted"][:2] == ["layers/0/experts/0/ffn/up", "layers/0/experts/1/ffn/up"]
    drawn = adapted.params["stack"]["segment_0"]["slot_0"]["ffn"]["up"]["lora_a"]
    assert drawn.shape == (L, E, D, 2) and all_differ(drawn)


@pytest.mark.parametrize(
    "plan", [{"criterion": "random"}, {"criterion": "entropy", "lose": "random:3"}]
)
def test_every_expert_loses_neurons_of_its_own_at_random(plan):
    tree = tree_of()
    for layer in tree["layers"]:  # the same weights, so that the draw alone tells experts apart
        for name in ("gate", "up", "down"):
            kernel = layer["ffn"][name]["kernel"]
            layer["ffn"][name]["kernel"] = np.broadcast_to(kernel[:1], kernel.shape)
    config, smaller, removed, _ = reduce_model(SPARSE, tree, RemovalPlan(**plan, count=5))
    assert config.ffn_widths == (M - 5,) * L and removed[0].shape == (E, 5)
    assert len({tuple(row) for row in removed[0]}) == E
    assert smaller["layers"][0]["ffn"]["down"]["kernel"].shape == (E, M - 5, D)


def test_codes_and_factors_do_not_hide_the_experts():
    """NF4's codes and low-rank factors have other ranks: E is read from the config."""
    config, tree = with_experts(WIDE, experts=3), tree_of(with_experts(WIDE, experts=3))
    for layer in tree["layers"]:
        kernel = layer["ffn"]["up"].pop("kernel")
        layer["ffn"]["up"] = jax.tree.map(np.asarray, jax.vmap(nf4.quantise)(jnp.asarray(kernel)))
        kernel = layer["ffn"]["gate"].pop("kernel")
        layer["ffn"]["gate"] = {
            "low_rank_a": np.zeros((3, kernel.shape[1], 2), np.float32),
            "low_rank_b": np.zeros((3, 2, kernel.shape[2]), np.float32),
        }
    places = dict(linears(config, restack(config, tree)))
    for name, leaf in (("up", "nf4_codes"), ("gate", "low_rank_a"), ("down", "kernel")):
        matrices = [leaves[leaf] for place, leaves in places.items() if place.name == f"ffn/{name}"]
        assert len(matrices) == 3 * L and all(x.ndim == 2 for x in matrices)
    refused("fold the model first", list, ffn_blocks(config, tree))
    with pytest.raises(LeafError, match="nf4_.*depends on neurons to be removed"):
        codes = jax.tree.map(np.asarray, jax.vmap(nf4.quantise)(jnp.ones((3, 128, 64))))
        take_neurons(config, WHOLE, {"down": codes}, np.arange(4))


# ---- with forward passes


def hidden(config, tree, **options):
    batch, options = batch_of(config.vocab_size), causal_lm.RunOptions(**options)
    params = restack(config, tree)
    return causal_lm.forward(config, params, batch, options=options)["hidden"]


def masked_expert(config, tree) -> tuple[dict, dict, int]:
    """(the tree with MacDrop and random masks, the masked kernels by hand, the expert)."""
    model, report = insert_macdrop(Model(config, restack(config, tree), None, ""), {"k": 3})
    layer, expert, rng = report["layer_index"], report["expert_index"], np.random.default_rng(0)
    tree = jax.tree.map(np.asarray, unstack(model.params))
    keep = (rng.random((E, D, 3)) < 0.5).astype(np.float32)  # drawn for all experts
    wanted = {}
    for name in ("gate", "up"):
        leaves = tree["layers"][layer]["ffn"][name]
        leaves["macdrop_keep"] = keep
        wanted[f"layers/{layer}/ffn/{name}/kernel"] = by_hand = leaves["kernel"].copy()
        for j, column in enumerate(sorted(report["indices"])):
            by_hand[expert, :, column] *= keep[expert, :, j]
    assert expert > 0
    return tree, wanted, expert


def test_macdrop_masks_one_expert():
    """The states and gradients of masked kernels, in float64: 0 for dropped weights alone."""

    def slopes(tree):
        def total(tree):
            return jnp.sum(jnp.sin(hidden(SPARSE, tree, compute_dtype=jnp.float64)))

        value, gradient = jax.value_and_grad(total, allow_int=True)(tree)
        return value, flatten(gradient)

    with jax.enable_x64(True):
        tree, wanted, expert = masked_expert(SPARSE, tree_of())
        leaves = {
            p: x.astype(float) if x.dtype.kind == "f" else x for p, x in flatten(tree).items()
        }
        by_hand = {p: wanted.get(p, x) for p, x in leaves.items() if "macdrop" not in p}
        value, gradient = slopes(unflatten(leaves))
        other, reference = slopes(unflatten(by_hand))
        np.testing.assert_allclose(value, other, rtol=1e-12)
        for path, kernel in wanted.items():
            gone = kernel != leaves[path]
            assert gone[expert].sum() > D and gone.any((1, 2)).sum() == 1
            assert not gradient[path][gone].any() and np.abs(reference[path][gone]).max() > 1e-3
            np.testing.assert_allclose(gradient[path][~gone], reference[path][~gone], atol=1e-12)


def test_macdrop_of_one_expert_is_saved_folded_and_rejected_by_removals(tmp_path):
    config = dataclasses.replace(SPARSE, family="mixtral")
    tree, wanted, expert = masked_expert(config, tree_of())
    save_pretrained(config, restack(config, tree), tmp_path / "kept", structure="keep")
    _, params = read_pretrained(tmp_path / "kept")
    again = flatten(unstack(params))
    for path, leaf in flatten(tree).items():
        np.testing.assert_array_equal(again[path], leaf)
    folded = flatten(fold(config, tree))
    assert not [path for path in folded if "macdrop" in path]
    for path, kernel in wanted.items():
        np.testing.assert_array_equal(folded[path], kernel)
    refused(
        "macdrop_.*fold the model first",
        reduce_model,
        config,
        tree,
        RemovalPlan("entropy", count=2),
    )
    rows = tree["layers"][int(path.split("/")[1])]["ffn"]["up"]["macdrop_rows"] = np.array(
        again[path.replace("kernel", "macdrop_rows")]
    )
    for place, wrong in ((0, [M, M + 2, M + 1]), (expert, [1, 2, M])):
        before, rows[place] = rows[place].copy(), wrong
        name = tmp_path / f"{place}"
        save_pretrained(config, restack(config, tree), name, structure="keep")
        refused("macdrop_rows' must rise", read_pretrained, name, error=CheckpointError)
        rows[place] = before


def test_removal_inside_experts_is_masking():
    tree = tree_of()
    config, smaller, removed, _ = reduce_model(SPARSE, tree, RemovalPlan("entropy", count=7))
    for layer, gone in zip(tree["layers"], (removed[i] for i in range(L)), strict=True):
        factor = np.ones((E, M), np.float32)
        for expert, neurons in enumerate(gone):
            factor[expert, neurons] = 0
        layer["ffn"]["neuron_scale"] = factor
    masked = hidden(SPARSE, tree)
    np.testing.assert_allclose(hidden(config, smaller), masked, atol=2e-6 * np.abs(masked).max())


def test_folded_factors_and_adapters_of_experts_change_nothing():
    tree, rng = tree_of(), np.random.default_rng(0)
    for layer in tree["layers"]:
        layer["ffn"]["neuron_scale"] = rng.uniform(0.5, 2, (E, M)).astype(np.float32)
        for name in ("up", "down"):
            one, other = layer["ffn"][name]["kernel"].shape[1:]
            layer["ffn"][name] |= {
                "lora_a": rng.normal(size=(E, one, 2)).astype(np.float32),
                "lora_b": rng.normal(size=(E, 2, other)).astype(np.float32) / 4,
                "lora_scale": rng.uniform(0.5, 2, (E, 1)).astype(np.float32),
                "dora_m": rng.uniform(0.5, 2, (E, other)).astype(np.float32),
            }
    before, folded = hidden(SPARSE, tree), fold(SPARSE, tree)
    assert set(folded["layers"][0]["ffn"]["up"]) == {"kernel"}
    np.testing.assert_allclose(hidden(SPARSE, folded), before, atol=5e-6 * np.abs(before).max())


@pytest.mark.parametrize("variant", ["ent", "gini", "mstd"])
def test_nucl_of_experts_has_the_slope_of_finite_differences(variant):
    with jax.enable_x64(True):
        params, rng = random_params(SPARSE, dtype=np.float64), np.random.default_rng(1)
        kernels = jnp.asarray(params["stack"]["segment_0"]["slot_0"]["ffn"]["down"]["kernel"])
        direction = rng.normal(size=kernels.shape)

        def value(step):
            return nucl(kernels + step * direction, variant=variant)

        slope = (value(1e-6) - value(-1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(value)(0.0), slope, rtol=1e-5)
        term = nucl_term(TermContext("nucl"), variant=variant)
        np.testing.assert_allclose(term.function(params).total, value(0.0), rtol=1e-6)


def test_what_experts_do_not_support_is_named():
    config = with_experts(dataclasses.replace(LLAMA, vocab_size=32), 6).with_widths([20] * L)
    params = causal_lm.abstract_params(config)
    leaves, mesh = declared(config, params), partition.abstract_mesh(1, 1, 8)
    refused(
        "'neurons' of 20 cannot be cut into 8",
        partition.shardings,
        mesh,
        params,
        leaves,
        error=partition.RuleError,
    )
    names = layer_names(params)
    rule = [(r"layers/1/experts/2/ffn/up", False)]
    refused(
        "leaves of all its experts",
        partition.match_rules,
        rule,
        names,
        True,
        error=partition.RuleError,
    )
