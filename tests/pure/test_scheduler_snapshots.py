"""States kept where prompts may be found again: which are, who goes on from them, which go first."""

from typing import Any

import pytest

from jaxkv.scheduler import Scheduler, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop
from jaxkv.scheduler.snapshots import SnapshotLedger


def loop(delay: int = 0, **changes: Any) -> FakeLoop:
    """Two rows, 16 pages of 4 tokens, chunks of 8, three states kept."""
    sizes: dict[str, Any] = {"rows": 2, "num_pages": 16, "page_size": 4, "prefill_chunk": 8, "max_len": 64, "chunk_pages": 2}
    config = SchedulerConfig(**{**sizes, "chunk_bytes": 10, "state_bytes": 25, "num_snapshots": 3, "margin_steps": 0, **changes})
    return FakeLoop(config, lambda chunk: delay)


def keys(name: str, num: int) -> tuple[str, ...]:
    return tuple(f"{name}{index}" for index in range(num))


def found(job: FakeLoop, seq_id: int, prompt_len: int, page_keys: tuple[str, ...], **more: Any) -> int:
    """Let it run to its end; how many tokens of its prompt it did not compute."""
    before = job.scheduler.counters.cached_tokens
    job.add(seq_id, prompt_len, 3, page_keys=page_keys, **more)
    job.run()
    assert job.ends[seq_id] is State.FINISHED
    return job.scheduler.counters.cached_tokens - before


@pytest.mark.parametrize("changes", [{}, {"num_pages": 0, "chunk_bytes": 0}], ids=["hybrid", "states alone"])
def test_a_prompt_goes_on_from_the_last_state_that_was_kept_behind_its_beginning(changes: dict[str, Any]) -> None:
    job = loop(**changes)
    assert found(job, 0, 21, keys("a", 5)) == 0  # states are kept at 8 and 16
    assert found(job, 1, 21, keys("a", 5)) == 16
    assert found(job, 2, 21, (*keys("a", 3), "b3", "b4")) == 8  # and at 16 behind another page
    assert found(job, 3, 16, (*keys("a", 3),)) == 8  # the page of its last token is computed
    assert found(job, 4, 21, keys("c", 5)) == 0  # two states more, so that two go
    assert found(job, 5, 21, keys("a", 5)) == 8
    assert found(job, 6, 7, keys("a", 1)) == 0  # no chunk ends there


def test_a_state_is_of_no_use_where_a_page_before_it_is_gone() -> None:
    job = loop(num_pages=8)
    assert found(job, 0, 21, keys("a", 5)) == 0
    assert found(job, 1, 25, ()) == 0  # takes all pages but one
    assert found(job, 2, 21, keys("a", 5)) == 0


def test_with_a_window_of_one_token_the_kept_state_is_all_it_takes_and_the_pages_before_it_are_gone() -> None:
    job = loop(num_pages=4, window=1)
    assert found(job, 0, 45, keys("a", 11)) == 0
    assert found(job, 1, 45, keys("a", 11)) == 40
    assert job.scheduler.snapshot().num_pages_free == 4


def test_the_one_used_least_recently_goes_first() -> None:
    ledger = SnapshotLedger(2)
    for step, key in enumerate("ab"):
        slot = ledger.reserve(key, step)
        assert slot == step and ledger.find(key) is None
        ledger.settle(slot)
    ledger.use("a")
    assert (ledger.reserve("a", 2), ledger.reserve("c", 2)) == (None, 1)
    ledger.check()
    assert (ledger.find("a"), ledger.find("b"), ledger.num_kept) == (0, None, 1)


def test_a_slot_that_nobody_filled_is_free_again_two_steps_later() -> None:
    ledger = SnapshotLedger(1)
    assert [ledger.reserve("a", 0), ledger.reserve("a", 1), ledger.reserve("b", 1), ledger.reserve("b", 2)] == [0, None, None, 0]
    ledger.check()
    ledger.settle(0)
    ledger.settle(0)  # a report twice changes nothing
    assert ledger.find("b") == 0
    assert SnapshotLedger(0).reserve("a", 0) is None


def test_nothing_is_kept_of_who_does_not_want_it_nor_without_the_cache() -> None:
    job = loop()
    assert found(job, 0, 21, keys("a", 5), keeps_prefix=False) == 0
    assert found(job, 1, 21, keys("a", 5)) == 0
    job = loop(prefix_cache=False)
    assert [found(job, seq_id, 21, keys("a", 5)) for seq_id in (0, 1)] == [0, 0]


def test_one_that_waits_for_its_first_chunk_finds_what_another_computes_meanwhile() -> None:
    job = loop()
    for seq_id in (0, 1):
        job.add(seq_id, 21, 3, page_keys=keys("a", 5))
    job.run()
    assert job.scheduler.counters.cached_tokens == 16


@pytest.mark.parametrize("hold", [False, True])
def test_parks_and_replays_of_those_who_found_their_beginning_are_as_ever(hold: bool) -> None:
    for changes in ({"park_every": 1}, {"park_every": 2, "host_budget_bytes": 0}):
        job = loop(2, hold=hold, **changes)
        for seq_id in range(4):
            job.add(seq_id, 21, 9, page_keys=(*keys("a", 3), f"{seq_id % 2}", f"{seq_id % 2}'"))
        job.run()
        assert job.tokens == dict.fromkeys(range(4), 9)
        assert job.scheduler.counters.cached_tokens >= 16 and job.scheduler.counters.num_parks > 16


def test_after_a_step_that_broke_off_nothing_is_found() -> None:
    job = loop()
    assert found(job, 0, 21, keys("a", 5)) == 0
    job.recover()
    assert found(job, 1, 21, keys("a", 5)) == 0
    assert found(job, 2, 21, keys("a", 5)) == 16


def test_keys_are_refused_where_no_state_is_kept() -> None:
    with pytest.raises(ValueError, match="got 1 page keys, allowed: 0 where a sequence has a state, which is in no page, and none is kept"):
        loop(num_snapshots=0).add(0, 5, 9, page_keys=("a",))
    with pytest.raises(ValueError, match="scheduler setting num_snapshots is -1, but must be at least 0"):
        Scheduler(SchedulerConfig(rows=1, num_pages=1, page_size=1, prefill_chunk=1, max_len=9, state_bytes=1, num_snapshots=-1))
