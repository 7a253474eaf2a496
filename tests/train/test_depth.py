"""Only the memory of the layers grows with their number, not the program.

Models of 12, 26 and 46 layers, whole train steps with NLL and NUCL, AdamW, donated; float32.

Bytes a layer adds to the temporaries of the gradient are its saved activations A alone:

    full               x
    attention_output   x + a
    dots               x + q + k + v + a + s + out + gate + up (+ down, where a norm follows it)

x = out = down = [B, T, D], q = a = [B, T, H h], k = v = [B, T, K h], gate = up = [B, T, M], and
s = [B, T, H] twice, kept by attention's backward pass besides its output. With G the bytes of a
layer's parameters, its gradients are G more. The whole step holds A, G and NUCL's own gradient of
the kernels it reads, and later, when A is freed, up to 4 G: gradients, updates (`update_norm` reads
them) and the two moments, which XLA for the CPU copies before it overwrites them.
"""

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from tiny_models import batch_of

from ffn_heterogeneity.losses.nll import nll_term
from ffn_heterogeneity.losses.nucl import nucl_term
from ffn_heterogeneity.losses.terms import TermContext
from ffn_heterogeneity.models import causal_lm, families
from ffn_heterogeneity.train.optimizers import OptimizerConfig, make_optimizer
from ffn_heterogeneity.train.state import abstract_state
from ffn_heterogeneity.train.step import make_train_step
from ffn_heterogeneity.tree import flatten

