"""Small cases that must come out right, driven through a fake runner that checks every cell that is read.

(p, n) is a request with p prompt tokens that generates n. Page size 1, two rows, chunk 32 and margin 8 unless said otherwise, so that
pages are tokens.
"""

from typing import Any

import pytest

from jaxkv.scheduler import DoesNotFit, SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 2, "page_size": 1, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def loop(num_pages: int, delay: int = 0, **changes: Any) -> FakeLoop:
    return FakeLoop(config(num_pages, **changes), delay=lambda chunk: delay)


def assert_nothing_is_left(job: FakeLoop) -> None:
    view = job.scheduler.snapshot()
    assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes) == (view.num_pages, 0, 0)
    assert job.runner.host_bytes == 0
    assert job.scheduler.is_idle


def test_a_newcomer_waits_for_room_for_its_prompt_a_token_and_the_margins() -> None:
    job = loop(256)
    job.add(0, 8, 240)
    job.run(until=lambda: job.num_cells(0) == 200)
    job.add(1, 100, 8)
    job.run(until=lambda: 1 in job.noted("admit"))
    assert job.ends == {0: State.FINISHED}
    assert job.tokens[0] == 240
    job.run()
    assert job.tokens == {0: 240, 1: 8}
    assert job.scheduler.counters.num_parks == 0
    assert_nothing_is_left(job)


@pytest.mark.parametrize(("cells_at_arrival", "is_admitted_beside"), [(139, True), (140, True), (141, False)])
def test_the_gate_is_exact_to_one_token(cells_at_arrival: int, is_admitted_beside: bool) -> None:
    # (100, 8) needs 107 cells at the most; the resident's gate is its cells + 1 + 8: 140 + 9 + 107 == 256.
    job = loop(256)
    job.add(0, 8, 240)
    job.run(until=lambda: job.num_cells(0) == cells_at_arrival)
    job.add(1, 100, 8)
    job.step()
    assert (1 in job.noted("admit")) == is_admitted_beside
    job.run()
    assert job.tokens == {0: 240, 1: 8}


@pytest.mark.parametrize(("cells_at_arrival", "is_admitted_beside"), [(131, True), (132, True), (133, False)])
def test_with_hold_the_gate_stands_twice_as_high_to_the_token(cells_at_arrival: int, is_admitted_beside: bool) -> None:
    # As above, with 16 tokens of margin: 132 + 17 + 107 == 256.
    job = loop(256, hold=True)
    job.add(0, 8, 240)
    job.run(until=lambda: job.num_cells(0) == cells_at_arrival)
    job.add(1, 100, 8)
    job.step()
    assert (1 in job.noted("admit")) == is_admitted_beside
    job.run()
    assert job.tokens == {0: 240, 1: 8}


@pytest.mark.parametrize(("delay", "is_back_beside"), [(0, True), (5, False)])
def test_one_parked_in_its_prompt_comes_back_by_the_same_gate_and_is_parked_once(delay: int, is_back_beside: bool) -> None:
    # (100, 8) is parked with 32 cells at the resident's 138. When its copy has landed that one has 140, or some more: one too many.
    job = loop(256, delay=delay)
    job.add(0, 8, 240)
    job.run(until=lambda: job.num_cells(0) == 137)
    job.add(1, 100, 8)
    job.step()
    assert (job.num_cells(0), job.num_cells(1)) == (138, 32)
    job.scheduler.park(1)
    job.run(until=lambda: 1 in job.noted("restore"))
    assert (0 not in job.ends) == is_back_beside
    job.run()  # the fake runner refuses a position computed twice
    assert job.tokens == {0: 240, 1: 8}
    assert job.scheduler.counters.num_parks == 1


