"""Forty streams at once for a long time, of any size and priority, with clients that leave and an operator who parks: nothing is lost.

$JAXKV_SOAK_S says for how many seconds; ten minutes without it.
"""

import asyncio
import gc
import os
import random
import statistics
import time
from pathlib import Path

import httpx2
import pytest

from tests.cpu.served import serve
from tests.cpu.tiny import prompt
from tests.serving import events

SOAK_S = float(os.environ.get("JAXKV_SOAK_S", "600"))
NUM_STREAMS, NUM_KINDS = 40, 48
COMPLETION = "/v1/completions"
BOSS = {"authorization": "Bearer boss"}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("speaks_bytes")]
DRIFT_BYTES = 48 * 2**20  # the C library's own ups and downs; a leak of one answer per request is far more in ten minutes


def kinds() -> list[dict[str, object]]:
    """Requests of every size that the pool holds alone, each with its own seed."""
    chance = random.Random(7)
    return [
        {
            "prompt": prompt(chance.randint(1, 60), kind),
            "max_tokens": chance.randint(1, 60),
            "temperature": chance.choice([0, 0.9]),
            "n": chance.choice([1, 1, 1, 2]),
            "logprobs": chance.choice([None, 2]),
            "ignore_eos": chance.choice([True, False]),
            "seed": kind,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        for kind in range(NUM_KINDS)
    ]


def told(text: str) -> tuple[object, ...]:
    """All that a stream says of its answer, whatever pieces it came in."""
    pieces = events(text)
    assert pieces[-1] == "data: [DONE]", "the stream broke off"
    pieces = [piece for piece in pieces if isinstance(piece, dict)]
    assert not [piece for piece in pieces if "error" in piece]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    found = []
    for index in sorted({choice["index"] for choice in choices}):
        mine = [choice for choice in choices if choice["index"] == index]
        logprobs = [value for choice in mine for value in (choice.get("logprobs") or {}).get("token_logprobs", [])]
        ids = [token_id for choice in mine for token_id in choice.get("token_ids", [])]
        reasons = [choice["finish_reason"] for choice in mine if choice["finish_reason"]]
        found.append(("".join(choice["text"] for choice in mine), ids, logprobs, reasons))
    return *found, pieces[-1]["usage"]


async def ask(http: httpx2.AsyncClient, body: dict[str, object]) -> tuple[object, ...]:
    answer = await http.post(COMPLETION, json=body)
    assert answer.status_code == 200, answer.text
    return told(answer.text)


async def leave(http: httpx2.AsyncClient, body: dict[str, object], chance: random.Random) -> None:
    """Go away after some lines, or in the very beginning."""
    async with http.stream("POST", COMPLETION, json=body) as answer:
        left = chance.randint(0, 20)
        async for _ in answer.aiter_lines():
            left -= 1
            if left < 0:
                return


async def client(http, bodies, oracle, ends_at, chance, counts) -> None:
    """One after another until the time is up."""
    while time.monotonic() < ends_at:
        kind = chance.randrange(NUM_KINDS)
        body = {**bodies[kind], "priority": chance.choice([0, 0, 0, -5, 5])}
        if chance.random() < 0.25:
            await leave(http, body, chance)
            counts["left"] += 1
        else:
            assert await ask(http, body) == oracle[kind], f"request {kind} got another answer than alone"
            counts["answered"] += 1


async def operator(http, ends_at, chance, counts) -> None:
    """Parks somebody, and lets it come back."""
    while time.monotonic() < ends_at:
        going = [slot["id"] for slot in (await http.get("/slots")).json() if slot["id"] is not None]
        if going and (chosen := chance.choice(going)) is not None:
            await http.post(f"/slots/{chosen}?action=park", headers=BOSS)
            await asyncio.sleep(chance.uniform(0, 0.3))
            back = await http.post(f"/slots/{chosen}?action=restore", headers=BOSS)
            counts["held"] += back.status_code == 200
        await asyncio.sleep(0.05)


async def watch(ends_at, seen) -> None:
    """Resident memory and living objects, while it goes on."""
    while time.monotonic() < ends_at:
        await asyncio.sleep(SOAK_S / 60)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects())))


def test_forty_streams_for_a_long_time_lose_nothing_and_leave_nothing():
    bodies, counts, seen = kinds(), {"answered": 0, "left": 0, "held": 0}, []

    async def alone(http, service):
        return [await ask(http, body) for body in bodies]

    async def crowd(http, service):
        ends_at = time.monotonic() + SOAK_S
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_STREAMS):
                group.create_task(client(http, bodies, oracle, ends_at, random.Random(number), counts))
            group.create_task(operator(http, ends_at, random.Random(-1), counts))
            group.create_task(watch(ends_at, seen))
        while service.num_busy:
            await asyncio.sleep(0.01)
        return await service.call(lambda engine: (engine.stats, engine.scheduler.counters))

    oracle = serve(alone, pool__tokens=512)
    stats, counters = serve(crowd, pool__tokens=192, debug__park_seed=1, scheduler__rotate="any", scheduler__rotate_after_s=0.2)
    print(f"{counts}, {counters.num_parks} parks, {stats.generated_tokens} tokens; MiB {[rss // 2**20 for rss, _ in seen][::6]}")
    assert counts["answered"] > SOAK_S and counts["left"] > SOAK_S / 5 and counts["held"] > 0 and counters.num_parks > SOAK_S
    assert (stats.num_failed, stats.num_faults, stats.num_losses) == (0, 0, 0)
    assert stats.num_completed + stats.num_cancelled >= stats.num_requests > 0
    early, late = seen[len(seen) // 3 : len(seen) // 2], seen[-len(seen) // 6 :]
    rss = [statistics.median(rss for rss, _ in part) for part in (early, late)]
    assert rss[1] - rss[0] < DRIFT_BYTES, f"memory rose from {rss[0] / 2**20:.0f} to {rss[1] / 2**20:.0f} MiB"
    objects = [statistics.median(count for _, count in part) for part in (early, late)]
    assert objects[1] < objects[0] * 1.05, f"living objects rose from {objects[0]:.0f} to {objects[1]:.0f}"
