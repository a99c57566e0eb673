"""Prompt pages that several sequences use: found, counted, kept, given away; every cell that is read is checked by content.

`keys("ab", ...)` names pages: equal letters are equal prompt pages. Page size 1 unless said otherwise, so that pages are tokens.
"""

import random
from collections import Counter
from typing import Any

import pytest

from jaxkv.scheduler import Scheduler, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished
from jaxkv.scheduler.ledger import PageLedger


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 2, "page_size": 16, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16, "chunk_pages": 2}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def loop(num_pages: int, delay: int = 0, **changes: Any) -> FakeLoop:
    return FakeLoop(config(num_pages, **changes), delay=lambda chunk: delay)


def keys(name: str, num: int) -> tuple[str, ...]:
    return tuple(f"{name}{index}" for index in range(num))


def prefilled(job: FakeLoop, seq_id: int) -> list[tuple[int, int]]:
    """Start and length of its prompt chunks, while the whole job runs to its end."""
    chunks = []
    while not job.scheduler.is_idle:
        plan = job.step()
        if plan.prefill and plan.prefill.seq_id == seq_id:
            chunks.append((plan.prefill.start, plan.prefill.length))
    return chunks


def assert_nothing_is_held(job: FakeLoop) -> None:
    view = job.scheduler.snapshot()
    assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes) == (view.num_pages, 0, 0)


def test_a_page_is_free_again_when_its_last_holder_gives_it_back() -> None:
    ledger = PageLedger(4)
    assert ledger.take(7, 2) == [1, 2]
    ledger.register(1, "a", is_kept=False)
    ledger.share(8, [1])
    assert (ledger.holders(1), ledger.num_shared(7), ledger.num_shared(8)) == ((7, 8), 1, 1)
    ledger.give_back(7, [1, 2])
    ledger.check()
    assert (ledger.num_free, ledger.num_shared(8), ledger.find(["a"])) == (3, 0, [1])
    ledger.give_back(8, [1])
    ledger.check()
    assert (ledger.num_free, ledger.num_cached, ledger.find(["a"])) == (4, 0, [])
    with pytest.raises(AssertionError, match="page 1 cannot be shared with 9"):
        ledger.share(9, [1])


def test_a_page_leaves_once_all_its_holders_do() -> None:
    ledger = PageLedger(4)
    ledger.take(7, 2)
    ledger.register(1, "a", is_kept=True)
    ledger.share(8, [1])
    ledger.leave(7, [1, 2])
    assert (ledger.num_leaving, ledger.num_shared(8)) == (1, 0)
    ledger.leave(8, [1])
    ledger.check()
    assert ledger.num_leaving == 2
    ledger.give_back(7, [1, 2])
    assert (ledger.num_leaving, ledger.num_cached, ledger.num_free) == (1, 0, 3)
    ledger.give_back(8, [1])
    ledger.check()
    assert (ledger.num_leaving, ledger.num_cached, ledger.num_free) == (0, 1, 4)
    with pytest.raises(AssertionError, match="page 1 comes back from 8, but belongs to None"):
        ledger.give_back(8, [1])


def test_the_least_recently_used_page_goes_first_and_of_one_prefix_the_last() -> None:
    ledger = PageLedger(6)
    for seq_id, name in ((1, "a"), (2, "b")):
        for page, key in zip(ledger.take(seq_id, 3), keys(name, 3), strict=True):
            ledger.register(page, key, is_kept=True)
    ledger.give_back(1, [1, 2, 3])
    ledger.give_back(2, [4, 5, 6])
    ledger.share(3, ledger.find(keys("a", 1)))
    ledger.give_back(3, [1])
    assert (ledger.num_free, ledger.num_cached) == (6, 6)
    assert ledger.take(4, 3) == [3, 2, 6]
    ledger.check()
    assert (ledger.find(keys("a", 3)), ledger.find(keys("b", 3)), ledger.num_evicted) == ([1], [4, 5], 3)


