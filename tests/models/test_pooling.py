"""Depth-wise pooling: special cases, cost, parameter counts (P-32, section 3, Table 1)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.heads import ROOT, classification, head_shapes, make_head
from ffn_heterogeneity.heads.classification import POOLINGS, Classification
from ffn_heterogeneity.models.causal_lm import abstract_params, finish, forward
from ffn_heterogeneity.models.config import HeadConfig
from ffn_heterogeneity.models.families import PRESETS, count_parameters
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.papers import printed
from ffn_heterogeneity.probes.pooled import pooled_places
from ffn_heterogeneity.tree import flatten, unflatten

FAMILIES = ("bert", "llama")
PAPER = printed("p32")["tables"]


def model_with(family: str, pooling: str, **settings):
    """(config, params, head): random weights, a random head and lambda."""
    config = tiny_of(family, 3)
    head = HeadConfig.of("classification", vars(Classification(pooling=pooling, **settings)))
    config = dataclasses.replace(config, head=head)
    made = make_head(config, head)
    params = random_params(config)
    rng = np.random.default_rng(5)
    leaves = head_shapes(config).items()
    params |= unflatten({path: rng.normal(size=x).astype("f") for path, x in sorted(leaves)})
    return config, params, made


def batch_of(config, rows: int = 3, length: int = 7) -> dict:
    rng = np.random.default_rng(2)
    lengths = rng.integers(2, length + 1, (rows, 1))
    return {
        "tokens": rng.integers(3, config.vocab_size, (rows, length)).astype("i"),
        "segment_ids": (np.arange(length) < lengths).astype("i"),
        "token_types": np.zeros((rows, length), "i"),
    }


def logits(config, made, params, batch, options=RunOptions()):
    outputs = forward(config, params, batch, options=options, probes=made.probes)
    return made.apply(params, outputs, batch, lambda x: x)


def test_where_the_pooled_token_stands():
    mask = jnp.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]])
    assert pooled_places(mask, first=True)[:, 0].tolist() == [0, 2, 1]
    assert pooled_places(mask, first=False)[:, 0].tolist() == [1, 3, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_weights_are_average_pooling(family):
    config, params, p32 = model_with(family, "p32")
    _, _, average = model_with(family, "average")
    params[ROOT]["lambda"] = np.zeros_like(params[ROOT]["lambda"])
    batch = batch_of(config)
    made, want = (logits(config, head, params, batch) for head in (p32, average))
    np.testing.assert_allclose(made, want, atol=1e-6)


@pytest.mark.parametrize("norm", ["pooled", "hidden_states"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_weight_on_one_layer_is_that_layer(family, norm):
    """For the last layer, the logits of its head; for another, those of its state, by hand."""
    config, params, p32 = model_with(family, "p32", final_norm=norm)
    _, _, last = model_with(family, "last")
    batch = batch_of(config)

    def one_hot(layer):
        head = params[ROOT] | {"lambda": jnp.where(jnp.arange(config.n_layers) == layer, 200.0, 0)}
        return logits(config, p32, {**params, ROOT: head}, batch)

    want = logits(config, last, params, batch)
    np.testing.assert_allclose(one_hot(config.n_layers - 1), want, atol=1e-6)
    states = forward(config, params, batch, probes=p32.probes)["probes"]["pooled"]
    shown = states[1] if norm == "hidden_states" else finish(config, params, states[1])
    outputs = {"hidden": jnp.repeat(shown[:, None], 7, 1)}
    np.testing.assert_allclose(
        one_hot(1), last.apply(params, outputs, batch, lambda x: x), atol=1e-6
    )


def test_the_readings_of_the_final_norm_differ_and_last_has_two():
    config, params, _ = model_with("llama", "p32")
    batch = batch_of(config)
    made = [
        logits(config, model_with("llama", "p32", final_norm=norm)[2], params, batch)
        for norm in ("pooled", "hidden_states", "none")
    ]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(made[one] - made[other]).max() > 1e-2
    refused("final_norm='none'", Classification, pooling="last", final_norm="none")


def test_a_scalar_mix_does_not_see_the_scale_of_states():
    """ELMo's norm without a noticeable epsilon (1e-12; with 1e-3 small states would vanish)."""
    config, params, mix = model_with("bert", "scalar_mix", final_norm="hidden_states")
    batch = batch_of(config)
    states = forward(config, params, batch, probes=mix.probes)["probes"]["pooled"]
    small, unscaled = (
        mix.apply(params, {"probes": {"pooled": scale * states}}, batch, lambda x: x)
        for scale in (1e-3, 1.0)
    )
    np.testing.assert_allclose(small, unscaled, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gamma_scales_what_the_classifier_reads(family):
    """A decoder's final norm does not cancel it."""
    config, params, mix = model_with(family, "scalar_mix")
    summed = []
    for gamma in (1.0, 3.0):
        params[ROOT]["gamma"] = np.float32(gamma)
        states = forward(config, params, batch_of(config), probes=mix.probes)["probes"]["pooled"]
        options = Classification(pooling="scalar_mix")
        summed.append(classification._summed(config, options, params, states))
    np.testing.assert_allclose(summed[1], 3 * summed[0], rtol=1e-5)


@pytest.mark.parametrize("pooling", ["p32", "scalar_mix"])
def test_the_gradient_of_lambda_by_finite_differences(pooling):
    with jax.enable_x64(True):
        config, params, made = model_with("bert", pooling)
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        batch, options = batch_of(config), RunOptions(compute_dtype=jnp.float64, attention="plain")

        @jax.jit
        def loss(lambdas):
            tree = {**params, ROOT: params[ROOT] | {"lambda": lambdas}}
            return jnp.sum(jnp.sin(logits(config, made, tree, batch, options)))

        start = params[ROOT]["lambda"]
        gradient = jax.grad(loss)(start)
        for layer in range(config.n_layers):
            step = 1e-5 * (jnp.arange(config.n_layers) == layer)
            slope = (loss(start + step) - loss(start - step)) / 2e-5
            np.testing.assert_allclose(gradient[layer], slope, rtol=1e-6, atol=1e-10)
        assert abs(float(gradient.sum())) < 1e-9, "a softmax does not see a common shift"


def test_one_parameter_a_block():
    sizes = {}
    for pooling in POOLINGS:
        config, params, _ = model_with("bert", pooling)
        sizes[pooling] = sum(np.size(x) for x in flatten(params).values())
    assert sizes["average"] == sizes["last"]
    assert sizes["p32"] - sizes["last"] == config.n_layers
    assert sizes["scalar_mix"] - sizes["last"] == config.n_layers + 1


def test_table_1_counts():
    presets = {
        "BERT": "bert_base_uncased",
        "StableCode": "stablecode_instruct_alpha_3b",
        "LLAMA-2-7B": "llama2_7b",
        "LLAMA-2-13B": "llama2_13b",
    }
    for name, blocks, parameters in PAPER["table_1"]["rows"]:
        config, _ = PRESETS[presets[name]]
        assert config.n_layers == blocks
        assert count_parameters(config)["total"] == parameters
    assert PRESETS[presets["StableCode"]][0].max_position == 4096


def test_the_compiled_step_costs_what_the_last_layers_head_costs():
    """No states of all tokens and layers; the same temporary memory and operations, within 1%.

    MiniLM's shapes, one program each.
    """
    compiled, (config, _) = {}, PRESETS["minilm_l6"]
    for pooling in ("last", "p32"):
        head = HeadConfig.of("classification", vars(Classification(pooling=pooling)))
        made = make_head(config, head)
        params = abstract_params(config)
        shapes = head_shapes(dataclasses.replace(config, head=head)).items()
        params |= unflatten({path: jax.ShapeDtypeStruct(x, jnp.float32) for path, x in shapes})
        batch, options = batch_of(config, 16, 64), RunOptions(remat="dots")

        def loss(params, made=made, config=config, batch=batch, options=options):
            return jnp.sum(logits(config, made, params, batch, options) ** 2)

        compiled[pooling] = jax.jit(jax.grad(loss)).lower(params).compile()
    last, p32 = compiled["last"], compiled["p32"]
    states = f"f32[6,16,64,{config.d_model}]"  # [L, B, T, D]
    assert p32.as_text().count(states) <= last.as_text().count(states)
    flops = [one.cost_analysis()["flops"] for one in (last, p32)]
    assert flops[1] <= 1.01 * flops[0]
    memory = [one.memory_analysis().temp_size_in_bytes for one in (last, p32)]
    assert memory[1] <= 1.01 * memory[0]
