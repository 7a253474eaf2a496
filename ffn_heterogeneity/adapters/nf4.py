"""NF4: a frozen kernel in 4.13 bits per weight (QLoRA, Dettmers et al.; as in bitsandbytes).

Every 64 inputs of an output are divided by their largest |w|, the absmax, and rounded to 16 levels,
two per byte. The absmax minus their mean are quantized again, 256 at a time, to 8 bits of a map
with a dynamic exponent. bitsandbytes takes its blocks from PyTorch's kernel [out, in]; they are the
same if `in` is a multiple of 64, and other kernels are rejected [ours].

    nf4_codes   uint8   [in / 2, out]   codes of inputs 2 i (upper half of the byte) and 2 i + 1
    nf4_scales  uint8   [in / 64, out]  places of the absmax in `EIGHT_BITS`
    nf4_absmax  float32 [ceil(in out / 64 / 256)]   the largest |absmax - mean| of 256
    nf4_mean    float32 [1]
"""

import jax
import jax.numpy as jnp
import numpy as np

BLOCK, SCALES = 64, 256
LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
     -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
     0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
     0.7229568362236023, 1.0], np.float32)  # fmt: skip


def _eight_bits() -> np.ndarray:
    """Signed dynamic map: 0, 1, and in the decade 10^(i - 6), i = 0 .. 6, 2^i values.

    They are the centers of 2^i equal parts of [0.1, 1], with both signs.
    """
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2**i + 1, dtype=np.float32)
        middles = (edges[:-1] + edges[1:]) / 2 * np.float32(10.0 ** (i - 6))
        values += [*middles, *-middles]
    return np.sort(np.array(values, np.float32))


EIGHT_BITS = _eight_bits()


def kernel(leaves: dict[str, jax.Array]) -> jax.Array:
    """Dequantize the kernel [..., in, out] to float32. Leading axes broadcast."""
    codes = leaves["nf4_codes"]
    pairs = jnp.stack([codes >> 4, codes & 15], axis=-2)  # [..., in / 2, 2, out]
    shape = (*codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1])
    levels = jnp.asarray(LEVELS)[pairs.reshape(shape)]
    return (levels.reshape(*shape[:-2], -1, BLOCK, shape[-1])
            * _absmax(leaves)[..., None, :]).reshape(shape)  # fmt: skip


def _absmax(leaves: dict[str, jax.Array]) -> jax.Array:
    """Dequantized absmax, float32 [..., in / 64, out]."""
    places = leaves["nf4_scales"]
    # In the order of PyTorch's [out, in]: all blocks of an output, then those of the next.
    flat = jnp.swapaxes(jnp.asarray(EIGHT_BITS)[places], -1, -2)
    lead, count = places.shape[:-2], places.shape[-1] * places.shape[-2]
    each = jnp.repeat(leaves["nf4_absmax"], SCALES, axis=-1)[..., :count]
    values = flat.reshape(*lead, count) * each + leaves["nf4_mean"]
    return jnp.swapaxes(values.reshape(*lead, places.shape[-1], places.shape[-2]), -1, -2)


def quantise(weights) -> dict[str, jax.Array]:
    """Quantize a kernel [in, out] to its four leaves.

    Raises:
      ValueError: `in` is not a multiple of 64.
    """
    fan_in, fan_out = weights.shape
    if fan_in % BLOCK:
        raise ValueError(f"a kernel {weights.shape}: its inputs are no multiple of {BLOCK}")
    blocks = jnp.asarray(weights, jnp.float32).reshape(-1, BLOCK, fan_out)
    absmax = jnp.max(jnp.abs(blocks), axis=1)
    shares = blocks / jnp.where(absmax > 0, absmax, 1.0)[:, None]
    # The nearest level; at the midpoint the lower one, as in bitsandbytes.
    codes = jnp.searchsorted(jnp.asarray((LEVELS[1:] + LEVELS[:-1]) / 2), shares, side="left")
    codes = codes.reshape(fan_in // 2, 2, fan_out).astype(jnp.uint8)
    flat = absmax.T.reshape(-1)
    mean = jnp.mean(flat)
    rest = jnp.pad(flat - mean, (0, -flat.size % SCALES)).reshape(-1, SCALES)
    largest = jnp.max(jnp.abs(rest), axis=1)
    shares = (rest / jnp.where(largest > 0, largest, 1.0)[:, None]).reshape(-1)[: flat.size]
    places = jnp.searchsorted(jnp.asarray((EIGHT_BITS[1:] + EIGHT_BITS[:-1]) / 2), shares)
    return {
        "nf4_codes": (codes[:, 0] << 4) | codes[:, 1],
        "nf4_scales": places.astype(jnp.uint8).reshape(fan_out, -1).T,
        "nf4_absmax": largest,
        "nf4_mean": mean[None],
    }
