"""What bodies look like, for /openapi.json. Checks nothing: the readers of `jaxkv.openai` do, and their messages say more."""

from typing import Any

from jaxkv.openai import Endpoint
from jaxkv.openai.fields import MAX_SEED, MAX_STOPS, readers
from jaxkv.request import MAX_CHOICES, MAX_PRIORITY, MAX_TOP_LOGPROBS, MIN_PRIORITY

Schema = dict[str, Any]

_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
}
_MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"type": "string", "enum": ["system", "user", "assistant", "tool"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        },
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
        },
    },
}
_PROMPT: Schema = {
    "anyOf": [{"type": "string"}, _IDS, {"type": "array", "items": {"type": "string"}}, {"type": "array", "items": _IDS}],
    "description": "text, token ids, or a list of either",
}


def whole(low: int, high: int | None = None) -> Schema:
    """A whole number, or null."""
    return {"type": ["integer", "null"], "minimum": low, **({} if high is None else {"maximum": high})}


def real(low: float, high: float | None = None) -> Schema:
    """A number, or null."""
    return {"type": ["number", "null"], "minimum": low, **({} if high is None else {"maximum": high})}


_FLAG: Schema = {"type": ["boolean", "null"]}
_TEXT: Schema = {"type": ["string", "null"]}
_FIELDS: dict[str, Schema] = {
    "max_tokens": whole(1),
    "max_completion_tokens": whole(1),
    "min_tokens": whole(0),
    "temperature": real(0, 2),
    "top_p": real(0, 1),
    "top_k": whole(-1),
    "min_p": real(0, 1),
    "seed": whole(0, MAX_SEED),
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOPS}, {"type": "null"}]},
    "stop_token_ids": {"anyOf": [_IDS, {"type": "null"}]},
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "presence_penalty": real(-2, 2),
    "frequency_penalty": real(-2, 2),
    "repetition_penalty": real(0.01, 100),
    "logit_bias": {"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "return_token_ids": _FLAG,
    "return_cached_tokens": _FLAG,
    "n": whole(1, MAX_CHOICES),
    "cache_prompt": _FLAG,
    "cache_salt": _TEXT,
    "priority": {**whole(MIN_PRIORITY, MAX_PRIORITY), "description": "lower is served first"},
    "service_tier": _TEXT,
    "context_shift": _FLAG,
    "context_len": whole(1),
    "n_keep": whole(0),
    "n_discard": whole(1),
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
    },
    "timeout_s": {"type": ["number", "null"], "exclusiveMinimum": 0, "description": "seconds, pauses included"},
}


_TEMPLATE: dict[str, Schema] = {
    "add_generation_prompt": _FLAG,
    "continue_final_message": _FLAG,
    "chat_template_kwargs": {"type": ["object", "null"], "description": "variables of the chat template"},
}


def body_schema(endpoint: Endpoint, model: str) -> Schema:
    """The body of an endpoint that generates: every field that is honoured, and any other."""
    fields = {name: _FIELDS.get(name, {}) for name in dict.fromkeys([*readers(1), *_FIELDS])}
    fields["model"] = {"enum": [model, None]}
    if endpoint is Endpoint.CHAT:
        own = {
            "messages": _MESSAGES,
            "logprobs": _FLAG,
            "top_logprobs": whole(0, MAX_TOP_LOGPROBS),
            "tools": {"type": ["array", "null"], "items": _TOOL},
            "tool_choice": {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]},
            "parallel_tool_calls": _FLAG,
            **_TEMPLATE,
        }
        return {"type": "object", "required": ["messages"], "properties": {**own, **fields}}
    echo = {"type": ["boolean", "null"], "description": "the prompt stands before the answer; max_tokens may be 0 then"}
    own = {"prompt": _PROMPT, "logprobs": whole(0, MAX_TOP_LOGPROBS), "echo": echo}
    return {"type": "object", "required": ["prompt"], "properties": {**own, **fields}}


TOKENIZE: Schema = {
    "type": "object",
    "properties": {
        "prompt": _TEXT,
        "messages": {"anyOf": [_MESSAGES, {"type": "null"}]},
        "model": _TEXT,
        "add_special_tokens": _FLAG,
        **_TEMPLATE,
        "return_token_strs": _FLAG,
    },
}
DETOKENIZE: Schema = {"type": "object", "required": ["tokens"], "properties": {"tokens": _IDS, "model": _TEXT}}
UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}
BATCH: Schema = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"type": "string", "enum": [endpoint.value for endpoint in Endpoint]},
        "completion_window": {"type": "string", "enum": ["24h"]},
        "metadata": {
            "anyOf": [
                {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}},
                {"type": "null"},
            ]
        },
    },
}


def of_body(schema: Schema, media_type: str = "application/json") -> Schema:
    """What a route adds to its entry."""
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema}}}}


def of_query(**fields: Schema) -> Schema:
    """The same for what stands after the question mark."""
    return {"parameters": [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in fields.items()]}
