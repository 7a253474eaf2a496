"""Layer-wise tuning towards a teacher, and pruning by rounds with rewinding (MLP Fusion)."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import MeanForward, config_of, save_tiny_reader, starting_from
from tiny_runs import refused, write_halves

import ffn_heterogeneity as fh
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.launch import experiment
from ffn_heterogeneity.losses.layerwise import layerwise_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import layer_leaves, unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.probes.base import Probe
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.train.build import objective_of
from ffn_heterogeneity.train.objectives import make_forward
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.settings import read
from ffn_heterogeneity.train.step import union_of_probes, values_of
from ffn_heterogeneity.tree import flatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LAYERS = (1, 2)  # the compressed layers, of three


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("layerwise")
    for family in ("bert", "llama"):
        save_tiny_reader(root / family, family)
    write_halves(root, train=48, held_out=16)
    return root


def taught_model(files, family, method="fusion"):
    """(the dense model, the compressed model with its teacher)."""
    dense = fh.load_model(files / family)
    few, _ = SURGERIES["fuse"](dense, {"method": method, "ratio": 0.5, "layers": "1-2"})
    taught, report = SURGERIES["teacher"](few, {"model": str(files / family)})
    assert report == {"layers": list(LAYERS)}
    return dense, taught


def states(config, params, batch, name):
    """[L, B, T, D] of every layer, by the model itself."""
    from ffn_heterogeneity.probes.base import Probe

    probe = Probe("seen", lambda seen, batch, _: getattr(seen, name), kind="example")
    run = jax.jit(functools.partial(causal_lm.forward, config, probes=(probe,)))
    return np.asarray(run(params, batch)["probes"]["seen"], np.float64)


def batch_of(config):
    tokens = np.random.default_rng(1).integers(2, config.vocab_size, (3, 7)).astype(np.int32)
    labels = {"target": np.float32([0, 1, 1]), "valid": np.ones(3, bool)}
    segments = (np.arange(7) < [[7], [4], [6]]).astype(np.int32)
    return {"tokens": tokens, "segment_ids": segments, **labels}


def value_of(model, batch, **settings):
    term = layerwise_term(TermContext("layerwise", model=model.config), **settings)
    return in_all(MeanForward(model.config), term, model.params, batch)


def in_all(forward, term, params, batch):
    return jax.jit(lambda *given: values_of(forward, (term,), *given)[0][term.name])(params, batch)


CASES = [("bert", "fusion", "block"), ("llama", "svd", "ffn"), ("llama", "svd", "block")]
CASES += [("bert", "unstructured", "ffn")]


@pytest.mark.parametrize(("family", "method", "name"), CASES)
def test_the_loss_is_its_formula(files, family, method, name):
    """The mean over layers, real tokens and dimensions; the first layer is the teacher's own."""
    dense, model = taught_model(files, family, method)
    batch = batch_of(dense.config)
    student = {path: leaf for path, leaf in model.params.items() if path != "teacher"}
    pair = ((dense.config, dense.params), (model.config, student))
    a, b = (states(*one, batch, f"{name}_output") for one in pair)
    squares = ((a - b) ** 2)[:, batch["segment_ids"] > 0]
    total, denominator, metrics = value_of(model, batch, states=name)
    assert float(total / denominator) == pytest.approx(squares.mean(), rel=1e-5)
    layers = np.asarray(metrics["layers"] / denominator)
    np.testing.assert_allclose(layers, squares.mean((1, 2)), rtol=1e-5, atol=1e-9)
    assert layers[0] == 0 and layers[1] > 0
    summed = value_of(model, batch, states=name, sum_hidden=True)
    width = dense.config.d_model
    assert float(summed.total) == pytest.approx(width * float(total), rel=1e-5)


