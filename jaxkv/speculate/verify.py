"""The program that checks guesses: a decode step of several tokens for each row, its own and guesses behind it. Knows no drafter.

Its layers see rows x columns rows of one token each, with their own positions and their row's pages: it is the decode program, only wider.
A token's keys, state and logits depend on no other row, so they depend neither on its column nor on what is guessed behind it. All keys are
written before any is read, and a token sees none behind its own; what a wrong guess left in a cell is written over before it is seen.

    row 0 at position 7, guesses c d          tokens   b  c  d      positions  7  8  9
    its program samples                                c  d  e      both guesses are true: it has c, d and e, and position 10 is next
    or                                                 c  x  .      one is: it has c and x, and x is fed to position 9
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.attention import PagedCache, paged_attend
from jaxkv.pool import PoolArrays, PoolLayout
from jaxkv.sampling import HostOrDevice, Knobs, Sampled, sample
from jaxkv.states import Advance, load, store


class VerifyBatch(NamedTuple):
    """Some tokens for every row; an idle one has none. What has no token writes to the trash page and its result is unused."""

    tokens: Int[HostOrDevice, "b c"]
    positions: Int[HostOrDevice, " b"]  # of the first
    num_tokens: Int[HostOrDevice, " b"]
    is_known: Bool[HostOrDevice, " b"]  # computed again: there is nothing to guess
    may_accept: Bool[HostOrDevice, ""]
    table: Int[HostOrDevice, "b w"]
    near: Int[HostOrDevice, "b v"]  # of the layers whose pages are a group of their own; v is 0 where there are none
    knobs: Knobs  # of the first


def example_verify(rows: int, columns: int, width: int, near_width: int, knobs: Knobs) -> VerifyBatch:
    """One that does nothing, as NumPy arrays."""
    ints, no = np.zeros(rows, np.int32), np.zeros(rows, bool)
    may_accept: Any = np.bool_(False)
    tokens, table, near = (np.zeros((rows, num), np.int32) for num in (columns, width, near_width))
    return VerifyBatch(tokens, ints, ints, no, may_accept, table, near, knobs)


class Checked(NamedTuple):
    """What came of a batch of guesses: one sample for every token, row by row, and how many tokens of each row count."""

    pool: PoolArrays
    sampled: Sampled
    hidden: Float[Array, "t m"]
    num_accepted: Int[Array, " b"]


def verify_step(
    rebuild: Callable[[Any], Any], layout: PoolLayout, run_layers: Callable[..., Any], whole: Callable[..., Array]
) -> Callable[..., tuple[PoolArrays, Sampled]]:
    """All columns of every row: [b, c] tokens in, [b * c] tokens out, row by row. `run_layers` and `whole` are those of a decode step."""

    def verify(weights: Any, pool: PoolArrays, batch: VerifyBatch) -> tuple[PoolArrays, Sampled]:
        checked = check_guesses(rebuild(weights), layout, run_layers, whole, pool, batch)
        return checked.pool, checked.sampled

    return verify


def check_guesses(
    model: Any, layout: PoolLayout, run_layers: Callable[..., Any], whole: Callable[..., Array], pool: PoolArrays, batch: VerifyBatch
) -> Checked:
    """Run the model over all columns, sample behind each, keep what is true."""
    b, c = batch.tokens.shape
    column = jnp.arange(c)[None]
    valid = column < jnp.asarray(batch.num_tokens)[:, None]
    positions = jnp.where(valid, jnp.asarray(batch.positions)[:, None] + column, 0).reshape(b * c)
    table, near = (jnp.repeat(jnp.asarray(one), c, axis=0) for one in (batch.table, batch.near))
    attend = paged_attend(layout, table, positions[:, None], valid.reshape(b * c, 1), near)
    tokens = jnp.asarray(batch.tokens).reshape(b * c)
    with jax.named_scope("layers"):
        hidden, pool = run_layers(model, layout, tokens, positions, pool, attend, advance_columns(layout, valid))
    with jax.named_scope("head"):
        logits = whole(model, hidden)
    with jax.named_scope("sample"):
        sampled = sample(logits, by_column(batch.knobs, c))
    num = num_accepted(batch, valid, sampled.token.reshape(b, c))
    return Checked(keep_accepted(layout, pool, num) if layout.states else pool, sampled, hidden, num)


def by_column(knobs: Knobs, num_columns: int) -> Knobs:
    """The knobs of every token: behind the first each has one more said. The history has the guesses in it."""
    b = knobs.num_generated.shape[0]
    column = jnp.tile(jnp.arange(num_columns, dtype=jnp.int32), b)
    all_ = Knobs(*(jnp.repeat(jnp.asarray(knob), num_columns, axis=0) for knob in knobs))
    return all_._replace(num_generated=all_.num_generated + column, history_len=all_.history_len + column)


def num_accepted(batch: VerifyBatch, valid: Bool[Array, "b c"], sampled: Int[Array, "b c"]) -> Int[Array, " b"]:
    """How many of its tokens each row keeps: its own, and guesses as long as each is what was sampled before it; 0 for an idle row."""
    is_true = (jnp.asarray(batch.tokens)[:, 1:] == sampled[:, :-1]) & jnp.asarray(batch.may_accept)
    goes_on = (is_true | jnp.asarray(batch.is_known)[:, None]) & valid[:, 1:]
    return valid[:, 0].astype(jnp.int32) + jnp.cumprod(goes_on.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)


def advance_columns(layout: PoolLayout, valid: Bool[Array, "b c"]) -> Advance:
    """For a verify step: the tokens of every row one after the other. In the place of the states it leaves those after each column.

    A loop, so that every column is computed by the same code.
    """
    b, c = valid.shape

    def advance(layer: int, mixer: Any, inputs: Any, cache: PagedCache) -> tuple[Any, PagedCache]:
        arrays = layout.states[layer]

        def turn(kept: tuple[Array, ...], column: Any) -> tuple[tuple[Array, ...], Any]:
            here, active = column
            outputs, states = mixer.step(here, tuple(map(load, arrays, kept)))
            new = tuple(
                jnp.where(active.reshape(-1, *(1 for _ in array.shape)), store(array, state), old)
                for array, state, old in zip(arrays, states, kept, strict=True)
            )
            return new, (outputs, new)

        def columns_first(x: Array) -> Array:
            return x.reshape(b, c, *x.shape[1:]).swapaxes(0, 1)

        with jax.named_scope("advance"):
            columns = jax.tree.map(columns_first, tuple(inputs)), valid.T
            _, (outputs, after) = lax.scan(turn, tuple(cache.states[layer]), columns)
            outputs = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(b * c, *x.shape[2:]), outputs)
            return outputs, cache._replace(states=[*cache.states[:layer], after, *cache.states[layer + 1 :]])

    return advance


def keep_accepted(layout: PoolLayout, pool: PoolArrays, num: Int[Array, " b"]) -> PoolArrays:
    """The states after each row's last token that counts; an idle row's are as they were after any column."""
    last = jnp.maximum(num - 1, 0)

    def chosen(after: Array) -> Array:
        index = last.reshape(1, -1, *(1 for _ in after.shape[2:]))
        return jnp.take_along_axis(after, index, axis=0)[0]

    return [*pool[: layout.num_layers], *(tuple(map(chosen, layer)) for layer in pool[layout.num_layers :])]
