"""Models whose every layer sees a window only: pages that fall out of it are given back, and what counts is how many are held at once."""

import itertools
from dataclasses import replace

import pytest

from jaxkv.scheduler import DoesNotFit, Plan, Scheduler, SchedulerConfig, State, pool_cells
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished
from jaxkv.scheduler.images import Span, cut
from tests.pure.windows import longest_answer, longest_prompt

# Window 5 in pages of 2: a token sees 3 pages at most, a chunk of 4 with its window lies in 4
SMALL = SchedulerConfig(
    rows=3, num_pages=6, page_size=2, prefill_chunk=4, max_len=100, window=5, chunk_pages=2, chunk_bytes=10, margin_steps=0
)  # fmt: skip


def pages_held(loop: FakeLoop, seq_id: int) -> tuple[int, int]:
    """Of a sequence: pages held, and pages gone."""
    return next((view.num_pages, view.num_gone) for view in loop.scheduler.snapshot().sequences if view.seq_id == seq_id)


def test_what_is_held_at_most_is_what_trying_all_prompts_finds() -> None:
    shapes = itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 5, 9), (1, 2, 3, 4, 5, 7, 9))
    for size, chunk, window, num_pages in shapes:
        config = SchedulerConfig(rows=1, num_pages=num_pages, page_size=size, prefill_chunk=chunk, max_len=30, window=window)
        found = min(30, pool_cells(config, chunk)), min(30, pool_cells(config, 1))
        assert found == (longest_prompt(config), longest_answer(config)), config


def test_a_sequence_holds_the_pages_of_its_window_however_long_it_is() -> None:
    loop = FakeLoop(SMALL)
    assert loop.add(0, 9, None) == 92  # to model.max_len, though the pool has 12 cells
    seen = []
    while not loop.ends:
        loop.step()
        if not loop.ends:
            seen.append(pages_held(loop, 0))
    # Chunks end at cells 4, 8, 9: pages 0-1, 0-3, 1-4 (cells 4 to 8 and what they see). Then a page goes with every second token.
    assert seen[:8] == [(2, 0), (4, 0), (3, 2), (3, 2), (3, 3), (3, 3), (3, 4), (3, 4)]
    assert max(num for num, _ in seen) == 4
    assert loop.tokens[0] == 92


def test_a_prompt_beyond_the_pool_is_taken_where_the_pool_holds_window_and_chunk_and_refused_where_not() -> None:
    assert Scheduler(replace(SMALL, num_pages=4)).add(0, 100, None, 0.0) == 1
    with pytest.raises(DoesNotFit, match=r"the prompt has 101 tokens, and model.max_len allows 100"):
        Scheduler(replace(SMALL, num_pages=4)).add(0, 101, None, 0.0)
    few = replace(SMALL, num_pages=3)  # enough for tokens one by one, not for chunks
    with pytest.raises(DoesNotFit, match=r"the prompt has 7 tokens, and pool.tokens allows 6"):
        Scheduler(few).add(0, 7, None, 0.0)
    loop = FakeLoop(few)
    assert loop.add(0, 6, None) == 95
    loop.run()
    assert (loop.ends, loop.tokens) == ({0: State.FINISHED}, {0: 95})
    assert Scheduler(replace(SMALL, num_pages=2)).add(0, 3, None, 0.0) == 2  # 4 cells in all


def test_three_that_are_each_longer_than_the_pool_run_beside_each_other() -> None:
    loop = FakeLoop(replace(SMALL, num_pages=9))
    for seq_id in range(3):
        loop.add(seq_id, 20, 40)
    loop.run()
    assert all_finished(loop.ends) and loop.tokens == {0: 40, 1: 40, 2: 40}
    assert loop.scheduler.counters.num_parks == 0


def test_an_image_has_the_pages_that_are_held_and_no_others() -> None:
    assert cut(9, 8, 3, ("a", "b", "c", "d"), 5) == [Span(5, 2, None, False), Span(7, 2, None, False)]
    assert cut(9, 8, 3, (), 3) == [Span(3, 3, None, True), Span(6, 3, None, False)]
    loop = FakeLoop(replace(SMALL, num_pages=12, keep_images=False))
    loop.add(0, 20, 40)
    loop.run(until=lambda: loop.tokens[0] == 5)  # 24 cells: the next token sees cells 20 to 24, so pages 10 and 11 are there
    loop.scheduler.hold(0)
    loop.run(until=lambda: loop.scheduler.state(0) is State.PARKED)
    (view,) = loop.scheduler.snapshot().sequences
    assert (view.image_pages, loop.scheduler.image_bytes(0), loop.runner.host_bytes) == (2, 10, 10)
    loop.scheduler.release(0)
    loop.run()
    assert loop.tokens == {0: 40}


