"""Parks by an operator: they stay until somebody lets go, and nobody waits behind them."""

import dataclasses

import pytest

from jaxkv.scheduler import SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop

SMALL = SchedulerConfig(rows=2, num_pages=64, page_size=4, prefill_chunk=8, max_len=256, chunk_pages=4, chunk_bytes=1, margin_steps=2)


def started(config=SMALL, num=2, **kwargs):
    loop = FakeLoop(config, **kwargs)
    for seq_id in range(num):
        loop.add(seq_id, 8, 40)
    loop.run(until=lambda: all(loop.scheduler.state(seq_id) is State.DECODING for seq_id in range(min(num, 2))))
    return loop


def test_a_held_sequence_stays_away_and_the_others_go_on():
    loop = started(num=4)
    assert loop.scheduler.hold(0) == ""
    loop.run(until=lambda: all(seq_id in loop.ends for seq_id in (1, 2, 3)))
    assert loop.scheduler.state(0) is State.PARKED and not loop.scheduler.is_idle
    (view,) = loop.scheduler.snapshot().sequences
    assert view.is_held and view.num_pages == 0
    loop.scheduler.check()
    assert loop.scheduler.release(0) == ""
    loop.run()
    assert loop.ends[0] is State.FINISHED


def test_one_that_is_parked_already_leaves_the_line_and_comes_back_to_its_end():
    loop = started(dataclasses.replace(SMALL, num_pages=16), num=2)
    loop.run(until=lambda: State.PARKED in map(loop.scheduler.state, (0, 1)))
    parked = 0 if loop.scheduler.state(0) is State.PARKED else 1
    assert loop.scheduler.hold(parked) == ""
    loop.run(until=lambda: 1 - parked in loop.ends)
    for _ in range(20):
        loop.step()
    assert loop.scheduler.state(parked) is State.PARKED
    loop.scheduler.release(parked)
    loop.run()
    assert loop.ends == {0: State.FINISHED, 1: State.FINISHED}


def test_one_that_is_let_go_before_it_left_never_leaves():
    loop = started()
    assert loop.scheduler.hold(0) == "" and loop.scheduler.release(0) == ""
    loop.run()
    assert loop.scheduler.counters.num_parks == 0 and loop.ends[0] is State.FINISHED


def test_a_cancelled_one_gives_everything_back_and_is_held_no_more():
    loop = started()
    loop.scheduler.hold(0)
    loop.run(until=lambda: loop.scheduler.state(0) is State.PARKED)
    loop.cancel(0)
    loop.run()
    snapshot = loop.scheduler.snapshot()
    assert snapshot.num_pages_free == snapshot.num_pages and snapshot.host_bytes == 0 and loop.scheduler.is_idle


def test_a_hold_that_the_budget_has_no_room_for_is_refused_and_forgotten():
    loop = started(dataclasses.replace(SMALL, host_budget_bytes=0, over_budget="wait"))
    loop.scheduler.hold(0)
    loop.run()
    assert loop.noted("park_refused") == [0] and loop.scheduler.counters.num_parks == 0
    assert loop.ends[0] is State.FINISHED


@pytest.mark.parametrize("delay", [0, 5])
def test_copies_that_come_late_change_nothing(delay):
    loop = started(num=3, delay=lambda chunk: delay)
    loop.scheduler.hold(1)
    for _ in range(3):
        loop.step()
        loop.scheduler.check()
    loop.scheduler.release(1)
    loop.run()
    assert set(loop.ends.values()) == {State.FINISHED}


def test_repeated_commands_do_nothing_and_say_why():
    loop = started(num=3)
    scheduler = loop.scheduler
    assert scheduler.hold(9) == scheduler.release(9) == "sequence 9 is not known"
    assert scheduler.hold(2) == "sequence 2 is waiting"
    assert scheduler.release(0) == "sequence 0 is not held"
    scheduler.hold(0)
    assert scheduler.hold(0) == "sequence 0 is held already"
