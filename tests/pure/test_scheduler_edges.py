"""Lines of the scheduler that only a rare turn of events depends on, each with the smallest load in which it decides something.

(p, n) is a request with p prompt tokens that generates n. Page size 1, so that pages are tokens, unless said otherwise.
"""

from typing import Any

import pytest

from jaxkv.scheduler import SchedulerConfig, State
from jaxkv.scheduler.books import Books
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished
from jaxkv.scheduler.room import may_leave
from jaxkv.scheduler.sequence import Sequence


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 2, "page_size": 1, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16, "margin_steps": 0}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def loop(num_pages: int, delay: int = 0, **changes: Any) -> FakeLoop:
    return FakeLoop(config(num_pages, **changes), delay=lambda chunk: delay)


def parks(job: FakeLoop) -> list[tuple[int, str]]:
    """Sequence and reason of every park."""
    return [(note.seq_id, note.reason) for _, note in job.notes if note.kind in ("park", "drop")]


# Replay


def test_a_chunk_of_which_only_a_part_was_lost_counts_as_replayed_for_that_part() -> None:
    """Page size 16. 1 finds 16 tokens and computes 32 more, then it loses them and the 16 are nowhere: 48 are lost, and computed again in
    chunks of 32, the second of which goes on for 16 new ones."""
    job = loop(32, page_size=16, prefix_cache=False)
    job.add(0, 20, 30, page_keys=("a",))
    job.run(until=lambda: job.tokens[0] == 1)
    job.add(1, 100, 2, page_keys=("a", "b", "c", "d", "e", "f"))
    job.run(until=lambda: job.num_cells(1) == 48)
    job.cancel(0)
    job.replay(1)
    job.run()
    assert job.tokens[1] == 2
    assert job.scheduler.counters.num_replayed_tokens == 48


def test_of_those_that_are_stuck_the_least_urgent_is_dropped_though_another_is_smaller() -> None:
    """No image fits, and whoever is refused waits. All three fill the pool, and none can go on."""
    job = loop(60, rows=3, over_budget="wait", host_budget_bytes=0, rotate="none")
    job.add(0, 20, 30, priority=-1)
    job.add(1, 8, 30, priority=0)
    job.add(2, 12, 30, priority=1)
    job.run()
    assert parks(job)[0] == (2, "stuck")
    assert job.tokens == {0: 30, 1: 30, 2: 30}


@pytest.mark.parametrize(("has_progressed", "state"), [(True, "replaying"), (True, "restoring"), (False, "decoding")])
def test_nobody_leaves_who_is_not_back_at_work_yet(has_progressed: bool, state: str) -> None:
    books = Books(config(64))
    seq = Sequence(7, 8, 10, order=0, added_at=0.0, state=State(state), num_cells=9, num_generated=2, has_progressed=has_progressed)
    books.enter_row(seq)
    seq.pages = books.pages.take(7, 10)
    assert not may_leave(books, seq)
    seq.state, seq.has_progressed = State.DECODING, True
    assert may_leave(books, seq)


def test_one_that_is_back_before_a_copy_of_it_has_landed_does_not_find_the_pages_that_the_copy_reads() -> None:
    """With `hold` a parked chunk keeps its pages until it lands. What it had is lost meanwhile, and it comes back at once: its own prompt
    pages are still held by it, on their way out, and must not be found."""
    job = loop(64, delay=30, hold=True, chunk_pages=4)
    job.add(0, 17, 12, page_keys=tuple(f"a{i}" for i in range(16)))
    job.run(until=lambda: job.tokens[0] == 3)
    job.scheduler.park(0)
    job.run(until=lambda: len(job.runner.flights) == 5)  # four chunks of 4 pages with keys, and the 3 pages behind them
    job.replay(0)
    plan = job.step()
    assert job.scheduler.state(0) is State.REPLAYING
    assert plan.prefill is not None and plan.prefill.start == 0
    assert job.scheduler.snapshot().num_pages_leaving == 19
    job.run()
    assert job.tokens == {0: 12}


# The line


