"""The scheduler under random requests, cancels, parks, delays and budgets: its books balance after every event, and its promises hold.

A whole run is made from one integer, so that a failure is replayed by `run_random(seed)`.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxkv.scheduler import Chunk, ContextShift, Note, Plan, SchedulerConfig, SequenceView, State
from jaxkv.scheduler.fake_runner import FakeLoop
from jaxkv.scheduler.sequence import AWAY


class WatchedLoop(FakeLoop):
    """A loop that checks, step by step, what the scheduler promises; the fake runner checks the cells, `check` the books."""

    def __init__(self, config: SchedulerConfig, delay: Callable[[Chunk], int], num_staging: int, max_delay: int) -> None:
        super().__init__(config, delay, num_staging)
        num_chunks = config.num_pages // config.chunk_pages + config.rows + 1
        self.most_idle_steps = 4 + 2 * num_chunks * (max_delay + 2)
        self.away: list[int] = []
        self.parked_with: dict[int, int] = {}
        self.num_dropped: Counter[int] = Counter()
        self.waiting: set[int] = set()
        self.priorities: dict[int, int] = {}
        self.passed: Counter[int] = Counter()

    def step(self) -> Plan:
        before = self.scheduler.snapshot().sequences
        self.line = {view.seq_id for view in before if view.row is None}
        num_notes = len(self.notes)
        plan = super().step()
        new = [note for _, note in self.notes[num_notes:]]
        dropped = {shift.seq_id: shift.n_discard for shift in plan.shifts}  # before anybody is chosen
        self.num_dropped.update(dropped)
        self.watch_leader([replace(view, whole_cells=self.worth(view, dropped.get(view.seq_id, 0))) for view in before], new)
        for note in new:
            self.watch(note)
        assert len(plan.park) + len(plan.restore) <= self.scheduler.config.chunks_per_step
        assert len(self.runner.flights) <= self.runner.num_staging
        assert self.num_idle_steps <= self.most_idle_steps, f"no token and no chunk in {self.num_idle_steps} steps"
        return plan

    def worth(self, view: SequenceView, num_dropped: int) -> int:
        """Cells it has, or will have at most in its replay, once a shift has dropped so many."""
        if not view.replay_to:
            return view.num_cells - num_dropped
        return min(view.whole_cells, view.replay_to - self.num_dropped[view.seq_id])

    def replay(self, seq_id: int) -> str:
        state = self.scheduler.state(seq_id)
        reason = super().replay(seq_id)
        self.num_dropped[seq_id] = 0 if not reason else self.num_dropped[seq_id]
        if not reason and state not in AWAY:
            self.away.append(seq_id)
        elif not reason and state in (State.RESTORING, State.REPLAYING):
            self.away.insert(0, seq_id)
        return reason

    def watch(self, note: Note) -> None:
        """Nobody passes the head; nobody is parked twice without progress, or for one that is no more urgent than itself."""
        self.away = [seq_id for seq_id in self.away if seq_id not in self.ends]
        seq_id = note.seq_id
        if note.kind in ("park", "drop"):
            self.num_dropped[seq_id] *= note.kind == "park"  # one dropped counts anew
            num_computed = note.num_tokens + self.num_dropped[seq_id]
            assert num_computed > self.parked_with.get(seq_id, -1), f"sequence {seq_id} is parked twice without progress"
            self.parked_with[seq_id] = num_computed
            self.away.append(seq_id)
            if note.reason in ("priority", "rotation"):
                self.watch_way(seq_id, note.reason)
        elif note.kind in ("restore", "replay", "admit") and seq_id not in self.ends:
            self.watch_order(seq_id, note.kind == "admit")

    def watch_order(self, seq_id: int, is_new: bool) -> None:
        """Whoever comes in was the first in line, or no more than `max_bypass` passed the one who was."""
        config = self.scheduler.config
        waiting = self.waiting - self.ends.keys()
        line = [*self.away, *sorted(waiting)]
        first = min(line, key=lambda other: self.priorities[other])  # of equals, the first in line
        if config.resume == "head":
            assert first == seq_id, f"sequence {seq_id} comes in before {first} of {line}"
        elif first != seq_id:
            assert self.priorities[first] == self.priorities[seq_id], f"sequence {seq_id} passes {first}, which is more urgent"
            self.passed[first] += 1
            assert config.max_bypass is None or self.passed[first] <= config.max_bypass
        self.passed[seq_id] = 0
        (self.waiting if is_new else self.away).remove(seq_id)

    def watch_way(self, seq_id: int, reason: str) -> None:
        """A resident leaves for one that is more urgent, or for an equal in a rotation."""
        others = [self.priorities[other] for other in self.line | set(self.away) if other != seq_id]
        assert min(others) < self.priorities[seq_id] + (reason == "rotation"), f"sequence {seq_id} leaves for nobody"
        assert self.scheduler.config.rotate != "none" or reason != "rotation"

    def watch_leader(self, before: list[SequenceView], notes: list[Note]) -> None:
        """Of the most urgent, pressure never parks the resident with the most tokens."""
        parks = [note for note in notes if note.kind in ("park", "drop")]
        forced = {note.seq_id for note in parks if note.reason == "forced"}
        victims = {note.seq_id for note in parks if note.reason in ("pressure", "last_resort")}
        stayed = [view for view in before if view.row is not None and view.seq_id not in forced]
        leader = min(stayed, key=lambda view: (view.priority, -view.whole_cells, view.seq_id), default=None)
        assert leader is None or leader.seq_id not in victims, f"the leader {leader} is among the victims {victims}"

    def add(self, seq_id: int, *sizes: Any, priority: int = 0, **more: Any) -> int | None:
        limit = super().add(seq_id, *sizes, priority=priority, **more)
        self.priorities[seq_id] = priority
        self.waiting.add(seq_id)
        return limit

    def finish(self) -> None:
        """Run to the end: everything ends as it should, nothing leaks."""
        self.run(50_000)
        config, counters = self.scheduler.config, self.scheduler.counters
        assert State.FAILED not in self.ends.values()
        for seq_id, state in self.ends.items():
            if state is State.FINISHED:
                assert self.tokens[seq_id] == self.stops[seq_id]
        assert self.ends.keys() == self.tokens.keys()
        view = self.scheduler.snapshot()
        assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes, self.runner.host_bytes) == (config.num_pages, 0, 0, 0)
        assert (counters.num_last_resorts if config.planner else counters.num_parks_pressure) == 0
        assert counters.num_parks == counters.num_restores + counters.num_ended_parked
        if config.admission == "reserve":
            assert counters.num_parks == counters.num_parks_forced + counters.num_parks_lost


def random_config(rng: random.Random) -> SchedulerConfig:
    """Settings from a small and nasty range; the larger pools are those in which pressure, not the door, decides."""
    chunk_pages = rng.choice([1, 2, 3, 5])
    num_pages = rng.choice([rng.randint(1, 24), rng.randint(12, 60)])
    return SchedulerConfig(
        rows=rng.randint(1, 6),
        num_pages=num_pages,
        page_size=rng.choice([1, 1, 2, 4]),
        prefill_chunk=rng.choice([1, 4, 6]),
        max_len=rng.choice([12, 1000, 1000]),
        chunk_pages=chunk_pages,
        chunk_bytes=10,
        chunks_per_step=rng.choice([1, 2, 4]),
        host_budget_bytes=rng.choice([None, None, None, 0, 10 * (num_pages // chunk_pages), 30]),
        over_budget=rng.choice(["replay", "replay", "wait"]),
        margin_steps=rng.choice([0, 0, 1, 4]),
        starve_after=rng.choice([0, 1, 3]),
        victim=rng.choice(["smallest", "smallest", "largest", "youngest", "oldest", "priority"]),
        resume=rng.choice(["head", "head", "pass"]),
        max_bypass=rng.choice([None, None, 0, 1, 4]),
        admission=rng.choice(["optimistic"] * 7 + ["reserve"]),
        rotate=rng.choice(["shifted", "shifted", "any", "none"]),
        rotate_after_s=rng.choice([0, 2, 10]),
        hold=rng.random() < 0.5,
        keep_images=rng.random() < 0.7,
        planner=rng.random() < 0.6,
        park_every=rng.choice([0, 0, 0, 1, 3]),
        park_seed=rng.choice([None, None, None, rng.randint(0, 1000)]),
    )


def random_loop(rng: random.Random) -> WatchedLoop:
    """A loop whose copies land early, late or out of order."""
    config = random_config(rng)
    max_delay = rng.choice([0, 0, 1, 3] if config.park_every else [0, 0, 1, 3, 12])
    delays = [rng.randint(0, max_delay) for _ in range(97)]

    def delay(chunk: Chunk) -> int:
        return delays[(chunk.seq_id * 31 + chunk.epoch * 7 + chunk.index) % len(delays)]

    return WatchedLoop(config, delay, rng.choice([1, 2, 1000]), max_delay)


def random_shift(rng: random.Random, config: SchedulerConfig) -> ContextShift | None:
    """A context that shifts, for one in seven where pool and model leave room for one."""
    size = config.page_size
    most_pages = min(config.num_pages, config.max_len // size)
    if rng.random() < 0.85 or most_pages < 1:
        return None
    num_pages = rng.randint(1, most_pages)
    num_kept = rng.choice([0, rng.randint(0, num_pages - 1)])
    most_len = min(config.max_len, config.num_pages * size, (num_pages + 1) * size - 1)
    return ContextShift(rng.randint(num_pages * size, most_len), num_kept * size, rng.randint(1, num_pages - num_kept) * size)


def run_random(seed: int) -> WatchedLoop:
    """One whole run: requests that come and go while others are on their way."""
    rng, shifting = random.Random(seed), random.Random(seed + 0.5)
    job = random_loop(rng)
    longest = min(job.scheduler.config.num_pages * job.scheduler.config.page_size, job.scheduler.config.max_len)
    most_prompt = max(1, longest // rng.choice([1, 4, 8]))
    pace = rng.choice([(0,), (0, 0, 1, 3, 10)])
    priorities = rng.choice([(0,), (0,), (0, 0, -10, 10), range(-4, 4)])
    for seq_id in range(rng.randint(1, 9)):
        prompt_len, max_new = rng.randint(1, most_prompt), rng.choice([None, 1, rng.randint(1, 60)])
        stop, urgency = rng.choice([None, rng.randint(1, 40)]), rng.choice(priorities)
        shift = random_shift(shifting, job.scheduler.config)
        if shift is None:
            job.add(seq_id, prompt_len, max_new, stop, priority=urgency)
        else:
            job.add(seq_id, 1 + prompt_len % shift.context_len, max_new, 3 * (stop or 20), priority=urgency, shift=shift)
        for _ in range(rng.choice(pace)):
            job.step()
            if rng.random() < 0.1:
                job.scheduler.park(rng.randint(0, seq_id))
            if rng.random() < 0.06:
                job.cancel(rng.randint(0, seq_id))
            if rng.random() < 0.04:
                job.replay(rng.randint(0, seq_id))
    job.finish()
    return job


def run_and_count(seed: int) -> Counter[str]:
    """A random run; what happened in it."""
    try:
        counters = run_random(seed).scheduler.counters
    except AssertionError as error:
        raise AssertionError(f"run_random({seed}): {error}") from error
    counted = (
        "shifts", "parks_forced", "parks_pressure", "parks_priority", "parks_copied", "parks_dropped", "parks_stuck", "parks_lost",
        "rotations", "last_resorts", "parks_refused", "restores", "kept_hits", "replayed_tokens", "ended_parked", "cancelled",
    )  # fmt: skip
    return Counter({name: getattr(counters, f"num_{name}") for name in counted})


def test_random_runs_keep_every_promise() -> None:
    totals: Counter[str] = Counter()
    for seed in range(150):
        totals += run_and_count(seed)
    # Runs that nothing happens in prove nothing: each kind of event is there in numbers.
    rare = {name: num for name, num in totals.items() if num < 3}
    assert not rare and len(totals) == 16, totals


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_runs_keep_every_promise(block: int) -> None:
    for seed in range(1000 + block * 2000, 1000 + (block + 1) * 2000):
        run_and_count(seed)


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the events, and shrinks what fails."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.job = random_loop(random.Random(seed))
        config = self.job.scheduler.config
        self.longest = min(config.num_pages * config.page_size, config.max_len)

    @property
    def num_added(self) -> int:
        return len(self.job.tokens)

    @rule(
        prompt=st.integers(0, 95),
        max_new=st.one_of(st.none(), st.integers(1, 30)),
        stop=st.one_of(st.none(), st.integers(1, 30)),
        priority=st.sampled_from([0, 0, -10, 10]),
    )
    def add(self, prompt: int, max_new: int | None, stop: int | None, priority: int) -> None:
        self.job.add(self.num_added, 1 + prompt % self.longest, max_new, stop, priority=priority)

    @rule(num=st.integers(1, 6))
    def step(self, num: int) -> None:
        for _ in range(num):
            self.job.step()

    @precondition(lambda self: self.num_added > 0)
    @rule(which=st.integers(0, 1000))
    def cancel(self, which: int) -> None:
        self.job.cancel(which % self.num_added)

    @precondition(lambda self: self.num_added > 0)
    @rule(which=st.integers(0, 1000))
    def park(self, which: int) -> None:
        self.job.scheduler.park(which % self.num_added)

    @precondition(lambda self: self.num_added > 0)
    @rule(which=st.integers(0, 1000))
    def replay(self, which: int) -> None:
        self.job.replay(which % self.num_added)

    def teardown(self) -> None:
        if hasattr(self, "job"):
            self.job.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
