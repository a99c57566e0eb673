"""Building blocks shared by the families. Knows no family, no cache and no checkpoint.

Weights and activations are in the model's dtype; norms, rotary angles, gates and every product's accumulator are float32.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.models.config import Rope


def product(x: Float[Array, "t a"], w: Float[Array, "..."], contract: int = 0) -> Float[Array, "t b"]:
    """x times w over w's axis `contract`, accumulated and returned in float32.

    The float32 result type is what keeps bfloat16 fast on CPU: asked for a bfloat16 result, XLA:CPU first converts the whole weight to
    float32 (30 layers of 576 x 1536, 8 rows: 149 ms instead of 25). Float32 inputs use full float32 products on every backend.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)


def ones(size: int, dtype: jnp.dtype) -> nnx.Param[Array]:
    return nnx.Param(jnp.ones((size,), dtype))


def zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[Array]:
    return nnx.Param(jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, in float32 (https://arxiv.org/abs/1910.07467)."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype):
        self.scale = ones(dim, dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*n m"]) -> Float[Array, "*n m"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (y * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class Linear(nnx.Module):
    """x @ kernel without bias; the kernel is stored [in, out]."""

    def __init__(self, in_dim: int, out_dim: int, dtype: jnp.dtype):
        self.kernel = zeros((in_dim, out_dim), dtype)

    def __call__(self, x: Float[Array, "t a"]) -> Float[Array, "t b"]:
        return product(x, self.kernel[...]).astype(x.dtype)


class Embedding(nnx.Module):
    """A table [v, m] that is both the token lookup and, where embeddings are tied, the output head.

    One layout serves both: for 8 rows of 576 x 49152 on CPU the head costs 17 ms this way round and 14 ms as [m, v] in float32; in bfloat16
    9 ms against 65, because beside a lookup along the second axis XLA converts the whole table.
    """

    def __init__(self, vocab_size: int, dim: int, dtype: jnp.dtype):
        self.table = zeros((vocab_size, dim), dtype)

    def __call__(self, tokens: Int[Array, " t"]) -> Float[Array, "t m"]:
        return jnp.take(self.table[...], tokens, axis=0, mode="clip")

    def logits(self, x: Float[Array, "t m"]) -> Float[Array, "t v"]:
        return product(x, self.table[...], contract=1)


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x) (https://arxiv.org/abs/2002.05202).

    Gate and up are kept apart, as are q, k and v: fusing them gained nothing (30 layers, 8 rows: 53.6 ms apart, 53.8 fused), and apart they
    split over devices by plain rules.
    """

    def __init__(self, dim: int, ffn_dim: int, dtype: jnp.dtype):
        self.gate = Linear(dim, ffn_dim, dtype)
        self.up = Linear(dim, ffn_dim, dtype)
        self.down = Linear(ffn_dim, dim, dtype)

    def __call__(self, x: Float[Array, "t m"]) -> Float[Array, "t m"]:
        gate, up = product(x, self.gate.kernel[...]), product(x, self.up.kernel[...])
        return self.down((jax.nn.silu(gate) * up).astype(x.dtype))


def rope_frequencies(rope: Rope, dim: int) -> np.ndarray:
    """The dim / 2 rotary frequencies in radians per position, float32."""
    freq = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        # Wavelengths longer than original / low are stretched by `factor`, those shorter than original / high kept, between them a blend.
        # Example: original 8192, low 1, high 4: beyond 8192 positions stretched, below 2048 kept.
        turns = rope.original_max_position * freq / (2 * math.pi)
        keep = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        freq = keep * freq + (1 - keep) * freq / rope.factor
    return freq.astype(np.float32)


def rope_angles(positions: Int[Array, " t"], frequencies: np.ndarray) -> tuple[Float[Array, "t r"], Float[Array, "t r"]]:
    """Cosine and sine of every position's angles, float32, computed once and used by all layers."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "t n d"], cos: Float[Array, "t r"], sin: Float[Array, "t r"]) -> Float[Array, "t n d"]:
    """Rotary embedding, half-split: dim i turns with dim i + r, dims beyond 2 r pass through.

    Example d = 4, r = 2: the pairs are (0, 2) and (1, 3).
    """
    r = cos.shape[-1]
    y = x.astype(jnp.float32)
    a, b, rest = y[..., :r], y[..., r : 2 * r], y[..., 2 * r :]
    c, s = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1).astype(x.dtype)
