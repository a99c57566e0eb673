"""A fake loop whose machine fails: copies that fail, hang, cannot be sent or come back damaged, and steps that break off. As an engine
does, it loses what the scheduler says is lost, goes on, and takes no token that was computed from damaged pages.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxkv.scheduler import Chunk, DecodeRow, Fork, Outcome, Plan, PrefillChunk, Scheduler, SchedulerConfig, Shift, TableUpdate
from jaxkv.scheduler.fake_loop import FakeLoop
from jaxkv.scheduler.fake_runner import Copy, FakeRunner

FAULTS = ("failed", "hung", "unsent", "damaged", "broken", "uncommitted")
Key = tuple[int, int, int]


class Broken(Exception):
    """A step that breaks off."""


def key(chunk: Chunk) -> Key:
    return chunk.seq_id, chunk.epoch, chunk.index


class FaultyRunner(FakeRunner):
    """`fault` is what goes wrong next, once, as soon as it can; "broken" after `fuse` operations."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.fault: str | None = None
        self.fuse = 0
        self.on_unsent: Callable[[Chunk], set[int]] = lambda chunk: set()
        self.failed: list[Chunk] = []  # since the last call of `landed`
        self.unsent: list[Chunk] = []  # by the last plan
        self.damaged: list[Chunk] = []  # came back so since the last plan was run
        self.corrupt: set[int] = set()  # places in host memory
        self.corrupt_flights: set[Key] = set()
        self.lost: set[int] = set()
        self.num_known: dict[int, int] = {}

    def landed(self) -> Outcome:
        self.failed, self.damaged = [], []
        if self.fault == "hung" and self.flights:
            self.failed.append(self.flights[-1].chunk)
            self.fault = None
        return super().landed()

    def run(self, plan: Plan) -> Outcome:
        self.unsent, self.lost = [], set()
        self.num_known = {seq_id: len(programs) for seq_id, programs in self.programs.items()}
        try:
            return super().run(plan)
        except Broken:
            for seq_id, num in self.num_known.items():
                self.unlearn(seq_id, num)
            self.fault = None
            raise

    def drop_chunk(self, host_id: int) -> None:
        super().drop_chunk(host_id)
        self.corrupt.discard(host_id)

    def _burn(self) -> None:
        if self.fault == "broken":
            self.fuse -= 1
            if self.fuse < 0:
                raise Broken

    def _is_unsent(self, chunk: Chunk) -> bool:
        self._burn()
        if self.fault == "unsent":
            self.fault = None
            self.lost |= self.on_unsent(chunk)
        elif chunk.seq_id not in self.lost:
            return False
        self.unsent.append(chunk)
        return True

    def _park(self, chunk: Chunk) -> None:
        if not self._is_unsent(chunk):
            super()._park(chunk)

    def _restore(self, chunk: Chunk) -> None:
        if self._is_unsent(chunk):
            return
        if chunk.host_id in self.corrupt:
            self.corrupt_flights.add(key(chunk))
        super()._restore(chunk)

    def _land_park(self, copy: Copy) -> None:
        super()._land_park(copy)
        if self.fault == "failed":
            self.failed.append(copy.chunk)
        if self.fault in ("failed", "damaged"):
            self.host[copy.chunk.host_id] = (self._blank(copy), None, self._num_bytes(copy.chunk))
            self.corrupt.add(copy.chunk.host_id)
            self.fault = None

    def _land_restore(self, copy: Copy) -> None:
        if self.fault == "failed":
            self.failed.append(copy.chunk)
            self.fault, copy.cells, copy.slot = None, self._blank(copy), None
        if key(copy.chunk) in self.corrupt_flights or self.fault == "damaged":
            self.damaged.append(copy.chunk)
            self.fault, copy.cells, copy.slot = None, self._blank(copy), None
        super()._land_restore(copy)

    def _blank(self, copy: Copy) -> list[list[Any]]:
        return [[None] * self.config.page_size for _ in copy.chunk.pages]

    def _shift(self, shift: Shift) -> None:
        self._burn()
        super()._shift(shift)

    def _update(self, update: TableUpdate) -> None:
        self._burn()
        super()._update(update)

    def _prefill(self, chunk: PrefillChunk) -> None:
        self._burn()
        super()._prefill(chunk)

    def _fork(self, chunk: PrefillChunk, fork: Fork) -> None:
        self._burn()
        super()._fork(chunk, fork)

    def _decode(self, row: DecodeRow) -> list[int]:
        self._burn()
        return super()._decode(row)

    def _is_damaged(self, seq_id: int) -> bool:
        return any(chunk.seq_id == seq_id and chunk.epoch == self.epochs[seq_id] for chunk in self.damaged)

    def _read(self, seq_id: int, row: int, start: int, num_cells: int) -> None:
        if not self._is_damaged(seq_id):
            super()._read(seq_id, row, start, num_cells)

    def _advance(self, seq_id: int, row: int, token: int) -> None:
        if not self._is_damaged(seq_id):
            super()._advance(seq_id, row, token)


