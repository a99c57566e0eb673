"""What a chunk carries, pages out of the pool or one sequence's state out of a slot: how it is taken, put back and given room.

Knows no copy in flight and no kind of memory: where things lie in host memory comes as shardings.
"""

from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from jaxkv.pool import TRASH_PAGE, PoolArrays, PoolHolder, PoolLayout
from jaxkv.scheduler import Chunk


class Cargo(Protocol):
    """One kind. `device` and `host` say where its arrays live; `host` is None where images are NumPy arrays. `left` is host memory that
    nobody needs."""

    num_bytes: int
    weight: int
    device: Any
    host: Any
    left: list[PoolArrays]

    def take(self, chunk: Chunk, into: PoolArrays | None) -> tuple[PoolArrays, Array]:
        """A copy, and its checksum; `into` is memory that is given up for it."""

    def put(self, arrays: PoolArrays, chunk: Chunk) -> Array:
        """Write a copy where the chunk says; the checksum of what was written."""

    def blank(self) -> PoolArrays:
        """New host memory for one."""


class PageCargo:
    """Pages of every layer that has any, padded to a fixed number."""

    def __init__(
        self,
        pool: PoolHolder,
        layout: PoolLayout,
        chunk_pages: int,
        host: NamedSharding | None,
        device: NamedSharding,
        *,
        is_near: bool = False,
    ) -> None:
        group = layout.apart if is_near else layout.together
        self.num_bytes, self.weight = chunk_pages * group.page_bytes, near_weight(layout) if is_near else 1
        self.device, self.host = device, host
        self.left: list[PoolArrays] = []
        self._pool, self._layout, self._chunk_pages, self._is_near = pool, group, chunk_pages, is_near

    def take(self, chunk: Chunk, into: PoolArrays | None) -> tuple[PoolArrays, Array]:
        return self._pool.gather(self._ids(chunk, TRASH_PAGE), into, is_near=self._is_near)

    def put(self, arrays: PoolArrays, chunk: Chunk) -> Array:
        return self._pool.scatter(arrays, self._ids(chunk, self._layout.num_pages + 1), is_near=self._is_near)

    def blank(self) -> PoolArrays:
        shape = (self._chunk_pages, *self._layout.page_shape)

        def new() -> Array:
            return jax.device_put(np.zeros(shape, self._layout.storage), self.host)

        return [(new(), new()) for _ in range(self._layout.num_layers)]

    def _ids(self, chunk: Chunk, padding: int) -> np.ndarray:
        ids = np.full(self._chunk_pages, padding, np.int32)
        ids[: len(chunk.pages)] = chunk.pages
        return ids


class StateCargo:
    """One sequence's state in every layer that has one. `weight`: how many chunks of pages it counts as where staging is shared out."""

    def __init__(self, pool: PoolHolder, layout: PoolLayout, chunk_pages: int, host: Any, device: Any) -> None:
        self.num_bytes, self.weight = layout.state_bytes, state_weight(layout, chunk_pages)
        self.device, self.host = device, host
        self.left: list[PoolArrays] = []
        self._pool, self._layout = pool, layout

    def take(self, chunk: Chunk, into: PoolArrays | None) -> tuple[PoolArrays, Array]:
        assert chunk.row is not None
        return self._pool.take(chunk.row, into)

    def put(self, arrays: PoolArrays, chunk: Chunk) -> Array:
        assert chunk.row is not None
        return self._pool.put(arrays, chunk.row)

    def blank(self) -> PoolArrays:
        return [
            tuple(jax.device_put(np.zeros(array.shape, array.storage), where) for array, where in zip(layer, places, strict=True))
            for layer, places in zip(self._layout.states, self.host, strict=True)
        ]


def state_weight(layout: PoolLayout, chunk_pages: int) -> int:
    """As how many chunks of pages a state counts, 1 where there are no pages. Example: 51.5 MB beside chunks of 8.4 MB: 7."""
    chunk_bytes = layout.page_bytes * chunk_pages
    return max(1, -(-layout.state_bytes // chunk_bytes)) if chunk_bytes else 1


def near_weight(layout: PoolLayout) -> int:
    """The same of a chunk of pages of the layers that have their own. Example: 15 such layers beside 3 others: 5."""
    return max(1, -(-layout.apart.page_bytes // layout.page_bytes)) if layout.near else 1
