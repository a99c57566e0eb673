"""What docs/SECURITY.md promises and no other file tests: names, slow clients, sizes that cost, what a log and an error may say."""

import asyncio
import hmac
import logging
import re
import time
from pathlib import Path

import httpx2
import pytest

from jaxkv.config import load_config
from jaxkv.config.fields import all_fields
from jaxkv.models.chat import render
from jaxkv.models.errors import ModelError
from jaxkv.serve import http, site
from jaxkv.serve.hosts import hosts_for
from jaxkv.serve.keys import Keys
from tests.serving import ServedFake, chat, client, listening

ROOT = Path(__file__).parents[2]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WHOLE = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"


def ask(method, path, engine=None, *, settings=None, **kwargs):
    async def go():
        async with client(engine, **(settings or {})) as made:
            return await made.request(method, path, **kwargs)

    return asyncio.run(go())


def test_a_server_is_for_its_own_machine_unless_told_otherwise():
    assert load_config({"model": {"path": "x"}}).server.host == "127.0.0.1"


def test_every_key_is_compared_in_full_whichever_comes(monkeypatch):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    keys = Keys(("one", "two", "three"))
    for key, is_known in (("one", True), ("three", True), ("x" * 5000, False), (None, False)):
        compared.clear()
        assert keys.accept(key) is is_known and compared == [(32, 32)] * 3
    assert "one" not in str(vars(keys))


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "127.0.0.1", "localhost:8000", "[::1]:8000", "192.168.1.7", "a.localhost", ""])
def test_a_server_for_this_machine_answers_to_addresses_and_localhost(host):
    assert hosts_for("127.0.0.1", (), has_keys=False).accept(host)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[", "a b"])
def test_it_answers_to_no_name_that_somebody_else_chose(host):
    assert not hosts_for("127.0.0.1", (), has_keys=False).accept(host)
    assert hosts_for("127.0.0.1", (), has_keys=True).accept(host), "a page elsewhere has no key"
    assert hosts_for("0.0.0.0", (), has_keys=False).accept(host)
    assert not hosts_for("0.0.0.0", ("chat.example",), has_keys=True).accept(host)


def test_a_page_that_has_its_own_name_point_here_is_refused():
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    for method, path, body in (("POST", CHAT, chat()), ("GET", "/slots", None), ("GET", "/", None)):
        found = ask(method, path, headers=rebound, json=body)
        assert found.status_code == 403
        assert found.json()["error"]["message"] == (
            "this server does not go by the name 'evil.example:8000'; "
            "use its address or localhost, or list the name in server.allowed_hosts"
        )
    assert ask("GET", "/", headers={"host": "Chat.Example"}, settings={"allowed_hosts": ["chat.example"]}).status_code == 200


def test_no_other_site_is_let_in_by_cors():
    asked = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    for headers in (asked, {"origin": "null"}, {"origin": "http://localhost.evil.example"}):
        for method in ("OPTIONS", "POST", "GET"):
            found = ask(method, CHAT, headers=headers)
            assert found.status_code == 403 and not [name for name in found.headers if name.startswith("access-control")]


def test_every_answer_is_what_it_says_it_is():
    for path in ("/", "/v1/models", "/nowhere", "/metrics"):
        assert ask("GET", path).headers["x-content-type-options"] == "nosniff"


def send(*parts, **settings):
    """What comes back for bytes after which nothing follows, until the server closes; and after how many seconds."""

    async def go():
        async with listening(**settings) as (_, url), asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            began = time.monotonic()
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.1)
            found = await reader.read()
            writer.close()
            return found, time.monotonic() - began

    return asyncio.run(go())


