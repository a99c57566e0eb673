"""OpenAI's own client, which checks every answer against its types."""

import asyncio
import json

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


def test_a_completion_that_begins_with_its_prompt():
    async def talk(client):
        return await client.completions.create(model="small", prompt=[97, 98], max_tokens=1, echo=True, logprobs=1)

    found = run(talk, is_strict=False).choices[0]
    assert found.text == "abx" and found.logprobs.token_logprobs == [None, -0.25, -0.5]
    assert found.logprobs.top_logprobs == [None, {"b": -0.25}, {"x": -0.5}] and found.logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"stream": True}, {("choices", 0, "finish_reason")}),
        ({"echo": True, "logprobs": 1}, {("choices", 0, "logprobs", name, 0) for name in ("token_logprobs", "top_logprobs")}),
    ],
    ids=["streamed", "echoed"],
)
def test_the_strict_client_objects_only_to_the_nulls_that_openai_sends_too(fields, places):
    async def talk(client):
        with pytest.raises(openai.APIResponseValidationError) as error:
            found = await client.completions.create(model="small", prompt="ab", max_tokens=2, **fields)
            [chunk async for chunk in found]
        return error.value

    assert {fault["loc"] for fault in run(talk).__cause__.errors()} == places


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "model: got 'other', this server has 'small'"),
        ({"temperature": 9}, openai.BadRequestError, "temperature: got 9, allowed: a number from 0 to 2"),
        (
            {"messages": [{"role": "user", "content": "x" * 300}], "stream": True},
            *(openai.BadRequestError, "the prompt has 318 tokens, and model.max_len allows 200: shorten the prompt or raise model.max_len"),
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


def test_files_and_batches(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "small", "prompt": "ab", "max_tokens": 9}}
    broken = {**line, "custom_id": "b", "body": {"prompt": "ab", "n": 0}}

    async def talk(client):
        content = "".join(json.dumps(entry) + "\n" for entry in (line, broken)).encode()
        stored = await client.files.create(file=("in.jsonl", content), purpose="batch")
        asked = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"who": "me"}}
        batch = await client.batches.create(input_file_id=stored.id, **asked)
        while (batch := await client.batches.retrieve(batch.id)).status != "completed":
            await asyncio.sleep(0.01)
        answer, fault = [(await client.files.content(name)).text for name in (batch.output_file_id, batch.error_file_id)]
        assert [one.id async for one in client.batches.list(limit=1)] == [batch.id]
        assert len([file async for file in client.files.list(limit=1)]) == 3
        assert (await client.files.delete(stored.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(stored.id)
        with pytest.raises(openai.BadRequestError, match="is completed, so it cannot be cancelled"):
            await client.batches.cancel(batch.id)
        return batch, json.loads(answer), json.loads(fault)

    batch, answer, fault = run(talk, files_dir=str(tmp_path))
    assert (batch.request_counts.completed, batch.request_counts.failed, batch.metadata) == (1, 1, {"who": "me"})
    assert answer["response"]["body"]["choices"][0]["text"] == "xyz"
    assert fault["error"]["message"] == "n: got 0, allowed: a whole number from 1 to 128"
