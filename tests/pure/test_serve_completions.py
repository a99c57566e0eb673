import asyncio

import pytest

from tests.serving import ServedFake, chat, client, events

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PROMPT = "user: hello\nassistant: "  # as the fake's template writes the chat


def run(work):
    return asyncio.run(work)


async def post(path, body, engine=None, **settings):
    async with client(engine, **settings) as http:
        return await http.post(path, json=body)


def ask(path, body, **kwargs):
    return run(post(path, body, **kwargs))


def speaker(text="abc", prompt=PROMPT, **kwargs):
    return ServedFake(answers={prompt: text}, **kwargs)


def test_a_chat_is_answered_whole():
    found = ask(CHAT, chat(seed=7), engine=speaker("hé"))
    assert found.status_code == 200
    body = found.json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-") and body["model"] == "small"
    assert body["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "hé"}, "logprobs": None, "finish_reason": "stop"},
    ]
    assert body["usage"] == {"prompt_tokens": 23, "completion_tokens": 4, "total_tokens": 27}
    assert body["system_fingerprint"] == "fp_fake" and body["seed"] == 7


@pytest.mark.parametrize(
    ("prompt", "num"),
    [("ab", 1), (["ab", "cd"], 2), ([97, 98], 1), ([[97, 98], [99, 100]], 2)],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_a_prompt_may_be_text_or_token_ids_or_several_of_either(prompt, num):
    engine = ServedFake(answers={"ab": "first", "cd": "second"})
    body = ask(COMPLETION, {"prompt": prompt, "model": "small"}, engine=engine).json()
    assert [choice["text"] for choice in body["choices"]] == ["first", "second"][:num]
    assert [choice["index"] for choice in body["choices"]] == [0, 1][:num]
    assert body["usage"]["prompt_tokens"] == 2 * num


def test_a_stream_has_the_pieces_in_the_standard_order():
    found = ask(CHAT, chat(stream=True), engine=speaker("abc"))
    assert found.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert found.headers["cache-control"] == "no-cache"
    pieces = [piece for piece in events(found.text) if piece != ": keep-alive"]
    assert pieces[-1] == "data: [DONE]"
    choices = [piece["choices"][0] for piece in pieces[:-1]]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[0]["finish_reason"] is None
    assert "".join(choice["delta"]["content"] for choice in choices[:-1]) == "abc"
    assert choices[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert {piece["object"] for piece in pieces[:-1]} == {"chat.completion.chunk"}
    assert len({piece["id"] for piece in pieces[:-1]}) == 1
    assert not any("usage" in piece for piece in pieces[:-1])


def test_a_completions_stream_has_text_and_then_the_reason():
    found = ask(COMPLETION, {"prompt": "ab", "stream": True, "max_tokens": 2}, engine=speaker("xyz", "ab"))
    pieces = events(found.text)
    assert "".join(piece["choices"][0]["text"] for piece in pieces[:-1]) == "xy"
    assert pieces[-2]["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}
    assert pieces[-2]["object"] == "text_completion"


def test_the_usage_comes_last_where_it_is_asked_for():
    body = chat(stream=True, stream_options={"include_usage": True})
    pieces = events(ask(CHAT, body, engine=speaker("abc")).text)
    assert [piece["usage"] for piece in pieces[:-2]] == [None] * (len(pieces) - 2)
    assert pieces[-2]["choices"] == []
    assert pieces[-2]["usage"] == {"prompt_tokens": 23, "completion_tokens": 4, "total_tokens": 27}


def test_the_usage_comes_with_every_piece_where_that_is_asked_for():
    body = chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    pieces = events(ask(CHAT, body, engine=speaker("abc", step_s=0.02)).text)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces[:-1]]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"n": 2, "echo": True}], ids=str)
