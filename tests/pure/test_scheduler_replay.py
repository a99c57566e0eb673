"""Sequences without an image, through a fake runner that checks every cell that is read: whose it is, where, in which life computed.

(p, n) is a request with p prompt tokens that generates n. Page size 1, two rows, chunk 32 and margin 8 unless said otherwise.
"""

from typing import Any

import pytest

from jaxkv.scheduler import Plan, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 2, "page_size": 1, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16, "host_budget_bytes": 0}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def loop(num_pages: int, delay: int = 0, **changes: Any) -> FakeLoop:
    return FakeLoop(config(num_pages, **changes), delay=lambda chunk: delay)


def assert_nothing_is_left(job: FakeLoop) -> None:
    view = job.scheduler.snapshot()
    assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes, job.runner.host_bytes) == (view.num_pages, 0, 0, 0)


def test_fifty_tokens_after_a_prompt_of_three_are_fifty_two_cells_to_replay_and_the_next_token_is_the_fifty_first() -> None:
    job = loop(128, chunk_pages=4)
    job.add(0, 3, 64)
    job.run(until=lambda: job.tokens[0] == 50)
    job.scheduler.park(0)
    plans: list[Plan] = []
    while len(plans) < 2 or job.scheduler.state(0) is State.REPLAYING:
        plans.append(job.step())
        assert job.tokens[0] == 50
    # The prompt in one chunk, then a row for each of tokens 1 to 49: cells 3 to 51.
    assert [(note.kind, note.num_tokens) for plan in plans for note in plan.notes] == [("drop", 52), ("replay", 52)]
    chunks, rows = [plan.prefill for plan in plans if plan.prefill], [row for plan in plans for row in plan.decode]
    assert [(chunk.start, chunk.length, chunk.is_last, chunk.is_replay) for chunk in chunks] == [(0, 3, True, True)]
    assert [row.position for row in rows] == list(range(3, 52)) and all(row.is_replay for row in rows)
    (row,) = job.step().decode
    assert (row.position, row.is_replay, job.tokens[0]) == (52, False, 51)
    job.run()
    counters = job.scheduler.counters
    assert job.tokens == {0: 64}
    assert (counters.num_parks, counters.num_parks_copied, counters.num_parks_dropped, counters.num_replayed_tokens) == (1, 0, 1, 52)
    assert_nothing_is_left(job)


@pytest.mark.parametrize("over_budget", ["replay", "wait"])
@pytest.mark.parametrize("victim", ["smallest", "largest", "youngest", "oldest"])
@pytest.mark.parametrize(
    "mix",
    [
        [(250, 4), (250, 4)],
        [(8, 160), (8, 160)],
        [(150, 16), (150, 16)],
        [(8, 230), (150, 90)],
        [(8, 100), (8, 100), (8, 100), (120, 20)],
        [(130, 100), (130, 100), (20, 30)],
        [(1, 256), (256, 1), (255, 2), (3, 64)],
    ],
)
def test_without_any_host_memory_every_mix_that_fits_alone_completes(mix: list[tuple[int, int]], victim: str, over_budget: str) -> None:
    job = loop(256, rows=4, victim=victim, over_budget=over_budget)
    for seq_id, (prompt_len, max_new) in enumerate(mix):
        job.add(seq_id, prompt_len, max_new)
    job.run(20_000)
    assert all_finished(job.ends)
    assert job.tokens == {seq_id: max_new for seq_id, (_, max_new) in enumerate(mix)}
    assert (job.scheduler.counters.num_parks_copied, job.scheduler.counters.host_bytes_peak) == (0, 0)
    assert_nothing_is_left(job)


@pytest.mark.parametrize("every", [1, 2, 7])
def test_dropped_at_every_token_beside_others_all_complete_and_every_lost_cell_is_counted(every: int) -> None:
    job = loop(64, rows=3, prefill_chunk=4, margin_steps=2, park_every=every)
    for seq_id, (prompt_len, max_new) in enumerate([(10, 8), (13, 12), (1, 20), (17, 5)]):
        job.add(seq_id, prompt_len, max_new)
    job.run()
    counters = job.scheduler.counters
    assert job.tokens == {0: 8, 1: 12, 2: 20, 3: 5}
    assert counters.num_parks == counters.num_parks_dropped + (1 if counters.num_parks_copied else 0) > 0
    assert counters.num_replayed_tokens == sum(note.num_tokens for _, note in job.notes if note.kind == "replay")
    assert_nothing_is_left(job)


def test_an_image_that_fits_is_copied_and_the_next_one_is_dropped() -> None:
    job = loop(256, chunk_pages=1, chunk_bytes=1, host_budget_bytes=100, chunks_per_step=1000, delay=30)
    job.add(0, 60, 20)
    job.add(1, 50, 60)
    job.run(until=lambda: job.num_cells(1) == 50)
    job.scheduler.park(0)
    job.step()
    job.scheduler.park(1)
    job.step()
    assert (job.noted("park"), job.noted("drop"), job.noted("park_refused")) == ([0], [1], [])
    job.run()
    counters = job.scheduler.counters
    assert job.tokens == {0: 20, 1: 60}
    assert (counters.num_parks_copied, counters.num_parks_dropped, counters.num_replayed_tokens) == (1, 1, 51)
    assert counters.host_bytes_peak <= 100
    assert_nothing_is_left(job)


