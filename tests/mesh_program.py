"""A program for eight devices: meshes compared with one device, results as JSON.

python tests/mesh_program.py meshes | encoders | experts | five | generation | nucl | nll | fsdp
"""

import dataclasses
import functools
import itertools
import json
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import test_five
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import LLAMA, batch_of, random_params, starting_from, tiny_of, with_experts

from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.losses.cross_entropy import chunked_nll
from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.nucl_listing import compute_nucl_listing
from ffn_heterogeneity.losses.router import load_balance_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm
from ffn_heterogeneity.models.config import LayerConfig
from ffn_heterogeneity.models.generate import Generator, Sampling
from ffn_heterogeneity.models.leaves import declared
from ffn_heterogeneity.parallel import partition
from ffn_heterogeneity.parallel import processes as distributed
from ffn_heterogeneity.surgery import SURGERIES, kmeans
from ffn_heterogeneity.surgery.adapt import insert_lora
from ffn_heterogeneity.train.hlo import collectives
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.plan import plan
from ffn_heterogeneity.train.state import abstract_state, create_state, state_shardings
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.tree import flatten, unflatten

distributed.give_fake_devices_threads()
MESHES = ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 1, 8))
HYPER = {"learning_rate": np.float32(0.05), "alpha": np.float32(0.1)}


def models() -> dict:
    """Gemma-2 (windows, soft-caps, tied), GPT-2, and a Llama whose layers differ in width."""
    gemma, gpt2 = (tiny_of(name, layers=4).with_widths([16] * 4) for name in ("gemma2", "gpt2"))
    return {
        "gemma2": dataclasses.replace(gemma, vocab_size=32),
        "gpt2": dataclasses.replace(gpt2, vocab_size=32),
        "llama": dataclasses.replace(
            LLAMA, vocab_size=64, layers=(LayerConfig(24),) * 2 + (LayerConfig(16),) * 2, tied=False
        ),
    }


def build(config, shape, optimizer_name="sgd", accumulation=1, dtype=np.float32):
    """(state, step, gradient function, shardings) on a mesh of this shape."""
    mesh = partition.make_mesh(*shape)
    params = random_params(config, dtype=dtype)
    trainable = dict.fromkeys(flatten(params), True)
    settings = OptimizerConfig(name=optimizer_name, min_dim_size_to_factor=8)
    optimizer = make_optimizer(settings, params, trainable)
    leaves = declared(config, params)
    placed = (
        state_shardings(mesh, abstract_state(params, optimizer, trainable), leaves),
        partition.batch_sharding(mesh),
        partition.replicated(mesh),
    )
    options = causal_lm.RunOptions(
        remat="dots", compute_dtype=jnp.dtype(dtype), **partition.run_shardings(mesh)
    )
    terms = (
        nll_term(TermContext("nll", model=config, mesh=mesh)),
        nucl_term(TermContext("nucl", "alpha", mesh=mesh)),
    )

    forward = functools.partial(causal_lm.forward, config, options=options)
    step = make_train_step(
        forward, terms, optimizer, trainable, shardings=placed, accumulation=accumulation
    )
    state = create_state(params, optimizer, trainable, shardings=placed[0])

    def loss(params, batch):
        outputs = forward(params, batch, probes=(), dropout=None)
        text, rows = terms[0].function(params, outputs, batch), terms[1].function(params)
        return text.total / text.denominator + HYPER["alpha"] * rows.total

    gradient = jax.jit(
        jax.grad(loss),
        in_shardings=(placed[0].params, partition.batch_sharding(mesh, accumulated=False)),
        out_shardings=placed[0].params,
    )
    return state, step, gradient, placed


