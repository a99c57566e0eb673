"""A loop that checks, event by event, what the scheduler promises; the fake runner checks the cells, `Scheduler.check` the books."""

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from jaxkv.scheduler import Chunk, Counters, DoesNotFit, Note, Outcome, Plan, SchedulerConfig, SequenceView, State
from jaxkv.scheduler.sequence import AWAY, OVER
from tests.pure.faulty_loop import FaultyLoop
from tests.pure.windows import longest_answer, longest_prompt

COUNTS = tuple(field.name for field in fields(Counters) if field.name not in ("host_bytes", "pool_use_at_park"))


class WatchedLoop(FaultyLoop):
    """Every promise that does not need to look inside: nobody passes, nobody leaves in vain, everything moves, everything ends once."""

    def __init__(self, config: SchedulerConfig, delay: Callable[[Chunk], int], num_staging: int, max_delay: int) -> None:
        super().__init__(config, delay, num_staging)
        num_chunks = config.num_pages // config.chunk_pages + config.rows + 1
        self.most_idle_steps = 4 + 2 * num_chunks * (max_delay + 2)
        self.longest, self.most_cells = longest_prompt(config), longest_answer(config)
        self.away: list[int] = []
        self.waiting: set[int] = set()
        self.line: set[int] = set()
        self.before: tuple[SequenceView, ...] = ()
        self.parked_with: dict[int, int] = {}
        self.priorities: dict[int, int] = {}
        self.has_keys = False
        self.shifting: set[int] = set()
        self.num_dropped: Counter[int] = Counter()  # tokens that left the context of each
        self.passed: Counter[int] = Counter()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.num_new = 0  # cells computed for the first time, when somebody last got on
        self.num_stale_steps = 0  # since then
        self.num_events = 0

    # The events

    def add(self, seq_id: int, prompt_len: int, max_new: int | None, stops_after: int | None = None, **more: Any) -> int | None:
        limit = super().add(seq_id, prompt_len, max_new, stops_after, **more)
        most = self.most_cells - prompt_len + 1
        if more.get("shift"):
            self.shifting.add(seq_id)
            assert limit == max_new
        else:
            assert limit == (most if max_new is None else min(max_new, most))
        self.priorities[seq_id] = more.get("priority", 0)
        self.has_keys |= bool(more.get("page_keys"))
        self.waiting.add(seq_id)
        self.watch_event()
        return limit

    def add_too_long(self, prompt_len: int) -> None:
        """A prompt that can never fit is refused with both numbers, and nothing has changed."""
        before = self.scheduler.snapshot()
        with pytest.raises(DoesNotFit) as caught:
            self.scheduler.add(len(self.tokens), prompt_len, 1, self.now)
        assert (caught.value.needs, caught.value.has) == (prompt_len, self.longest)
        assert self.scheduler.snapshot() == before

    def cancel(self, seq_id: int) -> str:
        return self.watch_refusal(seq_id, super().cancel(seq_id), State.CANCELLED)

    def fail(self, seq_id: int, reason: str = "the caller's own fault") -> str:
        return self.watch_refusal(seq_id, super().fail(seq_id, reason), State.FAILED)

    def park(self, seq_id: int) -> str:
        return self.scheduler.park(seq_id)

    def hold(self, seq_id: int) -> str:
        refusal = self.scheduler.hold(seq_id)
        if not refusal and seq_id in self.away:
            self.away.remove(seq_id)
        self.scheduler.check()
        return refusal

    def release(self, seq_id: int) -> str:
        refusal = self.scheduler.release(seq_id)
        if not refusal and self.scheduler.state(seq_id) in (State.PARKING, State.PARKED):
            self.away.append(seq_id)
        self.scheduler.check()
        return refusal

    def replay(self, seq_id: int) -> str:
        state = self.scheduler.state(seq_id) if seq_id in self.tokens.keys() - self.ends.keys() else None
        reason = super().replay(seq_id)
        if not reason:
            self.num_dropped[seq_id] = 0
            if state not in AWAY:
                self.join(seq_id, len(self.away))
            elif state in (State.RESTORING, State.REPLAYING):
                self.join(seq_id, 0)
        self.watch_event()
        return reason

    def join(self, seq_id: int, place: int) -> None:
        """Into the line, unless an operator holds it."""
        if seq_id not in self.held():
            self.away.insert(place, seq_id)

    def held(self) -> set[int]:
        return {view.seq_id for view in self.scheduler.snapshot().sequences if view.is_held}

    def recover(self) -> None:
        self.counts["num_finished"] = 0  # an end is taken back whose last token was not read
        super().recover()
        views = self.scheduler.snapshot().sequences
        assert all(view.row is None for view in views)
        line = sorted(views, key=lambda view: view.parked_since or 0.0)
        self.away = [view.seq_id for view in line if view.state in AWAY and not view.is_held]
        lost = {view.seq_id for view in views if view.replay_to or not (view.num_shifts or self.scheduler.image(view.seq_id))}
        self.num_dropped = Counter({seq_id: num for seq_id, num in self.num_dropped.items() if seq_id not in lost})
        self.waiting = {view.seq_id for view in views if view.state is State.WAITING}
        self.parked_with.clear()
        self.watch_event()

    def land(self) -> None:
        super().land()
        self.watch_event()

    def plan(self) -> Plan:
        self.before = self.scheduler.snapshot().sequences
        self.line = {view.seq_id for view in self.before if view.row is None}
        num_notes = len(self.notes)
        plan = super().plan()
        new = [note for _, note in self.notes[num_notes:]]
        dropped = Counter({shift.seq_id: shift.n_discard for shift in plan.shifts})  # before anybody is chosen
        self.num_dropped += dropped
        self.watch_victims([replace(view, whole_cells=self.worth(view, dropped[view.seq_id])) for view in self.before], new)
        for note in new:
            self.watch(note)
        self.watch_plan(plan)
        self.watch_event()
        return plan

    def step(self) -> Plan:
        num_events = self.num_events
        plan = super().step()
        if all(view.is_held and view.state is State.PARKED for view in self.scheduler.snapshot().sequences):
            self.num_idle_steps = 0
            num_events -= 1
        assert self.num_idle_steps <= self.most_idle_steps, f"no token and no chunk in {self.num_idle_steps} steps"
        self.watch_progress(self.num_events != num_events)
        return plan

    def finish(self) -> None:
        """Run to the end: everything ends as it should, nothing leaks."""
        self.runner.fault = None
        for seq_id in self.held():
            self.release(seq_id)
        self.run(50_000)
        config, counters = self.scheduler.config, self.scheduler.counters
        assert self.ends.keys() == self.tokens.keys()
        assert all(self.tokens[seq_id] == self.stops[seq_id] for seq_id, state in self.ends.items() if state is State.FINISHED)
        view = self.scheduler.snapshot()
        assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes) == (config.num_pages, 0, 0)
        assert (view.sequences, view.num_running, view.num_parked, view.num_waiting) == ((), 0, 0, 0)
        assert (self.runner.host, self.runner.flights) == ({}, [])
        assert (counters.num_last_resorts if config.planner else counters.num_parks_pressure) == 0
        assert counters.num_parks == counters.num_restores + counters.num_ended_parked
        if config.admission == "reserve":
            assert counters.num_parks == counters.num_parks_forced + counters.num_parks_lost

    # What is watched

    def watch_refusal(self, seq_id: int, refusal: str, state: State) -> str:
        """A command that ends is obeyed at once by who lives, and changes nothing for who does not."""
        if not refusal:
            assert self.ends[seq_id] is state
        self.num_events += 1
        self.watch_event()
        return refusal

    def watch_event(self) -> None:
        """Counters only grow, an end is for good, nobody has more tokens than it is to have."""
        counters = self.scheduler.counters
        counts = {name: getattr(counters, name) for name in COUNTS}
        shrunk = {name: (self.counts[name], num) for name, num in counts.items() if num < self.counts[name]}
        assert not shrunk, f"counters went down: {shrunk}"
        self.counts = counts
        ends = Counter(self.ends.values())
        assert (counts["num_finished"], counts["num_cancelled"], counts["num_failed"]) == tuple(
            ends[state] for state in (State.FINISHED, State.CANCELLED, State.FAILED)
        )
        if not self.forgets:
            assert all(self.scheduler.state(seq_id) is state and state in OVER for seq_id, state in self.ends.items())
        assert all(num <= (self.stops[seq_id] or num) for seq_id, num in self.tokens.items())

    def watch_plan(self, plan: Plan) -> None:
        """A plan keeps to what may move in a step, and runs each row and each sequence once."""
        assert len(plan.park) + len(plan.restore) <= self.scheduler.config.chunks_per_step
        assert len(plan.park) + len(plan.restore) <= self.runner.free_chunks
        runs = [*plan.decode, *([plan.prefill, *plan.prefill.forks] if plan.prefill else [])]
        assert len({run.row for run in runs}) == len({run.seq_id for run in runs}) == len(runs), f"a row runs twice: {plan}"
        assert not self.ends.keys() & {run.seq_id for run in runs}

    def watch_progress(self, is_disturbed: bool) -> None:
        """However the rest is moved about, some cell is computed for the first time before long."""
        lengths = [len(programs) for programs in self.runner.programs.values()]
        num_new = sum(lengths)
        if is_disturbed or num_new != self.num_new or self.scheduler.is_idle:
            self.num_new, self.num_stale_steps = num_new, 0
            return
        self.num_stale_steps += 1
        num_live = len(self.tokens) - len(self.ends)
        assert self.num_stale_steps <= (num_live + 1) * (max(self.longest, *lengths) + self.most_idle_steps), "nobody gets on"

    def watch(self, note: Note) -> None:
        """Nobody is parked twice without progress, or for one that is no more urgent than itself; the line is kept."""
        self.away = [seq_id for seq_id in self.away if seq_id not in self.ends]
        seq_id = note.seq_id
        if note.kind in ("park", "drop"):
            self.num_dropped[seq_id] *= note.kind == "park"  # one dropped counts anew
            num_computed = note.num_tokens + self.num_dropped[seq_id]
            is_stuck = note.reason == "stuck" and self.scheduler.config.over_budget == "wait"
            assert is_stuck or num_computed > self.parked_with.get(seq_id, -1), f"sequence {seq_id} is parked twice without progress"
            self.parked_with[seq_id] = num_computed
            self.join(seq_id, len(self.away))
            if note.reason in ("priority", "rotation"):
                self.watch_way(seq_id, note.reason)
        elif note.kind in ("restore", "replay", "admit"):
            self.watch_order(seq_id, note.kind == "admit")

    def watch_order(self, seq_id: int, is_new: bool) -> None:
        """Whoever comes in was the first in line, or no more than `max_bypass` passed the one who was."""
        config = self.scheduler.config
        line = [*self.away, *sorted(self.waiting - self.ends.keys())]
        first = min(line, key=lambda other: self.priorities[other])  # of equals, the first in line
        if config.resume == "head":
            assert first == seq_id, f"sequence {seq_id} comes in before {first} of {line}"
        elif first != seq_id:
            assert self.priorities[first] == self.priorities[seq_id], f"sequence {seq_id} passes {first}, which is more urgent"
            self.passed[first] += 1
            assert config.max_bypass is None or self.passed[first] <= config.max_bypass
        self.passed[seq_id] = 0
        if is_new:
            self.waiting.remove(seq_id)
        else:
            self.away.remove(seq_id)

    def watch_way(self, seq_id: int, reason: str) -> None:
        """A resident leaves for one that is more urgent, or for an equal in a rotation."""
        others = [self.priorities[other] for other in self.line | set(self.away) if other != seq_id]
        assert min(others) < self.priorities[seq_id] + (reason == "rotation"), f"sequence {seq_id} leaves for nobody"
        assert self.scheduler.config.rotate != "none" or reason != "rotation"

    def worth(self, view: SequenceView, num_dropped: int) -> int:
        """Cells it has, or will have at most in its replay, once a shift has dropped so many."""
        if not view.replay_to:
            return view.num_cells - num_dropped
        return min(view.whole_cells, view.replay_to - self.num_dropped[view.seq_id])

    def watch_victims(self, views: list[SequenceView], notes: list[Note]) -> None:
        """Of the most urgent, pressure never parks the resident with the most tokens; nobody leaves whom this very step ends."""
        parks = [note for note in notes if note.kind in ("park", "drop")]
        forced = {note.seq_id for note in parks if note.reason == "forced"}
        victims = {note.seq_id for note in parks if note.reason in ("pressure", "last_resort")}
        stayed = [view for view in views if view.row is not None and view.seq_id not in forced]
        leader = min(stayed, key=lambda view: (view.priority, -view.whole_cells, view.seq_id), default=None)
        if not self.has_keys:  # shared pages change who leads in the midst of a plan
            assert leader is None or leader.seq_id not in victims, f"the leader {leader} is among the victims {victims}"
        chosen = {note.seq_id for note in parks if note.reason not in ("forced", "stuck")}
        size = self.scheduler.config.page_size
        ending = {
            view.seq_id
            for view in views
            if view.seq_id not in self.shifting
            and view.state is State.DECODING
            and view.num_generated + 1 == view.limit
            and view.num_cells < (view.num_gone + view.num_pages) * size
        }
        assert not chosen & ending, f"{chosen & ending} are parked in the step that ends them"

    def _commit(self, outcome: Outcome, now: float) -> None:
        super()._commit(outcome, now)
        self.watch_event()
