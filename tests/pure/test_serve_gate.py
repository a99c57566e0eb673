"""What every request passes: ids, keys, origins, sizes, and errors that are never a framework's own."""

import asyncio
import logging
import threading

import pytest

from jaxkv import __version__
from jaxkv.errors import ConfigError
from jaxkv.serve.keys import Keys, bearer, read_keys
from tests.serving import ServedFake, chat, client, listening, site

CHAT = "/v1/chat/completions"


def ask(method, path, engine=None, *, settings=None, **kwargs):
    async def go():
        async with client(engine, **(settings or {})) as http:
            return await http.request(method, path, **kwargs)

    return asyncio.run(go())


def test_a_request_id_comes_back_and_is_made_where_there_is_none():
    assert ask("GET", "/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert ask("GET", "/nowhere", headers={"x-request-id": "mine-2"}).headers["x-request-id"] == "mine-2"
    made = ask("GET", "/version").headers["x-request-id"]
    assert len(made) == 24 and int(made, 16) >= 0
    assert ask("GET", "/version", headers={"x-request-id": "x" * 200}).headers["x-request-id"] != "x" * 200


@pytest.mark.parametrize(
    ("method", "path", "status", "message", "code"),
    [
        ("GET", "/nowhere", 404, "there is nothing at GET /nowhere", "not_found"),
        ("GET", CHAT, 405, "/v1/chat/completions does not answer to GET; allowed: POST", "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model: got 'other', this server has 'small'", "model_not_found"),
        ("GET", "/v1/models/", 404, "model: got '', this server has 'small'", "model_not_found"),
        ("GET", "/docs", 404, "there is nothing at GET /docs", "not_found"),
    ],
)
def test_no_error_is_a_frameworks_own(method, path, status, message, code):
    found = ask(method, path)
    assert found.status_code == status
    assert found.json()["error"]["message"] == message and found.json()["error"]["code"] == code
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_beyond_the_limit_is_not_read():
    message = "the body is larger than 1 MiB, the most this server reads (server.max_body_mib)"

    async def pieces():
        for _ in range(3):
            yield b"x" * 2**19

    for content in (b"x" * (2**20 + 1), pieces()):
        found = ask("POST", CHAT, settings={"max_body_mib": 1}, content=content)
        assert (found.status_code, found.json()["error"]["message"]) == (413, message)


def test_a_key_is_asked_for_where_there_is_one():
    settings = {"keys": ("one", "two"), "operator_keys": ("boss",)}
    for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"authorization": "Bearer "}):
        found = ask("POST", CHAT, settings=settings, headers=headers, json=chat())
        assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
        assert found.json()["error"]["message"] == "this server needs an API key; send a valid one as `Authorization: Bearer KEY`"
        assert found.json()["error"]["code"] == "invalid_api_key"
    for key in ("one", "two", "boss"):
        assert ask("POST", CHAT, settings=settings, headers={"authorization": f"Bearer {key}"}, json=chat()).status_code == 200
    assert ask("GET", "/health", settings=settings).status_code == 200
    assert ask("GET", "/v1/models", settings=settings).status_code == 401
    assert ask("GET", "/nowhere", settings=settings).status_code == 401


def test_keys_come_from_a_file_and_from_the_environment(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("# ours\nalpha\n\n beta \n")
    monkeypatch.setenv("JAXKV_TEST_KEYS", "gamma, delta")
    keys = read_keys(str(tmp_path / "keys"), "JAXKV_TEST_KEYS", "server.api_key_file")
    assert [keys.accept(key) for key in ("alpha", "beta", "gamma", "delta", "# ours", "", None)] == [True] * 4 + [False] * 3
    assert not Keys(()) and not Keys(()).accept("alpha")
    with pytest.raises(ConfigError, match=r"^server\.api_key_file: .*/none cannot be read: No such file or directory$"):
        read_keys(str(tmp_path / "none"), "JAXKV_TEST_KEYS", "server.api_key_file")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"empty holds no key; write one a line, or set server\.api_key_file to null$"):
        read_keys(str(tmp_path / "empty"), "JAXKV_TEST_KEYS", "server.api_key_file")


def test_a_bearer_token_is_what_follows_the_word():
    assert [bearer(text) for text in (None, "", "Bearer abc", "bearer  abc ", "abc")] == [None, None, "abc", "abc", None]


def test_pages_of_other_sites_may_not_use_the_server():
    found = ask("POST", CHAT, headers={"origin": "https://elsewhere.example"}, json=chat())
    assert (found.status_code, found.json()["error"]["message"]) == (403, "requests from web pages of other sites are not served")
    assert "access-control-allow-origin" not in found.headers
    assert ask("POST", CHAT, headers={"origin": "http://localhost"}, json=chat()).status_code == 200