def test_two_of_them_run_side_by_side(files):
    dense, model = taught_model(files, "llama", "svd")
    batch, forward = batch_of(dense.config), MeanForward(model.config)
    settings = {"a": {"states": "block"}, "b": {"states": "ffn", "sum_hidden": True}}
    terms = [
        layerwise_term(TermContext(name, model=model.config), **each)
        for name, each in settings.items()
    ]
    both, _ = jax.jit(lambda *given: values_of(forward, terms, *given))(model.params, batch)
    for name, each in settings.items():
        alone = value_of(model, batch, **each)
        assert float(both[name].total) == pytest.approx(float(alone.total), rel=1e-6) != 0
    probes = Probe("x", min), Probe("x", max)
    twin = [dataclasses.replace(terms[0], probes=(probe,)) for probe in probes]
    refused("two unlike probes are named 'x'", union_of_probes, twin)


def test_layers_of_two_stacks_count_their_own_tokens():
    means, counts = np.array([0.1, 0.2, 0.3, 0.4]), np.array([100.0, 100, 10, 10])
    seen = {"sum": jnp.asarray(means * counts), "count": jnp.asarray(counts)}
    term = layerwise_term(TermContext("layerwise"))
    total, count, metrics = term({}, {"probes": {"layerwise/layerwise": seen}}, {})
    assert total / count == pytest.approx(means.mean(), rel=1e-6)
    np.testing.assert_allclose(metrics["layers"] / count, means, rtol=1e-6)


def test_a_dense_teacher_of_experts(files, tmp_path):
    """Experts are taught by the dense block that they were made of; two of routing must agree."""
    dense, batch = fh.load_model(files / "llama"), batch_of(fh.load_model(files / "llama").config)
    made = {k: SURGERIES["partition"](dense, {"experts": 2, "top_k": k})[0] for k in (1, 2)}
    taught, _ = SURGERIES["teacher"](made[1], {"model": str(files / "llama")})
    a, b = (states(x.config, x.params, batch, "block_output") for x in (dense, made[1]))
    total, count, _ = value_of(taught, batch)
    squares = ((a - b) ** 2)[:, batch["segment_ids"] > 0]
    assert float(total / count) == pytest.approx(squares.mean(), rel=1e-5) and squares.mean() > 0
    save_pretrained(made[2].config, made[2].params, tmp_path / "both")
    other = {"model": str(tmp_path / "both")}
    refused("layer 0 .* has top_k=2", SURGERIES["teacher"], made[1], other)


def test_gradients_of_the_tasks_loss_are_compared(files):
    """Gradients with respect to the output of each FFN, at real tokens."""
    dense, model = taught_model(files, "bert")
    batch = batch_of(dense.config)

    def of(config, params):
        @jax.jit
        @jax.grad
        def slopes(nudges, params):
            made = MeanForward(config).nudged(params, batch, nudges)["predictions"]
            log_p = jax.nn.log_softmax(made)
            return -sum(log_p[i, int(label)] for i, label in enumerate(batch["target"]))

        zeros = jnp.zeros((config.n_layers, *batch["tokens"].shape, config.d_model))
        return np.asarray(slopes(zeros, params), np.float64)

    student = {path: leaf for path, leaf in model.params.items() if path != "teacher"}
    real = batch["segment_ids"] > 0
    wanted, actual = of(dense.config, dense.params)[:, real], of(model.config, student)[:, real]
    squares = ((wanted - actual) ** 2).sum((1, 2)) / (wanted**2).sum((1, 2))
    total, denominator, metrics = value_of(model, batch, states="gradient")
    np.testing.assert_allclose(metrics["layers"] / denominator, squares, rtol=1e-4)
    assert float(total / denominator) == pytest.approx(squares.mean(), rel=1e-4)
    assert squares.mean() > 0.01


