"""Attention over pages against attention over the whole sequence, and the bits that must not move."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import cells
from jaxkv.attention import PagedCache, paged_attend, pages_per_block, table_width
from jaxkv.models import dense_attend
from jaxkv.pool import PoolLayout
from jaxkv.work_list import list_work

H, K, D = 4, 2, 8  # query heads, kv heads, head dim
MAX_LEN, NUM_PAGES_TOKENS = 256, 1200
SCALE = D**-0.5
EDGES = (1, 63, 64, 65, 128, 200)


def layout(page_size: int, dtype: str = "float32") -> PoolLayout:
    storage = "uint16" if dtype == "bfloat16" else dtype
    return PoolLayout(1, NUM_PAGES_TOKENS // page_size, page_size, K, D, dtype, storage)


@jax.jit
def run_dense(q: Any, k: Any, v: Any) -> Any:
    return dense_attend(0, q, k, v, None, scale=SCALE)[0]


class Case:
    """One sequence: queries, keys and values of every position, all random, and what dense attention makes of them."""

    def __init__(self, length: int, seed: int, dtype: str = "float32") -> None:
        rng = np.random.default_rng([length, seed])
        self.length = length
        q, k, v = (rng.standard_normal((length, heads, D)).astype(np.float32) for heads in (H, K, K))
        self.q = q
        shape = layout(16, dtype)
        self.k, self.v = (np.asarray(cells.decode(cells.encode(jnp.asarray(x), shape), shape)) for x in (k, v))  # what a cell can hold

    @property
    def dense(self) -> np.ndarray:
        padded = (np.pad(x, ((0, MAX_LEN - self.length), (0, 0), (0, 0))) for x in (self.q, self.k, self.v))  # no token sees a later one
        return np.asarray(run_dense(*padded))[: self.length]


class Memory:
    """A pool as NumPy arrays with hand-dealt pages; garbage wherever nothing was written."""

    def __init__(self, shape: PoolLayout, seed: int = 0) -> None:
        self.layout, self.rng = shape, np.random.default_rng(seed)
        size = (shape.num_pages + 1, shape.num_kv_heads, shape.page_size, shape.head_dim)
        self.pool = [self.rng.standard_normal(size).astype(np.float32) * 3 for _ in range(2)]
        self.free = (self.rng.permutation(shape.num_pages) + 1).tolist()
        self.width = table_width(MAX_LEN, shape.page_size)

    def deal(self, num_tokens: int) -> np.ndarray:
        """A block table row with random pages; entries beyond them name the trash page."""
        num_pages = -(-num_tokens // self.layout.page_size)
        row = np.zeros(self.width, np.int32)
        row[:num_pages] = [self.free.pop() for _ in range(num_pages)]
        return row

    def fill(self, row: np.ndarray, case: Case, upto: int) -> None:
        """The obvious way to write the first `upto` keys and values: one at a time."""
        for at in range(upto):
            page, cell = row[at // self.layout.page_size], at % self.layout.page_size
            self.pool[0][page, :, cell], self.pool[1][page, :, cell] = case.k[at], case.v[at]

    def arrays(self) -> Any:
        keys, values = (cells.encode(jnp.asarray(x), self.layout) for x in self.pool)
        return [(keys, values)]


@partial(jax.jit, static_argnums=0)
def run_attend(shape: PoolLayout, pool: Any, table: Any, positions: Any, valid: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    out, cache = paged_attend(shape, table, positions, valid)(0, q, k, v, PagedCache(pool), scale=SCALE)
    return out, cache.pool


def attend(
    shape: PoolLayout, pool: Any, table: np.ndarray, cases: Sequence[Case | None], starts: Sequence[int], c: int, lengths: Sequence[int]
) -> tuple[np.ndarray, Any]:
    """`lengths[i]` tokens of row i from `starts[i]` on, padded to c; returns [n, c, h, d] and the pool."""
    n = len(cases)
    positions, valid = np.zeros((n, c), np.int32), np.zeros((n, c), bool)
    q, k, v = (np.full((n, c, heads, D), 7.0, np.float32) for heads in (H, K, K))
    for i, case in enumerate(cases):
        if case is None:
            continue
        span = slice(starts[i], starts[i] + lengths[i])
        positions[i, : lengths[i]], valid[i, : lengths[i]] = np.arange(span.start, span.stop), True
        q[i, : lengths[i]], k[i, : lengths[i]], v[i, : lengths[i]] = case.q[span], case.k[span], case.v[span]
    flat = (x.reshape(n * c, -1, D) for x in (q, k, v))
    out, pool = run_attend(shape, pool, table, positions, valid, *flat)
    return np.asarray(out).reshape(n, c, H, D), pool


def decode(memory: Memory, cases: Sequence[Case | None]) -> np.ndarray:
    """The last token of every case in a batch of one row each, the earlier ones being in the pool already; returns [n, h, d]."""
    table = np.zeros((len(cases), memory.width), np.int32)
    for i, case in enumerate(cases):
        if case is not None:
            table[i] = memory.deal(case.length)
            memory.fill(table[i], case, case.length - 1)
    starts = [0 if case is None else case.length - 1 for case in cases]
    out, _ = attend(memory.layout, memory.arrays(), table, cases, starts, 1, [1] * len(cases))
    return out[:, 0]


def prefill(memory: Memory, case: Case, cuts: Sequence[int], c: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole prompt in chunks that begin at `cuts`, all padded to c; returns [length, h, d] and the sequence's cells."""
    row, pool, outs = memory.deal(case.length), memory.arrays(), []
    for start, end in zip(cuts, [*cuts[1:], case.length], strict=True):
        out, pool = attend(memory.layout, pool, row[None], [case], [start], c, [end - start])
        outs.append(out[0, : end - start])
    return np.concatenate(outs), cells_of(pool, row, case.length)


