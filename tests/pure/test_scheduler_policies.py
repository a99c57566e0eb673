"""Who goes first and who makes way: priorities, both return policies, admission, rotation, and how to add a policy of one's own.

The sizes are those of the small cases: (p, n) is a request with p prompt tokens that generates n, a page is a token, and a step a second.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from jaxkv.config.fields import all_fields
from jaxkv.scheduler import VICTIMS, SchedulerConfig, policies
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished
from jaxkv.scheduler.policies import RETURNS, Applicant
from jaxkv.scheduler.returns import LOOK_AHEAD


def loop(num_pages: int, delay: int = 0, **changes: Any) -> FakeLoop:
    sizes: dict[str, Any] = {"rows": 2, "page_size": 1, "prefill_chunk": 32, "max_len": 100_000, "chunk_bytes": 16}
    return FakeLoop(SchedulerConfig(num_pages=num_pages, **{**sizes, **changes}), delay=lambda chunk: delay)


def parks(job: FakeLoop) -> list[tuple[int, str]]:
    """Who was parked and why, in order."""
    return [(note.seq_id, note.reason) for _, note in job.notes if note.kind == "park"]


def run_to(job: FakeLoop, seq_id: int, num_cells: int) -> None:
    """Step until a sequence has so many cells."""
    job.run(until=lambda: job.num_cells(seq_id) == num_cells)


# Priorities


@pytest.mark.parametrize("victim", VICTIMS)
def test_an_arrival_takes_a_row_from_a_less_urgent_resident_under_every_policy(victim: str) -> None:
    job = loop(1000, victim=victim)
    job.add(0, 8, 100, priority=10)
    job.add(1, 8, 50, priority=0)
    run_to(job, 1, 20)
    job.add(2, 8, 30, priority=-10)
    job.step()
    assert parks(job) == [(0, "priority")]
    assert job.noted("admit") == [1, 0, 2]
    job.run()
    assert job.tokens == {0: 100, 1: 50, 2: 30}
    counters = job.scheduler.counters
    assert (counters.num_parks, counters.num_parks_priority, counters.num_parks_pressure) == (1, 1, 0)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_flex_resident_makes_way_for_a_default_arrival_and_an_equal_one_does_not(victim: str) -> None:
    for priority, expected in ((10, [(0, "priority")]), (0, []), (-10, [])):
        job = loop(1000, rows=1, victim=victim)
        job.add(0, 8, 100, priority=priority)
        run_to(job, 0, 20)
        job.add(1, 8, 10)
        job.step()
        assert parks(job) == expected
        job.run()
        assert job.tokens == {0: 100, 1: 10}


def test_the_leader_leaves_for_pages_too_and_comes_back_when_the_urgent_one_has_ended() -> None:
    job = loop(256)
    job.add(0, 8, 240, priority=1)
    run_to(job, 0, 200)
    job.add(1, 100, 8, priority=0)
    job.step()
    assert parks(job) == [(0, "priority")]
    job.run(until=lambda: 1 in job.ends)
    assert job.noted("restore") == []
    job.run()
    assert job.tokens == {0: 240, 1: 8}


def test_nobody_makes_way_in_vain() -> None:
    # Even without the less urgent one's 17 cells the equal one's 150 + 9 leave too little of 320 for the 207 that (200, 8) takes.
    job = loop(320, rows=3)
    job.add(0, 140, 60)
    job.add(1, 8, 60, priority=5)
    run_to(job, 0, 150)
    job.add(2, 200, 8)
    job.run(until=lambda: 2 in job.noted("admit"))
    assert parks(job) == []
    assert 0 in job.ends
    job.run()
    assert job.tokens == {0: 60, 1: 60, 2: 8}


@pytest.mark.parametrize(("prompt_len", "leavers"), [(23, []), (24, [2]), (44, [2]), (45, [2, 1]), (70, [2, 1]), (71, [2, 1, 0])])
def test_as_few_make_way_as_are_needed(prompt_len: int, leavers: list[int]) -> None:
    # 56 + 25 + 20 cells and a token each are 104 of 128: 24 are to be had, with the smallest gone 45, with two gone 71.
    job = loop(128, rows=4, margin_steps=0)
    for seq_id, size in enumerate((50, 20, 16)):
        job.add(seq_id, size, 30, priority=1)
    run_to(job, 2, 20)
    assert [job.num_cells(seq_id) for seq_id in (0, 1, 2)] == [56, 25, 20]
    job.add(3, prompt_len, 8)
    job.step()
    assert parks(job) == [(seq_id, "priority") for seq_id in leavers]
    job.run()
    assert job.tokens == {0: 30, 1: 30, 2: 30, 3: 8}


@pytest.mark.parametrize("victim", VICTIMS)
def test_pressure_parks_the_less_urgent_under_every_policy_even_the_leader(victim: str) -> None:
    job = loop(100, rows=3, margin_steps=0, victim=victim)
    job.add(0, 40, 40, priority=10)  # the largest and oldest
    job.add(1, 4, 60, priority=-10)
    job.add(2, 8, 60, priority=0)
    job.run(until=lambda: bool(job.noted("park")))
    assert parks(job) == [(0, "pressure")]
    job.run()
    assert job.tokens == {0: 40, 1: 60, 2: 60}
    assert {seq_id for seq_id, _ in parks(job)} <= {0, 2}


def test_among_equals_the_leader_of_each_priority_is_spared_while_another_is_there() -> None:
    job = loop(100, rows=3, margin_steps=0, victim="largest")
    job.add(0, 30, 60, priority=10)
    job.add(1, 8, 60, priority=10)
    job.add(2, 16, 60, priority=0)
    job.run(until=lambda: bool(job.noted("park")))
    assert parks(job) == [(1, "pressure")]


def test_both_lines_are_in_order_of_priority_and_then_of_time() -> None:
    job = loop(1000, rows=4)
    for seq_id, priority in enumerate((0, 0, -1, 5)):
        job.add(seq_id, 8, 40, priority=priority)
    run_to(job, 3, 10)
    for seq_id in (3, 1, 0, 2):
        job.scheduler.park(seq_id)
    for seq_id, priority in ((4, 0), (5, -1), (6, -2), (7, -1)):
        job.add(seq_id, 8, 4, priority=priority)
    num_notes = len(job.notes)
    job.run()
    firsts = [note.seq_id for _, note in job.notes[num_notes:] if note.kind in ("admit", "restore")]
    assert firsts[:4] == [6, 5, 7, 2] or firsts[:4] == [6, 2, 5, 7]  # as 2 is away by then, or just leaving
    assert list(dict.fromkeys(firsts)).index(3) == 7
    assert all_finished(job.ends)


def test_an_urgent_prompt_is_computed_before_an_older_one() -> None:
    job = loop(1000, rows=3)
    job.add(0, 96, 4)
    job.step()
    job.add(1, 64, 4, priority=-1)
    chunks = [plan.prefill.seq_id for plan in (job.step() for _ in range(4)) if plan.prefill]
    assert chunks == [1, 1, 0, 0]
    job.run()
    assert job.tokens == {0: 4, 1: 4}


def test_with_the_planner_off_and_with_reserve_nobody_makes_way() -> None:
    settings: list[dict[str, Any]] = [{"planner": False}, {"admission": "reserve"}]
    for changes in settings:
        job = loop(1000, rows=1, rotate="any", **changes)
        job.add(0, 8, 60, priority=10)
        run_to(job, 0, 20)
        job.add(1, 8, 10, priority=-10)
        job.run()
        assert job.tokens == {0: 60, 1: 10}
        assert parks(job) == []


@pytest.mark.parametrize("priority", [1.0, "1", True, None])
def test_a_priority_is_an_integer(priority: Any) -> None:
    scheduler = loop(64).scheduler
    with pytest.raises(ValueError) as caught:
        scheduler.add(0, 8, 8, 0.0, priority=priority)
    assert str(caught.value) == f"a priority is an integer, lower goes first; got {priority!r}"
    assert scheduler.is_idle


# Returns


def crowd(**changes: Any) -> FakeLoop:
    """Some 500 cells are parked, which fit again when three residents have ended 120 steps later; (40, 20) fits 8 times after another."""
    job = loop(99, rows=4, page_size=10, **changes)
    for seq_id in (1, 2, 3):
        job.add(seq_id, 40, 250)
    run_to(job, 3, 130)
    job.add(0, 490, 300)
    run_to(job, 0, 500)
    assert job.scheduler.park(0) == ""
    job.step()
    for seq_id in range(4, 12):
        job.add(seq_id, 40, 20)
    return job


def passed_by(job: FakeLoop) -> list[int]:
    """Those that came in between the head's park and its return."""
    job.run(until=lambda: 0 in job.noted("restore"))
    entered = job.noted("admit", "restore")
    assert entered[:4] == [1, 2, 3, 0]
    found = entered[4 : entered.index(0, 4)]
    job.run()
    assert all_finished(job.ends)
    return found


