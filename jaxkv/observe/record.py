"""Records the load of a live run as a trace for the simulator: when requests came and how long they were, never what they said."""

import logging
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from jaxkv.errors import ConfigError
from jaxkv.workload.trace import Request

if TYPE_CHECKING:
    from jaxkv.engine import Engine
    from jaxkv.live import Live

logger = logging.getLogger("jaxkv")


class TraceRecorder:
    """Add it to an engine's observers: `with TraceRecorder("load.jsonl") as recorder: engine.observers.add(recorder)`.

    A line is written when a request ends; one that failed or was cancelled has none, since its length is not its own.
    """

    def __init__(self, path: "str | Path") -> None:
        """Raises ConfigError where no file can be made."""
        self.path = Path(path).expanduser()
        self._first_s: float | None = None
        try:
            self._file = self.path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"cannot write the trace {path}: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Finish the file."""
        try:
            self._file.close()
        except OSError as error:  # a run's answers are worth more than its trace
            logger.warning("the trace %s is not whole: %s", self.path, error)

    def on_submit(self, engine: "Engine", sequence: "Live") -> None:
        """Time begins with the first request."""
        if self._first_s is None:
            self._first_s = sequence.submitted_s

    def on_end(self, engine: "Engine", sequence: "Live", reason: str, error: str | None, now: float) -> None:
        """One line."""
        if error is not None or reason == "cancelled" or self._first_s is None or not sequence.num_generated:
            return
        prompt_len = len(sequence.prompt)
        asked = sequence.params.max_tokens or engine.max_len - prompt_len + 1
        p, arrival_s = sequence.params, sequence.submitted_s - self._first_s
        request = Request(arrival_s, prompt_len, sequence.num_generated, asked, p.priority, patient=p.patient)
        self._file.write(request.to_line())
