"""A server that is put to sleep and woken: no engine meanwhile, and the same answers after."""

import asyncio
import gc
import re
import time
import weakref
from itertools import pairwise

import pytest

from jaxkv.errors import ConfigError
from tests.serving import ServedFake, client_of, site, until

COMPLETION = "/v1/completions"
ASKED = {"prompt": "ab", "max_tokens": 9, "seed": 3}
LONG = {"prompt": "ab", "max_tokens": 3000, "ignore_eos": True}
BOSS = {"authorization": "Bearer boss"}


class Engines:
    """Makes engines, and remembers them without keeping them."""

    def __init__(self, fault=None, **settings):
        self.made, self.fault, self.settings = [], fault, settings

    def __call__(self, check):
        check()
        if self.made and self.fault is not None:
            raise self.fault
        engine = ServedFake(**self.settings)
        self.made.append(weakref.ref(engine))
        return engine


def run(talk, engines=None, **settings):
    """Run `talk(http, engines, site)` beside a server; what it returns."""
    engines = engines or Engines(step_s=0.002)

    async def go():
        async with site(engines, operator_keys=("boss",), **settings) as made, client_of(made) as http, asyncio.timeout(20):
            await made.service.wait_ready()
            return await talk(http, engines, made)

    return asyncio.run(go())


def error(response):
    return response.status_code, response.json()["error"]["code"], response.json()["error"]["message"]


def test_a_server_that_sleeps_has_no_engine_and_says_so_and_answers_the_same_when_it_wakes():
    async def talk(http, engines, made):
        before = (await http.post(COMPLETION, json=ASKED)).json()["choices"]
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        slept = await http.post("/sleep", headers=BOSS)
        gc.collect()
        assert slept.json() == {"is_sleeping": True} and engines.made[0]() is None
        refused = [error(await http.get(path)) for path in ("/health", "/pool", "/slots", "/v1/models")]
        refused.append(error(await http.post(COMPLETION, json=ASKED)))
        assert set(refused) == {(503, "sleeping", "the server sleeps until its operator wakes it (POST /wake)")}
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await http.post("/sleep", headers=BOSS)).status_code == 200, "once more changes nothing"
        woken = await http.post("/wake", headers=BOSS)
        assert woken.json() == {"is_sleeping": False} and (await http.get("/health")).status_code == 200
        assert (await http.post("/wake_up", headers=BOSS)).status_code == 200 and len(engines.made) == 2
        assert (await http.post(COMPLETION, json=ASKED)).json()["choices"] == before

    run(talk)


@pytest.mark.parametrize(("level", "status"), [("1", 200), ("2", 503)])
def test_what_runs_may_end_or_is_ended(level, status):
    async def talk(http, engines, made):
        asking = asyncio.create_task(http.post(COMPLETION, json={**LONG, "max_tokens": 60}))
        await until(lambda: made.service.num_busy == 1)
        assert (await http.post(f"/sleep?level={level}", headers=BOSS)).status_code == 200
        return await asking

    found = run(talk)
    assert found.status_code == status
    if status == 503:
        assert found.json()["error"]["code"] == "sleeping" and found.headers["x-should-retry"] == "false"


def test_what_does_not_end_within_the_drain_time_is_ended():
    async def talk(http, engines, made):
        asking = asyncio.create_task(http.post(COMPLETION, json=LONG))
        await until(lambda: made.service.num_busy == 1)
        assert (await http.post("/sleep", headers=BOSS)).status_code == 200
        return (await asking).json()["error"]["code"]

    assert run(talk, drain_s=0.05) == "sleeping"


def test_while_it_drains_the_engine_can_be_looked_at_and_nobody_new_is_let_in():
    async def talk(http, engines, made):
        asking = asyncio.create_task(http.post(COMPLETION, json={**LONG, "max_tokens": 200}))
        await until(lambda: made.service.num_busy == 1)
        resting = asyncio.create_task(http.post("/sleep", headers=BOSS))
        await until(lambda: made.service.is_sleeping)
        assert (await http.get("/slots")).json()[0]["id"] == 0
        assert (await http.get("/health")).json()["error"]["code"] == "sleeping"
        assert (await asking).json()["usage"]["completion_tokens"] == 200
        return (await resting).status_code

    assert run(talk) == 200


def test_what_keeps_the_engine_from_starting_again_leaves_the_server_asleep():
    async def talk(http, engines, made):
        await http.post("/sleep", headers=BOSS)
        failed = error(await http.post("/wake", headers=BOSS))
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        engines.fault = None
        assert (await http.post("/wake", headers=BOSS)).status_code == 200
        return failed

    told = (503, "wake_failed", "the server could not wake and sleeps on; its log has the reason")
    assert run(talk, Engines(ConfigError("pool.tokens: no room"))) == told


