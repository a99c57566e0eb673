"""What happens while a request is on its way: pauses, clients that leave, deadlines, crowds, the end of the server. On real sockets."""

import asyncio
import time
from contextlib import asynccontextmanager

import httpx2
import pytest

from jaxkv.serve import reply
from tests.serving import ServedFake, chat, events, listening, until

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "ab", "max_tokens": 3000, "ignore_eos": True}


def run(work):
    async def limited():
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(limited())


@asynccontextmanager
async def served(engine, **settings):
    async with listening(engine, **settings) as (site, url), httpx2.AsyncClient(base_url=url, timeout=20) as http:
        yield site, http


async def read_until(lines, text):
    async for line in lines:
        if text in line:
            return line
    raise AssertionError(f"{text} never came")


def test_a_parked_stream_is_told_by_comments_and_kept_open(monkeypatch):
    monkeypatch.setattr(reply, "KEEP_ALIVE_S", 0.05)

    async def go():
        engine = ServedFake(answers={"ab": "x" * 40}, step_s=0.005)
        async with (
            served(engine) as (_, http),
            http.stream("POST", COMPLETION, json={"prompt": "ab", "stream": True, "max_tokens": 40}) as r,
        ):
            lines, got = r.aiter_lines(), []
            got.append(await read_until(lines, "data: "))
            engine.parked.add(0)
            assert await read_until(lines, ": ") and await read_until(lines, ": parked") == ": parked"
            assert await read_until(lines, ": ") == ": keep-alive"
            engine.parked.clear()
            assert await read_until(lines, ": restored") == ": restored"
            got += [line async for line in lines]
            return "\n\n".join(line for line in got if line)

    pieces = [piece for piece in events(run(go())) if isinstance(piece, dict)]
    assert sum(len(piece["choices"][0]["text"]) for piece in pieces) >= 30
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"


def test_something_comes_at_least_every_other_second():
    assert reply.KEEP_ALIVE_S <= 1.5


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("state", ["decoding", "parked", "waiting"])
def test_a_client_that_leaves_is_noticed_within_a_second_in_any_state(is_stream, state):
    async def go():
        engine = ServedFake(rows=1, step_s=0.002)
        async with served(engine) as (site, http):
            ahead = asyncio.create_task(http.post(COMPLETION, json=LONG)) if state == "waiting" else None
            if ahead is not None:
                await until(lambda: engine.num_live == 1)
            asking = asyncio.create_task(http.post(COMPLETION, json={**LONG, "stream": is_stream}))
            num = 1 if ahead is None else 2
            await until(lambda: engine.num_live == num)
            mine = engine.handles[num - 1]
            if state == "parked":
                engine.parked.add(mine.seq_id)
            await until(lambda: mine.stats.state == state)
            asking.cancel()
            began = time.monotonic()
            await until(lambda: mine.done)
            assert time.monotonic() - began < 1
            assert mine.completion.finish_reason == "cancelled"
            if ahead is not None:
                ahead.cancel()
            await until(lambda: site.service.num_busy == 0)

    run(go())


def test_a_deadline_counts_while_parked_and_ends_the_request():
    async def go():
        engine = ServedFake(step_s=0.002)
        engine.parked.add(0)
        async with served(engine, request_timeout_s=0.2) as (_, http):
            whole = await http.post(COMPLETION, json=LONG)
            assert whole.status_code == 503 and whole.headers["x-should-retry"] == "false"
            assert whole.json()["error"] == {
                "message": "the request did not end within its 0.2 s",
                "type": "service_unavailable_error",
                "param": None,
                "code": "deadline_exceeded",
            }
            await until(lambda: engine.num_live == 0)
            stream = events((await http.post(COMPLETION, json={**LONG, "stream": True, "timeout_s": 0.1})).text)
            assert stream[-2]["error"]["message"] == "the request did not end within its 0.1 s" and stream[-1] == "data: [DONE]"
            await until(lambda: engine.num_live == 0)

    run(go())


def test_a_full_line_answers_429_with_when_to_come_back():
    async def go():
        engine = ServedFake(rows=1, step_s=0.005)
        async with served(engine, max_waiting=2) as (site, http):
            first = asyncio.create_task(http.post(COMPLETION, json=LONG))
            await until(lambda: engine.num_live == 1 and not site.service.num_waiting)
            others = [asyncio.create_task(http.post(COMPLETION, json=LONG)) for _ in range(2)]
            await until(lambda: engine.num_live == 3)
            refused = await http.post(COMPLETION, json=LONG)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"] == {
                "message": "2 sequences wait for a row, and at most 2 may (server.max_waiting); try again in 1 s",
                "type": "rate_limit_error",
                "param": None,
                "code": "queue_full",
            }
            for task in (first, *others):
                task.cancel()
            await until(lambda: site.service.num_busy == 0)
            assert (await http.post(COMPLETION, json={"prompt": ["ab"] * 2, "max_tokens": 2})).status_code == 200

    run(go())


