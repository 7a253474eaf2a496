"""DoRA and MacDrop as functions: against formulas in float64, alone and together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import LLAMA, random_params
from tiny_runs import refused

from ffn_heterogeneity.adapters import dora, lora, macdrop, nf4
from ffn_heterogeneity.io.load import Model
from ffn_heterogeneity.models.causal_lm import forward
from ffn_heterogeneity.models.leaves import Place
from ffn_heterogeneity.models.linear import DROP, Linear, effective_kernel
from ffn_heterogeneity.models.options import RunOptions
from ffn_heterogeneity.models.stack import restack, unstack
from ffn_heterogeneity.surgery import SURGERIES
from ffn_heterogeneity.surgery.removal import take_neurons

IN, OUT, RANK = 11, 7, 3


@pytest.fixture
def leaves():
    rng = np.random.default_rng(0)
    sizes = {"kernel": (IN, OUT), "lora_a": (IN, RANK), "lora_b": (RANK, OUT)}
    drawn = {name: rng.normal(size=size) for name, size in sizes.items()}
    return drawn | {"lora_scale": np.array([0.5]), "dora_m": rng.random(OUT) + 0.5}


def oracle(leaves):
    """K'' from the paper's formula, float64."""
    moved = leaves["kernel"] + leaves["lora_scale"][0] * leaves["lora_a"] @ leaves["lora_b"]
    return moved * (leaves["dora_m"] / np.sqrt((moved**2).sum(0)))