def test_while_the_oldest_prompt_waits_for_pages_another_that_has_its_pages_goes_on() -> None:
    # 58 pages, three decode: the long prompt's fifth chunk of 4 lacks pages, and those of the victim are still leaving.
    job = loop(58, rows=5, prefill_chunk=4, margin_steps=0, hold=True, delay=10, victim="largest")
    for seq_id in range(3):
        job.add(seq_id, 4, 30)
    job.run(until=lambda: job.num_cells(0) == 8)
    job.add(3, 24, 2)
    job.add(4, 8, 2)
    chunks = []
    while 4 not in chunks:
        plan = job.step()
        chunks += [plan.prefill.seq_id] if plan.prefill else []
    assert (chunks, job.scheduler.state(3)) == ([3, 3, 3, 3, 4], State.PREFILLING)
    assert len(job.noted("park")) == 1
    job.run()
    assert job.tokens == {0: 30, 1: 30, 2: 30, 3: 2, 4: 2}


def test_the_trash_page_is_no_capacity() -> None:
    job = loop(15, page_size=16)
    with pytest.raises(DoesNotFit) as caught:
        job.scheduler.add(9, 241, 1, 0.0)
    assert (caught.value.needs, caught.value.has) == (241, 240)
    assert str(caught.value) == "the prompt has 241 tokens, and pool.tokens allows 240: shorten the prompt or raise pool.tokens"
    job.add(0, 8, 8)
    job.add(1, 240, 1)
    job.run()
    assert job.tokens == {0: 8, 1: 1}
    assert_nothing_is_left(job)


def test_the_margin_parks_nobody_for_ever() -> None:
    job = loop(256)
    job.add(0, 250, 4)
    job.add(1, 250, 4)
    job.run()
    assert job.tokens == {0: 4, 1: 4}
    assert all_finished(job.ends)


def test_a_lone_sequence_ends_at_the_pools_length_and_the_next_is_served() -> None:
    job = loop(128, rows=1)
    assert job.add(0, 64, 128) == 65
    assert job.add(1, 64, 128) == 65
    job.run()
    assert job.tokens == {0: 65, 1: 65}
    assert all_finished(job.ends)


def test_nobody_passes_the_head_however_small() -> None:
    job = loop(1024, rows=4)
    job.add(0, 500, 300)
    for seq_id in (1, 2, 3):
        job.add(seq_id, 40, 150)
    job.run(until=lambda: job.num_cells(0) == 520)
    assert job.scheduler.park(0) == ""
    job.step()
    parked_at = job.num_steps
    for seq_id in range(4, 14):
        job.add(seq_id, 40, 150)
    job.run(until=lambda: 0 in job.noted("restore"))
    assert job.noted("admit") == [0, 1, 2, 3]
    assert job.num_steps - parked_at <= 150
    job.run()
    assert all_finished(job.ends)


def test_the_parked_return_in_the_order_they_left_and_then_the_waiting_start() -> None:
    job = loop(102, rows=3, delay=3)
    for seq_id, prompt_len in ((1, 20), (2, 30), (3, 25)):
        job.add(seq_id, prompt_len, 60)
    job.run(until=lambda: job.num_cells(3) == 27)
    for seq_id in (1, 2, 3):
        job.scheduler.park(seq_id)
        if seq_id == 1:
            job.add(4, 90, 5)
            job.add(5, 5, 5)
        job.step()
    job.run()
    firsts = list(dict.fromkeys(job.noted("restore", "admit")[3:]))
    assert firsts == [1, 2, 3, 4, 5]
    assert job.tokens == {1: 60, 2: 60, 3: 60, 4: 5, 5: 5}


def test_a_return_takes_all_its_pages_or_none() -> None:
    job = loop(256, delay=12)
    job.add(0, 100, 80)
    job.add(1, 100, 80)
    job.run(until=lambda: job.num_cells(0) == 120)
    job.scheduler.park(0)
    job.run(until=lambda: job.num_cells(1) == 130)
    job.scheduler.park(1)
    job.run(until=lambda: job.noted("restore") == [0])
    job.run(until=lambda: job.scheduler.state(0) is State.DECODING and job.scheduler.state(1) is State.PARKED)
    while 0 not in job.ends and job.num_cells(0) < 150:
        plan = job.step()
        assert not plan.restore
        assert job.scheduler.snapshot().num_pages_free == 256 - job.num_cells(0)
    job.run()
    assert job.noted("restore") == [0, 1]
    assert job.tokens == {0: 80, 1: 80}