class FaultyLoop(FakeLoop):
    """`fault` breaks the next step that it can break; `tick` is how long the next step takes."""

    def __init__(self, config: SchedulerConfig, delay: Callable[[Chunk], int] = lambda chunk: 0, num_staging: int = 1000) -> None:
        super().__init__(config, delay, num_staging)
        self.runner: FaultyRunner = FaultyRunner(config, delay, num_staging)
        self.runner.on_unsent = self.lose_copy
        self.scheduler = Scheduler(config, on_drop=self.runner.drop_chunk)
        self.clock = 0.0
        self.tick = 1.0
        self.forgets = False  # those that ended, at once
        self.forgotten: set[int] = set()

    @property
    def now(self) -> float:
        return self.clock

    def fault(self, kind: str, fuse: int = 0) -> None:
        self.runner.fault, self.runner.fuse = kind, fuse

    def fail(self, seq_id: int, reason: str = "the caller's own fault") -> str:
        refusal = self.scheduler.fail(seq_id, reason)
        self.scheduler.check()
        self._note_ends()
        return refusal

    def lose_copy(self, chunk: Chunk) -> set[int]:
        """What an engine does about a copy that failed or came back damaged."""
        lost = self.scheduler.spoil(chunk)
        for seq_id in lost:
            self.replay(seq_id)
        return set(lost)

    def step(self) -> Plan:
        plan = Plan(-1)
        try:
            self.land()
            plan = self.plan()
            self.carry_out(plan)
        except Broken:
            self.recover()
        self.num_steps += 1
        self.clock += self.tick
        is_idle = not (plan.prefill or plan.decode or self.scheduler.is_idle)
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        return plan

    def land(self) -> None:
        landed = self.runner.landed()
        for chunk in self.runner.failed:
            self.lose_copy(chunk)
        if landed.parked or landed.restored:
            self._commit(landed, self.now)

    def plan(self) -> Plan:
        plan = self.scheduler.plan(self.now, self.runner.free_chunks)
        self.scheduler.check()
        self.notes += [(self.num_steps, note) for note in plan.notes]
        return plan

    def carry_out(self, plan: Plan) -> None:
        outcome = self.runner.run(plan)
        if self.runner.unsent:
            self._commit(Outcome(parked=tuple(self.runner.unsent)), self.now)
        lost = {seq_id for chunk in self.runner.damaged for seq_id in self.lose_copy(chunk)}
        for seq_id in lost:
            self.runner.unlearn(seq_id, self.runner.num_known[seq_id])
        is_lost = outcome.prefilled is not None and outcome.prefilled.seq_id in lost
        outcome = Outcome(
            prefilled=None if is_lost else outcome.prefilled,
            decoded=tuple(seq_id for seq_id in outcome.decoded if seq_id not in lost),
        )
        if self.runner.fuse % 2:
            self.break_uncommitted()
        self._enter(self.without(plan, lost), outcome, self.now)

    def break_uncommitted(self) -> None:
        """Before the step is entered, or when its tokens are taken but no end is told."""
        if self.runner.fault == "uncommitted":
            self.runner.fault = None
            raise Broken

    def _with_ends(self, plan: Plan, outcome: Outcome) -> Outcome:
        found = super()._with_ends(plan, outcome)
        self.break_uncommitted()
        return found

    def _finish(self, finished: dict[int, str], now: float) -> None:
        self.break_uncommitted()
        super()._finish(finished, now)

    @staticmethod
    def without(plan: Plan, lost: set[int]) -> Plan:
        """The plan as far as its tokens are anybody's."""
        prefill = None if plan.prefill is None or plan.prefill.seq_id in lost else plan.prefill
        if prefill is not None:
            prefill = replace(prefill, forks=tuple(fork for fork in prefill.forks if fork.seq_id not in lost))
        return Plan(plan.step, prefill=prefill, decode=tuple(row for row in plan.decode if row.seq_id not in lost))

    def _note_ends(self) -> None:
        super()._note_ends()
        if self.forgets:
            for seq_id in [seq_id for seq_id in self.ends.keys() - self.forgotten if not self._waits(seq_id)]:
                self.forgotten.add(seq_id)
                self.scheduler.forget(seq_id)
