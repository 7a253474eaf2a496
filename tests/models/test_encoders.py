"""Encoders: parity with torch's BERT and RoBERTa, attention both ways, its dropout, refusals.

Tiny models have random weights (norms too); files are in test_encoder_files.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_tools import TYPES, torch_encoder
from tiny_models import LLAMA, batch_of, mask_neurons, random_params, tiny_of

from ffn_heterogeneity.io.assemble import Stored, assemble
from ffn_heterogeneity.io.huggingface import read_pretrained
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import attention, causal_lm, decoding
from ffn_heterogeneity.models import blocked as blocks
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
from ffn_heterogeneity.models.families import family_by_name
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.paths import flatten
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.surgery.plan import Plan
from ffn_heterogeneity.surgery.reduce import reduce_model

pytestmark = pytest.mark.usefixtures("compiled_quickly")

BERT = tiny_of("bert", layers=3)
# What every layer sees and gives.
STREAM = Probe("stream", lambda seen, batch, _: (seen.ffn_input - seen.middle, seen.block_output))


@pytest.fixture(params=TYPES)
def encoder(request, torch, tmp_path):
    """(torch model, our config, our parameters)."""
    model = torch_encoder(torch, f"{request.param}Model")
    model.save_pretrained(tmp_path)
    return model, *read_pretrained(tmp_path)


def padded_batch(config, side: str) -> dict:
    """Rows of 15, 9 and 4 tokens in 15 places, the second half of each a sentence of its own."""
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
    arguments = {} if "Roberta" in type(model).__name__ else {
        "position_ids": (real.cumsum(1) - 1).clamp(0)
    }  # fmt: skip
    return model(
        torch.tensor(batch["tokens"]).long(),
        attention_mask=real,
        token_type_ids=torch.tensor(batch["token_types"]).long(),
        output_hidden_states=True,
        **arguments,
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kernel", ["xla", "plain"])
def test_hidden_states_of_every_layer_agree(torch, encoder, side, kernel):
    model, config, params = encoder
    batch = padded_batch(config, side)
    options = RunOptions(attention=kernel)
    run = jax.jit(
        lambda params, batch: causal_lm.forward(
            config, params, batch, options=options, probes=(STREAM,)
        )
    )
    ours = run(params, batch)
    with torch.no_grad():
        theirs = run_torch(torch, model, batch)
    inside, states = ours["probes"]["stream"]
    assert not np.any(np.asarray(inside)), "after a post-norm the FFN reads the stream itself"
    real = batch["segment_ids"] > 0
    assert len(states) == len(theirs.hidden_states) - 1 == 3
    for mine, reference in zip(states, theirs.hidden_states[1:], strict=True):
        assert np.abs(reference.numpy()[real]).max() > 0.5
        np.testing.assert_allclose(mine[real], reference.numpy()[real], atol=1e-4, rtol=0)
    np.testing.assert_array_equal(ours["hidden"], states[-1])
    # Torch pools the first place, be it padding.
    first = slice(None) if side == "right" else slice(0, 1)
    pooled = theirs.pooler_output.numpy()[first]
    np.testing.assert_allclose(ours["pooled"][first], pooled, atol=1e-4, rtol=0)


def test_gradients_agree_leaf_by_leaf(torch, encoder):
    model, config, params = encoder
    batch = padded_batch(config, "right")
    weights = np.random.default_rng(0).normal(size=(3, 15, 32)).astype(np.float32)
    weights *= batch["segment_ids"][..., None] > 0

    @jax.jit
    @jax.grad
    def gradient(params):
        outputs = causal_lm.forward(config, params, batch)
        return jnp.sum(outputs["hidden"] * weights) + jnp.sum(outputs["pooled"])

    model.zero_grad()
    theirs = run_torch(torch, model, batch)
    (theirs.last_hidden_state * torch.tensor(weights)).sum().add(
        theirs.pooler_output.sum()
    ).backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    # Torch gives the padding token's embedding no gradient.
    pad = config.pad_id
    stored = {name: Stored(g.shape, "grad", lambda g=g: g) for name, g in grads.items()}
    reference = assemble(config, family_by_name(config.family).rules(config), stored)
    ours, reference = flatten(unstack(gradient(params))), flatten(unstack(reference))
    assert set(ours) == set(reference)
    for path, expected in reference.items():
        found, size = np.array(ours[path]), np.linalg.norm(expected)
        if path.endswith("/k/bias"):  # one number for all logits of a query: rounding alone
            assert max(size, np.linalg.norm(found)) < 1e-4, path
            continue
        if path == "embed/embedding":
            found[pad] = 0
        assert size > 0 and np.linalg.norm(found - expected) < 1e-4 * size, path


@pytest.mark.parametrize("config", [BERT, tiny_of("roberta", layers=2)], ids=["bert", "roberta"])
def test_padding_on_either_side_gives_the_same_states(config):
    config = dataclasses.replace(config, pad_id=1, vocab_size=97)
    params, found = random_params(config), {}
    for side in ("left", "right"):
        batch = padded_batch(config, side)
        outputs = causal_lm.forward(config, params, batch)
        states = outputs["hidden"][batch["segment_ids"] > 0]
        found[side] = [states, *([outputs["pooled"]] if config.pooler else [])]
    for left, right in zip(*found.values(), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_packed_documents_are_as_if_alone():
    params, whole = random_params(BERT), batch_of(BERT.vocab_size, rows=2)
    del whole["positions"]
    packed = causal_lm.forward(BERT, params, whole)["hidden"]
    for places in (slice(0, 4), slice(4, 8)):
        alone = causal_lm.forward(BERT, params, {"tokens": whole["tokens"][:, places]})["hidden"]
        np.testing.assert_allclose(packed[:, places], alone, atol=1e-5)


# ---- attention


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block", [128, 16])  # of 384 rows, the second in loops of parts
def test_blocked_equals_plain_both_ways(window, block, monkeypatch):
    monkeypatch.setattr(blocks, "MIN_BLOCK", block)
    rng, size = np.random.default_rng(1), 384
    segments = np.stack([np.repeat([1, 2, 0], [120, 130, 134]), np.ones(size, int)])
    with jax.enable_x64(True):
        heads = (4, 2, 2)
        arrays = [jnp.asarray(rng.normal(size=(2, size, count, 8))) for count in heads]
        positions = jnp.arange(size)[None]
        make = functools.partial(attention_mask, positions, positions, window, segments, segments)
        mask = make(causal=False)

        def total(form, mask, *arrays):
            out = form(*arrays, mask, scale=0.4)
            return jnp.sum(jnp.sin(out[0] if isinstance(out, tuple) else out))

        def run(form, mask):
            function = functools.partial(total, form, mask)
            value, gradient = jax.jit(jax.value_and_grad(function, (0, 1, 2)))(*arrays)
            return [value, *gradient]

        plain, blocked = run(plain_attention, mask), run(blocked_attention, mask)
        for a, b in zip(plain, blocked, strict=True):
            assert np.abs(a - b).max() <= 1e-12 * np.abs(a).max()
        assert abs(run(blocked_attention, make(causal=True))[0] - plain[0]) > 1
    visible = np.asarray(mask.visible)
    assert visible[0, 0, 119] == (window is None) and visible[0, 100, 119] and visible[0, 119, 100]
    assert not visible[0, 119, 120] and (visible == visible.transpose(0, 2, 1)).all()


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


def test_sink_weights_both_ways_are_the_first_column():
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 150, 2, 8)), jnp.float32) for _ in range(3))
    positions = jnp.arange(150)[None]
    mask = attention_mask(positions, positions, None, causal=False)
    weights = plain_attention(q, k, v, mask, scale=0.4)[1]
    found = attention.sink_weights(q, k, v, mask, scale=0.4)
    np.testing.assert_allclose(found, weights[:, :, 0, :, 0].transpose(0, 2, 1), rtol=1e-5)


def test_attention_dropout_keeps_the_expectation():
    rng, positions = np.random.default_rng(0), jnp.arange(12)[None]
    q, k, v = (jnp.asarray(rng.normal(size=(1, 12, 2, 4)), jnp.float32) for _ in range(3))
    mask = attention_mask(positions, positions, None, causal=False)

    def run(key, rate):
        return plain_attention(q, k, v, mask, scale=0.5, drop=(key, rate))[0]

    keys = jax.random.split(jax.random.key(0), 20_000)
    dropped = jax.jit(jax.vmap(run, (0, None)))(keys, jnp.float32(0.3))
    whole = plain_attention(q, k, v, mask, scale=0.5)[0]
    np.testing.assert_allclose(dropped.mean(0), whole, atol=0.03)
    assert np.abs(dropped[0] - whole).max() > 0.1
    np.testing.assert_array_equal(run(keys[0], jnp.float32(0)), whole)


@pytest.mark.parametrize(
    ("drops", "training", "forms"),
    [(True, True, {"plain"}), (True, False, {"blocked"}), (False, True, {"blocked"})],
)
def test_the_plain_kernel_is_for_attention_dropout_alone(monkeypatch, drops, training, forms):
    config, called = dataclasses.replace(BERT, attention_dropout=drops), set()

    def spy(name, original):
        def call(*arguments, **more):
            called.add(name)
            return original(*arguments, **more)

        return call

    for name in ("plain", "blocked"):
        original = getattr(attention, f"{name}_attention")
        monkeypatch.setattr(attention, f"{name}_attention", spy(name, original))
    params, batch = random_params(config), batch_of(config.vocab_size)
    rate = (jax.random.key(1), jnp.float32(0.4)) if training else None
    hidden = causal_lm.forward(config, params, batch, dropout=rate)["hidden"]
    assert called == forms
    again = causal_lm.forward(config, params, batch)["hidden"]
    assert np.array_equal(hidden, again) == (not training)


def test_embeddings_drop_after_their_norm_in_training():
    config = dataclasses.replace(BERT, attention_dropout=False)
    params, batch = random_params(config), batch_of(config.vocab_size)
    first = Probe("first", lambda seen, batch, _: seen.block_input)

    def states(dropout):
        outputs = causal_lm.forward(config, params, batch, probes=(first,), dropout=dropout)
        return np.asarray(outputs["probes"]["first"][0])

    whole, dropped = states(None), states((jax.random.key(1), jnp.float32(0.4)))
    gone = dropped == 0
    assert 0.2 < gone.mean() < 0.6
    np.testing.assert_allclose(dropped[~gone], whole[~gone] / 0.6, rtol=1e-5)
    np.testing.assert_array_equal(states((jax.random.key(1), None)), whole)


# ---- what else reads a model


def test_neurons_are_removed_and_nucl_is_computed():
    params, batch = random_params(BERT), batch_of(BERT.vocab_size)
    config, smaller, removed, _ = reduce_model(BERT, params, Plan("entropy", ratio=0.25))
    assert config.ffn_widths == (9,) * 3 and config.is_encoder
    masked = restack(BERT, mask_neurons(params, removed))
    zeroed = causal_lm.forward(BERT, masked, batch)
    ours = causal_lm.forward(config, restack(config, smaller), batch)
    np.testing.assert_allclose(ours["pooled"], zeroed["pooled"], atol=1e-5)
    value = nucl_term(TermContext("nucl")).function(params)
    assert np.isfinite(value.total) and value.total != 0


# ---- what is refused


def test_what_needs_a_language_model_says_so():
    params, hidden = random_params(BERT), jnp.zeros((1, 2, 16))
    what = "a bert model is an encoder without a language-model head: {} needs a decoder"
    with pytest.raises(ValueError, match=what.format("perplexity")):
        causal_lm.require_language_model(BERT, "perplexity")
    causal_lm.require_language_model(LLAMA, "perplexity")
    with pytest.raises(ValueError, match=what.format("computing logits")):
        causal_lm.logits(BERT, params, hidden)
    with pytest.raises(ValueError, match=what.format("computing logits")):
        causal_lm.head_kernel(BERT, params)
    with pytest.raises(ValueError, match=what.format("generation")):
        decoding.make_cache(BERT, params["stack"], 1, 8)
    tokens, pads = jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=what.format("generation")):
        decoding.forward_cached(BERT, params, tokens, pads, {})
    batch = {"tokens": tokens, "positions": tokens, "subtree_ends": tokens}
    with pytest.raises(ValueError, match=what.format("a tree of tokens")):
        causal_lm.forward(BERT, params, batch)


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
        ({"first_position": -1}, "first_position must be an integer from 0 on, got -1"),
        ({"token_types": 1.5}, "token_types must be an integer from 0 on, got 1.5"),
        ({"parallel_residual": True}, "norm_placement='post' goes with neither parallel_residual"),
        ({"layers": (LayerConfig(4),)}, "with positions='learned': give None"),
        (
            {"layers": (LayerConfig(4, rope=None, norm_placement="x"),)},
            "layer 0: norm_placement='x': choose one of",
        ),
    ],
)
def test_configs_that_are_no_encoder(changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(BERT, **changes)


def test_config_sections_round_trip_and_old_ones_are_read():
    assert config_from_dict(config_to_dict(BERT)) == BERT
    new = {"positions", "first_position", "token_types", "embedding_norm", "pooler", "lm_head"}
    old = {k: v for k, v in config_to_dict(LLAMA).items() if k not in new | {"attention_dropout"}}
    for layer in old["layers"]:
        del layer["causal"], layer["norm_placement"]
    assert config_from_dict(old) == LLAMA
    odd = dataclasses.replace(BERT, head_dim=5, n_heads=3, n_kv_heads=3, d_model=15)
    assert odd.head_dim == 5
    with pytest.raises(ConfigError, match="head_dim=5 must be even for rotary"):
        dataclasses.replace(LLAMA, head_dim=5)