def test_parked_at_every_token_and_computed_again_every_time_it_goes_on() -> None:
    for changes in ({"park_every": 1}, {"park_every": 3, "host_budget_bytes": 0}, {"park_every": 1, "hold": True}):
        loop = FakeLoop(replace(SMALL, **changes), delay=lambda chunk: chunk.index % 3)
        for seq_id in range(4):
            loop.add(seq_id, 7 + 5 * seq_id, 20)
        loop.run()
        assert all_finished(loop.ends) and set(loop.tokens.values()) == {20}
        assert loop.scheduler.counters.num_parks > 20


def test_a_replay_goes_on_in_the_pages_that_it_has_and_asks_for_no_other() -> None:
    loop = FakeLoop(replace(SMALL, num_pages=7))
    loop.add(0, 20, 30)
    loop.run(until=lambda: loop.tokens[0] == 10)
    loop.replay(0)
    loop.add(1, 6, 60)  # takes what is free, and grows
    plans: list[Plan] = []
    while loop.scheduler.state(0) in (State.PARKED, State.REPLAYING):
        plans.append(loop.step())
        if loop.scheduler.state(0) is State.REPLAYING:
            assert sum(pages_held(loop, 0)) * 2 >= loop.num_cells(0)
            assert pages_held(loop, 0)[0] == 4
    tables = [update for plan in plans for update in plan.tables if update.row == 0]
    assert len({page for update in tables for page in update.pages}) == 4
    loop.run()
    assert loop.tokens == {0: 30, 1: 60}


def keys(num: int, name: str = "a") -> tuple[str, ...]:
    return tuple(f"{name}{index}" for index in range(num))


def test_a_prompt_is_found_where_the_pages_of_its_window_are_there_though_the_first_are_not() -> None:
    loop = FakeLoop(SMALL)
    loop.add(0, 19, 1, page_keys=keys(9))
    loop.run()
    assert loop.scheduler.snapshot().num_pages_cached == 5  # the last ones that have a key: 4 to 8
    loop.add(1, 19, 3, page_keys=keys(9))
    loop.run()
    assert (loop.scheduler.counters.cached_tokens, loop.tokens[1]) == (18, 3)


def test_a_prompt_is_not_found_where_a_page_of_its_window_is_missing() -> None:
    loop = FakeLoop(replace(SMALL, num_pages=12))
    loop.add(0, 19, 1, page_keys=keys(9))
    loop.run()
    loop.add(1, 19, 3, page_keys=(*keys(8), "b8"))  # its 9th page is another's: 16 tokens are found
    loop.run()
    assert loop.scheduler.counters.cached_tokens == 16
    loop.add(2, 19, 3, page_keys=(*keys(7), "c7", "c8"))
    loop.run()
    assert loop.scheduler.counters.cached_tokens == 16 + 14
    loop.add(3, 19, 3, page_keys=keys(9, "d"))
    loop.run()
    assert loop.scheduler.counters.cached_tokens == 16 + 14


def test_choices_of_one_prompt_begin_together_behind_pages_that_are_gone() -> None:
    loop = FakeLoop(replace(SMALL, num_pages=12))
    for seq_id in range(3):
        loop.add(seq_id, 17, 9, page_keys=keys(8), group=0)
    loop.run()
    assert (loop.scheduler.counters.num_forks, loop.tokens) == (2, {0: 9, 1: 9, 2: 9})


def test_a_context_that_shifts_keeps_what_a_shift_may_bring_into_sight() -> None:
    from jaxkv.scheduler import ContextShift

    loop = FakeLoop(replace(SMALL, num_pages=8))
    loop.add(0, 6, 40, shift=ContextShift(10, 4, 4))
    seen = []
    while not loop.ends:
        loop.step()
        seen += [view.num_gone for view in loop.scheduler.snapshot().sequences]
    assert (loop.tokens[0], set(seen)) == (40, {0})


def test_a_window_below_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="scheduler setting window is 0, but must be at least 1"):
        Scheduler(replace(SMALL, window=0))
