"""The situation it was all built for, on real weights over HTTP: streaming chats that each fit and together do not.

What a chat says alone in the same pool is what it must say in the crowd, whoever leaves meanwhile.
"""

import asyncio
import random

import pytest

from jaxkv.config import load_config
from tests.cpu.questions import QUESTIONS
from tests.cpu.served import serve_engine
from tests.serving import chat, events

pytestmark = pytest.mark.weights
CHAT = "/v1/chat/completions"


def bodies(num, **fields):
    return [chat(QUESTIONS[i], seed=i, temperature=0.8 * (i % 2), stream=True, **fields) for i in range(num)]


async def stream(http, body):
    """The text, why it ended, and the comments that a client passes over."""
    found = await http.post(CHAT, json=body)
    assert found.status_code == 200, found.text
    pieces = events(found.text)
    assert pieces[-1] == "data: [DONE]" and not any("error" in piece for piece in pieces if isinstance(piece, dict))
    choices = [piece["choices"][0] for piece in pieces if isinstance(piece, dict)]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    return text, choices[-1]["finish_reason"], [piece for piece in pieces if piece in (": parked", ": restored")]


async def leave(http, body, num_lines):
    """A client that reads so many lines and is gone."""
    async with http.stream("POST", CHAT, json=body) as answer:
        async for _ in answer.aiter_lines():
            num_lines -= 1
            if num_lines < 0:
                return


async def crowd(http, service, asked):
    """All at once: what each was told, and how many were parked."""
    counters = await service.call(lambda engine: engine.scheduler.counters)
    before = counters.num_parks
    found = await asyncio.gather(*(stream(http, body) for body in asked))
    return found, counters.num_parks - before


async def crowd_with_leavers(http, asked, chance):
    """Every other client goes away after some lines; what the others were told."""
    leaving = [asyncio.create_task(leave(http, body, chance.randint(0, 60))) for body in asked[1::2]]
    staying = await asyncio.gather(*(stream(http, body) for body in asked[::2]))
    await asyncio.gather(*leaving)
    return staying


def config(path, pool_tokens, rows, max_len=512):
    model = {"path": str(path), "dtype": "float32", "max_len": max_len}
    return load_config({"model": model, "pool": {"tokens": pool_tokens}, "scheduler": {"rows": rows}, "server": {"model_name": "smollm2"}})


def test_four_chats_that_each_fit_and_together_do_not_say_what_each_says_alone_and_so_do_those_whose_neighbours_leave(smollm2):
    asked = bodies(4, max_tokens=48, ignore_eos=True)

    async def talk(http, service):
        crowded, num_parks = await crowd(http, service, asked)
        staying = await crowd_with_leavers(http, asked, random.Random(1))
        return crowded, num_parks, staying, [await stream(http, body) for body in asked]

    crowded, num_parks, staying, alone = serve_engine(config(smollm2, 160, 4), talk)  # they need 4 * (about 36 + 48) = 336
    assert [reason for _, reason, _ in crowded] == ["length"] * 4 and num_parks > 0
    assert [text for text, _, _ in crowded] == [text for text, _, _ in alone] and len({text for text, _, _ in alone}) == 4
    assert any(": parked" in comments for _, _, comments in crowded) and not any(comments for _, _, comments in alone)
    assert [found[:2] for found in staying] == [found[:2] for found in alone[::2]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "max_len"),
    [({"max_tokens": 40, "ignore_eos": True}, 512), ({}, 80)],
    ids=["long", "without max_tokens"],  # which go on until they end by themselves, or are max_len long
)
def test_eight_chats_in_a_pool_for_two_or_three_say_what_each_says_alone(fields, max_len, smollm2):
    asked = bodies(8, **fields)

    async def talk(http, service):
        crowded, num_parks = await crowd(http, service, asked)
        staying = await crowd_with_leavers(http, asked, random.Random(1))
        return crowded, num_parks, staying, [await stream(http, body) for body in asked]

    crowded, num_parks, staying, alone = serve_engine(config(smollm2, 176, 8, max_len), talk)  # one takes about 36 + 40
    assert num_parks > 0 and {reason for _, reason, _ in crowded} <= {"length", "stop"}
    assert [found[:2] for found in crowded] == [found[:2] for found in alone]
    assert [found[:2] for found in staying] == [found[:2] for found in alone[::2]]
