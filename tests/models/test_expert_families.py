"""Mixtral and Qwen3-MoE: routing like transformers', files of both forms, forms of config.json."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_parity import TINY, TOKENS, reread, torch_model
from tiny_models import our_logits, random_params, tiny_of, torch_logits
from tiny_models import torch_model as transformers_model
from tiny_runs import refused

from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.io.hf.card import write_card
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.io.load import load_model
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import ConfigError
from ffn_heterogeneity.models.families import config_from_hf, config_to_hf
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.surgery.calibration import write_rows
from ffn_heterogeneity.surgery.reduce import prune, reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.surgery.streaming import compress_directory, open_checkpoint
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
SPARSE = [name for name, (kind, _) in TINY.items() if kind in ("Mixtral", "Qwen3Moe")]


@pytest.fixture(params=SPARSE)
def name(request, torch):
    return request.param


def equal(ours, theirs):
    ours, theirs = flatten(ours), flatten(theirs)
    assert ours.keys() == theirs.keys()
    for path, leaf in ours.items():
        assert leaf.dtype == theirs[path].dtype and leaf.tobytes() == theirs[path].tobytes(), path


def routed(seen, batch, _):
    """Router logits; zeros in a dense layer."""
    zeros = jnp.zeros((*batch["tokens"].shape, 6))
    return zeros if seen.routing is None else seen.routing.logits


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_and_router_logits_agree(torch, tmp_path, name, side):
    model = torch_model(name)
    model.save_pretrained(tmp_path)
    config, params = read_pretrained(tmp_path)
    mask = np.ones_like(TOKENS)
    mask[0, slice(0, 5) if side == "left" else slice(-5, None)] = 0
    with torch.no_grad():
        given = {"input_ids": torch.tensor(TOKENS), "attention_mask": torch.tensor(mask)}
        theirs = model(**given, output_router_logits=True)
    batch = {"tokens": TOKENS, "segment_ids": mask}
    probes = (Probe("router", routed),)
    outputs = jax.jit(lambda p: causal_lm.forward(config, p, batch, probes=probes))(params)
    ours = np.asarray(causal_lm.logits(config, params, outputs["hidden"]))
    real = mask == 1
    np.testing.assert_allclose(ours[real], theirs.logits.numpy()[real], atol=1e-4, rtol=0)
    sparse = [i for i, layer in enumerate(config.layers) if layer.experts]
    assert len(sparse) == len(theirs.router_logits) == config.n_layers - name.count("dense")
    for i, logits in zip(sparse, theirs.router_logits, strict=True):
        logits, mine = logits.numpy().reshape(*TOKENS.shape, -1), outputs["probes"]["router"][i]
        np.testing.assert_allclose(mine[real], logits[real], atol=1e-5, rtol=1e-5)


def test_experts_in_one_tensor_or_one_by_one(tmp_path, name):
    """Transformers 5 writes both forms."""
    for form in (True, False):
        torch_model(name).save_pretrained(tmp_path / str(form), save_original_format=form)
    config, params = read_pretrained(tmp_path / "True")
    other_config, other = read_pretrained(tmp_path / "False")
    assert other_config == config and any(
        "gate_up_proj" in tensor for tensor in load_file(tmp_path / "False/model.safetensors")
    )
    equal(params, other)
    checkpoint = open_checkpoint(tmp_path / "False")
    assert len(checkpoint.blocks(0)) == config.layers[0].experts
    for tensor in checkpoint.tensors:
        file, start, stop = checkpoint.place(tensor)
        assert Path(file).read_bytes()[start:stop] == checkpoint.read(tensor).tobytes(), tensor
    plan = RemovalPlan("entropy", count=3)
    compress_directory(tmp_path / "False", tmp_path / "pruned", plan)
    smaller, tree, *_ = reduce_model(config, params, plan)
    assert read_pretrained(tmp_path / "pruned")[0] == smaller
    equal(unstack(read_pretrained(tmp_path / "pruned")[1]), tree)


@pytest.mark.parametrize("layers", ["all", "0"])
def test_pruned_experts_are_written_and_loaded(torch, tmp_path, name, layers):
    torch_model(name).save_pretrained(tmp_path / "theirs")
    config, params = read_pretrained(tmp_path / "theirs")
    # torch's grouped product needs rows of whole 16 bytes.
    plan = RemovalPlan("magnitude", count=8, layers=layers)
    config, tree, *_ = reduce_model(config, params, plan)
    params = restack(config, tree)
    save_pretrained(config, params, tmp_path / "auto")
    values = json.loads((tmp_path / "auto/config.json").read_text())
    assert ("per_layer_config" in values) == (layers == "0") and "ffn_heterogeneity" not in values
    model = load_model(tmp_path / "auto")
    assert model.config == config
    equal(model.params, params)
    if layers == "0":
        save_pretrained(config, params, tmp_path / "auto", export="padded", overwrite=True)
    theirs = torch_logits(torch, reread(tmp_path / "auto"), TOKENS)
    np.testing.assert_allclose(our_logits(config, params, TOKENS), theirs, atol=1e-4, rtol=0)


CHANGES = {
    "shared": {"shared": 1},
    "hidden router": {"router": "mlp"},
    "merged": {"routes": 5},
    "other gates": {"gates": "none"},
    "fewer experts": {"experts": 3},
    "dense": {"experts": None},
}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_config_json_cannot_say_is_native(tmp_path, family, what):
    config = tiny_of(family, 3)
    changed = dataclasses.replace(config.layers[1], **CHANGES[what])
    config = dataclasses.replace(config, layers=(config.layers[0], changed, config.layers[2]))
    tree = unstack(random_params(config))
    if what == "merged":
        tree["layers"][1]["ffn"]["expert_of"] = np.array([3, 0, 0, 2, 1], np.int32)
    params = restack(config, tree)
    save_pretrained(config, params, tmp_path / "model")
    values = json.loads((tmp_path / "model/config.json").read_text())
    expressible = what == "dense" and family == "qwen3_moe"
    assert ("ffn_heterogeneity" in values) == (not expressible)
    model = load_model(tmp_path / "model")
    assert model.config == config
    equal(model.params, params)
    half = flatten(load_model(tmp_path / "model", dtype=jnp.bfloat16).params)
    assert {leaf.dtype for path, leaf in half.items() if "expert_of" in path} <= {np.dtype("i4")}
    assert np.isfinite(our_logits(model.config, model.params, TOKENS % 29)).all()


def test_removal_that_does_not_support_experts(tmp_path):
    config = tiny_of("mixtral", 2)
    save_pretrained(config, params := random_params(config), tmp_path / "model")
    model, plan = load_model(tmp_path / "model"), RemovalPlan("entropy", count=3, budget="global")
    words = "budget='global': layer 0 has experts"
    refused(words, reduce_model, config, params, plan)
    refused(words, compress_directory, tmp_path / "model", tmp_path / "pruned", plan)
    words = "no token is sent to . of 4 experts"
    write_rows(rows := tmp_path / "rows.jsonl", [np.array([0, 5])])
    refused(words, prune, model, {"criterion": "flap", "calibration": str(rows)})
    settings = {"compensation": "state_ridge", "calibration": "own"}
    refused("supports dense layers, and layer 0 has", prune, model, settings)


def test_sizes_are_shown(tmp_path):
    config = tiny_of("qwen3_moe", 3)
    save_pretrained(config, random_params(config), tmp_path / "model")
    write_card(tmp_path / "model", "x", "y", {}, config)
    counts = count_parameters(config)
    unused = 3 * 2 * 3 * config.d_model * 12  # two of four experts in each of three layers
    assert counts["active"] == counts["total"] - unused
    said = f"{counts['total']:,} parameters, {counts['active']:,} active per token"
    assert said in (tmp_path / "model/README.md").read_text()
    shown = repr(load_model(tmp_path / "model"))
    assert "4, 2 active, in 3 layers" in shown and f"{counts['active']:,}" in shown


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 3, "num_experts_per_tok": 4}, "top_k=4 is more than the router's 3"),
        ({"num_experts": "8"}, "num_experts='8'"),
        ({"num_experts": 50_000}, "50000 experts per layer: at most 100,000 in all layers"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers: got 6; expected layers 0 to 5"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ({"per_layer_config": {"0": {"intermediate_size": 5}}}, "layer 0: sets intermediate_size"),
    ],
)
def test_settings_that_cannot_be_read(changes, words):
    values = config_to_hf(tiny_of("qwen3_moe")) | changes
    refused(words, config_from_hf, values, error=ConfigError)


def test_every_second_layer_is_sparse():
    values = config_to_hf(tiny_of("qwen3_moe")) | {"decoder_sparse_step": 2}
    values |= {"mlp_only_layers": [3], "intermediate_size": 40}
    config = config_from_hf(values)
    assert [layer.experts for layer in config.layers] == [None, 4, None, None, None, 4]
    assert config.ffn_widths == (40, 12, 40, 40, 40, 12)
    assert config_to_hf(config)["mlp_only_layers"] == [0, 2, 3, 4]


EXPERT, ROUTER = "model.layers.1.mlp.experts.{}.up_proj.weight", "model.layers.1.mlp.gate.weight"
STACKED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.pop(EXPERT.format(2)), "missing tensors: 'model.*experts.2.up_proj"),
        (lambda x: x.update({EXPERT.format(4): x[EXPERT.format(3)]}), "no place for.*experts.4.up"),
        (lambda x: x.update({ROUTER: x[ROUTER] * np.nan}), "mlp.gate.weight' contains NaN"),
        (lambda x: x.update({STACKED: np.ones((4, 9, 8), "f")}), "2 equal parts of rows per"),
        (lambda x: x.update({STACKED: np.ones((4, 24, 8), "f")}), "are the same tensor"),
    ],
)
def test_tensors_that_cannot_be_read(tmp_path, change, words):
    config = tiny_of("qwen3_moe", 2)
    save_pretrained(config, random_params(config), tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    refused(words, load_model, tmp_path / "model", error=CheckpointError)


@pytest.mark.parametrize(("value", "words"), [([4], "indices outside 0 to 3"), ([0.5], "float64")])
def test_an_expert_out_of_range(tmp_path, value, words):
    config = tiny_of("mixtral", 1)
    layer = dataclasses.replace(config.layers[0], routes=2)
    config = dataclasses.replace(config, layers=(layer,))
    tree = unstack(random_params(config))
    tree["layers"][0]["ffn"]["expert_of"] = np.array([3, *value])
    save_pretrained(config, tree, tmp_path / "model")
    refused(f"expert_of'.*{words}", load_model, tmp_path / "model", error=CheckpointError)


def test_merged_experts_are_written_once_per_column_for_other_tools(torch, tmp_path, capsys):
    config = tiny_of("mixtral", 2)
    merged = tuple(dataclasses.replace(one, experts=3, routes=4) for one in config.layers)
    config = dataclasses.replace(config, layers=merged)
    tree = unstack(random_params(config))
    for layer, columns in zip(tree["layers"], ([2, 0, 1, 0], [1, 1, 0, 2]), strict=True):
        layer["ffn"]["expert_of"] = np.array(columns, np.int32)
    params = restack(config, tree)
    save_pretrained(config, params, tmp_path / "model", export="padded")
    assert "once per router column" in capsys.readouterr().err
    theirs = torch_logits(torch, transformers_model(torch, tmp_path / "model"), TOKENS % 29)
    ours = our_logits(config, params, TOKENS % 29)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    save_pretrained(config, params, tmp_path / "native")
    plan = RemovalPlan("entropy", count=2)
    with pytest.raises(ValueError, match="merged experts .* leave streaming=true out"):
        compress_directory(tmp_path / "native", tmp_path / "out", plan, export="padded")