def test_bytes_of_a_cancelled_return_are_not_used_again_while_its_copy_flies_so_the_next_is_dropped() -> None:
    job = FakeLoop(config(64, chunk_pages=4, host_budget_bytes=64), delay=lambda chunk: 20 if chunk.epoch == 2 else 0)
    job.add(0, 12, 30)
    job.add(1, 10, 30)
    job.run(until=lambda: job.num_cells(1) == 10)
    job.scheduler.park(0)  # 13 cells: 4 chunks, 64 bytes, the whole budget
    job.run(until=lambda: job.scheduler.state(0) is State.RESTORING)
    job.cancel(0)
    job.scheduler.park(1)
    job.step()
    assert job.noted("drop") == [1]
    job.run()
    assert (job.tokens[1], job.scheduler.counters.host_bytes_peak) == (30, 64)
    assert_nothing_is_left(job)


def test_where_they_are_to_wait_the_one_refused_pauses_and_if_nobody_can_go_on_the_smallest_is_replayed_all_the_same() -> None:
    job = loop(64, over_budget="wait")
    job.add(0, 20, 40)
    job.add(1, 12, 40)
    job.run()
    assert job.tokens == {0: 40, 1: 40}
    (drop,) = [note for _, note in job.notes if note.kind == "drop"]
    # 64 pages: the leader has 37 cells, the other 27.
    assert (drop.seq_id, drop.reason, drop.num_tokens) == (1, "stuck", 27)
    assert job.noted("park_refused") == [1]
    counters = job.scheduler.counters
    assert (counters.num_parks_refused, counters.num_parks_dropped, counters.num_replayed_tokens) == (1, 1, 27)
    assert_nothing_is_left(job)


@pytest.mark.parametrize("park_every", [1, 3])
def test_a_sequence_that_is_refused_again_and_again_is_told_of_once(park_every: int) -> None:
    job = loop(128, over_budget="wait", park_every=park_every)
    job.add(0, 20, 40)
    job.add(1, 12, 40)
    job.run()
    assert job.noted("park_refused") == [0, 1]
    assert (job.scheduler.counters.num_parks_refused, job.scheduler.counters.num_parks) == (2, 0)


STATES = ["prefilling", "decoding", "parking", "parked", "restoring", "replaying"]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_what_is_lost_in_any_state_is_computed_again_and_nobody_else_notices(state: str, hold: bool) -> None:
    """Copies take 20 steps, so that they land long after the loss, as strays; the pages they may touch are handed on only then."""
    job = loop(64, delay=20, chunk_pages=4, host_budget_bytes=None, prefill_chunk=8, hold=hold)
    job.add(0, 17, 12)
    job.add(1, 9, 40)
    if state == "prefilling":
        job.run(until=lambda: job.num_cells(0) == 8)
    else:
        job.run(until=lambda: job.tokens[0] == 5)
        if state == "replaying":
            job.replay(0)
        elif state != "decoding":
            job.scheduler.park(0)
        job.run(until=lambda: job.scheduler.state(0) == state)
    before = job.scheduler.counters.num_parks
    assert job.replay(0) == ""
    assert (job.scheduler.state(0), job.scheduler.snapshot().host_bytes > 0) == (State.PARKED, state in ("parking", "restoring"))
    # One that was away stays in the park that it was in; one that was not is parked now.
    assert job.scheduler.counters.num_parks - before == (1 if state in ("prefilling", "decoding") else 0)
    job.run()
    assert job.tokens == {0: 12, 1: 40}
    # 8 prompt tokens, or the 17 of the prompt and 4 of 5 generated; a replay cut short in its first chunk has made 8 of them in vain.
    assert job.scheduler.counters.num_replayed_tokens == {"prefilling": 8, "replaying": 29}.get(state, 21)
    assert_nothing_is_left(job)


def test_a_replay_cut_short_is_the_head_again() -> None:
    job = loop(64, rows=1)
    job.add(0, 20, 10)
    job.run(until=lambda: job.tokens[0] == 5)
    job.add(1, 4, 4)
    job.replay(0)
    job.run(until=lambda: job.scheduler.state(0) is State.REPLAYING)
    job.replay(0)
    job.run()
    assert job.noted("replay", "admit") == [0, 0, 0, 1]


def test_a_loss_of_nothing_is_refused_with_a_reason() -> None:
    job = loop(64, rows=1)
    job.add(0, 20, 3)
    job.add(1, 4, 4)
    job.step()
    assert job.scheduler.replay(7, 1.0) == "sequence 7 is not known"
    assert job.scheduler.replay(1, 1.0) == "sequence 1 is waiting"
    job.run()
    assert job.scheduler.replay(0, 1.0) == "sequence 0 is finished"
    assert job.scheduler.counters.num_parks == 0


def test_a_replaying_sequence_is_nobodys_victim_until_it_has_made_a_token() -> None:
    """The pool is full when the other needs a page: it waits for the replaying one's first token, then parks it."""
    job = loop(40, margin_steps=0, prefill_chunk=4)
    job.add(0, 12, 20)
    job.run(until=lambda: job.tokens[0] == 3)
    job.add(1, 4, 30)
    job.run(until=lambda: job.tokens[1] == 2)
    job.scheduler.park(0)
    job.run(until=lambda: job.scheduler.state(0) is State.REPLAYING)
    assert job.scheduler.park(0) == "sequence 0 is replaying"
    tokens = job.tokens[0]
    job.run(until=lambda: job.scheduler.state(0) is not State.REPLAYING)
    assert (job.scheduler.state(0), job.tokens[0]) == (State.DECODING, tokens)
    job.run()
    assert job.tokens == {0: 20, 1: 30}


def test_a_replay_takes_its_row_and_all_its_pages_at_once() -> None:
    job = loop(64, page_size=4, prefill_chunk=8)
    job.add(0, 20, 20)
    job.run(until=lambda: job.tokens[0] == 9)
    job.scheduler.park(0)
    job.step()
    (view,) = job.scheduler.snapshot().sequences
    # 28 cells were lost: 7 pages, and one more for the first new token's input.
    assert (view.state, view.num_pages, view.num_cells, view.replay_to) == (State.REPLAYING, 8, 8, 28)
