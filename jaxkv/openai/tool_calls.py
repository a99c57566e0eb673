"""Finds the calls in an answer's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form of Hermes and Qwen.

A fold over the text: however it is cut into pieces, the parts that come out are the same when joined, so that a stream and a whole answer
agree. Knows nothing of tokens, requests or how parts are sent.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_DEPTH = 128  # of a call's object
_HEADER = re.compile(r'\{"name": "([^"\\]+)", "arguments": ')  # as calls begin that a grammar guides
_KEY = re.compile(r'[{,][ \t\n\r]*("(?:[^"\\]|\\.)*")[ \t\n\r]*:[ \t\n\r]*')
_SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call, whose arguments follow. The first of an answer has index 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str


Part = Content | Begin | Arguments


class CallParser:
    """Takes an answer's text piece by piece and gives its parts, each as soon as it is certain.

    A call is certain when its object is whole, is JSON, and calls one of `names`; whatever else begins like a call is content, as it was
    written. Where a grammar sees to it that what begins like a call is one (`is_guided`), arguments are given as they grow. Space around
    calls is dropped. Unless calls may be `is_parallel`, all that follows the first one is dropped too.
    """

    def __init__(self, names: Collection[str], *, is_parallel: bool = True, is_guided: bool = False) -> None:
        self.num_calls = 0
        self._names, self._is_parallel, self._is_guided = names, is_parallel, is_guided
        self._text = ""  # what has come and is not given: space, part of a marker, a call that is not certain
        self._object: _Object | None = None  # in a call
        self._num_given: int | None = None  # in a call that is guided: up to where in the text its arguments are given
        self._is_after = False  # behind a call's object, where its end marker may stand

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain with this piece."""
        self._text += text
        parts: list[Part] = []
        while self._text and self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The last part, certain because nothing follows."""
        rest, self._text = self._text, ""
        is_marker = self._is_after and CLOSE.startswith(rest.lstrip())
        is_space = self.num_calls > 0 and self._object is None and not rest.strip()
        return [] if not rest or is_marker or is_space or self._num_given is not None else [Content(rest)]

    def _advance(self, parts: list[Part]) -> bool:
        """Go on from one state to the next; whether the text at hand may say more."""
        if self._object is not None:
            return self._read_call(self._object, parts)
        if self.num_calls and not self._is_parallel:
            self._text = ""
            return False
        return self._skip_marker() if self._is_after else self._read_content(parts)

    def _read_content(self, parts: list[Part]) -> bool:
        """Give all up to the next call, but neither the space before it nor what may be the beginning of its marker."""
        at = self._text.find(OPEN)
        end = len(self._text[: at if at >= 0 else len(self._text) - _num_begun(self._text)].rstrip())
        self._give(end, parts)
        if at >= 0:
            self._object = _Object(at - end + len(OPEN))
        return at >= 0

    def _read_call(self, found: "_Object", parts: list[Part]) -> bool:
        """Look for the end of a call's object."""
        is_whole = found.scan(self._text)
        if self._is_guided:
            self._stream(found, parts)
        if is_whole is None:
            return False
        call = _parse(self._text[found.start : found.at], self._names) if is_whole and self._num_given is None else None
        if self._num_given is None and call is None:  # the marker is content, and so is all up to here
            self._object = None
            self._give(found.at, parts)
            return True
        if call is not None:
            parts += [Begin(self.num_calls, call[0]), Arguments(self.num_calls, call[1])]
        self.num_calls += 1
        self._text, self._object, self._num_given, self._is_after = self._text[found.at :], None, None, True
        return True

    def _stream(self, found: "_Object", parts: list[Part]) -> None:
        """Give what has come of a guided call's arguments, after its name."""
        if found.inner is None:
            return
        if self._num_given is None:
            header = _HEADER.fullmatch(self._text, found.start, found.inner)
            if header is None or header[1] not in self._names:
                return
            parts.append(Begin(self.num_calls, header[1]))
            self._num_given = found.inner
        end = found.at if found.inner_end is None else found.inner_end
        if end > self._num_given:
            parts.append(Arguments(self.num_calls, self._text[self._num_given : end]))
            self._num_given = end

    def _skip_marker(self) -> bool:
        """Leave out the end marker of a call, if there is one."""
        rest = self._text.lstrip()
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        self._is_after = False
        self._text = rest[len(CLOSE) :] if rest.startswith(CLOSE) else self._text
        return True

    def _give(self, end: int, parts: list[Part]) -> None:
        if end:
            parts.append(Content(self._text[:end]))
            self._text = self._text[end:]


class _Object:
    """Looks for the end of a JSON object, character by character; whether it is JSON in between is not its affair."""

    def __init__(self, at: int) -> None:
        self.start = self.at = at  # the object's first character; the next one to look at
        self.inner: int | None = None  # where the first object in it begins and ends
        self.inner_end: int | None = None
        self._depth = 0
        self._is_string = self._is_escape = False

    def scan(self, text: str) -> bool | None:
        """Whether the object is whole and ends before `at`; None while more is needed; False where it cannot be one, because of `at`."""
        while self.at < len(text):
            is_whole = self._look(text[self.at])
            if is_whole is False:
                return False
            self.at += 1
            if is_whole:
                return True
        return None

    def _look(self, char: str) -> bool | None:
        if self._is_string:
            return self._look_in_string(char)
        if self._depth == 0 and char in " \t\n\r":
            self.start = self.at + 1
        elif char in "{[":
            return self._enter(char)
        elif self._depth == 0 or char == "<":
            return False
        elif char == '"':
            self._is_string = True
        elif char in "}]":
            return self._leave()
        return None

    def _look_in_string(self, char: str) -> bool | None:
        if char < " ":
            return False
        self._is_string = char != '"' or self._is_escape
        self._is_escape = char == "\\" and not self._is_escape
        return None

    def _enter(self, char: str) -> bool | None:
        if (self._depth == 0 and char != "{") or self._depth == MAX_DEPTH:
            return False
        self._depth += 1
        if self._depth == 2 and self.inner is None:
            self.inner = self.at
        return None

    def _leave(self) -> bool | None:
        self._depth -= 1
        if self._depth == 1 and self.inner_end is None:
            self.inner_end = self.at + 1
        return True if self._depth == 0 else None


def _parse(raw: str, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call's object, the latter as they are written; None if it is no call."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    try:
        found = decoder.decode(raw)
    except ValueError:
        return None
    name, arguments = found.get("name"), found.get("arguments")
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict | None):
        return None
    return name, "{}" if arguments is None else _spans(raw, decoder)["arguments"]


def _spans(raw: str, decoder: json.JSONDecoder) -> dict[str, str]:
    """The fields of an object that is known to be JSON, each as it is written."""
    spans, at = {}, 0
    while (key := _KEY.match(raw, at)) is not None:
        end = decoder.raw_decode(raw, key.end())[1]
        spans[json.loads(key[1])] = raw[key.end() : end]
        at = _end_of_space(raw, end)
    return spans


def _end_of_space(raw: str, at: int) -> int:
    space = _SPACE.match(raw, at)
    return at if space is None else space.end()


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _num_begun(text: str) -> int:
    """Length of the longest end of the text that the marker begins with: 5 for `so <tool`."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