def train(config, shape, optimizer_name="sgd", rows=8):
    """Losses of three steps, the first gradient, the final parameters, and whether all is cut."""
    state, step, gradient, placed = build(config, shape, optimizer_name, dtype=np.float64)
    batches = [batch_of(config.vocab_size, rows=rows, seed=i) for i in range(3)]
    grads = jax.device_get(flatten(gradient(state.params, batches[0])))
    losses = []
    for batch in batches:
        batch = jax.device_put({k: v[None] for k, v in batch.items()}, placed[1])
        state, metrics = step(state, batch, jax.device_put(HYPER, placed[2]))
        losses.append(float(metrics["loss"]))
    down = state.params["stack"]["segment_0"]["slot_0"]["ffn"]["down"]["kernel"]
    assert down.addressable_shards[0].data.size * shape[1] * shape[2] == down.size
    assert step._cache_size() == 1
    return losses, grads, jax.device_get(flatten(state.params))


def worst(one: dict, other: dict) -> float:
    """Largest difference, relative to the norm of the leaf."""
    # Keys' biases add one number to all logits of a query: their gradient is only rounding.
    paths = [path for path in one if not path.endswith("/k/bias")]
    return max(
        float(np.linalg.norm(one[path] - other[path]) / np.linalg.norm(one[path])) for path in paths
    )


def some_meshes() -> dict:
    return meshes(("gemma2",), ((2, 2, 2),))


@jax.enable_x64(True)
def meshes(names=("gemma2", "gpt2", "llama"), shapes=MESHES) -> dict:
    """Compares in float64, because float32's rounding is as large as the tolerance."""
    found = {}
    for name in names:
        config = models()[name]
        for optimizer in ("sgd", "adafactor") if name == "llama" else ("sgd",):
            losses, grads, params = train(config, (1, 1, 1), optimizer)
            for shape in shapes:
                here = train(config, shape, optimizer)
                found[f"{name} {optimizer} {shape}"] = {
                    "loss": float(np.max(np.abs(np.divide(here[0], losses) - 1))),
                    "gradient": worst(grads, here[1]),
                    "params": worst(params, here[2]),
                }
    return found


@jax.enable_x64(True)
def encoders() -> dict:
    """A scalar of hidden states and pooler, and its gradient, with dropout: BERT and T5."""
    return _of_encoder("bert", 0) | _of_encoder("t5", 12)


def _of_encoder(name: str, length: int) -> dict:
    """{mesh: error} of a model whose encoder has separate rows of this length, or none (0)."""
    config = dataclasses.replace(tiny_of(name, layers=3), vocab_size=32)
    params = random_params(config, dtype=np.float64)
    batch = batch_of(config.vocab_size, rows=8, encoder=length)
    if config.token_types:
        batch["token_types"] = (batch["segment_ids"] == 2).astype(np.int32)

    def run(shape) -> tuple[float, dict]:
        mesh = partition.make_mesh(*shape)
        options = causal_lm.RunOptions(compute_dtype=np.float64, **partition.run_shardings(mesh))

        def loss(params, batch):
            drop = (jax.random.key(0), jnp.float64(0.1))
            outputs = causal_lm.forward(config, params, batch, options=options, dropout=drop)
            return jnp.sum(jnp.sin(outputs["hidden"])) + jnp.sum(outputs.get("pooled", 0.0))

        placed = jax.device_put(params, partition.shardings(mesh, params, declared(config, params)))
        rows = jax.device_put(batch, partition.batch_sharding(mesh, accumulated=False))
        value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(placed, rows))
        return float(value), flatten(gradient)

    (alone, reference), errors = run((1, 1, 1)), {}
    for shape in ((8, 1, 1), (2, 2, 2)):
        value, gradient = run(shape)
        errors[f"{name} {shape}"] = max(abs(value / alone - 1), worst(reference, gradient))
    return errors


