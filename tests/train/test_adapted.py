"""Training of adapters: only LoRA changes, layers are frozen by name, structure is kept."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, batch_of, config_of, random_params, structured, with_experts
from tiny_runs import refused, small_run

import ffn_heterogeneity as fh
from ffn_heterogeneity.adapters import REFRESHES
from ffn_heterogeneity.io.hf.export import save_pretrained
from ffn_heterogeneity.io.load import Model, load_model
from ffn_heterogeneity.launch import experiment
from ffn_heterogeneity.launch import train as training
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.models.stack import layer_names, unstack
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.adapt import insert_lora
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import create_state
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.tree import flatten, unflatten

pytestmark = pytest.mark.usefixtures("compiled_quickly")
LORA = {"rank": 3, "alpha": 6.0, "targets": "attention/|ffn/"}


def config_for(model, text, argument="text", **changes):
    small = small_run(text, steps=4, eval__every=2, losses__nucl__weight=0.0)
    return config_of("nucl_finetune", f"{model},{argument}", **(small | changes))


def moved(before, after) -> set[str]:
    """Unstacked paths of the leaves that differ in any bit."""
    before, after = (flatten(unstack(one.params)) for one in (before, after))
    return {
        p for p, leaf in after.items() if p not in before or leaf.tobytes() != before[p].tobytes()
    }


@pytest.fixture(scope="module")
def lora_run(files, tmp_path_factory):
    """A run that trains only LoRA's factors: (its directory, its results)."""
    run = tmp_path_factory.mktemp("lora") / "run"
    saves = {"checkpoint__every": 1, "checkpoint__keep": 10}
    config = config_for(*files, argument="text,lora", lora__rank=3, **saves)
    return run, training.run(config, run)


def test_lora_alone_moves(files, lora_run):
    """The base stays equal bit for bit, and checkpoints store it once."""
    run, results = lora_run
    before, after = load_model(files[0]), load_model(run / "model")
    names = {path.split("/")[-1] for path in moved(before, after)}
    assert names == {"lora_a", "lora_b", "lora_scale"}
    assert np.any(flatten(unstack(after.params))["layers/3/ffn/down/lora_b"])
    sizes = {p: leaf.size for p, leaf in flatten(unstack(after.params)).items()}
    thin = sum(n for p, n in sizes.items() if p.endswith(("lora_a", "lora_b")))
    assert results["trainable_parameters"] == thin
    assert results["final"]["validation/nll"] < results["first"]["validation/nll"]
    for step in (1, 4):
        path = run / f"checkpoints/{step}/info/metadata"
        record = json.loads(path.read_text())
        names = {name.split(".")[-1] for name in record["tree"] if "params" in name}
        assert names == {"lora_a", "lora_b"} and len(record["frozen"]["tree"]) > 9
    assert [x.name for x in (run / "checkpoints_frozen").iterdir()] == ["0"]


SLOW_SCOPES = [pytest.param(x, marks=pytest.mark.slow) for x in ("layer", "others")]