@pytest.mark.parametrize("parts", [[b""], [b"GET / HT"], [b"GET / HT", b"TP/1.1\r\n"], [WHOLE, b"GET / HTTP/1.1\r\nx: "]])
def test_headers_that_never_end_are_not_waited_for(monkeypatch, parts):
    monkeypatch.setattr(http, "HEADERS_S", 0.2)
    found, seconds = send(*parts)
    assert b"HTTP/1.1 408 " in found and b"connection: close" in found.lower() and seconds < 5
    assert b'"message":"the request\'s headers did not arrive within 0.2 s"' in found and b'"code":"request_timeout"' in found


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(site, "BODY_S", 0.2)
    found, seconds = send(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert found.startswith(b"HTTP/1.1 408 ") and seconds < 5
    assert b'"message":"the request\'s body did not arrive within 0.2 s"' in found


def test_a_client_that_takes_its_time_between_two_requests_is_served(monkeypatch):
    monkeypatch.setattr(http, "HEADERS_S", 0.2)

    async def go():
        async with listening() as (_, url), httpx2.AsyncClient(base_url=url) as made:
            for _ in range(2):
                assert (await made.get("/version")).status_code == 200
                await asyncio.sleep(0.5)

    asyncio.run(go())


@pytest.mark.parametrize("origin", ["http://[", "http://a]b", "null", "file://", ""])
def test_an_origin_that_cannot_be_read_is_a_foreign_one(origin):
    found = ask("GET", "/v1/models", headers={"origin": origin})
    assert (found.status_code, found.json()["error"]["code"]) == (403, "foreign_origin")


def post(body, **headers):
    lines = [f"POST {COMPLETION} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


LONG = b'{"prompt": "ab", "max_tokens": 3000, "ignore_eos": true}'


def leave_after(*parts):
    """A client that sends this and is gone: how many sequences there still are a second later, and what was answered."""

    async def go():
        engine = ServedFake(step_s=0.002)
        async with listening(engine) as (made, url), asyncio.timeout(10):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.1)
            before = engine.num_live
            writer.close()
            await asyncio.sleep(1)
            return before, engine.num_live, dict(made.responses)

    return asyncio.run(go())


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault_of_ours(caplog):
    before, after, responses = leave_after(post(LONG)[:-5])
    assert (before, after, responses) == (0, 0, {499: 1}) and not caplog.records


@pytest.mark.parametrize(("more", "is_served_meanwhile"), [(post(LONG), True), (b"GET / HTTP/1.1\r\nx: ", True), (b"x" * 200_000, False)])
def test_a_client_that_leaves_is_noticed_though_it_sent_more_than_one_request(more, is_served_meanwhile):
    """More than fits beside a request that is being answered ends both at once."""
    before, after, _ = leave_after(post(LONG), more)
    assert (before, after) == (int(is_served_meanwhile), 0)


def test_requests_that_are_sent_in_one_go_are_answered_one_after_another():
    short = b'{"prompt": "ab", "max_tokens": 2}'
    found, _ = send(post(short) + post(short, connection="close"))
    assert found.count(b"HTTP/1.1 200 OK") == 2 and found.count(b'"text_completion"') == 2


@pytest.mark.parametrize(("path", "status"), [("/version", 200), ("/", 200), ("/nowhere", 404), (CHAT, 405)])
def test_head_is_get_without_the_body(path, status):
    found, _ = send(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()) and body == b""
    assert int(re.search(rb"content-length: (\d+)", head)[1]) > 10


@pytest.mark.parametrize("depth", [900, 1010, 100_000])
def test_a_deeply_nested_body_is_refused_like_any_other(depth):
    for body in ("[" * depth + "]" * depth, '{"messages": ' + "[" * depth + "]" * depth + "}"):
        found = ask("POST", CHAT, content=body)
        assert found.status_code == 400 and len(found.json()["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 129, "n: got 129, allowed: a whole number from 1 to 128"),
        ("logprobs", 21, "logprobs: got 21, allowed: a whole number from 0 to 20"),
        ("stop", [""] * 17, 'stop: got ["", "", "", "", "", "", "", "", "", "", "", "", "", "", ..., allowed: a string or a list of at '
         "most 16 strings, none empty"),
        ("stop", "x" * 257, "stop: got a string of 257 characters, allowed: at most 256 each"),
        ("prompt", ["x"] * 65, "prompt: got a list of 65 prompts, allowed: 64; give each its own request"),
        ("prompt", [97] * 5000, "the prompt has 5000 tokens, and model.max_len allows 4096: shorten the prompt or raise model.max_len"),
        ("logit_bias", {str(i): 1 for i in range(301)}, "logit_bias: got an object of 301 entries, allowed: an object of at most 300 token "
         "ids with a number each"),
    ],
)  # fmt: skip
def test_what_would_cost_too_much_is_refused(field, value, message):
    found = ask("POST", COMPLETION, json={"prompt": "x", field: value})
    assert (found.status_code, found.json()["error"]["message"]) == (400, message)


def test_a_prompt_that_can_never_fit_does_not_reach_the_engine():
    engine = ServedFake()
    assert ask("POST", COMPLETION, engine, json={"prompt": [97] * 100_000}).status_code == 400
    assert engine.handles == {}


def test_neither_prompts_nor_answers_nor_keys_are_logged(caplog, capfd):
    secret = "zebra"
    engine = ServedFake(answers={f"user: {secret}\nassistant: ": f"{secret} said"}, failing=[f"user: bad {secret}\nassistant: "])
    headers = {"authorization": f"Bearer {secret}-key"}
    with caplog.at_level(logging.DEBUG):
        for body in (chat(secret), chat(f"bad {secret}"), chat(secret, stream=True), chat(secret, temperature=secret), {secret: 1}):
            ask("POST", CHAT, engine, settings={"keys": (f"{secret}-key",)}, headers=headers, json=body)
        ask("POST", CHAT, headers=headers, settings={"keys": (f"{secret}-key",)}, content=f"not json {secret}")
    ours = [record for record in caplog.records if record.name.split(".")[0] in ("jaxkv", "uvicorn", "fastapi", "starlette")]
    out, err = capfd.readouterr()
    assert not [record for record in ours if secret in record.getMessage()] and secret not in out + err


def test_no_error_shows_a_stack_or_a_path(monkeypatch):
    async def broken(*_):
        return {}[str(ROOT)]

    found = [ask("POST", CHAT, json=body) for body in (chat(n=0), chat(model="x"), {"messages": [{"role": 7}]})]
    found += [ask("POST", CHAT, content="{"), ask("GET", "/nowhere"), ask("PUT", "/"), ask("POST", "/slots/1")]
    monkeypatch.setattr("jaxkv.serve.completions.begin", broken)
    found.append(ask("POST", CHAT, json=chat()))
    for answer in found:
        assert answer.status_code >= 400
        assert not re.search(r'Traceback|File "|\.py\b|site-packages|line \d+ in', answer.text) and str(ROOT) not in answer.text


@pytest.mark.parametrize(
    "said", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception.__globals__['json'] }}", "{% include 'x' %}"]
)
def test_a_chat_template_runs_in_a_sandbox(said):
    with pytest.raises(ModelError, match="the chat template cannot render these messages"):
        render(said, [{"role": "user", "content": "x"}])


def test_the_document_names_settings_and_tests_that_exist():
    text = (ROOT / "docs" / "SECURITY.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:server|request|pool|log|scheduler|model|run)\.\w+)`", text))
    assert named and named <= set(all_fields())
    server = {name for name in all_fields() if name.startswith("server.")}
    assert {"server.host", "server.allowed_hosts", "server.api_key_file", "server.operator_key_file", "server.page"} <= named & server
