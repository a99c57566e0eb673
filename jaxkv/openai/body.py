"""From the body of a request to prompt ids and `SamplingParams`, or to one line that says what is wrong with it.

Knows nothing of where the body came from.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from jaxkv.errors import ConfigError, RequestError
from jaxkv.openai.constraints import CONSTRAINTS, read_constraint
from jaxkv.openai.fields import TIERS, UNSUPPORTED, WITHOUT_EFFECT, read_top_logprobs, readers, refuse_unsupported
from jaxkv.openai.prompts import Tokenizer, prompt_texts, read_messages, read_prompts
from jaxkv.openai.template import TEMPLATE_FIELDS, read_template_wish
from jaxkv.openai.tool_grammar import constrain
from jaxkv.openai.tools import TOOL_FIELDS, ToolUse, read_tool_use, refuse_tools
from jaxkv.openai.values import boolean, integer, refuse, shown, token_ids
from jaxkv.request import SamplingParams

COMPLETION_MAX_TOKENS = 16


class Endpoint(Enum):
    """The two kinds of request; the value is the url."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """A body that can be served. `unknown` names fields that were left aside because nobody knows them.

    `texts`: each prompt as it is to be given back before the answer, None where it came as token ids; empty where nothing is given back.
    """

    endpoint: Endpoint
    prompts: list[list[int]]
    params: SamplingParams
    model: str | None = None
    return_token_ids: bool = False
    return_cached_tokens: bool = False
    texts: tuple[str | None, ...] = ()
    unknown: frozenset[str] = frozenset()
    tool_use: ToolUse | None = None  # where the answer may call tools


@dataclass(frozen=True)
class BodyReader:
    """Reads bodies for one model. `defaults` stand in for absent fields; null is absent. A body may hold up to `max_prompts` prompts."""

    tokenizer: Tokenizer | None
    vocab_size: int
    defaults: Mapping[str, Any]
    max_prompts: int = 1

    def read(self, endpoint: Endpoint, body: Mapping[str, Any], default_seed: int) -> ParsedBody:
        """Check every field; raise RequestError for the first one that is wrong."""
        refuse_unsupported(body)
        unknown: set[str] = set()
        tool_use = _tool_use(endpoint, body, unknown)
        prompts = self._prompts(endpoint, body, tool_use, unknown)
        known, is_echo = readers(self.vocab_size), _is_echo(endpoint, body)
        if is_echo:  # then there is an answer without a token of its own
            known |= dict.fromkeys(("max_tokens", "max_completion_tokens"), integer(0))
        given = self._with_defaults(endpoint, {field: value for field, value in body.items() if value is not None})
        values = {field: read(field, given[field]) for field, read in known.items() if field in given}
        if values.get("stop") and self.tokenizer is None:
            raise RequestError("stop: this model has no tokenizer, so there is no text to look in; use stop_token_ids", "stop")
        form = read_constraint(given)
        params = SamplingParams(
            max_tokens=_max_tokens(endpoint, values),
            seed=values.pop("seed", default_seed),
            logprobs=(logprobs := _logprobs(endpoint, given)),
            prompt_logprobs=logprobs if is_echo else None,
            priority=_priority(values),
            constraint=form if tool_use is None else constrain(tool_use, form),
            **{field: values[field] for field in SamplingParams.__dataclass_fields__ if field in values and field not in _COMPOSED},
        )
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise refuse("min_tokens", params.min_tokens, f"at most max_tokens, which is {params.max_tokens}")
        own = _OWN | TEMPLATE_FIELDS if endpoint is Endpoint.CHAT else _OWN
        aside = body.keys() - known.keys() - UNSUPPORTED.keys() - WITHOUT_EFFECT - CONSTRAINTS - own
        return ParsedBody(
            endpoint,
            prompts,
            params,
            values.get("model"),
            values.get("return_token_ids", False),
            values.get("return_cached_tokens", False),
            prompt_texts(body["prompt"]) if is_echo else (),
            frozenset(unknown | {str(name) for name in aside}),
            tool_use,
        )

    def check_defaults(self) -> None:
        """Raise ConfigError where a default could never work for this model."""
        try:
            self.read(Endpoint.COMPLETION, {"prompt": [0]}, 0)
        except RequestError as error:
            raise ConfigError(f"request.{error}") from None

    def _prompts(self, endpoint: Endpoint, body: Mapping[str, Any], tool_use: ToolUse | None, unknown: set[str]) -> list[list[int]]:
        field, other = ("messages", "prompt") if endpoint is Endpoint.CHAT else ("prompt", "messages")
        if body.get(field) is None:
            hint = f"; {other} belongs to the other endpoint" if body.get(other) is not None else ""
            raise RequestError(f"{field}: is missing, {endpoint.value} needs it{hint}", field)
        if body.get(other) is not None:
            raise RequestError(f"{other}: does not belong to {endpoint.value}, which has {field}", other)
        if endpoint is Endpoint.CHAT:
            tools = () if tool_use is None else tool_use.tools
            ids, aside = read_messages(body[field], self.tokenizer, tools, read_template_wish(body))
            unknown.update(aside)
            return [ids]
        return read_prompts(body[field], self.tokenizer, token_ids(self.vocab_size), self.max_prompts)

    def _with_defaults(self, endpoint: Endpoint, given: dict[str, Any]) -> dict[str, Any]:
        """`given` with the defaults that fill a gap: one for max_tokens does not stand beside a given max_completion_tokens."""
        defaults = _for_endpoint(endpoint, self.defaults)
        if "max_completion_tokens" in given:
            defaults.pop("max_tokens", None)
        if "logprobs" in given:  # the pair comes from one place
            defaults.pop("top_logprobs", None)
        return defaults | given


_COMPOSED = frozenset({"max_tokens", "priority"})  # made from two fields
_OWN = TOOL_FIELDS | {"messages", "prompt", "logprobs", "top_logprobs", "echo"}


def derive_seed(run_seed: int, custom_id: str) -> int:
    """The seed of a line that gives none: the first 8 bytes, big-endian, of SHA-256 over the UTF-8 text `<run_seed>:<custom_id>`.

    For example run seed 0 and custom_id "a" hash the three bytes `0:a`.
    """
    return int.from_bytes(hashlib.sha256(f"{run_seed}:{custom_id}".encode()).digest()[:8], "big")


def _tool_use(endpoint: Endpoint, body: Mapping[str, Any], unknown: set[str]) -> ToolUse | None:
    if endpoint is Endpoint.CHAT:
        return read_tool_use(body, unknown)
    refuse_tools(body, endpoint.value)
    return None


def _for_endpoint(endpoint: Endpoint, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults in the endpoint's own spelling: logprobs true with top_logprobs 3 for a chat is logprobs 3 for a completion."""
    found = {field: list(value) if isinstance(value, tuple) else value for field, value in defaults.items() if value is not None}
    logprobs, top = found.pop("logprobs", None), found.pop("top_logprobs", None)
    if logprobs is None or logprobs is False:
        return found
    count = top if top is not None else 0 if logprobs is True else logprobs
    return found | ({"logprobs": True, "top_logprobs": count} if endpoint is Endpoint.CHAT else {"logprobs": count})


