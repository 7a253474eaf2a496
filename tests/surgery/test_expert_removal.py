"""Removal of experts: what they computed, scores against oracles, the smaller model."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from tiny_models import LLAMA, TEXT, WIDE, byte_tokenizer, random_params, with_experts

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.nucl_exact import STATISTICS, distributions
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.probes.observe import observe, token_batches
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.attack import massive_weights
from ffn_heterogeneity.surgery.expert_scores import RULES, expert_scores
from ffn_heterogeneity.surgery.experts import expert_sums
from ffn_heterogeneity.surgery.seen import seen_states
from ffn_heterogeneity.tree import LeafError

pytestmark = pytest.mark.usefixtures("compiled_quickly")
MIXED = with_experts(LLAMA, 4, top_k=2)
MIXED = dataclasses.replace(MIXED, layers=(LLAMA.layers[0], *MIXED.layers[1:]))
SHARED = with_experts(LLAMA, 5, top_k=2, shared=1, gates="softmax")
ROWS = [np.arange(2, 2 + n) * 7 % 250 for n in (19, 30, 11, 30, 30)]


SEED = 3  # every expert gets tokens of ROWS


def model_of(config=MIXED, seed=SEED):
    return Model(config, random_params(config, seed), byte_tokenizer(), "tiny")


def logits(model, rows=ROWS):
    batch = next(token_batches(rows, len(rows)))
    hidden = causal_lm.forward(model.config, model.params, batch)["hidden"]
    return np.asarray(causal_lm.logits(model.config, model.params, hidden))


@functools.cache
def inputs(config):
    """The FFN inputs of all layers at all positions, real or not."""
    seen = Probe("x", lambda seen, batch, per_layer: seen.ffn_input, kind="example")
    batch = token_batches(ROWS, 8)
    return observe(config, random_params(config, SEED), batch, seen)["x"]


def oracle(config, layer):
    """Per expert a list of (gate, y, h, first) of each real token sent to it, in float64."""
    settings = config.layers[layer]
    ffn = unstack(random_params(config, SEED))["layers"][layer]["ffn"]
    ffn = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), ffn)
    sent = [[] for _ in range(settings.experts)]
    for b, row in enumerate(ROWS):
        for t in range(len(row)):
            x = inputs(config)[layer, b, t].astype(np.float64)
            z = x @ ffn["router"]["kernel"]
            p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            chosen = np.argsort(-p, kind="stable")[: settings.top_k]
            g = p[chosen] / p[chosen].sum() if settings.gates == "renormalized" else p[chosen]
            pairs = [*zip(settings.shared + chosen, g, strict=True)]
            for e, gate in pairs + [(e, 1.0) for e in range(settings.shared)]:
                a = x @ ffn["gate"]["kernel"][e]
                h = a / (1 + np.exp(-a)) * (x @ ffn["up"]["kernel"][e])
                sent[e].append((gate, h @ ffn["down"]["kernel"][e], h, t == 0))
    return sent


def wanted(sent):
    """Scores of the rules on text, from the tokens of each expert."""
    norm = np.linalg.norm
    rows = {
        "reap": lambda s: -np.mean([g * norm(y) for g, y, *_ in s]),
        "frequency": lambda s: -float(len(s)),
        "output_norm": lambda s: -np.mean([norm(y) for _, y, *_ in s]),
        "man": lambda s: -np.sum([np.abs(h) for *_, h, _ in s]) / len(s),
        "msan": lambda s: -np.sum([h**2 for *_, h, _ in s]) / len(s),
        "mone": lambda s: -len(s) * np.var([y for _, y, *_ in s], axis=0).sum(),
    }
    return {name: np.array([rule(s) for s in sent]) for name, rule in rows.items()}


@pytest.mark.parametrize("config", [MIXED, SHARED], ids=["mixed", "shared"])
def test_scores_on_text_are_those_of_the_tokens_sent(config):
    sums = expert_sums(config, random_params(config, SEED), ROWS)
    assert sorted(sums) == [i for i, layer in enumerate(config.layers) if layer.experts]
    for layer in sums:
        sent = oracle(config, layer)
        for rule, scores in wanted(sent).items():
            ours = expert_scores(rule, layer, [], sums[layer])
            np.testing.assert_allclose(ours, scores, rtol=2e-5, err_msg=rule)
        later = [[h for *_, h, first in s if not first] for s in sent]
        ours = sums[layer]["size"] / sums[layer]["later"][:, None]
        mean = [np.mean(np.abs(hs), axis=0) for hs in later]
        np.testing.assert_allclose(ours, mean, rtol=2e-5)


def test_neurons_of_experts_are_seen_on_their_tokens():
    """Calibrated criteria inside experts: per expert, bos apart; and one expert too few tokens."""
    seen, model = seen_states(MIXED, random_params(MIXED, SEED), ROWS), model_of()
    sent = oracle(MIXED, 2)
    for e in range(4):
        hs = np.array([h for *_, h, first in sent[e] if not first])
        np.testing.assert_allclose(seen[2]["norm"][e], np.sqrt((hs**2).sum(0)), rtol=2e-5)
        assert seen[2]["tokens"][e] == len(hs)
    smaller, _ = fh.prune(model, "wanda_sp", 0.25, calibration=text_file(), calibration_tokens=512)
    assert {layer.ffn_width for layer in smaller.config.layers} == {18}
    with pytest.raises(ValueError, match="layer 1: no token is sent to . of 4 experts .*more cal"):
        seen_states(MIXED, random_params(MIXED), [np.array([0, 5])])


@functools.cache
def text_file():
    path = Path(tempfile.mkdtemp()) / "text.txt"
    path.write_text(TEXT)
    return str(path)


def numpy_aimer(ffn):
    w = np.abs(np.concatenate([np.asarray(x["kernel"], np.float64).ravel() for x in ffn.values()]))
    return w.mean() / np.sqrt((w**2).mean())


@given(strategies.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_aimer_is_the_gini_order_of_a_whole_expert(seed):
    rng = np.random.default_rng(seed)
    experts = []
    for _ in range(6):
        size = rng.exponential(size=3) ** 2
        shapes = {"gate": (8, 5), "up": (8, 5), "down": (5, 8)}
        experts.append(
            {
                k: {"kernel": scale * rng.standard_t(3, n)}
                for (k, n), scale in zip(shapes.items(), size, strict=True)
            }
        )
    scores = expert_scores("aimer", 0, experts, None)
    np.testing.assert_allclose(scores, [numpy_aimer(ffn) for ffn in experts], rtol=1e-12)
    whole = [np.concatenate([x["kernel"].ravel() for x in ffn.values()]) for ffn in experts]
    gini = STATISTICS["gini"](*distributions(np.stack(whole)))
    assert np.argsort(-scores).tolist() == np.argsort(-gini).tolist()


@pytest.mark.parametrize("rule", ["entropy", "gini"])
def test_outgoing_weights_are_averaged_over_neurons(rule):
    blocks = unstack(random_params(MIXED))["layers"][1]["ffn"]
    kernels = np.asarray(blocks["down"]["kernel"], np.float64)
    kernels[0, 3] = 0  # a dead neuron counts for nothing
    experts = [{"down": {"kernel": kernel}} for kernel in kernels]
    values = [STATISTICS[rule](*distributions(kernel.copy())) for kernel in kernels]
    values[0] = np.delete(values[0], 3)
    scores = expert_scores(rule, 1, experts, None)
    np.testing.assert_allclose(scores, [x.mean() for x in values], rtol=1e-12)


def masked(model, report):
    """The model with NaN in the removed experts' columns, which the router must not choose."""
    tree = unstack(model.params)
    for i, gone in enumerate(report["removed_experts"]):
        if model.config.layers[i].experts is None:
            continue
        router = tree["layers"][i]["ffn"]["router"]
        kernel = np.array(router["kernel"])
        kernel[:, np.array(gone, int) - model.config.layers[i].shared] = np.nan
        tree["layers"][i]["ffn"]["router"] = {"kernel": kernel}
    return tree


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("config", [MIXED, SHARED], ids=["mixed", "shared"])
def test_the_smaller_model_chooses_among_the_remaining_columns(config, rule, monkeypatch):
    model = model_of(config)
    given = {"rule": rule, "ratio": 0.5, "calibration": text_file(), "calibration_tokens": 512}
    smaller, report = SURGERIES["experts"](model, given)
    gone = [len(x) for x in report["removed_experts"]]
    assert gone == [2 * (layer.experts is not None) for layer in config.layers]
    assert report["experts_after"][1] == config.layers[1].experts - 2
    for row in report["ranking"]:
        assert set(row["experts"][-2:]) == set(report["removed_experts"][row["layer"]])
        assert len(row["experts"]) == config.layers[row["layer"]].columns

    real = jax.nn.softmax

    def without_nan(x, axis=-1):
        return real(jax.numpy.where(jax.numpy.isnan(x), -jax.numpy.inf, x), axis)

    monkeypatch.setattr(jax.nn, "softmax", without_nan)
    params = restack(config, masked(model, report))
    reference = logits(dataclasses.replace(model, params=params))
    np.testing.assert_allclose(logits(smaller), reference, rtol=0, atol=2e-5)


