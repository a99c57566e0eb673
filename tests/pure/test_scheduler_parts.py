"""The scheduler's parts by themselves: what a cell costs, who is picked, what the ledgers refuse, what a configuration must be."""

import subprocess
import sys
from typing import Any

import pytest

from jaxkv.scheduler import VICTIMS, Candidate, Chunk, Outcome, Scheduler, SchedulerConfig, need, pages_for
from jaxkv.scheduler.images import HostLedger, ImageChunk, Span, cut
from jaxkv.scheduler.ledger import PageLedger
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
    host = HostLedger(budget, 10)
    image = host.take(1, cut(num_chunks, num_chunks, 1), {})
    assert (image is not None) == fits
    assert (host.held, host.peak) == ((num_chunks * 10,) * 2 if fits else (0, 0))


def test_an_image_is_cut_where_its_keys_end_and_what_is_full_to_the_end_will_not_change() -> None:
    assert cut(9, 8, 3, ("a", "b", "c", "d")) == [
        Span(0, 3, (0, "c"), True), Span(3, 1, (3, "d"), True), Span(4, 3, None, True), Span(7, 2, None, False),
    ]  # fmt: skip
    assert cut(2, 2, 3, ("a", "b", "c", "d")) == [Span(0, 2, (0, "b"), False)]  # its prompt is still being computed
    assert cut(7, 6, 3) == [Span(0, 3, None, True), Span(3, 3, None, True), Span(6, 1, None, False)]
    assert cut(0, 0, 3) == []


class Host:
    """A ledger of chunks of 10 bytes, one page each, and what it dropped."""

    def __init__(self, budget: int | None, **settings: Any) -> None:
        self.dropped: list[int] = []
        self.ledger = HostLedger(budget, 10, on_drop=self.dropped.append, **settings)

    def park(self, seq_id: int, num_pages: int, kept: dict[int, ImageChunk] | None = None, keys: tuple[str, ...] = ()) -> list[ImageChunk]:
        """The whole way there."""
        image = self.ledger.take(seq_id, cut(num_pages, num_pages, 1, keys), kept or {})
        assert image is not None
        self.ledger.let_go(kept or {})
        for chunk in [chunk for chunk in image if not chunk.is_sent]:
            self.ledger.send(chunk)
            self.ledger.land(chunk)
        return image


def test_a_kept_chunk_is_found_again_and_the_one_kept_longest_goes_first_when_room_is_needed() -> None:
    host = Host(50)
    kept = [host.ledger.keep(seq_id, host.park(seq_id, 2)) for seq_id in (1, 2)]
    assert (host.ledger.held, host.ledger.in_use, host.dropped) == (40, 0, [])
    again = host.park(1, 3, kept[0])
    assert [chunk.host_id for chunk in again] == [0, 1, 4]
    assert (host.ledger.held, host.ledger.in_use, host.ledger.num_hits, host.dropped) == (50, 30, 2, [])
    assert host.ledger.take(3, cut(3, 3, 1), {}) is None
    host.park(3, 1)
    assert host.dropped == [2]
    host.ledger.release(1, again)
    assert [chunk.host_id for chunk in host.park(2, 2, kept[1])] == [6, 3]
    assert host.dropped == [2, 0, 1, 4]


def test_nothing_is_kept_where_that_is_switched_off() -> None:
    host = Host(None, keep=False)
    assert host.ledger.keep(1, host.park(1, 2)) == {}
    assert (host.ledger.held, host.dropped) == (0, [0, 1])


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
    scheduler.commit(Outcome(parked=(Chunk(0, 0, 0, (1,), 0), Chunk(5, 1, 0, (1,), 0))), 1.0)
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
