"""Models some of whose layers see a window: these have pages of their own, as many as all rows can hold, and of each window only."""

from dataclasses import replace
from typing import Any

import pytest

from jaxkv.scheduler import BadShift, ContextShift, Scheduler, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished
from jaxkv.scheduler.images import HostLedger, Span, cut, near_spans

# Window 5 in pages of 2, chunks of 4: a row holds at most 6 pages of the layers with a window
CONFIG = SchedulerConfig(
    rows=2, num_pages=40, page_size=2, prefill_chunk=4, max_len=60, chunk_pages=2, chunk_bytes=10, margin_steps=0,
    near_window=5, near_pages=12, near_bytes=3,
)  # fmt: skip


def held_near(loop: FakeLoop) -> int:
    near = loop.scheduler._books.near
    return near.num_pages - near.num_free


def keys(num: int, name: str = "a") -> tuple[str, ...]:
    return tuple(f"{name}{index}" for index in range(num))


def test_pages_of_layers_with_a_window_go_as_it_moves_and_the_others_stay() -> None:
    loop = FakeLoop(CONFIG)
    loop.add(0, 9, 40)
    seen = []
    while not loop.ends:
        loop.step()
        if not loop.ends:
            (view,) = loop.scheduler.snapshot().sequences
            seen.append((view.num_pages, held_near(loop)))
    # Chunks end at cells 4, 8 and 9, then tokens: what a token sees are at most 3 pages
    assert seen[:7] == [(2, 2), (4, 4), (5, 3), (5, 3), (6, 3), (6, 3), (7, 3)]
    assert max(near for _, near in seen) == 4 and seen[-1][0] == 24


def test_an_image_has_all_pages_of_one_kind_and_the_windows_of_the_other() -> None:
    assert near_spans(9, 3, 5) == [Span(5, 1, None, False, True), Span(6, 3, None, False, True)]
    loop = FakeLoop(CONFIG)
    loop.add(0, 9, 40)
    loop.run(until=lambda: loop.tokens[0] == 16)  # 24 cells: pages 0 to 11, and of the others 10 and 11
    loop.scheduler.hold(0)
    loop.run(until=lambda: loop.scheduler.state(0) is State.PARKED)
    (view,) = loop.scheduler.snapshot().sequences
    assert (view.image_pages, loop.scheduler.image_bytes(0), loop.runner.host_bytes) == (12, 6 * 10 + 3, 63)
    assert held_near(loop) == 0
    loop.scheduler.release(0)
    loop.run()
    assert loop.tokens == {0: 40}


def test_guesses_have_cells_of_both_kinds_for_one_step() -> None:
    """3 guesses in pages of 2: a page of each kind is lent, and the window's share of a row is what it was."""
    loop = FakeLoop(replace(CONFIG, num_draft=3))
    loop.runner.num_true = lambda row: 1
    loop.add(0, 9, 40)
    widths = []
    while not loop.ends:
        plan = loop.step()
        if plan.decode and not loop.ends:
            (view,) = loop.scheduler.snapshot().sequences
            widths.append(plan.decode[0].num_cells)
            assert held_near(loop) <= 5 and view.num_pages <= -(-(view.num_cells + 3) // 2)
    assert set(widths[:-2]) == {4} and len(widths) < 25
    loop.run()
    assert held_near(loop) == 0


def test_host_memory_counts_both_kinds_and_keeps_only_those_that_last() -> None:
    host = HostLedger(26, 10, 0, 3)
    image = host.take(1, [*cut(4, 4, 2), *near_spans(4, 2, 0)], {})
    assert image is not None and (host.held, host.in_use) == (26, 26)
    for chunk in image:
        host.send(chunk)
        host.land(chunk)
    kept = host.keep(1, image)
    assert (sorted(kept), host.held, host.in_use) == ([0, 2], 20, 0)
    assert host.added([*cut(4, 4, 2), *near_spans(4, 2, 0)], kept) == 26


@pytest.mark.parametrize(
    "changes",
    [
        {"park_every": 1},
        {"park_every": 3, "host_budget_bytes": 0},
        {"park_every": 1, "hold": True, "chunks_per_step": 1},
        {"num_pages": 24, "margin_steps": 2, "hold": True},
    ],
)
def test_whatever_happens_all_come_to_their_end(changes: dict[str, Any]) -> None:
    loop = FakeLoop(replace(CONFIG, **changes), delay=lambda chunk: chunk.index % 4)
    for seq_id in range(5):
        loop.add(seq_id, 7 + 4 * seq_id, 20)
    loop.run()
    assert all_finished(loop.ends) and set(loop.tokens.values()) == {20}
    assert loop.scheduler.counters.num_parks > 0 and held_near(loop) == 0


def test_nobody_comes_in_while_copies_of_those_who_left_hold_a_rows_share() -> None:
    loop = FakeLoop(replace(CONFIG, hold=True, chunks_per_step=100), delay=lambda chunk: 40)
    for seq_id in range(3):  # two rows: the third comes when another leaves
        loop.add(seq_id, 12, 20)
    for seq_id in range(3):
        while loop.tokens[seq_id] < 4:
            loop.step()
        loop.scheduler.hold(seq_id)
    loop.step()
    assert held_near(loop) == 9
    loop.add(3, 3, 2)
    loop.step()
    assert loop.scheduler.state(3) is State.WAITING
    loop.run(until=lambda: loop.tokens[3] == 1)
    assert held_near(loop) < 9
    for seq_id in range(3):
        loop.scheduler.release(seq_id)
    loop.run()
    assert loop.tokens == {0: 20, 1: 20, 2: 20, 3: 2}


def test_a_prompt_is_found_as_far_as_pages_of_both_kinds_are_there() -> None:
    loop = FakeLoop(CONFIG)
    loop.add(0, 19, 1, page_keys=keys(9))
    loop.run()
    loop.add(1, 19, 3, page_keys=(*keys(8), "b8"))  # pages 6 and 7 of the others are what its next token sees
    loop.run()
    assert loop.scheduler.counters.cached_tokens == 16
    for seq_id in (2, 3):  # 40 tokens each: the cached pages of the window's group are others' now
        loop.add(seq_id, 20, 20)
    loop.run()
    loop.add(4, 19, 3, page_keys=keys(9))
    loop.run()
    assert loop.scheduler.counters.cached_tokens == 16


def test_choices_that_begin_together_share_both_kinds() -> None:
    loop = FakeLoop(replace(CONFIG, rows=3, near_pages=18))
    for seq_id in range(3):
        loop.add(seq_id, 17, 9, page_keys=keys(8), group=0)
    loop.run()
    assert (loop.scheduler.counters.num_forks, loop.tokens) == (2, {0: 9, 1: 9, 2: 9})


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(BadShift, match="context_shift: got true, but the layers with a window keep no more than that here"):
        Scheduler(CONFIG).add(0, 3, 4, 0.0, shift=ContextShift(10, 0, 2))
    with pytest.raises(ValueError, match="scheduler setting near_pages is 11, but 2 rows need at least 12"):
        Scheduler(replace(CONFIG, near_pages=11))
    for changes in ({"near_window": None}, {"window": 3}, {"state_bytes": 9}):
        with pytest.raises(ValueError, match="near_pages are for models some of whose layers have a window, without states"):
            Scheduler(replace(CONFIG, **changes))
