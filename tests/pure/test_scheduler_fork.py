"""Choices that begin together with the chunk that ends their prompt: who does, on which pages, and what may go wrong meanwhile.

Page size 16 and chunks of 32: a prompt of 40 is chunks of 32 and 8, two full pages with keys and half a page that is copied.
"""

from typing import Any

import pytest

from jaxkv.scheduler import ContextShift, Fork, Outcome, PrefillChunk, Scheduler, SchedulerConfig, State, TableUpdate
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished
from jaxkv.scheduler.ledger import PageLedger
from jaxkv.scheduler.room import ends_now

KEYS = ("a", "b")


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 4, "page_size": 16, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16, "margin_steps": 0}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def group_of(num: int, job: FakeLoop, answer: int = 20, prompt_len: int = 40, **more: Any) -> None:
    for seq_id in range(num):
        job.add(seq_id, prompt_len, answer, **{"page_keys": KEYS, "group": 0, "keeps_prefix": False, **more})


def begun(job: FakeLoop) -> list[tuple[int, tuple[int, ...]]]:
    """Whose chunk began others, and whom, while the whole job runs to its end."""
    found = []
    while not job.scheduler.is_idle:
        plan = job.step()
        if plan.prefill and plan.prefill.forks:
            found.append((plan.prefill.seq_id, tuple(fork.seq_id for fork in plan.prefill.forks)))
    view = job.scheduler.snapshot()
    assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes) == (view.num_pages, 0, 0)
    return found


def test_all_that_have_a_row_begin_in_one_step_on_the_pages_of_the_first_and_a_copy_of_its_last() -> None:
    job = FakeLoop(config(12))
    group_of(4, job)
    job.step()
    assert job.scheduler.page_owners() == (0, 0, 1, 1, 2, 2, 3, 3, None, None, None, None)
    plan = job.step()
    forks = (Fork(1, 1, source=9, page=4), Fork(2, 2, source=9, page=6), Fork(3, 3, source=9, page=8))
    assert plan.prefill == PrefillChunk(0, 0, 32, 8, True, forks=forks)
    assert plan.prefill is not None and plan.prefill.seq_ids == (0, 1, 2, 3)
    assert plan.tables == (
        TableUpdate(0, 2, (9,)),
        TableUpdate(1, 0, (1, 2, 4)),
        TableUpdate(2, 0, (1, 2, 6)),
        TableUpdate(3, 0, (1, 2, 8)),
    )
    assert job.tokens == {0: 1, 1: 1, 2: 1, 3: 1}
    assert job.scheduler.snapshot().num_pages_free == 12 - 6
    assert [row.seq_id for row in job.step().decode] == [0, 1, 2, 3]
    assert begun(job) == []
    assert job.tokens == {0: 20, 1: 20, 2: 20, 3: 20}
    assert (job.scheduler.counters.num_forks, job.scheduler.counters.cached_tokens) == (3, 96)


@pytest.mark.parametrize(("prompt_len", "keys"), [(1, ()), (16, ()), (17, ("a",)), (32, ("a",)), (33, KEYS)])
def test_whatever_the_length_of_the_prompt_only_the_page_of_its_last_token_is_copied(prompt_len: int, keys: tuple[str, ...]) -> None:
    job = FakeLoop(config(12, prefix_cache=False))
    group_of(3, job, prompt_len=prompt_len, page_keys=keys)
    assert begun(job) == [(0, (1, 2))]
    assert job.scheduler.counters.cached_tokens == 2 * 16 * len(keys)


@pytest.mark.parametrize("more", [{"group": None}, {"page_keys": ()}, {"page_keys": ("a",)}])
def test_without_a_group_or_a_name_for_each_full_page_everybody_computes_the_end_of_its_prompt(more: dict[str, Any]) -> None:
    job = FakeLoop(config(32))
    group_of(3, job, **more)
    assert begun(job) == []
    assert job.tokens == {0: 20, 1: 20, 2: 20}


