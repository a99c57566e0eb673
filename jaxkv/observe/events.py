"""One event as a log line: `park seq_id=3 name=sky why=pressure ...` for people, one JSON object for programs. Knows no engine."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any


class Event:
    """What is given to a logger as the message: a name and its fields, put into words only when some handler writes it."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        self.name = name
        self.fields = {key: value for key, value in fields.items() if value is not None}

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={word(value)}" for key, value in self.fields.items())])


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO park seq_id=3 ...`"""

    def format(self, record: logging.LogRecord) -> str:
        """The whole line; a traceback, where there is one, follows on lines of its own."""
        line = f"{utc(record.created)} {record.levelname} {record.getMessage()}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, and the event's own fields; other messages are event "message"."""

    def format(self, record: logging.LogRecord) -> str:
        """The object, on one line whatever is in it."""
        head: dict[str, Any] = {"time": utc(record.created), "level": record.levelname.lower()}
        if isinstance(record.msg, Event):
            head |= {"event": record.msg.name, **record.msg.fields}
        else:
            head |= {"event": "message", "message": record.getMessage()}
        if record.exc_info is not None:
            head["traceback"] = self.formatException(record.exc_info)
        return json.dumps(head, ensure_ascii=False, default=str)


def utc(seconds: float) -> str:
    """A moment as ISO 8601 in UTC, to the millisecond."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds * 1000) % 1000:03d}Z"


def word(value: Any) -> str:
    """A value without spaces or line ends: what could be misread is written as a JSON string."""
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    is_plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if is_plain else json.dumps(text, ensure_ascii=False)
