"""States that are kept, on the device: copied out of a row's slot behind a prompt's chunk, and into another row that begins there.

They lie in slots of their own, of which the programs that compute know nothing. Knows no key and no sequence.
"""

import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jaxkv.pool import PoolArrays, PoolHolder, PoolLayout, allocate_states, state_shapes, state_shardings
from jaxkv.programs import Programs, Recipe
from jaxkv.scheduler import Plan


def copy_state(targets: PoolArrays, sources: PoolArrays, target: Int[Array, ""], source: Int[Array, ""]) -> PoolArrays:
    """What lies in slot `source` of `sources`, in every layer, into slot `target` of `targets`."""

    def copied(into: Array, out_of: Array) -> Array:
        return lax.dynamic_update_index_in_dim(into, lax.dynamic_index_in_dim(out_of, source, keepdims=False), target, 0)

    return [tuple(map(copied, *layers)) for layers in zip(targets, sources, strict=True)]


def snapshot_recipes(layout: PoolLayout, mesh: Mesh) -> dict[str, Recipe]:
    """The programs that keep a state and fetch it; none where nothing is to be kept."""
    if not (layout.states and layout.snapshots):
        return {}
    places, slot = state_shardings(layout, mesh), np.int32(0)
    rows, kept = state_shapes(layout, places), state_shapes(layout, places, num_slots=layout.snapshots)
    return {
        "keep": Recipe(copy_state, (kept, rows, slot, slot), 0, places),
        "fetch": Recipe(copy_state, (rows, kept, slot, slot), 0, places),
    }


def allocate_snapshots(layout: PoolLayout, mesh: Mesh) -> PoolArrays:
    """The slots; nothing where there are none."""
    return allocate_states(layout, mesh, layout.snapshots) if layout.snapshots else []


def fetch_states(programs: Programs, pool: PoolHolder, plan: Plan) -> None:
    """Before the prompt's chunk: rows that begin with a state that was kept."""
    for fetch in plan.fetches:
        fetch_state(programs, pool, fetch.row, fetch.slot)


def fetch_state(programs: Programs, pool: PoolHolder, row: int, slot: int) -> None:
    """One of them."""
    assert programs.fetch is not None, "no state is kept"
    pages = pool.pages
    pool.arrays = [*pages, *programs.fetch.run(pool.states, pool.snapshots, np.int32(row), np.int32(slot))]


def keep_state(programs: Programs, pool: PoolHolder, row: int, slot: int | None) -> None:
    """Behind the prompt's chunk: its state, if it is to be kept."""
    if slot is not None:
        assert programs.keep is not None, "no state is kept"
        pool.snapshots = programs.keep.run(pool.snapshots, pool.states, np.int32(slot), np.int32(row))


def warm_up_snapshots(programs: Programs, pool: PoolHolder) -> None:
    """Run both once."""
    if programs.keep is not None:
        keep_state(programs, pool, 0, 0)
        fetch_state(programs, pool, 0, 0)
