"""Tools that a chat may call: `tools`, `tool_choice` and `parallel_tool_calls` of a body, checked. Knows no prompt and no answer."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.openai.values import boolean, refuse, shown, text

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18  # of their definitions as JSON, all together
MAX_SCHEMA_DEPTH = 64
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
AUTO, REQUIRED = "auto", "required"

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_KNOWN = {"type", "function"}
_KNOWN_OF_FUNCTION = {"name", "description", "parameters", "strict"}
_CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request, as its chat template gets them, and how they may be used.

    `named` is the one tool that must be called, if `tool_choice` named one; else `is_required` says whether there must be a call. The
    arguments of `strict` tools must be what their schemas say, to the last word.
    """

    tools: tuple[Mapping[str, Any], ...]
    is_required: bool = False
    named: str | None = None
    is_parallel: bool = True  # whether there may be more than one call in an answer
    strict: frozenset[str] = frozenset()

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be calls and nothing else."""
        return self.is_required or self.named is not None

    @property
    def is_guided(self) -> bool:
        """Whether a grammar sees to it that what begins like a call is one."""
        return self.is_forced or bool(self.strict)

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


def read_tool_use(body: Mapping[str, Any], unknown: set[str]) -> ToolUse | None:
    """What a body says about tools; None where no call can be made. `unknown` gets the names of keys nobody knows."""
    strict = set[str]()
    tools = _tools(body.get("tools"), strict, unknown)
    choice = _choice(body.get("tool_choice"), [tool["function"]["name"] for tool in tools])
    is_parallel = boolean("parallel_tool_calls", body["parallel_tool_calls"]) if body.get("parallel_tool_calls") is not None else True
    if not tools or choice == "none":
        return None
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    return ToolUse(tuple(tools), choice == REQUIRED, named, is_parallel, frozenset(strict))


def refuse_tools(body: Mapping[str, Any], endpoint: str) -> None:
    """Raise where a body asks for calls that its endpoint does not make."""
    if body.get("tools") not in (None, []) or body.get("tool_choice") not in (None, "none", AUTO):
        field = "tools" if body.get("tools") else "tool_choice"
        raise RequestError(f"{field}: does not belong to {endpoint}; chats can call tools", field)


def _tools(value: Any, strict: set[str], unknown: set[str]) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse("tools", value, f"a list of at most {MAX_TOOLS} functions")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"tools: got {len(value)}, allowed: at most {MAX_TOOLS}; offer fewer at a time", "tools")
    tools = [_tool(f"tools[{index}]", tool, strict, unknown) for index, tool in enumerate(value)]
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(f"tools[{index}].function.name: got {shown(name)} a second time; give each tool a name of its own", "tools")
    num_bytes = sum(len(json.dumps(tool, ensure_ascii=False).encode()) for tool in tools)
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestError(
            f"tools: got {num_bytes} bytes of JSON, allowed: at most {MAX_TOOLS_BYTES}; offer fewer or smaller ones", "tools"
        )
    return tools


def _tool(field: str, value: Any, strict: set[str], unknown: set[str]) -> dict[str, Any]:
    """A definition as it was given, but without `strict`, which is about answers; the name goes into `strict` instead."""
    if not isinstance(value, dict):
        raise refuse(field, value, 'an object such as {"type": "function", "function": {"name": "..."}}')
    if value.get("type") != "function":
        raise refuse(f"{field}.type", value.get("type"), '"function"')
    function = value.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{field}.function", function, 'an object such as {"name": "...", "parameters": {...}}')
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(f"{field}.function.name", name, "1 to 64 of the letters a to z and A to Z, digits, _, - and .")
    if function.get("description") is not None:
        text(f"{field}.function.description", function["description"])
    if function.get("strict") is not None and boolean(f"{field}.function.strict", function["strict"]):
        strict.add(name)
    if function.get("parameters") is not None:
        _check_parameters(f"{field}.function.parameters", function["parameters"])
    unknown.update(f"tools[].{key}" for key in value.keys() - _KNOWN)
    unknown.update(f"tools[].function.{key}" for key in function.keys() - _KNOWN_OF_FUNCTION)
    return {"type": "function", "function": {key: function[key] for key in function if key in _KNOWN_OF_FUNCTION - {"strict"}}}


def _check_parameters(field: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise refuse(field, value, "a JSON schema of type object")
    if _is_deeper(value, MAX_SCHEMA_DEPTH):
        raise RequestError(f"{field}: is nested more than {MAX_SCHEMA_DEPTH} deep; define parts of it under $defs", field)
    if value.get("type", "object") != "object":
        raise refuse(f"{field}.type", value["type"], '"object": arguments have names')
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field}: holds half of a surrogate pair, which is no character", field) from None


def _is_deeper(value: Any, most: int) -> bool:
    """Whether lists and objects stand in each other more than `most` deep."""
    level, depth = [value], 0
    while level and depth <= most:
        parents = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in parents for child in (item.values() if isinstance(item, dict) else item)]
        depth += bool(parents)
    return depth > most


def _choice(value: Any, names: list[str]) -> Any:
    """`tool_choice` as it was given; "none" without tools."""
    if value is None or value in ("none", AUTO):
        return value or AUTO
    if value != REQUIRED and not (isinstance(value, dict) and value.get("type") == "function"):
        raise refuse("tool_choice", value, _CHOICES)
    if not names:
        raise RequestError(f"tool_choice: got {shown(value)} without tools; offer some or leave it out", "tool_choice")
    if value == REQUIRED:
        return value
    function = value.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise refuse("tool_choice.function.name", name, f"one of the tools, which are {shown_names(names)}")
    return value


def shown_names(names: list[str]) -> str:
    """A few names for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
