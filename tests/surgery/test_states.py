"""Calibration on self-generated text, and compensation by the states of kept neurons."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from test_state_formulas import moments_of
from tiny_models import byte_tokenizer, random_params, tiny_of
from tiny_runs import refused

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.launch.in_memory import filled_up
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.leaves import Place, expected_shapes
from ffn_heterogeneity.models.stack import layer_leaves, restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.surgery import SURGERIES, blockwise, own_text, states
from ffn_heterogeneity.surgery.adapt import fold_all
from ffn_heterogeneity.surgery.blockwise import compensated
from ffn_heterogeneity.surgery.calibration import calibration_rows, write_rows
from ffn_heterogeneity.surgery.own_text import own_rows
from ffn_heterogeneity.surgery.removal import take_neurons
from ffn_heterogeneity.surgery.seen import seen_states
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LLAMA = dataclasses.replace(tiny_of("llama", layers=2), vocab_size=258)


def model_of(config=LLAMA, params=None):
    params = random_params(config) if params is None else params
    return Model(config, params, byte_tokenizer(), "tiny")


def rows_of(config, count=8, seed=0):
    rng = np.random.default_rng(seed)
    drawn = (rng.integers(2, config.vocab_size, n) for n in rng.choice([9, 19], count))
    return [np.append(0, ids).astype(np.int32) for ids in drawn]


def states_of(config, params, rows, layer, what="ffn_state", places=slice(1, None)):
    """h of every real token but the first, [tokens, m] in float64, one row at a time."""
    probe = Probe("h", lambda seen, batch, _: getattr(seen, what), kind="example")
    collected, run = [], jax.jit(functools.partial(causal_lm.forward, config, probes=(probe,)))
    for row in rows:
        outputs = run(params, {"tokens": row[None]})
        collected.append(np.asarray(outputs["probes"]["h"], np.float64)[layer, 0, places])
    return collected


def down_of(params, layer):
    return np.asarray(list(layer_leaves(params, "ffn"))[layer][1]["down"]["kernel"], np.float64)


def test_sums_are_of_real_tokens_alone():
    """Padded rows of many lengths: neither padding nor the first token is counted."""
    params, rows = random_params(LLAMA), rows_of(LLAMA)
    seen = seen_states(LLAMA, params, rows)
    for layer in range(2):
        h = np.concatenate(states_of(LLAMA, params, rows, layer))
        wanted = {"mean": np.abs(h).mean(0), "signed": h.mean(0), "norm": np.linalg.norm(h, axis=0)}
        for name, values in wanted.items():
            np.testing.assert_allclose(seen[layer][name], values, rtol=1e-5, atol=1e-9)


# ---- block by block


def taken(model, survivors):
    """The model with only those neurons of every layer."""
    tree = unstack(jax.tree.map(np.asarray, model.params))
    for i, layer in enumerate(tree["layers"]):
        place = Place(i, None, "ffn")
        layer["ffn"] = take_neurons(model.config, place, layer["ffn"], survivors)
    config = model.config.with_widths([len(survivors)] * model.config.n_layers)
    return dataclasses.replace(model, config=config, params=restack(config, tree))


@pytest.mark.parametrize(
    ("family", "sequential"),
    [
        ("gpt2", False),
        ("gemma3", True),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
    ],
)
def test_every_layer_is_fitted_to_what_its_output_lost(family, sequential, monkeypatch):
    """The formula on states that one row at a time gives in float64: the inputs are the whole
    model's, or those of the model compensated so far; a norm behind the FFN weighs tokens. Here
    bos decides most neurons' units."""
    monkeypatch.setattr(states, "LOUD", 0.5)
    config = dataclasses.replace(tiny_of(family, layers=2), vocab_size=258)
    model, rows = model_of(config), rows_of(config, 16)
    survivors = np.arange(config.ffn_widths[0] // 2)
    smaller = taken(model, survivors)
    fitted, reports = compensated(model, smaller, "state_ridge", rows, sequential)
    before, _ = compensated(model, smaller, "state_ridge", rows)
    first = unstack(fitted.params)["layers"][:1] + unstack(model.params)["layers"][1:]
    mixed = config.with_widths([len(survivors), config.ffn_widths[0]])
    params = restack(mixed, {**unstack(model.params), "layers": first})
    mixed = filled_up(dataclasses.replace(model, config=mixed, params=params))
    for layer in range(2):
        source = mixed if sequential and layer == 1 else model
        source = source.config, source.params
        both = ("ffn_state", "ffn_output")
        h, outputs = (states_of(*source, rows, layer, one, slice(None)) for one in both)
        bos, ends = (np.stack([x[0] for x in one]) for one in (h, outputs))
        h, outputs = ([x[1:] for x in one] for one in (h, outputs))
        w, weights = down_of(model.params, layer), [np.ones(len(y)) for y in outputs]
        if config.post_norms:
            weights = [1 / ((y**2).mean(1) + config.norm_eps) for y in outputs]
        h = np.concatenate([x * np.sqrt(a)[:, None] for x, a in zip(h, weights, strict=True)])
        g, r, total = (
            h[:, survivors],
            h[:, len(survivors) :] @ w[len(survivors) :],
            np.concatenate(weights).sum(),
        )
        if config.post_norms:
            bos = bos / np.sqrt((ends**2).mean(1, keepdims=True) + config.norm_eps)
        first = (bos[:, survivors] ** 2).sum(0)
        moments = dataclasses.replace(moments_of(g, r, first, len(rows)), weight=total)
        assert (moments.units() > np.sqrt(np.diag(moments.states) / total)).any()
        wanted = w[: len(survivors)] + states.explained(moments, reports[layer]["lambda"])
        np.testing.assert_allclose(down_of(fitted.params, layer), wanted, rtol=0, atol=3e-5)
        assert reports[layer]["layer"] == layer and reports[layer]["tokens"] == len(g)
    apart = np.abs(down_of(fitted.params, 1) - down_of(before.params, 1)).max()
    assert (apart > 0) == sequential


def test_masks_and_factors_count():
    """Equal to weights that include them; the factor stays separate, the mask does not."""
    model, rng, rows = model_of(), np.random.default_rng(0), rows_of(LLAMA, 16)
    tree = unstack(jax.tree.map(np.asarray, model.params))
    for layer in tree["layers"]:
        down = layer["ffn"]["down"]
        mask = (rng.random(down["kernel"].shape) < 0.7).astype(np.float32)
        layer["ffn"]["down"] = {**down, "mask": mask}
        layer["ffn"]["neuron_scale"] = rng.uniform(0.5, 2, len(mask)).astype(np.float32)
    masked = dataclasses.replace(model, params=restack(LLAMA, tree))
    survivors = np.arange(0, LLAMA.ffn_widths[0], 2)
    fitted, folded = (
        compensated(one, taken(one, survivors), "state_ridge", rows)[0]
        for one in (masked, fold_all(masked)[0])
    )
    first = next(layer_leaves(fitted.params, "ffn"))[1]
    assert set(first["down"]) == {"kernel"} and "neuron_scale" in first
    batch = {"tokens": np.stack([row[:9] for row in rows])}
    one, other = (causal_lm.forward(x.config, x.params, batch) for x in (fitted, folded))
    np.testing.assert_allclose(one["hidden"], other["hidden"], atol=2e-4)


def test_own_text_that_repeats_itself_is_named(caplog, monkeypatch):
    looping = np.array([9, *([1, 2, 3, 4] * 3)])  # of 9 runs of four tokens 4 are distinct
    assert own_text.repeated([looping, np.arange(12)]) == pytest.approx(5 / 17)
    assert own_text.repeated([np.arange(3)]) == 0
    model = model_of()
    own_rows(model, 40)
    assert "repeats itself" not in caplog.text
    head = np.zeros_like(model.params["head"]["kernel"])
    head[:, 5] = 100 * np.sign(np.asarray(model.params["final_norm"]["scale"]))  # 5, or token 6
    head[:, 6] = -head[:, 5]
    own_rows(dataclasses.replace(model, params={**model.params, "head": {"kernel": head}}), 40)
    assert "repeats itself" in caplog.text and "give calibration=<text>" in caplog.text


@pytest.mark.parametrize("method", ["state_ridge", "bias"])
def test_a_layer_that_stays_is_left_alone(method):
    """Biases of 0, which other layers get for the format, do not change them."""
    model = model_of()
    asked = {"criterion": "entropy", "layers": "1", "calibration": "own"}
    asked |= {"calibration_tokens": 1024, "compensation": method}
    smaller, report = SURGERIES["prune"](model, asked)
    assert [one["layer"] for one in report["compensated"]] == [1]
    np.testing.assert_array_equal(down_of(smaller.params, 0), down_of(model.params, 0))


def test_biases_beside_experts_have_their_shapes():
    """A Llama of which some layers became experts."""
    model = model_of()
    mixed, _ = SURGERIES["partition"](model, {"experts": 2, "top_k": 1, "layers": "0"})
    biased = blockwise._with_biases(mixed)
    wanted = {k: x for k, x in expected_shapes(biased.config).items() if k.endswith("bias")}
    made = flatten(unstack(biased.params)).items()
    assert {path: x.shape for path, x in made if path.endswith("bias")} == wanted


@pytest.mark.parametrize("method", ["merged", "fusion", "sketch"])
def test_clusters_can_be_compensated_too(method):
    """P stays separate; the blocks' outputs on the calibration text come closer."""
    model = model_of()
    asked = {"method": method, "ratio": 0.5, "seed": 1}
    plain, _ = SURGERIES["fuse"](model, asked)
    settings = {"compensation": "state_ridge", "calibration": "own", "calibration_tokens": 1024}
    fitted, report = SURGERIES["fuse"](model, asked | settings)
    assert all(0 < one["residual"] < 1 for one in report["compensated"])
    tokens = np.stack([row[:100] for row in report["own_rows"] if len(row) >= 100])
    errors = errors_of(model, tokens, plain, fitted)
    assert errors[1] < errors[0]
    first = [next(layer_leaves(one.params, "ffn"))[1] for one in (plain, fitted)]
    assert ("neuron_scale" in first[1]) == (method == "fusion")
    np.testing.assert_array_equal(first[0]["up"]["kernel"], first[1]["up"]["kernel"])


def errors_of(model, tokens, *others):
    reference, *others = (
        np.asarray(causal_lm.forward(one.config, one.params, {"tokens": tokens})["hidden"])
        for one in (model, *others)
    )
    return [np.linalg.norm(other - reference) for other in others]


# ---- self-generated text


def test_own_text_begins_with_bos_and_has_as_many_tokens_as_asked(monkeypatch):
    model = model_of()
    rows = own_rows(model, 700, seed=3)
    assert sum(len(row) - 1 for row in rows) == 700 and {row[0] for row in rows} == {0}
    again, other = own_rows(model, 700, seed=3), own_rows(model, 700, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(rows, other, strict=False))
    monkeypatch.setattr(own_text, "BATCH", 2)  # several rounds, each with other draws
    many = own_rows(model, 1400, seed=3)
    assert len(many) > 4 and len({row.tobytes() for row in many}) == len(many)


def test_own_text_is_what_the_model_finds_likely():
    """Its mean NLL is the entropy of the model's predictions; another model's text has a higher
    NLL."""

    def sharp(seed):
        params = jax.tree.map(np.array, random_params(LLAMA, seed=seed))
        params["embed"]["embedding"] *= 4
        return model_of(params=params)

    def surprise(model, rows):
        tokens = np.stack([row[:65] for row in rows if len(row) >= 65])
        hidden = causal_lm.forward(model.config, model.params, {"tokens": tokens})["hidden"]
        logits = np.asarray(causal_lm.logits(model.config, model.params, hidden), np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        said = np.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], -1)
        return -said.mean(), -(np.exp(log_p) * log_p).sum(-1)[:, :-1].mean()

    model, other = sharp(0), sharp(1)
    surprisal, entropy = surprise(model, own_rows(model, 4000, seed=2))
    assert surprisal == pytest.approx(entropy, rel=0.05) and entropy < 5
    assert surprise(model, own_rows(other, 4000, seed=2))[0] > 1.2 * entropy


