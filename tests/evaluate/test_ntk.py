"""Tangent kernels and output errors of one block, against other implementations."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from tiny_models import config_of, random_params, save_tiny, save_tiny_reader, tiny_of
from tiny_runs import read_rows as rows_in
from tiny_runs import refused, write_rows

from ffn_heterogeneity.data.labelled import Encoded, Form, encode_texts
from ffn_heterogeneity.evaluate import ntk
from ffn_heterogeneity.evaluate import run as evaluation
from ffn_heterogeneity.evaluate.compressions import (
    BIAS,
    RANDOM,
    RANDOM_BIAS,
    errors_of,
    with_random_head,
)
from ffn_heterogeneity.heads import make_head
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.io.rows import read_rows
from ffn_heterogeneity.models.causal_lm import RunOptions, forward
from ffn_heterogeneity.models.stack import layer_leaves
from ffn_heterogeneity.models.walk import of_expert
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.fuse import fuse

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LAYER = 1
DOUBLE = RunOptions(compute_dtype=jnp.float64)
HEAD = config_of("analyze", "ntk")  # of two labels
NO_KERNELS = dict.fromkeys(("adam", "sgd"), np.zeros((1, 1)))


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def rows_of(lengths, vocab):
    rng = np.random.default_rng(3)
    ids = [rng.integers(2, vocab, length).astype(np.int32) for length in lengths]
    types, targets = [np.zeros_like(row) for row in ids], np.full(len(ids), np.nan)
    return Encoded(ids, types, targets, np.zeros(len(ids), bool))


def ffn_of(model, layer=LAYER, expert=None):
    ffn = dict(layer_leaves(model.params, "ffn"))[layer]
    return ffn if expert is None else of_expert(model.config, layer, ffn, expert)


def measured(model, data, layer=LAYER, expert=None):
    """Kernels of the code under test, and the states."""
    how = {"batch_size": 4, "options": DOUBLE, "progress": None}
    seen = ntk.token_states(model, data, layer, expert, **how)
    ffn = ffn_of(model, layer, expert)
    return ntk.tangent_kernels(model.config, ffn, seen["x"], seen["delta"]) | seen


def by_gradients(model, data, layer=LAYER, expert=None):
    """Gradients of all leaves that train, row by row and without padding."""
    config, head, rows = model.config, make_head(model.config, model.config.head), []

    @jax.jit
    @jax.grad
    def gradient(params, batch):
        outputs = forward(config, params, batch, options=DOUBLE, probes=head.probes)
        logits = head.apply(params, outputs, batch, lambda x: x)
        return logits[0, 0] if outputs_of(config) == 1 else jax.nn.softmax(logits)[0, 0]

    for ids in data.ids:
        batch = {"tokens": ids[None], "segment_ids": np.ones((1, len(ids)), np.int32)}
        ffn = dict(layer_leaves(gradient(model.params, batch), "ffn"))[layer]
        if expert is not None:
            ffn = {name: jax.tree.map(lambda x: x[expert], ffn[name]) for name in ("up", "down")}
        ffn.pop("neuron_scale", None)
        named = [pair for linear in ffn.values() for pair in linear.items()]
        rows.append(np.concatenate([np.ravel(leaf) for name, leaf in named if name != "mask"]))
    g = np.stack(rows)
    return {"adam": g @ np.sign(g).T, "sgd": g @ g.T}


def outputs_of(config):
    return dict(config.head.settings)["outputs"]


def tiny_reader(family, outputs=2):
    config = tiny_of(family, 2)
    bare = Model(config, random_params(config, dtype=np.float64), None, "")
    return with_random_head(bare, outputs)


FUSED = [
    ("bert", None),
    ("bert", 1),
    ("llama", "fusion"),
    ("bert", "unstructured"),
    ("gemma2", "svd"),
]


@pytest.mark.parametrize(("family", "method"), FUSED)
def test_kernels_are_those_of_whole_gradients(family, method, monkeypatch):
    """Post-norm and pre-norm, plain and gated; P, factors and masks; padding; in many chunks."""
    model = tiny_reader(family, 1 if method == 1 else 2)  # 1: a number, not labels
    if method and method != 1:
        model, _ = fuse(model, {"method": method, "ratio": 0.5, "layers": str(LAYER), "steps": 2})
    data = rows_of((5, 9, 5, 9, 5), model.config.vocab_size)
    monkeypatch.setattr(ntk, "MOST", 500)
    kernels, wanted = measured(model, data), by_gradients(model, data)
    for name, kernel in wanted.items():
        assert np.abs(kernels[name] - kernel).max() <= 1e-10 * np.abs(kernel).max(), name


@pytest.mark.parametrize("layer", [1, 3], ids=["encoder", "decoder"])
@pytest.mark.parametrize("method", [None, "fusion", "svd"])
def test_kernels_of_one_expert(method, layer):
    """A Switch: tokens of other experts, and those beyond the capacity, have no part."""
    config = tiny_of("switch", 4)
    few = [dataclasses.replace(x, capacity=x.capacity and 2) for x in config.layers]
    config = dataclasses.replace(config, layers=tuple(few))
    model = Model(config, random_params(config, dtype=np.float64), None, "")
    model, sent = with_random_head(model), []
    if method:
        model, _ = fuse(model, {"method": method, "ratio": 0.5, "layers": str(layer)})
    data = rows_of((5, 9, 9), config.vocab_size)
    for expert in range(config.layers[layer].experts):
        kernels, wanted = (of(model, data, layer, expert) for of in (measured, by_gradients))
        sent.append((kernels["gate"] > 0).sum(1))
        for name, kernel in wanted.items():
            assert np.abs(kernels[name] - kernel).max() <= 1e-10 * np.abs(kernel).max(), name
    assert np.max(sent) == 2 and np.sum(sent) < 23


OTHERS = [(None, name, "lora_a") for name in ("gate", "up", "down")]
OTHERS += [(None, "down", "score"), ("svd", "down", "mask")]


@pytest.mark.parametrize(("method", "name", "leaf"), OTHERS)
def test_leaves_whose_gradients_are_others_are_refused(method, name, leaf):
    """Leaves of every kernel, and a mask on factors, whose gradients are no outer products."""
    model = tiny_reader("llama")
    if method:
        model, _ = fuse(model, {"method": method, "ratio": 0.5, "layers": str(LAYER)})
    ffn = ffn_of(model)
    ffn = {**ffn, name: ffn[name] | {leaf: np.zeros((3, 2))}}
    x = jnp.zeros((1, 2, model.config.d_model))
    with pytest.raises(ValueError, match=f"ffn/{name}/{leaf} is not supported: fold the model"):
        ntk.tangent_kernels(model.config, ffn, x, x)


def test_the_head_is_the_seeds_and_a_trained_one_stays():
    config = tiny_of("bert", 3)
    bare = Model(config, random_params(config), None, "")
    one = with_random_head(bare)
    other = with_random_head(bare, seed=1)
    kernels = [model.params["task_head"]["out"]["kernel"] for model in (one, other)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0
    assert with_random_head(one, seed=1) is one


def test_errors_are_norms_of_differences():
    rng = np.random.default_rng(0)
    shapes = {"adam": (3, 3), "sgd": (3, 3), "y": (2, 4, 5), "block": (2, 4, 5)}
    reference, other = ({k: rng.normal(size=v) for k, v in shapes.items()} for _ in range(2))
    counted = np.array([[True, True, False, False], [True, False, False, False]])
    errors = errors_of(reference, other, {"": counted})
    places = ((0, 0), (0, 1), (1, 0))
    for name, state in (("output_error", "y"), ("block_error", "block")):
        apart = [np.sqrt(((reference[state] - other[state])[place] ** 2).sum()) for place in places]
        assert errors[name] == pytest.approx(sum(apart) / 3)
    square = ((reference["adam"] - other["adam"]) ** 2).sum()
    assert errors["ntk_error"] == pytest.approx(square**0.5)
    one, two = (math.sqrt(math.fsum(x * x for x in k["adam"].ravel())) for k in (reference, other))
    assert errors["ntk_norm_ratio"] == pytest.approx(two / one)
    products = (
        x * y for x, y in zip(reference["adam"].ravel(), other["adam"].ravel(), strict=True)
    )
    assert errors["ntk_cosine"] == pytest.approx(math.fsum(products) / (one * two))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    root = tmp_path_factory.mktemp("reader")
    directory = save_tiny_reader(root / "reader")
    rows = ["a film of charm\n", "tedious\n", "no wit, no heart\n", "warm and wise\n", "it is\n"]
    rows = [{"sentence": text.strip(), "label": str(i % 2)} for i, text in enumerate(rows)]
    path = write_rows(root / "rows.jsonl", rows)
    return {"model": str(directory), "data__path": str(path), "layer": LAYER}


def analysed(reader, workdir, **settings):
    return evaluation.run(config_of("analyze", "ntk", **reader, **settings), workdir)


def test_the_analysis(reader, tmp_path):
    results = analysed(reader, tmp_path / "w", max_rows=4, steps=2, against=(reader["model"],))
    assert results["rows"] == 4 and results["layer"] == LAYER + 1
    errors = results["errors"]
    assert set(errors) == {*HEAD.methods, "reader", BIAS, RANDOM, RANDOM_BIAS}
    assert errors["reader"]["ntk_cosine"] == pytest.approx(1)
    assert errors["reader"]["ntk_norm_ratio"] == pytest.approx(1)
    # Nothing comes out of either block, so both lack the same outputs; a quarter of the neurons
    # has a smaller kernel than all of them.
    both = [errors[name] for name in (BIAS, RANDOM_BIAS)]
    assert both[0]["output_error"] == pytest.approx(both[1]["output_error"], rel=1e-6)
    assert both[1]["ntk_norm_ratio"] < both[0]["ntk_norm_ratio"] < 1
    assert errors["fusion"]["largest_cluster"] >= 1 and "largest_cluster" not in errors["svd"]
    assert errors["reader"]["ntk_error"] == errors["reader"]["output_error"] == 0
    for name in ("output_error", "block_error"):  # the same function before any training
        assert errors["merged"][name] == pytest.approx(errors["fusion"][name], rel=1e-4)
    assert errors["merged"]["ntk_error"] != pytest.approx(errors["fusion"]["ntk_error"], rel=1e-2)
    # The error of the block with zero output is the outputs themselves, except for the bias.
    model = load_model(reader["model"])
    texts = [("a film of charm",), ("tedious",), ("no wit, no heart",), ("warm and wise",)]
    ids, types, _ = encode_texts(model.tokenizer, texts, Form(True, 1, 64))
    data = Encoded(ids, types, np.full(4, np.nan), np.zeros(4, bool))
    y = measured(with_random_head(model), data)["y"]
    norms = np.linalg.norm(y - ffn_of(model)["down"]["bias"], axis=-1)
    real = np.arange(y.shape[1]) < np.array([[len(row)] for row in ids])
    assert errors[BIAS]["output_error"] == pytest.approx(norms[real].mean(), rel=1e-4)
    rows = read_rows((tmp_path / "w" / "rows.jsonl").read_text(), "rows.jsonl")
    assert {"errors/svd/ntk_error", "errors/svd/kept_share"} <= {row["what"] for row in rows}
    assert (tmp_path / "w" / "ntk.png").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer": 3}, "layer=3: the model has 3 layers"),
        ({"layer": -1}, "layer=-1 must be a number in"),
        ({"expert": 0}, "expert=0: layer 1 .* has no experts"),
        ({"methods": ()}, "nothing is compared"),
        ({"methods": ("fused",)}, "method='fused'"),
        ({"ratio": 1.5}, "ratio=1.5"),
        ({"data__path": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"methods": (), "against": "short"}, "its n_layers is 2, the model's 3"),
    ],
)
def test_bad_settings_are_refused(reader, tmp_path, settings, words):
    if "against" in settings:
        short, _ = SURGERIES["truncate"](load_model(reader["model"]), {"blocks": 2})
        other = save_tiny(tmp_path / "short", short.config, short.params)
        settings = {**settings, "against": (str(other),)}
    refused(words, analysed, reader | settings, tmp_path / "w", error=(ValueError, OSError))
    assert not (tmp_path / "w" / "results.json").exists()


def sentences(shared_data, tokenizer, count):
    rows = rows_in(shared_data / "glue_sst2/validation.jsonl")[:count]
    texts = [(row["sentence"],) for row in rows]
    ids, types, _ = encode_texts(tokenizer, texts, Form(True, 0, 128))
    return Encoded(ids, types, np.full(count, np.nan), np.zeros(count, bool))


def test_real_kernels_are_torchs(torch, minilm_dir, shared_data):
    """MiniLM's first layer, 8 sentences of SST-2, float64."""
    import transformers

    model = with_random_head(load_model(minilm_dir, dtype=np.float64))
    data = sentences(shared_data, model.tokenizer, 8)
    kernels = measured(model, data, 0)

    kind = transformers.BertForSequenceClassification
    other = kind.from_pretrained(minilm_dir, attn_implementation="eager").double().eval()
    with torch.no_grad():
        kernel = np.asarray(model.params["task_head"]["out"]["kernel"])
        other.classifier.weight.copy_(torch.tensor(kernel.T))
        other.classifier.bias.zero_()
    block, rows = other.bert.encoder.layer[0], []
    leaves = [*block.intermediate.dense.parameters(), *block.output.dense.parameters()]
    for row in data.ids:
        chance = other(torch.tensor(row[None].astype(np.int64))).logits.softmax(-1)[0, 0]
        rows.append(torch.cat([x.ravel() for x in torch.autograd.grad(chance, leaves)]).numpy())
    g = np.stack(rows)
    for name, kernel in (("adam", g @ np.sign(g).T), ("sgd", g @ g.T)):
        assert np.abs(kernels[name] - kernel).max() <= 1e-8 * np.abs(kernel).max(), name