@pytest.mark.parametrize("scope", ["massive", *SLOW_SCOPES])
def test_dora_trains_past_massive_weights(files, lora_run, tmp_path, scope):
    """Dropped weights come back: the base is equal bit for bit, and MacDrop is not saved."""
    settings = {"macdrop__k": 2, "macdrop__scope": scope, "dora__rank": 3, "dora__dropout": 0.1}
    config = config_for(*files, argument="text,dora,macdrop", **settings)
    results = training.run(config, tmp_path / "run")
    before, after = load_model(files[0]), load_model(tmp_path / "run/model")
    names = {path.split("/")[-1] for path in moved(before, after)}
    assert names == {"lora_a", "lora_b", "lora_scale", "dora_m"}
    sizes = {p: leaf.size for p, leaf in flatten(unstack(after.params)).items()}
    thin = sum(n for p, n in sizes.items() if p.endswith(("lora_a", "lora_b", "dora_m")))
    assert results["trainable_parameters"] == thin
    assert results["final"]["validation/nll"] < results["first"]["validation/nll"]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    drawn = [row["train/macdrop"] for row in map(json.loads, lines) if "train/macdrop" in row]
    np.testing.assert_allclose(drawn, [0.6, 0.4, 0.2, 0.0], atol=1e-6)  # 0.8 (1 - t / 4)
    # Evaluation ignores MacDrop: before the first step it is that of the given model.
    first = [one["first"]["validation/nll"] for one in (results, lora_run[1])]
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_a_kept_adapter_goes_on_training(files, tmp_path):
    """LoRA in a saved directory is found before the weights are read, and only it trains."""
    model = load_model(files[0])
    start, _ = insert_lora(model, LORA, key=jax.random.key(1))
    fh.save_model(start, tmp_path / "kept", structure="keep")
    for frozen in ((), ("embed/",)):
        config = config_for(tmp_path / "kept", files[1], freeze=frozen, steps=1)
        refused(
            "has adapters already, and its kernels would", training.run, config, tmp_path / "no"
        )
    only = (r"/lora_[ab]$",)
    config = config_for(tmp_path / "kept", files[1], train_only=only, steps=1)
    results = training.run(config, tmp_path / "once")
    once = load_model(tmp_path / "once/model")
    assert {path.split("/")[-1] for path in moved(start, once)} == {"lora_b"}, "B = 0 moves alone"
    config = config_for(tmp_path / "once/model", files[1], train_only=only, steps=1)
    again = training.run(config, tmp_path / "again")
    twice = moved(once, load_model(tmp_path / "again/model"))
    assert {path.split("/")[-1] for path in twice} == {"lora_a", "lora_b"}
    assert again["first"]["validation/nll"] == pytest.approx(results["final"]["validation/nll"])
    assert again["trainable_parameters"] == results["trainable_parameters"]


def test_a_layer_is_frozen_by_name(files, tmp_path):
    """One of four stacked layers is frozen: the others change, and its moments stay 0."""
    config = config_for(*files, freeze=(r"^layers/2/",), optimizer__weight_decay=0.1, steps=5)
    results = training.run(config, tmp_path / "run")
    before, after = load_model(files[0]), load_model(tmp_path / "run/model")
    still = set(flatten(unstack(after.params))) - moved(before, after)
    assert still == {p for p in flatten(unstack(before.params)) if p.startswith("layers/2/")}
    share = sum(leaf.size for p, leaf in flatten(unstack(after.params)).items() if p not in still)
    assert results["trainable_parameters"] == share
    with pytest.raises(partition.RuleError, match="layers/7/"):
        training.run(config_for(*files, freeze=(r"^layers/7/",)), tmp_path / "none")


def test_rates_by_name():
    """Rates of leaves and of single layers, with SGD: a step is the rate times the gradient."""
    params = random_params(LLAMA)
    mask = dict.fromkeys(flatten(params), True)
    rates = ((r"^layers/1/ffn/down/", 10.0), (r"^embed/", 0.0))
    grads = jax.tree.map(np.ones_like, flatten(params))
    steps = []
    for overrides in ((), rates):
        one = make_optimizer(OptimizerConfig("sgd", rates=overrides), params, mask)
        steps.append(one.update(grads, one.init(grads), grads, learning_rate=0.1)[0])
    down = steps[1]["stack/segment_0/slot_0/ffn/down/kernel"]
    np.testing.assert_allclose(down[:, 0, 0], [-0.1, -1.0, -0.1, -0.1], rtol=1e-6)
    assert not np.any(steps[1]["embed/embedding"])
    same = set(grads) - {"embed/embedding", "stack/segment_0/slot_0/ffn/down/kernel"}
    for path in same:
        np.testing.assert_array_equal(steps[0][path], steps[1][path])


