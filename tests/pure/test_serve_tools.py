"""Calls of tools through the server, with OpenAI's own client, which checks every answer against its types."""

import asyncio
import json

import openai
import pytest

from jaxkv.openai.tool_prompt import spell_out
from tests.serving import ServedFake, client, events, listening

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": SCHEMA}}
CALLS = 'Let me <see>. \n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n' * 2
WRONG = 'So <tool_call>\n{"name": "weather", "arguments": {"city": }}\n</tool_call>'


def prompt_of(messages=MESSAGES, tools=(WEATHER,)):
    return "".join(f"{m['role']}: {m['content']}\n" for m in spell_out(messages, tools)) + "assistant: "


def run(talk, answer=CALLS, **answers):
    engine = ServedFake(answers={prompt_of(): answer, **answers})

    async def go():
        options = {"api_key": "one", "max_retries": 0, "_strict_response_validation": True}
        async with listening(engine) as (_, url), openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as made:
            return await talk(made)

    return asyncio.run(go())


def ask(made, **fields):
    return made.chat.completions.create(**{"model": "small", "messages": MESSAGES, "tools": [WEATHER], "seed": 1, **fields})


def test_a_chat_with_calls():
    answer = run(ask)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "Let me <see>.\nLet me <see>."
    assert [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("function", "weather", '{"city": "Köln"}')
    ] * 2
    assert answer.usage.completion_tokens == len(CALLS.encode()) + 1


def test_a_stream_with_calls_tells_what_the_whole_answer_tells():
    async def talk(made):
        stream = await ask(made, stream=True, logprobs=True)
        return [chunk async for chunk in stream], await ask(made)

    chunks, whole = run(talk)
    message = whole.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    told = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.id, call.type, call.function.name) for call in told if call.id] == [
        (index, call.id, "function", "weather") for index, call in enumerate(message.tool_calls)
    ]
    for index, call in enumerate(message.tool_calls):
        assert "".join(piece.function.arguments or "" for piece in told if piece.index == index) == call.function.arguments
    num_told = sum(len(chunk.choices[0].logprobs.content) for chunk in chunks if chunk.choices[0].logprobs)
    assert num_told == whole.usage.completion_tokens


def test_a_stream_with_the_clients_own_helper():
    async def talk(made):
        async with made.chat.completions.stream(model="small", messages=MESSAGES, tools=[WEATHER]) as stream:
            return await stream.get_final_completion()

    choice = run(talk).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me <see>.\nLet me <see>."
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Köln"}] * 2


def test_the_result_of_a_call_goes_back_and_is_answered():
    async def talk(made):
        first = (await ask(made, parallel_tool_calls=False)).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
        return first, await ask(made, messages=[*MESSAGES, first.model_dump(exclude_none=True), result])

    said = {"content": "Let me <see>.", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln"}}}]}
    told = prompt_of([*MESSAGES, {"role": "assistant", **said}, {"role": "tool", "content": "rain"}])
    first, second = run(talk, **{told: "It rains."})
    assert len(first.tool_calls) == 1
    assert second.choices[0].message.content == "It rains." and second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.tool_calls is None


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_no_call_is_content(stream):
    async def talk():
        async with client(ServedFake(answers={prompt_of(): WRONG})) as http:
            return await http.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": [WEATHER], "stream": stream})

    found = asyncio.run(talk())
    if stream:
        choices = [piece["choices"][0] for piece in events(found.text) if isinstance(piece, dict)]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == WRONG and choices[-1]["finish_reason"] == "stop"
    else:
        choice = found.json()["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": WRONG} and choice["finish_reason"] == "stop"


def test_a_tool_that_is_none_is_an_error_with_its_place():
    async def talk(made):
        with pytest.raises(openai.BadRequestError) as error:
            await ask(made, tools=[WEATHER, {"type": "function", "function": {"name": "no name"}}])
        return error.value

    found = run(talk)
    assert found.param == "tools[1].function.name" and found.body["message"].startswith('tools[1].function.name: got "no name", allowed: ')


def test_tools_are_counted_by_tokenize():
    async def talk():
        async with client() as http:
            return (await http.post("/tokenize", json={"messages": MESSAGES, "tools": [WEATHER]})).json()["tokens"]

    assert bytes(asyncio.run(talk())).decode() == prompt_of()
