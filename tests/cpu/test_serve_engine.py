"""The server over a real engine: chats that fit alone and not together, pauses only, and the text of the uncrowded run."""

import asyncio
import json
import logging
import re

import jax
import pytest

from tests.cpu.served import serve
from tests.serving import chat, events, until

pytestmark = pytest.mark.usefixtures("speaks_bytes")
CHAT = "/v1/chat/completions"
NEED = 4 * (22 + 60 - 1)  # cells of four chats with 60 tokens each


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
        pool = (await http.get("/pool")).json()
        assert pool["host_bytes"] == held["host_bytes"]
        assert (pool["parked"], pool["rows"]["busy"], pool["copies"], pool["sequences"][-1]["id"]) == (
            *(1, 0, {"to_host": 0, "to_device": 0}),
            held["id"],
        )
        assert await stream(http, bodies()[1])  # nobody waits behind it
        assert (await http.post(url + "restore", headers=boss)).status_code == 200
        while 'jaxkv_restores_by_kind_total{kind="copied"} 1.0' not in (figures := (await http.get("/metrics")).text):
            await asyncio.sleep(0.005)
        return quiet, await asking, figures

    quiet, parked, figures = serve(talk, step_s=0.02, pool__tokens=NEED // 2)
    assert parked[:2] == quiet[:2] and parked[2] == [": parked", ": restored"]
    assert "jaxkv_parks_total 1.0\n" in figures and 'jaxkv_parks_by_cause_total{cause="forced"} 1.0\n' in figures
    assert 'jaxkv_restores_by_kind_total{kind="copied"} 1.0\n' in figures
    assert "jaxkv_queue_seconds_count 3.0\n" in figures and 'jaxkv_longest_pause_seconds_bucket{le="0.0"} 2.0\n' in figures
    assert "jaxkv_longest_pause_seconds_count 2.0\n" in figures, "the one that was parked still runs, or again"
    assert "jaxkv_compilations_total 0.0\n" in figures and 'image_memory="pinned_host"' in figures


def test_a_server_that_slept_holds_no_array_meanwhile_and_gives_the_same_answers_after():
    boss = {"authorization": "Bearer boss"}

    async def talk(http, service):
        before = [await stream(http, body) for body in bodies()[:2]]
        assert (await http.post("/sleep", headers=boss)).status_code == 200
        left = sum(array.nbytes for array in jax.live_arrays())
        assert (await http.get("/health")).json()["error"]["code"] == "sleeping"
        assert (await http.post("/wake", headers=boss)).status_code == 200
        after = [await stream(http, body) for body in bodies()[:2]]
        return before, after, left

    earlier = sum(array.nbytes for array in jax.live_arrays())
    before, after, left = serve(talk)
    assert before == after
    assert left <= earlier


def test_a_batch_makes_way_for_whoever_asks_in_person_and_answers_as_requests_alone_do(tmp_path):
    asked = [{"prompt": "abcdefgh"[i], "max_tokens": 60, "seed": i, "ignore_eos": True} for i in range(8)]
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(asked)]

    async def talk(http, service):
        quiet = [(await http.post("/v1/completions", json=body)).json() for body in [*asked, {**asked[0], "max_tokens": 9}]]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        stored = (await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})).json()
        begun = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=begun)).json()
        while [slot["state"] for slot in (await http.get("/slots")).json()].count("decoding") < 4:
            await asyncio.sleep(0.005)
        urgent = (await http.post("/v1/completions", json={**asked[0], "max_tokens": 9})).json()
        counts = [(await http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"]]
        while (batch := (await http.get(f"/v1/batches/{batch['id']}")).json())["status"] != "completed":
            await asyncio.sleep(0.01)
        output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
        answers = {answer["custom_id"]: answer["response"]["body"] for answer in map(json.loads, output.splitlines())}
        num_parks = await service.call(lambda engine: engine.scheduler.counters.num_parks_priority)
        return quiet, urgent, counts[0], answers, num_parks

    quiet, urgent, num_before, answers, num_parks = serve(talk, step_s=0.005, server__files_dir=str(tmp_path), pool__tokens=512)
    assert [answers[str(i)]["choices"] for i in range(8)] == [answer["choices"] for answer in quiet[:8]]
    assert urgent["choices"] == quiet[8]["choices"]
    assert num_before == 0 and num_parks == 1, "it did not wait for a row of the batch's to end"


async def begin_batch(http, asked):
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(asked)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    stored = (await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})).json()
    begun = {"input_file_id": stored["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return (await http.post("/v1/batches", json=begun)).json()["id"]


async def answers_of(http, batch_id):
    while (batch := (await http.get(f"/v1/batches/{batch_id}")).json())["status"] != "completed":
        await asyncio.sleep(0.005)
    output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answers = {answer["custom_id"]: answer["response"]["body"]["choices"] for answer in map(json.loads, output.splitlines())}
    return [answers[str(i)] for i in range(len(answers))]


def test_batches_beside_each_other_in_a_pool_that_is_too_small_answer_as_requests_alone_do(tmp_path):
    asked = [
        [{"prompt": "abcdef"[i], "max_tokens": 40, "seed": 10 * k + i, "ignore_eos": True, "n": 1 + i % 2} for i in range(6)]
        for k in (1, 2)
    ]

    async def talk(http, service):
        alone = [[(await http.post("/v1/completions", json=body)).json()["choices"] for body in bodies] for bodies in asked]
        ids = [await begin_batch(http, bodies) for bodies in asked]
        states = set()
        while (state := tuple([(await http.get(f"/v1/batches/{batch_id}")).json()["status"] for batch_id in ids])) != ("completed",) * 2:
            states.add(state)
            await asyncio.sleep(0.005)
        num_parks = await service.call(lambda engine: engine.scheduler.counters.num_parks)
        return alone, [await answers_of(http, batch_id) for batch_id in ids], states, num_parks

    alone, answers, states, num_parks = serve(talk, step_s=0.001, server__files_dir=str(tmp_path), pool__tokens=96)
    assert answers == alone and num_parks > 0
    assert ("in_progress", "in_progress") in states


def test_neither_prompt_nor_answer_is_logged_at_any_level(caplog):
    async def talk(http, service):
        return await asyncio.gather(*(stream(http, {**body, **chat(f"zebra {body['seed']}")}) for body in bodies()))

    with caplog.at_level(logging.DEBUG, "jaxkv"):
        answers = serve(talk, pool__tokens=NEED // 2)
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name == "jaxkv")
    assert "park" in ours and "zebra" not in ours
    assert not [text for text, _, _ in answers if text[:20] in ours]


def test_forms_of_crowded_streams_are_those_of_the_uncrowded_run_and_one_that_cannot_be_had_is_a_400():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^[b-z]{30}$"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    forms = [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}, "logit_bias": {"9": -100, "10": -100, "32": -100}},
        {"regex": "[a-f]{50}"},
        {"guided_choice": ["yes and no " * 5, "no"], "logit_bias": {str(ord("y")): 100}},
        {"bad_words": ["a", "e"]},
    ]

    async def talk(http, service):
        asked = [{**body, **form, "ignore_eos": False} for body, form in zip(bodies(), forms, strict=True)]
        crowded = await asyncio.gather(*(stream(http, body) for body in asked))
        refused = await http.post(CHAT, json=chat("a", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}))
        return crowded, [await stream(http, body) for body in asked], refused

    crowded, quiet, refused = serve(talk, pool__tokens=NEED // 2)
    assert [found[:2] for found in crowded] == [found[:2] for found in quiet]
    assert any(": parked" in comments for _, _, comments in crowded)
    texts = [text for text, _, _ in crowded]
    assert list(json.loads(texts[0])) == ["a"] and re.fullmatch("[a-f]{50}", texts[1]) and texts[2] == "yes and no " * 5
    assert not {"a", "e"} & set(texts[3])
    assert [reason for _, reason, _ in crowded][:3] == ["stop"] * 3
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "response_format"
