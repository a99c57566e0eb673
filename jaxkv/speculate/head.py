"""A model's own draft head at work, inside the programs that compute the hidden states it is made for. Knows no request.

Its layer has keys of its own, in one layer of pages behind the model's: so they travel in the same images and are found with the same
pages. The cell of position p holds what the head made of the hidden state there and of the token that comes next, so it lags behind by one:

    verify       position  7  8  9       tokens  b  c  x      samples  c  d  .      c is true, x is not: c and d are new
    head         position  7  8          tokens  c  d         with the hidden states of 7 and 8: guesses what comes after d, say e
    head again   position  9             token   e            with its own hidden state: guesses f, and so on

The cells of guesses are written over when the step that checks them has the model's own hidden states. The cell of a prompt's last token is
made of the first token drawn, by whoever drew it. No cell of the head is ever seen by the model: they decide what is guessed, never what
is said.
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
from jaxkv.sampling import HostOrDevice, first_best
from jaxkv.speculate.verify import VerifyBatch, check_guesses

TILE = 2  # rows of a chain behind a prompt: never one


class HeadChunk(NamedTuple):
    """A chunk of a prompt, with the tokens that follow each of its own; behind the prompt's last one comes what is drawn."""

    chunk: Any
    following: Int[HostOrDevice, " t"]
    num_cells: Int[HostOrDevice, ""]  # that its pages have


class HeadBatch(NamedTuple):
    """Guesses to check, and how many cells the pages of each row have from its first token on."""

    verify: VerifyBatch
    num_cells: Int[HostOrDevice, " b"]


class Chain(NamedTuple):
    """What guessing goes on from: the head's layer of pages, and of each row its hidden state and last guess."""

    pages: tuple[Array, ...]
    hidden: Float[Array, "b m"]
    guesses: Int[Array, "b k"]


def verify_with_head(
    rebuild: Callable[[Any], Any], layout: PoolLayout, run_layers: Callable[..., Any], whole: Callable[[Array], Array]
) -> Callable[..., Any]:
    """The verify step, and behind it the next guesses: [b, k]."""

    def verify(weights: Any, pool: PoolArrays, batch: HeadBatch) -> Any:
        model, head = rebuild(weights)
        checked = check_guesses(model, layout, run_layers, whole, pool, batch.verify)
        b, c = batch.verify.tokens.shape
        sampled, tokens = checked.sampled.token.reshape(b, c), jnp.asarray(batch.verify.tokens)
        known = jnp.concatenate([tokens[:, 1:], sampled[:, -1:]], axis=1)
        following = jnp.where(jnp.asarray(batch.verify.is_known)[:, None], known, sampled)
        column, table = jnp.arange(c)[None], jnp.asarray(batch.verify.table)
        is_new = column < checked.num_accepted[:, None]
        first = jnp.asarray(batch.verify.positions)
        positions = jnp.where(is_new, first[:, None] + column, 0).reshape(b * c)
        attend = paged_attend(layout, jnp.repeat(table, c, axis=0), positions[:, None], is_new.reshape(b * c, 1))
        with jax.named_scope("draft"):
            pages, hidden = run_head(model, head, layout, following.reshape(b * c), checked.hidden, positions, checked.pool, attend)
            last = jnp.maximum(checked.num_accepted - 1, 0)
            hidden = jnp.take_along_axis(hidden.reshape(b, c, -1), last[:, None, None], axis=1)[:, 0]
            cells = first + jnp.asarray(batch.num_cells)
            pages, guesses = go_on(model, head, layout, whole, pages, hidden, table, first + checked.num_accepted, cells, c - 1, None)
        return with_pages(checked.pool, layout, pages), checked.sampled, guesses

    return verify