@pytest.mark.parametrize("path", ["/sleep", "/wake", "/wake_up"])
def test_only_an_operator_may(path):
    async def talk(http, engines, made):
        return error(await http.post(path))[:2]

    assert run(talk) == (401, "invalid_operator_key")


def test_a_level_that_is_none_is_refused():
    async def talk(http, engines, made):
        return error(await http.post("/sleep?level=3", headers=BOSS))[2]

    assert run(talk) == "level: got '3', allowed: 1 (what runs may end in server.drain_s) or 2 (it is ended)"


def test_counters_go_on_where_the_engine_before_stopped():
    async def talk(http, engines, made):
        found = []
        for _ in range(2):
            await http.post(COMPLETION, json=ASKED)
            text = (await http.get("/metrics")).text
            found.append([line for line in text.splitlines() if line.startswith("jaxkv_requests_received_total ")])
            await http.post("/sleep", headers=BOSS)
            await http.post("/wake", headers=BOSS)
        return found

    assert run(talk) == [["jaxkv_requests_received_total 1.0"], ["jaxkv_requests_received_total 2.0"]]


def figures(text):
    """Every figure by its name and labels."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line and not line.startswith("#")}


def test_figures_of_a_server_that_sleeps_are_the_last_ones_and_nothing_goes_on_in_it():
    async def talk(http, engines, made):
        await http.post(COMPLETION, json=ASKED)
        engine = engines.made[0]()
        engine.scheduler.counters.num_parks = 3
        engine.stats.num_cancelled = 4
        engine.stats.token_gap_s.extend([0.02, 0.3])
        awake = await http.get("/metrics")
        del engine
        asking = asyncio.create_task(http.post(COMPLETION, json={**LONG, "max_tokens": 60}))
        await until(lambda: made.service.num_busy == 1)
        await http.post("/sleep?level=2", headers=BOSS)
        await asking
        asleep = [await http.get(f"/metrics{query}") for query in ("", "", "?aliases=vllm")]
        await http.post("/wake", headers=BOSS)
        return awake, asleep, await http.get("/metrics")

    awake, asleep, after = run(talk)
    assert {answer.status_code for answer in (awake, *asleep, after)} == {200}
    before, *resting, aliases, later = (figures(answer.text) for answer in (awake, *asleep, after))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", awake.text, re.MULTILINE))
    for found, ahead in pairwise((before, *resting, later)):
        falling = [place for place in found if kinds.get(place.partition("{")[0]) != "gauge" and ahead.get(place, 0) < found[place]]
        assert not [place for place in falling if not place.endswith("_created")]
    gauges = {place: value for place, value in resting[0].items() if kinds.get(place) == "gauge"}
    assert gauges.pop("jaxkv_sleeping") == 1 and len(gauges) == 7 and set(gauges.values()) == {0}
    assert (before["jaxkv_sleeping"], later["jaxkv_sleeping"]) == (0, 0)
    assert resting[0]["jaxkv_requests_received_total"] == 2 and resting[0]['jaxkv_requests_total{outcome="cancelled"}'] == 4
    assert resting[0]["jaxkv_parks_total"] == 3 and resting[0]["jaxkv_inter_token_seconds_count"] == 2
    assert aliases['vllm:num_preemptions_total{model_name="small"}'] == 3


def test_figures_that_are_asked_for_while_the_engine_is_closed_are_those_of_its_end():
    class Slow(ServedFake):
        def close(self):
            time.sleep(0.2)

    async def talk(http, engines, made):
        await http.post(COMPLETION, json=ASKED)
        resting = asyncio.create_task(http.post("/sleep", headers=BOSS))
        await until(lambda: made.service.is_sleeping and made.service.engine is None)
        found = figures((await http.get("/metrics")).text)
        assert (await resting).status_code == 200
        return found

    found = run(talk, lambda check: Slow(step_s=0.002))
    assert found["jaxkv_requests_received_total"] == 1 and found["jaxkv_sleeping"] == 1


def test_an_engine_that_breaks_while_it_drains_is_told():
    async def talk(http, engines, made):
        asking = asyncio.create_task(http.post(COMPLETION, json=LONG))
        await until(lambda: made.service.num_busy == 1)
        resting = asyncio.create_task(http.post("/sleep", headers=BOSS))
        await until(lambda: made.service.is_sleeping)
        engines.made[0]().fault = RuntimeError("broken")
        return error(await resting)[:2], error(await asking)[:2]

    assert run(talk) == ((503, "engine_stopped"), (503, "engine_stopped"))


def test_a_server_may_be_ended_in_its_sleep():
    async def talk(http, engines, made):
        await http.post("/sleep", headers=BOSS)
        assert await made.service.drain(1) and await made.service.close(5)
        return (await http.get("/health")).json()["error"]["code"]

    assert run(talk) == "shutting_down"
