"""Attention of a decode step: one query per row, over a list of all (row, block) pairs, so that the cost is what the rows hold together.

    rows at positions 130, 5 and (idle); blocks of 64 tokens; two items a turn:

        turn      0             1
        items   (0,0) (0,1)   (0,2) (1,0)

Each item makes a partial softmax of its own block: the maximum, the sum of the weights, the weighted values. They are then put together row
by row, in the order of the blocks, eight at a time. What an item computes does not depend on its place in the list, and how a row's items
are put together depends on that row alone, so no bit of a row depends on its neighbours, though the number of turns does.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxkv.cells import decode
from jaxkv.pool import LayerPages, PoolLayout

MASKED = -1e30  # finite: the difference of two masked scores must not be NaN
MOST_ITEMS = 32  # of one turn; more would leave the cache between the gather and the product
MERGED = 8  # blocks of a row that are put together at a time


class Work(NamedTuple):
    """The list. A turn is a row of `rows` and `blocks`; entries beyond the last item repeat the last row and a block beyond its end."""

    rows: Int[Array, "turns i"]
    blocks: Int[Array, "turns i"]
    num_turns: Int[Array, ""]
    first: Int[Array, " b"]  # place of a row's first item in the list
    num_blocks: Int[Array, " b"]  # items of a row; 0 for an idle one


class Partials(NamedTuple):
    """A partial softmax for every place in the list."""

    top: Float[Array, "n k g"]  # maximum of the scores
    total: Float[Array, "n k g"]  # sum of exp(score - top)
    out: Float[Array, "n k g d"]  # values, weighted by exp(score - top)


def items_per_turn(num_rows: int) -> int:
    """Two for each row: measured on XLA:CPU with 8 rows of 64 to 2000 tokens, 16 items a turn cost 10 to 20 % less than 8, and a short
    row alone wastes little."""
    return min(2 * num_rows, max(MOST_ITEMS, num_rows))


def list_work(positions: Int[Array, " b"], active: Bool[Array, " b"], max_blocks: int, block: int, window: int | None = None) -> Work:
    """All blocks of all active rows, row by row; the same for every layer of a step. With a window, those that it reaches into:
    position 130, window 16, blocks of 64: only block 1, for tokens 115 to 127, and block 2."""
    (b,) = positions.shape
    items = items_per_turn(b)
    num_turns = -(-b * max_blocks // items)
    num_blocks = jnp.where(active, positions // block + 1, 0).astype(jnp.int32)
    before = None if window is None else jnp.where(active, jnp.maximum(positions - window + 1, 0) // block, 0).astype(jnp.int32)
    if before is not None:
        num_blocks = num_blocks - before
    ends = jnp.cumsum(num_blocks)
    first = ends - num_blocks
    place = jnp.arange(num_turns * items, dtype=jnp.int32)
    rows = jnp.minimum(jnp.searchsorted(ends, place, side="right"), b - 1).astype(jnp.int32)
    blocks = jnp.minimum(place - first[rows] if before is None else place - first[rows] + before[rows], max_blocks - 1)
    return Work(rows.reshape(num_turns, items), blocks.reshape(num_turns, items), -(-ends[-1] // items), first, num_blocks)


def attend_listed(
    q: Float[Array, "b h d"],
    pages: LayerPages,
    blocks: Int[Array, "b w z"],
    positions: Int[Array, " b"],
    work: Work,
    partials: Partials | None,
    layout: PoolLayout,
    scale: float,
    window: int | None = None,
) -> tuple[Float[Array, "b h d"], Partials]:
    """Causal attention of one query per row over its pages; `blocks` are the block tables, cut into blocks of pages.

    Softmax in parts: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), equation 4. `partials` are those of the
    layer before, to be overwritten: a step needs the room once, not once a layer.
    """
    b, h, d = q.shape
    k = layout.num_kv_heads
    g = h // k  # query head i reads kv head i // g
    q = (q.astype(jnp.float32) * scale).reshape(b, k, g, d)
    partials = _attend_items(q, pages, blocks, positions, work, partials or _room(work, k, g, d), layout, window)
    return _merge(partials, work).reshape(b, h, d), partials


def _room(work: Work, k: int, g: int, d: int) -> Partials:
    num = work.rows.size
    return Partials(jnp.zeros((num, k, g)), jnp.zeros((num, k, g)), jnp.zeros((num, k, g, d)))


def _attend_items(
    q: Float[Array, "b k g d"],
    pages: LayerPages,
    blocks: Int[Array, "b w z"],
    positions: Int[Array, " b"],
    work: Work,
    partials: Partials,
    layout: PoolLayout,
    window: int | None,
) -> Partials:
    """The partial softmax of every item of the list."""
    items, block = work.rows.shape[1], blocks.shape[2] * layout.page_size
    _, k, _, d = q.shape

    def read(array: Array, ids: Array) -> Array:
        cells = decode(jnp.take(array, ids, axis=0, mode="clip"), layout)  # [i, pages, k, z, d]
        return cells.swapaxes(1, 2).reshape(items, k, block, d)

    def turn(i: Array, done: Partials) -> Partials:
        row, at = work.rows[i], work.blocks[i]
        ids = blocks[row, at]
        score = jnp.einsum("ikgd,iksd->ikgs", q[row], read(pages[0], ids), precision=lax.Precision.HIGHEST)
        seen = (at[:, None] * block + jnp.arange(block)[None] <= positions[row][:, None])[:, None, None, :]
        if window is not None:
            seen &= (at[:, None] * block + jnp.arange(block)[None] > positions[row][:, None] - window)[:, None, None, :]
        top = jnp.where(seen, score, MASKED).max(-1)
        weight = jnp.where(seen, jnp.exp(score - top[..., None]), 0.0)
        value = jnp.einsum("ikgs,iksd->ikgd", weight, read(pages[1], ids), precision=lax.Precision.HIGHEST)
        new = Partials(top, weight.sum(-1), value)
        return Partials(*(lax.dynamic_update_slice_in_dim(old, x, i * items, axis=0) for old, x in zip(done, new, strict=True)))

    return lax.fori_loop(0, work.num_turns, turn, partials)


def _merge(partials: Partials, work: Work) -> Float[Array, "b k g d"]:
    """Each row's partials put together in the order of its blocks. Beyond a row's last block its last one is read again, with weight 0."""
    b = work.first.shape[0]
    _, k, g, d = partials.out.shape

    def turn(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        old_top, old_total, old_out = carry
        at = (i * MERGED + jnp.arange(MERGED))[None]
        seen = (at < work.num_blocks[:, None])[:, :, None, None]
        place = work.first[:, None] + jnp.minimum(at, jnp.maximum(work.num_blocks - 1, 0)[:, None])
        top, total, out = (jnp.take(x, place, axis=0, mode="clip") for x in partials)  # [b, MERGED, k, g(, d)]
        new_top = jnp.maximum(old_top, jnp.where(seen, top, MASKED).max(1))
        weight, fade = jnp.where(seen, jnp.exp(top - new_top[:, None]), 0.0), jnp.exp(old_top - new_top)
        new_out = old_out * fade[..., None] + (weight[..., None] * out).sum(1)
        return new_top, old_total * fade + (weight * total).sum(1), new_out

    start = (jnp.full((b, k, g), MASKED), jnp.zeros((b, k, g)), jnp.zeros((b, k, g, d)))
    _, total, out = lax.fori_loop(0, (work.num_blocks.max() + MERGED - 1) // MERGED, turn, start)
    return out / jnp.where(total > 0, total, 1.0)[..., None]  # an idle row has no weights: zeros, not NaN