def test_with_pass_smaller_ones_go_by_a_head_that_does_not_fit_and_with_head_nobody_does() -> None:
    assert passed_by(crowd(resume="pass")) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert passed_by(crowd(resume="head")) == []


@pytest.mark.parametrize(("max_bypass", "passed"), [(0, []), (1, [4]), (3, [4, 5, 6]), (5, [4, 5, 6, 7, 8])])
def test_no_more_than_max_bypass_pass_the_first_in_line(max_bypass: int, passed: list[int]) -> None:
    assert passed_by(crowd(resume="pass", max_bypass=max_bypass)) == passed


def applicant(seq_id: int, num_parks: int, fits: bool) -> Applicant:
    return Applicant(seq_id, 10, 10, seq_id, num_parks, 0, 5, 1.0, fits)


def test_return_policies_choose_the_first_or_whoever_fits_and_was_parked_most() -> None:
    line = [applicant(0, 1, False), applicant(1, 2, True), applicant(2, 4, False), applicant(3, 2, True), applicant(4, 0, True)]
    assert (RETURNS["head"](line), RETURNS["pass"](line)) == (None, line[1])
    assert (RETURNS["head"](line[1:]), RETURNS["pass"](line[:1])) == (line[1], None)


def test_a_plan_looks_no_further_than_so_many_new_ones() -> None:
    job = loop(256, resume="pass")
    job.add(0, 100, 60)
    for seq_id in range(1, LOOK_AHEAD + 1):
        job.add(seq_id, 200, 2)
    job.add(LOOK_AHEAD + 1, 8, 2)
    job.step()
    job.step()
    assert job.noted("admit") == [0]
    job.scheduler.cancel(1)
    job.step()
    assert job.noted("admit") == [0, LOOK_AHEAD + 1]


