"""What a cell of the pool is: one token's key or value in one kv head, as it is stored and as it is read. Knows neither pages nor owners.

In float32, bfloat16 and float16 a cell is its d numbers. In int8 it is d whole numbers and behind them the four bytes of the float32 that
they are multiplied with, so that a cell is whole wherever pages are copied, summed up, parked or split over devices:

    d = 4, a key (0.5, -1.27, 0, 0.02): largest 1.27, scale 0.01    50 -127 0 2 | 0a d7 23 3c
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkv.pool import PoolLayout

_LARGEST = 127  # -128 is left out, so that x and -x are stored alike
_TINY = float(jnp.finfo(jnp.float32).tiny)  # a scale is at least this: zeros are read as zeros, and nothing is divided by zero
_WIDEST = 3e38  # what is beyond is stored as this: infinity would spoil whoever owns the page next


def encode(x: Float[Array, "*n d"], layout: PoolLayout) -> Array:
    """New keys or values as the pool keeps them, [*n, layout.cell_len]. In float16 the nearest finite."""
    if layout.dtype == "int8":
        return _quantised(x.astype(jnp.float32))
    if layout.dtype == "float16":
        largest = float(jnp.finfo(jnp.float16).max)
        x = jnp.clip(x, -largest, largest)
    x = x.astype(layout.dtype)
    return x if layout.storage == layout.dtype else jax.lax.bitcast_convert_type(x, layout.storage)


def decode(cells: Array, layout: PoolLayout) -> Float[Array, "*n d"]:
    """Gathered cells as float32."""
    if layout.dtype == "int8":
        numbers, scale = cells[..., : layout.head_dim], cells[..., layout.head_dim :]
        return numbers.astype(jnp.float32) * jax.lax.bitcast_convert_type(scale, jnp.float32)[..., None]
    if layout.storage != layout.dtype:
        cells = jax.lax.bitcast_convert_type(cells, layout.dtype)
    return cells.astype(jnp.float32)


def _quantised(x: Float[Array, "*n d"]) -> Array:
    """The nearest whole numbers from -127 to 127, to be multiplied with a 127th of the largest."""
    top = jnp.minimum(jnp.abs(x).max(-1, keepdims=True), _WIDEST)
    scale = jnp.maximum(top / _LARGEST, _TINY)
    numbers = jnp.clip(jnp.round(x / scale), -_LARGEST, _LARGEST).astype(jnp.int8)
    return jnp.concatenate([numbers, jax.lax.bitcast_convert_type(scale[..., 0], jnp.int8)], axis=-1)