def test_one_that_ends_in_this_step_is_not_parked() -> None:
    # Before the step: 14 + 9 cells of 24. Both need one more, the second's is its last: the first waits one step for the others' pages.
    job = loop(24, margin_steps=0)
    job.add(0, 10, 12)
    job.add(1, 6, 5)
    job.run(until=lambda: job.num_cells(1) == 9)
    assert job.num_cells(0) == 14
    plan = job.step()
    assert [row.seq_id for row in plan.decode] == [1]
    assert job.ends == {1: State.FINISHED}
    job.run()
    assert job.tokens == {0: 12, 1: 5}
    assert job.scheduler.counters.num_parks == 0
    assert_nothing_is_left(job)


def test_pages_about_to_be_free_spare_a_third_one_the_park() -> None:
    # 14 + 9 + 8 cells of 32, all three need one more, and the second ends with it: without its pages the third would be parked.
    job = loop(32, rows=3, margin_steps=0)
    job.add(0, 10, 12)
    job.add(1, 6, 5)
    job.add(2, 6, 6)
    job.run(until=lambda: job.num_cells(1) == 9)
    assert (job.num_cells(0), job.num_cells(2)) == (14, 8)
    plan = job.step()
    assert [row.seq_id for row in plan.decode] == [1]
    job.run()
    assert job.tokens == {0: 12, 1: 5, 2: 6}
    assert job.scheduler.counters.num_parks == 0


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 7])
def test_parking_at_every_token_beside_others_keeps_every_cell(delay: int, hold: bool) -> None:
    job = loop(60, rows=3, delay=delay, hold=hold, park_every=1, chunk_pages=4, prefill_chunk=4, margin_steps=2)
    for seq_id, (prompt_len, num) in enumerate([(10, 8), (15, 12), (3, 20), (20, 5)]):
        job.add(seq_id, prompt_len, num)
    job.run()
    assert job.tokens == {0: 8, 1: 12, 2: 20, 3: 5}
    # (10, 8): chunks at 0, 4, 8 of which two leave prompt to do, and a park after each of 7 tokens that leave tokens to do; and so on.
    assert job.scheduler.counters.num_parks_forced == (2 + 7) + (3 + 11) + (0 + 19) + (4 + 4)
    assert_nothing_is_left(job)


def test_host_bytes_of_a_cancelled_return_are_not_used_again_before_its_copy_lands() -> None:
    job = FakeLoop(config(64, chunk_pages=4, host_budget_bytes=64, over_budget="wait"), delay=lambda chunk: 20 if chunk.epoch == 2 else 0)
    job.add(0, 12, 30)
    job.add(1, 10, 30)
    job.run(until=lambda: job.num_cells(1) == 10)
    job.scheduler.park(0)  # 13 cells: 4 chunks, 64 bytes, the whole budget
    job.run(until=lambda: job.scheduler.state(0) is State.RESTORING)
    assert job.cancel(0) == ""
    assert job.ends == {0: State.CANCELLED}
    job.scheduler.park(1)
    job.step()
    assert job.scheduler.state(1) is State.DECODING
    assert job.scheduler.counters.num_parks_refused == 1
    job.run(until=lambda: not job.runner.flights)
    job.step()
    assert job.scheduler.snapshot().host_bytes == 0
    job.run()
    assert job.tokens[1] == 30
    assert_nothing_is_left(job)


