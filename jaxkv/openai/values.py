"""Readers for single values of a JSON body: each takes (field, value) and returns the value or raises one line with got versus allowed.

Knows nothing of which fields there are.
"""

import json
import math
from collections.abc import Callable
from typing import Any

from jaxkv.errors import RequestError

Reader = Callable[[str, Any], Any]


def refuse(field: str, value: Any, allowed: str) -> RequestError:
    """The error for a wrong value: `temperature: got 3, allowed: a number from 0 to 2`."""
    return RequestError(f"{field}: got {shown(value)}, allowed: {allowed}", field)


def shown(value: Any) -> str:
    """A value as its JSON, cut to one short piece."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        return "something nested very deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."


def number(low: float, high: float | None = None, *, above: bool = False) -> Reader:
    """A finite number from `low` (or above it) to `high`."""
    allowed = f"a number {'above' if above else 'from'} {low:g}" + ("" if high is None else f" to {high:g}")

    def read(field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(field, value, allowed)
        try:
            found = float(value)
        except OverflowError:
            raise refuse(field, value, allowed) from None
        if not math.isfinite(found) or found < low or (above and found == low) or (high is not None and found > high):
            raise refuse(field, value, allowed)
        return found

    return read


def integer(low: int, high: int | None = None, note: str = "") -> Reader:
    """A whole number from `low` to `high`."""
    span = f"from {low}" if high is None else f"from {low} to {high}"
    allowed = f"a whole number {span}{note and f' ({note})'}"

    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise refuse(field, value, allowed)
        return value

    return read


def boolean(field: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise refuse(field, value, "true or false")
    return value


def text(field: str, value: Any) -> str:
    """A string that UTF-8 can spell."""
    if not isinstance(value, str):
        raise refuse(field, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field}: holds half of a surrogate pair, which is no character", field) from None
    return value


def stop_strings(most: int, longest: int) -> Reader:
    """One string or a list of at most `most`, none of them empty or of more characters than `longest`; gives a tuple."""

    def read(field: str, value: Any) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or len(stops) > most or not all(isinstance(stop, str) and stop for stop in stops):
            raise refuse(field, value, f"a string or a list of at most {most} strings, none empty")
        if longer := [len(stop) for stop in stops if len(stop) > longest]:
            raise RequestError(f"{field}: got a string of {longer[0]} characters, allowed: at most {longest} each", field)
        return tuple(text(field, stop) for stop in stops)

    return read


def token_ids(vocab_size: int) -> Reader:
    """A list of token ids of a vocabulary; gives a tuple."""
    read_id = integer(0, vocab_size - 1, "the vocabulary")

    def read(field: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise refuse(field, value, "a list of token ids")
        return tuple(read_id(f"{field}[{index}]", token_id) for index, token_id in enumerate(value))

    return read


def logit_bias(vocab_size: int, most: int) -> Reader:
    """A mapping from token ids, written as strings, to numbers from -100 to 100."""
    read_bias = number(-100, 100)

    def read(field: str, value: Any) -> dict[int, float]:
        if not isinstance(value, dict) or len(value) > most:
            got = f"an object of {len(value)} entries" if isinstance(value, dict) else shown(value)
            raise RequestError(f"{field}: got {got}, allowed: an object of at most {most} token ids with a number each", field)
        biases = {}
        for key, bias in value.items():
            if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab_size):
                raise refuse(f"{field} key", key, f"a token id from 0 to {vocab_size - 1} (the vocabulary) as a string")
            biases[int(key)] = read_bias(f"{field}[{shown(key)}]", bias)
        return biases

    return read