def cells_of(pool: Any, row: np.ndarray, length: int) -> np.ndarray:
    """The raw cells of one sequence in order: [2, length, k, d]."""
    both = [np.asarray(x)[row].transpose(0, 2, 1, 3).reshape(-1, K, x.shape[-1])[:length] for x in pool[0]]
    return np.stack(both)


def test_blocks_are_whole_pages_and_tables_whole_blocks() -> None:
    assert [pages_per_block(z) for z in (1, 4, 16, 24, 64, 100)] == [64, 16, 4, 3, 1, 1]
    assert [table_width(256, z) for z in (1, 4, 16, 24, 100)] == [256, 64, 16, 12, 3]
    assert table_width(65, 16) == 8  # five pages hold 65 tokens; two blocks have eight


@pytest.mark.parametrize("page_size", [1, 4, 16, 24])
def test_decoding_through_random_pages_is_the_last_row_of_dense_attention(page_size: int) -> None:
    cases = [Case(length, 0) for length in EDGES]
    found = decode(Memory(layout(page_size)), cases)
    for case, row in zip(cases, found, strict=True):
        np.testing.assert_allclose(row, case.dense[-1], atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 4, 16, 24])
@pytest.mark.parametrize("length", EDGES)
def test_prompt_chunks_through_random_pages_are_dense_attention(page_size: int, length: int) -> None:
    case = Case(length, 1)
    found, _ = prefill(Memory(layout(page_size)), case, range(0, length, 64), 64)
    np.testing.assert_allclose(found, case.dense, atol=2e-6)


