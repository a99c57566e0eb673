"""The pool: what a page and a state are made of, how big they are, where their arrays live. Knows nothing of sequences or who owns what.

One (K, V) pair of arrays per layer, each `[p, k, z, d]`, cells as cells.py makes them: a page of one layer is one contiguous run of memory,
so parking it is a copy of runs, and the kv heads are an axis of their own, so sharding them leaves every page whole. Page 0 is the trash
page: idle rows and padding write there, and nobody reads it. Lists of per-layer arrays are updated in place by donated programs; one
stacked array is not (docs/ARCHITECTURE.md has the figures).

Behind the layers with pages come those whose sequences have a state of fixed size instead: arrays `[rows, ...]`, one slot for each row of
the decode batch, so that a decode step takes them as they lie.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

TRASH_PAGE = 0
SCALE_BYTES = 4  # of the float32 behind the numbers of a cell in int8

LayerPages = tuple[Array, Array]  # K and V of one layer, [p, k, z, d]
LayerStates = tuple[Array, ...]  # of one layer, [rows, ...] each
PoolArrays = list[tuple[Array, ...]]  # of each layer what it has


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of one sequence's state in one layer. `split` is the axis that is split over devices; None: each has all of it."""

    shape: tuple[int, ...]
    dtype: str
    storage: str  # as with pages
    split: int | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.storage).itemsize

    def sharding(self, mesh: Mesh, *, batched: bool = True) -> NamedSharding:
        """Where it lives, behind an axis of rows unless it is one sequence's alone."""
        axes = [*([None] if batched else []), *("tensor" if axis == self.split else None for axis in range(len(self.shape)))]
        return NamedSharding(mesh, P(*axes))


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The shape of the pool. `num_pages` counts usable pages; the arrays hold one more, the trash page."""

    num_layers: int  # that have pages
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # what a cell means: float32, bfloat16, float16 or int8
    storage: str  # how its bits are kept: uint16 for bfloat16 on CPU, else the same
    states: tuple[tuple[StateArray, ...], ...] = ()  # of each layer that has a state
    rows: int = 0  # slots for them
    snapshots: int = 0  # and for those that are kept
    window: int | None = None  # tokens that the layer sees that sees most; None: all
    near: tuple[int, ...] = ()  # layers with a window whose pages are a group of their own, where others see all
    near_pages: int = 0  # usable ones of that group
    near_window: int | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in all layers, however long it is."""
        return sum(array.num_bytes for layer in self.states for array in layer)

    @property
    def cell_len(self) -> int:
        """Stored numbers of one cell."""
        return cell_len(self.dtype, self.head_dim)

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """[k, z, d] of one page in one layer, d as stored."""
        return (self.num_kv_heads, self.page_size, self.cell_len)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, K and V together; where some have pages of their own, in the others."""
        k, z, d = self.page_shape
        return 2 * (self.num_layers - len(self.near)) * k * z * d * jnp.dtype(self.storage).itemsize

    @property
    def apart(self) -> "PoolLayout":
        """The layers whose pages are a group of their own, as a pool by themselves."""
        return replace(self, num_layers=len(self.near), num_pages=self.near_pages, states=(), rows=0, near=(), near_pages=0)

    @property
    def together(self) -> "PoolLayout":
        """The other layers with pages, as a pool by themselves."""
        return replace(self, num_layers=self.num_layers - len(self.near), states=(), rows=0, near=(), near_pages=0) if self.near else self

    @property
    def num_tokens(self) -> int:
        """Usable tokens: the figure shown to people everywhere."""
        return self.num_pages * self.page_size

    @property
    def pages_bytes(self) -> int:
        """Device bytes of all pages, the trash pages included."""
        return (self.num_pages + 1) * self.page_bytes + (self.apart.pages_bytes if self.near else 0)

    @property
    def states_bytes(self) -> int:
        """Device bytes of all slots for states, kept ones included."""
        return (self.rows + self.snapshots) * self.state_bytes

    @property
    def num_bytes(self) -> int:
        """Device bytes of the whole pool."""
        return self.pages_bytes + self.states_bytes


def cell_len(dtype: str, head_dim: int) -> int:
    """Numbers that a cell takes: in int8 the bytes of its scale too."""
    return head_dim + SCALE_BYTES if dtype == "int8" else head_dim


def storage_dtype(backend: str, dtype: str) -> str:
    """How a cell's bits are kept. XLA:CPU turns a bfloat16 scatter into float32 over the whole pool and back, so there it is uint16."""
    return "uint16" if (backend, dtype) == ("cpu", "bfloat16") else dtype


def pool_sharding(mesh: Mesh) -> NamedSharding:
    """Pages are split over kv heads only: a page number means the same on every device."""
    return NamedSharding(mesh, P(None, "tensor", None, None))


