"""Switch against transformers on tiny random weights: routing, capacity, losses, files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_models import random_params, tiny_of, written_again
from tiny_runs import refused

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.errors import CheckpointError
from ffn_heterogeneity.losses.router import load_balance_term, router_z_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.experts import route
from ffn_heterogeneity.models.families import preset
from ffn_heterogeneity.models.families.switch import sparse_layers
from ffn_heterogeneity.models.families.t5_names import names
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.leaves import count_parameters
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LENGTH = 40
EXPERTS = 4


@pytest.fixture(scope="module", params=[4, 64])
def pair(request, torch, tmp_path_factory):
    """(PyTorch's model, its directory); the smaller capacity drops tokens."""
    import transformers
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    # Older ones never apply the capacity (transformers #48421).
    assert tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
    sizes = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 28, "num_heads": 4}
    sizes |= {"num_layers": 4, "num_decoder_layers": 2, "num_experts": EXPERTS}
    sizes |= {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1}
    ids = {"decoder_start_token_id": 0, "expert_capacity": request.param}
    torch.manual_seed(0)
    model = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**sizes, **ids))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    place = tmp_path_factory.mktemp("switch")
    model.eval().save_pretrained(place)
    return model, place


def rows(padded=True):
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(2, 61, (2, LENGTH)), np.ones((2, LENGTH), int)
    mask[1, LENGTH // 2 :] = not padded
    return ids, mask, rng.integers(2, 61, (2, 9))


def batch_of(ids, mask, answer) -> dict:
    keys = ("encoder_tokens", "encoder_segment_ids", "tokens")
    return dict(zip(keys, (x.astype(np.int32) for x in (ids, mask, answer)), strict=True))


ROUTED = Probe(
    "routed",
    lambda seen, *_: {
        "logits": jnp.zeros((*seen.ffn_input.shape[:2], EXPERTS))
        if seen.routing is None
        else seen.routing.logits,
        "accepted": jnp.ones(seen.ffn_input.shape[:2], bool)
        if seen.routing is None
        else seen.routing.accepted[..., 0],
    },
    kind="example",
)


def test_logits_gradients_and_routers_equal_torch(torch, pair):
    model, place = pair
    ids, mask, answer = rows()
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    model.zero_grad()
    made = model(
        **given, decoder_input_ids=torch.tensor(answer), output_router_logits=True, use_cache=False
    )
    weight = np.random.default_rng(1).normal(size=(2, 9, 61)).astype(np.float32)
    (made.logits * torch.tensor(weight)).sum().backward()
    ours = fh.load_model(place)
    capacity = ours.config.layers[1].capacity

    @jax.jit
    def run(params, batch):
        def total(params):
            outputs = causal_lm.forward(ours.config, params, batch, probes=(ROUTED,))
            values = causal_lm.logits(ours.config, params, outputs["hidden"])
            return jnp.sum(values * weight), (values, outputs["probes"]["routed"])

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, (values, routed)), slopes = run(ours.params, batch_of(ids, mask, answer))
    np.testing.assert_allclose(values, made.logits.detach().numpy(), atol=1e-4)
    for stack, theirs in (
        ("encoder", made.encoder_router_logits),
        ("decoder", made.decoder_router_logits),
    ):
        logits = np.stack([x.detach().numpy().reshape(2, -1, EXPERTS) for x in theirs])
        # States of padding differ: PyTorch's see the text.
        real = mask > 0 if stack == "encoder" else np.ones(answer.shape, bool)
        ours_at = np.asarray(routed[stack]["logits"])[1::2]
        np.testing.assert_allclose(ours_at[:, real], logits[:, real], atol=1e-5)
    dropped = 1 - np.asarray(routed["encoder"]["accepted"])[:, mask > 0]
    assert (dropped.sum() > 0) == (capacity == 4)
    theirs = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    checked = 0
    for path, name in names(ours.config).items():
        slope = np.asarray(flatten(unstack(slopes))[path])
        turned = slope.swapaxes(-1, -2) if path.endswith("/kernel") else slope
        each = (
            [name] if "{e}" not in name else [name.replace("{e}", str(e)) for e in range(EXPERTS)]
        )
        for one, part in zip(each, turned if len(each) > 1 else [turned], strict=True):
            want = theirs[one].numpy() if one in theirs else np.zeros_like(part)  # unused expert
            assert np.linalg.norm(part - want) <= 1e-4 * np.linalg.norm(want) + 1e-6, one
        checked += np.linalg.norm(slope) > 0
    assert checked == len(names(ours.config))


