"""Choices that begin together, on the device: copies of the page that the last token of their prompt is in, and of the state of their row.

Knows pages and rows, not owners.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxkv.pool import PoolArrays, PoolHolder, PoolLayout, state_shapes, state_shardings
from jaxkv.programs import Program, Programs, Recipe, pool_shapes, pool_shardings
from jaxkv.scheduler import Fork, PrefillChunk

COPY_PAGES = 4  # pages, and states, copied by one run of the program


class Copier(NamedTuple):
    """The program that copies pages of one group, and the layout of that group."""

    is_near: bool
    run: Callable[..., PoolArrays]
    layout: PoolLayout


def copy_step(num_layers: int) -> Callable[[PoolArrays, Array], PoolArrays]:
    """For a pool in which so many layers have pages, and those behind them states."""

    def copy(pool: PoolArrays, moves: Int[Array, "4 p"]) -> PoolArrays:
        """Pages copied into others in every layer that has some, and states from row to row; padding ids lie beyond."""
        sources, pages, giver, rows = moves

        def copied(array: Array, sources: Array, targets: Array) -> Array:
            return array.at[targets].set(jnp.take(array, sources, axis=0, mode="clip"), mode="drop")

        paged = [tuple(copied(array, sources, pages) for array in layer) for layer in pool[:num_layers]]
        return [*paged, *(tuple(copied(array, giver, rows) for array in layer) for layer in pool[num_layers:])]

    return copy


def nowhere(layout: PoolLayout) -> np.ndarray:
    """The moves of a run that copies nothing."""
    return np.repeat(np.array([[layout.num_pages + 1]] * 2 + [[layout.rows]] * 2, np.int32), COPY_PAGES, axis=1)


def copy_recipes(layout: PoolLayout, mesh: Mesh) -> dict[str, Recipe]:
    """The programs that copy within the pool: pages of one group each, states beside those of the first."""
    found = dict[str, Recipe]()
    for name, group in (("copy", layout.together), ("copy_near", layout.apart)):
        if group.num_layers or group.states:
            states = state_shardings(group, mesh)
            pool = pool_shapes(group, group.num_pages + 1, mesh) + state_shapes(group, states)
            found[name] = Recipe(copy_step(group.num_layers), (pool, nowhere(group)), 0, pool_shardings(group, mesh) + states)
    return found


def copiers(programs: Programs, layout: PoolLayout) -> Iterator[Copier]:
    """Those that there are."""
    groups: tuple[tuple[bool, Program | None, PoolLayout], ...] = (
        (False, programs.copy, layout.together),
        (True, programs.copy_near, layout.apart),
    )
    return (Copier(is_near, program.run, group) for is_near, program, group in groups if program is not None)


def copy_all_forks(programs: Programs, pool: PoolHolder, layout: PoolLayout, chunk: PrefillChunk) -> None:
    """Carry out the copies of those that begin with a chunk, in every group of pages."""
    for copier in copiers(programs, layout):
        copy_forks(copier, pool, chunk)


def copy_forks(copier: Copier, pool: PoolHolder, chunk: PrefillChunk) -> None:
    """In one group, a fixed number at a time."""
    for start in range(0, len(chunk.forks), COPY_PAGES):
        copy(copier, pool, moves_of(copier, chunk.row, chunk.forks[start : start + COPY_PAGES]))


def moves_of(copier: Copier, row: int, forks: tuple[Fork, ...]) -> np.ndarray:
    """From the pages, and from the row, of the one whose chunk it is."""
    moves = nowhere(copier.layout)
    for index, fork in enumerate(forks):
        source, page = (fork.near or (None, None)) if copier.is_near else (fork.source, fork.page)
        if page is not None:
            moves[:2, index] = source, page
        moves[2:, index] = row, fork.row
    return moves


def copy(copier: Copier, pool: PoolHolder, moves: np.ndarray) -> None:
    """One run."""
    pool.replace_group(copier.run([*pool.group(is_near=copier.is_near), *pool.states], moves), is_near=copier.is_near)


def warm_up_copies(programs: Programs, pool: PoolHolder, layout: PoolLayout) -> None:
    """Run them once, from and to nowhere."""
    for copier in copiers(programs, layout):
        copy(copier, pool, nowhere(copier.layout))
