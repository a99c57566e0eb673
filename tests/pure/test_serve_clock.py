"""What the engine's time goes into: each step counts once, by what it or the one before had beside its rows."""

from types import SimpleNamespace

from jaxkv.observe.observers import Observers
from jaxkv.serve.clock import StepClock


class Engine:
    """Tells its observers of steps at given times."""

    def __init__(self):
        self.observers, self.is_idle = Observers(), False
        self.parts = SimpleNamespace(transfer=SimpleNamespace(num_in_flight=0))

    def step(self, now, *, in_flight=0, landed=False, is_last=False, **plan):
        self.parts.transfer.num_in_flight, self.is_idle = in_flight, is_last
        if landed:
            self.observers.tell("on_landed", self, None, now)
        found = {"prefill": None, "decode": (0,), "park": (), "restore": (), **plan}
        self.observers.tell("on_step", self, SimpleNamespace(**found), now)


def watched():
    clock, engine = StepClock(), Engine()
    for _ in range(2):
        clock.watch(engine)
    return clock, engine


def test_a_step_counts_from_the_end_of_the_one_before_and_what_is_begun_counts_for_the_next_too():
    clock, engine = watched()
    engine.step(1.0, prefill=1)  # the first has no beginning that is known
    engine.step(2.0)  # may have waited for the prompt
    engine.step(2.5)
    engine.step(3.0, park=(1,), in_flight=1)
    engine.step(4.0, in_flight=1)
    engine.step(5.0, landed=True)
    engine.step(6.0)
    engine.step(6.25)
    engine.step(8.25, restore=(1,), prefill=1)
    assert clock.steps == {"prompt": 2, "copies": 4, "rows": 2, "waiting": 0}
    assert clock.seconds == {"prompt": 3.0, "copies": 3.5, "rows": 0.75, "waiting": 0.0}


def test_a_step_that_computes_nothing_is_waiting_and_an_idle_engine_is_not_counted():
    clock, engine = watched()
    engine.step(1.0, in_flight=1, decode=())
    engine.step(1.5, in_flight=1, decode=())
    engine.step(2.0, is_last=True)
    engine.step(60.0)
    engine.step(61.0)
    assert clock.steps == {"prompt": 0, "copies": 1, "rows": 1, "waiting": 1}
    assert clock.seconds["rows"] == 1.0 and clock.seconds["waiting"] == 0.5


def test_counts_go_on_with_the_next_engine_but_not_from_the_last_ones_end():
    clock, engine = watched()
    engine.step(1.0)
    engine.step(2.0)
    clock.forget()
    other = Engine()
    clock.watch(other)
    other.step(50.0)
    other.step(50.5)
    assert clock.steps["rows"] == 2 and clock.seconds["rows"] == 1.5
