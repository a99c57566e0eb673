"""Contexts that shift, as the scheduler sees them: which pages leave, when, what it never costs. The fake runner checks every cell."""

import random
from typing import Any

import pytest

from jaxkv.scheduler import BadShift, ContextShift, DoesNotFit, Scheduler, SchedulerConfig, Shift, State, TableUpdate, whole_pages
from jaxkv.scheduler.fake_loop import FakeLoop


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 2, "page_size": 1, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def loop(num_pages: int, delay: int = 0, **changes: Any) -> FakeLoop:
    return FakeLoop(config(num_pages, **changes), delay=lambda chunk: delay)


def test_a_full_context_drops_its_pages_before_the_step_that_would_write_past_it() -> None:
    """Page size 4, 14 tokens, 4 kept, 4 dropped: pages 1 | 2 | 3 | 4 become 1 | 3 | 4, and the next token is written to position 10."""
    job = loop(8, page_size=4)
    job.add(0, 5, 20, shift=ContextShift(14, 4, 4))
    job.run(until=lambda: job.num_cells(0) == 14)
    assert job.scheduler.page_owners() == (0, 0, 0, 0, None, None, None, None)
    plan = job.step()
    assert plan.shifts == (Shift(0, 4, 4, sources=(3, 4), pages=(3, 4)),)
    assert plan.tables == (TableUpdate(0, 1, (3, 4)),)
    assert [row.position for row in plan.decode] == [10]
    assert job.scheduler.page_owners() == (0, None, 0, 0, None, None, None, None)
    assert job.noted("shift") == [0]
    job.run()
    assert job.tokens == {0: 20}
    assert job.scheduler.counters.num_shifts == 3  # 24 cells computed: at 14, at 14 + 4, at 14 + 8 with 2 left to go


def test_a_sequence_that_ends_with_its_context_full_never_shifts() -> None:
    job = loop(16)
    job.add(0, 5, 12, shift=ContextShift(16, 0, 8))
    job.run()
    assert job.tokens == {0: 12}  # the last token needs no cell: 5 + 12 - 1 == 16
    assert job.scheduler.counters.num_shifts == 0
    job.add(1, 5, 13, shift=ContextShift(16, 0, 8))
    job.run()
    assert job.tokens[1] == 13
    assert job.scheduler.counters.num_shifts == 1


@pytest.mark.parametrize("prompt_len", [1, 7, 8, 15, 16])
def test_max_tokens_alone_ends_the_answer_however_small_the_pool(prompt_len: int) -> None:
    job = loop(4, page_size=4, prefill_chunk=8)
    assert job.add(0, prompt_len, 500, shift=ContextShift(16, 4, 8)) == 500
    job.run()
    assert job.tokens == {0: 500}
    assert job.ends == {0: State.FINISHED}
    assert job.scheduler.counters.num_parks == 0


def test_without_max_tokens_it_goes_on_until_it_stops_by_itself() -> None:
    job = loop(16)
    assert job.add(0, 3, None, stops_after=777, shift=ContextShift(16, 0, 8)) is None
    job.run()
    assert job.tokens == {0: 777}


@pytest.mark.parametrize("changes", [{}, {"hold": True}, {"park_every": 1}, {"park_seed": 3}, {"planner": False}], ids=str)
@pytest.mark.parametrize("delay", [0, 3])
def test_contexts_that_shift_and_others_share_a_small_pool(delay: int, changes: dict[str, Any]) -> None:
    job = loop(64, delay, rows=4, chunk_pages=4, margin_steps=2, **changes)
    for seq_id in range(6):
        job.add(seq_id, 10 + seq_id, 150, shift=None if seq_id == 3 else ContextShift(40 + seq_id, seq_id % 3, 7 + seq_id))
        job.step()
    job.run()
    assert job.tokens == {0: 150, 1: 150, 2: 150, 3: 52, 4: 150, 5: 150}  # 13 + 52 - 1 == 64: the pool ends the one that does not shift
    assert job.scheduler.counters.num_shifts > 60
    assert job.scheduler.counters.num_parks > 0


def test_the_pages_a_shift_drops_are_free_for_others_in_the_same_step() -> None:
    """Two at 8 of 8 cells in a pool of 16: both need a cell in the next step, and the shift of the first makes room for both."""
    job = loop(16, margin_steps=0)
    job.add(0, 2, 40, shift=ContextShift(8, 0, 4))
    job.add(1, 2, 9)
    job.run()
    assert job.tokens == {0: 40, 1: 9}
    assert job.scheduler.counters.num_parks == 0


