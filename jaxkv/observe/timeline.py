"""Who held the pool, who was parked and who waited, as a timeline for Perfetto or chrome://tracing. Looks at an engine, decides nothing.

Three groups of tracks: the engine (steps, copies, counters), its rows (which sequence runs there), its sequences (the state each is in).
"""

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jaxkv.observe.trace_file import TraceFile

if TYPE_CHECKING:
    from pathlib import Path

    from jaxkv.engine import Engine
    from jaxkv.live import Live
    from jaxkv.scheduler import Chunk, Plan, SequenceView, Snapshot
    from jaxkv.transfer import Landed

logger = logging.getLogger("jaxkv")

ENGINE, ROWS, SEQUENCES = 1, 2, 3
_STEPS = 1  # track of the engine


class Timeline:
    """Add it to an engine's observers: `with Timeline("run.json") as timeline: engine.observers.add(timeline)`."""

    def __init__(self, path: "str | Path") -> None:
        """Raises ConfigError where no file can be made."""
        self._out = TraceFile(path)
        self._states: dict[int, str] = {}  # sequence -> the state whose slice is open
        self._rows: dict[int, tuple[int, str]] = {}  # row -> the sequence whose slice is open, and what the slice is called
        self._counters: dict[str, dict[str, int]] = {}
        self._copies: dict[tuple[int, int, int], str] = {}  # in flight, with their names
        self._planned_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Finish the file."""
        try:
            self._out.close()
        except OSError as error:  # a run's answers are worth more than its timeline
            logger.warning("the timeline %s is not whole: %s", self._out.path, error)

    def on_submit(self, engine: "Engine", sequence: "Live") -> None:
        """A sequence begins to wait."""
        self._begin(engine)
        self._enter_state(sequence.seq_id, title(engine, sequence.seq_id), "waiting", sequence.submitted_s, {})

    def on_plan(self, engine: "Engine", plan: "Plan", now: float) -> None:
        """States change and copies leave."""
        self._begin(engine)
        self._planned_s = now
        self._look(engine, now)
        for name, chunks in (("copy to host", plan.park), ("copy to device", plan.restore)):
            for chunk in chunks:
                self._depart(name, chunk, now)

    def on_landed(self, engine: "Engine", landed: "Landed", now: float) -> None:
        """Copies arrive."""
        self._begin(engine)
        for chunk in (*landed.parked, *landed.restored):
            self._arrive(chunk, now)
        self._look(engine, now)

    def on_step(self, engine: "Engine", plan: "Plan", now: float) -> None:
        """A step is over."""
        if self._planned_s is not None and (plan.prefill or plan.decode):
            sizes = {"prefill": plan.prefill.length if plan.prefill else 0, "decode": len(plan.decode)}
            name = " + ".join(f"{what} {num}" for what, num in sizes.items() if num)
            took_us = round((now - self._planned_s) * 1e6, 1)
            self._out.add("X", name, self._planned_s, dur=took_us, pid=ENGINE, tid=_STEPS, args={"step": plan.step})
        self._look(engine, now)

    def on_end(self, engine: "Engine", sequence: "Live", reason: str, error: str | None, now: float) -> None:
        """A sequence is gone from its row and its track."""
        self._leave_row(sequence.seq_id, now)
        self._leave_state(sequence.seq_id, now, {"ended": reason, "generated_tokens": sequence.num_generated})

    def _begin(self, engine: "Engine") -> None:
        """Name the tracks, once."""
        if self._out.num_events:
            return
        for pid, name in ((ENGINE, "engine"), (ROWS, "rows"), (SEQUENCES, "sequences")):
            self._out.name_process(pid, name)
        self._out.name_track(ENGINE, _STEPS, "steps")
        for row in range(engine.scheduler.config.rows):
            self._out.name_track(ROWS, row + 1, f"row {row}")

    def _look(self, engine: "Engine", now: float) -> None:
        """Compare the scheduler's picture with what is drawn so far, and draw the difference."""
        picture = engine.scheduler.snapshot()
        live = [view for view in picture.sequences if engine.live(view.seq_id) is not None]
        in_rows = {view.row: view.seq_id for view in live if view.row is not None}
        for row, (seq_id, _) in list(self._rows.items()):
            if in_rows.get(row) != seq_id:
                self._leave_row(seq_id, now)
        for view in live:
            self._enter_state(view.seq_id, title(engine, view.seq_id), str(view.state), now, facts(view))
            if view.row is not None and view.row not in self._rows:
                self._rows[view.row] = view.seq_id, title(engine, view.seq_id)
                self._out.add("B", title(engine, view.seq_id), now, pid=ROWS, tid=view.row + 1, args=facts(view))
        self._count(picture, live, engine.scheduler.config.rows, now)

    def _count(self, picture: "Snapshot", live: "list[SequenceView]", num_rows: int, now: float) -> None:
        held = {view.row: view.num_pages for view in live if view.row is not None}
        used = picture.num_pages - picture.num_pages_free
        self._set("pool pages", {"used": used, "free": picture.num_pages_free}, now)
        self._set("pages by row", {f"row {row}": held.get(row, 0) for row in range(num_rows)}, now)
        self._set("host bytes", {"held": picture.host_bytes}, now)
        self._set("sequences", {"running": picture.num_running, "parked": picture.num_parked, "waiting": picture.num_waiting}, now)

    def _set(self, name: str, values: dict[str, int], now: float) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._out.add("C", name, now, pid=ENGINE, args=values)

    def _enter_state(self, seq_id: int, name: str, state: str, now: float, args: dict[str, Any]) -> None:
        before = self._states.get(seq_id)
        if before == state:
            return
        if before is None:
            self._out.name_track(SEQUENCES, seq_id + 1, name)
        else:
            self._leave_state(seq_id, now, args)
        self._states[seq_id] = state
        self._out.add("B", state, now, pid=SEQUENCES, tid=seq_id + 1)

    def _leave_state(self, seq_id: int, now: float, args: dict[str, Any]) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._out.add("E", state, now, pid=SEQUENCES, tid=seq_id + 1, args=args)

    def _leave_row(self, seq_id: int, now: float) -> None:
        for row in [row for row, (holder, _) in self._rows.items() if holder == seq_id]:
            _, name = self._rows.pop(row)  # a slice is closed by the name that opened it
            self._out.add("E", name, now, pid=ROWS, tid=row + 1)

    def _depart(self, name: str, chunk: "Chunk", now: float) -> None:
        self._copies[chunk.seq_id, chunk.epoch, chunk.index] = name
        self._copy("b", name, chunk, now)

    def _arrive(self, chunk: "Chunk", now: float) -> None:
        name = self._copies.pop((chunk.seq_id, chunk.epoch, chunk.index), None)
        if name is not None:
            self._copy("e", name, chunk, now)

    def _copy(self, phase: str, name: str, chunk: "Chunk", now: float) -> None:
        """Copies overlap, so each is a slice with an id of its own."""
        ident = f"{chunk.seq_id}.{chunk.epoch}.{chunk.index}"
        args = {"seq_id": chunk.seq_id, "chunk": chunk.index, "pages": len(chunk.pages)}
        self._out.add(phase, name, now, pid=ENGINE, tid=0, cat="copy", id=ident, args=args)


def title(engine: "Engine", seq_id: int) -> str:
    """What a sequence is called: its number, and its caller's name for it."""
    live = engine.live(seq_id)
    return f"seq {seq_id}" if live is None or live.name is None else f"seq {seq_id} {live.name}"


def facts(view: "SequenceView") -> dict[str, int]:
    """A sequence's sizes."""
    return {"tokens": view.num_tokens, "pages": view.num_pages or view.image_pages, "parks": view.num_parks}
