"""The fields of a body that demand something of the answer's text: `response_format` and those that vLLM's clients send.

Knows nothing of how a grammar is compiled.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxkv.constraint import Constraint
from jaxkv.errors import RequestError
from jaxkv.openai.values import refuse, text

MAX_BAD_WORDS = 100
MAX_BAD_WORD_LEN = 100  # characters


def read_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """The one constraint that a body has; RequestError for two."""
    found = [(field, read(field, body[field])) for field, read in _READERS.items() if body.get(field) is not None]
    given = [(field, constraint) for field, constraint in found if constraint is not None]
    if len(given) > 1:
        first, second = given[0][0], given[1][0]
        raise RequestError(f"{first}: stands beside {second}, and an answer has one form; give one of them", first)
    return given[0][1] if given else None


def bad_words(field: str, value: Any) -> tuple[str, ...]:
    """A list of words, none empty."""
    is_list = isinstance(value, list) and all(isinstance(word, str) and 0 < len(word) <= MAX_BAD_WORD_LEN for word in value)
    if not is_list or len(value) > MAX_BAD_WORDS:
        raise refuse(field, value, f"a list of at most {MAX_BAD_WORDS} strings of 1 to {MAX_BAD_WORD_LEN} characters")
    return tuple(text(field, word) for word in value)


def _response_format(field: str, value: Any) -> Constraint | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise refuse(field, value, 'an object with "type": text, json_object or json_schema')
    if more := value.keys() - {"type", *([kind] if kind == "json_schema" else [])}:
        raise RequestError(f"{field}.{min(more)}: is not supported with type {kind}; leave it out", field)
    if kind == "text":
        return None
    return Constraint("json_object", "", field) if kind == "json_object" else _json_schema(field, value.get("json_schema"))


def _json_schema(field: str, value: Any) -> Constraint:
    if not isinstance(value, dict) or value.get("schema") is None:
        raise refuse(f"{field}.json_schema", value, 'an object such as {"name": "answer", "schema": {...}}')
    return _schema(field, value["schema"])


def _schema(field: str, value: Any) -> Constraint:
    """A schema as an object, or as its JSON."""
    if isinstance(value, str):
        return Constraint("json_schema", text(field, value), field)
    if not isinstance(value, dict):
        raise refuse(field, value, "a JSON schema, which is an object")
    try:
        return Constraint("json_schema", json.dumps(value), field)
    except RecursionError:
        raise RequestError(f"{field}: the schema is nested too deeply", field) from None


def _of_kind(kind: str) -> Callable[[str, Any], Constraint]:
    def read(field: str, value: Any) -> Constraint:
        found: str = text(field, value)
        if not found:
            raise refuse(field, value, "a string that is not empty")
        return Constraint(kind, found, field)

    return read


def _choice(field: str, value: Any) -> Constraint:
    if not isinstance(value, list) or not value:
        raise refuse(field, value, "a list of strings, none empty")
    return Constraint("choice", json.dumps([text(field, choice) for choice in value]), field)


def _structured_outputs(field: str, value: Any) -> Constraint | None:
    """vLLM's own: one of json, regex, choice, grammar and json_object."""
    given = {name: wish for name, wish in value.items() if wish is not None} if isinstance(value, dict) else {}
    if len(given) != 1 or not given.keys() <= _STRUCTURED.keys():
        raise refuse(field, value, f"an object with one of {', '.join(_STRUCTURED)}")
    ((name, wish),) = given.items()
    return _STRUCTURED[name](field, wish)


def _any_object(field: str, value: Any) -> Constraint | None:
    if value not in (True, False):
        raise refuse(field, {"json_object": value}, "json_object: true or false")
    return Constraint("json_object", "", field) if value else None


_STRUCTURED: Mapping[str, Callable[[str, Any], Constraint | None]] = {
    "json": _schema,
    "regex": _of_kind("regex"),
    "choice": _choice,
    "grammar": _of_kind("grammar"),
    "json_object": _any_object,
}
_READERS: Mapping[str, Callable[[str, Any], Constraint | None]] = {
    "response_format": _response_format,
    "regex": _of_kind("regex"),
    "grammar": _of_kind("grammar"),
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _of_kind("regex"),
    "guided_grammar": _of_kind("grammar"),
    "guided_choice": _choice,
}
CONSTRAINTS = frozenset(_READERS)