def allocate(layout: PoolLayout, mesh: Mesh) -> PoolArrays:
    """A pool of zeros. It must be finite from the start: a masked cell still meets a zero weight, and NaN times zero is NaN."""
    sharding = pool_sharding(mesh)

    def zeros(layer: int) -> Array:
        num_pages = layout.near_pages if layer in layout.near else layout.num_pages
        return jnp.zeros((num_pages + 1, *layout.page_shape), layout.storage, device=sharding)

    pages: PoolArrays = [(zeros(layer), zeros(layer)) for layer in range(layout.num_layers)]
    return [*pages, *allocate_states(layout, mesh, layout.rows)]


def allocate_states(layout: PoolLayout, mesh: Mesh, num_slots: int) -> PoolArrays:
    """So many slots for states, of zeros."""

    def zeros(array: StateArray) -> Array:
        return jnp.zeros((num_slots, *array.shape), array.storage, device=array.sharding(mesh))

    return [tuple(map(zeros, layer)) for layer in layout.states]


def state_shardings(layout: PoolLayout, mesh: Mesh, *, batched: bool = True) -> list[Any]:
    """Where the states of all rows live, or one sequence's alone, in every layer that has one."""
    return [tuple(array.sharding(mesh, batched=batched) for array in layer) for layer in layout.states]


def state_shapes(layout: PoolLayout, places: list[Any], *, batched: bool = True, num_slots: int | None = None) -> list[Any]:
    """The same as shapes, in these places; `num_slots` where they are not those of the rows."""
    slots = [layout.rows if num_slots is None else num_slots] if batched else []

    def shape(array: StateArray, where: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*slots, *array.shape), array.storage, sharding=where)

    return [tuple(map(shape, *layer)) for layer in zip(layout.states, places, strict=True)]


class PoolHolder:
    """The one place that holds the pool's arrays, which every program that writes them replaces.

    `gather` and `scatter` are the programs that move pages out and in, `take` and `put` those that move a state.
    """

    def __init__(
        self,
        arrays: PoolArrays,
        gather: Callable[..., Any] | None = None,
        scatter: Callable[..., Any] | None = None,
        take: Callable[..., Any] | None = None,
        put: Callable[..., Any] | None = None,
        num_states: int = 0,
        snapshots: PoolArrays | None = None,
        gather_near: Callable[..., Any] | None = None,
        scatter_near: Callable[..., Any] | None = None,
        near: tuple[int, ...] = (),
    ) -> None:
        self.arrays = arrays
        self._near = near  # layers whose pages are a group of their own
        self._gather_near = gather_near
        self._scatter_near = scatter_near
        self.snapshots: PoolArrays = snapshots or []  # states that are kept, in slots of their own
        self._gather = gather
        self._scatter = scatter
        self._take = take
        self._put = put
        self._num_states = num_states  # of the layers, the last ones

    @property
    def mesh(self) -> Any:
        """The devices that it lies on."""
        where: Any = self.arrays[0][0].sharding
        return where.mesh

    @property
    def pages(self) -> PoolArrays:
        """The layers that have pages."""
        return self.arrays[: len(self.arrays) - self._num_states]

    @property
    def states(self) -> PoolArrays:
        """The layers that have states."""
        return self.arrays[len(self.arrays) - self._num_states :]

    def group(self, *, is_near: bool) -> PoolArrays:
        """Of the layers that have pages those whose pages are a group of their own, or the others."""
        return [layer for place, layer in enumerate(self.pages) if (place in self._near) == is_near]

    def replace_group(self, written: PoolArrays, *, is_near: bool) -> None:
        """A program has written to them, and to the states behind them if it was given these."""
        new, states = iter(written), self.states
        pages = [next(new) if (place in self._near) == is_near else layer for place, layer in enumerate(self.pages)]
        self.arrays = [*pages, *(list(new) or states)]

    def gather(self, ids: np.ndarray, into: PoolArrays | None = None, *, is_near: bool = False) -> tuple[PoolArrays, Array]:
        """Copies of some pages, and their checksum; `into` is memory that is given up for them."""
        gather, pages = self._gather_near if is_near else self._gather, self.group(is_near=is_near)
        assert gather is not None, "no layer has pages"
        return gather(pages, ids) if into is None else gather(pages, ids, into)

    def scatter(self, pages: PoolArrays, ids: np.ndarray, *, is_near: bool = False) -> Array:
        """Write pages into the pool; returns the checksum of what was written."""
        scatter = self._scatter_near if is_near else self._scatter
        assert scatter is not None, "no layer has pages"
        written, checksum = scatter(self.group(is_near=is_near), pages, ids)
        self.replace_group(written, is_near=is_near)
        return checksum

    def take(self, row: int, into: PoolArrays | None = None) -> tuple[PoolArrays, Array]:
        """A copy of the state in a row's slot, and its checksum; `into` as above."""
        assert self._take is not None, "no layer has a state"
        slot = np.int32(row)
        return self._take(self.states, slot) if into is None else self._take(self.states, slot, into)

    def put(self, state: PoolArrays, row: int) -> Array:
        """Write a state into a row's slot; returns the checksum of what was written."""
        assert self._put is not None, "no layer has a state"
        pages = self.pages
        written, checksum = self._put(self.states, state, np.int32(row))
        self.arrays = [*pages, *written]
        return checksum