def test_of_two_pages_with_the_same_content_the_first_is_found() -> None:
    ledger = PageLedger(3)
    ledger.take(1, 1)
    ledger.take(2, 1)
    ledger.register(1, "a", is_kept=True)
    ledger.register(2, "a", is_kept=True)
    ledger.give_back(1, [1])
    ledger.give_back(2, [2])
    ledger.check()
    assert (ledger.find(["a"]), ledger.num_cached) == ([1], 1)
    ledger.forget_key(1)
    ledger.check()
    assert (ledger.find(["a"]), ledger.num_cached, ledger.num_free) == ([], 0, 3)


def test_a_prompt_that_was_computed_before_is_computed_from_its_last_page_on() -> None:
    # (100, 4) in pages of 16: 6 keys, 96 tokens; the last 4 prompt tokens are always computed.
    job = loop(32)
    job.add(0, 100, 4, page_keys=keys("a", 6))
    assert prefilled(job, 0) == [(0, 32), (32, 32), (64, 32), (96, 4)]
    assert job.scheduler.snapshot().num_pages_cached == 6
    job.add(1, 100, 4, page_keys=keys("a", 6))
    assert prefilled(job, 1) == [(96, 4)]
    job.add(2, 100, 4, page_keys=(*keys("a", 3), *keys("b", 3)))
    assert prefilled(job, 2) == [(48, 32), (80, 20)]
    assert job.scheduler.counters.cached_tokens == 96 + 48
    assert job.scheduler.cached_tokens(2) == 48
    assert all_finished(job.ends)
    assert_nothing_is_held(job)


def test_the_last_prompt_token_is_always_computed() -> None:
    job = loop(32)
    for seq_id in (0, 1):
        job.add(seq_id, 64, 4, page_keys=keys("a", 3))
        chunks = prefilled(job, seq_id)
    assert chunks == [(48, 16)]
    with pytest.raises(ValueError, match=r"got 4 page keys for 64 prompt tokens, allowed: 3 in pages of 16"):
        job.scheduler.add(2, 64, 4, 0.0, page_keys=keys("a", 4))


def test_siblings_that_come_together_share_what_the_first_of_them_computes() -> None:
    # Four of (40, 8) want 3 pages each, 12 in all; the pool has 8, and 2 + 4 hold them: nobody waits, nobody parks.
    job = loop(8, rows=4, margin_steps=0)
    for seq_id in range(4):
        job.add(seq_id, 40, 8, page_keys=keys("a", 2), keeps_prefix=False)
    job.run(until=lambda: job.scheduler.state(3) is State.DECODING)
    assert job.scheduler.snapshot().num_pages_free == 2
    assert [view.num_pages for view in job.scheduler.snapshot().sequences] == [3, 3, 3, 3]
    job.run()
    assert job.tokens == {0: 8, 1: 8, 2: 8, 3: 8}
    assert (job.scheduler.counters.num_parks, job.scheduler.counters.cached_tokens) == (0, 96)
    assert job.scheduler.snapshot().num_pages_cached == 0


def test_what_a_replay_finds_of_its_own_prompt_is_nothing_that_was_cached_for_it() -> None:
    job = loop(32)
    job.add(0, 40, 8, page_keys=keys("a", 2))
    job.run(until=lambda: job.tokens[0] == 3)
    job.replay(0)
    chunks = prefilled(job, 0)
    job.run()
    assert (chunks, job.tokens) == ([(32, 8)], {0: 8})  # its two full pages were still there
    assert job.scheduler.counters.cached_tokens == 0


def test_a_return_drops_cached_pages_before_it_waits() -> None:
    """6 pages: one that is away needs 3, and 4 are kept for nobody in particular."""
    job = loop(6, margin_steps=0)
    job.add(0, 33, 8)
    job.run(until=lambda: job.tokens[0] == 3)
    job.scheduler.hold(0)
    job.run(until=lambda: job.scheduler.state(0) is State.PARKED)
    job.add(1, 65, 1, page_keys=keys("a", 4))
    job.run(until=lambda: 1 in job.ends)
    assert job.scheduler.snapshot().num_pages_cached == 4
    job.scheduler.release(0)
    plan = job.step()
    assert [note.seq_id for note in plan.notes if note.kind == "restore"] == [0]
    job.run()
    assert job.tokens == {0: 8, 1: 1} and job.scheduler.snapshot().num_pages_cached == 3


