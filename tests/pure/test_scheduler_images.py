"""Images that stay: what the next park does not copy, what goes when room is needed, what fails together."""

from typing import Any

import pytest

from jaxkv.scheduler import Outcome, Scheduler, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished


def config(**changes: Any) -> SchedulerConfig:
    """Pages of one token, chunks of four pages and ten bytes, room for everybody: who parks was told to."""
    sizes: dict[str, Any] = {"rows": 3, "num_pages": 200, "page_size": 1, "prefill_chunk": 32, "max_len": 1000, "chunk_pages": 4}
    return SchedulerConfig(**{**sizes, "chunk_bytes": 10, **changes})


def park_at(job: FakeLoop, seq_id: int, num_cells: int) -> tuple[int, int]:
    """Park it with so many cells and wait until it is back; its image's bytes, and those of them that were not copied."""
    job.run(until=lambda: job.num_cells(seq_id) == num_cells)
    assert job.scheduler.park(seq_id) == ""
    job.run(until=lambda: job.num_cells(seq_id) == num_cells + 1)
    note = [note for _, note in job.notes if note.kind == "park" and note.seq_id == seq_id][-1]
    return note.num_bytes, note.kept_bytes


@pytest.mark.parametrize("hold", [False, True], ids=["staged", "hold"])
def test_the_next_park_copies_only_what_is_new(hold: bool) -> None:
    job = FakeLoop(config(hold=hold), delay=lambda chunk: 2)
    job.add(0, 10, 20)
    assert park_at(job, 0, 10) == (30, 0)
    assert job.scheduler.snapshot().host_bytes == 20  # the third chunk has two full pages of four: it will not be the same again
    assert park_at(job, 0, 13) == (40, 20)
    assert job.scheduler.snapshot().host_bytes == 30
    assert park_at(job, 0, 17) == (50, 30)
    assert (job.scheduler.counters.num_kept_hits, job.scheduler.counters.kept_bytes_saved) == (5, 50)
    job.run()
    assert (job.tokens[0], job.scheduler.snapshot().host_bytes, job.runner.host_bytes) == (20, 0, 0)


def test_nothing_stays_where_that_is_switched_off() -> None:
    job = FakeLoop(config(keep_images=False))
    job.add(0, 10, 20)
    assert park_at(job, 0, 10) == (30, 0)
    assert job.scheduler.snapshot().host_bytes == 0
    assert park_at(job, 0, 13) == (40, 0)


def test_a_partly_filled_page_is_copied_again() -> None:
    job = FakeLoop(config(page_size=4, chunk_pages=1))
    job.add(0, 6, 20)
    assert park_at(job, 0, 6) == (20, 0)
    assert park_at(job, 0, 9) == (30, 10)


def test_what_is_kept_goes_first_when_an_image_needs_the_room() -> None:
    job = FakeLoop(config(host_budget_bytes=50))
    job.add(0, 12, 40)
    job.add(1, 12, 40)
    assert park_at(job, 0, 14) == (40, 0)
    assert park_at(job, 1, 20) == (50, 0)  # the whole budget: what 0 had left went
    assert job.scheduler.snapshot().host_bytes == 50
    job.run()
    assert (job.scheduler.counters.num_parks_refused, job.scheduler.counters.host_bytes_peak) == (0, 50)
    assert job.tokens == {0: 40, 1: 40}


def test_of_what_is_kept_the_oldest_goes_first() -> None:
    job = FakeLoop(config(host_budget_bytes=120))
    for seq_id in range(3):
        job.add(seq_id, 12, 60)
    assert park_at(job, 0, 12) == (30, 0)
    assert park_at(job, 1, 20) == (50, 0)
    assert park_at(job, 2, 28) == (70, 0)  # three chunks too many: those of 0
    assert park_at(job, 1, 32) == (80, 50)
    assert park_at(job, 0, 40) == (100, 0)


def test_the_pages_of_what_is_kept_are_free_at_once_even_when_pages_are_held() -> None:
    job = FakeLoop(config(hold=True), delay=lambda chunk: 30)
    job.add(0, 12, 40)
    park_at(job, 0, 12)
    assert job.scheduler.park(0) == ""
    job.step()
    snapshot = job.scheduler.snapshot()
    assert (snapshot.num_pages_leaving, snapshot.num_pages_free) == (1, 199)
    job.run()