def test_streams_and_whole_answers_say_the_same(more):
    async def both():
        async with client(ServedFake()) as http:
            for prompt in (["ab", "cd", "ef"], "é", [97, 256, 98]):
                body = {"prompt": prompt, "seed": 3, "max_tokens": 30, "logprobs": 2, "stop": ["e", "zz"], "return_token_ids": True, **more}
                whole = (await http.post(COMPLETION, json=body)).json()
                pieces = events((await http.post(COMPLETION, json={**body, "stream": True})).text)[:-1]
                yield whole["choices"], [piece["choices"][0] for piece in pieces if not isinstance(piece, str)]

    async def check():
        async for choices, pieces in both():
            for choice in choices:
                mine = [piece for piece in pieces if piece["index"] == choice["index"]]
                assert "".join(piece["text"] for piece in mine) == choice["text"]
                assert [t for piece in mine for t in piece.get("token_ids", [])] == choice["token_ids"]
                for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    told = [value for piece in mine if piece["logprobs"] for value in piece["logprobs"][field]]
                    assert told == choice["logprobs"][field]
                assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [choice["finish_reason"]]

    run(check())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_prompt_may_have_several_choices(is_stream):
    body = {"prompt": ["ab", "cd"], "n": 2, "seed": 5, "max_tokens": 8, "stream": is_stream, "stream_options": None}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    found = ask(COMPLETION, body)
    if is_stream:
        pieces = [piece for piece in events(found.text) if isinstance(piece, dict)]
        texts = ["".join(c["text"] for piece in pieces for c in piece["choices"] if c["index"] == index) for index in range(4)]
        usage = pieces[-1]["usage"]
    else:
        texts, usage = [choice["text"] for choice in found.json()["choices"]], found.json()["usage"]
    alone = [
        choice["text"] for choice in ask(COMPLETION, {**body, "prompt": "cd", "stream": False, "stream_options": None}).json()["choices"]
    ]
    assert len(set(texts)) == 4 and texts[2:] == alone
    assert usage["prompt_tokens"] == 4 and usage["completion_tokens"] >= 4 * 3