def ends_of_prompts(job: FakeLoop) -> list[tuple[int, bool, tuple[int, ...]]]:
    """Whose chunk ended its prompt, whether it drew a first token, and for whom else, while the whole job runs to its end."""
    found = []
    while not job.scheduler.is_idle:
        chunk = job.step().prefill
        if chunk and chunk.start + chunk.length == 40:
            found.append((chunk.seq_id, chunk.is_last and not chunk.is_replay, chunk.seq_ids[1:]))
    return found


def test_those_without_a_row_have_their_first_token_at_once_and_compute_the_end_of_their_prompt_later() -> None:
    job = FakeLoop(config(32, rows=2))
    group_of(4, job)
    job.step()
    chunk = job.step().prefill
    assert chunk == PrefillChunk(0, 0, 32, 8, True, forks=(Fork(1, 1, source=5, page=4),), draws=(2, 3))
    assert job.tokens == {0: 1, 1: 1, 2: 1, 3: 1}
    assert [job.scheduler.state(seq_id) for seq_id in (2, 3)] == [State.WAITING] * 2
    assert ends_of_prompts(job) == [(2, False, ()), (3, False, ())]
    assert job.tokens == {0: 20, 1: 20, 2: 20, 3: 20}
    assert job.scheduler.counters.num_forks == 3


def test_answers_of_one_token_end_in_the_line_without_ever_having_a_row() -> None:
    job = FakeLoop(config(3, rows=1))
    group_of(9, job, answer=1)
    job.step()
    job.step()
    assert job.scheduler.is_idle
    assert (job.tokens, job.noted("admit")) == (dict.fromkeys(range(9), 1), [0])
    assert set(job.ends.values()) == {State.FINISHED}


def test_a_chunk_draws_sixteen_first_tokens_and_the_next_to_end_its_prompt_draws_those_beyond() -> None:
    job = FakeLoop(config(64, rows=2))
    group_of(20, job, answer=3)
    assert ends_of_prompts(job) == [
        (0, True, tuple(range(1, 16))),
        *((seq_id, False, ()) for seq_id in range(2, 16)),
        (16, True, (17, 18, 19)),
        *((seq_id, False, ()) for seq_id in range(17, 20)),
    ]
    assert job.tokens == dict.fromkeys(range(20), 3)


def test_with_more_rows_than_that_a_chunk_draws_as_many_as_there_are_rows() -> None:
    job = FakeLoop(config(128, rows=18))
    group_of(20, job, answer=3)
    assert ends_of_prompts(job)[0] == (0, True, tuple(range(1, 18)))


def test_without_a_page_for_the_copy_a_choice_draws_its_first_token_all_the_same() -> None:
    """Five pages: 0 has two for its first chunk and one for the second, 1 found both of the first when it came in, and 2 the fifth."""
    job = FakeLoop(config(5, rows=3, prefill_chunk=16))
    group_of(3, job, answer=4)
    drawn = [
        plan.prefill.seq_ids
        for plan in iter(lambda: None if job.scheduler.is_idle else job.step(), None)
        if plan.prefill and plan.prefill.is_last
    ]
    assert drawn[0] == (0, 1, 2)
    assert job.tokens == {0: 4, 1: 4, 2: 4}


def test_one_that_an_operator_holds_says_nothing_before_it_is_released() -> None:
    job = FakeLoop(config(32), delay=lambda chunk: 3)
    group_of(3, job)
    job.step()
    job.scheduler.hold(0)
    job.run(until=lambda: job.tokens[1] == 4)
    assert job.tokens == {0: 0, 1: 4, 2: 4}
    job.scheduler.release(0)
    job.run()
    assert job.tokens == {0: 20, 1: 20, 2: 20}


