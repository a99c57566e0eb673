"""A server around an engine that needs no model, on a socket of its own: what the tests of the server share."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2

from jaxkv.config import Config, load_config
from jaxkv.observe.observers import Observers
from jaxkv.scheduler.books import Counters
from jaxkv.serve.app import build_app
from jaxkv.serve.batches import Batches
from jaxkv.serve.keys import Keys
from jaxkv.serve.metrics import Meter
from jaxkv.serve.run import Web, listen, web_config
from jaxkv.serve.service import Service
from jaxkv.serve.site import Site
from jaxkv.stats import EngineStats
from jaxkv.status import EngineStatus, SequenceStatus
from jaxkv.testing import FakeEngine, FakeHandle


class ServedFake(FakeEngine):
    """A fake engine with the numbers, states and pauses that a server looks at. Those in `parked` make no tokens."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.handles: dict[int, Any] = {}
        self.parked: set[int] = set()
        self.fault: BaseException | None = None
        self.num_faults = 1000  # steps that raise it
        self.stats, self.num_compiles_after_warmup = EngineStats(), 0
        self.observers = Observers()
        self.scheduler = SimpleNamespace(counters=Counters())
        self.parts = SimpleNamespace(
            transfer=SimpleNamespace(
                stats=SimpleNamespace(park_s=[], restore_s=[], bytes_to_host=0, bytes_to_device=0, memory_kinds={"pinned_host"})
            )
        )

    def submit_group(self, *args: Any, name: str | None = None, **kwargs: Any) -> Any:
        group: Any = super().submit_group(*args, name=name, **kwargs)
        for handle in group.choices:
            handle.name = name
        return group

    def _take(self, *args: Any) -> Any:
        handle: Any = super()._take(*args)
        self.stats.count_submit(len(handle._prompt), 0.0)
        handle.handle = handle
        handle.seq_id, handle.name, handle.output, handle.stats = len(self.handles), None, handle._output, SimpleNamespace(state="waiting")
        self.handles[handle.seq_id] = handle
        return handle

    def live(self, seq_id: int) -> Any:
        handle = self.handles.get(seq_id)
        return None if handle is None or handle.done else handle

    def hold(self, seq_id: int) -> str:
        self.parked.add(seq_id)
        return ""

    def release(self, seq_id: int) -> str:
        if seq_id not in self.parked:
            return f"sequence {seq_id} is not held"
        self.parked.remove(seq_id)
        return ""

    def status(self) -> Any:
        going = [handle for handle in self.handles.values() if not handle.done]
        states = [handle.stats.state for handle in going]
        sequences = tuple(
            SequenceStatus(
                h.seq_id,
                h.stats.state,
                row,
                2,
                len(h.token_ids),
                1,
                0,
                "a secret",
                name=h.name,
                is_held=h.seq_id in self.parked,
                num_pages_own=1,
                host_bytes=1000 * (h.stats.state == "parked"),
                since_s=0.0,
            )
            for row, h in enumerate(going)
        )
        parked, waiting = states.count("parked"), states.count("waiting")
        return EngineStatus(
            rows=states.count("decoding"),
            parked=parked,
            waiting=waiting,
            finished=0,
            pool_pages=10,
            pool_pages_free=10 - len(going),
            host_bytes=1000 * parked,
            tokens_per_s=0.0,
            num_parks=0,
            num_restores=0,
            sequences=sequences,
            pool_bytes=10_000,
            generated_tokens=self.num_tokens,
        )

    def step(self) -> None:
        if self.fault is not None and self.num_faults:
            self.num_faults -= 1
            raise self.fault
        going, away = self._live, [h for h in self._live if h.seq_id in self.parked]
        self._live = [handle for handle in going if handle.seq_id not in self.parked]
        for handle in self._live[: self._rows]:
            handle.stats.state = "decoding"
        super().step()
        for handle in away:
            handle.stats.state = "parked"
        self._live = [handle for handle in going if not handle.done]

    @property
    def num_live(self) -> int:
        return len([handle for handle in self.handles.values() if not handle.done])


def config(**server: Any) -> Config:
    """A configuration of a model that is never loaded, called `small`."""
    return load_config({"model": {"path": "models/small.gguf"}, "pool": {"tokens": 4096}, "server": server})


@asynccontextmanager
async def site(
    engine: Any = None, *, keys: tuple[str, ...] = (), operator_keys: tuple[str, ...] = (), **server: Any
) -> AsyncIterator[Site]:
    """What all routes share, with the engine ready (a factory may be given, for one that is not)."""
    settings = config(**server)
    make = engine if callable(engine) else lambda check: engine or ServedFake()
    meter = Meter()
    service = Service(make, max_waiting=settings.server.max_waiting, on_step=meter.take, on_close=meter.keep)
    made = Site(settings, service, Keys(keys), Keys(operator_keys), meter, Batches.open(settings))
    try:
        made.start()
        if not callable(engine):
            await service.wait_ready()
        yield made
    finally:
        assert await made.close(5), "the engine's thread did not end"


@asynccontextmanager
async def client(engine: Any = None, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client that calls the application directly."""
    async with site(engine, **settings) as made, client_of(made) as found:
        yield found


def client_of(made: Site) -> httpx2.AsyncClient:
    """A client of a site without a socket."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(build_app(made)), base_url="http://localhost")


@asynccontextmanager
async def listening(engine: Any = None, **settings: Any) -> AsyncIterator[tuple[Site, str]]:
    """A server on a real socket; the address to reach it."""
    async with site(engine, **settings) as made:
        sock = listen("127.0.0.1", 0)
        web = Web(web_config(made))
        serving = asyncio.create_task(web.serve([sock]))
        while not web.started:
            await asyncio.sleep(0.005)
        try:
            yield made, f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            web.should_exit = True
            await made.close(5)
            await serving


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Wait for a condition; fails after so long."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    """The body of a chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def events(text: str) -> list[Any]:
    """The events of a stream: bodies, "[DONE]", and comments as `: words`."""
    parts = [part for part in text.split("\n\n") if part]
    return [part if part.startswith(":") or part == "data: [DONE]" else json.loads(part.removeprefix("data: ")) for part in parts]


__all__ = ["FakeHandle", "ServedFake", "chat", "client", "client_of", "config", "events", "listening", "site", "until"]
