"""What the engine's time goes into, step by step: prompts, copies, rows alone, or waiting for a copy. Counts, and decides nothing.

A step lasts from the end of the one before, so that what is done between two of them counts too. What begins in one step may
be waited for in the next, so a step counts as one with a prompt, or with copies, where it or the one before had any.
"""

from collections.abc import Mapping
from typing import Any

PROMPT, COPIES, ROWS, WAITING = "prompt", "copies", "rows", "waiting"
KINDS: Mapping[str, str] = {
    PROMPT: "a chunk of a prompt, copies or not",
    COPIES: "copies on their way, and no prompt",
    ROWS: "rows alone",
    WAITING: "nothing that could be computed",
}


class StepClock:
    """Counts for whichever engine it watches."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.steps = dict.fromkeys(KINDS, 0)
        self._engine: Any = None
        self._since: float | None = None  # the end of the step before, where that left something to do
        self._before: set[str] = set()  # what that step had
        self._has_landed = False

    def watch(self, engine: Any) -> None:
        """Count this engine's steps from now on."""
        if engine is not self._engine:
            engine.observers.add(self)
            self.forget()
            self._engine = engine

    def forget(self) -> None:
        """The engine is on its way out, and must not be kept."""
        self._engine, self._since, self._before, self._has_landed = None, None, set(), False

    def on_landed(self, engine: Any, landed: Any, now: float) -> None:
        """Copies arrived in this step."""
        self._has_landed = True

    def on_step(self, engine: Any, plan: Any, now: float) -> None:
        """A step is over."""
        moves = plan.park or plan.restore or self._has_landed or engine.parts.transfer.num_in_flight
        has = {kind for kind, there in ((PROMPT, plan.prefill), (COPIES, moves)) if there}
        if self._since is not None:
            kind = self._kind(has | self._before, computes=bool(plan.prefill or plan.decode))
            self.seconds[kind] += now - self._since
            self.steps[kind] += 1
        self._since = None if engine.is_idle else now
        self._before, self._has_landed = has, False

    def _kind(self, has: set[str], *, computes: bool) -> str:
        if not computes:
            return WAITING
        return next((kind for kind in (PROMPT, COPIES) if kind in has), ROWS)
