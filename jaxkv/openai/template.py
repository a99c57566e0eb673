"""What a request may say about its chat template: more variables, whether an answer is begun, whether the last message is gone on with.

Knows no template language, and no more of messages than that they have a content.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.openai.values import boolean, refuse

TEMPLATE_FIELDS = frozenset({"chat_template_kwargs", "add_generation_prompt", "continue_final_message"})
RESERVED = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token", "chat_template"),
    *("raise_exception", "strftime_now", "tokenize", "template", "self"),
)
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the very words of transformers, which some templates look for


@dataclass(frozen=True, slots=True)
class TemplateWish:
    """How a chat is to be written; `variables` are the template's own."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


PLAIN_WISH = TemplateWish()


def read_template_wish(body: Mapping[str, Any]) -> TemplateWish:
    """The three fields; raises RequestError. One who goes on with the last message wants no new one begun."""
    given = {name: body[name] for name in TEMPLATE_FIELDS if body.get(name) is not None}
    goes_on = boolean("continue_final_message", given.get("continue_final_message", False))
    begins = boolean("add_generation_prompt", given.get("add_generation_prompt", not goes_on))
    if goes_on and begins:
        message = "continue_final_message: got true beside add_generation_prompt true; an answer either goes on or begins, give one of them"
        raise RequestError(message, "continue_final_message")
    return TemplateWish(begins, goes_on, _variables(given.get("chat_template_kwargs", {})))


def _variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse("chat_template_kwargs", value, 'an object such as {"enable_thinking": false}')
    if reserved := sorted(value.keys() & set(RESERVED)):
        raise RequestError(
            f"chat_template_kwargs: got {reserved[0]}, which the server itself gives the template; allowed: names other than "
            f"{', '.join(RESERVED)}",
            "chat_template_kwargs",
        )
    return value


def render_wish(render: Callable[..., str], messages: list[dict[str, Any]], tools: Any, wish: TemplateWish) -> str:
    """A chat as `render(messages, add_generation_prompt, tools, **variables)` writes it; without what follows the last message's content
    where that is gone on with.

    As transformers does it: a mark at the end of the content tells where that ends in the text; a template that trims contents takes the
    mark's last blank with it, and then blanks before the mark go too.
    """
    if not wish.continue_final_message:
        return render(messages, wish.add_generation_prompt, tools, **wish.variables)
    if not isinstance(content := messages[-1].get("content"), str):
        raise ValueError("continue_final_message: the last message has no content to go on with")
    rendered = render([*messages[:-1], {**messages[-1], "content": content + _END_MARK}], False, tools, **wish.variables)
    end = rendered.rfind(_END_MARK.strip())
    if end < 0:
        raise ValueError("continue_final_message: the template does not write out the last message's content")
    return rendered[:end] if rendered.startswith(_END_MARK, end) else rendered[:end].rstrip()
