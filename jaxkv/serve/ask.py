"""From the bytes of a request's body to what is asked of the engine and how it is to be answered. Knows no socket and no engine."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from jaxkv.errors import RequestError
from jaxkv.openai import BodyReader, Endpoint, ParsedBody
from jaxkv.openai.chunks import StreamOptions
from jaxkv.openai.values import boolean, number, refuse
from jaxkv.serve import errors

_OWN = ("stream", "stream_options", "timeout_s")  # fields that are the server's affair


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that can be served."""

    body: ParsedBody
    is_stream: bool
    options: StreamOptions
    timeout_s: float | None


def read_object(data: bytes) -> dict[str, Any]:
    """A body as an object; raises ApiError."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise errors.bad_json(str(error)) from None
    if not isinstance(body, dict):
        raise errors.bad_json(f"it is a {_NAMES.get(type(body), 'value')}")
    return body


def read_ask(endpoint: Endpoint, data: bytes, reader: BodyReader, served: str, limit_s: float | None) -> Ask:
    """Check everything but whether it fits; raises ApiError or RequestError for what is wrong first."""
    body = read_object(data)
    check_model(body, served)
    is_stream = _get(body, "stream", boolean, False)
    parsed = reader.read(endpoint, {field: value for field, value in body.items() if field not in _OWN}, secrets.randbits(53))
    return Ask(parsed, is_stream, _stream_options(body, is_stream), _timeout(body, limit_s))


def check_model(body: Mapping[str, Any], served: str) -> None:
    """Refuse another model than the one there is."""
    asked = body.get("model")
    if asked is not None and not isinstance(asked, str):
        raise refuse("model", asked, "a string")
    if asked is not None and asked != served:
        raise errors.no_model(asked[:200], served)


def _stream_options(body: Mapping[str, Any], is_stream: bool) -> StreamOptions:
    given = body.get("stream_options")
    if given is None:
        return StreamOptions()
    if not is_stream:
        raise RequestError("stream_options: belongs to streams; set stream: true or leave it out", "stream_options")
    if not isinstance(given, dict):
        raise refuse("stream_options", given, 'an object such as {"include_usage": true}')
    include = _get(given, "include_usage", boolean, False, "stream_options.")
    continuous = _get(given, "continuous_usage_stats", boolean, False, "stream_options.")
    return StreamOptions(include, continuous and include)


def _timeout(body: Mapping[str, Any], limit_s: float | None) -> float | None:
    """The sooner of the request's own deadline and the server's."""
    asked: float | None = _get(body, "timeout_s", number(0, 10**9, above=True), None)
    return min((seconds for seconds in (asked, limit_s) if seconds is not None), default=None)


def _get(body: Mapping[str, Any], field: str, read: Any, default: Any, where: str = "") -> Any:
    return default if body.get(field) is None else read(where + field, body[field])


_NAMES = {list: "list", str: "string", int: "number", float: "number", bool: "truth value", type(None): "null"}
