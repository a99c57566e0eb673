"""The pool: what a page is made of, how big it is, where its arrays live. Knows nothing of sequences or of who owns a page.

One (K, V) pair of arrays per layer, each `[p, k, z, d]`: a page of one layer is one contiguous run of memory, so parking it is a copy of
runs, and the kv heads are an axis of their own, so sharding them leaves every page whole. Page 0 is the trash page: idle rows and padding
write there, and nobody reads it. Lists of per-layer arrays are updated in place by donated programs; one stacked array is not
(docs/ARCHITECTURE.md has the figures).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

TRASH_PAGE = 0

LayerPages = tuple[Array, Array]  # K and V of one layer, [p, k, z, d]
PoolArrays = list[LayerPages]


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The shape of the pool. `num_pages` counts usable pages; the arrays hold one more, the trash page."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # what a cell means: float32, bfloat16 or float16
    storage: str  # how its bits are kept: uint16 for bfloat16 on CPU, else the same

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """[k, z, d] of one page in one layer."""
        return (self.num_kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, K and V together."""
        k, z, d = self.page_shape
        return 2 * self.num_layers * k * z * d * jnp.dtype(self.storage).itemsize

    @property
    def num_tokens(self) -> int:
        """Usable tokens: the figure shown to people everywhere."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Device bytes of the whole pool, trash page included."""
        return (self.num_pages + 1) * self.page_bytes


def storage_dtype(backend: str, dtype: str) -> str:
    """How a cell's bits are kept. XLA:CPU turns a bfloat16 scatter into float32 over the whole pool and back, so there it is uint16."""
    return "uint16" if (backend, dtype) == ("cpu", "bfloat16") else dtype


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Pages are split over kv heads only: a page number means the same on every device."""
    return NamedSharding(mesh, P(None, "tensor", None, None))


def allocate(layout: PoolLayout, mesh: Mesh) -> PoolArrays:
    """A pool of zeros. It must be finite from the start: a masked cell still meets a zero weight, and NaN times zero is NaN."""
    shape, sharding = (layout.num_pages + 1, *layout.page_shape), pool_sharding(mesh)

    def zeros() -> Array:
        return jnp.zeros(shape, layout.storage, device=sharding)

    return [(zeros(), zeros()) for _ in range(layout.num_layers)]


class PoolHolder:
    """The one place that holds the pool's arrays, which every program that writes them replaces."""

    def __init__(self, arrays: PoolArrays, gather: Callable[..., Any], scatter: Callable[..., Any]) -> None:
        self.arrays = arrays
        self._gather = gather
        self._scatter = scatter

    @property
    def sharding(self) -> Any:
        """Where the pool's pages live."""
        return self.arrays[0][0].sharding

    def gather(self, ids: np.ndarray, into: PoolArrays | None = None) -> tuple[PoolArrays, Array]:
        """Copies of some pages, and their checksum; `into` is memory that is given up for them."""
        return self._gather(self.arrays, ids) if into is None else self._gather(self.arrays, ids, into)

    def scatter(self, pages: PoolArrays, ids: np.ndarray) -> Array:
        """Write pages into the pool; returns the checksum of what was written."""
        self.arrays, checksum = self._scatter(self.arrays, pages, ids)
        return checksum


def encode(x: Array, layout: PoolLayout) -> Array:
    """New keys or values as the pool keeps them. In float16 the nearest finite: infinity would spoil whoever owns the page next."""
    if layout.dtype == "float16":
        largest = float(jnp.finfo(jnp.float16).max)
        x = jnp.clip(x, -largest, largest)
    x = x.astype(layout.dtype)
    return x if layout.storage == layout.dtype else jax.lax.bitcast_convert_type(x, layout.storage)


def decode(x: Array, layout: PoolLayout) -> Array:
    """Gathered cells as float32."""
    if layout.storage != layout.dtype:
        x = jax.lax.bitcast_convert_type(x, layout.dtype)
    return x.astype(jnp.float32)