@pytest.mark.parametrize("states", ["block", "gradient"])
def test_gradients_reach_the_student_alone(files, states):
    _, model = taught_model(files, "bert")
    batch = batch_of(model.config)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return value_of(dataclasses.replace(model, params=params), batch, states=states).total

    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), model.params)
        gradient = loss(params)[1]
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient["teacher"]))
        path = ("stack", "segment_1", "slot_0", "ffn", "down", "kernel")
        leaf = functools.reduce(lambda tree, name: tree[name], path, params)
        slope = functools.reduce(lambda tree, name: tree[name], path, gradient)[0, 1, 2]
        ends = []
        for step in (1e-6, -1e-6):
            moved = jax.tree.map(lambda x: x, params)
            down = functools.reduce(lambda tree, name: tree[name], path[:-1], moved)
            down["kernel"] = leaf.at[0, 1, 2].add(step)
            ends.append(float(loss(moved)[0]))
    assert float(slope) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-9)


def data_of(files):
    paths = {"path": "train.jsonl", "validation_path": "held_out.jsonl"}
    settings = {f"data__{key}": str(files / name) for key, name in paths.items()}
    return settings | {"lengths": (32,)}


def fused(files, workdir, method, **changes):
    settings = data_of(files) | {"layers": "1-2", "ratio": 0.5}
    config = config_of("mlp_fusion", f"{files / 'bert'},labels,{method}", **(settings | changes))
    with config.unlocked():
        for name in config.stages:
            if config[name].kind == "train":
                config[name].fields, config[name].together = "sentence", 1
                config[name].compute_dtype, config[name].tensorboard = "float32", False
                config[name].optimizer.learning_rate = 2e-2
                config[name].export = {"weights": "last"}
    experiment.run(config, workdir)
    folders = sorted(path for path in workdir.iterdir() if path.is_dir())
    return [fh.load_model(path / "model") for path in folders if (path / "model").exists()], folders


def leaves_of(model):
    return flatten(unstack(model.params))


def test_tuning_moves_the_taught_blocks_alone(files, tmp_path):
    """Compressed, tuned, fine-tuned: the teacher is the dense model, and is never exported."""
    (few, tuned, final), folders = fused(files, tmp_path, "fusion,tuned")
    results = json.loads((folders[1] / "results.json").read_text())
    first, last = (results[end]["validation/layerwise"] for end in ("first", "final"))
    assert last < 0.9 * first
    before, after, end = map(leaves_of, (few, tuned, final))
    moved = {path for path in before if not np.array_equal(before[path], after[path])}
    parts = [f"{name}/{leaf}" for name in ("up", "down") for leaf in ("kernel", "bias")]
    assert moved == {f"layers/{i}/ffn/{suffix}" for i in LAYERS for suffix in parts}
    assert set(after) - set(before) == {"task_head/out/kernel", "task_head/out/bias"}
    assert not [path for path in (*after, *end) if path.startswith("teacher")]
    for path in (f"layers/{i}/ffn/neuron_scale" for i in LAYERS):
        np.testing.assert_array_equal(end[path], before[path])
    assert not np.array_equal(after["embed/embedding"], end["embed/embedding"])


@pytest.mark.parametrize("states", ["gradient", pytest.param("block", marks=pytest.mark.slow)])
def test_joined_rows_have_the_loss_of_rows_alone(files, tmp_path, states):
    """The loss of all held-out rows, with the forward pass of a training run."""
    few, _ = SURGERIES["fuse"](fh.load_model(files / "bert"), {"ratio": 0.5, "layers": "1-2"})
    fh.save_model(few, tmp_path / "few")
    settings = data_of(files) | {"fields": "sentence", "teacher__model": str(files / "bert")}
    losses = []
    for together in (1, 2):
        argument = f"{tmp_path / 'few'},labels,teacher,layerwise"
        config = read(config_of("p32_glue", argument, together=together, **settings))
        model = starting_from(config)
        objective = objective_of(config.task, model.config)
        forward = make_forward(objective, model.config, RunOptions())
        term = layerwise_term(TermContext("layerwise", model=model.config), states=states)
        held_out = objective.data(model.tokenizer, range(config.batch_size)).held_out
        batches = [batch for each in held_out.values() for batch in each()]
        values = [in_all(forward, term, model.params, batch) for batch in batches]
        losses.append(sum(x.total for x in values) / sum(x.denominator for x in values))
    assert losses[1] == pytest.approx(float(losses[0]), rel=1e-4) and losses[0] > 0


