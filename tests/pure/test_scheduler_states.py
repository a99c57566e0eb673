"""Sequences with a state beside their pages, or instead of any: one chunk more in the image, and a row that is free only when it left."""

from typing import Any

import pytest

from jaxkv.scheduler import Fork, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop
from jaxkv.scheduler.images import HostLedger, Span, cut, state_span
from jaxkv.scheduler.scheduler import Scheduler


def loop(delay: int = 0, num_staging: int = 1000, **changes: Any) -> FakeLoop:
    """Two rows, eight pages of two tokens, chunks of two pages in 10 bytes, a state of 25."""
    sizes: dict[str, Any] = {"rows": 2, "num_pages": 8, "page_size": 2, "prefill_chunk": 4, "max_len": 64, "chunk_pages": 2}
    config = SchedulerConfig(**{**sizes, "chunk_bytes": 10, "state_bytes": 25, "margin_steps": 0, **changes})
    return FakeLoop(config, lambda chunk: delay, num_staging)


def parked(job: FakeLoop, seq_id: int) -> FakeLoop:
    """Hold it away until its copies have landed."""
    job.scheduler.hold(seq_id)
    job.run(50, until=lambda: job.scheduler.state(seq_id) is State.PARKED)
    return job


def test_an_image_is_its_pages_and_one_state() -> None:
    job = loop()
    job.add(0, 5, 9)
    job.run(until=lambda: job.tokens[0] == 3)
    parked(job, 0)
    assert [note.num_bytes for _, note in job.notes if note.kind == "park"] == [2 * 10 + 25]
    assert (job.scheduler.image_bytes(0), job.scheduler.snapshot().host_bytes, job.runner.host_bytes) == (45, 45, 45)
    assert job.scheduler.snapshot().sequences[0].image_pages == 4
    job.scheduler.release(0)
    job.run()
    assert (job.tokens[0], job.scheduler.snapshot().host_bytes, job.scheduler.counters.host_bytes_peak) == (9, 0, 45)


def test_a_second_park_keeps_its_full_pages_and_copies_its_state_again() -> None:
    job = loop(park_every=4)
    job.add(0, 5, 9)
    job.run()
    parks = [note for _, note in job.notes if note.kind == "park"]
    assert [(note.num_tokens, note.num_bytes, note.kept_bytes) for note in parks] == [(4, 35, 0), (8, 45, 10), (12, 55, 20)]


@pytest.mark.parametrize(("budget", "num_copied", "num_dropped"), [(44, 0, 1), (45, 1, 0)])
def test_the_state_is_part_of_what_the_budget_must_hold(budget: int, num_copied: int, num_dropped: int) -> None:
    job = loop(host_budget_bytes=budget)
    job.add(0, 5, 9)
    job.run(until=lambda: job.tokens[0] == 3)
    job.scheduler.park(0)
    job.run()
    assert (job.scheduler.counters.num_parks_copied, job.scheduler.counters.num_parks_dropped) == (num_copied, num_dropped)
    assert job.tokens[0] == 9


def test_a_spare_chunk_goes_when_a_state_needs_its_room() -> None:
    dropped: list[int] = []
    host = HostLedger(45, 10, 25, on_drop=dropped.append)
    image = host.take(1, [*cut(4, 4, 2), state_span(4)], {})
    assert image is not None and (host.held, host.in_use) == (45, 45)
    for chunk in image:
        host.send(chunk)
        host.land(chunk)
    kept = host.keep(1, image)
    assert (host.held, host.in_use, dropped, sorted(kept)) == (20, 0, [2], [0, 2])
    assert host.added([state_span(4)], kept) == 25
    assert host.take(2, [Span(0, 2, None, False), state_span(2)], {}) is not None
    assert (host.held, dropped) == (45, [2, 0])


def test_a_row_is_free_when_its_state_has_been_read_and_not_before() -> None:
    """One chunk a step: two of pages, then the state. The next one waits for the row, though pages are there at once."""
    job = loop(rows=1, chunks_per_step=1)
    job.add(0, 5, 9, priority=1)
    job.run(until=lambda: job.tokens[0] == 3)
    job.add(1, 2, 2)
    admitted = [bool(job.step().prefill) for _ in range(3)]
    assert admitted == [False, False, True]
    job.run()
    assert job.tokens == {0: 9, 1: 2}


def test_a_row_whose_state_is_held_is_free_when_the_copy_has_landed() -> None:
    job = loop(rows=1, hold=True, delay=3)
    job.add(0, 3, 9, priority=1)
    job.run(until=lambda: job.tokens[0] == 2)
    job.add(1, 2, 2)
    assert [bool(job.step().prefill) for _ in range(5)] == [False, False, False, False, True]


