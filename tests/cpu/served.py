"""A server around an engine, the tiny one mostly, on a socket of its own: what the tests of the server with a real engine share."""

import asyncio
import time

import httpx2

from jaxkv.engine import Engine
from jaxkv.serve.batches import Batches
from jaxkv.serve.keys import Keys
from jaxkv.serve.metrics import Meter
from jaxkv.serve.run import Web, listen, web_config
from jaxkv.serve.service import Service
from jaxkv.serve.site import Site
from tests.cpu.tiny import config
from tests.serving import until


def serve(talk, step_s=0.0, **fields):
    """Run `talk(http, service)` beside a server over the tiny engine, which rests so long after each step; what it returns."""
    return serve_engine(config(**fields), talk, step_s)


def serve_engine(settings, talk, step_s=0.0):
    """The same over an engine of any configuration. The scheduler's books are checked after every step."""
    meter = Meter()

    def on_step(engine):
        meter.take(engine)
        engine.scheduler.check()
        time.sleep(step_s)

    async def both():
        service = Service(lambda check: Engine(settings, on_stage=lambda *_: check()), on_step=on_step, on_close=meter.keep)
        site = Site(settings, service, Keys(()), Keys(("boss",)), meter, Batches.open(settings))
        site.start()
        await service.wait_ready()
        sock = listen("127.0.0.1", 0)
        web = Web(web_config(site))
        serving = asyncio.create_task(web.serve([sock]))
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60) as http:
                found = await talk(http, service)
                await until(lambda: service.num_busy == 0)
                await service.call(lambda engine: check_empty(engine))
            return found
        finally:
            assert await site.close(30)
            web.should_exit = True
            await serving

    return asyncio.run(both())


def check_empty(engine):
    while not engine.is_idle:
        engine.step()
    engine.scheduler.check()
    snapshot = engine.scheduler.snapshot()
    assert snapshot.num_pages_free == snapshot.num_pages
    assert engine.num_compiles_after_warmup == 0
