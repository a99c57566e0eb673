"""The scheduler under everything at once, and whatever hypothesis thinks of: its promises hold after every event.

A failure of the random runs is replayed by `run_seed(n)`, in which n is the integer that the failure names:

    python -c "from tests.pure.random_runs import run_seed; run_seed(4711)"
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.pure.faulty_loop import FAULTS
from tests.pure.random_runs import Crowd, random_loop, run_seed

RARE = ("num_parks_stuck", "num_parks_priority", "num_rotations", "num_last_resorts", "num_ended_parked")
COUNTED = (
    *RARE, "num_finished", "num_cancelled", "num_failed", "num_parks_forced", "num_parks_pressure", "num_parks_lost", "num_parks_copied",
    "num_parks_dropped", "num_parks_refused", "num_restores", "num_replayed_tokens", "num_kept_hits", "num_shifts", "num_forks",
    "num_put_off", "cached_tokens",
)  # fmt: skip


def run_named(seed: int, **which: Any) -> Counter[str]:
    """A random run; what happened in it."""
    try:
        return Counter(run_seed(seed, **which).counts)
    except Exception as error:
        raise AssertionError(f"run_seed({seed}, **{which}): {type(error).__name__}: {error}") from error


def test_random_runs_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    for seed in range(1100):
        totals += run_named(seed)
    # Runs that nothing happens in prove nothing: each kind of event is there in numbers.
    few = {name: totals[name] for name in COUNTED if totals[name] < (20 if name in RARE else 80)}
    assert not few, f"{few} of {totals}"


def test_random_runs_of_models_with_states_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    for seed in range(150):
        totals += run_named(seed, states=True)
    without = ("num_shifts", "num_forks", "num_last_resorts", "num_parks_stuck")  # no context shifts, nobody begins with another's state
    few = {name: totals[name] for name in COUNTED if name not in without and totals[name] < (2 if name in RARE else 10)}
    assert not few, f"{few} of {totals}"


def test_random_runs_of_models_with_windows_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    for seed in range(120):
        totals += run_named(seed, windows=True)
    few = {name: totals[name] for name in COUNTED if totals[name] < (2 if name in RARE else 10)}
    assert not few, f"{few} of {totals}"


def test_random_runs_of_models_some_of_whose_layers_have_windows_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    for seed in range(100):
        totals += run_named(seed, near=True)
    few = {name: totals[name] for name in COUNTED if name != "num_shifts" and totals[name] < (2 if name in RARE else 10)}
    assert not few, f"{few} of {totals}"


@pytest.mark.slow
def test_many_random_runs_keep_every_promise() -> None:
    """JAXKV_RUNS says how many, JAXKV_FIRST_RUN where they begin: a million is four hours of one processor."""
    first = int(os.environ.get("JAXKV_FIRST_RUN", "10000"))
    for seed in range(first, first + int(os.environ.get("JAXKV_RUNS", "20000"))):
        run_named(seed)
        run_named(seed, states=True)
        run_named(seed, windows=True)
        run_named(seed, near=True)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(12986, id="reserved room covers the copies that a shifting context makes of a shared prompt"),
        pytest.param(19629, id="a shift whose next token needs a page does not count the dropped one as free"),
        pytest.param(13833, id="a shift whose dropped pages others hold takes the next token's page at once"),
        pytest.param(23597, id="pages that another is about to move save nothing to one that comes in"),
        pytest.param(201596, id="nor do those that a replay moves with its first step after it"),
        pytest.param(202523, id="a shift whose token is taken back is still to come"),
    ],
)
def test_runs_that_once_broke_a_promise_keep_it(seed: int) -> None:
    run_named(seed, overlap=False)
    run_named(seed, overlap=True)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(662, id="a copy that several images wait for is not at the same place in each"),
        pytest.param(691, id="no more is asked for the margin than is held at once"),
        pytest.param(1802, id="one parked before its first chunk has none of the pages that it found"),
        pytest.param(2116, id="a context that may shift does not begin with pages that are gone"),
        pytest.param(50344, id="reserved room covers the pages that come after a shared prompt's fall out of the window"),
        pytest.param(60111, id="reserved room counts shared pages for each of those that will need others in their place"),
    ],
)
def test_runs_with_windows_that_once_broke_a_promise_keep_it(seed: int) -> None:
    run_named(seed, windows=True)


def test_a_shared_prompt_whose_window_is_one_token_makes_the_table_of_its_own_pages_longer_too() -> None:
    run_named(50587, near=True)


@pytest.mark.parametrize("seed", [3, 8, 21, 34])
def test_a_run_is_the_same_every_time(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert first.notes == second.notes
    assert (first.counts, first.tokens, first.num_steps) == (second.counts, second.tokens, second.num_steps)


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the events, and shrinks what fails."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        rng = random.Random(seed)
        self.job = random_loop(rng)
        self.crowd = Crowd(self.job, rng)

    @property
    def num_added(self) -> int:
        return len(self.job.tokens)

    def anybody(self, which: int) -> int:
        """Somebody who was added; of seven times once nobody who is known."""
        return which // 7 % self.num_added if which % 7 else self.num_added

    @rule()
    def add(self) -> None:
        self.crowd.add()

    @rule(prompt=st.integers(0, 95), max_new=st.none() | st.integers(1, 30), stop=st.none() | st.integers(1, 30))
    def add_one(self, prompt: int, max_new: int | None, stop: int | None) -> None:
        self.job.add(self.num_added, 1 + prompt % self.job.longest, max_new, stop)

    @rule(num=st.integers(1, 6), tick=st.sampled_from([0.0, 1.0, 5.0]))
    def step(self, num: int, tick: float) -> None:
        self.job.tick = tick
        for _ in range(num):
            self.job.step()

    @rule(kind=st.sampled_from(FAULTS), fuse=st.integers(0, 8))
    def break_next(self, kind: str, fuse: int) -> None:
        self.job.fault(kind, fuse)

    @precondition(lambda self: self.num_added > 0)
    @rule(command=st.sampled_from(["cancel", "fail", "park", "replay", "hold", "release"]), which=st.integers(0, 1000))
    def command(self, command: str, which: int) -> None:
        getattr(self.job, command)(self.anybody(which))

    def teardown(self) -> None:
        if hasattr(self, "job"):
            self.job.tick = 1.0
            self.job.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
