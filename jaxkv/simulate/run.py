"""One simulation: the engine's loop around the real scheduler, with costs in the place of programs and a clock that only adds.

The order is that of `Engine.step`: copies that have landed, a plan, copies that leave, a prompt chunk and a decode step, the outcome. Where
nothing can be computed the clock goes on to the next landing or arrival.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from jaxkv.scheduler.need import DoesNotFit
from jaxkv.scheduler.plan import Chunk, Outcome, Plan, SchedulerConfig
from jaxkv.scheduler.scheduler import Scheduler
from jaxkv.simulate.costs import Costs
from jaxkv.simulate.result import Result, Story, summarize
from jaxkv.simulate.waits import Waits
from jaxkv.workload.trace import Request

MAX_IDLE_STEPS = 100_000  # in a row, without anything computed, moved or awaited: more is a scheduler that is stuck
COUNTED = ("num_parks", "num_parks_dropped", "num_restores", "num_replayed_tokens", "num_rotations", "num_last_resorts")


class Watcher(Protocol):
    """Looks at every step, for pictures."""

    def look(self, scheduler: Scheduler, now: float) -> None: ...


def simulate(
    config: SchedulerConfig, requests: Sequence[Request], costs: Costs, num_staging: int, watcher: Watcher | None = None
) -> tuple[Result, list[Story]]:
    """Serve the requests (in order of arrival); the figures of the whole, and what became of each.

    `num_staging` is how many transfer chunks may be in flight. Raises ValueError for settings that a scheduler does not take.
    """
    return Simulation(config, requests, costs, num_staging, watcher).run()


class Simulation:
    """The clock, the copies in flight and each request's story so far."""

    def __init__(
        self, config: SchedulerConfig, requests: Sequence[Request], costs: Costs, num_staging: int, watcher: Watcher | None = None
    ) -> None:
        self.scheduler = Scheduler(config)
        self.now = 0.0
        self._costs, self._watcher = costs, watcher
        self._requests = [request for request in requests for _ in range(request.n)]  # one for each choice: a sequence of its own
        self._groups = [group for group, request in enumerate(requests) for _ in range(request.n)]
        self._num_staging, self._chunk_bytes = num_staging, config.chunk_bytes
        self._next = 0  # the request that arrives next
        self._left: dict[int, int] = {}  # tokens that each live one has yet to make
        self._limits: dict[int, int] = {}
        self._flights: deque[tuple[float, bool, Chunk]] = deque()  # (lands at, is a park, chunk): one copy after another
        self._waits = Waits()
        self._ends: dict[int, tuple[float, str]] = {}
        self._num_steps = self._num_out = self._num_back = self._num_idle = 0

    def run(self) -> tuple[Result, list[Story]]:
        """Until everybody has ended and everything has landed."""
        while self._next < len(self._requests) or not self.scheduler.is_idle:
            self.step()
        counters = self.scheduler.counters
        counts = {name: getattr(counters, name) for name in COUNTED}
        counts |= {"host_bytes": self._num_out * self._chunk_bytes, "device_bytes": self._num_back * self._chunk_bytes}
        counts |= {"host_peak_bytes": counters.host_bytes_peak, "num_steps": self._num_steps}
        stories = [self._story(seq_id) for seq_id in range(len(self._requests))]
        return summarize(stories, counts), stories

    def step(self) -> None:
        """One turn of the engine, in simulated time."""
        self._arrive()
        if self._flights:
            self._land()
        plan = self.scheduler.plan(self.now, self._num_staging - len(self._flights))
        self._waits.take(plan, self.now)
        if plan.park or plan.restore:
            self._depart(plan)
        if self._watcher is not None:
            self._watcher.look(self.scheduler, self.now)
        if plan.decode or plan.prefill:
            self._compute(plan)
        else:
            self._wait(plan)

    def _arrive(self) -> None:
        requests = self._requests
        while self._next < len(requests) and requests[self._next].arrival_s <= self.now:
            seq_id, request = self._next, requests[self._next]
            self._next += 1
            place: dict[str, Any] = {"priority": request.priority, "page_keys": self._page_keys(seq_id)}
            place |= {"keeps_prefix": self.scheduler.config.prefix_cache, "is_patient": request.patient}
            place["group"] = self._groups[seq_id] if request.n > 1 else None
            try:
                limit = self.scheduler.add(seq_id, request.prompt_len, request.max_tokens, request.arrival_s, **place)
            except DoesNotFit:
                self._ends[seq_id] = self.now, "refused"
                continue
            assert limit is not None, "no context of a simulated load shifts"
            self._limits[seq_id] = limit
            self._left[seq_id] = min(limit, request.ends_after)
            self._waits.arrive(seq_id, request.arrival_s)

    def _page_keys(self, seq_id: int) -> tuple[Hashable, ...]:
        """Names of the full pages of a prompt that is not its own alone: the beginning that all have, what the choices of a group have."""
        request, page = self._requests[seq_id], self.scheduler.config.page_size
        shared = request.shared_len if self.scheduler.config.prefix_cache else 0
        last = request.prompt_len - 1 if request.n > 1 else min(shared, request.prompt_len - 1)
        return tuple((None if (i + 1) * page <= shared else self._groups[seq_id], i) for i in range(last // page))

    def _land(self) -> None:
        """Tell the scheduler which copies arrived by now."""
        parked: list[Chunk] = []
        restored: list[Chunk] = []
        while self._flights and self._flights[0][0] <= self.now:
            _, is_park, chunk = self._flights.popleft()
            (parked if is_park else restored).append(chunk)
        if parked or restored:
            self.scheduler.commit(Outcome(parked=tuple(parked), restored=tuple(restored)), self.now)

    def _depart(self, plan: Plan) -> None:
        """Copies use one channel, in the order in which they leave."""
        free_at = max(self.now, self._flights[-1][0]) if self._flights else self.now
        for is_park, chunks in ((True, plan.park), (False, plan.restore)):
            for chunk in chunks:
                free_at += self._costs.land_s
                self._flights.append((free_at, is_park, chunk))
        self._num_out += len(plan.park)
        self._num_back += len(plan.restore)

    def _compute(self, plan: Plan) -> None:
        """The clock goes on by what the step takes; then every token is counted."""
        self._num_steps += 1
        self._num_idle = 0
        self.now += self._costs.step(plan)
        left, ended, decoded = self._left, list[int](), list[int]()
        for row in plan.decode:
            seq_id = row.seq_id
            decoded.append(seq_id)
            if row.is_replay:
                continue
            left[seq_id] -= 1
            if not left[seq_id]:
                ended.append(seq_id)
        prefill = plan.prefill
        if prefill is not None and prefill.is_last and not prefill.is_replay:
            for seq_id in prefill.seq_ids:
                left[seq_id] -= 1
                if not left[seq_id]:
                    ended.append(seq_id)
        leaving = [seq_id for seq_id in ended if self._leaves(seq_id)]
        finished = {seq_id: "stop" for seq_id in ended if seq_id not in leaving}
        self.scheduler.commit(Outcome(prefilled=prefill, decoded=tuple(decoded), finished=finished), self.now)
        for seq_id in finished:
            self._end(seq_id, "finished")
        for seq_id in leaving:
            self.scheduler.cancel(seq_id)
            self._end(seq_id, "cancelled")

    def _leaves(self, seq_id: int) -> bool:
        """Whether its caller goes, at a token that is not its last."""
        request = self._requests[seq_id]
        return request.is_cancelled and request.ends_after < self._limits[seq_id]

    def _end(self, seq_id: int, how: str) -> None:
        self._ends[seq_id] = self.now, how
        self._waits.end(seq_id, self.now)
        self.scheduler.forget(seq_id)

    def _wait(self, plan: Plan) -> None:
        """Nothing to compute: on to whatever comes next."""
        self.now += self._costs.step(plan)
        coming = [self._flights[0][0]] if self._flights else []
        if self._next < len(self._requests):
            coming.append(self._requests[self._next].arrival_s)
        if coming:
            self.now = max(self.now, min(coming))
        self._num_idle += 1
        assert self._num_idle < MAX_IDLE_STEPS, f"the scheduler is stuck at {self.now} s: {self.scheduler.snapshot()}"

    def _story(self, seq_id: int) -> Story:
        request, (end_s, how) = self._requests[seq_id], self._ends[seq_id]
        made = min(self._limits.get(seq_id, 0), request.ends_after) - self._left.get(seq_id, 0)
        pauses = self._waits.pauses_s(seq_id)
        line_s = self._waits.line_s.get(seq_id, end_s - request.arrival_s)
        return Story(request.arrival_s, end_s, made, len(pauses), line_s, pauses, how)