def test_a_forced_park_comes_due_after_a_shift_as_before_it() -> None:
    job = loop(16, park_every=4)
    job.add(0, 4, 41, shift=ContextShift(16, 0, 8))
    job.run()
    assert job.scheduler.counters.num_parks_forced == 10


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, 0, None), ContextShift(200, 0, 112)),  # half of 200 is 100, seven pages
        ((160, 0, None), ContextShift(160, 0, 80)),
        ((160, 1, None), ContextShift(160, 16, 80)),  # half of 144 is 72
        ((160, 32, 1), ContextShift(160, 32, 16)),
        ((40, 16, None), ContextShift(40, 16, 16)),
        ((47, 0, 31), ContextShift(47, 0, 32)),
        ((16, 0, None), ContextShift(16, 0, 16)),
    ],
)
def test_kept_and_dropped_tokens_are_rounded_up_to_whole_pages(asked: tuple[int | None, int, int | None], expected: ContextShift) -> None:
    assert whole_pages(config(13, page_size=16, max_len=200), *asked) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((201, 0, None), "context_len: got 201, allowed: 1 to 200, which is model.max_len"),
        ((None, 0, None), "context_len: got 200, and the pool holds 192 tokens: lower it, or raise pool.tokens"),
        ((0, 0, None), "context_len: got 0, allowed: 1 to 200, which is model.max_len"),
        (
            (15, 0, None),
            "n_keep: got 0 tokens in whole pages of 16, which leaves none to drop of context_len 15; allowed: 0 to 0",
        ),
        (
            (47, 17, None),
            "n_keep: got 32 tokens in whole pages of 16, which leaves none to drop of context_len 47; allowed: 0 to 16",
        ),
        (
            (47, 16, 17),
            "n_discard: got 32 tokens in whole pages of 16, allowed: 16 to 16, what fills pages in context_len 47 after 16 kept tokens",
        ),
        (
            (64, 0, 0),
            "n_discard: got 0 tokens in whole pages of 16, allowed: 16 to 64, what fills pages in context_len 64 after 0 kept tokens",
        ),
    ],
)
def test_a_shift_that_cannot_work_is_refused_with_what_is_allowed(asked: tuple[int | None, int, int | None], message: str) -> None:
    with pytest.raises(BadShift) as caught:
        whole_pages(config(12, page_size=16, max_len=200), *asked)
    assert str(caught.value) == message
    assert message.startswith(caught.value.field)


def test_the_scheduler_takes_whole_pages_only() -> None:
    with pytest.raises(BadShift, match="n_discard: got 3 tokens in whole pages of 2"):
        Scheduler(config(12, page_size=2)).add(0, 3, 3, 0.0, shift=ContextShift(12, 0, 3))


def test_a_prompt_longer_than_its_context_is_refused() -> None:
    with pytest.raises(DoesNotFit) as caught:
        Scheduler(config(12)).add(0, 9, 3, 0.0, shift=ContextShift(8, 0, 4))
    assert str(caught.value) == "the prompt has 9 tokens, and context_len allows 8: shorten the prompt or raise context_len"


@pytest.mark.parametrize("victim", ["smallest", "largest"])
@pytest.mark.parametrize(("num_pages", "num", "length"), [(256, 2, 700), (384, 3, 600)])
def test_generations_without_end_take_turns_by_rotation_and_all_finish(num_pages: int, num: int, length: int, victim: str) -> None:
    """A step of the fake loop is a second: whoever waited ten has one leave that has shifted and had its ten. Contexts of 200 in 256."""
    job = loop(num_pages, rows=4, rotate_after_s=10.0, victim=victim)
    for seq_id in range(num):
        job.add(seq_id, 8, length, shift=ContextShift(200, 0, 10))
    job.run(until=lambda: min(job.tokens.values()) > 300)
    assert max(job.tokens.values()) < 540  # none runs away
    assert job.scheduler.counters.num_rotations > 10
    job.run()
    assert job.tokens == dict.fromkeys(range(num), length)
    assert all(job.scheduler.state(seq_id) is State.FINISHED for seq_id in range(num))


def test_without_rotation_the_first_of_two_that_do_not_fit_together_goes_on_alone() -> None:
    job = loop(256, rotate="none")
    for seq_id in range(2):
        job.add(seq_id, 8, 2000, shift=ContextShift(200, 0, 10))
    job.run(until=lambda: job.tokens[0] == 1000)
    assert job.tokens[1] < 200