def test_repeated_commands_change_nothing_and_say_why() -> None:
    job = loop(256, delay=3)
    scheduler = job.scheduler
    job.add(0, 32, 20)
    assert scheduler.park(0) == "sequence 0 is waiting"
    job.step()
    assert scheduler.park(0) == ""
    assert scheduler.park(0) == "sequence 0 is to be parked already"
    job.step()
    seen = []
    while (state := scheduler.state(0)) is not State.DECODING:
        if state not in seen:
            seen.append(state)
        assert scheduler.park(0) == f"sequence 0 is {state}"
        job.step()
    assert seen == [State.PARKING, State.RESTORING]
    job.run()
    assert scheduler.park(0) == "sequence 0 is finished"
    assert job.cancel(0) == "sequence 0 is finished"
    assert scheduler.fail(0, "no reason") == "sequence 0 is finished"
    assert (scheduler.park(7), job.cancel(7)) == ("sequence 7 is not known", "sequence 7 is not known")
    counters = scheduler.counters
    assert (counters.num_parks, counters.num_restores, counters.num_cancelled, counters.num_failed) == (1, 1, 0, 0)


def test_six_of_eight_leave_at_once_and_the_others_finish() -> None:
    job = loop(200, rows=4, prefill_chunk=8)
    for seq_id in range(4):
        job.add(seq_id, 40, 60)
    job.run(until=lambda: len(job.noted("park")) == 2)
    job.run(until=lambda: job.scheduler.snapshot().num_parked == 2 and not job.runner.flights)
    parked = sorted(set(job.noted("park")))
    assert len(parked) == 2
    for seq_id in range(4, 8):
        job.add(seq_id, 24, 10)
    (leaving, staying) = [seq_id for seq_id in range(4) if seq_id not in parked]
    for seq_id in (4, 5, *parked, leaving, 6):
        assert job.cancel(seq_id) == ""
    job.run()
    assert {seq_id for seq_id, end in job.ends.items() if end is State.FINISHED} == {staying, 7}
    assert (job.tokens[staying], job.tokens[7]) == (60, 10)
    assert_nothing_is_left(job)


def test_a_cancelled_prefill_gives_everything_back() -> None:
    job = loop(200, prefill_chunk=8)
    job.add(0, 40, 10)
    job.step()
    assert job.scheduler.state(0) is State.PREFILLING
    job.cancel(0)
    assert_nothing_is_left(job)


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("state", [State.PARKING, State.RESTORING])
def test_a_cancel_during_a_copy_ends_now_and_gives_back_when_the_copy_is_done(state: State, hold: bool) -> None:
    job = loop(64, delay=50, hold=hold, chunk_pages=4, chunks_per_step=2)
    job.add(0, 32, 10)
    job.step()
    job.scheduler.park(0)  # 32 pages: 8 chunks, 2 a step
    job.step()
    job.run(until=lambda: job.scheduler.state(0) is state)
    job.add(1, 8, 4)
    assert job.cancel(0) == ""
    assert job.ends == {0: State.CANCELLED}
    in_flight = len(job.runner.flights)
    view = job.scheduler.snapshot()
    assert (in_flight, view.host_bytes) == (2, 32)
    assert view.num_pages_leaving == (8 if hold or state is State.RESTORING else 0)
    assert view.num_pages_free == 64 - view.num_pages_leaving
    job.run(until=lambda: 1 in job.ends)
    assert job.tokens[1] == 4
    assert len(job.runner.flights) == 2
    job.run()
    assert_nothing_is_left(job)


def test_a_sequence_can_be_forgotten_while_its_copies_are_in_flight() -> None:
    job = loop(64, delay=5)
    job.add(0, 32, 10)
    job.step()
    job.scheduler.park(0)
    job.step()
    job.scheduler.cancel(0)
    job.scheduler.forget(0)
    job.tokens.clear()
    job.runner.drop(0)
    job.run()
    assert_nothing_is_left(job)