@pytest.mark.parametrize("config", [LLAMA, with_experts()], ids=["dense", "experts"])
def test_all_dropped_is_the_zeroing_attack(config):
    """p = 1 at the massive rows trains the attacked model; p = 0 the model itself."""
    model = Model(config, random_params(config), None, "tiny")
    dropping, report = SURGERIES["macdrop"](model, {"k": 3})
    attacked, other = SURGERIES["attack"](model, {"k": 3})
    assert report.items() <= other.items()
    batch = jax.tree.map(lambda x: x[None], batch_of(258))
    losses = []
    for one, p in ((dropping, 1.0), (attacked, None), (dropping, 0.0), (model, None)):
        terms = (nll_term(TermContext("nll", model=config)),)
        refresh = None if p is None else REFRESHES["macdrop"]({})
        step, state = stepper(one.params, terms, (r"ffn/down/kernel$",), config, refresh=refresh)
        hyper = {"learning_rate": jnp.float32(0.0), "macdrop": jnp.float32(p or 0.0)}
        losses.append(float(step(state, batch, hyper)[1]["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[2] == pytest.approx(losses[3], rel=1e-6)
    assert abs(losses[1] / losses[3] - 1) > 1e-4


@pytest.mark.parametrize("drops", [False, True])
def test_macdrop_copies_no_stacked_weight(drops):
    """The layer with MacDrop is stored separately; the compiled step copies none of the others'
    FFN kernels, as without MacDrop."""
    config = dataclasses.replace(LLAMA, layers=LLAMA.layers[:1] * 7)
    model = insert_lora(Model(config, random_params(config), None, ""), LORA)[0]
    if drops:
        settings = {"k": 3, "layer": 2, "token": 0, "scope": "massive"}
        model = SURGERIES["macdrop"](model, settings)[0]
    kernels = [x.shape for p, x in flatten(model.params).items() if re.search("ffn/.*/kernel$", p)]
    assert {shape[0] for shape in kernels} == ({2, 1, 4} if drops else {7})
    terms, refresh = (nll_term(TermContext("nll", model=config)),), REFRESHES["macdrop"]({})
    given = {"refresh": refresh if drops else None, "donate": True}
    step, state = stepper(model.params, terms, (r"/lora_[ab]$",), config, **given)
    batch = jax.tree.map(lambda x: x[None], batch_of(258))
    hyper = {"learning_rate": jnp.float32(0.1), "macdrop": jnp.float32(0.5)}
    text = step.lower(state, batch, hyper).compile().as_text()
    made = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text)
    stacked = {",".join(map(str, shape)) for shape in kernels if shape[0] > 1}
    assert {kind for shape, kind in made if shape in stacked} == {"parameter", "get-tuple-element"}


def stepper(params, terms, patterns=(), config=LLAMA, donate=False, **given):
    mask = partition.trainable_mask(declared(config, params), (), patterns, layer_names(params))
    optimizer = make_optimizer(OptimizerConfig(), params, mask)
    forward = functools.partial(causal_lm.forward, config)
    step = make_train_step(forward, terms, optimizer, mask, donate=donate, **given)
    return step, create_state(params, optimizer, mask)


def same_after_a_step(config, params, directory, patterns=()):
    """Checks that one step of the tree and of the tree read from the directory are equal."""
    batch = jax.tree.map(lambda x: x[None], batch_of(258))
    hyper = {"learning_rate": jnp.float32(1e-2)}
    ends = []
    for start in (params, load_model(directory).params):
        terms = (nll_term(TermContext("nll", model=config)),)
        step, state = stepper(start, terms, patterns, config)
        ends.append(flatten(step(state, batch, hyper)[0].params))
    assert list(ends[0]) == list(ends[1])
    for path, leaf in ends[0].items():
        assert np.asarray(leaf).tobytes() == np.asarray(ends[1][path]).tobytes(), path
    return ends[0]


def test_a_kept_model_trains_as_if_never_saved(tmp_path):
    params = structured(LLAMA, random_params(LLAMA))
    save_pretrained(LLAMA, params, tmp_path / "kept", structure="keep")
    same_after_a_step(LLAMA, params, tmp_path / "kept")


@pytest.mark.slow
def test_smollm2_kept(smollm2_gguf, torch, tmp_path):
    """One step as without saving; torch reads the folded weights; folding changes nothing."""
    import transformers

    config, params = (model := load_model(smollm2_gguf)).config, model.params
    params = structured(config, params)
    for path, leaf in (leaves := flatten(params)).items():
        if path.endswith("lora_b"):
            leaves[path] = 0.05 * leaf  # of the size after training
    params = unflatten(leaves)
    save_pretrained(config, params, tmp_path / "kept", structure="keep")
    save_pretrained(config, params, tmp_path / "folded")
    trained = same_after_a_step(config, params, tmp_path / "kept", (r"/(lora_[ab]|neuron_scale)$",))
    moved = {p.split("/")[-1] for p, x in trained.items() if np.any(np.asarray(x) != leaves[p])}
    assert moved == {"lora_a", "lora_b"}, "P is data"
    tokens = np.random.default_rng(0).integers(3, 40_000, (2, 24)).astype(np.int32)

    def logits(params, dtype=np.float32):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)
        options = causal_lm.RunOptions(compute_dtype=dtype)
        seen = causal_lm.forward(config, params, {"tokens": tokens}, options=options)
        return np.asarray(causal_lm.logits(config, params, seen["hidden"]))

    plain = load_model(tmp_path / "folded").params
    folded = logits(plain)
    scale = np.abs(folded).max()
    # In float32 the noise of 30 layers is larger (4e-6) than what folding rounds away.
    with jax.enable_x64(True):
        apart, together = logits(params, np.float64), logits(plain, np.float64)
    assert apart.dtype == np.float64 and np.abs(apart - together).max() <= 1e-6 * scale
    kind = transformers.AutoModelForCausalLM
    theirs = kind.from_pretrained(tmp_path / "kept", attn_implementation="eager").eval()
    with torch.no_grad():
        their_logits = theirs(torch.tensor(tokens)).logits.numpy()
    assert np.abs(their_logits - folded).max() <= 1e-5 * scale


def test_stages_hand_the_structure_on(files, tmp_path):
    """P stays separate in removal and training; if folded, a stage would train another model."""
    model = load_model(files[0])
    params, options = structured(LLAMA, model.params), {"tokenizer": model.tokenizer}
    save_pretrained(LLAMA, params, tmp_path / "kept", structure="keep", **options)
    score = {"score__text": str(files[1]), "score__window": 16, "score__max_windows": 3}
    small = small_run(files[1], "recover__") | score | {"recover__train_only": (".",)}
    config = config_of("prune_recover", f"{tmp_path}/kept,text", **small)
    experiment.run(config, tmp_path / "run")
    pruned, after = (
        flatten(unstack(load_model(tmp_path / "run" / name / "model").params))
        for name in ("00_prune", "01_recover")
    )
    assert set(pruned) == set(after) and after["layers/0/ffn/neuron_scale"].shape == (18,)
    still = {p for p, leaf in after.items() if leaf.tobytes() == pruned[p].tobytes()}
    assert {p.split("/")[-1] for p in still} == {"neuron_scale", "mask", "lora_scale"}
    assert len(still) == sum(p.endswith(("neuron_scale", "mask", "lora_scale")) for p in after)


def with_lora(params):
    model, _ = insert_lora(_model(params), LORA, key=jax.random.key(1))
    return model.params


def _model(params):
    return Model(LLAMA, params, None, "")


def test_insertion_changes_no_function_and_runs_on_shapes():
    params = random_params(LLAMA)
    adapted = with_lora(params)
    hidden = [causal_lm.forward(LLAMA, p, batch_of(258))["hidden"] for p in (params, adapted)]
    np.testing.assert_array_equal(*hidden)
    shapes = jax.eval_shape(with_lora, params)
    assert jax.tree.map(lambda x: x.shape, adapted) == jax.tree.map(lambda x: x.shape, shapes)
    for path, leaf in flatten(adapted).items():
        if path.endswith("lora_a"):  # uniform, at most 1 / sqrt(inputs)
            assert 0.8 < np.abs(leaf).max() * leaf.shape[-2] ** 0.5 <= 1, path
    refused("has lora_a already", with_lora, adapted)
    refused("found in no kernel", insert_lora, _model(params), LORA | {"targets": "mlp"})
    refused("rank=0", insert_lora, _model(params), LORA | {"rank": 0})
    one = insert_lora(_model(params), LORA | {"targets": "layers/1/ffn/up"})
    assert one[1] == {"adapted": ["layers/1/ffn/up"]}
    assert flatten(unstack(one[0].params))["layers/1/ffn/up/lora_a"].shape == (16, 3)


def test_merged_is_unmerged():
    params = structured(LLAMA, random_params(LLAMA))
    folded, _ = SURGERIES["fold"].function(_model(params))
    assert set(flatten(folded.params)) == set(flatten(random_params(LLAMA)))
    hidden = [causal_lm.forward(LLAMA, p, batch_of(258))["hidden"] for p in (params, folded.params)]
    np.testing.assert_allclose(*hidden, rtol=0, atol=1e-5 * np.abs(hidden[0]).max())


def test_nucl_reaches_lora_through_the_effective_kernel():
    """Gradients with respect to A and B against central differences, in float64."""
    with jax.enable_x64(True):
        params = structured(LLAMA, random_params(LLAMA))
        flat = flatten(jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params))
        value = lambda leaves: nucl_term(TermContext("nucl")).function(unflatten(leaves)).total  # noqa: E731
        grads = jax.grad(value)(flat)
        rng = np.random.default_rng(0)
        for name in ("lora_a", "lora_b"):
            (path,) = [p for p in flat if p.endswith(f"segment_2/slot_0/ffn/down/{name}")][:1]
            for _ in range(4):
                at = tuple(rng.integers(0, n) for n in flat[path].shape)
                ends = [value(flat | {path: flat[path].at[at].add(h)}) for h in (1e-6, -1e-6)]
                slope = pytest.approx(float(grads[path][at]), rel=1e-4, abs=1e-9)
                assert (ends[0] - ends[1]) / 2e-6 == slope


