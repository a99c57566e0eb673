"""An engine's parks, returns, refusals, losses, failures and start-up as lines of the logger "jaxkv". Never a prompt or an answer.

Nothing is installed at import: whose handlers there are and which levels they take is the program's affair. The command line calls
`logging_to` with the configuration's `log` section.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxkv.errors import ConfigError
from jaxkv.observe.events import Event, JsonFormatter, TextFormatter

if TYPE_CHECKING:
    from jaxkv.config.sections import LogSection
    from jaxkv.engine import Engine
    from jaxkv.live import Live
    from jaxkv.scheduler import Note, Plan
    from jaxkv.transfer import Landed

logger = logging.getLogger("jaxkv")
_CALLBACK = "the token could not be taken: "  # what follows may quote an answer


@dataclass(slots=True)
class Absence:
    """A sequence between the order to park it and its return; times in seconds."""

    why: str
    num_tokens: int
    num_pages: int
    image_bytes: int
    kept_bytes: int  # of these, still there from an earlier park
    parked_s: float
    first_copy_s: float | None = None
    is_told: bool = False  # the line about the park is written
    returns_s: float | None = None  # when its return was planned
    back: str = "restore"  # what its return is called


class LogObserver:
    """Writes one line when an image is whole in host memory, or when a sequence is dropped without one, and one when it is back.

    `took_ms` is the copying or the computing, `waited_ms` what came before it: for a park from the order to the first copy (staging memory
    may be taken), for a return the whole time since the order to park.
    """

    def __init__(self) -> None:
        self._away: dict[int, Absence] = {}

    def on_submit(self, engine: "Engine", sequence: "Live") -> None:
        """A debug line; lengths only."""
        if logger.isEnabledFor(logging.DEBUG):
            max_tokens = sequence.params.max_tokens
            logger.debug(Event("submit", {**who(engine, sequence.seq_id), "prompt_tokens": len(sequence.prompt), "max_tokens": max_tokens}))

    def on_plan(self, engine: "Engine", plan: "Plan", now: float) -> None:
        """Note what begins; refusals are told at once."""
        for note in plan.notes:
            self._take(engine, note, now)
        for chunk in plan.park:
            absence = self._away.get(chunk.seq_id)
            if absence is not None and absence.first_copy_s is None:
                absence.first_copy_s = now

    def on_landed(self, engine: "Engine", landed: "Landed", now: float) -> None:
        """Tell of the images that are whole now, and of the sequences that are back."""
        for chunk in (*landed.parked, *landed.restored):
            self._look(engine, chunk.seq_id, now)

    def on_loss(self, engine: "Engine", sequence: "Live", reason: str, now: float) -> None:
        """A warning; the return is told as any other."""
        logger.warning(Event("lost", {**who(engine, sequence.seq_id), "reason": reason, "generated_tokens": sequence.num_generated}))
        num_tokens = len(sequence.prompt) + sequence.num_generated
        self._away[sequence.seq_id] = Absence("lost", num_tokens, 0, 0, 0, now, is_told=True)

    def on_fault(self, engine: "Engine", reason: str, now: float) -> None:
        """An error: somebody should know why."""
        logger.error(Event("fault", {"reason": reason}))
        self._away = {seq_id: absence for seq_id, absence in self._away.items() if str(engine.scheduler.state(seq_id)) == "parked"}

    def on_step(self, engine: "Engine", plan: "Plan", now: float) -> None:
        """Tell of the replays that are complete."""
        for seq_id in [seq_id for seq_id, absence in self._away.items() if absence.back == "replay"]:
            self._look(engine, seq_id, now)

    def on_end(self, engine: "Engine", sequence: "Live", reason: str, error: str | None, now: float) -> None:
        """Failures are errors, other ends debug lines; a park cut short is told here."""
        names = {"seq_id": sequence.seq_id, "name": sequence.name}
        absence = self._away.pop(sequence.seq_id, None)
        if absence is not None and not absence.is_told:
            self._tell_park(names, absence, now, ended=reason)
        if error is not None:
            logger.error(Event("failed", {**names, "reason": without_answer(error), "generated_tokens": sequence.num_generated}))
        elif logger.isEnabledFor(logging.DEBUG):
            e2e_ms = (now - sequence.submitted_s) * 1e3
            facts = {"reason": reason, "generated_tokens": sequence.num_generated, "num_parks": sequence.num_parks, "took_ms": e2e_ms}
            logger.debug(Event("end", {**names, **facts}))

    def _take(self, engine: "Engine", note: "Note", now: float) -> None:
        if note.kind in ("park", "drop"):
            self._away[note.seq_id] = Absence(note.reason, note.num_tokens, note.num_pages, note.num_bytes, note.kept_bytes, now)
            self._look(engine, note.seq_id, now, note.kind)  # one that had computed nothing has nothing to copy
        elif note.kind in ("restore", "replay") and note.seq_id in self._away:
            absence = self._away[note.seq_id]
            absence.returns_s, absence.back = now, note.kind
            self._look(engine, note.seq_id, now)
        elif note.kind == "park_refused":
            facts = {"num_tokens": note.num_tokens, "num_pages": note.num_pages, "image_bytes": note.num_bytes, "reason": note.reason}
            logger.warning(Event("park_refused", {**who(engine, note.seq_id), **facts}))
        elif note.kind == "admit" and logger.isEnabledFor(logging.DEBUG):
            logger.debug(Event("admit", who(engine, note.seq_id)))

    def _look(self, engine: "Engine", seq_id: int, now: float, left: str = "park") -> None:
        absence = self._away.get(seq_id)
        if absence is None or engine.live(seq_id) is None:
            return
        state = str(engine.scheduler.state(seq_id))
        if not absence.is_told and state != "parking":
            absence.is_told = True
            self._tell_park(who(engine, seq_id), absence, now, event=left)
        if absence.returns_s is not None and state in ("prefilling", "decoding"):
            self._tell_restore(who(engine, seq_id), absence, absence.returns_s, now)
            del self._away[seq_id]

    def _tell_park(self, names: dict[str, Any], absence: Absence, now: float, ended: str | None = None, event: str = "park") -> None:
        began = now if absence.first_copy_s is None else absence.first_copy_s
        names = names | {"kept_bytes": absence.kept_bytes or None}
        self._tell(event, names, absence, now - began, began - absence.parked_s, ended)

    def _tell_restore(self, names: dict[str, Any], absence: Absence, returns_s: float, now: float) -> None:
        self._tell(absence.back, names, absence, now - returns_s, returns_s - absence.parked_s)

    def _tell(self, event: str, names: dict[str, Any], absence: Absence, took_s: float, waited_s: float, ended: str | None = None) -> None:
        sizes = {"num_tokens": absence.num_tokens, "num_pages": absence.num_pages, "image_bytes": absence.image_bytes}
        times = {"took_ms": round(took_s * 1e3, 3), "waited_ms": round(waited_s * 1e3, 3)}
        logger.info(Event(event, {**names, "why": absence.why, **sizes, **times, "ended": ended}))


def who(engine: "Engine", seq_id: int) -> dict[str, Any]:
    """A sequence by its number and by what its caller calls it."""
    live = engine.live(seq_id)
    return {"seq_id": seq_id, "name": None if live is None else live.name}


def without_answer(reason: str) -> str:
    """Why a sequence failed. Where a callback or a decoder raised, its own words may quote the answer: its type must do."""
    return reason if not reason.startswith(_CALLBACK) else _CALLBACK + reason.removeprefix(_CALLBACK).partition(":")[0]


def tell_stages(on_stage: Callable[[str, float], None] | None) -> Callable[[str, float], None]:
    """A listener for the parts of a start-up that logs each, and then tells the caller's own."""

    def stage(name: str, seconds: float) -> None:
        logger.info(Event("start", {"stage": name, "took_ms": round(seconds * 1e3, 3)}))
        if on_stage is not None:
            on_stage(name, seconds)

    return stage


@contextmanager
def logging_to(section: "LogSection") -> Iterator[None]:
    """Send the logger's lines where the configuration says, while open; the logger is as it was afterwards."""
    handler = _handler(section.file)
    handler.setFormatter(JsonFormatter() if section.json else TextFormatter())
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(section.level.upper())
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


def _handler(file: str | None) -> logging.Handler:
    if file is None:
        return StderrHandler()
    try:
        return logging.FileHandler(Path(file).expanduser(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"log.file: {file} cannot be written: {error.strerror}") from error


class StderrHandler(logging.StreamHandler):
    """Writes to whatever standard error is at that moment: a progress bar puts itself in its place and lets lines through above it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        """Standard error."""
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        raise AttributeError("this handler has no stream of its own")
