"""Chat templates: Jinja in a sandbox, with the helpers that templates written for transformers expect. Knows no tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Name, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxkv.models.errors import ModelError


class GenerationTag(Extension):
    """`{% generation %}` marks answers for training; here it is only passed through. As in transformers, what is set inside stays there."""

    tags = {"generation"}  # noqa: RUF012 (as its base class declares it)

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt text of a conversation; whatever the template objects to is a ModelError."""
    try:
        return compile_template(template).render({"messages": messages, "documents": None, **variables})
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ModelError(f"the chat template cannot render these messages: {error}") from error


@lru_cache(maxsize=8)
def compile_template(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=8)
def reads(template: str, variable: str) -> bool:
    """Whether a template looks at a variable at all, such as `tools`."""
    try:
        return any(name.name == variable for name in _environment().parse(template).find_all(Name))
    except jinja2.TemplateError as error:
        raise ModelError(f"the chat template cannot be read: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes < > & ', which a model never saw in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
