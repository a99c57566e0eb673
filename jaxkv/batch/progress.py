"""Shows how a job is doing, on standard error: a bar on a terminal, a plain line every few seconds elsewhere. Decides nothing."""

import time
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 5.0
BAR_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class View:
    """What is shown."""

    num_finished: int
    num_failed: int
    num_lines: int
    num_running: int = 0
    num_parked: int = 0
    tokens_per_s: float = 0.0

    @classmethod
    def of(cls, status: Any, num_finished: int, num_failed: int, num_lines: int) -> "View":
        """From an engine's status."""
        return cls(num_finished, num_failed, num_lines, status.rows, status.parked, float(status.tokens_per_s or 0.0))

    def __str__(self) -> str:
        failed = f" ({self.num_failed} failed)" if self.num_failed else ""
        return (
            f"{self.num_finished}/{self.num_lines} finished{failed}, {self.num_running} running, {self.num_parked} parked, "
            f"{self.tokens_per_s:.1f} tokens/s"
        )


class Meter(Protocol):
    """Shows views."""

    every_s: float

    def show(self, view: View) -> None: ...

    def close(self) -> None: ...


class PlainLines:
    """One line per view."""

    every_s = PLAIN_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, view: View) -> None:
        """Print it."""
        print(f"batch: {view}", file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """One line that is drawn again in place, by the caller's thread."""

    every_s = BAR_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(file=stream), auto_refresh=False)
        self._task = self._bar.add_task("starting")
        self._bar.start()

    def show(self, view: View) -> None:
        """Draw it."""
        self._bar.update(self._task, completed=view.num_finished, total=view.num_lines, description=str(view).partition(" ")[2])
        self._bar.refresh()

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._bar.stop()


class Pace:
    """Lets a view through when it is time for one, so that a fast loop spends nothing on them."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._next = time.monotonic() + min(1.0, meter.every_s)

    def is_due(self) -> bool:
        """Whether a view should be shown now."""
        return time.monotonic() >= self._next

    def show(self, view: View) -> None:
        """Show it and wait for the next time."""
        self._meter.show(view)
        self._next = time.monotonic() + self._meter.every_s


def choose_meter(stream: TextIO) -> Meter:
    """A bar where a person looks, lines where a file does."""
    return Bar(stream) if stream.isatty() else PlainLines(stream)
