"""Calls that a grammar forces on a real engine: whole ones, parked every third token or not, streamed or not, the same to the byte."""

import asyncio
import json

import pytest

from jaxkv.models import ByteTokenizer
from tests.cpu.served import serve
from tests.serving import chat, events

CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Bonn", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]


TEMPLATE = "{% if tools %}{{ tools | length }} {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def short_template(monkeypatch, speaks_bytes):
    monkeypatch.setattr(ByteTokenizer, "chat_templates", {"default": TEMPLATE})


def bodies():
    named = {"type": "function", "function": {"name": "weather"}}
    wishes = [
        {"tool_choice": "required", "parallel_tool_calls": False, "n": 2},
        {"tool_choice": named},
        {"tool_choice": "required", "max_tokens": 110},
        {"max_tokens": 40},
    ]
    return [chat("abcd"[i], tools=TOOLS, seed=i, **wish) for i, wish in enumerate(wishes)]


async def whole(http, body):
    found = await http.post(CHAT, json=body)
    assert found.status_code == 200, found.text
    return [(choice["message"], choice["finish_reason"]) for choice in found.json()["choices"]]


async def streamed(http, body):
    """The choices of a stream, put together as clients do."""
    pieces = [piece for piece in events((await http.post(CHAT, json=body | {"stream": True})).text) if isinstance(piece, dict)]
    messages, reasons = {}, {}
    for choice in (piece["choices"][0] for piece in pieces):
        message = messages.setdefault(choice["index"], {"role": "assistant", "content": "", "tool_calls": []})
        message["content"] += choice["delta"].get("content", "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append({**call, "index": call["index"]})
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reasons[choice["index"]] = choice["finish_reason"]
    return [(tidy(messages[index]), reasons[index]) for index in sorted(messages)]


def tidy(message):
    calls = [{key: call[key] for key in ("id", "type", "function")} for call in message["tool_calls"]]
    return (
        {**message, "content": message["content"] or None, "tool_calls": calls}
        if calls
        else {"role": "assistant", "content": message["content"]}
    )


def answers(**fields):
    async def talk(http, service):
        crowded = await asyncio.gather(*(whole(http, body) for body in bodies()), *(streamed(http, body) for body in bodies()))
        alone = [await whole(http, body) for body in bodies()]
        return crowded, alone, await service.call(lambda engine: engine.scheduler.counters.num_parks)

    return serve(talk, pool__tokens=512, **fields)


def test_forced_calls_are_whole_and_the_same_alone_or_crowded_streamed_or_not_and_parked_every_third_token():
    crowded, alone, num_parks = answers(debug__park_every=3)
    assert num_parks > 100
    assert crowded == alone * 2
    assert answers()[1:] == (alone, 0)
    one, named, required, free = alone
    for message, reason in [*one, *named]:
        (call,) = message["tool_calls"]
        assert reason == "tool_calls" and message["content"] is None and call["type"] == "function"
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert list(arguments) == ["city", "days"] and arguments["city"] in ("Ulm", "Bonn", "Rome") and 0 <= arguments["days"] <= 99
        else:
            assert call["function"] == {"name": "now", "arguments": "{}"}
    assert named[0][0]["tool_calls"][0]["function"]["name"] == "weather"
    assert required[0][0]["tool_calls"] and required[0][1] in ("tool_calls", "length")
    assert free[0][0]["content"] and free[0][1] in ("stop", "length")
    ids = [call["id"] for choices in alone for message, _ in choices for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
