"""Attention over pages: write the new keys and values, then read every key back from the pages, block by block.

A prompt chunk, one sequence with many queries, walks its blocks one after the other. A decode step, many sequences with one query
each, works through a list of all their blocks (jaxkv/work_list.py): its cost is the sum of the lengths, not the longest times the rows.

The rule that exactness rests on: a token's own key takes the same way through the pages as all the others, and blocks are aligned to
absolute position. So the bits of an answer depend neither on where a prompt was cut, nor on which pages were free, nor on the neighbours.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.cells import decode, encode
from jaxkv.pool import LayerPages, LayerStates, PoolLayout
from jaxkv.work_list import MASKED, Partials, Work, attend_listed, list_work

BLOCK_TOKENS = 64  # keys per block; a longer page is a block of its own


class PagedCache(NamedTuple):
    """What the layers of one step pass on: the pages, the room for partial results that a decode step makes in its first layer, and the
    states, in the layers that have them instead."""

    pool: list[LayerPages]
    partials: Partials | None = None
    states: list[LayerStates] | tuple[()] = ()


Attend = Callable[..., tuple[Array, PagedCache]]


def pages_per_block(page_size: int) -> int:
    """How many pages one turn of the loop reads. Page size 16: 4 pages, 64 tokens. Page size 24: 3 pages, 72 tokens."""
    return max(1, -(-BLOCK_TOKENS // page_size))


def table_width(max_len: int, page_size: int) -> int:
    """Entries of a block table: enough for `max_len` tokens, in whole blocks so that none is cut short, whatever the pool."""
    per_block = pages_per_block(page_size)
    pages = -(-max_len // page_size)
    return -(-pages // per_block) * per_block


def paged_attend(
    layout: PoolLayout,
    table: Int[Array, "n w"],
    positions: Int[Array, "n c"],
    valid: Int[Array, "n c"],
    near: Int[Array, "n v"] | None = None,
) -> Attend:
    """The `attend` argument of a model, for n sequences with c query tokens each (decode: c = 1; a prompt chunk: n = 1).

    Tokens reach the model flat, t = n * c. Where `valid` is false (an idle row, padding) keys go to the trash page, outputs are unused.
    `near` is the block table of the layers whose pages are a group of their own.
    """
    n, c = positions.shape
    cell = (positions % layout.page_size).reshape(n * c)

    def page_of(table: Int[Array, "n w"]) -> Array:
        page = jnp.take_along_axis(table, positions // layout.page_size, axis=1)
        return jnp.where(valid, page, 0).reshape(n * c)

    tables = {False: table, True: near} if layout.near and near is not None else {False: table}
    written = {is_near: page_of(one) for is_near, one in tables.items()}
    cut = {is_near: one.reshape(n, -1, pages_per_block(layout.page_size)) for is_near, one in tables.items()}
    blocks = cut[False]

    def work_of(window: int | None) -> Work:
        return list_work(positions[:, 0], valid[:, 0], blocks.shape[1], blocks.shape[2] * layout.page_size, window)

    works: dict[int | None, Work] = {None: work_of(None)} if c == 1 else {}  # by window; one list serves all layers that have it

    def attend(
        layer: int,
        q: Float[Array, "t h d"],
        k: Float[Array, "t k d"],
        v: Float[Array, "t k d"],
        cache: PagedCache,
        *,
        scale: float,
        window: int | None = None,
    ) -> tuple[Array, PagedCache]:
        is_near = layer in layout.near
        with jax.named_scope("write"):
            pages = write_cells(cache.pool[layer], k, v, written[is_near], cell, layout)
        with jax.named_scope("attend"):
            if c > 1:
                first = 0 if window is None else jnp.maximum(jnp.where(valid, positions, positions.max()).min() - window + 1, 0)
                q_rows = q.reshape(n, c, *q.shape[1:])
                out, partials = attend_blocks(q_rows, pages, tables[is_near], positions, layout, scale, window, first), cache.partials
            else:
                if window not in works:
                    works[window] = work_of(window)
                out, partials = attend_listed(q, pages, cut[is_near], positions[:, 0], works[window], cache.partials, layout, scale, window)
        pool = [*cache.pool[:layer], pages, *cache.pool[layer + 1 :]]
        return out.reshape(q.shape).astype(q.dtype), cache._replace(pool=pool, partials=partials)

    return attend


def write_cells(pages: LayerPages, k: Array, v: Array, page: Array, cell: Array, layout: PoolLayout) -> LayerPages:
    """Put the new keys and values, [t, k, d] each, into their cells, in storage precision."""
    keys, values = pages
    keys = keys.at[page, :, cell].set(encode(k, layout), mode="promise_in_bounds")
    return keys, values.at[page, :, cell].set(encode(v, layout), mode="promise_in_bounds")


def attend_blocks(
    q: Float[Array, "n c h d"],
    pages: LayerPages,
    table: Int[Array, "n w"],
    positions: Int[Array, "n c"],
    layout: PoolLayout,
    scale: float,
    window: int | None = None,
    first: Array | int = 0,
) -> Float[Array, "n c h d"]:
    """Causal attention with the online softmax (Milakov and Gimelshein, 2018), one block of keys a turn, for as long as the longest needs.

    A block beyond a sequence's own end, or before a token's window, changes nothing, bit for bit: every weight is 0, the running maximum
    stays, and x * 1 + 0 is x. So the turns may depend on the neighbours while no result does. `first` is the first position anybody sees.
    """
    n, c, h, d = q.shape
    num_kv = layout.num_kv_heads
    g = h // num_kv  # query head i reads kv head i // g
    per_block = pages_per_block(layout.page_size)
    block = per_block * layout.page_size
    q = (q.astype(jnp.float32) * scale).reshape(n, c, num_kv, g, d).transpose(0, 2, 1, 3, 4).reshape(n, num_kv, c * g, d)
    last = jnp.repeat(positions, g, axis=1)[:, None, :, None]  # [n, 1, c*g, 1]

    def read(array: Array, ids: Array) -> Array:
        cells = decode(jnp.take(array, ids, axis=0, mode="clip"), layout)  # [n, pages, k, z, d]
        return cells.swapaxes(1, 2).reshape(n, num_kv, block, d)

    def turn(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        ids = lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)
        score = jnp.einsum("nkqd,nksd->nkqs", q, read(pages[0], ids), precision=lax.Precision.HIGHEST)
        at = (i * block + jnp.arange(block))[None, None, None, :]
        seen = at <= last if window is None else (at <= last) & (at > last - window)
        new_top = jnp.maximum(top, jnp.where(seen, score, MASKED).max(-1))
        weight = jnp.where(seen, jnp.exp(score - new_top[..., None]), 0.0)
        fade = jnp.exp(top - new_top)
        value = jnp.einsum("nkqs,nksd->nkqd", weight, read(pages[1], ids), precision=lax.Precision.HIGHEST)
        return new_top, total * fade + weight.sum(-1), out * fade[..., None] + value

    start = (jnp.full(q.shape[:3], MASKED), jnp.zeros(q.shape[:3]), jnp.zeros(q.shape))
    _, total, out = lax.fori_loop(first // block, positions.max() // block + 1, turn, start)
    if window is not None:
        total = jnp.where(total > 0, total, 1.0)  # padding may see nothing: zeros, not NaN
    out = out / total[..., None]
    return out.reshape(n, num_kv, c, g, d).transpose(0, 2, 1, 3, 4).reshape(n, c, h, d)
