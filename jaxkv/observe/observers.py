"""Who is told what an engine does, and the guard between them: nothing that a listener raises reaches the loop.

Standard library only. A listener is any object with some of these methods (times are those of `time.perf_counter`):

    on_submit(engine, sequence)                    a request was taken
    on_landed(engine, landed, now)                 copies arrived, and the scheduler knows
    on_plan(engine, plan, now)                     the step is planned, nothing of it is done yet
    on_step(engine, plan, now)                     the step is done, its tokens are handed out
    on_loss(engine, sequence, reason, now)         what a sequence had computed is no good, so it is dropped and will be computed again
    on_fault(engine, reason, now)                  a step broke off and was made good: whoever was in the pool is computed again
    on_end(engine, sequence, reason, error, now)   a sequence has left; `error` says why where it failed
"""

import logging
from typing import Any

logger = logging.getLogger("jaxkv")


class Observers:
    """The listeners of one engine, told in the order in which they came. One that raises is named once and told on."""

    def __init__(self, *listeners: object) -> None:
        self._listeners: list[object] = list(listeners)
        self._named: set[tuple[int, str]] = set()

    def add(self, listener: object) -> None:
        """Tell this one too, from now on."""
        self._listeners.append(listener)

    def remove(self, listener: object) -> None:
        """Tell it no more; nothing happens when it was never told."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method of that name on every listener that has one."""
        for listener in self._listeners:
            method = getattr(listener, event, None)
            if method is not None:
                try:
                    method(*facts)
                except Exception as error:
                    self._name(listener, event, error)

    def _name(self, listener: object, event: str, error: Exception) -> None:
        """Say once what a listener raised; the message may quote an answer, so only its type is told."""
        key = (id(listener), event)
        if key in self._named:
            return
        self._named.add(key)
        try:
            logger.warning("%s.%s raised %s, told once; the engine goes on", type(listener).__name__, event, type(error).__name__)
        except Exception:  # a handler of somebody's that raises too
            return