def test_lora_costs_its_factors_and_no_gradient_of_the_base():
    """Compiled FLOPs a layer within 5% of the factored count; no full-size gradient is computed.

    N tokens, P parameters of the base, p of the factors: forward 2 N P, backward to the input 2 N P
    again, and 3 x 2 N p; attention's two products three times.
    """
    d, rank, tokens, flops = 160, 4, 96, []
    wide = dataclasses.replace(LLAMA, d_model=d, n_heads=4, n_kv_heads=4, head_dim=d // 4)
    layer = dataclasses.replace(LLAMA.layers[0], ffn_width=4 * d)
    batch = {"tokens": np.zeros((1, tokens), np.int32)}
    for layers in (1, 2):  # the difference is a layer
        config = dataclasses.replace(wide, layers=(layer,) * layers)
        model = Model(config, random_params(config), None, "")
        flat = flatten(insert_lora(model, LORA | {"rank": rank})[0].params)
        thin = {p: x for p, x in flat.items() if p.endswith(("lora_a", "lora_b"))}

        def loss(thin, flat=flat, config=config):
            options = causal_lm.RunOptions(unroll=True)
            params = unflatten(flat | thin)
            outputs = causal_lm.forward(config, params, batch, options=options)
            return jnp.sum(outputs["hidden"] ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(thin).compile()
        flops.append(compiled.cost_analysis()["flops"])
        sizes = (f"= f32[{d},{4 * d}]", f"= f32[{4 * d},{d}]")
        products = [line for line in compiled.as_text().splitlines() if " dot(" in line]
        assert products and not [x for x in products if any(size in x for size in sizes)]
    base, factors = 16 * d * d, rank * (4 * 2 * d + 3 * 5 * d)
    attention = 3 * 2 * 2 * tokens * tokens * d
    counted = 2 * tokens * (2 * base + 3 * factors) + attention
    assert flops[1] - flops[0] == pytest.approx(counted, rel=0.05)
