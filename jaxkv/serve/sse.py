"""Server-sent events: how they are written, and a response that sends them until they end or the client leaves. Knows no event."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxkv.serve.leave import ClientLeft, unless_left

DONE = b"data: [DONE]\n\n"
SEND_TIMEOUT_S = 60.0  # a client that takes nothing for so long has left


def event(body: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients pass over, and that keeps the way open."""
    return f": {text}\n\n".encode()


class JsonResponse(Response):
    """A body as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return orjson.dumps(content)


class EventStream(Response):
    """Sends what `events` yields; however it ends, `on_close` is called."""

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        self._events, self._on_close = events, on_close
        self.status_code, self.background = 200, None
        self.media_type = "text/event-stream"
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            await unless_left(receive, self._send(send))
        except (ClientLeft, TimeoutError, OSError):
            return
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await _in_time(send({"type": "http.response.body", "body": part, "more_body": True}))
        await _in_time(send({"type": "http.response.body", "body": b"", "more_body": False}))


async def _in_time(sending: Awaitable[None]) -> None:
    """Raises TimeoutError for a client that takes nothing. Not with `asyncio.wait_for`: before Python 3.12 that passes over being
    cancelled when the sending ends in the same moment, and the stream of a client that has left would go on."""
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await sending