def drawn_ahead(**changes: Any) -> FakeLoop:
    """Of three with two rows the last has its first token, and no row."""
    job = FakeLoop(config(12, rows=2, prefill_chunk=4, **changes), delay=lambda chunk: 2)
    group_of(3, job)
    job.run(until=lambda: job.tokens[2] == 1)
    assert job.scheduler.state(2) is State.WAITING
    return job


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("does", ["park", "replay", "recover"])
def test_one_that_drew_its_token_ahead_may_be_moved_about_before_its_prompt_is_computed(does: str, budget: int | None) -> None:
    job = drawn_ahead(host_budget_bytes=budget)
    if does == "recover":
        job.recover()
    job.run(until=lambda: job.scheduler.state(2) is State.PREFILLING and job.num_cells(2) == 36)
    {"park": job.scheduler.park, "replay": job.replay, "recover": lambda _: job.recover()}[does](2)
    job.run()
    assert (job.tokens, all_finished(job.ends)) == ({0: 20, 1: 20, 2: 20}, True)


def test_one_that_drew_its_token_ahead_may_leave_the_line() -> None:
    job = drawn_ahead()
    assert job.cancel(2) == ""
    job.run()
    assert (job.tokens, job.ends[2]) == ({0: 20, 1: 20, 2: 1}, State.CANCELLED)


def test_the_step_that_computes_the_prompt_of_one_that_drew_ahead_is_not_its_last() -> None:
    """With two tokens to make it is one from its end, but the chunk makes none: it may be parked in that step."""
    job = FakeLoop(config(12, rows=1))
    group_of(2, job, answer=2)
    job.run(until=lambda: job.scheduler.state(1) is State.PREFILLING)
    (view,) = job.scheduler.snapshot().sequences
    assert (view.num_generated, view.limit, view.num_cells) == (1, 2, 32)
    seq = job.scheduler._books.sequences[1]
    assert not ends_now(job.scheduler._books, seq)
    job.run()
    assert job.tokens == {0: 2, 1: 2}


def test_a_group_shares_one_line_of_those_that_live() -> None:
    job = FakeLoop(config(32))
    group_of(3, job)
    job.cancel(1)
    assert [seq.seq_id for seq in job.scheduler._books.groups[0]] == [0, 2]
    job.run()
    assert job.scheduler._books.groups == {}


def test_while_the_first_is_parked_the_next_takes_the_others_along() -> None:
    job = FakeLoop(config(32), delay=lambda chunk: 9)
    group_of(3, job)
    job.step()
    job.scheduler.park(0)
    job.run(until=lambda: job.tokens[2] == 1)
    assert job.tokens[0] == 1
    assert job.scheduler.is_away(0)
    job.run()
    assert job.tokens == {0: 20, 1: 20, 2: 20}
    assert job.scheduler.counters.num_forks == 2


def test_one_whose_image_is_not_verified_yet_begins_alone() -> None:
    """It is back for its last chunk, and only with that its checksums are known to be right; the other comes in that very step."""
    job = FakeLoop(config(32))
    group_of(1, job)
    job.step()
    job.scheduler.park(0)
    job.run(until=lambda: job.noted("restore") == [0])
    job.add(1, 40, 20, page_keys=KEYS, group=0)
    assert begun(job) == []
    assert job.tokens == {0: 20, 1: 20}


def test_one_that_has_computed_a_part_itself_goes_on_by_itself() -> None:
    """1 makes the first chunk while 0 is away, and 2 nothing; 0 is back before both have gone on."""
    job = FakeLoop(config(64, rows=3, prefix_cache=False))
    group_of(3, job, prompt_len=100, page_keys=tuple("abcdef"))
    job.step()
    job.scheduler.park(0)
    assert begun(job) == [(0, (2,))]
    assert job.tokens == {0: 20, 1: 20, 2: 20}


def test_a_group_whose_answers_have_one_token_is_over_with_its_prompt() -> None:
    job = FakeLoop(config(32))
    group_of(3, job, answer=1)
    job.step()
    job.step()
    assert job.scheduler.is_idle
    assert job.tokens == {0: 1, 1: 1, 2: 1}


