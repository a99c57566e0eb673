"""From one line of input to a request with a custom_id, or to the reason why it is none. Knows nothing of models or files."""

import json
from dataclasses import dataclass
from typing import Any

from jaxkv.errors import RequestError
from jaxkv.openai import Endpoint
from jaxkv.openai.values import shown, text

_FIELDS = frozenset({"custom_id", "method", "url", "body"})
_URLS = {endpoint.value: endpoint for endpoint in Endpoint}


@dataclass(frozen=True, slots=True)
class Request:
    """A line in good order; whether its body is, is another matter. `unknown` names fields beside the body that nobody knows."""

    custom_id: str
    endpoint: Endpoint
    body: dict[str, Any]
    unknown: frozenset[str] = frozenset()


class LineError(Exception):
    """Why a line is no request; `custom_id` is None where it has none that can be used."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


def parse_line(data: bytes, seen: set[str]) -> Request:
    """Read one line; `seen` holds the custom_ids so far and takes this one."""
    line = _object(data)
    custom_id = _custom_id(line, seen)
    method, url, body = line.get("method"), line.get("url"), line.get("body")
    if method != "POST":
        raise LineError("invalid_method", f"method: got {shown(method)}, allowed: POST", custom_id)
    if not isinstance(url, str) or url not in _URLS:
        raise LineError("invalid_url", f"url: got {shown(url)}, allowed: {' or '.join(_URLS)}", custom_id)
    if not isinstance(body, dict):
        raise LineError("invalid_body", f"body: got {shown(body)}, allowed: an object", custom_id)
    return Request(custom_id, _URLS[url], body, frozenset(f"{name} (outside body)" for name in line.keys() - _FIELDS))


def _object(data: bytes) -> dict[str, Any]:
    try:
        line = json.loads(data.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise LineError("invalid_json", f"the line is not UTF-8: byte {error.start + 1} is 0x{data[error.start]:02x}") from error
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"the line is not valid JSON: {error.msg}, at character {error.pos + 1}") from error
    except ValueError as error:  # Python's own limit for whole numbers, 4300 digits
        raise LineError("invalid_json", "the line has a number of too many digits") from error
    except RecursionError as error:
        raise LineError("invalid_json", "the line is nested too deeply") from error
    if not isinstance(line, dict):
        raise LineError("invalid_line", f"the line: got {shown(line)}, allowed: an object with custom_id, method, url and body")
    return line


def _no_constant(name: str) -> None:
    raise LineError("invalid_json", f"the line is not valid JSON: {name} is no JSON number")


def _custom_id(line: dict[str, Any], seen: set[str]) -> str:
    custom_id = line.get("custom_id")
    if custom_id is None:
        raise LineError("missing_custom_id", "custom_id: is missing, every line needs one of its own")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError("invalid_custom_id", f"custom_id: got {shown(custom_id)}, allowed: a string that is not empty")
    try:
        text("custom_id", custom_id)
    except RequestError as error:
        raise LineError("invalid_custom_id", str(error)) from error
    if custom_id in seen:
        raise LineError("duplicate_custom_id", f"custom_id: {shown(custom_id)} was used by an earlier line", custom_id)
    seen.add(custom_id)
    return custom_id