def test_a_place_that_was_spoiled_is_not_found_again() -> None:
    job = FakeLoop(config())
    job.add(0, 8, 20)
    job.run(until=lambda: job.num_cells(0) == 9)
    job.scheduler.park(0)
    plan = job.step()
    job.run(until=lambda: job.num_cells(0) == 10)
    assert job.scheduler.spoil(plan.park[0]) == ()  # an old epoch: its sequence is back and well
    assert park_at(job, 0, 12) == (30, 10)


def test_a_copy_that_fails_on_its_way_ends_those_whose_image_it_belongs_to() -> None:
    scheduler = Scheduler(config())
    scheduler.add(0, 8, 20, 0.0)
    scheduler.commit(Outcome(prefilled=scheduler.plan(0.0, 9).prefill), 0.0)
    scheduler.park(0)
    plan = scheduler.plan(0.0, 9)
    assert scheduler.image(0) == tuple(chunk.host_id for chunk in plan.park)
    assert scheduler.spoil(plan.park[1]) == (0,)
    scheduler.fail(0, "the copy failed")
    scheduler.check()
    scheduler.commit(Outcome(parked=plan.park), 0.0)
    scheduler.check()
    assert scheduler.snapshot().host_bytes == 0
    assert scheduler.spoil(plan.park[1]) == ()


# One copy for all who share


KEYS = tuple(f"p{index}" for index in range(8))  # of a prompt of 9 tokens: two chunks of four pages


def siblings(num: int, **changes: Any) -> FakeLoop:
    """Several with one prompt, each with its second token; all are parked together by the next plan."""
    job = FakeLoop(config(**changes), delay=lambda chunk: 3)
    for seq_id in range(num):
        job.add(seq_id, 9, 12, page_keys=KEYS)
    job.run(until=lambda: job.num_cells(num - 1) == 10)
    for seq_id in range(num):
        assert job.scheduler.park(seq_id) == ""
    return job


@pytest.mark.parametrize("hold", [False, True], ids=["staged", "hold"])
def test_the_host_copy_of_a_shared_prompt_exists_once_and_is_counted_once(hold: bool) -> None:
    job = siblings(3, hold=hold, host_budget_bytes=50)
    job.step()
    assert job.scheduler.snapshot().num_parked == 3
    assert job.scheduler.snapshot().host_bytes == 50  # two for the prompt, one for each tail
    first, second, third = (job.scheduler.image(seq_id) for seq_id in range(3))
    assert first[:2] == second[:2] == third[:2] and len({first[2], second[2], third[2]}) == 3
    job.run()
    assert all_finished(job.ends)
    assert (job.scheduler.snapshot().host_bytes, job.runner.host_bytes) == (0, 0)


@pytest.mark.parametrize("hold", [False, True], ids=["staged", "hold"])
@pytest.mark.parametrize("num_staging", [0, 1])
def test_a_shared_copy_is_made_by_the_next_when_the_first_is_cancelled_before_it(num_staging: int, hold: bool) -> None:
    job = siblings(2, hold=hold, chunks_per_step=1)
    job.runner.num_staging = num_staging
    plan = job.step()
    assert len(plan.park) == num_staging
    assert job.cancel(0) == ""
    job.runner.num_staging = 9
    job.run()
    assert job.ends == {0: State.CANCELLED, 1: State.FINISHED}
    assert job.tokens[1] == 12
    assert (job.scheduler.snapshot().host_bytes, job.runner.host_bytes) == (0, 0)


def test_one_that_leaves_later_finds_what_another_copied() -> None:
    job = FakeLoop(config(rows=2))
    job.add(0, 9, 30, page_keys=KEYS)
    job.add(1, 9, 30, page_keys=KEYS)
    job.run(until=lambda: job.num_cells(1) == 12)
    assert park_at(job, 0, job.num_cells(0) + 1) == (40, 0)
    assert park_at(job, 1, job.num_cells(1) + 1) == (50, 20)  # what the first one kept, and nothing else of it
    job.run(until=lambda: 0 in job.ends or 1 in job.ends)
    assert job.scheduler.snapshot().host_bytes > 0
    job.run()
    assert job.scheduler.snapshot().host_bytes == 0


def test_a_shared_copy_that_fails_on_its_way_ends_all_whose_image_it_belongs_to() -> None:
    job = siblings(3)
    plan = job.step()
    assert job.scheduler.spoil(plan.park[0]) == (0, 1, 2)
    assert job.scheduler.spoil(plan.park[2]) == (0,)  # its own tail
