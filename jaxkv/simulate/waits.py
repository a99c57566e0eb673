"""When each sequence waited, in the line and away from the pool, as the scheduler's notes tell. For simulator and engine alike."""

from collections.abc import Sequence

from jaxkv.scheduler.plan import Note, Plan


class Waits:
    """Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self.line_s: dict[int, float] = {}  # from its arrival until it was let in
        self._arrived: dict[int, float] = {}
        self._away: dict[int, float] = {}  # parked and not running again: since when
        self._pauses: dict[int, list[float]] = {}

    def arrive(self, seq_id: int, now: float) -> None:
        """It waits from now on."""
        self._arrived[seq_id] = now

    def take(self, plan: Plan, now: float) -> None:
        """What the plan decided and whom it runs: a pause is over when one runs again, beyond what it had computed before."""
        if plan.notes:
            self.take_notes(plan.notes, now)
        if self._away and (plan.decode or plan.prefill):
            self.note_returns(plan, now)

    def take_notes(self, notes: Sequence[Note], now: float) -> None:
        """Who was let in, and who leaves."""
        for note in notes:
            if note.kind in ("park", "drop"):
                self._away.setdefault(note.seq_id, now)
            elif note.kind == "admit" and note.seq_id in self._arrived:
                self.line_s[note.seq_id] = now - self._arrived[note.seq_id]

    def note_returns(self, plan: Plan, now: float) -> None:
        """Who runs again."""
        running = [row.seq_id for row in plan.decode if not row.is_replay]
        if plan.prefill is not None and not plan.prefill.is_replay:
            running += (plan.prefill.seq_id, *(fork.seq_id for fork in plan.prefill.forks))
        for seq_id in running:
            self._back(seq_id, now)

    def end(self, seq_id: int, now: float) -> None:
        """It waits no more."""
        self._back(seq_id, now)

    def pauses_s(self, seq_id: int) -> tuple[float, ...]:
        """Its pauses, each from a park until it ran again."""
        return tuple(self._pauses.get(seq_id, ()))

    def _back(self, seq_id: int, now: float) -> None:
        if seq_id in self._away:
            self._pauses.setdefault(seq_id, []).append(now - self._away.pop(seq_id))