def test_router_losses_equal_torchs(torch, pair):
    """transformers adds the losses of both stacks; ours is the mean of layers, or of stacks."""
    model, place = pair
    ids, mask, answer = rows(padded=False)
    given = {"input_ids": torch.tensor(ids), "labels": torch.tensor(answer)}
    with torch.no_grad():
        made = model(**given, decoder_input_ids=torch.tensor(answer), output_router_logits=True)
    ours = fh.load_model(place)
    context = TermContext("load_balance", model=ours.config)
    balance = load_balance_term(context, pooled=True, per_row=True)
    z = router_z_term(context)
    batch = batch_of(ids, mask, answer)

    @jax.jit
    def run(params, batch):
        outputs = causal_lm.forward(ours.config, params, batch, probes=balance.probes)
        return [term.function(params, outputs, batch) for term in (balance, z)]

    aux, logs = run(ours.params, batch)
    theirs = float(made.encoder_aux_loss + made.decoder_aux_loss)
    assert 2 * float(aux.total / aux.denominator) == pytest.approx(theirs, abs=1e-6)
    # Two sparse layers of the encoder, one of the decoder; the mean over three layers.
    theirs = float(2 * made.encoder_z_loss + made.decoder_z_loss) / 3
    assert float(logs.total / logs.denominator) == pytest.approx(theirs, abs=1e-6)
    dropped = np.asarray(aux.metrics["dropped"] / aux.denominator)
    hit = ours.config.layers[1].capacity == 4
    assert (dropped[[1, 3]] > 0.4).all() == hit and not dropped[[0, 2, 4]].any()
    uneven = np.asarray(aux.metrics["entropy"] / aux.denominator)
    p = [
        torch.softmax(x, -1).numpy()
        for x in (*made.encoder_router_logits, *made.decoder_router_logits)
    ]
    expected = [float(-(x * np.log(x)).sum(-1).mean()) for x in p]
    np.testing.assert_allclose(uneven[[1, 3, 5]], expected, rtol=1e-5)


