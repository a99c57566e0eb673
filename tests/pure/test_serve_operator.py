"""/slots, parks and cancels by hand, /metrics."""

import asyncio
import re
from pathlib import Path

import pytest

from jaxkv.serve.metrics import HISTOGRAMS, Histogram
from tests.serving import ServedFake, client, until

COMPLETION = "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 3000, "ignore_eos": True}
BOSS = {"authorization": "Bearer boss"}


def run(talk, **settings):
    async def go():
        engine = ServedFake(step_s=0.002)
        async with client(engine, operator_keys=("boss",), **settings) as http, asyncio.timeout(20):
            return await talk(http, engine)

    return asyncio.run(go())


async def started(http, engine):
    asking = asyncio.create_task(http.post(COMPLETION, json=LONG, headers={"x-request-id": "mine"}))
    await until(lambda: engine.num_live == 1 and engine.handles[0].stats.state == "decoding")
    return asking


def test_slots_lists_rows_and_sequences_and_never_a_text():
    async def talk(http, engine):
        asking = await started(http, engine)
        found = await http.get("/slots")
        await http.post("/slots/0?action=cancel", headers=BOSS)
        await asking
        return found, (await http.get("/slots")).json()

    found, after = run(talk)
    assert "secret" not in found.text
    first, *others = found.json()
    assert (first["id"], first["row"], first["state"], first["is_held"]) == (0, 0, "decoding", False)
    assert set(first) == {
        *("id", "request_id", "row", "state", "n_tokens", "n_generated", "n_pages", "n_pages_own", "n_image_pages", "host_bytes"),
        *("priority", "is_preempted", "is_held", "n_preempt", "waiting_s"),
    }
    assert others == [{"id": None, "row": row, "state": "idle"} for row in range(1, 8)]
    assert [entry["state"] for entry in after] == ["idle"] * 8


def test_an_operator_parks_restores_and_cancels():
    async def talk(http, engine):
        asking = await started(http, engine)
        assert (await http.post("/slots/0?action=park", headers=BOSS)).json() == {"id": 0, "action": "park"}
        await until(lambda: engine.handles[0].stats.state == "parked")
        assert (await http.get("/slots")).json()[0]["is_held"]
        await http.post("/slots/0?action=restore", headers=BOSS)
        await until(lambda: engine.handles[0].stats.state == "decoding")
        await http.post("/slots/0?action=cancel", headers=BOSS)
        return await asking

    ended = run(talk)
    assert ended.status_code == 503 and ended.headers["x-should-retry"] == "false"
    assert ended.json()["error"]["message"] == "the request was cancelled by the server's operator"
    assert ended.json()["error"]["code"] == "cancelled"


@pytest.mark.parametrize(
    ("path", "headers", "status", "message"),
    [
        ("/slots/0?action=park", {}, 401, "this needs an operator key as `Authorization: Bearer KEY`; the server takes them from "
         "server.operator_key_file"),
        ("/slots/0?action=park", {"authorization": "Bearer other"}, 401, "this needs an operator key as `Authorization: Bearer KEY`; the "
         "server takes them from server.operator_key_file"),
        ("/slots/0", BOSS, 400, "action: got null, allowed: park, restore, cancel"),
        ("/slots/0?action=stop", BOSS, 400, "action: got \"stop\", allowed: park, restore, cancel"),
        (f"/slots/0?action={'x' * 9000}", BOSS, 400, f"action: got \"{'x' * 56}..., allowed: park, restore, cancel"),
        ("/slots/7?action=park", BOSS, 404, "no sequence has the id 7 now; GET /slots lists them"),
        ("/slots/x?action=park", BOSS, 404, "no sequence has the id x now; GET /slots lists them"),
        ("/slots/0?action=restore", BOSS, 400, "restore: sequence 0 is not held"),
    ],
)  # fmt: skip
def test_what_an_operator_cannot_do_is_refused(path, headers, status, message):
    async def talk(http, engine):
        asking = await started(http, engine)
        found = await http.post(path, headers=headers)
        asking.cancel()
        return found.status_code, found.json()["error"]["message"]

    assert run(talk) == (status, message)


def test_without_an_operator_key_nobody_is_an_operator():
    async def go():
        async with client(keys=("one",)) as http:
            return await http.post("/slots/0?action=park", headers={"authorization": "Bearer one"})

    assert asyncio.run(go()).json()["error"]["code"] == "invalid_operator_key"


def figures(text):
    """Every figure by its name and labels."""
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line and not line.startswith("#")}


def test_figures_count_up_and_are_still_when_nothing_goes_on():
    async def talk(http, engine):
        before = await http.get("/metrics")
        engine.stats.token_gap_s.extend([0.02, 0.3])
        await http.post(COMPLETION, json={"prompt": "ab", "max_tokens": 5, "ignore_eos": True})
        await http.get("/nowhere")
        return before, figures((await http.get("/metrics")).text), engine

    before, after, engine = run(talk)
    assert before.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    earlier = figures(before.text)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", before.text, re.MULTILINE))
    assert all(name.startswith("jaxkv_") for name in kinds)
    for place, value in earlier.items():
        name = place.partition("{")[0]
        assert kinds.get(name) != "gauge" or value == 0 or name == "jaxkv_info", place
        assert kinds.get(name) == "gauge" or after[place] >= value, place
    assert after["jaxkv_requests_received_total"] == 1 and after["jaxkv_prompt_tokens_total"] == 2
    assert after['jaxkv_http_responses_total{status="404"}'] == 1
    assert after["jaxkv_inter_token_seconds_count"] == 2 and not engine.stats.token_gap_s
    assert after['jaxkv_inter_token_seconds_bucket{le="0.025"}'] == 1
    assert 'model="small"' in next(place for place in after if place.startswith("jaxkv_info"))


def test_the_document_names_every_figure_and_no_other():
    async def talk(http, engine):
        return (await http.get("/metrics")).text

    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(jaxkv_\w+)`", text)) == set(re.findall(r"^# TYPE (\w+) ", run(talk), re.MULTILINE))


def test_a_counter_never_falls():
    async def talk(http, engine):
        engine.scheduler.counters.num_parks = 5
        first = figures((await http.get("/metrics")).text)["jaxkv_parks_total"]
        engine.scheduler.counters.num_parks = 3
        return first, figures((await http.get("/metrics")).text)["jaxkv_parks_total"]

    assert run(talk) == (5, 5)


def test_other_names_come_on_request():
    async def talk(http, engine):
        engine.scheduler.counters.num_parks = 2
        return (await http.get("/metrics")).text, (await http.get("/metrics?aliases=vllm")).text

    plain, more = run(talk)
    assert "vllm:" not in plain
    assert figures(more)['vllm:num_preemptions_total{model_name="small"}'] == 2 and "vllm:kv_cache_usage_perc" in more
    assert "vllm:request_queue_time_seconds_count" in more and "vllm:prefix_cache_hits_total" in more
    assert "vllm:time_to_first_token_seconds_bucket" in more


def test_a_histogram_counts_what_is_at_most_each_bound_and_empties_the_list():
    histogram, values = Histogram((1.0, 2.0)), [0.5, 1.0, 1.5, 9.0]
    histogram.drain(values)
    assert histogram.buckets == [("1.0", 2), ("2.0", 3), ("+Inf", 4)] and histogram.total == 12.0 and values == []


def test_every_histogram_has_a_text_and_rising_bounds():
    assert all(text and list(bounds) == sorted(set(bounds)) for text, bounds in HISTOGRAMS.values())