@jax.enable_x64(True)
def experts() -> dict:
    """Errors of loss and gradient, and all-gathers, of layers with experts, LoRA and MacDrop.

    8 experts are sharded; 6 are not divided by four, so their neurons are.
    """
    results = {}
    for count, shapes in ((8, ((1, 2, 4), (2, 2, 2))), (6, ((1, 2, 4),))):
        small = dataclasses.replace(LLAMA, vocab_size=32, layers=LLAMA.layers[:2])
        config = with_experts(small, count)
        model = Model(config, random_params(config), None, "")
        model, _ = insert_lora(model, {"rank": 2, "targets": "ffn/(up|down)"})
        model, _ = SURGERIES["macdrop"](model, {"k": 3})
        params = flatten(model.params)
        for path, leaf in params.items():
            shift = 0.1 * ("lora_b" in path) - 0.7 * ("macdrop_keep" in path)
            if not path.endswith("macdrop_rows"):
                params[path] = np.asarray(leaf, np.float64) + shift
        params = unflatten(params)
        values = {shape: _of_experts(config, params, shape) for shape in ((1, 1, 1), *shapes)}
        one, reference, _ = values.pop((1, 1, 1))
        for shape, (value, gradient, traffic) in values.items():
            results[f"{count} {shape}"] = {
                "loss": abs(value / one - 1),
                "gradient": worst(reference, gradient),
                "gathered": [x for kind, found in traffic if kind == "all-gather" for x in found],
            }
    return results


def _of_experts(config, params, shape) -> tuple[float, dict, list]:
    """(a loss of hidden states and routers, its gradient, collectives) on a mesh."""
    mesh, batch = partition.make_mesh(*shape), batch_of(32, rows=8)
    balance = load_balance_term(TermContext("load_balance", model=config))
    options = causal_lm.RunOptions(
        compute_dtype=np.float64, remat="dots", **partition.run_shardings(mesh)
    )

    def loss(params, batch):
        outputs = causal_lm.forward(config, params, batch, options=options, probes=balance.probes)
        value = balance.function(params, outputs, batch)
        return jnp.sum(jnp.sin(outputs["hidden"])) + value.total / value.denominator

    placed = jax.device_put(params, partition.shardings(mesh, params, declared(config, params)))
    rows = jax.device_put(batch, partition.batch_sharding(mesh, accumulated=False))
    program = jax.jit(jax.value_and_grad(loss, allow_int=True)).lower(placed, rows).compile()
    value, gradient = jax.device_get(program(placed, rows))
    found = {p: x for p, x in flatten(gradient).items() if not p.endswith("macdrop_rows")}
    return float(value), found, moved(program)


def five() -> dict:
    """Every piece of every paper (configs/five.py), in float32."""
    results = []
    with tempfile.TemporaryDirectory() as root:
        config = test_five.sgd(test_five.write(Path(root)))
        model = starting_from(config)
        for shape in ((1, 1, 1), (2, 2, 2)):
            built = plan(config, test_five.mesh(*shape), model)
            results.append(test_five.gradients(built, config, model.params, test_five.batch_of()))
    (one, alone), (other, here) = results
    trained = [path for path in one if np.any(one[path])]
    return {
        "loss": abs(here["loss"] / alone["loss"] - 1),
        "gradient": worst({path: one[path] for path in trained}, other),
    }


def generation() -> dict:
    """Tokens of every mesh (None: one device, no mesh), greedy and drawn: windows, both stacks."""
    gemma = dataclasses.replace(models()["gemma2"], eos_id=None, n_kv_heads=2)
    t5 = dataclasses.replace(tiny_of("t5", 4), eos_id=None, vocab_size=32)
    prompts = [[0, 5, 9], [0, 4, 1, 12, 13, 14, 15], [7], [0, 20, 10, 17, 3], [0, 1]]
    generated = {}
    for config, shape in itertools.product((gemma, t5), (None, (2, 2, 2), (1, 2, 4))):
        mesh = shape and partition.make_mesh(*shape)
        made = Generator(config, random_params(config), mesh=mesh, batch_size=4)
        for temperature in (0.0, 1.0):
            sampling = Sampling(max_new_tokens=20, temperature=temperature, seed=5)
            tokens = [one.tokens for one in made(prompts, sampling, progress=None)]
            case = f"{config.family} {temperature}"
            generated.setdefault(case, {})[str(shape)] = tokens
    return generated