def test_without_a_prefix_cache_pages_are_shared_but_not_kept() -> None:
    job = loop(32, prefix_cache=False)
    for seq_id in (0, 1):
        job.add(seq_id, 40, 30, page_keys=keys("a", 2))
    job.run()
    assert job.scheduler.counters.cached_tokens == 32
    job.add(2, 40, 4, page_keys=keys("a", 2))
    assert prefilled(job, 2) == [(0, 32), (32, 8)]
    assert job.scheduler.counters.cached_tokens == 32


def test_cached_pages_go_before_anybody_is_parked() -> None:
    # 6 pages stay of (100, 1); (100, 28) beside them takes 8 of 8 in the end.
    job = loop(8)
    job.add(0, 100, 1, page_keys=keys("a", 6))
    job.run()
    assert job.scheduler.snapshot().num_pages_cached == 6
    job.add(1, 100, 28, page_keys=keys("b", 6))
    job.run()
    assert (job.tokens, job.scheduler.counters.num_parks) == ({0: 1, 1: 28}, 0)
    assert job.scheduler.snapshot().num_pages_cached == 6
    job.add(2, 100, 1, page_keys=keys("b", 6))
    assert prefilled(job, 2) == [(96, 4)]


def test_pages_with_generated_tokens_are_found_by_nobody() -> None:
    # (17, 40) fills page 1 with one prompt token and 15 generated ones: a prompt of 48 has another content there.
    job = loop(16)
    job.add(0, 17, 40, page_keys=keys("a", 1))
    job.run()
    assert job.scheduler.snapshot().num_pages_cached == 1
    job.add(1, 48, 2, page_keys=keys("a", 2))
    assert prefilled(job, 1) == [(16, 32)]


@pytest.mark.parametrize("hold", [False, True])
def test_a_sharer_is_parked_the_cache_given_away_and_its_pages_taken_and_it_returns_with_its_own(hold: bool) -> None:
    # 0 and 1 share 64 tokens, 4 of 10 pages. 0 is parked with a slow copy, 1 is cancelled, 2 takes the pages with 159 cells, 0 returns.
    job = FakeLoop(config(10, rows=3, hold=hold, margin_steps=0), delay=lambda chunk: 120 if chunk.epoch == 1 else 0)
    for seq_id in (0, 1):
        job.add(seq_id, 70, 20, page_keys=keys("a", 4))
    job.add(2, 8, 152)
    job.run(until=lambda: job.scheduler.state(2) is State.DECODING)
    job.scheduler.park(0)
    job.step()
    assert job.scheduler.snapshot().num_pages_free == 10 - (5 + 1) - (1 if hold else 0)
    job.cancel(1)
    assert job.scheduler.snapshot().num_pages_cached == (0 if hold else 4)
    job.run(until=lambda: 0 in job.noted("restore"))
    assert job.scheduler.snapshot().num_pages_cached == 0
    job.run()
    assert (job.tokens[0], job.tokens[2]) == (20, 152)
    assert job.ends == {0: State.FINISHED, 1: State.CANCELLED, 2: State.FINISHED}
    assert_nothing_is_held(job)


def test_parking_a_sharer_frees_what_it_alone_holds_and_leaves_the_rest() -> None:
    job = loop(32, rows=3)
    for seq_id in range(3):
        job.add(seq_id, 70, 40, page_keys=keys("a", 4))
    job.run(until=lambda: job.scheduler.state(2) is State.DECODING)
    assert job.scheduler.snapshot().num_pages_free == 32 - (4 + 3)
    job.scheduler.park(1)
    job.step()
    assert job.scheduler.state(1) is State.PARKING
    assert job.scheduler.snapshot().num_pages_free == 32 - (4 + 2)
    job.run()
    assert job.tokens == {0: 40, 1: 40, 2: 40}


