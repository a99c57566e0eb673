"""OpenAI's own client, which checks every answer against its types."""

import asyncio

import openai
import pytest

from tests.serving import ServedFake, listening

PROMPT = "user: hello\nassistant: "


def run(talk, engine=None, *, is_strict=True, **settings):
    engine = engine or ServedFake(answers={PROMPT: "hé there", "ab": "xyz"}, capacity=200)
    options = {"api_key": "one", "max_retries": 0, "_strict_response_validation": is_strict}

    async def go():
        async with listening(engine, **settings) as (_, url), openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client:
            return await talk(client)

    return asyncio.run(go())


def messages():
    return [{"role": "user", "content": "hello"}]


def test_models():
    async def talk(client):
        return [model async for model in client.models.list()], await client.models.retrieve("small")

    listed, one = run(talk)
    assert [model.id for model in listed] == ["small"] and one.id == "small" and one.max_model_len == 200


def test_a_chat():
    async def talk(client):
        return await client.chat.completions.create(model="small", messages=messages(), logprobs=True, top_logprobs=2, seed=1)

    answer = run(talk)
    assert answer.choices[0].message.content == "hé there" and answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens == 10


def test_a_streamed_chat():
    async def talk(client):
        asked = {"stream_options": {"include_usage": True}, "logprobs": True}
        stream = await client.chat.completions.create(model="small", messages=messages(), stream=True, **asked)
        return [chunk async for chunk in stream]

    chunks = run(talk)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hé there"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 10 and chunks[-1].choices == []


def test_a_streamed_chat_with_the_clients_own_helper():
    async def talk(client):
        async with client.chat.completions.stream(model="small", messages=messages()) as stream:
            return await stream.get_final_completion()

    assert run(talk).choices[0].message.content == "hé there"


def test_completions():
    async def talk(client):
        return await client.completions.create(model="small", prompt=["ab", "ab"], max_tokens=9, logprobs=2)

    assert [choice.text for choice in run(talk).choices] == ["xyz", "xyz"]


def test_streamed_completions():
    async def talk(client):
        stream = await client.completions.create(model="small", prompt="ab", max_tokens=9, stream=True, logprobs=0)
        return [chunk async for chunk in stream]

    chunks = run(talk, is_strict=False)  # its strict types know no piece without a finish reason, which is what OpenAI sends
    assert "".join(chunk.choices[0].text for chunk in chunks) == "xyz" and chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "model: got 'other', this server has 'small'"),
        ({"temperature": 9}, openai.BadRequestError, "temperature: got 9, allowed: a number from 0 to 2"),
        (
            {"messages": [{"role": "user", "content": "x" * 300}], "stream": True},
            *(openai.BadRequestError, "the prompt needs 318 tokens, the pool has 200: raise pool.tokens"),
        ),
    ],
)
def test_errors_are_the_clients_own_kinds(body, kind, message):
    async def talk(client):
        with pytest.raises(kind) as error:
            await client.chat.completions.create(**{"model": "small", "messages": messages(), **body})
        return error.value

    assert run(talk).body["message"] == message


def test_a_wrong_key_is_an_authentication_error():
    async def talk(client):
        with pytest.raises(openai.AuthenticationError) as error:
            await client.models.list()
        return error.value

    assert run(talk, keys=("two",)).code == "invalid_api_key"


def test_an_error_inside_a_stream_is_raised():
    async def talk(client):
        extra = {"timeout_s": 0.05, "ignore_eos": True}
        stream = await client.chat.completions.create(model="small", messages=messages(), stream=True, extra_body=extra)
        with pytest.raises(openai.APIError, match=r"the request did not end within its 0\.05 s"):
            [chunk async for chunk in stream]

    run(talk, ServedFake(step_s=0.01))