def test_own_text_is_kept_and_read_again(tmp_path):
    model = model_of()
    rows = own_rows(model, 700, seed=3)
    write_rows(tmp_path / "own.jsonl", rows)
    path = str(tmp_path / "own.jsonl")
    again, fewer = (calibration_rows(model, path, tokens) for tokens in (None, 600))
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert sum(len(row) - 1 for row in fewer) == 600
    asked = {"criterion": "flap", "calibration_tokens": 700, "seed": 3}
    prune = SURGERIES["prune"]
    one, two = (prune(model, asked | {"calibration": text})[1] for text in ("own", path))
    assert one["removed"] == two["removed"]
    other = model_of(dataclasses.replace(LLAMA, bos_id=5))
    told_of = ((other, None, "rows of another model"), (model, 800, "700 tokens"))
    for reader, tokens, message in told_of:
        refused(message, calibration_rows, reader, path, tokens)
    for line in ('{"tokens": [0]}', '{"tokens": ["a"]}', '{"tokens": [0, 1e9]}', "[]", "{", "1"):
        (tmp_path / "bad.jsonl").write_text(f"{line}\n")
        refused("line 1: no row", calibration_rows, model, str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("criterion", ["optipfair", "wanda_sp", "flap", "entropy"])
def test_removal_without_data(criterion):
    """On self-generated text, the compensated model is closer to the dense model."""
    model = model_of()
    asked = {"criterion": criterion, "ratio": 0.25, "calibration": "own", "seed": 1}
    asked |= {"calibration_tokens": 1024}
    plain, _ = SURGERIES["prune"](model, asked)
    ridge, report = SURGERIES["prune"](model, asked | {"compensation": "state_ridge"})
    assert all(0 < one["residual"] < 1 for one in report["compensated"])
    tokens = np.stack([row[:100] for row in own_rows(model, 1024, seed=1) if len(row) >= 100])
    errors = errors_of(model, tokens, plain, ridge)
    assert errors[1] < errors[0]


def test_wanda_and_flap_are_their_formulas():
    from ffn_heterogeneity.surgery.criteria import layer_scores

    params, rows = random_params(LLAMA), rows_of(LLAMA)
    seen = seen_states(LLAMA, params, rows)
    h, w = np.concatenate(states_of(LLAMA, params, rows, 1)), down_of(params, 1)
    ffn = dict(list(layer_leaves(params, "ffn"))[1][1])
    norms = np.linalg.norm(w, axis=1)
    wanted = {"wanda_sp": np.linalg.norm(h, axis=0) * norms, "flap": h.var(0) * norms**2}
    for name, values in wanted.items():
        np.testing.assert_allclose(
            layer_scores(name, ffn, layer=1, activations=seen[1]), -values, rtol=1e-4
        )


def test_flaps_bias_keeps_the_mean_of_the_output():
    config = tiny_of("gpt2", layers=2)
    model, rows = model_of(config), rows_of(config)
    survivors = np.arange(1, config.ffn_widths[0], 2)
    fitted, _ = compensated(model, taken(model, survivors), "bias", rows)
    h, gone = np.concatenate(states_of(config, model.params, rows, 0)), survivors - 1
    added = h.mean(0)[gone] @ down_of(model.params, 0)[gone]
    new, old = (next(layer_leaves(one.params, "ffn"))[1]["down"] for one in (fitted, model))
    np.testing.assert_allclose(new["bias"] - old["bias"], added, atol=1e-6)
    np.testing.assert_array_equal(new["kernel"], old["kernel"][survivors])
    few = [row[:2] for row in rows[:5]]  # a mean needs no more tokens than neurons
    assert compensated(model, taken(model, survivors), "bias", few)[1]
    words = f"layer 0: 5 calibration tokens are too few to fit {len(survivors)}"
    refused(words, compensated, model, taken(model, survivors), "state_ridge", few)


def test_what_is_wrong_is_said():
    settings = {"criterion": "optipfair", "ratio": 0.25, "calibration": "own"}
    settings |= {"calibration_tokens": 512, "compensation": "state_ridge"}
    for config, asked, message in (
        (tiny_of("bert", layers=2), {}, "is an encoder"),
        (dataclasses.replace(LLAMA, bos_id=None), {}, "no bos"),
        (LLAMA, {"calibration": ""}, "calibration=<text file>, or own"),
        (LLAMA, {"calibration_tokens": 100}, "at least 512"),
        (tiny_of("gemma2", layers=2), {"compensation": "bias"}, "use state_ridge"),
    ):
        refused(message, SURGERIES["prune"], model_of(config), settings | asked)


def test_fewer_tokens_than_neurons_are_refused():
    model = model_of()
    few = [row[:3] for row in rows_of(LLAMA, 4)]
    with pytest.raises(ValueError, match="calibration_tokens of at least 10, better"):
        compensated(model, taken(model, np.arange(10)), "state_ridge", few)


@pytest.mark.parametrize("name", ["prune", "fuse"])
def test_both_surgeries_refuse_the_same_settings(name):
    for asked, message in (
        ({"sequential": True}, "sequential=True works only with compensation"),
        ({"compensation": "gram"}, "compensation 'gram' needs calibration text"),
        ({"compensation": "gram", "calibration": "own", "calibration_tokens": 9}, "at least 512"),
    ):
        refused(message, SURGERIES[name].check, asked)


def test_states_that_are_not_finite_are_said():
    model = model_of()
    broken = unstack(jax.tree.map(np.array, model.params))
    broken["layers"][1]["ffn"]["up"]["kernel"][0, 0] = np.nan
    broken = dataclasses.replace(model, params=restack(LLAMA, broken))
    with pytest.raises(ValueError, match="layer 1: its states are not finite"):
        compensated(broken, taken(model, np.arange(8)), "state_ridge", rows_of(LLAMA, 16))
