"""Compares the answers of two batch jobs by custom_id. Knows nothing of how they were made.

Compared is what promises equality: choices (text, token ids, logprobs, finish reason), usage and seed, or the error. Ids and times are not,
nor is what may differ between configurations that give the same bytes (fingerprint, model name, where the pool would end an answer).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from jaxkv.errors import ConfigError

MOST_SHOWN = 20
_CONTEXT = 20  # characters or tokens shown around the first difference


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers to one request: what differs first, in words."""

    key: str
    what: str


@dataclass(slots=True)
class DiffResult:
    """How two outputs compare; keys are custom_ids, or `line 7` for a line without one of its own."""

    num_identical: int = 0
    different: list[Difference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    fingerprints_a: set[str] = field(default_factory=set)
    fingerprints_b: set[str] = field(default_factory=set)

    @property
    def is_identical(self) -> bool:
        """Whether every answer of either side has its equal on the other."""
        return not (self.different or self.only_a or self.only_b)


def diff_files(a: str | Path, b: str | Path) -> DiffResult:
    """Compare two output files; raise ConfigError for one that is none. Memory holds the first file's places, not its answers."""
    result, places = DiffResult(), {key: place for key, place, _ in _entries(Path(a))}
    left = dict(places)
    with Path(a).open("rb") as file:
        for key, _, b_entry in _entries(Path(b)):
            result.fingerprints_b |= _fingerprint(b_entry)
            if key not in left:
                result.only_b.append(key)
                continue
            file.seek(left.pop(key))
            a_entry = json.loads(file.readline())
            result.fingerprints_a |= _fingerprint(a_entry)
            what = first_difference(a_entry, b_entry)
            if what is None:
                result.num_identical += 1
            else:
                result.different.append(Difference(key, what))
    result.only_a = list(left)
    return result


def run_diff(a: str | Path, b: str | Path, out: TextIO | None = None) -> int:
    """Compare, print, and give the exit code: 0 identical, 1 different."""
    result = diff_files(a, b)
    print_diff(result, out if out is not None else sys.stdout)
    return 0 if result.is_identical else 1


def print_diff(result: DiffResult, out: TextIO) -> None:
    """The differences, then the counts."""
    for difference in result.different[:MOST_SHOWN]:
        print(f"{difference.key}: {difference.what}", file=out)
    if len(result.different) > MOST_SHOWN:
        print(f"... and {len(result.different) - MOST_SHOWN} more", file=out)
    for side, keys in (("first", result.only_a), ("second", result.only_b)):
        if keys:
            more = f" and {len(keys) - MOST_SHOWN} more" if len(keys) > MOST_SHOWN else ""
            print(f"only in the {side}: {', '.join(keys[:MOST_SHOWN])}{more}", file=out)
    if not result.is_identical and result.fingerprints_a != result.fingerprints_b:
        print(
            f"the fingerprints differ, so the answers may: {_listed(result.fingerprints_a)} and {_listed(result.fingerprints_b)}", file=out
        )
    num_missing = len(result.only_a) + len(result.only_b)
    print(f"{result.num_identical} identical, {len(result.different)} different, {num_missing} missing on one side", file=out)


def first_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """What differs first between two output lines, None where nothing that counts does."""
    a_error, b_error = a.get("error"), b.get("error")
    if a_error or b_error:
        said = ["an answer" if error is None else f"error {_brief(error.get('message'))}" for error in (a_error, b_error)]
        return None if said[0] == said[1] else f"{said[0]} / {said[1]}"
    a_body, b_body = a["response"]["body"], b["response"]["body"]
    for index, (a_choice, b_choice) in enumerate(zip(a_body["choices"], b_body["choices"], strict=False)):
        what = _choice_difference(a_choice, b_choice)
        if what is not None:
            return what if len(a_body["choices"]) == 1 else f"choice {index}: {what}"
    digests = [line.get("jaxkv", {}).get("token_ids_sha256") for line in (a, b)]
    if None not in digests and digests[0] != digests[1]:
        return "the token ids differ under equal text; with return_token_ids the files would say where"
    counted = ("choices", "usage", "seed")
    return _value_difference("", {name: a_body.get(name) for name in counted}, {name: b_body.get(name) for name in counted})


def _choice_difference(a: dict[str, Any], b: dict[str, Any]) -> str | None:
    a_ids, b_ids = a.get("token_ids"), b.get("token_ids")
    if a_ids is not None and b_ids is not None and a_ids != b_ids:
        at = _first_unequal(a_ids, b_ids)
        return f"token {at} is {_item(a_ids, at)} / {_item(b_ids, at)}, after {a_ids[max(0, at - 5) : at]}"
    a_text, b_text = _text(a), _text(b)
    if a_text != b_text:
        at = _first_unequal(a_text, b_text)
        a_part, b_part = (_brief(text[max(0, at - _CONTEXT) : at + _CONTEXT]) for text in (a_text, b_text))
        return f"character {at} of the text is the first to differ: {a_part} / {b_part}"
    return None


def _value_difference(path: str, a: Any, b: Any) -> str | None:
    """The first unequal leaf of two JSON values; a list of token ids that only one side asked for is no difference."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            if key == "token_ids" and (key not in a or key not in b):
                continue
            what = _value_difference(f"{path}.{key}" if path else key, a.get(key), b.get(key))
            if what is not None:
                return what
        return None
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        found = (_value_difference(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(a, b, strict=True)))
        return next((what for what in found if what is not None), None)
    return None if a == b else f"{path} is {_brief(a)} / {_brief(b)}"


def _entries(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Key, byte offset and content of every line."""
    place = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    entry = _parsed(path, number, line)
                    yield _key(entry, number), place, entry
                place += len(line)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        if entry["error"] is None:
            list(entry["response"]["body"]["choices"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}, line {number}: is no line of a batch job's output ({error})") from error
    return dict(entry)


def _key(entry: dict[str, Any], number: int) -> str:
    error, custom_id = entry["error"] or {}, entry.get("custom_id")
    if custom_id is None or error.get("code") == "duplicate_custom_id":
        return f"line {(entry.get('jaxkv') or {}).get('line', number)}"
    return str(custom_id)


def _fingerprint(entry: dict[str, Any]) -> set[str]:
    body = (entry.get("response") or {}).get("body") or {}
    return {body["system_fingerprint"]} if body.get("system_fingerprint") else set()


def _text(choice: dict[str, Any]) -> str:
    return str(choice["message"].get("content") if "message" in choice else choice.get("text"))


def _first_unequal(a: Any, b: Any) -> int:
    """The first place where two sequences differ: their shorter length where one begins like the other."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _item(ids: list[int], at: int) -> str:
    return str(ids[at]) if at < len(ids) else "the end"


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
