"""The programs that move a sequence's state: out of its slot with a checksum, and back into another. Knows no sequence."""

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, UInt

from jaxkv.page_programs import checksum
from jaxkv.pool import PoolArrays, PoolLayout, state_shapes, state_shardings
from jaxkv.programs import Recipe


def take_state(states: PoolArrays, row: Int[Array, ""]) -> tuple[PoolArrays, UInt[Array, ""]]:
    """Copy what is in a row's slot in every layer."""
    state = [tuple(lax.dynamic_index_in_dim(slots, row, keepdims=False) for slots in layer) for layer in states]
    return state, checksum(state)


def take_into(states: PoolArrays, row: Int[Array, ""], into: PoolArrays) -> tuple[PoolArrays, UInt[Array, ""]]:
    """The same, into memory that is given up for it."""
    del into
    return take_state(states, row)


def put_state(states: PoolArrays, state: PoolArrays, row: Int[Array, ""]) -> tuple[PoolArrays, UInt[Array, ""]]:
    """Put a state into a row's slot in every layer."""
    put = [
        tuple(lax.dynamic_update_index_in_dim(slots, x, row, 0) for slots, x in zip(layer, new, strict=True))
        for layer, new in zip(states, state, strict=True)
    ]
    return put, checksum(state)


def put_from_host(states: PoolArrays, state: PoolArrays, row: Int[Array, ""]) -> tuple[PoolArrays, UInt[Array, ""]]:
    """The same, straight out of host memory."""
    return put_state(states, jax.device_put(state, jax.memory.Space.Device), row)


def state_recipes(mode: str, layout: PoolLayout, mesh: Mesh, host: list[Any] | None) -> dict[str, Recipe]:
    """The two programs for one way of copying, or none where no layer has a state. `host` is where images of states go, array by array;
    None where there is no such place."""
    if not layout.states:
        return {}
    everywhere, kept, alone = NamedSharding(mesh, P()), state_shardings(layout, mesh), state_shardings(layout, mesh, batched=False)
    taken = alone if mode == "staged" or host is None else host
    states, state = state_shapes(layout, kept), state_shapes(layout, alone, batched=False)
    row: Any = np.int32(0)
    if mode == "direct":
        state = state_shapes(layout, taken, batched=False)
        return {
            "take": Recipe(take_into, (states, row, state), 2, (taken, everywhere)),
            "put": Recipe(put_from_host, (states, state, row), 0, (kept, everywhere)),
        }
    return {
        "take": Recipe(take_state, (states, row), None, (taken, everywhere)),
        "put": Recipe(put_state, (states, state, row), 0, (kept, everywhere)),
    }