# Admission


@pytest.mark.parametrize(("num_pages", "is_admitted_beside"), [(107 + 247, True), (107 + 246, False)])
def test_reserve_lets_one_in_when_prompt_and_answer_fit_to_the_token(num_pages: int, is_admitted_beside: bool) -> None:
    # (8, 240) takes 247 cells at the most and (100, 8) takes 107.
    job = loop(num_pages, admission="reserve", margin_steps=500)
    job.add(0, 8, 240)
    job.add(1, 100, 8)
    job.step()
    assert (1 in job.noted("admit")) == is_admitted_beside
    job.run()
    assert job.tokens == {0: 240, 1: 8}
    assert job.scheduler.counters.num_parks == 0


def test_reserve_takes_the_lone_one_whatever_it_wants() -> None:
    job = loop(64, admission="reserve")
    assert job.add(0, 40, None) == 25
    job.add(1, 40, 25)
    job.run()
    assert job.tokens == {0: 25, 1: 25}
    assert parks(job) == []


# Rotation


def turns(job: FakeLoop) -> list[tuple[int, str, int]]:
    """Step, kind and sequence of every park and return."""
    return [(step, note.kind, note.seq_id) for step, note in job.notes if note.kind in ("park", "restore")]


def test_two_take_turns_by_rotation_and_each_stays_as_long_as_it_waited() -> None:
    job = loop(256, rotate="any", rotate_after_s=30, keep_images=False)
    job.add(0, 100, 150)
    job.add(1, 100, 150)
    job.run()
    assert job.tokens == {0: 150, 1: 150}
    # At 34 the pool is full. Then each waits for 30 steps, leaves, and its copy takes some more until the other is there and waits for 30.
    leaves = [(step, seq_id) for step, kind, seq_id in turns(job) if kind == "park"]
    assert leaves == [(34, 1), (64, 0), (96, 1), (128, 0), (161, 1), (194, 0), (227, 1), (260, 0), (293, 1)]
    returns = [(step, seq_id) for step, kind, seq_id in turns(job) if kind == "restore"]
    assert returns == [(66, 1), (98, 0), (131, 1), (164, 0), (197, 1), (230, 0), (263, 1), (296, 0), (310, 1)]
    assert job.scheduler.counters.num_rotations == 8


@pytest.mark.parametrize("rotate", ["shifted", "none"])
def test_nobody_is_rotated_who_did_not_shift_or_where_nobody_may(rotate: str) -> None:
    job = loop(256, rotate=rotate, rotate_after_s=0)
    job.add(0, 100, 150)
    job.add(1, 100, 150)
    job.run()
    assert job.tokens == {0: 150, 1: 150}
    assert (job.scheduler.counters.num_rotations, job.scheduler.counters.num_parks) == (0, 1)


def test_three_take_turns_and_the_rotated_one_joins_the_end_of_the_line() -> None:
    job = loop(300, rows=3, rotate="any", rotate_after_s=20)
    for seq_id in range(3):
        job.add(seq_id, 100, 120)
    job.run()
    assert job.tokens == {0: 120, 1: 120, 2: 120}
    rounds = [seq_id for _, kind, seq_id in turns(job) if kind == "restore"]
    left = [seq_id for _, kind, seq_id in turns(job) if kind == "park"]
    assert rounds == left[: len(rounds)] and len(rounds) > 6  # who left first comes back first