def test_a_slow_reader_slows_nobody_and_finds_the_whole_answer():
    async def go():
        engine = ServedFake(capacity=10_000)
        async with served(engine) as (_, http):
            body = {**LONG, "max_tokens": 4000, "stream": True, "logprobs": 5}
            async with http.stream("POST", COMPLETION, json=body) as slow:
                await until(lambda: engine.handles[0].done, 20)  # nothing of it was read yet
                began = time.monotonic()
                assert (await http.post(COMPLETION, json={**LONG, "max_tokens": 20})).status_code == 200
                assert time.monotonic() - began < 2
                text = (await slow.aread()).decode()
            pieces = [piece for piece in events(text) if isinstance(piece, dict)]
            assert sum(len(piece["choices"][0]["text"]) for piece in pieces) == 4000

    run(go())


def test_many_streams_at_once_are_what_each_is_alone():
    async def go():
        async with served(ServedFake(rows=8, step_s=0.001)) as (site, http):
            bodies = [{"prompt": f"prompt {index}", "max_tokens": 40, "seed": 1, "stream": True} for index in range(24)]

            async def text(body):
                return "".join(
                    p["choices"][0]["text"] for p in events((await http.post(COMPLETION, json=body)).text) if isinstance(p, dict)
                )

            together = await asyncio.gather(*map(text, bodies))
            assert together == [await text(body) for body in bodies]
            assert site.service.num_busy == 0

    run(go())


def test_draining_finishes_what_runs_and_refuses_what_comes():
    async def go():
        engine = ServedFake(step_s=0.005)
        async with served(engine) as (site, http):
            running = asyncio.create_task(http.post(COMPLETION, json={**LONG, "max_tokens": 60}))
            await until(lambda: engine.num_live == 1)
            draining = asyncio.create_task(site.service.drain(5))
            await asyncio.sleep(0)
            refused = await http.post(CHAT, json=chat())
            assert refused.status_code == 503 and refused.headers["retry-after"] == "10"
            assert refused.json()["error"]["message"] == "the server is shutting down"
            assert (await http.get("/health")).status_code == 503
            assert await draining is True
            assert (await running).json()["usage"]["completion_tokens"] == 60

    run(go())


def test_what_does_not_end_in_time_is_told_that_the_server_stops():
    async def go():
        engine = ServedFake(step_s=0.005)
        async with served(engine) as (site, http):
            running = asyncio.create_task(http.post(COMPLETION, json=LONG))
            await until(lambda: engine.num_live == 1)
            assert await site.service.drain(0.05) is False
            assert await site.service.close(5) is True
            assert (await running).json()["error"] == {
                "message": "the server is shutting down",
                "type": "service_unavailable_error",
                "param": None,
                "code": "shutting_down",
            }
            assert engine.is_closed

    run(go())


def test_an_engine_that_breaks_ends_every_request_with_a_reason():
    async def go():
        engine = ServedFake(step_s=0.005)
        async with served(engine) as (site, http):
            running = asyncio.create_task(http.post(COMPLETION, json=LONG))
            await until(lambda: engine.num_live == 1)
            engine.fault = RuntimeError("a secret")
            assert isinstance(await site.service.wait_broken(), RuntimeError)
            for found in (await running, await http.post(COMPLETION, json=LONG), await http.get("/health")):
                assert found.status_code == 503
                assert found.json()["error"]["message"] == "the engine has stopped after a fault; the server's log has the reason"

    run(go())


def test_one_step_that_breaks_off_is_not_the_end():
    async def go():
        engine = ServedFake(step_s=0.005)
        async with served(engine) as (site, http):
            running = asyncio.create_task(http.post(COMPLETION, json={**LONG, "max_tokens": 60}))
            await until(lambda: engine.num_live == 1)
            engine.fault, engine.num_faults = RuntimeError("once"), 1
            assert (await running).json()["usage"]["completion_tokens"] == 60
            assert engine.num_faults == 0 and site.service.is_ready

    run(go())


def test_the_event_loop_never_waits_for_the_engine():
    async def go():
        async with served(ServedFake(step_s=0.5)) as (_, http):
            running = asyncio.create_task(http.post(COMPLETION, json=LONG))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            assert (await http.get("/v1/models")).status_code == 200
            assert time.monotonic() - began < 0.3
            running.cancel()

    run(go())


def test_a_request_that_the_engine_took_just_before_the_server_drains_is_answered(monkeypatch):
    async def go():
        async with served(ServedFake(step_s=0.002)) as (site, http):
            plain = site.service.submit

            async def submit(*args):
                inboxes = await plain(*args)
                site.service.is_admitting = False
                return inboxes

            monkeypatch.setattr(site.service, "submit", submit)
            return (await http.post(COMPLETION, json={**LONG, "max_tokens": 5})).json()

    assert run(go())["usage"]["completion_tokens"] == 5