def prefill_with_head(
    rebuild: Callable[[Any], Any], layout: PoolLayout, compute_chunk: Callable[..., Any], whole: Callable[..., Any], num_draft: int
) -> Callable[..., Any]:
    """The prefill step with the head's cells of the chunk; behind the last one the first guesses: [k]."""

    def prefill(weights: Any, pool: PoolArrays, batch: HeadChunk) -> Any:
        model, head = rebuild(weights)
        chunk = batch.chunk
        pool, sampled, scores, hidden = compute_chunk(model, pool, chunk)
        at, length = jnp.arange(chunk.tokens.shape[0]), jnp.asarray(chunk.length)
        valid = at < length
        positions = jnp.where(valid, chunk.start + at, 0)
        is_drawn = (at == length - 1) & jnp.asarray(chunk.is_last)
        following = jnp.where(is_drawn, sampled.token[0], jnp.asarray(batch.following))
        table = jnp.asarray(chunk.table)
        attend = paged_attend(layout, table, positions[None], valid[None])
        with jax.named_scope("draft"):
            pages, found = run_head(model, head, layout, following, hidden, positions, pool, attend)
            last = lax.dynamic_slice_in_dim(found, length - 1, 1, axis=0)
            both, end = jnp.concatenate([last] * TILE), jnp.asarray(chunk.start) + length
            ends = jnp.where(jnp.arange(TILE) == 0, end, 0)
            cells = jnp.where(jnp.arange(TILE) == 0, jnp.asarray(batch.num_cells), 0)  # the second row is idle
            num = jnp.where(jnp.asarray(chunk.is_last), num_draft, 0)
            tables = jnp.repeat(table, TILE, axis=0)
            pages, guesses = go_on(model, head, layout, whole, pages, both, tables, ends, cells, num_draft, num)
        return with_pages(pool, layout, pages), sampled, scores, guesses[0]

    return prefill


def run_head(
    model: Any, head: Any, layout: PoolLayout, tokens: Array, hidden: Array, positions: Array, pool: PoolArrays, attend: Any
) -> tuple[tuple[Array, ...], Array]:
    """The head's layer of pages with the cells of these tokens, and its hidden states."""
    cache: Any = PagedCache([pool[layout.num_layers - 1]])  # type: ignore[list-item]
    found, cache = head(model, tokens, hidden, positions, cache, attend)
    return cache.pool[0], found


def go_on(
    model: Any,
    head: Any,
    layout: PoolLayout,
    whole: Callable[..., Any],
    pages: tuple[Array, ...],
    hidden: Float[Array, "b m"],
    table: Int[Array, "b w"],
    positions: Int[Array, " b"],
    cells: Int[Array, " b"],
    num_guesses: int,
    num_turns: Array | None,
) -> tuple[tuple[Array, ...], Int[Array, "b k"]]:
    """Guess after guess, each from the one before: the first comes from `hidden` and is fed to `positions`, as long as there are cells."""

    def turn(i: Array, chain: Chain) -> Chain:
        guess = first_best(whole(model, chain.hidden))
        at = positions + i
        has_cell: Bool[Array, " b"] = at < cells
        attend = paged_attend(layout, table, jnp.where(has_cell, at, 0)[:, None], has_cell[:, None])
        cache: Any = PagedCache([chain.pages])  # type: ignore[list-item]
        found, cache = head(model, guess, chain.hidden, jnp.where(has_cell, at, 0), cache, attend)
        guesses = lax.dynamic_update_slice_in_dim(chain.guesses, guess[:, None], i, axis=1)
        return Chain(cache.pool[0], found, guesses)

    start = Chain(pages, hidden, jnp.zeros((hidden.shape[0], num_guesses), jnp.int32))
    done = lax.fori_loop(0, num_guesses if num_turns is None else num_turns, turn, start)
    return done.pages, done.guesses


def with_pages(pool: PoolArrays, layout: PoolLayout, pages: tuple[Array, ...]) -> PoolArrays:
    """The pool with the head's layer replaced."""
    place = layout.num_layers - 1
    return [*pool[:place], pages, *pool[place + 1 :]]


def example_head_batch(verify: VerifyBatch) -> HeadBatch:
    """One that does nothing."""
    return HeadBatch(verify, np.zeros(len(verify.positions), np.int32))


def example_head_chunk(chunk: Any) -> HeadChunk:
    """One that does nothing."""
    num_cells: Any = np.int32(0)
    return HeadChunk(chunk, np.zeros(len(chunk.tokens), np.int32), num_cells)