def test_rows_balance_by_themselves():
    """By hand, with padding: each row's f and P, rows of padding left out."""
    config = tiny_of("switch", 4)
    params = random_params(config)
    ids, _, answer = (x % 29 for x in rows())
    mask = np.ones(ids.shape, int)
    mask[1, 7:] = 0
    batch = {
        "encoder_tokens": np.r_[ids, ids[:1]],
        "encoder_segment_ids": np.r_[mask, 0 * mask[:1]],
    }
    batch["tokens"] = np.r_[answer, answer[:1]]
    term = load_balance_term(TermContext("load_balance", model=config), per_row=True)
    probes = (*term.probes, ROUTED)
    outputs = causal_lm.forward(config, params, batch, probes=probes)
    made = term.function(params, outputs, batch)
    losses = []
    for stack, layer, lengths in (("encoder", 1, (LENGTH, 7)), ("decoder", 1, (9, 9, 9))):
        logits = np.asarray(outputs["probes"]["routed"][stack]["logits"][layer], np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        each = []
        for row, length in zip(p, lengths, strict=False):
            f = np.bincount(row[:length].argmax(-1), minlength=EXPERTS) / length
            each.append(EXPERTS * np.sum(f * row[:length].mean(0)))
        losses.append(np.mean(each))
    assert float(made.total / made.denominator) == pytest.approx(np.mean(losses), rel=1e-5)


def test_capacity_counts_in_the_rows_order():
    """By hand: the third choice of one column is dropped, in each row again."""
    layer = dataclasses.replace(tiny_of("switch", 4).layers[1], experts=2, top_k=1, capacity=2)
    router = {"kernel": jnp.asarray([[1.0, -1.0]])}
    x = jnp.asarray([[1.0, 1, -1, 1, -1, -1], [-1, -1, -1, 1, 1, 1]])[..., None]
    seen = route(layer, router, x)
    assert seen.accepted[..., 0].tolist() == [
        [True, True, True, False, True, False],
        [True, True, False, True, True, False],
    ]
    two = dataclasses.replace(layer, top_k=2)  # each token chooses both columns
    assert route(two, router, x).accepted[..., 0].tolist() == [[True] * 2 + [False] * 4] * 2


def test_overflow_and_noise():
    """The layer's output of dropped tokens, and noise of the router in training alone."""
    config = tiny_of("switch", 4)
    one = dataclasses.replace(config.layers[1], capacity=1)
    params = random_params(config)
    batch = batch_of(*(x % 29 for x in rows(padded=False)))
    out = Probe(
        "out",
        lambda seen, *_: (
            {"input": seen.ffn_input, "output": seen.ffn_output}
            | {
                "gate": seen.ffn_input[..., 0]
                if seen.routing is None
                else seen.routing.gates[..., 0]
            }
            | {
                "kept": jnp.bool_(seen.ffn_input[..., 0])
                if seen.routing is None
                else seen.routing.accepted[..., 0]
            }
        ),
        kind="example",
    )

    def encoder(overflow, dropout=None, jitter=0.0):
        layer = dataclasses.replace(one, overflow=overflow, jitter=jitter)
        layers = tuple(layer if i == 1 else x for i, x in enumerate(config.layers))
        changed = dataclasses.replace(config, layers=layers)
        made = causal_lm.forward(changed, params, batch, probes=(out,), dropout=dropout)
        return jax.tree.map(lambda x: np.asarray(x[1]), made["probes"]["out"]["encoder"])

    zero, given = encoder("zero"), encoder("input")
    gone = ~zero["kept"]
    assert gone.any() and not zero["output"][gone].any() and zero["output"][~gone].any()
    expected = zero["gate"][gone][:, None] * zero["input"][gone]
    np.testing.assert_allclose(given["output"][gone], expected, rtol=1e-6)
    np.testing.assert_array_equal(given["output"][~gone], zero["output"][~gone])
    quiet = encoder("zero", jitter=0.01)
    jax.tree.map(np.testing.assert_array_equal, quiet, zero)  # without a key there is no noise
    noisy = [encoder("zero", (jax.random.key(i), None), 0.01)["gate"] for i in (0, 0, 1)]
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert 0 < np.abs(noisy[0] - zero["gate"]).max() < 0.05 and np.any(noisy[0] != noisy[2])


def test_files_come_back_bit_by_bit(torch, pair, tmp_path):
    model, place = pair
    written_again(place, tmp_path / "again")
    ids, mask, answer = (torch.tensor(x) for x in rows())
    again = type(model).from_pretrained(tmp_path / "again").eval()
    with torch.no_grad():
        one, other = (
            x(input_ids=ids, attention_mask=mask, decoder_input_ids=answer)[0]
            for x in (model, again)
        )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    tensors = [load_file(x / "model.safetensors") for x in (place, tmp_path / "again")]
    for name, tensor in tensors[1].items():
        np.testing.assert_array_equal(tensor, tensors[0][name])


def test_greedy_tokens_equal_torchs(torch, pair):
    model, place = pair
    ours = fh.load_model(place)
    ids, mask, _ = rows()
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    how = {"max_new_tokens": 20, "do_sample": False, "num_beams": 1}
    theirs = model.generate(**given, **how).numpy()[:, 1:].tolist()
    prompts = [row[real > 0] for row, real in zip(ids, mask, strict=True)]
    wanted = [one[: one.index(1) + 1] if 1 in one else one for one in theirs]
    for size in (1, 2):
        generator = Generator(ours.config, ours.params, batch_size=size)
        answers = generator(prompts, Sampling(20), progress=None)
        assert [list(answer.tokens) for answer in answers] == wanted


def test_padding_of_a_prompt_takes_no_experts_place(pair, monkeypatch):
    ours, encode, kept = fh.load_model(pair[1]), causal_lm.encode, []

    def watched(config, params, batch, options=RunOptions()):
        states = encode(config, params, batch, options)
        kept.append(np.asarray(states)[np.asarray(batch["segment_ids"]) > 0])
        return states

    monkeypatch.setattr(causal_lm, "encode", watched)
    ids, mask, _ = rows()
    prompts = [row[real > 0] for row, real in zip(ids, mask, strict=True)]
    with jax.disable_jit():
        generator = Generator(ours.config, ours.params, batch_size=2)
        generator(prompts, Sampling(1), progress=None)
        for prompt in prompts:
            whole = {"tokens": prompt[None], "segment_ids": np.ones((1, len(prompt)), np.int32)}
            causal_lm.encode(ours.config, ours.params, whole)
    np.testing.assert_allclose(kept[0], np.concatenate(kept[1:]), atol=1e-5)


def test_published_sizes():
    """MLP Fusion's Table VII: 1,072.99M parameters with its classification head."""
    config = preset("switch_base_16")[0]
    head = 768 * 768 + 768 + 768 * 2 + 2
    assert round((count_parameters(config)["total"] + head) / 1e6, 2) == 1072.99
    assert config.groups["sparse"] == tuple(range(1, 24, 2))
    assert sparse_layers(12, 3) == (1, 5, 9) and sparse_layers(2, 2) == (0, 1)
    assert sparse_layers(4, 0) == (1,) and sparse_layers(2, 5) == ()


def test_other_routers_are_rejected(pair, tmp_path):
    _, place = pair
    config = json.loads((place / "config.json").read_text())
    for key, value, message in (
        ("router_bias", True, "router_bias=True"),
        ("dense_act_fn", "gated-gelu", "dense_act_fn='gated-gelu'"),
        ("expert_capacity", 0, "expert_capacity=0"),
        ("num_experts", 10**6, "num_experts=1000000"),
        ("num_layers", "4", "num_layers"),
        ("num_sparse_encoder_layers", "2", "num_sparse_encoder_layers='2'"),
        ("router_jitter_noise", "a", "jitter"),
        ("router_jitter_noise", 1.5, "jitter=1.5"),
        ("decoder_start_token_id", None, "decoder_start_token_id is null"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
        refused(message, fh.load_model, tmp_path, error=CheckpointError)