def test_a_fault_of_ours_shows_neither_message_nor_place(monkeypatch, caplog):
    async def broken(*_):
        raise ValueError("the prompt was: a secret")

    monkeypatch.setattr("jaxkv.serve.completions.begin", broken)
    with caplog.at_level(logging.ERROR, "jaxkv"):
        found = ask("POST", CHAT, json=chat())
    assert found.status_code == 500
    assert found.json()["error"] == {
        "message": "something went wrong in the server; its log has more",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "ValueError in tests" in caplog.text and "secret" not in caplog.text


def test_what_is_no_http_gets_an_error_body_too():
    async def go(data):
        async with listening() as (_, url):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(data)
            found = await reader.read()
            writer.close()
            return found

    head = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    many = b"".join(b"x%d: 12345678901234567890\r\n" % number for number in range(2000))
    long = [head + b"long: " + b"x" * 70_000, head + b"long: " + b"x" * 70_000 + b"\r\n\r\n", head + many + b"\r\n"]
    for data in (b"nonsense\r\n\r\n", *long, head.replace(b"/ ", b"/" + b"x" * 40_000 + b" ", 1) + b"\r\n"):
        found = asyncio.run(go(data))
        assert found.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b'"message":"this is no valid HTTP request, or its headers are too long"' in found


def test_facts_about_model_and_server():
    found = ask("GET", "/v1/models").json()
    (model,) = found["data"]
    assert found["object"] == "list" and isinstance(model.pop("created"), int)
    assert model == {"id": "small", "object": "model", "owned_by": "jaxkv", "root": "small", "parent": None, "max_model_len": 4096}
    assert ask("GET", "/v1/models/small").json()["id"] == "small"
    assert ask("GET", "/v1/models/a/b", settings={"model_name": "a/b"}).json()["id"] == "a/b"
    assert ask("GET", "/health").json() == {"status": "ok"}
    assert ask("GET", "/version").json() == {"version": __version__}
    props = ask("GET", "/props").json()
    assert props["pool_tokens"] == 4096 and props["rows"] == 8 and props["model_type"] == "fake"
    assert "models/" not in str(props)


def test_text_becomes_tokens_and_back():
    assert ask("POST", "/tokenize", json={"prompt": "hé"}).json() == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }
    assert ask("POST", "/tokenize", json={**chat("x"), "return_token_strs": True}).json()["token_strs"] == list("user: x\nassistant: ")
    assert ask("POST", "/tokenize", json={**chat("x"), "add_generation_prompt": False}).json()["count"] == 8
    assert ask("POST", "/tokenize", json={**chat("x"), "continue_final_message": True}).json()["count"] == 7
    assert ask("POST", "/tokenize", json={"prompt": "x", "add_special_tokens": None, "return_token_strs": None}).json()["count"] == 1
    assert ask("POST", "/detokenize", json={"tokens": [104, 195, 169, 256]}).json() == {"prompt": "hé<end>"}
    assert ask("GET", "/tokenizer_info").json()["vocab_size"] == 257


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "prompt: is missing; give prompt or messages"),
        ("/tokenize", {"prompt": 3}, "prompt: got 3, allowed: a string"),
        ("/detokenize", {}, "tokens: got null, allowed: a list of token ids"),
        ("/detokenize", {"tokens": [257]}, "tokens[0]: got 257, allowed: a whole number from 0 to 256 (the vocabulary)"),
    ],
)
def test_what_cannot_be_translated_is_refused(path, body, message):
    found = ask("POST", path, json=body)
    assert (found.status_code, found.json()["error"]["message"]) == (400, message)


def test_a_model_without_tokenizer_translates_nothing():
    found = ask("POST", "/tokenize", ServedFake(has_tokenizer=False), json={"prompt": "x"})
    assert (found.status_code, found.json()["error"]["message"]) == (400, "this model has no tokenizer, so only prompts of token ids work")


def test_while_the_model_loads_everything_but_the_version_answers_503():
    go_on = threading.Event()

    def slow(check):
        go_on.wait(10)
        return ServedFake()

    async def go():
        async with client(slow) as http:
            for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", CHAT), ("POST", "/tokenize")):
                found = await http.request(method, path, json=chat())
                assert found.status_code == 503 and found.headers["retry-after"] == "2"
                assert found.json()["error"]["message"] == "the model is loading; try again soon"
            assert (await http.get("/version")).status_code == 200
            go_on.set()
            async with asyncio.timeout(5):
                while (await http.get("/health")).status_code != 200:
                    await asyncio.sleep(0.01)

    asyncio.run(go())


def test_a_start_that_is_not_wanted_any_more_ends():
    started = threading.Event()

    def stages(check):
        started.set()
        while True:
            check()
            threading.Event().wait(0.01)

    async def go():
        async with site(stages) as made:
            await asyncio.to_thread(started.wait, 5)
            assert await made.service.close(5) is True
            assert str(made.service.failure) == "the server was stopped while it started"

    asyncio.run(go())
