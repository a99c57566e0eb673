"""What a request may demand of an answer's form: the description and its limits. Knows no tokenizer and no token.

What becomes of it is in `guide.py`.
"""

import json
from dataclasses import dataclass, field

from jaxkv.errors import RequestError

KINDS = ("json_object", "json_schema", "regex", "grammar", "choice")
MAX_TEXT_BYTES = 2**16
MAX_DEPTH = 64  # brackets within brackets: what reads a schema or a grammar goes down with each of them
MAX_CHOICES = 1000
BLANKS = r"(\n[ \t]{0,24}| ?)"  # between the parts of JSON: a space or an indented line, so that blanks cannot fill an answer


@dataclass(frozen=True, slots=True)
class Constraint:
    """The whole answer is a text of this form.

    `kind` says what `text` is: nothing for `json_object` (any JSON object), a JSON schema, a regular expression (Rust's syntax, matched
    against all of the answer), a grammar in llguidance's dialect of Lark, or for `choice` a JSON list of strings. `param` is what errors
    call it.
    """

    kind: str
    text: str = ""
    param: str = field(default="constraint", compare=False)


def check_constraint(constraint: Constraint) -> None:
    """Raise RequestError for a text that is too long or too deep, or not of its kind."""
    kind, text, param = constraint.kind, constraint.text, constraint.param
    if kind not in KINDS:
        raise RequestError(f"{param}: got the kind {kind!r}, allowed: {', '.join(KINDS)}", param)
    if (size := len(text.encode(errors="replace"))) > MAX_TEXT_BYTES:
        raise RequestError(f"{param}: got {size} bytes, allowed: at most {MAX_TEXT_BYTES}", param)
    if (depth := nesting(text)) > MAX_DEPTH:
        raise RequestError(f"{param}: got brackets {depth} deep, allowed: at most {MAX_DEPTH}", param)
    if kind == "json_schema":
        _check_schema(text, param)
    if kind == "choice":
        _check_choices(text, param)


def nesting(text: str) -> int:
    """How many brackets are open at most, whatever they mean: 2 for `a(b[c])`."""
    deepest = depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}" and depth:
            depth -= 1
    return deepest


def _check_schema(text: str, param: str) -> None:
    try:
        schema = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{param}: the schema is no JSON: {error}", param) from None
    except ValueError:  # Python's own limit for whole numbers, 4300 digits
        raise RequestError(f"{param}: the schema has a number of too many digits", param) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{param}: the schema is a {type(schema).__name__}, allowed: an object", param)


def _check_choices(text: str, param: str) -> None:
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise RequestError(f"{param}: allowed: a list of strings, none empty", param)
    if len(choices) > MAX_CHOICES:
        raise RequestError(f"{param}: got {len(choices)} choices, allowed: at most {MAX_CHOICES}", param)