def floats(tree, dtype=np.float32):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def test_dora_is_its_formula(leaves):
    x = np.random.default_rng(1).normal(size=(5, IN))
    outputs = Linear(OUT).apply({"params": floats(leaves)}, x.astype(np.float32))
    np.testing.assert_allclose(outputs, x @ oracle(leaves), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(effective_kernel(floats(leaves)), oracle(leaves), rtol=1e-5)


def test_gradients_are_those_of_the_detached_norm(leaves):
    """Against explicit derivatives of the product: d y / d theta with a constant norm."""
    rng = np.random.default_rng(2)
    x, g = rng.normal(size=(5, IN)), rng.normal(size=(5, OUT))

    def loss(tree):
        return jnp.sum(Linear(OUT).apply({"params": tree}, jnp.asarray(x, np.float32)) * g)

    gradients = jax.grad(loss)(floats(leaves))
    s = leaves["lora_scale"][0]
    moved = leaves["kernel"] + s * leaves["lora_a"] @ leaves["lora_b"]
    norms = np.sqrt((moved**2).sum(0))
    turned = g * (leaves["dora_m"] / norms)  # d loss / d (x K')
    expected = {
        "dora_m": ((x @ moved) * g).sum(0) / norms,
        "lora_a": s * x.T @ (turned @ leaves["lora_b"].T),
        "lora_b": s * (x @ leaves["lora_a"]).T @ turned,
        "kernel": x.T @ turned,
    }
    for name, value in expected.items():
        error = np.linalg.norm(gradients[name] - value) / np.linalg.norm(value)
        assert error <= 1e-5, (name, error)


def test_a_factor_is_not_rounded_to_half_precision():
    """bfloat16 has no number between 1 and 1.0078; the products are rounded one by one."""
    tree = {"kernel": jnp.eye(OUT), "dora_m": jnp.full(OUT, 1.005)}
    x = np.random.default_rng(1).uniform(1, 2, (4096, OUT)).astype(jnp.bfloat16)
    y = Linear(OUT, options=RunOptions(compute_dtype=jnp.bfloat16)).apply({"params": tree}, x)
    ratio = np.asarray(y, np.float64).mean() / np.asarray(x, np.float64).mean()
    assert y.dtype == jnp.bfloat16 and ratio == pytest.approx(1.005, abs=1e-3)


def test_dora_changes_nothing_at_first(leaves):
    kernel = leaves["kernel"].astype(np.float32)
    kernel[:, 2] = 0  # a column without a length
    tree = {
        "kernel": kernel,
        **lora.init(jax.random.key(0), kernel, RANK, 6.0),
        **dora.init(kernel),
    }
    np.testing.assert_allclose(effective_kernel(tree), kernel, rtol=1e-6)
    x = np.ones((2, IN), np.float32)
    gradient = jax.grad(lambda t: jnp.sum(Linear(OUT).apply({"params": t}, x) ** 2))(tree)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_no_gradient_of_the_kernel_is_built(leaves):
    """The compiled program writes nothing of the kernel's shape if only LoRA and lengths train."""
    tree = floats(leaves)
    kernel = tree.pop("kernel")
    x = jnp.ones((5, IN))

    def loss(thin):
        return jnp.sum(jnp.sin(Linear(OUT).apply({"params": thin | {"kernel": kernel}}, x)))

    text = jax.jit(jax.grad(loss)).lower(tree).as_text()
    made = [line for line in text.splitlines() if f"-> tensor<{IN}x{OUT}xf32>" in line]
    assert not [line for line in made if "dot_general" in line], made


def test_the_norm_sees_what_macdrop_left(leaves):
    keep = (np.random.default_rng(3).random((IN, 2)) < 0.5).astype(float)
    dropped = dict(leaves, macdrop_rows=np.array([5, 1]), macdrop_keep=keep)
    masked = dict(leaves, kernel=leaves["kernel"].copy())
    masked["kernel"][:, [5, 1]] *= keep
    tree = floats(dropped) | {"macdrop_rows": jnp.array([5, 1])}
    np.testing.assert_allclose(effective_kernel(tree), oracle(masked), rtol=1e-5, atol=1e-6)
    x = np.random.default_rng(1).normal(size=(5, IN))
    outputs = Linear(OUT).apply({"params": tree}, x.astype(np.float32))
    np.testing.assert_allclose(outputs, x @ oracle(masked), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("curriculum", "expected"),
    [  # t = 1, 3, 4, 9, 12 of T = 12, three epochs of four steps; p0 = 0.8
        ("step", [0.8 * 11 / 12, 0.6, 0.8 * 8 / 12, 0.2, 0.0]),
        ("epoch_before", [0.8, 0.8, 0.8, 0.8 / 3, 0.8 / 3]),
        ("epoch_after", [1.6 / 3, 1.6 / 3, 1.6 / 3, 0.0, 0.0]),
        ("exp", [0.8 * np.exp(-0.05 * t * 579 / 12) for t in (1, 3, 4, 9, 12)]),
        ("constant", [0.8] * 5),
    ],
)
def test_curricula(curriculum, expected):
    settings = {"p0": 0.8, "curriculum": curriculum, "a": 0.05, "epochs": 3}
    p = macdrop.rate(settings, 12)
    np.testing.assert_allclose([p(t - 1) for t in (1, 3, 4, 9, 12)], expected, atol=1e-12)


def test_curricula_that_are_none():
    for key, value in {"curriculum": "linear", "p0": 1.5, "epochs": 0, "a": -1.0}.items():
        settings = {"p0": 0.8, "curriculum": "step", "a": 0.05, "epochs": 3} | {key: value}
        refused(f"{key}={value!r}", macdrop.rate, settings, 12)


def test_masks_follow_their_law():
    """One draw for gate and up, a new one each step; each element is 0 with probability p."""
    ffn = {
        name: {
            "kernel": np.ones((1, 400, 6), np.float32),
            "macdrop_rows": np.array([[1, 4]]),
            "macdrop_keep": np.ones((1, 400, 2), np.float32),
        }
        for name in ("gate", "up")
    }
    tree = {"stack": {"segment_1": {"slot_0": {"ffn": ffn | {"down": {"kernel": np.ones(3)}}}}}}
    refresh = jax.jit(macdrop.refresh({}), static_argnums=4)
    draws = []
    for p in (0.0, 0.2, 0.8, 1.0):
        for step in range(5):
            key = jax.random.fold_in(jax.random.key(7), step)
            new = refresh(tree, step, key, {"macdrop": p}, True)
            ffn = new["stack"]["segment_1"]["slot_0"]["ffn"]
            masks = [ffn[name]["macdrop_keep"] for name in ("gate", "up")]
            np.testing.assert_array_equal(*masks)
            assert set(np.unique(masks[0])) <= {0.0, 1.0}
            draws.append(np.asarray(masks[0]))
        share = 1 - np.mean(draws[-5:])
        # Five standard deviations of 4,000 draws.
        assert abs(share - p) <= 5 * np.sqrt(p * (1 - p) / 4000) + 1e-12
    assert not np.array_equal(draws[5], draws[6])
    settled = refresh(tree, 0, None, {"macdrop": 0.5}, False)
    assert set(settled["stack"]["segment_1"]["slot_0"]["ffn"]["gate"]) == {"kernel"}


@pytest.mark.parametrize("module", ["gate", "down"])
def test_removal_refuses_what_it_would_make_wrong(leaves, module):
    more = {"gate": {"macdrop_rows": np.array([0]), "macdrop_keep": np.ones((IN, 1))}}
    more = more.get(module, {"dora_m": np.ones(IN)})
    square = np.ones((IN, IN))
    ffn = {name: {"kernel": square} for name in ("gate", "up", "down")}
    ffn[module] = ffn[module] | more
    with pytest.raises(ValueError, match=f"ffn/{module}/.* fold the model first"):
        take_neurons(LLAMA, Place(0, None, "ffn"), ffn, np.arange(4))


# As bitsandbytes writes them (functional.get_4bit_type; QLoRA, appendix E).
NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
-0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023
1.0"""
NF4 = np.array(NF4.split(), np.float64)


def nf4_oracle(kernel):
    """bitsandbytes' definition on the torch layout [out, in], float64, block by block."""
    flat = kernel.T.astype(np.float64).reshape(-1, 64)
    absmax = np.abs(flat).max(1)
    codes = np.abs(flat[..., None] / absmax[:, None, None] - NF4).argmin(-1)
    mean, places, largest = absmax.mean(), [], []
    for start in range(0, len(absmax), 256):
        rest = absmax[start : start + 256] - mean
        largest.append(np.abs(rest).max())
        places += np.abs(rest[:, None] / largest[-1] - nf4.EIGHT_BITS).argmin(-1).tolist()
    scales = np.concatenate([np.repeat(largest, 256)[: len(absmax)] * nf4.EIGHT_BITS[places]])
    values = NF4[codes] * (scales + mean)[:, None]
    return codes, values.reshape(kernel.T.shape).T


def test_nf4_is_its_definition():
    """Codes and values of a kernel with a partial block of scales."""
    kernel = np.random.default_rng(0).normal(size=(192, 130)).astype(np.float32) * 0.02
    leaves = nf4.quantise(kernel)
    codes, values = nf4_oracle(kernel)
    np.testing.assert_allclose(effective_kernel(leaves), values, rtol=1e-4, atol=1e-7)
    packed = np.asarray(leaves["nf4_codes"])
    mine = np.stack([packed >> 4, packed & 15], 1).reshape(192, 130)
    assert (mine.T.reshape(-1, 64) != codes).mean() <= 1e-4, "rounding of float32 alone"
    assert leaves["nf4_absmax"].shape == (2,)
    used = sum(np.asarray(leaf).nbytes for leaf in leaves.values())
    assert used / kernel.size <= 0.52
    error = np.linalg.norm(values - kernel) / np.linalg.norm(kernel)
    assert 0.05 < error < 0.12


def test_nf4_is_what_bitsandbytes_makes(torch, bitsandbytes):
    """Every code is equal; for near ties of a scale, its search takes the other neighbour."""
    kernel = np.random.default_rng(0).normal(size=(576, 256)).astype(np.float32) * 0.05
    codes, state = bitsandbytes.quantize_4bit(
        torch.tensor(kernel.T.copy()), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    leaves = {name: np.asarray(leaf) for name, leaf in nf4.quantise(kernel).items()}
    np.testing.assert_array_equal(codes.numpy().reshape(256, -1), leaves["nf4_codes"].T)
    np.testing.assert_allclose(np.sort(state.state2.code.numpy()), nf4.EIGHT_BITS, atol=1e-7)
    np.testing.assert_allclose(state.state2.absmax.numpy(), leaves["nf4_absmax"], rtol=1e-6)
    apart = state.absmax.numpy().astype(int) - leaves["nf4_scales"].T.reshape(-1)
    assert np.abs(apart).max() <= 1 and (apart != 0).mean() < 0.005
    theirs = bitsandbytes.dequantize_4bit(codes, state).numpy().T
    error = np.linalg.norm(theirs - effective_kernel(leaves)) / np.linalg.norm(theirs)
    assert error < 5e-4


def test_the_map_of_scales():
    """256 values with 0 and 1, symmetric except for 1; steps double from decade to decade."""
    values = nf4.EIGHT_BITS
    assert len(set(values.tolist())) == 256 and {0.0, 1.0} <= set(values.tolist())
    inner = values[values != 1]
    np.testing.assert_allclose(inner, -inner[::-1])
    np.testing.assert_allclose(values[-2], 1 - 0.9 / 128, rtol=1e-6)
    assert (values > 0.1).sum() == 65 and ((values > 1e-6) & (values < 1e-5)).sum() >= 1


def test_zeros_and_what_cannot_be_quantised():
    kernel = np.zeros((64, 3), np.float32)
    np.testing.assert_array_equal(effective_kernel(nf4.quantise(kernel)), kernel)
    kernel[5, 1] = 0.25
    np.testing.assert_allclose(effective_kernel(nf4.quantise(kernel))[5, 1], 0.25, rtol=0.02)
    refused("no multiple of 64", nf4.quantise, np.zeros((65, 3)))


def test_an_adapter_drops_its_own_input_alone(leaves):
    """y - x K is, per row, s (x / (1 - p) on kept inputs) A B; no dropout without the stream."""
    tree = floats({k: v for k, v in leaves.items() if k != "dora_m"})
    x = np.random.default_rng(1).normal(size=(64, IN)).astype(np.float32)
    linear = Linear(OUT, options=RunOptions(adapter_dropout=0.5))
    plain = Linear(OUT).apply({"params": tree}, x)
    np.testing.assert_array_equal(linear.apply({"params": tree}, x), plain)
    keys = jax.random.split(jax.random.key(0), 400)
    base = x @ leaves["kernel"]
    drawn = jax.vmap(lambda key: linear.apply({"params": tree}, x, rngs={DROP: key}))(keys)
    assert float(jnp.std(drawn, axis=0).min()) > 0
    # Its mean equals the value without dropout.
    error = np.linalg.norm(drawn.mean(0) - plain) / np.linalg.norm(plain - base)
    assert error < 0.15
    thin = dict(tree, lora_b=jnp.zeros_like(tree["lora_b"]))
    dropped = linear.apply({"params": thin}, x, rngs={DROP: keys[0]})
    np.testing.assert_allclose(dropped, base, rtol=1e-4, atol=1e-5)


def test_a_model_drops_in_adapters_alone():
    params = unstack(random_params(LLAMA))
    model, _ = SURGERIES["lora"](
        Model(LLAMA, params, None, "tiny"), {"rank": 2, "alpha": 2.0, "targets": "ffn/"}
    )
    tree = unstack(model.params)
    for layer in tree["layers"]:
        for linear in layer["ffn"].values():
            linear["lora_b"] = linear["lora_b"] + 0.3
    adapted, tokens = restack(LLAMA, tree), {"tokens": np.arange(2, 12)[None]}

    @jax.jit
    def states(params, key):
        options = RunOptions(adapter_dropout=0.3)
        return forward(LLAMA, params, tokens, options=options, dropout=(key, None))["hidden"]

    hidden = [states(adapted, jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(hidden[0], hidden[1])
    assert np.abs(hidden[0] - hidden[2]).max() > 1e-3
    plain = forward(LLAMA, restack(LLAMA, params), tokens)["hidden"]
    without = states(restack(LLAMA, params), jax.random.key(0))
    np.testing.assert_allclose(without, plain, rtol=1e-5, atol=1e-6)