def test_where_pages_count_the_pool_is_full_at_226_tokens() -> None:
    job = loop(16, page_size=16)
    job.add(0, 129, 60)
    job.add(1, 97, 60)
    job.run(until=lambda: bool(job.noted("park")))
    assert [note.num_pages for _, note in job.notes if note.kind == "park"] == [7]
    assert job.noted("park") == [1]
    assert job.scheduler.counters.pool_use_at_park == [1.0]
    assert job.num_cells(0) == 145  # in this very step it got its tenth page: 144 cells fill nine
    job.run()
    assert job.tokens == {0: 60, 1: 60}
    assert job.scheduler.counters.num_last_resorts == 0


def test_a_park_beyond_the_host_budget_is_refused_and_counted() -> None:
    job = loop(256, chunk_pages=1, chunk_bytes=1, host_budget_bytes=100, over_budget="wait", chunks_per_step=1000, delay=30)
    job.add(0, 60, 20)
    job.add(1, 50, 60)
    job.run(until=lambda: job.num_cells(1) == 50)
    job.scheduler.park(0)
    job.step()
    held = job.scheduler.snapshot().host_bytes
    assert 60 <= held <= 65
    job.scheduler.park(1)
    job.step()
    assert job.scheduler.state(1) is State.DECODING
    assert job.scheduler.snapshot().host_bytes == held
    assert job.noted("park_refused") == [1]
    assert job.scheduler.counters.num_parks_refused == 1
    job.run()
    assert job.tokens == {0: 20, 1: 60}
    assert job.scheduler.counters.host_bytes_peak <= 100


@pytest.mark.parametrize(("prompt_len", "max_new", "num"), [(5, 1, 1), (5, 2, 2), (64, 1, 1), (64, None, 1), (63, None, 2), (63, 9, 2)])
def test_tiny_answers_have_exactly_their_tokens_also_under_pressure(prompt_len: int, max_new: int | None, num: int) -> None:
    job = loop(64, rows=3)
    job.add(0, 8, 40)
    job.add(1, 8, 40)
    job.run(until=lambda: job.num_cells(0) > 20)
    assert job.add(2, prompt_len, max_new) == num
    job.run()
    assert job.tokens == {0: 40, 1: 40, 2: num}


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "message"),
    [
        (5, 0, "a sequence generates at least 1 token, got 0"),
        (0, 5, "a prompt has at least 1 token, got 0"),
        (5, 5, "sequence 0 is known already: forget it after its end, or choose another id"),
    ],
)
def test_wrong_requests_are_refused_at_the_door(prompt_len: int, max_new: int, message: str) -> None:
    job = loop(64)
    if "known" in message:
        job.add(0, 1, 1)
    with pytest.raises(ValueError, match=message):
        job.scheduler.add(0, prompt_len, max_new, 0.0)


def test_the_models_length_ends_a_sequence_and_refuses_a_prompt() -> None:
    job = loop(64, max_len=20)
    assert job.add(0, 18, None) == 3
    assert job.add(1, 20, 5) == 1
    with pytest.raises(DoesNotFit, match=r"the prompt has 21 tokens, and model\.max_len allows 20"):
        job.add(2, 21, 1)


def test_pages_on_their_way_out_tempt_nobody_to_park_a_second_victim() -> None:
    job = loop(100, rows=3, hold=True, delay=10, margin_steps=2, chunk_pages=4, chunks_per_step=100)
    for seq_id in range(3):
        job.add(seq_id, 20, 40)
    job.run(until=lambda: bool(job.noted("park")))
    for _ in range(10):
        job.step()
        assert len(job.noted("park")) == 1
    job.run()
    assert job.tokens == {0: 40, 1: 40, 2: 40}
    assert job.scheduler.counters.num_last_resorts == 0