@pytest.mark.slow
def test_rounds_mask_more_and_rewind(files, tmp_path):
    """Two of the three rounds; models are trained, masked, trained, masked."""
    stages = ("round_1", "mask_1", "round_2", "mask_2")
    models, _ = fused(files, tmp_path, "lth", stages=stages)
    dense = leaves_of(fh.load_model(files / "bert"))
    shares, masks = [], []
    for masked in models[1::2]:
        leaves = leaves_of(masked)
        assert masked.config.head is None
        for path, leaf in leaves.items():
            if not path.endswith("mask"):
                np.testing.assert_array_equal(leaf, dense[path])
        masks.append({path: leaf for path, leaf in leaves.items() if path.endswith("mask")})
        mask_values = np.concatenate([leaf.ravel() for leaf in masks[-1].values()])
        shares.append(mask_values.mean())
    np.testing.assert_allclose(shares, 0.5 ** (np.arange(1, 3) / 3), atol=1e-3)
    assert all((masks[1][path] <= before).all() for path, before in masks[0].items())
    # The masks are those of trained weights, not of the initial ones.
    settings = {"method": "unstructured", "ratio": 1 - 0.5 ** (2 / 3), "layers": "1-2"}
    at_once, _ = SURGERIES["fuse"](fh.load_model(files / "bert"), settings)
    other = leaves_of(at_once)
    assert any(not np.array_equal(leaf, other[path]) for path, leaf in masks[1].items())
    trained = leaves_of(models[2])
    assert all(np.array_equal(trained[path], leaf) for path, leaf in masks[0].items())
    for _, ffn in layer_leaves(models[2].params, "ffn"):
        if "mask" in ffn["up"]:
            gone = ffn["up"]["mask"] == 0
            assert np.abs(np.asarray(ffn["up"]["kernel"])[gone]).max() > 0, "kept apart, not folded"


def test_bad_teachers_and_rewinds_are_refused(files, tmp_path):
    dense = fh.load_model(files / "bert")
    few, _ = SURGERIES["fuse"](dense, {"ratio": 0.5, "layers": "1-2"})
    short, _ = SURGERIES["truncate"](few, {"blocks": 2})
    other = dataclasses.replace(few, params=jax.tree.map(lambda x: x * 1.5, few.params))
    for model, settings, words in (
        (few, {}, "teacher.model is empty"),
        (dense, {"model": str(files / "bert")}, "the same FFNs: nothing to distill"),
        (short, {"model": str(files / "bert")}, "has 3 layers, this model 2"),
        (other, {"model": str(files / "bert")}, "its embed/embedding is not this model's"),
    ):
        refused(words, SURGERIES["teacher"], model, settings)
    refused("'layerwise' needs a teacher", value_of, few, batch_of(few.config))
    refused("states='blocks'", layerwise_term, TermContext("layerwise"), states="blocks")
    for settings, words in (
        (
            {"method": "fusion", "rewind": "x"},
            "rewind='x' works only with method=unstructured or ntk_sap",
        ),
        ({"method": "unstructured", "rewind": str(files / "llama")}, "a model of another shape"),
    ):
        refused(words, SURGERIES["fuse"], dense, settings)


def test_what_is_taught_alone_trains_needs_a_teacher(files):
    settings = data_of(files) | {"train_only": ("@taught",), "fields": "sentence", "together": 1}
    config = config_of("p32_glue", f"{files / 'bert'},labels", **settings)
    with pytest.raises(ValueError, match="train_only='@taught': no block has a teacher"):
        plan(read(config), partition.make_mesh(**config.mesh))
