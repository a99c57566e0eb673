"""Choices that begin together, on the device: copies of the page that the last token of their prompt is in. Knows pages, not owners."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxkv.pool import PoolArrays, PoolLayout
from jaxkv.programs import Recipe, pool_shapes, pool_shardings
from jaxkv.scheduler import Fork

COPY_PAGES = 4  # pages copied by one run of the program


def copy_pages(pool: PoolArrays, sources: Int[Array, " p"], targets: Int[Array, " p"]) -> PoolArrays:
    """Pages of every layer copied into others; padding ids lie beyond the pool."""

    def copied(pages: Array) -> Array:
        return pages.at[targets].set(jnp.take(pages, sources, axis=0, mode="clip"), mode="drop")

    return [(copied(keys), copied(values)) for keys, values in pool]


def copy_recipes(layout: PoolLayout, mesh: Mesh) -> dict[str, Recipe]:
    """The program that copies pages within the pool; none where there are states, which no choice takes over from another."""
    if layout.states:
        return {}
    ids, pool = np.zeros(COPY_PAGES, np.int32), pool_shapes(layout, layout.num_pages + 1, mesh)
    return {"copy": Recipe(copy_pages, (pool, ids, ids), 0, pool_shardings(layout, mesh))}


def copy_forks(run: Callable[..., PoolArrays], pool: PoolArrays, forks: Sequence[Fork], num_pages: int) -> PoolArrays:
    """Carry out the copies of a step's forks, a fixed number at a time."""
    for start in range(0, len(forks), COPY_PAGES):
        sources, targets = (np.full(COPY_PAGES, num_pages + 1, np.int32) for _ in range(2))
        for index, fork in enumerate(forks[start : start + COPY_PAGES]):
            sources[index], targets[index] = fork.source, fork.page
        pool = run(pool, sources, targets)
    return pool