@pytest.mark.parametrize("planner", [True, False])
def test_with_held_pages_the_step_waits_until_the_copy_lands(planner: bool) -> None:
    job = loop(64, rows=2, hold=True, delay=50, margin_steps=0, planner=planner)
    job.add(0, 20, 40)
    job.add(1, 20, 40)
    job.run(until=lambda: bool(job.noted("park")))
    waited = 0
    while not job.step().decode:
        waited += 1
    assert 48 <= waited <= 51
    assert len(job.noted("park")) == 1
    job.run()
    assert job.tokens == {0: 40, 1: 40}
    assert all_finished(job.ends)


def test_copies_that_land_while_nobody_runs_are_noticed() -> None:
    job = loop(64, delay=9)
    job.add(0, 20, 10)
    job.add(1, 20, 10)
    job.run(until=lambda: job.num_cells(1) == 20)
    job.scheduler.park(0)
    job.scheduler.park(1)
    job.run(until=lambda: job.num_idle_steps > 5)
    job.run()
    assert job.tokens == {0: 10, 1: 10}
    assert job.scheduler.counters.num_restores == 2


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("planner", [True, False])
def test_two_that_fit_alone_take_turns(planner: bool, hold: bool) -> None:
    job = loop(256, planner=planner, hold=hold)
    job.add(0, 8, 160)
    job.add(1, 8, 160)
    job.run()
    counters = job.scheduler.counters
    assert job.tokens == {0: 160, 1: 160}
    if planner:
        assert (counters.num_parks_pressure, counters.num_last_resorts) == (1, 0)
    else:
        assert (counters.num_parks_pressure, counters.num_last_resorts) == (0, 1)
    assert len(counters.pool_use_at_park) == 1
    assert_nothing_is_left(job)


def test_two_long_prompts_complete() -> None:
    job = loop(256)
    job.add(0, 150, 16)
    job.add(1, 150, 16)
    job.run()
    assert job.tokens == {0: 16, 1: 16}


def test_a_long_answer_beside_a_long_prompt_completes() -> None:
    job = loop(256)
    job.add(0, 8, 230)
    job.add(1, 150, 90)
    job.run()
    assert job.tokens == {0: 230, 1: 90}


def test_a_prompt_into_a_nearly_full_pool_is_served_with_the_others() -> None:
    job = loop(256, rows=4)
    for seq_id in range(3):
        job.add(seq_id, 8, 100)
    job.run(until=lambda: job.num_cells(0) == 70)
    job.add(3, 120, 20)
    job.run()
    assert job.tokens == {0: 100, 1: 100, 2: 100, 3: 20}


@pytest.mark.parametrize("planner", [True, False])
def test_a_prompt_that_arrives_late_is_computed_once(planner: bool) -> None:
    job = loop(256, planner=planner)
    job.add(0, 8, 200)
    job.run(until=lambda: job.num_cells(0) == 150)
    job.add(1, 150, 16)
    job.run()  # the fake runner refuses a position computed twice
    assert job.tokens == {0: 200, 1: 16}


def test_one_that_cannot_park_keeps_its_pages_and_nobody_fails_while_somebody_can_go_on() -> None:
    # 4 pages of 16. The leader fills its third and needs the fourth, where the newcomer is: it waits until that one has ended.
    job = loop(4, page_size=16, margin_steps=0, host_budget_bytes=0, over_budget="wait")
    job.add(0, 20, 45)
    job.run(until=lambda: job.num_cells(0) == 41)
    job.add(1, 8, 9)
    job.run(until=lambda: bool(job.noted("park_refused")))
    assert (job.num_cells(0), job.num_cells(1)) == (48, 15)
    job.run()
    assert job.tokens == {0: 45, 1: 9}
    assert job.noted("park_refused") == [1]
    assert job.scheduler.counters.num_parks == 0
    assert all_finished(job.ends)


def test_a_sequence_that_has_computed_nothing_parks_without_a_copy() -> None:
    job = loop(64, prefill_chunk=8, host_budget_bytes=0)
    job.add(0, 32, 4)
    job.add(1, 16, 4)
    job.step()
    job.scheduler.park(1)
    plan = job.step()
    assert plan.park == ()
    assert job.noted("park") == [1]
    job.run()
    assert job.tokens == {0: 4, 1: 4}
    counters = job.scheduler.counters
    assert (counters.num_parks, counters.num_restores, counters.host_bytes_peak) == (1, 1, 0)


