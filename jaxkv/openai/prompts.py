"""From `messages` or `prompt` to the token ids that the model reads. Knows nothing of sampling."""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxkv.errors import RequestError
from jaxkv.openai.template import PLAIN_WISH, TemplateWish, render_wish
from jaxkv.openai.tool_prompt import check_results, read_tool_calls, spell_out
from jaxkv.openai.values import Reader, refuse, shown, text
from jaxkv.output import Detokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message thought, by the names that clients and templates have for it
_NO_TOKENIZER = "this model has no tokenizer, so only prompts of token ids work"


class Tokenizer(Detokenizer, Protocol):
    """What reading bodies and writing answers needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, tools: Any = None, **variables: Any
    ) -> str: ...

    @property
    def knows_tools(self) -> bool: ...


def read_messages(
    value: Any, tokenizer: Tokenizer | None, tools: Sequence[Any] = (), wish: TemplateWish = PLAIN_WISH
) -> tuple[list[int], set[str]]:
    """The token ids of a chat that may use `tools`, and the names of message keys nobody knows, such as `messages[].mood`."""
    if tokenizer is None:
        raise RequestError(f"messages: {_NO_TOKENIZER}", "messages")
    rendered, unknown = render_messages(value, tokenizer, tools, wish)
    return _not_empty("messages", tokenizer.encode(rendered, add_special_tokens=False)), unknown


def render_messages(value: Any, tokenizer: Tokenizer, tools: Sequence[Any] = (), wish: TemplateWish = PLAIN_WISH) -> tuple[str, set[str]]:
    """A chat as the template writes it, and the names of message keys nobody knows."""
    if not isinstance(value, list) or not value:
        raise refuse("messages", value, "a list of at least one message")
    unknown: set[str] = set()
    messages = [_message(f"messages[{index}]", message, unknown) for index, message in enumerate(value)]
    check_results(messages)
    if wish.continue_final_message and messages[-1].get("tool_calls"):
        said = "continue_final_message: got true, but the last message has tool_calls, which are whole; leave it out"
        raise RequestError(said, "continue_final_message")
    try:
        plain = messages if tokenizer.knows_tools else spell_out(messages, tools)
        rendered = render_wish(tokenizer.render_chat, plain, list(tools) or None, wish)
    except Exception as error:  # a template is a program of the model's, and may refuse in any way it likes
        raise RequestError(f"messages: the chat template refused them: {error}", "messages") from error
    return rendered, unknown


def read_prompts(value: Any, tokenizer: Tokenizer | None, read_ids: Reader, most: int) -> list[list[int]]:
    """The token ids of each of at most `most` prompts: a string, a list of strings, one prompt's token ids, or a list of those."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return [_one_prompt("prompt", value, tokenizer, read_ids)]
    if not isinstance(value, list) or not value:
        raise refuse("prompt", value, "a string, a list of strings, a list of token ids or a list of such lists, not empty")
    if len(value) > most:
        raise RequestError(f"prompt: got a list of {len(value)} prompts, allowed: {most}; give each its own request", "prompt")
    return [_one_prompt(f"prompt[{index}]", prompt, tokenizer, read_ids) for index, prompt in enumerate(value)]


def prompt_texts(value: Any) -> tuple[str | None, ...]:
    """Each prompt of a value that `read_prompts` has read, as the text that it was; None for one of token ids."""
    prompts = value if isinstance(value, list) and not _is_id(value[0]) else [value]
    return tuple(prompt if isinstance(prompt, str) else None for prompt in prompts)


def _one_prompt(field: str, value: Any, tokenizer: Tokenizer | None, read_ids: Reader) -> list[int]:
    if isinstance(value, list):
        return _not_empty(field, read_ids(field, value))
    if not isinstance(value, str):
        raise refuse(field, value, "a string or a list of token ids")
    if tokenizer is None:
        raise RequestError(f"{field}: got a string, but {_NO_TOKENIZER}", "prompt")
    return _not_empty(field, tokenizer.encode(text(field, value), add_special_tokens=True))


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float)


def _not_empty(field: str, ids: Sequence[int]) -> list[int]:
    if not ids:
        raise RequestError(f"{field}: is empty; a prompt needs at least one token", field)
    return list(ids)


def _message(field: str, value: Any, unknown: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(field, value, "an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise refuse(f"{field}.role", role, ", ".join(ROLES))
    for key in ("function_call", "audio"):
        if value.get(key):
            raise RequestError(f"{field}.{key}: is not supported{'; use tool_calls' if key == 'function_call' else ''}", field)
    known = {"role", "content", "name", "tool_calls", "function_call", "tool_call_id", "audio", "refusal", *REASONING}
    unknown.update(f"messages[].{key}" for key in value.keys() - known)
    name = {} if value.get("name") is None else {"name": text(f"{field}.name", value["name"])}
    of_tools = _of_tools(field, value)
    has_only_calls = "tool_calls" in of_tools and value.get("content") is None  # a key that is not there is nothing, null is "None" to some
    content = {} if has_only_calls else {"content": _content(f"{field}.content", value.get("content"))}
    return {"role": role, **content, **name, **of_tools, **_reasoning(field, value)}


def _reasoning(field: str, value: dict[str, Any]) -> dict[str, str]:
    """What the message thought, as transformers gives it to templates: by the names that these read, whatever the client calls it."""
    found = {name: text(f"{field}.{name}", value[name]) for name in REASONING if value.get(name) is not None}
    if not found:
        return {}
    first = next(iter(found.values()))
    return {"thinking": first, **found, "reasoning_content": first}


def _of_tools(field: str, value: dict[str, Any]) -> dict[str, Any]:
    """The calls of an assistant's message, or which call a tool's message answers."""
    role, calls, call_id = value["role"], value.get("tool_calls"), value.get("tool_call_id")
    if calls and role != "assistant":
        raise RequestError(f"{field}.tool_calls: belong to messages of the assistant, this is one of the {role}", field)
    if call_id is not None and role != "tool":
        raise RequestError(f"{field}.tool_call_id: belongs to messages of a tool, this is one of the {role}", field)
    if role == "tool":
        return {"tool_call_id": text(f"{field}.tool_call_id", call_id)}
    return {"tool_calls": read_tool_calls(f"{field}.tool_calls", calls)} if calls else {}


def _content(field: str, value: Any) -> str:
    """A string, or parts of type text, one line each."""
    if isinstance(value, str):
        return text(field, value)
    if not isinstance(value, list) or not value:
        raise refuse(field, value, "a string or a list of parts of type text")
    return "\n".join(_part(f"{field}[{index}]", part) for index, part in enumerate(value))


def _part(field: str, value: Any) -> str:
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "text":
        raise RequestError(f"{field}.type: got {shown(value['type'])}, which is not supported; allowed: text", field)
    if not isinstance(value, dict) or value.get("type") != "text":
        raise refuse(field, value, 'an object such as {"type": "text", "text": "..."}')
    return text(f"{field}.text", value.get("text"))
