"""Turns SIGINT and SIGTERM into a question that a loop asks between two steps. Knows nothing of what the loop does."""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from jaxkv.interrupt import has_interrupt

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """While open, the first signal is only noted in `signum`; a second one raises KeyboardInterrupt, as it would have at once.

    A Ctrl-C that came before, and whose KeyboardInterrupt was dropped, counts as the first.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum

    def __enter__(self) -> Self:
        try:
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        except ValueError:
            pass  # not the main thread: signals are somebody else's affair
        if has_interrupt(self._before.get(signal.SIGINT)):
            self.signum = signal.SIGINT
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