def test_an_expert_without_tokens_goes_first_and_nothing_changes():
    """Expert 2 of layer 3 gets none of these tokens with seed 0."""
    model, rows = model_of(seed=0), saved(ROWS)
    asked = {"rule": "reap", "count": 1, "layers": [3], "calibration": rows}
    smaller, report = SURGERIES["experts"](model, asked)
    assert report["removed_experts"] == [[], [], [], [2]] and report["tokens"][0][2] == 0
    batch = [np.r_[0, row[1:]] for row in ROWS]
    np.testing.assert_allclose(logits(smaller, batch), logits(model, batch), rtol=0, atol=1e-5)


def saved(rows):
    path = text_file().replace("text.txt", "rows.jsonl")
    with open(path, "w") as file:
        for row in rows:
            file.write(json.dumps({"tokens": [0, *row[1:].tolist()]}) + "\n")
    return path


@pytest.mark.parametrize("config", [MIXED, SHARED], ids=["mixed", "shared"])
def test_a_constant_is_the_mean_output_weighted_by_the_gate(config, tmp_path):
    """MoNE: vectors and router columns, kept by save and load."""
    model, rows = model_of(config), saved(ROWS)
    asked = {"rule": "frequency", "ratio": 0.5, "constant": True, "calibration": rows}
    smaller, report = SURGERIES["experts"](model, asked)
    sums = expert_sums(config, model.params, [np.r_[0, row[1:]] for row in ROWS])
    for i, gone in enumerate(report["removed_experts"]):
        if not gone:
            continue
        layer, ffn = smaller.config.layers[i], unstack(smaller.params)["layers"][i]["ffn"]
        before = config.layers[i]
        assert (layer.constants, layer.columns) == (2, before.columns)
        means = sums[i]["outputs"][gone] / sums[i]["tokens"][gone, None]
        np.testing.assert_allclose(ffn["constant"], means, atol=1e-6)
        columns = np.asarray(ffn["router"]["kernel"])[:, -2:]
        old = np.asarray(unstack(model.params)["layers"][i]["ffn"]["router"]["kernel"])
        np.testing.assert_array_equal(columns, old[:, np.array(gone) - before.shared])
    family = dataclasses.replace(smaller.config, family="mixtral")
    fh.save_model(dataclasses.replace(smaller, config=family), tmp_path / "model")
    again = fh.load_model(tmp_path / "model")
    assert again.config.layers == smaller.config.layers
    np.testing.assert_array_equal(logits(again), logits(smaller))


