"""Building blocks shared by the families. Knows no family, no cache and no checkpoint.

Weights (but those in int8, see int8.py) and activations are in the model's dtype; norms, rotary angles, gates and every product's
accumulator are float32.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Num

from jaxkv.models.config import Rope

WIDE = jnp.dtype("float32")  # of what is computed and kept wide whatever the model's dtype


def works_in_columns(dtype: jnp.dtype) -> bool:
    """Whether a model of this dtype keeps its activations as columns [m, t] instead of rows [t, m].

    In float32 XLA:CPU is faster with the weight first: weight [out, in] times columns [in, t]. SmolLM2's products took 31 ms a step instead
    of 38 with 8 rows, 40 instead of 50 with 16, 87 instead of 102 with 64. In bfloat16 rows times [in, out] is the fast one: 25 ms against
    128. Elsewhere the compiler lays arrays out as it likes, so the dtype alone decides, and a converted checkpoint fits every backend.
    """
    return dtype == jnp.float32


def product(a: Num[Array, "x c"], b: Num[Array, "..."], contract: int = 0) -> Float[Array, "x y"]:
    """a times b over a's last axis and b's axis `contract`, accumulated and returned in float32.

    The float32 result type is what keeps bfloat16 fast on CPU: asked for a bfloat16 result, XLA:CPU first converts the whole weight to
    float32 (30 layers of 576 x 1536, 8 rows: 149 ms instead of 25). Float32 inputs use full float32 products on every backend. An operand
    in int8 is a weight, whose numbers every dtype of ours holds exactly.
    """
    a, b = (x.astype(y.dtype) if x.dtype == jnp.int8 else x for x, y in ((a, b), (b, a)))
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dims = (((1,), (contract,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def ones(size: int, dtype: jnp.dtype) -> nnx.Param[Array]:
    return nnx.Param(jnp.ones((size,), dtype))


def zeros(shape: tuple[int, ...], dtype: jnp.dtype) -> nnx.Param[Array]:
    return nnx.Param(jnp.zeros(shape, dtype))


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over one axis, in float32 (https://arxiv.org/abs/1910.07467); `plus_one`: times 1 + scale."""

    def __init__(self, dim: int, eps: float, dtype: jnp.dtype, axis: int = -1, *, plus_one: bool = False):
        self.scale = ones(dim, dtype)
        self.eps, self.axis, self.plus_one = eps, axis, plus_one

    def __call__(self, x: Float[Array, "*n"]) -> Float[Array, "*n"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=self.axis, keepdims=True) + self.eps)
        shape = [1] * x.ndim
        shape[self.axis] = -1
        scale = self.scale[...].astype(jnp.float32).reshape(shape)
        return (y * (1 + scale if self.plus_one else scale)).astype(x.dtype)


class Linear(nnx.Module):
    """A product, with a bias where asked: `weight` [out, in] for columns, `kernel` [in, out] for rows. With weights in int8 there is a
    `channel_scale` [out]."""

    def __init__(self, in_dim: int, out_dim: int, dtype: jnp.dtype, *, bias: bool = False):
        if works_in_columns(dtype):
            self.weight = zeros((out_dim, in_dim), dtype)
        else:
            self.kernel = zeros((in_dim, out_dim), dtype)
        if bias:
            self.bias = zeros((out_dim,), dtype)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.wide(x).astype(x.dtype)

    def wide(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """The same, left in float32."""
        columns = works_in_columns(x.dtype)
        y = product(self.weight[...], x) if columns else product(x, self.kernel[...])
        if hasattr(self, "channel_scale"):
            y = y * along_channels(self.channel_scale[...], columns)
        return y + along_channels(self.bias[...], columns) if hasattr(self, "bias") else y


def along_channels(x: Float[Array, " o"], columns: bool) -> Float[Array, "..."]:
    """A number for each output channel, in float32, as it goes with columns or rows."""
    x = x.astype(jnp.float32)
    return x[:, None] if columns else x[None, :]


class Embedding(nnx.Module):
    """A table [v, m] that is both the token lookup and, where embeddings are tied, the output head.

    One layout serves both. In float32 the head, too, is faster with the table first: 7 ms instead of 10 for 8 rows of 576 x 49152.
    """

    def __init__(self, vocab_size: int, dim: int, dtype: jnp.dtype):
        self.table = zeros((vocab_size, dim), dtype)

    def __call__(self, tokens: Int[Array, " t"]) -> Float[Array, "..."]:
        """The stream that the layers work on, columns or rows."""
        rows = jnp.take(self.table[...], tokens, axis=0, mode="clip")
        return rows.T if works_in_columns(rows.dtype) else rows

    def logits(self, hidden: Float[Array, "t m"]) -> Float[Array, "t v"]:
        if works_in_columns(hidden.dtype):
            return lax.optimization_barrier(product(self.table[...], hidden, contract=1)).T
        return product(hidden, self.table[...], contract=1)


def stream_axis(dtype: jnp.dtype) -> int:
    """The axis of the stream that counts features."""
    return 0 if works_in_columns(dtype) else -1


def split_heads(x: Float[Array, "..."], head_dim: int) -> Float[Array, "t n d"]:
    """Features of the stream as heads, token by token."""
    if works_in_columns(x.dtype):
        return x.reshape(-1, head_dim, x.shape[1]).transpose(2, 0, 1)
    return x.reshape(x.shape[0], -1, head_dim)


def join_heads(x: Float[Array, "t n d"]) -> Float[Array, "..."]:
    """Heads back to features of the stream."""
    rows = x.reshape(x.shape[0], -1)
    return rows.T if works_in_columns(x.dtype) else rows


def as_rows(x: Float[Array, "..."]) -> Float[Array, "t m"]:
    """The stream as rows, whatever it was."""
    return x.T if works_in_columns(x.dtype) else x


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu, "gelu_tanh": partial(jax.nn.gelu, approximate=True)}


class GatedMLP(nnx.Module):
    """down(activation(gate x) * up x) (https://arxiv.org/abs/2002.05202).

    Gate and up are kept apart, as are q, k and v: fusing them gained nothing (30 layers, 8 rows: 53.6 ms apart, 53.8 fused), and apart they
    split over devices by plain rules.
    """

    def __init__(self, dim: int, ffn_dim: int, dtype: jnp.dtype, *, activation: str = "silu"):
        self.activation = activation
        self.gate = Linear(dim, ffn_dim, dtype)
        self.up = Linear(dim, ffn_dim, dtype)
        self.down = Linear(ffn_dim, dim, dtype)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.down((ACTIVATIONS[self.activation](self.gate.wide(x)) * self.up.wide(x)).astype(x.dtype))


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
    """Cosine and sine of every position's angles, float32, used by all layers."""
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