def test_park_every_counts_own_tokens_and_spares_nobody() -> None:
    job = loop(256, park_every=8)
    job.add(0, 40, 33)
    job.run()
    parks = [note.num_tokens for _, note in job.notes if note.kind == "park"]
    assert parks == [32, 47, 55, 63, 71]  # after the first of two chunks, and with 8, 16, 24 and 32 tokens made


def test_the_same_seed_parks_at_the_same_steps() -> None:
    def run(seed: int) -> list[tuple[int, int]]:
        job = loop(64, rows=3, park_seed=seed, delay=2)
        for seq_id in range(4):
            job.add(seq_id, 10, 20)
        job.run()
        assert all_finished(job.ends)
        return [(step, note.seq_id) for step, note in job.notes if note.kind == "park"]

    assert run(1) == run(1) != run(2)
    assert len(run(1)) > 3


def test_an_empty_pool_asks_for_no_margin_even_while_pages_are_leaving() -> None:
    job = loop(64, hold=True, delay=50, prefill_chunk=64)
    job.add(0, 40, 10)
    job.step()
    job.scheduler.park(0)
    job.step()
    job.cancel(0)
    assert job.scheduler.snapshot().num_pages_leaving == 40
    job.add(1, 20, 20)  # 21 of 24 free pages; with the margin it would be 29
    job.step()
    assert job.noted("admit") == [0, 1]
    job.run()
    assert job.tokens[1] == 20


def test_pages_for_the_first_step_after_a_return_come_with_it() -> None:
    job = loop(64, rows=2, margin_steps=0, park_every=4)
    job.add(0, 20, 40)
    job.add(1, 20, 40)
    while not job.scheduler.is_idle:
        plan = job.step()
        for note in (note for step, note in job.notes if step == job.num_steps - 1 and note.kind == "restore"):
            assert note.num_pages == note.num_tokens + 1
            assert len(next(update.pages for update in plan.tables if update.first == 0)) == note.num_pages
    assert job.tokens == {0: 40, 1: 40}


def test_the_leader_is_spared_and_a_starved_one_is_passed_over() -> None:
    job = loop(100, rows=4, margin_steps=0, starve_after=1, victim="smallest")
    for seq_id in range(4):
        job.add(seq_id, 10, 60)
    job.run()
    parks = job.noted("park")
    assert 0 not in parks
    assert job.tokens == {0: 60, 1: 60, 2: 60, 3: 60}


def test_the_leader_is_not_parked_even_where_nobody_else_may_leave_but_waits() -> None:
    # 50 pages of one token. The other is on its way back for 20 steps, with 13 pages; the leader fills the other 37 meanwhile.
    job = loop(50, rows=2, page_size=1, margin_steps=0, delay=20)
    job.add(0, 8, 43)
    job.add(1, 8, 30)
    job.run(until=lambda: job.num_cells(1) == 12)
    assert job.scheduler.park(1) == ""
    job.run(until=lambda: job.num_cells(0) == 37)
    for _ in range(3):
        job.step()
    assert job.num_cells(0) == 37 and job.scheduler.state(1) is State.RESTORING
    assert job.scheduler.counters.num_parks == 1
    job.run()
    assert job.tokens == {0: 43, 1: 30}


def test_staging_that_is_spent_delays_chunks_and_nothing_else() -> None:
    job = FakeLoop(config(128, chunk_pages=4), delay=lambda chunk: 3, num_staging=1)
    job.add(0, 40, 60)
    job.add(1, 40, 60)
    job.run()
    assert job.tokens == {0: 60, 1: 60}
    assert job.scheduler.counters.num_parks >= 1
    assert_nothing_is_left(job)