def test_constants_leave_the_last_expert_its_states():
    """Their rows are of no expert (-1), which is an index too."""
    asked = {"rule": "frequency", "ratio": 0.5, "constant": True, "calibration": saved(ROWS)}
    smaller, _ = SURGERIES["experts"](model_of(), asked)
    last = smaller.config.layers[1].experts - 1
    _, report = SURGERIES["attack"](smaller, {"layer": 1, "expert": last, "k": 2})
    assert min(report["magnitudes"][:2]) > 0


def test_bos_orders_only_the_experts_that_it_is_sent_to():
    for asked in ({"criterion": "bos"}, {"criterion": "entropy", "protect": "bos:2"}):
        with pytest.raises(ValueError, match="layer 1: bos is not sent to this expert"):
            SURGERIES["prune"](model_of(), asked | {"ratio": 0.5})


def test_an_expert_with_a_constant_output_may_become_one():
    """Outputs that do not depend on the token: MoNE loses nothing."""
    config = with_experts(dataclasses.replace(LLAMA, ffn_bias=True), 4, top_k=2)
    tree = unstack(random_params(config, SEED))
    for layer in tree["layers"]:
        down = layer["ffn"]["down"] = dict(layer["ffn"]["down"])
        down["kernel"] = np.array(down["kernel"])
        down["kernel"][1:3] = 0
    model = Model(config, restack(config, tree), byte_tokenizer(), "tiny")
    asked = {"rule": "mone", "constant": True, "calibration": saved(ROWS)}
    smaller, report = SURGERIES["experts"](model, asked)
    assert report["removed_experts"] == [[1, 2]] * 4
    np.testing.assert_allclose(logits(smaller), logits(model), rtol=0, atol=1e-5)