DEPTHS = (12, 26, 46)
B, T, V, D, M, HEADS, KV_HEADS, HEAD = 2, 64, 256, 64, 128, 4, 2, 16
FAMILIES = ("llama", "gemma2")  # equal layers, and alternating local and global layers
SLOW_REMATS = [pytest.param(x, marks=pytest.mark.slow) for x in ("full", "attention_output")]
SLOW_GEMMA2 = ["llama", pytest.param("gemma2", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_cached():
    """Disables the cache; JAX decides this once per process unless it is reset."""
    before = jax.config.jax_enable_compilation_cache
    for wanted in (False, before):
        jax.config.update("jax_enable_compilation_cache", wanted)
        reset_cache()
        if not wanted:
            yield


def model_of(family: str, depth: int):
    config, _ = next(iter(families.FAMILIES[family].presets.values()))
    layers = tuple(
        dataclasses.replace(layer, ffn_width=M, window=layer.window and 16)
        for layer in (config.layers[i % 2] for i in range(depth))
    )
    sizes = {"vocab_size": V, "d_model": D, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
    ids = {"bos_id": 0, "eos_id": 1, "pad_id": None}
    return dataclasses.replace(config, layers=layers, head_dim=HEAD, **sizes, **ids)


def abstract_batch(*leading: int) -> dict:
    shape = (*leading, B, T)
    return {k: jax.ShapeDtypeStruct(shape, leaf.dtype) for k, leaf in batch_of(V).items()}


def lower_step(family: str, depth: int, remat: str = "dots", nucl: bool = True):
    """A new function each time, so that nothing cached for an earlier one is used."""
    config = model_of(family, depth)
    params = causal_lm.abstract_params(config)
    mask = dict.fromkeys(flatten(params), True)
    optimizer = make_optimizer(OptimizerConfig("adamw"), params, mask)
    options = causal_lm.RunOptions(remat=remat)

    forward = functools.partial(causal_lm.forward, config, options=options)
    terms = (nll_term(TermContext("nll", model=config)),)
    terms += (nucl_term(TermContext("nucl", "alpha")),) * nucl
    step = make_train_step(forward, terms, optimizer, mask)
    hyper = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in ("learning_rate", "alpha")}
    return step.lower(abstract_state(params, optimizer, mask), abstract_batch(1), hyper)


def lower_gradient(family: str, depth: int, remat: str):
    """The gradient of the text loss; the gradients themselves are outputs, not temporaries."""
    config, options = model_of(family, depth), causal_lm.RunOptions(remat=remat)
    term = nll_term(TermContext("nll", model=config))

    def loss(params, batch):
        outputs = causal_lm.forward(config, params, batch, options=options)
        return term.function(params, outputs, batch).total

    return jax.jit(jax.grad(loss)).lower(causal_lm.abstract_params(config), abstract_batch())


@functools.cache
def compiled_steps(family: str) -> tuple[dict[int, float], dict[int, int]]:
    """({depth: CPU seconds of the cheapest of three compilations}, {depth: temporary bytes}).

    CPU seconds of all threads, not elapsed time, because other programs may use the cores.
    """
    seconds: dict[int, float] = {}
    temporary: dict[int, int] = {}
    # Interleaved, so that load on the machine affects all depths equally.
    for _ in range(3):
        for depth in DEPTHS:
            lowered = lower_step(family, depth)
            start = time.process_time()
            compiled = lowered.compile()
            took = time.process_time() - start
            seconds[depth] = min(took, seconds.get(depth, took))
            temporary[depth] = compiled.memory_analysis().temp_size_in_bytes
    return seconds, temporary


def slopes(temporary: dict[int, int]) -> tuple[float, float]:
    """Bytes per layer, between the first two depths and between the last two."""
    first, second = zip(DEPTHS[:-1], DEPTHS[1:], strict=True)
    return tuple((temporary[b] - temporary[a]) / (b - a) for a, b in (first, second))


def saved_activations(family: str, remat: str) -> int:
    """A of the module's docstring, in bytes."""
    x, query, key, stats = D, HEADS * HEAD, KV_HEADS * HEAD, 2 * HEADS
    attended = query
    dots = x + query + 2 * key + attended + stats + D + 2 * M + (family == "gemma2") * D
    floats = {"full": x, "attention_output": x + attended, "dots": dots}
    return 4 * B * T * floats[remat]


def layer_bytes(family: str, ending: str = "") -> int:
    """Bytes of one layer's float32 parameters whose path has this end."""
    (depth, *_) = DEPTHS
    leaves = flatten(causal_lm.abstract_params(model_of(family, depth)))
    stacked = [x.size for p, x in leaves.items() if p.startswith("stack/") and p.endswith(ending)]
    return 4 * sum(stacked) // depth


# ---- the program


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("nucl", [False, True])
def test_the_program_is_as_long_at_any_depth(family, nucl):
    """One scan over a pattern: programs of 12 and 46 layers differ only in sizes of shapes."""
    sizes = [len(lower_step(family, depth, nucl=nucl).as_text()) for depth in DEPTHS]
    assert max(sizes) <= 1.02 * min(sizes), sizes


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compilation_takes_as_long_at_any_depth(family):
    seconds, _ = compiled_steps(family)
    assert max(seconds.values()) <= 1.3 * min(seconds.values()), seconds


# ---- memory


@pytest.mark.parametrize("family", SLOW_GEMMA2)
@pytest.mark.parametrize("remat", ["dots", *SLOW_REMATS])
def test_a_layer_adds_its_saved_activations_to_the_gradient_and_no_more(family, remat):
    temporary = {
        depth: lower_gradient(family, depth, remat).compile().memory_analysis().temp_size_in_bytes
        for depth in DEPTHS
    }
    first, second = slopes(temporary)
    assert first == second == saved_activations(family, remat)


def check_step(family: str, remat: str, temporary: dict[int, int]) -> None:
    first, second = slopes(temporary)
    # The larger of two phases, backward and the optimiser's, each linear in depth: with remat=full
    # the second takes over between 20 and 26 layers of Gemma-2. A slope falls in neither case.
    assert first <= 1.02 * second, temporary
    size = layer_bytes(family)
    backward = saved_activations(family, remat) + size + layer_bytes(family, "ffn/down/kernel")
    assert max(first, second) <= max(backward, 4 * size), (first, second, backward, 4 * size)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_adds_its_own_share_to_the_step(family):
    check_step(family, "dots", compiled_steps(family)[1])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_adds_its_own_share_to_the_step_with_remat_full(family):
    temporary = {
        depth: lower_step(family, depth, "full").compile().memory_analysis().temp_size_in_bytes
        for depth in DEPTHS
    }
    check_step(family, "full", temporary)