def test_a_streamed_chat_has_logprobs_of_every_token():
    pieces = events(ask(CHAT, chat(stream=True, logprobs=True, top_logprobs=1), engine=speaker("né")).text)
    entries = [e for piece in pieces[:-1] if (told := piece["choices"][0]["logprobs"]) for e in told["content"]]
    assert [entry["token"] for entry in entries] == ["n", "bytes:\\xc3", "bytes:\\xa9", "<end>"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [1] * 4


def test_without_a_tokenizer_answers_are_token_ids():
    engine = ServedFake(answers={"ab": "xy"}, has_tokenizer=False)
    pieces = events(ask(COMPLETION, {"prompt": [97, 98], "stream": True}, engine=engine).text)
    assert [t for piece in pieces[:-1] for t in piece["choices"][0].get("token_ids", [])] == [120, 121, 256]


def test_an_answer_that_the_pool_may_end_says_so():
    engine = ServedFake(answers={"ab": "x" * 50}, capacity=20)
    assert ask(COMPLETION, {"prompt": "ab", "max_tokens": 50}, engine=engine).json()["jaxkv"] == {"truncates_at": 19}
    engine = ServedFake(answers={"ab": "x" * 50}, capacity=20)
    pieces = events(ask(COMPLETION, {"prompt": "ab", "max_tokens": 50, "stream": True}, engine=engine).text)
    assert pieces[0]["jaxkv"] == {"truncates_at": 19} and not any("jaxkv" in piece for piece in pieces[1:])
    assert pieces[-2]["choices"][0]["finish_reason"] == "length"


def error(status, message, kind, code, param=None):
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


INVALID = "invalid_request_error"


REFUSED = [
    (CHAT, {"prompt": "x"}, "messages", "messages: is missing, /v1/chat/completions needs it; prompt belongs to the other endpoint"),
    (CHAT, chat(model=3), "model", "model: got 3, allowed: a string"),
    (CHAT, chat(temperature=3), "temperature", "temperature: got 3, allowed: a number from 0 to 2"),
    (CHAT, chat(stream="yes"), "stream", 'stream: got "yes", allowed: true or false'),
    (CHAT, chat(stream_options={}), "stream_options", "stream_options: belongs to streams; set stream: true or leave it out"),
    (
        *(CHAT, chat(stream=True, stream_options=[]), "stream_options"),
        'stream_options: got [], allowed: an object such as {"include_usage": true}',
    ),
    (
        *(CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
        "stream_options.include_usage: got 1, allowed: true or false",
    ),
    (CHAT, chat(timeout_s=0), "timeout_s", "timeout_s: got 0, allowed: a number above 0 to 1e+09"),
    (CHAT, chat(tools=[{"a": 1}]), "tools[0].type", 'tools[0].type: got null, allowed: "function"'),
    (
        *(CHAT, chat(response_format={"type": "json"}), "response_format"),
        'response_format: got {"type": "json"}, allowed: an object with "type": text, json_object or json_schema',
    ),
    (CHAT, chat(regex="(a"), "regex", 'regex: at 1(8): invalid regex "(a" (in regex): regex parse error: unclosed group'),
    (
        *(CHAT, chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": "x" * 70_000}}})),
        *("response_format", "response_format: got 70012 bytes, allowed: at most 65536"),
    ),
    (
        *(CHAT, chat([{"type": "image_url"}]), "messages[0].content[0]"),
        'messages[0].content[0].type: got "image_url", which is not supported; allowed: text',
    ),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, "suffix", 'suffix: got "y", which is not supported; leave it out or ""'),
    (CHAT, chat(echo=True), "echo", "echo: got true, which belongs to completions; leave it out or false"),
    (
        *(COMPLETION, {"prompt": ["x"] * 2, "n": 10}, "n"),
        "the request asks for 20 sequences (prompts times n), allowed: 16 (server.max_waiting)",
    ),
    (COMPLETION, {"prompt": ["x"] * 3}, "prompt", "prompt: got a list of 3 prompts, allowed: 2; give each its own request"),
    (
        COMPLETION,
        {"prompt": "x" * 30},
        "prompt",
        "the prompt has 30 tokens, and model.max_len allows 25: shorten the prompt or raise model.max_len",
    ),
    (
        COMPLETION,
        {"prompt": "x" * 30, "stream": True},
        "prompt",
        "the prompt has 30 tokens, and model.max_len allows 25: shorten the prompt or raise model.max_len",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_with_what_to_change(path, body, param, message):
    found = ask(path, body, engine=ServedFake(capacity=25), max_prompts=2, max_waiting=16)
    assert (found.status_code, found.json()) == error(400, message, INVALID, "invalid_request", param)
    assert found.headers["content-type"] == "application/json"


def test_another_model_is_not_found():
    found = ask(CHAT, chat(model="other"))
    message = "model: got 'other', this server has 'small'"
    assert (found.status_code, found.json()) == error(404, message, INVALID, "model_not_found", "model")


def test_a_body_that_is_no_object_is_refused():
    found = ask(CHAT, [])
    assert (found.status_code, found.json()) == error(400, "the body is no JSON object: it is a list", INVALID, "invalid_json")


def test_a_body_that_is_no_json_is_refused():
    async def go():
        async with client() as http:
            return await http.post(CHAT, content=b'{"messages": [')

    found = run(go())
    assert found.status_code == 400 and found.json()["error"]["code"] == "invalid_json"
    assert found.json()["error"]["message"].startswith("the body is no JSON object: unexpected end of data")


def test_a_refused_prompt_leaves_none_of_its_neighbours_behind():
    async def go():
        engine = ServedFake(capacity=25)
        async with client(engine) as http:
            found = await http.post(COMPLETION, json={"prompt": ["ab", "x" * 30]})
            return found.status_code, engine.num_live

    assert run(go()) == (400, 0)


def test_a_request_that_fails_in_the_engine_is_an_error_that_says_nothing_of_its_inside():
    engine = ServedFake(failing=["ab"])
    found = ask(COMPLETION, {"prompt": "ab"}, engine=engine)
    message = "the engine could not finish this request; the server's log has the reason"
    assert (found.status_code, found.json()) == error(500, message, "server_error", "engine_error")
    pieces = events(ask(COMPLETION, {"prompt": "ab", "stream": True}, engine=ServedFake(failing=["ab"])).text)
    assert pieces == [found.json(), "data: [DONE]"]