def test_top_k_and_text_are_checked():
    model, text = model_of(), {"calibration": text_file(), "calibration_tokens": 512}
    remove = SURGERIES["experts"]
    with pytest.raises(ValueError, match="layer 1: 1 router columns are left, and top_k=2: rem"):
        remove(model, {"rule": "aimer", "count": 3})
    smaller, _ = remove(model, {"rule": "aimer", "count": 3, "top_k": 1})
    assert {layer.top_k for layer in smaller.config.layers[1:]} == {1}
    with pytest.raises(ValueError, match="rule 'reap' needs calibration text"):
        remove(model, {"rule": "reap"})
    with pytest.raises(ValueError, match=r"layers='0': none of them has experts, \[1, 2, 3\]"):
        remove(model, {"rule": "aimer", "layers": "0"})
    few = {"rule": "reap", "count": 1, "calibration": saved([np.array([0, 5])])}
    with pytest.raises(ValueError, match="layer .: no token is sent to 2 of 4 experts .*1 are to"):
        remove(model_of(seed=0), few)
    with pytest.raises(ValueError, match="no expert of the layers .* has a massive weight on bos"):
        remove(model, {"rule": "reap", "protect": "massive"} | text)


def loud(model, layer, expert, neuron):
    """The model with one massive neuron: a large column of gate and up for bos."""
    tree = unstack(model.params)
    x = observe(
        model.config,
        model.params,
        [{"tokens": np.array([[0]], np.int32)}],
        Probe("x", lambda seen, batch, per_layer: seen.ffn_input, kind="example"),
    )["x"][layer, 0, 0]
    ffn = tree["layers"][layer]["ffn"] = dict(tree["layers"][layer]["ffn"])
    for name in ("gate", "up"):
        kernel = np.array(ffn[name]["kernel"])
        kernel[expert, :, neuron] = 40 * x / np.linalg.norm(x)
        ffn[name] = {"kernel": kernel}
    return dataclasses.replace(model, params=restack(model.config, tree))


def test_what_supports_dense_layers_alone_says_so(tmp_path):
    model, text = model_of(), {"calibration": saved(ROWS)}
    with pytest.raises(ValueError, match="supports dense layers, and layer 1 has experts"):
        SURGERIES["prune"](model, {"compensation": "state_ridge", "layers": [1]} | text)
    family = dataclasses.replace(model.config, family="mixtral", layers=(MIXED.layers[1],) * 4)
    both = Model(family, random_params(family), byte_tokenizer(), "tiny")
    fh.save_model(both, tmp_path / "model")
    with pytest.raises(ValueError, match="layer 0 has experts: lesions support dense models"):
        settings = {"model": str(tmp_path / "model"), "text": text_file()}
        fh.run("evaluate", "analyze:lesions", tmp_path / "run", settings)


def test_the_massive_expert_is_found_attacked_and_protected():
    model = model_of(seed=SEED)
    bos = expert_sums(MIXED, model.params, [np.array([0, 0])])[1]["tokens"]
    expert = int(np.argmax(bos))
    model = loud(model, 1, expert, 7)
    massive = massive_weights(model.config, model.params)
    assert (massive.layer, massive.expert, massive.indices[0]) == (1, expert, 7)
    seen = seen_states(model.config, model.params)
    assert seen[1]["massive"].tolist() == [e == expert for e in range(4)]
    attacked, report = SURGERIES["attack"](model, {"k": 1})
    assert (report["expert"], report["expert_index"]) == (expert + 1, expert)
    before, after = (unstack(one.params)["layers"][1]["ffn"] for one in (model, attacked))
    changed = np.asarray(before["up"]["kernel"]) != np.asarray(after["up"]["kernel"])
    assert np.flatnonzero(changed.any((1, 2))).tolist() == [expert]
    assert np.flatnonzero(changed.any((0, 1))).tolist() == [7]
    asked = {"rule": "random", "count": 2, "layers": [1]}
    removed = [
        SURGERIES["experts"](model, asked | {"seed": seed, "protect": "massive"})[1]
        for seed in range(6)
    ]
    assert all(expert not in one["removed_experts"][1] for one in removed)


def test_a_quantised_router_loses_no_columns():
    """Scales of its 4-bit codes span columns."""
    model = model_of(with_experts(WIDE, 4, top_k=2))
    quantised, _ = SURGERIES["nf4"](model, {"targets": "ffn/router"})
    asked = {"rule": "frequency", "ratio": 0.5, "calibration": saved(ROWS)}
    with pytest.raises(LeafError, match="layer 0: router/nf4_.* fold it first"):
        SURGERIES["experts"](quantised, asked)
