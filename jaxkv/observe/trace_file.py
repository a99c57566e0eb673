"""A file of Chrome trace events (chrome://tracing, Perfetto), written while things happen. Knows the format, nothing of engines.

The array form: an event a line, and readers do without the last bracket, so that a killed run leaves a file that opens. Nothing is kept in
memory but the lines of the last half second.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from jaxkv.errors import ConfigError

_FLUSH_S = 0.5
_FLUSH_BYTES = 2**16


class TraceFile:
    """Writes whole lines only; the file is made with the first event. Times are seconds of `time.perf_counter`."""

    def __init__(self, path: str | Path) -> None:
        """Raises ConfigError where no file can be made."""
        self.path = Path(path).expanduser()
        self.num_events = 0
        self._zero: float | None = None  # the first event's time
        self._lines: list[str] = []
        self._num_bytes = 0
        self._flushed_s = time.perf_counter()
        self._file: int | None = None
        self._is_closed = False
        if self.path.is_dir():
            raise ConfigError(f"trace events cannot go to {self.path}: it is a folder; name a file")
        if not os.access(self.path if self.path.exists() else self.path.parent, os.W_OK):
            raise ConfigError(f"trace events cannot go to {self.path}: it cannot be written; name a file in a folder that is there")

    def add(self, phase: str, name: str, at_s: float, **fields: Any) -> None:
        """One event. `phase` is the format's `ph`: B and E open and close a slice, X is a whole one, b and e are for slices that overlap,
        C is a counter."""
        if self._zero is None:
            self._zero = at_s
        self._write({"ph": phase, "name": name, "ts": round((at_s - self._zero) * 1e6, 1), **fields})
        if self._num_bytes > _FLUSH_BYTES or at_s - self._flushed_s > _FLUSH_S:
            self.flush(at_s)

    def _write(self, event: dict[str, Any]) -> None:
        if self._is_closed:
            return
        line = json.dumps(event, separators=(",", ":"))
        self._lines.append(("[\n" if self.num_events == 0 else ",\n") + line)
        self.num_events += 1
        self._num_bytes += len(line)

    def name_process(self, pid: int, name: str) -> None:
        """What a group of tracks is called, and its place: groups stand in the order of their numbers."""
        self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})

    def name_track(self, pid: int, tid: int, name: str) -> None:
        """The same for one track."""
        self._write({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        self._write({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})

    def flush(self, now_s: float) -> None:
        """Hand the lines so far to the operating system, in one piece. Raises OSError once; after that nothing is written any more."""
        if not self._lines:
            return
        text = "".join(self._lines).encode()
        self._lines, self._num_bytes, self._flushed_s = [], 0, now_s
        try:
            if self._file is None:
                self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            while text:
                text = text[os.write(self._file, text) :]
        except OSError:  # a full disk: more lines after a torn one would make the whole file useless
            self._is_closed = True
            raise

    def close(self) -> None:
        """Write what is left and the last bracket; nothing is written where nothing happened. Closing twice is closing once."""
        file_is_whole, self._is_closed = not self._is_closed, True
        try:
            if self.num_events and file_is_whole:
                self._lines.append("\n]\n")
                self.flush(time.perf_counter())
        finally:
            if self._file is not None:
                os.close(self._file)
            self._file = None
