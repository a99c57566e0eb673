"""States on the device: the `advance` argument of a model, which takes a layer's state out of its slot and puts the next one back.

A recurrent layer has one state for each sequence, in the slot of its row. A decode step advances those of the rows that take part and
leaves all others as they are, bit for bit. A prompt's chunk advances one, from zeros where the prompt begins, so that nothing of an earlier
sequence in that slot is ever seen. Chunks start at multiples of their width, always, so that a prompt computed again comes out the same.

Bits are kept as those of pages are, bfloat16 as uint16 on CPU: a state is never arithmetic but in the layer that it belongs to.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxkv.attention import PagedCache
from jaxkv.config import Config
from jaxkv.models import ModelConfig, state_shapes
from jaxkv.pool import LayerStates, PoolLayout, StateArray, storage_dtype

Advance = Callable[..., tuple[Any, PagedCache]]


def state_arrays(model: ModelConfig, dtype: str, backend: str) -> tuple[tuple[StateArray, ...], ...]:
    """What a model keeps for each sequence, layer by layer; nothing where no layer has a state."""
    return tuple(
        tuple(StateArray(tuple(array.shape), array.dtype, storage_dtype(backend, array.dtype), array.split) for array in layer)
        for layer in state_shapes(model, dtype)
    )


def about_states(config: Config, layout: PoolLayout) -> list[str]:
    """What is to be said once about a model with states."""
    if not layout.states:
        return []
    sizes = f"each sequence has a state of {layout.state_bytes} bytes, which is part of its image"
    cached = "; prompts are not found again (pool.prefix_cache has no effect without pool.state_snapshots), but computed to the same bytes"
    if layout.num_layers:
        return [sizes + cached * (config.pool.prefix_cache and not layout.snapshots)]
    return [f"{sizes}, and no pages: pool.tokens limits nothing, only rows are short; parks are those of priorities, operators and debug"]


def advance_rows(layout: PoolLayout, active: Bool[Array, " b"]) -> Advance:
    """For a decode step: one token of every row that is active."""

    def advance(layer: int, mixer: Any, inputs: Any, cache: PagedCache) -> tuple[Any, PagedCache]:
        arrays, kept = layout.states[layer], cache.states[layer]
        with jax.named_scope("advance"):
            outputs, states = mixer.step(inputs, tuple(map(load, arrays, kept)))

            def chosen(array: StateArray, old: Array, new: Array) -> Array:
                return jnp.where(active.reshape(-1, *(1 for _ in array.shape)), store(array, new), old)

            return outputs, _replaced(cache, layer, tuple(map(chosen, arrays, kept, states)))

    return advance


def advance_chunk(layout: PoolLayout, row: Int[Array, ""], start: Int[Array, ""], num_valid: Int[Array, ""]) -> Advance:
    """For a prompt's chunk: the next `num_valid` tokens of the sequence in one row."""

    def advance(layer: int, mixer: Any, inputs: Any, cache: PagedCache) -> tuple[Any, PagedCache]:
        arrays, kept = layout.states[layer], cache.states[layer]

        def begun(array: StateArray, slots: Array) -> Array:
            slot = load(array, lax.dynamic_index_in_dim(slots, row, keepdims=False))
            return jnp.where(start == 0, jnp.zeros_like(slot), slot)

        def put(array: StateArray, slots: Array, new: Array) -> Array:
            return lax.dynamic_update_index_in_dim(slots, store(array, new), row, 0)

        with jax.named_scope("advance"):
            outputs, state = mixer.chunk(inputs, tuple(map(begun, arrays, kept)), num_valid)
            return outputs, _replaced(cache, layer, tuple(map(put, arrays, kept, state)))

    return advance


def load(array: StateArray, kept: Array) -> Array:
    """A state as the model has it."""
    return kept if array.storage == array.dtype else lax.bitcast_convert_type(kept, array.dtype)


def store(array: StateArray, state: Array) -> Array:
    """A state as it is kept."""
    state = state.astype(array.dtype)
    return state if array.storage == array.dtype else lax.bitcast_convert_type(state, array.storage)


def _replaced(cache: PagedCache, layer: int, states: LayerStates) -> PagedCache:
    return cache._replace(states=[*cache.states[:layer], states, *cache.states[layer + 1 :]])