def moved(compiled) -> list[tuple[str, list[list[int]]]]:
    """(kind, shapes of the results) of every collective."""
    return [(x.kind, [list(s) for s in x.shapes]) for x in collectives(compiled.as_text())]


def nucl() -> dict:
    """Bytes moved by NUCL's value and gradient, and by the listing under autodiff."""
    layers, m, n, found = 4, 64, 32, {}
    for shape in MESHES:
        mesh = partition.make_mesh(*shape)
        where = NamedSharding(mesh, PartitionSpec(None, "tensor", "fsdp"))
        whole = partition.replicated(mesh)
        term = nucl_term(TermContext("nucl", "alpha", mesh=mesh))

        def ours(w, term=term):
            tree = {"stack": {"segment_0": {"slot_0": {"ffn": {"down": {"kernel": w}}}}}}
            value = term.function(tree)
            return value.total, value.metrics

        def listing(w):
            return compute_nucl_listing(w)[2], {}

        for name, function in (("ours", ours), ("listing", listing)):
            program = jax.jit(
                jax.value_and_grad(function, has_aux=True),
                in_shardings=where, out_shardings=(whole, where),
            )  # fmt: skip
            w = jax.ShapeDtypeStruct((layers, m, n), jnp.float32)
            found[f"{name} {shape}"] = moved(program.lower(w).compile())
    return found


def nll() -> dict:
    """Collectives of the cross-entropy's value and gradients, in eight chunks; V 64, D 32."""
    found = {}
    for shape in ((1, 8, 1), (2, 2, 2)):
        mesh = partition.make_mesh(*shape)
        rows = partition.batch_sharding(mesh, accumulated=False)
        table = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))

        def loss(hidden, kernel, targets, mesh=mesh):
            return chunked_nll(hidden, kernel, targets, layout="vd", chunk=4, mesh=mesh).total

        program = jax.jit(
            jax.value_and_grad(loss, argnums=(0, 1)),
            in_shardings=(rows, table, rows),
            out_shardings=(partition.replicated(mesh), (rows, table)),
        )
        shapes = (((16, 32, 32), jnp.float32), ((64, 32), jnp.float32), ((16, 32), jnp.int32))
        compiled = program.lower(*(jax.ShapeDtypeStruct(*each) for each in shapes)).compile()
        found[str(shape)] = [(x.kind, x.shapes, x.inside) for x in collectives(compiled.as_text())]
    return found


def fsdp() -> list:
    """All-gathers of the train step on (1, 8, 1)."""
    config = dataclasses.replace(LLAMA, vocab_size=64, layers=(LayerConfig(24),) * 6)
    state, step, _, placed = build(config, (1, 8, 1))
    batch = {k: v[None] for k, v in batch_of(64, rows=8).items()}
    batch = jax.device_put(batch, placed[1])
    return moved(step.lower(state, batch, jax.device_put(HYPER, placed[2])).compile())


def clusters() -> dict:
    """k-means on eight devices against one: labels that differ, and the columns of K on each."""
    points = np.random.default_rng(0).normal(size=(240, 50)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    shares = kmeans._gram(jnp.asarray(points), mesh).addressable_shards
    one, split = (kmeans.cluster(points, 60, mesh=each) for each in (None, mesh))
    differ = int((one.labels != split.labels).sum())
    model = Model(LLAMA, random_params(LLAMA), None, "")
    _, report = SURGERIES["fuse"](model, {"ratio": 0.5})
    return {
        "differ": differ,
        "shares": [share.data.shape for share in shares],
        "inertia_share": report["inertia_share"],
    }


if __name__ == "__main__":
    assert jax.device_count() == 8, jax.device_count()
    print(json.dumps({name: globals()[name]() for name in sys.argv[1:]}))
