"""Names for the parts of a step in a profiler's trace. Off, which is the rule, a name is one attribute read."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

_NOTHING = nullcontext()


class Phases:
    """`with phases("decode"):` names what happens inside, while `on`."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def __call__(self, name: str) -> AbstractContextManager[Any]:
        """A part of a step: land, plan, move, prefill, decode or collect."""
        return jax.profiler.TraceAnnotation(name) if self.on else _NOTHING

    def step(self, number: int) -> AbstractContextManager[Any]:
        """A whole step; profilers group what they show by its number."""
        return jax.profiler.StepTraceAnnotation("step", step_num=number) if self.on else _NOTHING
