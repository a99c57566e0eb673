"""The scheduler's parts by themselves: what a cell costs, who is picked, what the ledgers refuse, what a configuration must be."""

import subprocess
import sys
from typing import Any

import pytest

from jaxkv.scheduler import VICTIMS, Candidate, Chunk, Outcome, Scheduler, SchedulerConfig, need, pages_for
from jaxkv.scheduler.ledger import HostLedger, PageLedger
from jaxkv.scheduler.policies import spare_the_starved


def candidate(seq_id: int, num_pages: int, num_parks: int = 0, is_last_token: bool = False) -> Candidate:
    return Candidate(seq_id, num_pages * 16, num_pages, seq_id, num_parks, is_last_token)


def test_the_last_sampled_token_has_no_cell() -> None:
    assert (need(3, 4), need(250, 4), need(64, 1)) == (6, 253, 64)
    assert [pages_for(num, 16) for num in (0, 1, 16, 17, 129)] == [0, 1, 1, 2, 9]


@pytest.mark.parametrize(("name", "victim"), [("smallest", 3), ("largest", 2), ("youngest", 4), ("oldest", 1)])
def test_each_policy_picks_its_own_and_ties_go_to_the_younger(name: str, victim: int) -> None:
    candidates = [candidate(1, 5), candidate(0, 2), candidate(3, 2), candidate(2, 9), candidate(4, 9)]
    if name == "largest":
        assert VICTIMS[name](candidates).seq_id == 4
        candidates.pop()
    if name == "oldest":
        assert VICTIMS[name](candidates).seq_id == 0
        candidates.pop(1)
    assert VICTIMS[name](candidates).seq_id == victim


def test_one_parked_often_and_one_about_to_end_are_passed_over_while_others_exist() -> None:
    calm, starved, ending = candidate(0, 4), candidate(1, 1, num_parks=3), candidate(2, 1, is_last_token=True)
    assert spare_the_starved([calm, starved, ending], 3) == [calm]
    assert spare_the_starved([starved, ending], 3) == [starved]
    assert spare_the_starved([ending], 3) == [ending]


def test_a_page_has_one_owner_and_comes_back_once() -> None:
    ledger = PageLedger(4)
    assert ledger.take(7, 3) == [1, 2, 3]
    ledger.leave(7, [2])
    assert (ledger.num_free, ledger.num_leaving) == (1, 1)
    ledger.give_back(7, [2])
    ledger.check()
    assert (ledger.num_free, ledger.num_leaving, ledger.owner(2), ledger.owner(3)) == (2, 0, None, 7)
    with pytest.raises(AssertionError, match="page 2 comes back from 7, but belongs to None"):
        ledger.give_back(7, [2])
    with pytest.raises(AssertionError, match="page 3 leaves from 8, but belongs to 7"):
        ledger.leave(8, [3])
    with pytest.raises(AssertionError, match="3 pages asked of 2 free"):
        ledger.take(8, 3)
    assert ledger.take(8, 2) == [2, 4]


@pytest.mark.parametrize(("budget", "num_chunks", "fits"), [(None, 9, True), (0, 1, False), (0, 0, True), (90, 9, True), (89, 9, False)])
def test_the_host_budget_is_hard(budget: int | None, num_chunks: int, fits: bool) -> None:
    host = HostLedger(budget)
    assert host.reserve(num_chunks, num_chunks * 10) == fits
    assert (host.held, host.peak) == ((num_chunks * 10,) * 2 if fits else (0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "scheduler setting rows is 0, but must be at least 1"),
        ({"margin_steps": -1}, "scheduler setting margin_steps is -1, but must be at least 0"),
        ({"host_budget_bytes": -5}, "scheduler setting host_budget_bytes is -5, but must be at least 0"),
        ({"victim": "tallest"}, "scheduler.victim is 'tallest', but must be one of smallest, largest, youngest, oldest, priority"),
        ({"resume": "tail"}, "scheduler.resume is 'tail', but must be one of head, pass"),
        ({"admission": "eager"}, "scheduler.admission is 'eager', but must be one of optimistic, reserve"),
        ({"rotate": "all"}, "scheduler.rotate is 'all', but must be one of shifted, any, none"),
        ({"rotate_after_s": -0.5}, "scheduler setting rotate_after_s is -0.5, but must be at least 0"),
        ({"rotate_after_s": float("nan")}, "scheduler setting rotate_after_s is nan, but must be at least 0"),
        ({"max_bypass": -1}, "scheduler setting max_bypass is -1, but must be at least 0"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"rows": 1, "num_pages": 1, "page_size": 1, "prefill_chunk": 1, "max_len": 1}
    with pytest.raises(ValueError) as caught:
        Scheduler(SchedulerConfig(**{**sizes, **changes}))
    assert str(caught.value) == message


def test_a_copy_reported_twice_or_never_sent_changes_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(rows=1, num_pages=8, page_size=1, prefill_chunk=4, max_len=8, chunk_bytes=10))
    scheduler.add(0, 8, 1, 0.0)
    scheduler.commit(Outcome(prefilled=scheduler.plan(0.0, 4).prefill), 0.0)
    scheduler.park(0)
    plan = scheduler.plan(1.0, 4)
    before = scheduler.snapshot()
    scheduler.commit(Outcome(parked=(Chunk(0, 0, 0, (1,)), Chunk(5, 1, 0, (1,)))), 1.0)
    assert scheduler.snapshot() == before
    for _ in range(2):
        scheduler.commit(Outcome(parked=plan.park), 1.0)
        scheduler.check()
        assert scheduler.snapshot().host_bytes == 10


@pytest.mark.parametrize(("free_chunks", "sent"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_no_more_chunks_leave_than_there_is_staging_for_nor_than_a_step_may_send(free_chunks: int, sent: int) -> None:
    """Four pages in chunks of one, three a step at most; the way back is held to the same."""
    sizes: dict[str, Any] = {"rows": 1, "num_pages": 8, "page_size": 1, "prefill_chunk": 4, "max_len": 8}
    scheduler = Scheduler(SchedulerConfig(**sizes, chunk_pages=1, chunks_per_step=3))
    scheduler.add(0, 8, 1, 0.0)
    scheduler.commit(Outcome(prefilled=scheduler.plan(0.0, 9).prefill), 0.0)
    scheduler.park(0)
    plan = scheduler.plan(0.0, free_chunks)
    assert len(plan.park) == sent
    while scheduler.state(0) != "parked":
        scheduler.commit(Outcome(parked=plan.park), 0.0)
        if scheduler.state(0) != "parked":
            plan = scheduler.plan(0.0, 9)
    plan = scheduler.plan(0.0, free_chunks)
    assert (len(plan.park), len(plan.restore)) == (0, sent)


def test_the_scheduler_imports_the_standard_library_alone() -> None:
    code = "import sys, jaxkv.scheduler; print([name for name in ('jax', 'flax', 'numpy', 'pydantic') if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