def test_the_first_may_end_with_its_first_token_and_the_others_keep_the_pages() -> None:
    job = FakeLoop(config(32))
    group_of(1, job, answer=1)
    for seq_id in (1, 2):
        job.add(seq_id, 40, 30, page_keys=KEYS, group=0, keeps_prefix=False)
    assert begun(job) == [(0, (1, 2))]
    assert job.tokens == {0: 1, 1: 30, 2: 30}


@pytest.mark.parametrize("leaves", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_between_plan_and_outcome_anybody_may_be_cancelled_and_those_who_stay_have_begun(leaves: tuple[int, ...]) -> None:
    scheduler = Scheduler(config(12))
    for seq_id in range(3):
        scheduler.add(seq_id, 40, 20, 0.0, page_keys=KEYS, group=0, keeps_prefix=False)
    scheduler.commit(Outcome(prefilled=scheduler.plan(0.0, 9).prefill), 0.0)
    chunk = scheduler.plan(0.0, 9).prefill
    scheduler.check()
    assert chunk is not None and chunk.seq_ids == (0, 1, 2)
    for seq_id in leaves:
        scheduler.cancel(seq_id)
        scheduler.check()
    scheduler.commit(Outcome(prefilled=chunk), 0.0)
    scheduler.check()
    stay = {0, 1, 2} - set(leaves)
    assert [scheduler.state(seq_id) for seq_id in stay] == [State.DECODING] * len(stay)
    assert scheduler.snapshot().num_pages_free == 12 - (2 + len(stay) if stay else 0)
    assert {row.seq_id for row in scheduler.plan(0.0, 9).decode} == stay


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_what_one_has_lost_it_computes_again_alone_and_the_others_notice_nothing(which: int, num_tokens: int) -> None:
    job = FakeLoop(config(32))
    group_of(3, job)
    job.run(until=lambda: job.tokens[0] == num_tokens)
    job.replay(which)
    job.run()
    assert job.tokens == {0: 20, 1: 20, 2: 20}
    assert job.scheduler.counters.num_replayed_tokens == 40 - 32 + num_tokens - 1  # two pages are there still


@pytest.mark.parametrize("budget", [None, 0, 32])
@pytest.mark.parametrize("hold", [False, True])
def test_a_group_that_began_together_and_outgrows_the_pool_takes_turns(budget: int | None, hold: bool) -> None:
    job = FakeLoop(config(8, host_budget_bytes=budget, hold=hold, chunk_pages=2), delay=lambda chunk: 2)
    group_of(4, job, answer=60)
    assert begun(job)[0] == (0, (1, 2, 3))
    assert job.tokens == dict.fromkeys(range(4), 60)
    assert job.scheduler.counters.num_parks > 0


def test_a_prompt_that_fills_its_context_is_shifted_by_each_that_began_with_it() -> None:
    job = FakeLoop(config(32))
    group_of(3, job, prompt_len=48, shift=ContextShift(48, 16, 16), answer=40)
    assert begun(job) == [(0, (1, 2))]
    assert job.tokens == {0: 40, 1: 40, 2: 40}
    assert job.scheduler.counters.num_shifts == 9


def test_pages_are_held_beside_the_one_who_fills_them_and_beside_nobody_else() -> None:
    ledger = PageLedger(3)
    ledger.take(7, 2)
    ledger.hold_beside(8, [1])
    ledger.check()
    assert (ledger.holders(1), ledger.num_shared(7)) == ((7, 8), 1)
    with pytest.raises(AssertionError, match="page 1 cannot be held beside 7 and 8 by 8"):
        ledger.hold_beside(8, [1])
    with pytest.raises(AssertionError, match="page 3 cannot be held beside None by 8"):
        ledger.hold_beside(8, [3])
    ledger.give_back(7, [1, 2])
    ledger.check()
    assert (ledger.num_free, ledger.holders(1)) == (2, (8,))