def restored(job: FakeLoop) -> list[tuple[int, int]]:
    """Sequence and pages of the chunks that come back, until all are at work again."""
    sizes = []
    while any(view.state is not State.DECODING for view in job.scheduler.snapshot().sequences):
        sizes += [(chunk.seq_id, len(chunk.pages)) for chunk in job.step().restore]
    return sizes


def test_a_sharer_comes_back_to_the_pages_that_others_hold_and_copies_only_its_own() -> None:
    # 5 shared pages of (90, 40), chunks of 2: images are 2 + 2 + 1 pages with keys, and 1 without.
    job = loop(32)
    for seq_id in (0, 1):
        job.add(seq_id, 90, 40, page_keys=keys("a", 5))
    job.run(until=lambda: job.scheduler.state(1) is State.DECODING)
    job.scheduler.park(1)
    job.step()
    assert job.scheduler.snapshot().num_pages_free == 32 - 6
    assert restored(job) == [(1, 1)]
    assert job.scheduler.snapshot().num_pages_free == 32 - 7
    job.run()
    assert job.tokens == {0: 40, 1: 40}


def test_siblings_that_were_all_away_share_again() -> None:
    job = FakeLoop(config(32, chunks_per_step=9), delay=lambda chunk: 0 if chunk.epoch > 1 else 5)
    for seq_id in (0, 1):
        job.add(seq_id, 90, 40, page_keys=keys("a", 5), keeps_prefix=False)
    job.run(until=lambda: job.scheduler.state(1) is State.DECODING)
    for seq_id in (0, 1):
        job.scheduler.park(seq_id)
    job.step()
    assert job.scheduler.snapshot().num_pages_free == 32
    # Both come back at once, when the pages of the first are not verified yet.
    assert restored(job) == [(0, 2), (0, 2), (0, 1), (0, 1), (1, 2), (1, 2), (1, 1), (1, 1)]
    job.scheduler.park(1)
    job.step()
    assert restored(job) == [(1, 1)]
    assert job.scheduler.snapshot().num_pages_free == 32 - 7
    job.run()
    assert job.tokens == {0: 40, 1: 40}


@pytest.mark.parametrize("answer", [96, 100])
@pytest.mark.parametrize("keeps_prefix", [True, False])
def test_a_group_of_two_that_outgrows_the_pool_takes_turns(answer: int, keeps_prefix: bool) -> None:
    # 64 + 2 * 99 = 262 of 256.
    job = loop(256, page_size=1, chunk_pages=16)
    for seq_id in (0, 1):
        assert job.add(seq_id, 64, answer, page_keys=keys("a", 63), keeps_prefix=keeps_prefix) == answer
    job.run()
    assert job.tokens == {0: answer, 1: answer}
    assert job.scheduler.counters.num_parks == (answer == 100)
    assert_nothing_is_held(job)


def test_a_group_that_is_given_up_in_any_state_leaves_nothing() -> None:
    for step in range(1, 40):
        job = loop(12, rows=3, delay=2, margin_steps=1)
        for seq_id in range(4):
            job.add(seq_id, 40, 60, page_keys=keys("a", 2), keeps_prefix=False)
        for _ in range(step):
            job.step()
        for seq_id in range(4):
            job.cancel(seq_id)
        job.run()
        assert job.ends == dict.fromkeys(range(4), State.CANCELLED)
        assert job.scheduler.snapshot().num_pages_cached == 0
        assert_nothing_is_held(job)


