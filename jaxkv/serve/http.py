"""HTTP as it comes over a connection: what is none of it is answered as any other fault, and nobody holds a connection by being slow."""

import asyncio
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import h11
import orjson
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxkv.serve import errors
from jaxkv.serve.errors import ApiError

HEADERS_S = 30.0  # for the headers of a request, from its first byte or from the connection's beginning
MAX_HEADER_BYTES = 32 * 1024
MAX_AHEAD_BYTES = 64 * 1024  # of further requests while one is being answered


class Http(H11Protocol):
    """uvicorn's HTTP, with errors of ours and a limit on how long headers take."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Somebody has come."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes have."""
        super().data_received(data)
        self._watch()

    def handle_events(self) -> None:
        """Requests, from what has come. While one is answered the next ones wait, but reading goes on: else nobody hears of an end."""
        super().handle_events()
        if self.conn.their_state is not h11.DONE or not self.flow.read_paused:
            return
        if len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
            self.transport.abort()
        else:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, and close the connection."""
        self._refuse(errors.no_http())

    def _watch(self) -> None:
        """Give the headers so long; between two requests it is uvicorn that waits."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._patience is None:
            self._patience = self.loop.call_later(HEADERS_S, self._give_up)

    def _stop_watching(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _give_up(self) -> None:
        if self.conn.their_state is h11.IDLE:
            self._refuse(errors.too_slow("headers", HEADERS_S))

    def _refuse(self, error: ApiError) -> None:
        body = orjson.dumps(error.body)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with suppress(h11.LocalProtocolError):  # in the middle of an answer
            start = h11.Response(status_code=error.status, headers=headers, reason=HTTPStatus(error.status).phrase.encode())
            for part in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        self.transport.close()