def test_the_first_in_line_may_be_passed_again_after_its_next_park() -> None:
    """`max_bypass` counts for one stay in the line. (60, 40) is parked twice, and each time one of the small ones passes it."""
    job = loop(100, rows=3, resume="pass", max_bypass=1, rotate="none")
    job.add(0, 60, 40)
    job.run(until=lambda: job.tokens[0] == 2)
    for first in (1, 4):
        job.scheduler.park(0)
        job.step()
        job.add(first, 50, 60, priority=-1)  # comes in before it, and stays for long
        job.run(until=lambda first=first: first in job.noted("admit"))  # type: ignore[misc]
        for seq_id in (first + 1, first + 2):
            job.add(seq_id, 4, 4)
        job.run(until=lambda first=first: job.scheduler.state(0) is State.DECODING)  # type: ignore[misc]
        at = job.noted("admit", "restore")
        passed = at[at.index(first) + 1 : len(at) - 1 - at[::-1].index(0)]
        assert passed == [first + 1]
        job.run(until=lambda first=first: job.tokens[first + 2] == 4)  # type: ignore[misc]
        before = job.tokens[0]
        job.run(until=lambda before=before: job.tokens[0] > before)  # type: ignore[misc]
    job.run()
    assert all_finished(job.ends)


def test_letting_the_first_in_line_in_is_nobody_passing_it() -> None:
    """0 is parked and returns, is lost on its way and stands first again: still one may pass it."""
    job = loop(100, rows=3, resume="pass", max_bypass=1, rotate="none", host_budget_bytes=0, prefill_chunk=8)
    job.add(0, 60, 30)
    job.run(until=lambda: job.tokens[0] == 2)
    job.scheduler.park(0)
    job.run(until=lambda: job.scheduler.state(0) is State.REPLAYING)
    job.replay(0)
    job.add(1, 50, 60, priority=-1)
    job.add(2, 4, 4)
    job.add(3, 4, 4)
    job.run(until=lambda: job.noted("replay") == [0, 0])
    assert job.noted("admit", "replay")[:5] == [0, 0, 1, 2, 0]
    job.run()
    assert all_finished(job.ends)


# Who parks


def test_nobody_else_leaves_for_the_first_in_line_while_pages_of_those_who_left_come_back() -> None:
    """With `hold` and slow copies. (37, 20) asks for what 2 frees, but until those pages are there the others grow, and they would be too
    few. That 0 ends meanwhile nobody knows; it comes in then, and 1 has never left."""
    job = loop(130, rows=4, hold=True, delay=20, chunk_pages=64, rotate="none")
    for seq_id, prompt_len, answer in ((0, 50, 10), (1, 30, 30), (2, 26, 30)):
        job.add(seq_id, prompt_len, answer, priority=5)
    job.run(until=lambda: job.tokens[2] == 2)
    job.add(3, 37, 20)
    job.run()
    assert parks(job) == [(2, "priority")]
    assert job.tokens == {0: 10, 1: 30, 2: 30, 3: 20}


@pytest.mark.parametrize(("num_parks", "victim"), [(2, 1), (3, 2)])
def test_one_that_was_parked_as_often_as_starve_after_is_spared(num_parks: int, victim: int) -> None:
    """`starve_after` is 3: the smallest of three is parked by pressure after two parks, and not after three."""
    job = loop(120, rows=3, starve_after=3, victim="smallest", rotate="none", chunk_pages=64)
    job.add(0, 50, 60)
    job.add(1, 10, 60)
    for times in range(1, num_parks + 1):
        before = job.tokens[1]
        job.run(until=lambda before=before: job.tokens[1] > before)  # type: ignore[misc]
        assert job.scheduler.park(1) == ""
        job.run(until=lambda times=times: job.noted("restore").count(1) == times)  # type: ignore[misc]
    before = job.tokens[1]
    job.run(until=lambda: job.tokens[1] > before)
    job.add(2, 24, 60)
    job.run(until=lambda: "pressure" in [reason for _, reason in parks(job)])
    assert parks(job) == [(1, "forced")] * num_parks + [(victim, "pressure")]
    job.run()
    assert all_finished(job.ends)
