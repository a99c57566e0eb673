"""The programs that move pages, gather and scatter, and the checksum that a chunk of pages carries. Knows no sequence."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, UInt

from jaxkv.pool import PoolArrays, PoolLayout
from jaxkv.programs import Recipe, pool_shapes, pool_shardings

_ADDED_UP = 10  # arrays that a checksum adds up before it reduces them: measured, see benchmarks/README.md


def gather_pages(pool: PoolArrays, ids: Int[Array, " p"]) -> tuple[PoolArrays, UInt[Array, ""]]:
    """Copy pages out of every layer. Padding ids name any page, the trash page by custom."""
    pages: PoolArrays = [(jnp.take(k, ids, axis=0, mode="clip"), jnp.take(v, ids, axis=0, mode="clip")) for k, v in pool]
    return pages, checksum(pages)


def scatter_pages(pool: PoolArrays, pages: PoolArrays, ids: Int[Array, " p"]) -> tuple[PoolArrays, UInt[Array, ""]]:
    """Put pages back into every layer, at other ids if need be. Padding ids lie beyond the pool and are dropped."""
    put: PoolArrays = [(k.at[ids].set(x, mode="drop"), v.at[ids].set(y, mode="drop")) for (k, v), (x, y) in zip(pool, pages, strict=True)]
    return put, checksum(pages)


def gather_into(pool: PoolArrays, ids: Int[Array, " p"], into: PoolArrays) -> tuple[PoolArrays, UInt[Array, ""]]:
    """The same, into memory that is given up for it."""
    del into
    return gather_pages(pool, ids)


def scatter_from_host(pool: PoolArrays, pages: PoolArrays, ids: Int[Array, " p"]) -> tuple[PoolArrays, UInt[Array, ""]]:
    """The same, straight out of host memory."""
    return scatter_pages(pool, jax.device_put(pages, jax.memory.Space.Device), ids)


def checksum(pages: PoolArrays) -> UInt[Array, ""]:
    """The sum of all words modulo 2**32, word j of array i weighed with (2i + 1) * (2j + 1). Weights are odd, so one flipped bit always
    changes it; sums modulo 2**32 do not depend on their order. It also is arithmetic enough for XLA:CPU to run the program in the
    background and not in the caller. Arrays are added up element by element, a few at a time, and then reduced: XLA:CPU takes three times
    as long to reduce each by itself. Only arrays of one shape can be: those of pages all are, those of states differ."""
    alike: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
    for i, array in enumerate(x for layer in pages for x in layer):
        alike.setdefault(array.shape, []).append((i, _words(array)))
    total = jnp.uint32(0)
    for arrays in alike.values():
        for first in range(0, len(arrays), _ADDED_UP):
            group = arrays[first : first + _ADDED_UP]
            words = sum((x * jnp.uint32(2 * i + 1) for i, x in group), jnp.zeros_like(arrays[first][1])).reshape(-1)
            total += jnp.sum(words * (2 * lax.iota(jnp.uint32, words.shape[0]) + jnp.uint32(1)), dtype=jnp.uint32)
    return total


def _words(array: Array) -> UInt[Array, "..."]:
    words = array if array.dtype == jnp.uint16 else lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
    return words.astype(jnp.uint32)


def transfer_recipes(
    layout: PoolLayout, transfer_pages: int, mesh: Mesh, gather_sharding: NamedSharding | None, *, direct: bool = False
) -> dict[str, Recipe]:
    """The programs that move pages: gather and scatter. `gather_sharding` is where gathered pages go when not to device memory; `direct`:
    into memory that lay there already, and back from there."""
    everywhere = NamedSharding(mesh, P())
    kept = pool_shardings(layout, mesh)
    gathered = kept if gather_sharding is None else [(gather_sharding, gather_sharding)] * layout.num_layers
    pool, pages = pool_shapes(layout, layout.num_pages + 1, mesh), pool_shapes(layout, transfer_pages, mesh)
    ids = np.zeros(transfer_pages, np.int32)
    if direct:
        pages = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), pages, gathered)
        return {
            "gather": Recipe(gather_into, (pool, ids, pages), 2, (gathered, everywhere)),
            "scatter": Recipe(scatter_from_host, (pool, pages, ids), 0, (kept, everywhere)),
        }
    return {
        "gather": Recipe(gather_pages, (pool, ids), None, (gathered, everywhere)),
        "scatter": Recipe(scatter_pages, (pool, pages, ids), 0, (kept, everywhere)),
    }


def mode_recipes(mode: str, layout: PoolLayout, transfer_pages: int, mesh: Mesh, host: NamedSharding | None) -> dict[str, Recipe]:
    """The recipes for one way of copying: direct, staged or hold. `host` is where images go; None where there is no such place. Nothing
    where no layer has pages; two more where some have pages of their own."""
    found: dict[str, Recipe] = {}
    for name, group in (("", layout.together), ("_near", layout.apart)):
        if group.num_layers:
            made = transfer_recipes(group, transfer_pages, mesh, None if mode == "staged" else host, direct=mode == "direct")
            found |= {kind + name: recipe for kind, recipe in made.items()}
    return found
