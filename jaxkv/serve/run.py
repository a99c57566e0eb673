"""A server from start to end: listen, load, serve, drain. Owns the signals and the socket; knows no request."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn

from jaxkv.config import Config
from jaxkv.errors import ConfigError
from jaxkv.interrupt import EXIT_INTERRUPTED
from jaxkv.serve.app import build_app
from jaxkv.serve.batches import Batches
from jaxkv.serve.hosts import LOOPBACK
from jaxkv.serve.http import MAX_HEADER_BYTES, Http
from jaxkv.serve.keys import API_KEYS, OPERATOR_KEYS, read_keys
from jaxkv.serve.metrics import Meter
from jaxkv.serve.service import Service
from jaxkv.serve.site import Site

KEEP_ALIVE_S = 75  # between two requests on one connection
FLUSH_S = 2  # for the last bytes of answers, when everything has ended
CLOSE_S = 10.0  # for the step or the compilation that the engine is in
EXIT_BROKEN = 1
NOISY = ("uvicorn.error", "python_multipart")


class Stop:
    """Counts SIGTERM and SIGINT: the first asks for an orderly end, the second for one at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def note(self, signum: int) -> None:
        """A signal came."""
        (self.second if self.first.is_set() else self.first).set()
        self.signum = self.signum or signum

    @property
    def exit_code(self) -> int:
        """What the process ends with."""
        return EXIT_INTERRUPTED if self.signum == signal.SIGINT else 0


@contextmanager
def noting(stop: Stop) -> Generator[None]:
    """Have the event loop hear the signals, while open."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    before = {signum: signal.getsignal(signum) for signum in signals}
    for signum in signals:
        loop.add_signal_handler(signum, stop.note, signum)
    try:
        yield
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)
            signal.signal(signum, before[signum])


class Web(uvicorn.Server):
    """uvicorn, which leaves the signals to us."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """None of its own."""
        yield


async def serve(config: Config, make_engine: Any) -> tuple[int, bool]:
    """Serve until a signal or a fault; the exit code, and whether the engine's thread has ended.

    `make_engine(check)` makes the engine; `check` is to be called between the stages of its start. Raises what kept it from starting.
    """
    keys = read_keys(config.server.api_key_file, API_KEYS, "server.api_key_file")
    operator_keys = read_keys(config.server.operator_key_file, OPERATOR_KEYS, "server.operator_key_file")
    batches = Batches.open(config)
    sock, stop = listen(config.server.host, config.server.port), Stop()
    meter = Meter()
    service = Service(make_engine, max_waiting=config.server.max_waiting, on_step=meter.take, on_close=meter.keep)
    site = Site(config, service, keys, operator_keys, meter, batches)
    web = Web(web_config(site))
    with noting(stop):
        serving = asyncio.create_task(web.serve([sock]))
        try:
            site.start()
            await first_of(stop.first.wait(), service.wait_ready())
            if service.is_ready:
                say(site, sock)
                await first_of(stop.first.wait(), service.wait_broken())
            await first_of(stop.second.wait(), service.drain(config.server.drain_s))
        finally:
            has_ended = await site.close(CLOSE_S)
            web.should_exit = True
            await serving
    return (stop.exit_code if service.failure is None or not service.was_ready else EXIT_BROKEN), has_ended


def web_config(site: Site) -> uvicorn.Config:
    """uvicorn without its logs, its guesses and its own signal handling. What callers send can make nobody write a line."""
    for logger in map(logging.getLogger, NOISY):
        if not logger.handlers:  # else Python writes its warnings to standard error, where no log is set up
            logger.addHandler(logging.NullHandler())
    return uvicorn.Config(
        build_app(site),
        http=Http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
    )


def listen(host: str, port: int) -> socket.socket:
    """The socket, before anything slow is done.

    Its connections send what they have at once. Otherwise the system keeps a small packet back until the client has confirmed the one
    before, which clients do after 40 ms: headers and body are two packets, so every answer took that much longer, and tokens
    might. (asyncio sees to that only for sockets that name their protocol.)
    """
    try:
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise ConfigError(f"server.port: cannot listen on {host}, port {port}: {_reason(error)}; choose another") from None
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections have it from their listener
    return sock


def _reason(error: OSError) -> str:
    """In the system's words, without the address that Python adds to them; errors of look-ups have numbers of their own."""
    return str(error.strerror) if isinstance(error, socket.gaierror) or error.errno is None else os.strerror(error.errno)


def say(site: Site, sock: socket.socket) -> None:
    """Where it can be reached, for whoever started it."""
    host, port = sock.getsockname()[:2]
    lines = [*site.engine.messages, f"serving {site.model} on http://{f'[{host}]' if ':' in host else host}:{port}/v1"]
    if not host.startswith(LOOPBACK) and not site.keys:
        lines.append(f"server.host: {host} can be reached from other machines, and no API key is asked for; set server.api_key_file")
    for line in lines:
        print(f"jaxkv: {line}", file=sys.stderr, flush=True)


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of them, and end the others; raises what it raises."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
