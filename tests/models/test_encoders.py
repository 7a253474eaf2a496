"""Encoders: parity with torch's BERT and RoBERTa, bidirectional attention, dropout, errors.

Tiny models have random weights (norms too); files are in test_encoder_files.py.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_tools import TYPES, torch_encoder
from tiny_models import LLAMA, batch_of, mask_neurons, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.assemble import Stored, assemble
from ffn_heterogeneity.io.hf.read import read_pretrained
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm, decoding
from ffn_heterogeneity.models.attention import (
    attention_mask,
    blocked_attention,
    plain_attention,
    with_kernel,
)
from ffn_heterogeneity.models.config import (
    ConfigError,
    LayerConfig,
    config_from_dict,
    config_to_dict,
)
from ffn_heterogeneity.models.families import family_by_name, preset
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.surgery.reduce import reduce_model
from ffn_heterogeneity.surgery.removal_plan import RemovalPlan
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")

BERT = tiny_of("bert", layers=3)
DROP = (jax.random.key(1), jnp.float32(0.4))
# Inputs and outputs of every layer.
STREAM = Probe("stream", lambda seen, batch, _: (seen.ffn_input - seen.middle, seen.block_output))


@pytest.fixture(params=TYPES)
def encoder(request, torch, tmp_path):
    """(torch model, our config, our parameters)."""
    model = torch_encoder(torch, f"{request.param}Model")
    model.save_pretrained(tmp_path)
    return model, *read_pretrained(tmp_path)


def padded_batch(config, side: str) -> dict:
    """Rows of 15, 9 and 4 tokens in 15 places; the second half of each is a second sentence."""
    rng, width = np.random.default_rng(3), 15
    batch = {name: np.zeros((3, width), np.int32) for name in ("tokens", "segment_ids")}
    batch["token_types"] = np.zeros((3, width), np.int32)
    batch["tokens"][:] = config.pad_id
    for row, length in enumerate((15, 9, 4)):
        places = slice(0, length) if side == "right" else slice(width - length, width)
        batch["tokens"][row, places] = rng.integers(3, 97, length)
        batch["segment_ids"][row, places] = 1
        if config.token_types > 1:
            batch["token_types"][row, places] = np.arange(length) >= length // 2
    return batch


def run_torch(torch, model, batch):
    """Torch's outputs, with positions that count from each row's first token."""
    real = torch.tensor(batch["segment_ids"])
    arguments = {"position_ids": (real.cumsum(1) - 1).clamp(0)}
    if "Roberta" in type(model).__name__:  # which counts positions itself
        arguments = {}
    return model(
        torch.tensor(batch["tokens"]).long(),
        attention_mask=real,
        token_type_ids=torch.tensor(batch["token_types"]).long(),
        output_hidden_states=True,
        **arguments,
    )


@pytest.mark.parametrize("side", ["right", "left"])
def test_hidden_states_of_every_layer_agree_on_either_side_of_padding(torch, encoder, side):
    model, config, params = encoder
    batch = padded_batch(config, side)
    real = batch["segment_ids"] > 0
    run = functools.partial(causal_lm.forward, config, probes=(STREAM,))
    ours = jax.jit(run)(params, batch)
    with torch.no_grad():
        theirs = run_torch(torch, model, batch)
        # Torch pools the first position, even if it is padding.
        pooled = run_torch(torch, model, padded_batch(config, "right")).pooler_output
    inside, states = ours["probes"]["stream"]
    assert not np.any(np.asarray(inside)), "after a post-norm the FFN reads the stream itself"
    assert len(states) == len(theirs.hidden_states) - 1 == 3
    for state, expected in zip(states, theirs.hidden_states[1:], strict=True):
        assert expected[real].abs().max() > 0.5
        np.testing.assert_allclose(state[real], expected[real], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours["hidden"], states[-1])
    np.testing.assert_allclose(ours["pooled"], pooled, atol=1e-4, rtol=0)


def test_gradients_agree_leaf_by_leaf(torch, encoder):
    model, config, params = encoder
    batch = padded_batch(config, "right")
    weights = np.random.default_rng(0).normal(size=(3, 15, 32)).astype(np.float32)
    weights *= batch["segment_ids"][..., None] > 0

    def total(params):
        outputs = causal_lm.forward(config, params, batch)
        return jnp.sum(outputs["hidden"] * weights) + jnp.sum(outputs["pooled"])

    model.zero_grad()
    outputs = run_torch(torch, model, batch)
    loss = (outputs.last_hidden_state * torch.tensor(weights)).sum() + outputs.pooler_output.sum()
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    stored = {name: Stored(g.shape, "grad", lambda g=g: g) for name, g in grads.items()}
    theirs = assemble(config, family_by_name(config.family).rules(config), stored)
    ours, theirs = (flatten(unstack(tree)) for tree in (jax.jit(jax.grad(total))(params), theirs))
    assert set(ours) == set(theirs)
    for path, expected in theirs.items():
        gradient, size = np.array(ours[path]), np.linalg.norm(expected)
        if path == "embed/embedding":  # torch gives the padding token's row none
            gradient[config.pad_id] = 0
        if path.endswith("/k/bias"):  # one number for all logits of a query: only rounding
            assert max(size, np.linalg.norm(gradient)) < 1e-4, path
        else:
            assert size > 0 and np.linalg.norm(gradient - expected) < 1e-4 * size, path


def test_packed_documents_are_as_if_alone():
    params, batch = random_params(BERT), batch_of(BERT.vocab_size, rows=2)
    del batch["positions"]
    packed = causal_lm.forward(BERT, params, batch)["hidden"]
    for places in (slice(0, 4), slice(4, 8)):
        alone = causal_lm.forward(BERT, params, {"tokens": batch["tokens"][:, places]})["hidden"]
        np.testing.assert_allclose(packed[:, places], alone, atol=1e-5)


# ---- attention


def test_every_token_sees_every_other_one():
    """d hidden[t] / d embedding[s] is nowhere 0: with a causal mask half of them would be."""
    config = dataclasses.replace(BERT, layers=BERT.layers[:1])
    params, size = random_params(config), 6
    batch = {"tokens": jnp.arange(size)[None]}

    def states(table):
        tree = {**params, "embed": {**params["embed"], "embedding": table}}
        return causal_lm.forward(config, tree, batch)["hidden"][0, :, 0]

    slopes = np.abs(jax.jacobian(states)(params["embed"]["embedding"])).max(-1)[:, :size]
    assert (slopes > 1e-6).all()


def test_attention_dropout_keeps_the_expectation():
    rng, positions = np.random.default_rng(0), jnp.arange(12)[None]
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, 2, 4)), jnp.float32) for _ in range(3))
    mask = attention_mask(positions, positions, None, causal=False)

    def run(key, rate):
        return plain_attention(q, k, v, mask, scale=0.5, drop=(key, rate))[0]

    keys = jax.random.split(jax.random.key(0), 20_000)
    dropped = jax.jit(jax.vmap(run, (0, None)))(keys, jnp.float32(0.3))
    undropped = plain_attention(q, k, v, mask, scale=0.5)[0]
    np.testing.assert_allclose(dropped.mean(0), undropped, atol=0.03)
    assert np.abs(dropped[0] - undropped).max() > 0.1
    np.testing.assert_array_equal(run(keys[0], jnp.float32(0)), undropped)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [12, 300])
def test_both_kernels_drop_the_same_probabilities(length, causal):
    """The same key gives the same values and gradients, with several blocks of queries."""
    rng, positions = np.random.default_rng(0), jnp.arange(length)[None]
    inputs = [jnp.asarray(rng.normal(size=(2, length, n, 4)), jnp.float32) for n in (4, 2, 2)]
    mask = attention_mask(positions, positions, None, causal=causal)
    drop, weigh = (jax.random.key(3), jnp.float32(0.3)), jnp.asarray(rng.normal(size=(2, 1, 4, 4)))

    def outcome(kernel):
        def value(*inputs):
            made = kernel(*inputs, mask, scale=0.5, drop=drop)
            made = made[0] if isinstance(made, tuple) else made
            return jnp.sum(jnp.sin(made) * weigh), made

        grads, made = jax.grad(value, (0, 1, 2), has_aux=True)(*inputs)
        return [made, *grads]

    for one, other in zip(outcome(blocked_attention), outcome(plain_attention), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("model", [BERT, tiny_of("gpt2", layers=3)], ids=["bert", "gpt2"])
def test_attention_drops_where_the_family_does(model):
    params, batch = random_params(model), batch_of(model.vocab_size)

    def draws(config, dropout) -> int:
        run = functools.partial(causal_lm.forward, config, batch=batch, dropout=dropout)
        return str(jax.make_jaxpr(run)(params=params)).count("random_bits")

    plain = dataclasses.replace(model, attention_dropout=False)
    assert draws(model, DROP) == draws(plain, DROP) + 1, "in the layers' scan"
    assert draws(model, None) == 0, "evaluation"


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_embeddings_drop_after_their_sum_in_training(family):
    config = dataclasses.replace(tiny_of(family, layers=3), attention_dropout=False)
    params, batch = random_params(config), batch_of(config.vocab_size)
    first = Probe("first", lambda seen, batch, _: seen.block_input)

    def states(dropout):
        outputs = causal_lm.forward(config, params, batch, probes=(first,), dropout=dropout)
        return np.asarray(outputs["probes"]["first"][0])

    undropped, dropped = states(None), states(DROP)
    gone = dropped == 0
    assert 0.2 < gone.mean() < 0.6
    np.testing.assert_allclose(dropped[~gone], undropped[~gone] / 0.6, rtol=1e-5)
    np.testing.assert_array_equal(states((DROP[0], None)), undropped)


# ---- what else reads a model


def test_neurons_are_removed_and_nucl_is_computed():
    params, batch = random_params(BERT), batch_of(BERT.vocab_size)
    config, smaller, removed, _ = reduce_model(BERT, params, RemovalPlan("entropy", ratio=0.25))
    assert config.ffn_widths == (9,) * 3 and config.is_encoder
    masked = restack(BERT, mask_neurons(params, removed))
    zeroed = causal_lm.forward(BERT, masked, batch)
    ours = causal_lm.forward(config, restack(config, smaller), batch)
    np.testing.assert_allclose(ours["pooled"], zeroed["pooled"], atol=1e-5)
    value = nucl_term(TermContext("nucl")).function(params)
    assert np.isfinite(value.total) and value.total != 0


# ---- rejected files and configs


def test_what_needs_a_language_model_says_so():
    params, tokens = random_params(BERT), jnp.zeros((1, 2), jnp.int32)
    tree = {"tokens": tokens, "positions": tokens, "subtree_ends": tokens}
    calls = {
        "perplexity": lambda: causal_lm.require_decoder(BERT, "perplexity"),
        "computing logits": lambda: causal_lm.logits(BERT, params, jnp.zeros((1, 2, 16))),
        "generation": lambda: decoding.make_cache(BERT, params["stack"], 1, 8),
        "a tree of tokens": lambda: causal_lm.forward(BERT, params, tree),
    }
    for what, call in calls.items():
        words = f"a bert model is an encoder without a language-model head: {what} needs a decoder"
        refused(words, call)
    causal_lm.require_decoder(LLAMA, "perplexity")


def test_rows_longer_than_the_positions_are_refused():
    params, tokens = random_params(BERT), jnp.zeros((1, 25), jnp.int32)
    assert causal_lm.forward(BERT, params, {"tokens": tokens[:, :24]})["hidden"].shape[1] == 24
    with pytest.raises(ValueError, match="rows of 25 tokens: a bert model .* has 24 of them"):
        causal_lm.forward(BERT, params, {"tokens": tokens})


def test_splash_is_neither_chosen_nor_given():
    for platform in ("tpu", "cpu"):
        options = RunOptions(attention="auto", platform=platform)
        assert with_kernel(options, BERT, 128).attention == "xla"
    with pytest.raises(ValueError, match="causal here, and a bert model sees both ways"):
        with_kernel(RunOptions(attention="splash"), BERT, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lm_head": True}, "layer 0: causal=False sees the next word"),
        ({"positions": "sinusoidal"}, "positions='sinusoidal': choose one of"),
        ({"first_position": -1}, "first_position=-1 must be an integer from 0 on"),
        ({"parallel_residual": True}, "norm_placement='post' works with neither parallel_residual"),
        ({"layers": (LayerConfig(4),)}, "with positions='learned': give None"),
    ],
)
def test_configs_that_are_no_encoder(changes, words):
    refused(words, dataclasses.replace, BERT, error=ConfigError, **changes)


def test_config_sections_round_trip_and_old_ones_are_read():
    for name in ("pythia_70m", "olmo_7b_0424", "qwen2_5_7b", "qwen3_8b", "bert_base_uncased"):
        config, _ = preset(name)
        assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    new = {"positions", "first_position", "token_types", "embedding_norm", "pooler", "lm_head"}
    new |= {"attention_dropout", "causal", "norm_placement", "norm_kind", "qkv_clip"}
    new |= {"parallel_residual"}
    old = {k: v for k, v in config_to_dict(LLAMA).items() if k not in new}
    old["layers"] = [{k: v for k, v in x.items() if k not in new} for x in old["layers"]]
    for layer in old["layers"]:
        layer["rope"] = {k: v for k, v in layer["rope"].items() if k != "fraction"}
    assert config_from_dict(old) == LLAMA
    with pytest.raises(ConfigError, match="head_dim=5 must be even for rotary"):
        dataclasses.replace(LLAMA, head_dim=5)
    assert dataclasses.replace(BERT, head_dim=5).head_dim == 5