def random_keys(rng: random.Random, prompt_len: int, page_size: int) -> tuple[str, ...]:
    """A prompt out of a small family: a common beginning, then one of two ways to go on at each of its pages."""
    path, found = "", []
    for _ in range((prompt_len - 1) // page_size):
        path += rng.choice("aaaab")
        found.append(path)
    return tuple(found)


def run_sharing(seed: int) -> Counter[str]:
    """A run of requests with common prompts that come, are parked and leave; what happened in it."""
    rng = random.Random(seed)
    num_pages, page_size = rng.randint(6, 40), rng.choice([1, 2, 4])
    settings = config(
        num_pages, page_size=page_size, rows=rng.randint(1, 6), prefill_chunk=rng.choice([1, 4, 6]), chunk_pages=rng.choice([1, 3]),
        margin_steps=rng.choice([0, 0, 2]), hold=rng.random() < 0.4, planner=rng.random() < 0.8, chunk_bytes=10,
        park_every=rng.choice([0, 0, 1, 3]), park_seed=rng.choice([None, None, seed]), prefix_cache=rng.random() < 0.7,
        victim=rng.choice(["smallest", "largest", "youngest", "oldest"]), host_budget_bytes=rng.choice([None, None, 10 * num_pages, 0]),
        over_budget=rng.choice(["replay", "replay", "wait"]),
        resume=rng.choice(["head", "pass"]), rotate=rng.choice(["none", "any"]), rotate_after_s=rng.choice([3.0, 20.0]),
    )  # fmt: skip
    delays = [rng.randint(0, rng.choice([0, 1, 5])) for _ in range(31)]
    job = FakeLoop(settings, delay=lambda chunk: delays[(chunk.seq_id + 3 * chunk.epoch + chunk.index) % 31])
    seq_id = 0
    for _ in range(rng.randint(2, 6)):
        prompt_len = rng.randint(1, max(1, num_pages * page_size * 2 // 3))
        page_keys, keeps = random_keys(rng, prompt_len, page_size), rng.random() < 0.7
        for _ in range(rng.choice([1, 1, 3])):
            sharing: dict[str, Any] = {"page_keys": page_keys, "keeps_prefix": keeps, "priority": rng.choice([0, 0, 0, -1])}
            job.add(seq_id, prompt_len, rng.randint(1, 30), rng.choice([None, 4]), **sharing)
            seq_id += 1
        for _ in range(rng.choice([0, 3, 12])):
            job.step()
            if rng.random() < 0.1:
                job.scheduler.park(rng.randint(0, seq_id - 1))
            if rng.random() < 0.06:
                job.cancel(rng.randint(0, seq_id - 1))
            if rng.random() < 0.06:
                job.replay(rng.randint(0, seq_id - 1))
    job.run(100_000)
    assert all(job.tokens[one] == job.stops[one] for one, state in job.ends.items() if state is State.FINISHED)
    assert_nothing_is_held(job)
    counters = job.scheduler.counters
    names = ("parks_forced", "parks_pressure", "parks_lost", "replayed_tokens", "restores", "ended_parked", "cancelled")
    return Counter({name: getattr(counters, f"num_{name}") for name in names} | {"cached_tokens": counters.cached_tokens})


def test_random_runs_of_common_prompts_read_what_they_would_have_computed() -> None:
    totals: Counter[str] = Counter()
    for seed in range(120):
        try:
            totals += run_sharing(seed)
        except AssertionError as error:
            raise AssertionError(f"run_sharing({seed}): {error}") from error
    rare = {name: num for name, num in totals.items() if num < 3}
    assert not rare and len(totals) == 8, totals


def test_a_scheduler_without_keys_shares_nothing() -> None:
    job = loop(32)
    for seq_id in (0, 1):
        job.add(seq_id, 64, 4)
    job.run()
    assert (job.scheduler.counters.cached_tokens, job.scheduler.snapshot().num_pages_cached) == (0, 0)
    assert isinstance(job.scheduler, Scheduler)


def test_pages_that_two_share_count_when_both_make_way() -> None:
    """10 shared pages and 1 of each one's own: the urgent one needs 13 of 16, which parking them one by one seems not to give."""
    job = loop(16, rows=3, margin_steps=0, rotate="none")
    for seq_id in (0, 1):
        job.add(seq_id, 161, 30, page_keys=keys("a", 10), priority=10)
    job.run(until=lambda: job.tokens[1] == 2)
    assert job.scheduler.snapshot().num_pages_free == 4
    job.add(2, 200, 8, priority=0)
    job.step()
    assert sorted(job.noted("park")) == [0, 1]
    job.run()
    assert job.tokens == {0: 30, 1: 30, 2: 8}
    assert_nothing_is_held(job)
