"""The server over a real engine: chats that fit alone and not together, pauses only, and the text of the uncrowded run."""

import asyncio
import time

import httpx2
import pytest

import jaxkv.startup
from jaxkv.engine import Engine
from jaxkv.models import ByteTokenizer, load_checkpoint
from jaxkv.serve.keys import Keys
from jaxkv.serve.run import Web, listen, web_config
from jaxkv.serve.service import Service
from jaxkv.serve.site import Site
from tests.cpu.tiny import config
from tests.serving import chat, events, until

CHAT = "/v1/chat/completions"
NEED = 4 * (22 + 60 - 1)  # cells of four chats with 60 tokens each


@pytest.fixture(autouse=True)
def speaks_bytes(monkeypatch):
    def load(*args, **kwargs):
        checkpoint = load_checkpoint(*args, **kwargs)
        object.__setattr__(checkpoint, "tokenizer", ByteTokenizer())  # frozen, and its type is that of real tokenizers
        return checkpoint

    monkeypatch.setattr(jaxkv.startup, "load_checkpoint", load)


def serve(talk, step_s=0.0, **fields):
    """Run `talk(http, service)` beside a server over the tiny engine, which rests so long after each step; what it returns."""
    settings = config(**fields)

    async def both():
        service = Service(lambda check: Engine(settings, on_stage=lambda *_: check()), on_step=lambda _: time.sleep(step_s))
        await service.wait_ready()
        sock = listen("127.0.0.1", 0)
        web = Web(web_config(Site(settings, service, Keys(()), Keys(("boss",)))))
        serving = asyncio.create_task(web.serve([sock]))
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=60) as http:
                found = await talk(http, service)
                await until(lambda: service.num_busy == 0)
                await service.call(lambda engine: check_empty(engine))
            return found
        finally:
            assert await service.close(30)
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


def bodies():
    return [chat("abcd"[i], max_tokens=60, seed=i, ignore_eos=True, stream=True) for i in range(4)]


async def stream(http, body):
    found = await http.post(CHAT, json=body)
    assert found.status_code == 200
    pieces = events(found.text)
    assert pieces[-1] == "data: [DONE]" and not any("error" in piece for piece in pieces if isinstance(piece, dict))
    choices = [piece["choices"][0] for piece in pieces if isinstance(piece, dict)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return text, choices[-1]["finish_reason"], [piece for piece in pieces if piece in (": parked", ": restored")]


def test_four_chats_that_fit_alone_and_not_together_all_complete_with_the_text_of_the_uncrowded_run():
    async def talk(http, service):
        crowded = await asyncio.gather(*(stream(http, body) for body in bodies()))
        counters = await service.call(lambda engine: engine.scheduler.counters)
        num_parks = counters.num_parks
        quiet = [await stream(http, body) for body in bodies()]
        assert counters.num_parks == num_parks, "one at a time nobody is parked"
        return crowded, quiet, num_parks

    crowded, quiet, num_parks = serve(talk, pool__tokens=NEED // 2)
    assert [reason for _, reason, _ in crowded] == ["length"] * 4
    assert [text for text, _, _ in crowded] == [text for text, _, _ in quiet]
    assert num_parks > 0
    assert any(": parked" in comments for _, _, comments in crowded)
    assert not any(comments for _, _, comments in quiet)


def test_clients_that_leave_a_full_pool_give_everything_back():
    async def talk(http, service):
        asking = [asyncio.create_task(stream(http, body)) for body in bodies()]
        await until(lambda: service.num_busy == 4)
        counters = await service.call(lambda engine: engine.scheduler.counters)
        while counters.num_parks == 0:
            await asyncio.sleep(0.01)
        for task in asking[:3]:
            task.cancel()
        return await asking[3], await stream(http, bodies()[3])

    left, quiet = serve(talk, pool__tokens=NEED // 2)
    assert left[:2] == quiet[:2]


def test_an_operators_park_is_a_long_pause_and_changes_no_byte():
    async def talk(http, service):
        body = bodies()[0]
        quiet = await stream(http, body)
        boss = {"authorization": "Bearer boss"}
        asking, slots = asyncio.create_task(stream(http, body)), []
        while not slots:
            slots = [slot for slot in (await http.get("/slots")).json() if slot["id"] is not None and slot["n_generated"] > 3]
        url = f"/slots/{slots[0]['id']}?action="
        assert (await http.post(url + "park", headers=boss)).status_code == 200
        while (held := (await http.get("/slots")).json()[-1])["state"] != "parked":
            await asyncio.sleep(0.005)
        assert held["is_held"] and held["is_preempted"] and held["host_bytes"] > 0 and held["n_pages"] == 0
        assert await stream(http, bodies()[1])  # nobody waits behind it
        assert (await http.post(url + "restore", headers=boss)).status_code == 200
        figures = (await http.get("/metrics")).text
        return quiet, await asking, figures

    quiet, parked, figures = serve(talk, step_s=0.02, pool__tokens=NEED // 2)
    assert parked[:2] == quiet[:2] and parked[2] == [": parked", ": restored"]
    assert "jaxkv_parks_total 1.0\n" in figures and 'jaxkv_parks_by_cause_total{cause="forced"} 1.0\n' in figures
    assert "jaxkv_compilations_total 0.0\n" in figures and 'image_memory="pinned_host"' in figures
