"""What every request passes first: its id, where it comes from, its key, its size. And the last net for faults of ours. Knows no route.

Plain ASGI around the application, so that no framework's own error body gets out.
"""

import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxkv.observe.events import Event
from jaxkv.serve import errors
from jaxkv.serve.errors import ApiError
from jaxkv.serve.hosts import Hosts
from jaxkv.serve.http import MAX_HEADER_BYTES
from jaxkv.serve.keys import Keys, bearer

logger = logging.getLogger("jaxkv")
FORM_BYTES = 2**20  # what a form takes beside the file
OPEN_PATHS = frozenset({"/health", "/version"})  # for probes, which have no key
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Lets a request through to `app`, or answers it. `larger` has paths with a limit of their own, in MiB, and the field that sets it."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        operator_keys: Keys,
        max_body_mib: int,
        responses: Counter[int],
        hosts: Hosts,
        open_paths: Iterable[str] = (),
        larger: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        self._app, self._keys, self._operator_keys, self._hosts = app, keys, operator_keys, hosts
        self._limit, self._larger, self._responses = (max_body_mib, "server.max_body_mib"), larger or {}, responses
        self._open_paths = OPEN_PATHS | frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as GET, and whoever writes to the connection leaves the body out
            scope = {**scope, "method": "GET"}
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        has_started = has_ended = False

        async def tell(message: Message) -> None:
            nonlocal has_started, has_ended
            if message["type"] == "http.response.start":
                has_started = True
                self._responses[message["status"]] += 1
                sent = MutableHeaders(scope=message)
                sent["x-request-id"], sent["x-content-type-options"] = request_id, "nosniff"
            await send(message)
            has_ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            if _head_bytes(scope) > MAX_HEADER_BYTES:  # which came in one piece, so that nobody had to wait for its end
                raise errors.no_http()
            self._check(scope["path"], headers)
            await self._app(scope, receive, tell)
        except ApiError as error:
            await answer(error, tell)
        except Exception as error:  # its message may quote a prompt: only where it was raised is told
            logger.error(Event("failed", {"request_id": request_id, "path": scope["path"], "reason": _place(error)}))
            if not has_started:
                await answer(errors.internal(), tell)
            elif not has_ended:
                raise ConnectionError("the answer broke off") from None

    def _check(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise ApiError for one that is not let in."""
        origin, host = headers.get("origin"), headers.get("host", "")
        if not self._hosts.accept(host):
            raise errors.foreign_host(host)
        if origin is not None and not _is_at(origin, host):
            raise errors.foreign_origin()
        key = bearer(headers.get("authorization"))
        if self._keys and path not in self._open_paths and not self._keys.accept(key) and not self._operator_keys.accept(key):
            raise errors.no_key()
        length = headers.get("content-length", "")
        most, field = self._larger.get(path, self._limit)
        slack = FORM_BYTES if path in self._larger else 0
        if length.isdigit() and int(length) > most * 2**20 + slack:
            raise errors.too_large(most, field)


async def answer(error: ApiError, send: Send) -> None:
    """Send an error as it is."""
    body = orjson.dumps(error.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items() if value]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def _head_bytes(scope: Scope) -> int:
    """What a request takes before its body, nearly."""
    named = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    return named + len(scope.get("raw_path") or b"") + len(scope["query_string"])


def _is_at(origin: str, host: str) -> bool:
    """Whether a page comes from this host; one whose address cannot be read comes from elsewhere."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _request_id(given: str | None) -> str:
    """The client's own id where it is one, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else secrets.token_hex(12)


def _place(error: BaseException) -> str:
    """Type and last place of an error, without what it says."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" in {trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
    return type(error).__name__ + where