def waiting_head(num_pages: int, head_len: int, lengths: tuple[int, ...], **changes: Any) -> FakeLoop:
    """A sequence is parked at `head_len` + 1 cells, and then residents with prompts of these lengths fill the pool for a long time."""
    job = loop(num_pages, rows=4, margin_steps=0, rotate_after_s=15, prefill_chunk=1000, **changes)
    job.add(0, head_len, 60)
    run_to(job, 0, head_len + 1)
    job.scheduler.park(0)
    job.step()
    for seq_id, prompt_len in enumerate(lengths, 1):
        job.add(seq_id, prompt_len, 100, priority=-1)  # so they come in before it
    job.run(until=lambda: len(job.noted("admit")) == len(lengths) + 1)
    for seq_id in range(1, len(lengths) + 1):
        job.scheduler._books.sequences[seq_id].priority = 0  # and are its equals from now on
    return job


@pytest.mark.parametrize(
    ("head_len", "leavers"),
    # After 15 steps the residents have 45, 74 and 123 cells of 270.
    [(70, [1]), (80, [2]), (90, [2]), (110, [3]), (130, [3]), (160, [3, 1]), (200, [3, 2])],
)
def test_the_smallest_whose_pages_let_the_head_in_leaves_else_the_largest(head_len: int, leavers: list[int]) -> None:
    job = waiting_head(270, head_len, (30, 60, 110), rotate="any")
    job.run(until=lambda: job.scheduler.counters.num_rotations > 0)
    assert parks(job) == [(0, "forced"), *((seq_id, "rotation") for seq_id in leavers)]
    job.run(until=lambda: job.noted("restore") == [0])
    assert job.num_steps < 25
    job.run()
    assert all_finished(job.ends)


def test_by_default_the_one_that_shifted_its_context_leaves_though_another_would_do() -> None:
    job = waiting_head(270, 70, (30, 60, 110))
    job.scheduler._books.sequences[3].num_shifts = 1
    job.run(until=lambda: job.scheduler.counters.num_rotations > 0)
    assert parks(job) == [(0, "forced"), (3, "rotation")]


def test_rotation_parks_nobody_in_vain() -> None:
    job = waiting_head(500, 420, (30, 60, 110))
    job.scheduler._books.sequences[3].num_shifts = 1  # 420 would not fit beside the two others
    job.run(until=lambda: 1 in job.ends)
    assert job.scheduler.counters.num_rotations == 0
    assert job.num_steps > 90


def test_a_budget_of_one_image_refuses_a_rotation_once_per_park() -> None:
    job = waiting_head(500, 310, (30, 60, 110), rotate="any", host_budget_bytes=20 * 16)
    job.run(until=lambda: job.num_steps == 40)
    assert job.noted("park_refused") == [2]
    assert job.noted("restore") == []
    job.run()
    counters = job.scheduler.counters
    assert (counters.num_rotations, counters.num_parks_refused) == (0, 1)
    assert counters.host_bytes_peak == 320
    assert all_finished(job.ends)


def test_nobody_passes_one_for_whom_somebody_left() -> None:
    # The copies of the rotated one take long; what has come back of its pages would do for the newcomer, and pass would let it in.
    job = waiting_head(270, 100, (30, 60, 110), rotate="any", resume="pass", delay=6, hold=True, chunk_pages=8, chunks_per_step=1)
    job.run(until=lambda: job.scheduler.counters.num_rotations > 0)
    job.add(9, 20, 10)
    job.run(until=lambda: 0 in job.noted("restore"))
    assert 9 not in job.noted("admit") or job.noted("restore", "admit")[-1] == 9
    job.run()
    assert all_finished(job.ends)


# A policy of one's own


def test_the_policy_in_contributing_is_one_function_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.setattr(policies, "VICTIMS", dict(VICTIMS))
    exec(code, vars(policies).copy())
    assert list(policies.VICTIMS) == [*VICTIMS, "longest_stay"]
    monkeypatch.setitem(VICTIMS, "longest_stay", policies.VICTIMS["longest_stay"])
    job = loop(128, rows=3, victim="longest_stay")
    for seq_id, max_new in enumerate((50, 60, 55)):  # the first leads, and of the others the second has the most to do
        job.add(seq_id, 30 - seq_id, max_new)
    job.run(until=lambda: bool(job.noted("park")))
    assert parks(job) == [(1, "pressure")]
    job.run()
    assert job.tokens == {0: 50, 1: 60, 2: 55}


def test_a_configuration_may_name_every_policy_there_is() -> None:
    assert all_fields()["scheduler.victim"].allowed == " | ".join(VICTIMS)
    assert all_fields()["scheduler.resume"].allowed == " | ".join(RETURNS)
