"""Choices that begin together, on the device: copies of the page that the last token of their prompt is in. Knows pages, not owners."""

from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxkv.pool import PoolArrays, PoolHolder, PoolLayout
from jaxkv.programs import Program, Programs, Recipe, pool_shapes, pool_shardings
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
    ids, found = np.zeros(COPY_PAGES, np.int32), dict[str, Recipe]()
    for name, group in (("copy", layout.together), ("copy_near", layout.apart)):
        if group.num_layers:
            pool = pool_shapes(group, group.num_pages + 1, mesh)
            found[name] = Recipe(copy_pages, (pool, ids, ids), 0, pool_shardings(group, mesh))
    return found


def copy_all_forks(programs: Programs, pool: PoolHolder, layout: PoolLayout, forks: Sequence[Fork]) -> None:
    """Carry out the copies of a step's forks in every group of pages."""
    near = [fork._replace(source=fork.near[0], page=fork.near[1]) for fork in forks if fork.near is not None]
    for is_near, program, mine, group in copies_of(programs, layout, forks, near):
        pool.replace_group(copy_forks(program.run, pool.group(is_near=is_near), mine, group.num_pages), is_near=is_near)


def copies_of(
    programs: Programs, layout: PoolLayout, forks: Sequence[Fork], near: Sequence[Fork]
) -> Iterator[tuple[bool, Program, Sequence[Fork], PoolLayout]]:
    """Each group that has any, its program and its forks."""
    for is_near, program, mine, group in (
        (False, programs.copy, forks, layout.together),
        (True, programs.copy_near, near, layout.apart),
    ):
        if program is not None:
            yield is_near, program, mine, group


def copy_forks(run: Callable[..., PoolArrays], pool: PoolArrays, forks: Sequence[Fork], num_pages: int) -> PoolArrays:
    """Carry out the copies of a step's forks, a fixed number at a time."""
    for start in range(0, len(forks), COPY_PAGES):
        sources, targets = (np.full(COPY_PAGES, num_pages + 1, np.int32) for _ in range(2))
        for index, fork in enumerate(forks[start : start + COPY_PAGES]):
            sources[index], targets[index] = fork.source, fork.page
        pool = run(pool, sources, targets)
    return pool


def warm_up_copies(programs: Programs, pool: PoolHolder, layout: PoolLayout) -> None:
    """Run them once, from and to nowhere."""
    for is_near, program, _, group in copies_of(programs, layout, (), ()):
        nowhere = np.full(COPY_PAGES, group.num_pages + 1, np.int32)
        pool.replace_group(program.run(pool.group(is_near=is_near), nowhere, nowhere), is_near=is_near)
