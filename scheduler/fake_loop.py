"""An engine's loop without a device: plans of a scheduler become steps of a fake runner, and the books are checked after every event.

Knows how many tokens each sequence is to make, and no token.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from jaxkv.scheduler.fake_runner import FakeRunner
from jaxkv.scheduler.need import need
from jaxkv.scheduler.plan import Chunk, Note, Outcome, Plan, SchedulerConfig
from jaxkv.scheduler.scheduler import Scheduler
from jaxkv.scheduler.sequence import OVER, State


class FakeLoop:
    """An engine's loop around a scheduler and a fake runner, checking the books after every event.

    `tokens` counts what each sequence generated, `ends` says how it ended, `notes` is all that was noted, with the step.
    """

    def __init__(self, config: SchedulerConfig, delay: Callable[[Chunk], int] = lambda chunk: 0, num_staging: int = 1000) -> None:
        self.runner = FakeRunner(config, delay, num_staging)
        self.scheduler = Scheduler(config, on_drop=self.runner.drop_chunk)
        self.tokens: dict[int, int] = {}
        self.stops: dict[int, int | None] = {}
        self.limits: dict[int, int | None] = {}
        self.ends: dict[int, State] = {}
        self.notes: list[tuple[int, Note]] = []
        self.overlap = False  # tokens are read, and ends by a stop told, when the next step has been carried out
        self.unread: list[tuple[int, ...]] = []  # by step, those for whom it made a token
        self.num_steps = 0
        self.num_idle_steps = 0  # in a row, with work but without a chunk or a token

    @property
    def now(self) -> float:
        """A step is a second."""
        return float(self.num_steps)

    def add(
        self,
        seq_id: int,
        prompt_len: int,
        max_new: int | None,
        stops_after: int | None = None,
        *,
        page_keys: tuple[Hashable, ...] = (),
        **more: Any,
    ) -> int | None:
        """Add a sequence, with `more` as `Scheduler.add` takes it; it stops by itself after `stops_after` tokens, if its limit lets it."""
        limit = self.scheduler.add(seq_id, prompt_len, max_new, self.now, page_keys=page_keys, **more)
        self.runner.start(seq_id, page_keys)
        self.tokens[seq_id] = 0
        self.limits[seq_id] = limit
        self.stops[seq_id] = min((at for at in (limit, stops_after) if at), default=None)
        return limit

    def cancel(self, seq_id: int) -> str:
        reason = self.scheduler.cancel(seq_id)
        self.scheduler.check()
        self._note_ends()
        return reason

    def replay(self, seq_id: int) -> str:
        """What a sequence has computed is lost, as if its image were broken."""
        reason = self.scheduler.replay(seq_id, self.now)
        self.scheduler.check()
        if not reason:
            self.runner.lose(seq_id)
        return reason

    def recover(self) -> None:
        """A step broke off: the pool is lost, and the books are made anew."""
        now = self.now
        live = {seq_id: num for seq_id, num in self.tokens.items() if self._waits(seq_id)}
        self.unread.clear()
        self.runner.lose_pool()
        self.scheduler.recover([copy.chunk for copy in self.runner.flights], live, now)
        self.scheduler.check()
        for view in self.scheduler.snapshot().sequences:
            self.ends.pop(view.seq_id, None)
            self.runner.unlearn(view.seq_id, need(view.prompt_len, view.num_generated) if view.num_generated else view.prompt_len - 1)
            is_lost = bool(view.replay_to) or not (view.num_shifts or view.num_cells)  # a shift may leave no cell, a window no page
            if view.state is State.PARKED and is_lost:
                self.runner.lose(view.seq_id)
            else:
                del self.runner.written[view.seq_id][view.num_cells :]  # a shift that was planned, but not carried out
        finished = {seq_id: "stop" for seq_id, num in live.items() if num == self.stops[seq_id]}
        self._commit(Outcome(finished=finished), now)

    def step(self) -> Plan:
        """One turn: what landed, a plan, its outcome."""
        now = self.now
        self._commit(self.runner.landed(), now)
        plan = self.scheduler.plan(now, self.runner.free_chunks)
        self.scheduler.check()
        self.notes += [(self.num_steps, note) for note in plan.notes]
        self._note_ends()
        self._enter(plan, self.runner.run(plan), now)
        self.num_steps += 1
        is_idle = not (plan.prefill or plan.decode or self.scheduler.is_idle)
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        return plan

    def run(self, num_steps: int = 100_000, until: Callable[[], bool] = lambda: False) -> None:
        """Step until `until` holds or everything has ended and landed; AssertionError after `num_steps`."""
        for _ in range(num_steps):
            if until() or (self.scheduler.is_idle and not self.unread):
                return
            self.step()
        raise AssertionError(f"not done after {num_steps} steps: {self.scheduler.snapshot()}")

    def num_cells(self, seq_id: int) -> int:
        return next((view.num_cells for view in self.scheduler.snapshot().sequences if view.seq_id == seq_id), 0)

    def noted(self, *kinds: str) -> list[int]:
        """The sequences of all notes of these kinds, in order."""
        return [note.seq_id for _, note in self.notes if note.kind in kinds]

    def _with_ends(self, plan: Plan, outcome: Outcome) -> Outcome:
        replayed = {row.seq_id for row in plan.decode if row.is_replay}
        finished: dict[int, str] = {}
        decoded: list[int] = []
        if plan.prefill and plan.prefill.is_last and not plan.prefill.is_replay:
            assert not any(self.tokens[seq_id] for seq_id in plan.prefill.seq_ids), f"{plan.prefill} draws a first token a second time"
            for seq_id in plan.prefill.seq_ids:
                self._count(seq_id, finished)
        for seq_id in outcome.decoded:
            if seq_id not in finished:  # a guess behind the last token is nobody's
                decoded.append(seq_id)
                if seq_id not in replayed:
                    self._count(seq_id, finished)
        return Outcome(prefilled=outcome.prefilled, decoded=tuple(decoded), finished=finished)

    def _count(self, seq_id: int, finished: dict[int, str]) -> None:
        """One token more, perhaps its last."""
        self.tokens[seq_id] += 1
        if self.tokens[seq_id] == self.stops[seq_id]:
            finished[seq_id] = "length" if self.stops[seq_id] == self.limits[seq_id] else "stop"

    def _enter(self, plan: Plan, outcome: Outcome, now: float) -> None:
        """What is certain without the tokens at once; then the tokens, but those of the last step only where nothing goes on from them."""
        if self.scheduler.config.num_draft:  # how many guesses are true is read with the tokens
            self._commit(self._with_ends(plan, outcome), now)
            return
        self._commit(outcome, now)
        new = [row.seq_id for row in plan.decode if not row.is_replay]
        if plan.prefill and plan.prefill.is_last and not plan.prefill.is_replay:
            have = {seq_id for seq_id, num in self.tokens.items() if num}.union(*self.unread)
            assert not have.intersection(plan.prefill.seq_ids), f"{plan.prefill} draws a first token a second time"
            new += plan.prefill.seq_ids
        self.unread.append(tuple(new))
        num_ahead = 1 if self.overlap and any(seq_id not in self.ends for seq_id in new) else 0
        while len(self.unread) > num_ahead:
            self._read(self.unread.pop(0), now)

    def _read(self, seq_ids: tuple[int, ...], now: float) -> None:
        """Count a token of each, and say who ends with it."""
        finished: dict[int, str] = {}
        for seq_id in filter(self._waits, seq_ids):
            self._count(seq_id, finished)
        self._finish(finished, now)

    def _finish(self, finished: dict[int, str], now: float) -> None:
        self._commit(Outcome(finished=finished), now)

    def _waits(self, seq_id: int) -> bool:
        """Whether it takes a token: it lives, or is over for the scheduler with one that has not been read."""
        end = self.ends.get(seq_id)
        return end is None or (end is State.FINISHED and self.tokens[seq_id] != self.stops[seq_id])

    def _commit(self, outcome: Outcome, now: float) -> None:
        self.scheduler.commit(outcome, now)
        self.scheduler.check()
        self._note_ends()

    def _note_ends(self) -> None:
        for seq_id in self.tokens.keys() - self.ends.keys():
            state = self.scheduler.state(seq_id)
            if state in OVER:
                self.ends[seq_id] = state
                self.runner.drop(seq_id)


def all_finished(ends: Mapping[int, State]) -> bool:
    """Whether every end was a finish."""
    return all(state is State.FINISHED for state in ends.values())