def test_a_budget_of_one_image_lets_nobody_rotate_and_says_so_once_per_park() -> None:
    """One away fills the budget, so nobody may leave for it; it comes back when the other has ended."""
    job = loop(256, chunk_pages=256, chunk_bytes=16, host_budget_bytes=16, rotate_after_s=10.0)
    for seq_id in range(2):
        job.add(seq_id, 8, 800, shift=ContextShift(200, 0, 10))
    job.run()
    assert job.tokens == {0: 800, 1: 800}
    assert job.scheduler.counters.num_rotations == 0
    assert (job.noted("park"), job.noted("park_refused")) == ([1], [0])


def test_one_that_shifts_comes_back_where_there_is_just_room_for_its_next_token() -> None:
    """8 cells and one more beside 10 and one more, in 20."""
    job = loop(20, margin_steps=0)
    job.add(0, 4, 40, shift=ContextShift(16, 0, 4))
    job.run(until=lambda: job.num_cells(0) == 8)
    job.scheduler.hold(0)
    job.add(1, 4, 12)
    job.run(until=lambda: job.num_cells(1) == 10)
    job.scheduler.release(0)
    plan = job.step()
    assert [note.seq_id for note in plan.notes if note.kind == "restore"] == [0]
    job.run()
    assert job.tokens == {0: 40, 1: 12}


def test_after_a_shift_only_the_kept_tokens_images_save_a_copy() -> None:
    """Chunks of 4 tokens; 14 cells make three lasting ones, of which the shift leaves the first as it was."""
    job = loop(32, chunk_pages=4)
    job.add(0, 8, 60, shift=ContextShift(16, 4, 4))

    def park_and_return() -> int:
        before = job.scheduler.counters.num_kept_hits
        job.scheduler.park(0)
        job.step()
        job.run(until=lambda: job.scheduler.state(0) is State.DECODING)
        return job.scheduler.counters.num_kept_hits - before

    job.run(until=lambda: job.num_cells(0) == 13)
    assert park_and_return() == 0
    assert park_and_return() == 3
    job.run(until=lambda: job.scheduler.counters.num_shifts == 1)
    assert park_and_return() == 1
    assert park_and_return() == 3
    job.run()
    assert job.tokens == {0: 60}


# Pages that others hold too

KEYS = tuple(f"page {index}" for index in range(10))


def test_a_page_that_another_holds_is_copied_as_it_is_turned() -> None:
    """Page size 4. Both hold prompt pages 1-5; the first drops 1 and 2 at 24 tokens, so 3-5 are copied to 8-10 and its own 6 is turned.
    Since 1 and 2 stay the other's, 11 is taken at once for the next token."""
    job = loop(16, page_size=4)
    job.add(0, 21, 20, page_keys=KEYS[:5], shift=ContextShift(24, 0, 8))
    job.run(until=lambda: job.tokens[0] == 1)
    job.add(1, 21, 20, page_keys=KEYS[:5])
    job.run(until=lambda: job.num_cells(0) == 24)
    assert job.scheduler.cached_tokens(1) == 20
    plan = job.step()
    assert plan.shifts == (Shift(0, 0, 8, sources=(3, 4, 5, 6), pages=(8, 9, 10, 6)),)
    assert plan.tables[0] == TableUpdate(0, 0, (8, 9, 10, 6, 11))
    job.run()
    assert job.tokens == {0: 20, 1: 20}
    assert job.scheduler.counters.num_parks == 0


def test_a_page_that_only_the_cache_knows_is_turned_in_place_and_forgotten_there() -> None:
    job = loop(6, page_size=4)
    job.add(0, 21, 8, page_keys=KEYS[:5], shift=ContextShift(24, 4, 4))
    job.run(until=lambda: job.scheduler.counters.num_shifts == 1)
    job.run()
    view = job.scheduler.snapshot()
    assert (view.num_pages_free, view.num_pages_cached) == (6, 1)  # the kept page is there still; the dropped one was needed
    job.add(1, 21, 1, page_keys=KEYS[:5])
    job.run()
    assert job.scheduler.counters.cached_tokens == 4


def test_a_shift_that_lacks_pages_for_its_copies_waits_until_another_has_parked() -> None:
    """Ten pages: both hold five prompt pages and fill their own beside them, when the first needs three copies and frees none."""
    job = loop(10, page_size=4, margin_steps=0)
    job.add(0, 21, 100, page_keys=KEYS[:5], shift=ContextShift(24, 0, 8))
    job.run(until=lambda: job.tokens[0] == 1)
    job.add(1, 21, 12, page_keys=KEYS[:5])
    job.add(2, 8, 9)
    job.run()
    assert job.tokens == {0: 100, 1: 12, 2: 9}
    assert job.scheduler.counters.num_last_resorts == 0


