"""Shows a run while it goes on: a picture on a terminal, plain lines elsewhere; and a bar for the parts that only take time.

Drawn from the engine's thread between two steps, a few times a second, so that it costs the run little.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxkv.demo.chats import Chat
from jaxkv.demo.frame import AWAY, ChatRow, Frame, take_frame
from jaxkv.demo.play import OnStep
from jaxkv.demo.view import draw
from jaxkv.engine import Engine
from jaxkv.live import Handle

DRAW_EVERY_S = 0.125
LINE_EVERY_S = 5.0
MAX_WIDTH = 110
BAR_COLUMNS = 28  # of what a bar is about


@contextmanager
def watch(console: Console, chats: Sequence[Chat], needed_pages: int) -> Iterator[OnStep]:
    """A view of the chats for as long as they run, the last state included."""
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            yield Picture(live, chats, needed_pages)
    else:
        yield Lines(console, chats, needed_pages)


class Picture:
    """The live view, drawn again in place."""

    def __init__(self, live: Live, chats: Sequence[Chat], needed_pages: int) -> None:
        self._live, self._chats, self._needed = live, chats, needed_pages
        self._start, self._next = time.perf_counter(), 0.0

    def __call__(self, engine: Engine, handles: Sequence[Handle]) -> None:
        """After every step; draws when it is time to, and at the end."""
        now = time.perf_counter()
        if now < self._next and not all(handle.done for handle in handles):
            return
        frame = take_frame(engine, self._chats, handles, self._needed, now - self._start)
        self._live.update(draw(frame, min(MAX_WIDTH, self._live.console.width)), refresh=True)
        self._next = time.perf_counter() + DRAW_EVERY_S


class Lines:
    """A line for every park, return and end, and one about all of them every few seconds."""

    def __init__(self, console: Console, chats: Sequence[Chat], needed_pages: int) -> None:
        self._console, self._chats, self._needed = console, chats, needed_pages
        self._start = time.perf_counter()
        self._next = self._start + LINE_EVERY_S
        self._seen = (0, 0, 0)
        self._rows: tuple[ChatRow, ...] = tuple(ChatRow(c.number, c.title, "waiting", 0, 0, 0, 0, 0, "") for c in chats)

    def __call__(self, engine: Engine, handles: Sequence[Handle]) -> None:
        """After every step."""
        now, counters = time.perf_counter(), engine.scheduler.counters
        seen = (counters.num_parks, counters.num_restores, sum(handle.done for handle in handles))
        if seen == self._seen and now < self._next:
            return
        frame = take_frame(engine, self._chats, handles, self._needed, now - self._start)
        for before, row in zip(self._rows, frame.rows, strict=True):
            for event in events(before, row):
                self._say(frame, f"{row.number} {row.title:<9} {event}")
        self._seen, self._rows = seen, frame.rows
        if now >= self._next:
            self._next = now + LINE_EVERY_S
            self._say(frame, summary_line(frame))

    def _say(self, frame: Frame, text: str) -> None:
        self._console.print(f"{frame.elapsed_s:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)


def events(before: ChatRow, now: ChatRow) -> Iterator[str]:
    """What happened to a chat between two looks at it, in words."""
    was_away = before.state in AWAY
    if now.num_parks > before.num_parks:
        is_dropped = now.state in AWAY and not now.image_pages
        where = "dropped, to be computed again" if is_dropped else "to host memory"
        yield f"parked after {now.num_generated} tokens: {now.image_pages or before.num_pages} pages {where}"
        was_away = True
    if was_away and now.state not in AWAY and now.state != "failed":
        yield f"is back, at {now.num_generated} tokens"
    if now.state in ("done", "failed") and before.state != now.state:
        yield f"{now.state}: {now.num_generated} tokens, {now.num_parks} {'park' if now.num_parks == 1 else 'parks'}"


def summary_line(frame: Frame) -> str:
    """All chats in one line."""
    states = [row.state for row in frame.rows]
    counts = {
        "running": states.count("running") + states.count("prompt"),
        "parked": sum(state in AWAY for state in states),
        "waiting": states.count("waiting"),
        "done": frame.num_done,
    }
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count or name != "waiting")
    return f"{told}; {frame.num_free}/{len(frame.owners)} pages free; {frame.num_tokens} tokens, {frame.tokens_per_s:.1f}/s"


@contextmanager
def bar(console: Console, what: str, num_tokens: int) -> Iterator[OnStep]:
    """Progress towards a known number of tokens."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"),
        TimeRemainingColumn(),
    )
    start, progress = time.perf_counter(), Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
    due = start

    with progress:
        task = progress.add_task(f"{what:<{BAR_COLUMNS}}", total=num_tokens)

        def on_step(_: Engine, handles: Sequence[Handle]) -> None:
            nonlocal due
            if time.perf_counter() >= due:
                progress.update(task, completed=sum(len(handle.token_ids) for handle in handles), refresh=True)
                due = time.perf_counter() + DRAW_EVERY_S

        yield on_step
        progress.update(task, completed=num_tokens, refresh=True)
    if not console.is_terminal:
        console.print(f"{what}: {num_tokens} tokens in {time.perf_counter() - start:.1f} s", highlight=False, markup=False)