def _is_echo(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    """Whether the prompt is to stand before the answer."""
    asked = boolean("echo", False if body.get("echo") is None else body["echo"])
    if asked and endpoint is Endpoint.CHAT:
        raise RequestError("echo: got true, which belongs to completions; leave it out or false", "echo")
    return asked


def _max_tokens(endpoint: Endpoint, values: Mapping[str, Any]) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(f"max_tokens: got {old} beside max_completion_tokens {new}; give one of them", "max_tokens")
    given: int | None = old if old is not None else new
    return COMPLETION_MAX_TOKENS if given is None and endpoint is Endpoint.COMPLETION else given


def _priority(values: Mapping[str, Any]) -> int:
    """The number itself, or what the tier stands for; both must say the same."""
    priority: int | None = values.get("priority")
    tier: int | None = TIERS.get(values.get("service_tier", ""))
    if priority is not None and tier is not None and priority != tier:
        message = f"priority: got {priority} beside service_tier {shown(values['service_tier'])}, which is {tier}; give one of them"
        raise RequestError(message, "priority")
    return next((found for found in (priority, tier) if found is not None), 0)


def _logprobs(endpoint: Endpoint, given: Mapping[str, Any]) -> int | None:
    """None, or how many alternatives to report beside the chosen token's own logprob."""
    if endpoint is Endpoint.COMPLETION:
        if "top_logprobs" in given:
            raise RequestError("top_logprobs: belongs to chats; a completion has logprobs, a number from 0 to 20", "top_logprobs")
        return read_top_logprobs("logprobs", given["logprobs"]) if "logprobs" in given else None
    asked = boolean("logprobs", given.get("logprobs", False))
    top: int = read_top_logprobs("top_logprobs", given.get("top_logprobs", 0))
    if top and not asked:
        raise RequestError("top_logprobs: needs logprobs: true", "top_logprobs")
    return top if asked else None
