"""Prompts first: when a decode step makes way for prompt chunks, and when it never does."""

from typing import Any

import pytest

from jaxkv.scheduler import Scheduler, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished

CONFIG: dict[str, Any] = {"rows": 4, "num_pages": 400, "page_size": 1, "prefill_chunk": 8, "max_len": 1000, "chunk_bytes": 16}


def loop(**changes: Any) -> FakeLoop:
    return FakeLoop(SchedulerConfig(**{**CONFIG, **changes}))


def steps(job: FakeLoop, num: int) -> list[tuple[int | None, list[int]]]:
    """Of each step, whose chunk ran and who decoded."""
    plans = [job.step() for _ in range(num)]
    return [(plan.prefill.seq_id if plan.prefill else None, sorted(row.seq_id for row in plan.decode)) for plan in plans]


def test_patient_ones_decode_when_all_prompts_are_done() -> None:
    job = loop()
    for seq_id, length in enumerate((8, 20, 3)):
        job.add(seq_id, length, 3, is_patient=True)
    assert steps(job, 6) == [(0, []), (1, []), (1, []), (1, []), (2, []), (None, [0, 1, 2])]


def test_without_patience_a_token_follows_every_chunk() -> None:
    job = loop()
    for seq_id, length in enumerate((8, 20, 3)):
        job.add(seq_id, length, 9)
    assert steps(job, 6) == [(0, []), (1, [0]), (1, [0]), (1, [0]), (2, [0, 1]), (None, [0, 1, 2])]


def test_one_who_waits_for_tokens_is_delayed_by_no_more_than_one_chunk_beside_patient_ones() -> None:
    job = loop()
    job.add(0, 8, 50, is_patient=True)
    job.add(1, 8, 50)
    job.add(2, 100, 5, is_patient=True)
    assert steps(job, 5) == [(0, []), (1, []), (2, [0, 1]), (2, [0, 1]), (2, [0, 1])]


def test_patient_ones_wait_again_when_the_impatient_one_has_gone() -> None:
    job = loop()
    job.add(0, 8, 50, is_patient=True)
    job.add(1, 8, 50)
    job.add(2, 100, 5, is_patient=True)
    steps(job, 4)
    job.cancel(1)
    assert steps(job, 2) == [(2, []), (2, [])]


def test_tokens_go_on_while_an_impatient_one_waits_for_a_row_that_the_last_of_them_will_free() -> None:
    job = loop(rows=2)
    job.add(0, 8, 2, is_patient=True)
    job.add(1, 100, 5, is_patient=True)
    assert steps(job, 2) == [(0, []), (1, [])]
    job.add(2, 8, 5, priority=-10)
    assert steps(job, 2) == [(1, [0]), (2, [])]


def test_an_impatient_newcomer_ends_the_burst_as_soon_as_it_has_a_token_to_wait_for() -> None:
    job = loop()
    job.add(0, 8, 50, is_patient=True)
    job.add(1, 8, 50)
    job.add(2, 16, 50, is_patient=True)
    assert steps(job, 4) == [(0, []), (1, []), (2, [0, 1]), (2, [0, 1])]


@pytest.mark.parametrize("burst", [1, 2, 3, 5])
def test_a_burst_is_so_many_chunks_long_and_no_longer(burst: int) -> None:
    job = loop(prefill_burst=burst)
    job.add(0, 8, 50, is_patient=True)
    job.add(1, 300, 5, is_patient=True)
    job.step()
    assert steps(job, 2 * burst) == [*[(1, [])] * (burst - 1), (1, [0])] * 2


def test_a_decode_step_without_a_chunk_beside_it_begins_a_new_count() -> None:
    job = loop(prefill_burst=3)
    job.add(0, 8, 50, is_patient=True)
    job.add(1, 16, 50, is_patient=True)
    assert steps(job, 4) == [(0, []), (1, []), (1, []), (None, [0, 1])]
    job.add(2, 300, 5, is_patient=True)
    assert steps(job, 3) == [(2, []), (2, []), (2, [0, 1])]


def test_endless_prompts_starve_nobody() -> None:
    job = loop(prefill_burst=4)
    job.add(0, 8, 20, is_patient=True)
    num_steps = 0
    while 0 not in job.ends:
        if num_steps % 10 == 0:
            job.add(len(job.tokens), 90, 1, is_patient=True)  # always a chunk to compute
        job.step()
        num_steps += 1
    assert num_steps == 1 + 19 * 4


def test_patience_saves_the_decode_steps_that_ran_beside_chunks() -> None:
    jobs = {burst: loop(prefill_burst=burst) for burst in (1, 16)}
    decodes = dict.fromkeys(jobs, 0)
    for burst, job in jobs.items():
        for seq_id in range(4):
            job.add(seq_id, 16, 10, is_patient=True)
        while not job.scheduler.is_idle:
            decodes[burst] += bool(job.step().decode)
    assert decodes == {1: 9 + 6, 16: 9}


@pytest.mark.parametrize("burst", [1, 16])
@pytest.mark.parametrize(
    "changes", [{}, {"park_every": 2}, {"hold": True}, {"host_budget_bytes": 0}, {"planner": False}, {"admission": "reserve"}]
)
def test_a_pool_that_is_too_small_changes_nothing_about_the_end(changes: dict[str, Any], burst: int) -> None:
    job = loop(num_pages=40, prefill_burst=burst, margin_steps=1, chunk_pages=4, **changes)
    for seq_id in range(9):
        job.add(seq_id, 1 + 3 * seq_id, 14, is_patient=seq_id != 5)
    job.run()
    assert all_finished(job.ends) and set(job.tokens.values()) == {14}


def test_rows_that_wait_keep_the_pages_they_got() -> None:
    job = loop(num_pages=30, prefill_burst=16, margin_steps=0)
    job.add(0, 8, 10, is_patient=True)
    job.add(1, 16, 2, is_patient=True)
    steps(job, 2)
    held = {view.seq_id: view.num_pages for view in job.scheduler.snapshot().sequences}
    assert held == {0: 9, 1: 8}


def test_no_decode_step_waits_while_somebody_is_parked() -> None:
    job = loop(num_pages=60, margin_steps=0)
    job.add(0, 8, 50, is_patient=True)
    job.add(1, 8, 50, is_patient=True)
    steps(job, 4)
    job.scheduler.park(1)
    job.add(2, 40, 5, is_patient=True)
    job.scheduler.hold(1)  # away, but nobody waits for it
    assert steps(job, 2) == [(2, []), (2, [])]
    job.scheduler.release(1)
    assert [decoded for _, decoded in steps(job, 2)] == [[0], [0]]
    job.run()
    assert all_finished(job.ends)


def test_a_burst_of_no_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="scheduler setting prefill_burst is 0, but must be at least 1"):
        Scheduler(SchedulerConfig(**{**CONFIG, "prefill_burst": 0}))


def test_a_step_that_broke_off_in_a_burst_leaves_its_rows_where_they_were() -> None:
    job = loop()
    job.add(0, 8, 5, is_patient=True)
    job.add(1, 30, 5, is_patient=True)
    steps(job, 2)
    job.recover()
    job.run()
    assert job.ends == {0: State.FINISHED, 1: State.FINISHED} and job.tokens == {0: 5, 1: 5}
