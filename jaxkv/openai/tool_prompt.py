"""Tools in a prompt: the calls and results among `messages`, and what stands in for a chat template that knows no tools.

Such a template gets plain messages in the form that Hermes introduced and Qwen took up: the definitions after the system message, calls as
`<tool_call>` in the assistant's text, results as `<tool_response>` in the user's. Knows nothing of answers.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.openai.values import refuse, shown, text

MAX_CALLS = 128  # of one message
SYSTEM = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def read_tool_calls(field: str, value: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message; arguments become objects, as templates want them."""
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise refuse(field, value, f"a list of at most {MAX_CALLS} calls")
    return [_call(f"{field}[{index}]", call) for index, call in enumerate(value)]


def check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a result that answers no call before it."""
    asked: set[str] = set()
    for index, message in enumerate(messages):
        asked.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and message["tool_call_id"] not in asked:
            field = f"messages[{index}].tool_call_id"
            said = f"{field}: got {shown(message['tool_call_id'])}, which no message before it called; keep the message with its tool_calls"
            raise RequestError(said, field)


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages for a template that knows only roles and text."""
    plain: list[dict[str, Any]] = []
    if tools:
        preamble = SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        has_system = bool(messages) and messages[0]["role"] in ("system", "developer")
        first = messages[0] if has_system else {"role": "system", "content": ""}
        plain.append({**first, "content": "\n\n".join(part for part in (first["content"], preamble) if part)})
        messages = messages[1:] if has_system else messages
    was_tool = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if is_tool and was_tool:
            plain[-1]["content"] += "\n" + _response(message)
        elif is_tool:
            plain.append({"role": "user", "content": _response(message)})
        else:
            plain.append(_spelled(message))
        was_tool = is_tool
    return plain


def _call(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(field, value, "an object with id, type and function")
    if value.get("type", "function") != "function":
        raise refuse(f"{field}.type", value["type"], '"function"')
    function = value.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{field}.function", function, "an object with name and arguments")
    name, call_id = text(f"{field}.function.name", function.get("name")), text(f"{field}.id", value.get("id"))
    arguments = _arguments(f"{field}.function.arguments", function.get("arguments"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(field: str, value: Any) -> dict[str, Any]:
    """A string of JSON as an object; an empty one is a call without arguments."""
    try:
        found = json.loads(text(field, value) or "{}")
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise refuse(field, value, "a JSON object as a string")
    return found


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without `tool_calls`, which are in its text instead."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parts = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(part for part in (message.get("content"), *parts) if part)}


def _response(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"
