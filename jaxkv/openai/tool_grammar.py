"""Grammars that make an answer call tools: where `tool_choice` demands it, where a tool is `strict`, and beside a form for the content.

In llguidance's dialect of Lark; calls read as `tool_calls.py` finds them. Knows nothing of how a grammar is compiled.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxkv.constraint import BLANKS, Constraint, check_constraint
from jaxkv.errors import RequestError
from jaxkv.openai.tool_calls import CLOSE, OPEN
from jaxkv.openai.tools import ToolUse

_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "not", "patternProperties", "unevaluatedProperties"})


def constrain(use: ToolUse, form: Constraint | None) -> Constraint | None:
    """What the whole answer must be, given the `form` that its content must have; None where it may be anything.

    A forced answer has no content. Else it is content or calls: the form or calls, or, with strict tools, text with calls in it.
    """
    if use.is_forced:
        rules = ["start: calls", *_calls(use, OPEN)]
    elif form is not None:
        rules = ["start: calls | content", f"content: {_content(form)}", *_calls(use, OPEN)]
    elif use.strict:
        start = "start: (marker call)* TEXT" if use.is_parallel else "start: marker call | TEXT"
        rules = [start, f"marker[lazy]: TEXT {json.dumps(OPEN)}", r"TEXT: /(.|\n)*/", *_calls(use, "")]
    else:
        return None
    return Constraint("grammar", "\n".join(rules), "tools")


def _calls(use: ToolUse, marker: str) -> list[str]:
    """Rules for one call or several; without a `marker` something before them has said it."""
    tools = [tool["function"] for tool in use.tools if use.named in (None, tool["function"]["name"])]
    is_one = use.named is not None or not use.is_parallel
    rules = ["calls: call" if is_one else r'calls: call ("\n" call)*'] if marker else []
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        begin = f'{marker}\n{{"name": {json.dumps(tool["name"])}, "arguments": '
        end = f"}}\n{CLOSE}"
        rules.append(f"call_{index}: {json.dumps(begin)} arguments_{index} {json.dumps(end)}")
        rules.append(f"arguments_{index}: %json {json.dumps(_schema(tool, is_strict=tool['name'] in use.strict))}")
    return rules


def _schema(tool: Mapping[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """What arguments are: an object of the properties that are named, on one line; without parameters an empty one.

    What of a schema is not understood is an error only for a strict tool.
    """
    given = tool.get("parameters") or {}
    closed = {} if given.keys() & _COMBINED else {"properties": {}, "additionalProperties": False}
    ours = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": not is_strict}
    return {**closed, **given, "type": "object", "x-guidance": ours}


def _content(form: Constraint) -> str:
    if form.kind not in ("json_object", "json_schema"):
        said = f'{form.param}: stands beside tools, which only JSON may; leave it out, or say tool_choice: "none"'
        raise RequestError(said, form.param)
    check_constraint(form)
    schema = json.loads(form.text) if form.kind == "json_schema" else {"type": "object"}
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': BLANKS}})}"