def of_numpy(ffn, x):
    """The outputs of a BERT block in float64: factors multiplied out, masks and P applied."""

    def kernel(leaves):
        if "low_rank_a" in leaves:
            return np.float64(leaves["low_rank_a"]) @ np.float64(leaves["low_rank_b"])
        return np.float64(leaves["kernel"]) * np.float64(leaves.get("mask", 1))

    z = np.float64(x) @ kernel(ffn["up"]) + np.float64(ffn["up"]["bias"])
    h = z * 0.5 * (1 + special.erf(z / np.sqrt(2))) * np.float64(ffn.get("neuron_scale", 1))
    return h @ kernel(ffn["down"]) + np.float64(ffn["down"]["bias"])


FEWER = ["fusion", "merged", "sqrt", "svd", "sketch", "mmd", "structured", "unstructured"]


@pytest.mark.slow
@pytest.mark.parametrize("method", [*FEWER, "random"])
def test_real_output_errors_are_numpys(minilm_dir, shared_data, method):
    """The last four layers of MiniLM, 1,536 to 384 neurons, 32 sentences: each layer's outputs."""
    dense = with_random_head(load_model(minilm_dir))
    data = sentences(shared_data, dense.tokenizer, 32)
    ids = data.ids
    settings = {"ratio": 0.75, "layers": "2-5"}
    if method == "random":
        small, _ = SURGERIES["prune"](dense, settings | {"criterion": "random"})
    else:
        small, _ = fuse(dense, settings | {"method": method, "steps": 10})
    real = np.arange(max(map(len, ids))) < np.array([[len(row)] for row in ids])
    with jax.enable_x64(False):
        for layer in (2, 5):
            a, b = (ntk.token_states(one, data, layer, progress=None) for one in (dense, small))
            error = errors_of(a | NO_KERNELS, b | NO_KERNELS, {"": real})["output_error"]
            pairs = ((dense, a), (small, b))
            outputs = [of_numpy(ffn_of(one, layer), seen["x"]) for one, seen in pairs]
            apart = np.sqrt(((outputs[0] - outputs[1]) ** 2).sum(-1))[real]
            assert error == pytest.approx(apart.mean(), rel=1e-4)