@pytest.mark.parametrize("page_size", [4, 24])
def test_several_tokens_of_several_rows_at_once_are_dense_attention(page_size: int) -> None:
    cases, starts, c = [Case(70, 2), Case(3, 3), Case(200, 4)], [62, 0, 195], 8
    lengths = [8, 3, 5]
    memory = Memory(layout(page_size))
    table = np.stack([memory.deal(case.length) for case in cases])
    for row, case, start in zip(table, cases, starts, strict=True):
        memory.fill(row, case, start)
    found, _ = attend(memory.layout, memory.arrays(), table, cases, starts, c, lengths)
    for i, (case, start, n) in enumerate(zip(cases, starts, lengths, strict=True)):
        np.testing.assert_allclose(found[i, :n], case.dense[start : start + n], atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_narrow_cells_round_keys_and_values_and_nothing_else(dtype: str) -> None:
    cases = [Case(length, 5, dtype) for length in (1, 64, 200)]
    found = decode(Memory(layout(16, dtype)), cases)
    for case, row in zip(cases, found, strict=True):
        np.testing.assert_allclose(row, case.dense[-1], atol=2e-6)


def crowd(target: Case, at: int, others: Sequence[int | None], memory_seed: int, dtype: str) -> bytes:
    """The bits of `target` decoded in row `at`, with neighbours of these lengths (None: an idle row) in the other rows in their order."""
    neighbours = [None if n is None else Case(n, 100 + memory_seed, dtype) for n in others]
    return decode(Memory(layout(16, dtype), memory_seed), [*neighbours[:at], target, *neighbours[at:]])[at].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("length", [1, 64, 65, 200])
def test_a_row_keeps_its_bits_whatever_its_neighbours_its_place_its_pages_and_the_garbage_around(length: int, dtype: str) -> None:
    target = Case(length, 6, dtype)
    alone = crowd(target, 0, [None, None, None], 0, dtype)
    assert crowd(target, 0, [1, 1, 1], 1, dtype) == alone
    assert crowd(target, 3, [250, 2, 129], 2, dtype) == alone
    assert crowd(target, 2, [200, 64, None], 3, dtype) == alone
    assert crowd(target, 1, [None, 250, 250], 4, dtype) == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("page_size", [4, 16, 24])
def test_a_prompt_keeps_its_bits_wherever_it_is_cut(page_size: int, dtype: str) -> None:
    case = Case(200, 7, dtype)
    plain, cells = prefill(Memory(layout(page_size, dtype)), case, [0, 64, 128, 192], 64)
    for seed, cuts in enumerate([[0, 1, 64, 127, 190], [0, 37, 101, 165], [0, 8, 16, 80, 144], [0, 64, 65, 66, 130, 194, 199]], 1):
        found, found_cells = prefill(Memory(layout(page_size, dtype), seed), case, cuts, 64)
        assert found.tobytes() == plain.tobytes(), cuts
        assert found_cells.tobytes() == cells.tobytes(), cuts


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_key_is_read_back_from_its_page_even_in_the_step_that_writes_it(dtype: str) -> None:
    case = Case(5, 8)  # its keys have more digits than the narrow ones keep
    rounded = Case(5, 8, dtype)
    assert not np.array_equal(case.k, rounded.k)
    found, _ = prefill(Memory(layout(16, dtype)), case, [0], 8)
    np.testing.assert_allclose(found, rounded.dense, atol=2e-6)


@pytest.mark.parametrize("form", ["decode", "chunk"])
def test_idle_rows_and_padding_write_the_trash_page_only(form: str) -> None:
    memory, case = Memory(layout(16)), Case(37, 9)
    row = memory.deal(case.length)
    other = memory.deal(64)
    memory.fill(row, case, 30)
    before = memory.arrays()
    if form == "decode":
        table = np.stack([row, other, np.zeros_like(row)])  # row 1 is idle, though its table still names pages
        _, after = attend(memory.layout, before, table, [case, None, None], [30, 0, 0], 1, [1, 0, 0])
        written = {(int(row[1]), 14)}
    else:
        _, after = attend(memory.layout, before, row[None], [case], [30], 64, [7])
        written = {(int(row[at // 16]), at % 16) for at in range(30, 37)}
    changed = np.zeros(before[0][0].shape[:3:2], bool)  # [p, z]
    for old, new in zip(before[0], after[0], strict=True):
        changed |= (np.asarray(old) != np.asarray(new)).any(axis=(1, 3))
    found = {(int(page), int(cell)) for page, cell in zip(*np.nonzero(changed), strict=True)}
    assert {place for place in found if place[0] != 0} == written


def test_the_list_of_work_names_every_block_of_every_active_row_once_in_order() -> None:
    positions, active = jnp.array([130, 5, 64, 9]), jnp.array([True, True, False, True])
    work = list_work(positions, active, max_blocks=4, block=64)
    assert (work.rows.shape, int(work.num_turns)) == ((2, 8), 1)  # 5 items, two for each of 4 rows in a turn
    pairs = list(zip(work.rows[0].tolist(), work.blocks[0].tolist(), strict=True))
    assert pairs[:5] == [(0, 0), (0, 1), (0, 2), (1, 0), (3, 0)]
    assert (work.first.tolist(), work.num_blocks.tolist()) == ([0, 3, 4, 4], [3, 1, 0, 1])


def test_the_turns_are_as_many_as_all_blocks_together_need_not_as_the_longest_row_does() -> None:
    def turns(*positions: int) -> int:
        return int(list_work(jnp.array(positions), jnp.ones(len(positions), bool), max_blocks=64, block=64).num_turns)

    assert turns(2047, 99, 99, 99) == 5  # 32 + 3 * 2 items, 8 a turn; row by row it would be 32
    assert turns(2047, 2047, 2047, 2047) == 16
    assert turns(0, 0, 0, 0) == 1


def test_no_active_row_is_no_turn_and_finite() -> None:
    memory = Memory(layout(16))
    table = np.zeros((3, memory.width), np.int32)
    assert int(list_work(jnp.zeros(3, jnp.int32), jnp.zeros(3, bool), 4, 64).num_turns) == 0
    found, _ = attend(memory.layout, memory.arrays(), table, [None, None, None], [0, 0, 0], 1, [0, 0, 0])
    np.testing.assert_array_equal(found, np.zeros_like(found))


@pytest.mark.parametrize("num_rows", [2, 3, 8, 20])
def test_full_rows_up_to_the_last_cell_are_dense_attention(num_rows: int) -> None:
    cases = [Case(MAX_LEN if i % 2 else 1 + 60 * (i % 4), 20 + i) for i in range(num_rows)]
    memory = Memory(PoolLayout(1, 400, 16, K, D, "float32", "float32"))
    for case, row in zip(cases, decode(memory, cases), strict=True):
        np.testing.assert_allclose(row, case.dense[-1], atol=2e-6)


def test_one_token_beside_a_long_context_is_its_own_value() -> None:
    short, long = Case(1, 10), Case(250, 10)
    memory = Memory(layout(4))
    together = decode(memory, [short, long])
    np.testing.assert_array_equal(together[0], np.repeat(short.v[0], H // K, axis=0))  # softmax over one key is 1