@pytest.mark.parametrize("budget", [0, 16])
def test_one_whose_pages_for_a_shift_come_back_in_this_very_plan_shifts_in_the_next(budget: int) -> None:
    """Siblings whose prompt of 7 fills their context, in 8 pages: the first lacks pages for copies until the other, which
    has computed nothing, is parked, and is then alone. Nobody can run in that step, and nobody is stuck."""
    job = loop(8, host_budget_bytes=budget, chunk_pages=2, prefill_chunk=1)
    for seq_id, num in ((0, 5), (1, 7)):
        job.add(seq_id, 7, num, page_keys=KEYS[:6], shift=ContextShift(7, 0, 1))
    job.run()
    assert job.tokens == {0: 5, 1: 7}
    assert (job.noted("park"), job.noted("drop"), job.scheduler.counters.num_parks_stuck) == ([1], [], 0)
    assert [(step, note.kind, note.seq_id) for step, note in job.notes][2:4] == [(7, "park", 1), (8, "shift", 0)]


def test_shared_pages_save_nothing_to_one_that_comes_back_with_a_full_context() -> None:
    """It would have to copy them at once: let in on their account it filled the room, and was dropped again without a token."""
    job = loop(11, rows=3, host_budget_bytes=0, margin_steps=0, prefill_chunk=4, rotate="none")
    job.add(0, 8, 12, page_keys=KEYS[:7], shift=ContextShift(11, 0, 1))
    job.add(1, 8, 6, page_keys=KEYS[:7], shift=ContextShift(8, 0, 1))
    job.run()
    assert job.tokens == {0: 12, 1: 6}
    assert (job.noted("drop"), job.noted("replay")) == ([1], [1])


def test_pages_that_another_is_about_to_move_save_nothing_to_one_that_comes_in() -> None:
    """1 and 2 found 6 pages, and 1 has filled its context when 2 finds 4 more: 1 lacks pages for copies of all that it would move, so 2,
    which has computed nothing, is parked. Let in again on account of those pages in the same step, it took the room from 1, which left."""
    job = loop(21, rows=3, margin_steps=0, rotate="none")
    job.add(9, 7, 1, page_keys=KEYS[:6])
    job.run()
    job.add(0, 3, 40, priority=-1, shift=ContextShift(4, 0, 1))
    job.run(until=lambda: job.tokens[0] == 2)
    job.add(1, 11, 5, page_keys=KEYS[:10], shift=ContextShift(11, 0, 1))
    job.add(2, 11, 2, page_keys=KEYS[:10])
    job.run()
    assert job.tokens == {9: 1, 0: 40, 1: 5, 2: 2}
    assert job.noted("admit", "park", "restore", "last_resort") == [9, 0, 1, 2, 2, 2]
    assert job.scheduler.counters.num_last_resorts == 0


def run_siblings(seed: int) -> int:
    """Six sequences that begin alike and mostly shift, in a small pool; returns how many pages were copied for it."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    job = loop(
        rng.choice([24, 36, 60, 100]),
        delay=rng.choice([0, 2]),
        page_size=size,
        rows=rng.randint(2, 5),
        prefill_chunk=4 * size,
        chunk_pages=rng.choice([2, 5]),
        margin_steps=rng.choice([0, 2]),
        hold=rng.random() < 0.5,
        planner=rng.random() < 0.7,
        park_seed=rng.choice([None, seed]),
        host_budget_bytes=rng.choice([None, None, 16 * 24]),
    )
    num_shared, num_copied = rng.randint(4, 10), 0
    for seq_id in range(6):
        shift = ContextShift(20 * size + rng.randint(0, 3), rng.choice([0, 2]) * size, rng.randint(1, 4) * size)
        prompt_len = num_shared * size + rng.randint(1, 3 * size)
        job.add(seq_id, prompt_len, rng.randint(1, 80 * size), page_keys=KEYS[:num_shared], shift=rng.choice([None, shift]))
        for _ in range(rng.choice([0, 0, 7])):
            job.step()
    while not job.scheduler.is_idle and job.num_steps < 20_000:
        shifts = job.step().shifts
        num_copied += sum(source != page for shift in shifts for source, page in zip(shift.sources, shift.pages, strict=True))
    assert job.scheduler.is_idle
    assert all(job.tokens[seq_id] == limit for seq_id, limit in job.limits.items() if job.ends[seq_id] is State.FINISHED)
    assert {seq_id for seq_id, state in job.ends.items() if state is not State.FINISHED} == set(job.noted("over_budget"))
    return num_copied


def test_siblings_that_shift_in_a_small_pool_read_what_they_would_have_computed() -> None:
    num_copied = [run_siblings(seed) for seed in range(24)]
    assert sum(num_copied) > 30