def test_a_row_whose_state_is_on_the_way_back_is_nobodys_until_it_came_even_after_a_cancel() -> None:
    job = loop(rows=1, delay=2)
    job.add(0, 3, 9)
    job.run(until=lambda: job.tokens[0] == 2)
    job.scheduler.park(0)
    job.run(until=lambda: job.scheduler.state(0) is State.RESTORING)
    job.cancel(0)
    job.add(1, 2, 2)
    waited = 0
    while not job.step().prefill:
        waited += 1
    assert waited == 2
    job.run()
    assert job.tokens[1] == 2


def test_a_prompt_is_parked_between_its_chunks_with_the_state_so_far() -> None:
    job = loop(park_every=1, num_pages=16)
    job.add(0, 11, 3)
    job.run()
    tokens = [note.num_tokens for _, note in job.notes if note.kind == "park"]
    assert tokens == [4, 8, 11, 12]
    assert job.scheduler.counters.num_replayed_tokens == 0


def test_a_model_of_states_alone_holds_no_pages_and_is_short_of_rows_only() -> None:
    job = loop(num_pages=0, chunk_bytes=0)
    for seq_id in range(5):
        job.add(seq_id, 20, 30)
    job.run()
    assert set(job.tokens.values()) == {30} and job.scheduler.counters.num_parks == 0
    with pytest.raises(Exception, match=r"the prompt has 65 tokens, and model.max_len allows 64"):
        job.add(9, 65, 1)
    assert job.add(10, 60, None) == 5  # the model's length still ends it


def test_a_model_of_states_alone_parks_for_a_more_urgent_one_and_its_image_is_the_state() -> None:
    job = loop(num_pages=0, chunk_bytes=0)
    job.add(0, 4, 20, priority=1)
    job.add(1, 4, 20, priority=1)
    job.run(until=lambda: job.tokens[1] == 5)
    job.add(2, 4, 3)
    job.run()
    assert set(job.noted("park")) == {1} and job.scheduler.counters.num_parks_priority == 1
    assert [note.num_bytes for _, note in job.notes if note.kind == "park"] == [25]
    assert job.tokens == {0: 20, 1: 20, 2: 3}


def test_choices_of_a_group_begin_together_whatever_the_length_of_their_prompt() -> None:
    for prompt_len in (1, 6):
        job = loop()
        for seq_id in (0, 1):
            job.add(seq_id, prompt_len, 3, group=7)
        job.run()
        assert job.tokens == {0: 3, 1: 3} and job.scheduler.counters.num_forks == 1


def test_no_pages_without_a_state_and_no_keys_with_one() -> None:
    with pytest.raises(ValueError, match="scheduler setting num_pages is 0, but must be at least 1"):
        loop(num_pages=0, state_bytes=0)
    with pytest.raises(ValueError, match="scheduler setting state_bytes is -1, but must be at least 0"):
        loop(state_bytes=-1)
    with pytest.raises(ValueError, match="got 1 page keys, allowed: 0 where a sequence has a state, which is in no page"):
        loop().add(0, 5, 9, page_keys=("a",))


def test_the_check_finds_a_row_that_is_lost() -> None:
    job = loop()
    job.add(0, 5, 9)
    job.step()
    scheduler: Scheduler = job.scheduler
    scheduler._books.free_rows.pop()
    with pytest.raises(AssertionError, match="rows"):
        scheduler.check()


@pytest.mark.parametrize("num_pages", [0, 16])
def test_choices_begin_together_on_copies_of_one_state(num_pages: int) -> None:
    """Prompt 7 in pages of 2: three full pages that all hold, and one that is copied; or only the state of row 0."""
    job = loop(rows=4, num_pages=num_pages)
    for seq_id in range(3):
        job.add(seq_id, 7, 5, group=0)
    job.step()
    chunk = job.step().prefill
    assert chunk is not None
    if num_pages:
        owners = job.scheduler.page_owners()
        assert owners.count(0) == 4 and owners.count(1) == owners.count(2) == 1
        assert [fork.row for fork in chunk.forks] == [1, 2]
    else:
        assert chunk.forks == (Fork(1, 1, None, None), Fork(2, 2, None, None))
    assert job.tokens == {0: 1, 1: 1, 2: 1}
    assert [row.seq_id for row in job.step().decode] == [0, 1, 2]
    job.run()
    assert (job.tokens, job.scheduler.counters.num_forks) == ({0: 5, 1: 5, 2: 5}, 2)


@pytest.mark.parametrize("changes", [{}, {"hold": True}, {"host_budget_bytes": 0}, {"park_every": 2}], ids=str)
@pytest.mark.parametrize("num_pages", [0, 6])
def test_choices_on_copies_of_one_state_leave_and_return_each_with_its_own(num_pages: int, changes: dict[str, Any]) -> None:
    job = loop(2, rows=3, num_pages=num_pages, **{"park_every": 3, **changes})
    for seq_id in range(5):
        job.add(seq_id, 4, 7, group=0)
    job.run()
    assert job.tokens == dict.fromkeys(range(5), 7)
    assert job.scheduler.counters.num_parks >= 5
    assert job.scheduler.counters.num_forks == 4
