"""A whole server: its socket, its signals, its exit code, its command line."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from jaxkv.cli.main import main
from jaxkv.errors import ConfigError
from jaxkv.serve.run import listen, serve
from tests.serving import ServedFake, config, until

LONG = {"prompt": "ab", "max_tokens": 3000, "ignore_eos": True}


def run(engine, capsys, talk, **server):
    """Run a server and `talk(http)` beside it; (exit code, whether the thread ended), and what was printed."""
    printed = []

    async def both():
        serving = asyncio.create_task(serve(config(port=0, **server), lambda check: engine))
        async with asyncio.timeout(20):
            while not (address := re.search(r"serving small on (http://\S+)/v1\n", "".join(printed))):
                printed.append(capsys.readouterr().err)
                await asyncio.sleep(0.01)
                if serving.done():
                    serving.result()
            async with httpx2.AsyncClient(base_url=address[1]) as http:
                await talk(http)
            return await serving

    return asyncio.run(both()), "".join(printed)


def test_sigterm_finishes_what_runs_and_exits_with_0(capsys):
    engine, answers = ServedFake(step_s=0.005), []

    async def talk(http):
        asking = asyncio.create_task(http.post("/v1/completions", json={**LONG, "max_tokens": 40}))
        await until(lambda: engine.num_live == 1)
        signal.raise_signal(signal.SIGTERM)
        answers.append((await asking).json())

    assert run(engine, capsys, talk)[0] == (0, True)
    assert answers[0]["usage"]["completion_tokens"] == 40
    assert engine.is_closed


def test_what_is_not_done_within_the_drain_time_is_ended(capsys):
    engine, answers = ServedFake(step_s=0.005), []

    async def talk(http):
        asking = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await until(lambda: engine.num_live == 1)
        signal.raise_signal(signal.SIGTERM)
        answers.append(await asking)

    assert run(engine, capsys, talk, drain_s=0.1)[0] == (0, True)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"


def test_a_second_signal_does_not_wait_and_an_interrupt_says_so(capsys):
    engine = ServedFake(step_s=0.005)

    async def talk(http):
        asking = asyncio.create_task(http.post("/v1/completions", json=LONG))
        await until(lambda: engine.num_live == 1)
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0.02)
        assert (await asking).status_code == 503

    before = signal.getsignal(signal.SIGINT)
    assert run(engine, capsys, talk, drain_s=60)[0] == (130, True)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_engine_that_breaks_ends_the_server_with_1(capsys):
    engine = ServedFake(step_s=0.005)

    async def talk(http):
        engine.fault = RuntimeError("broken")
        assert (await http.post("/v1/completions", json=LONG)).status_code == 503

    assert run(engine, capsys, talk)[0] == (1, True)


def test_what_keeps_the_engine_from_starting_is_raised():
    def refuse(check):
        raise ConfigError("model.path: nothing is there")

    with pytest.raises(ConfigError, match=r"^model\.path: nothing is there$"):
        asyncio.run(serve(config(port=0), refuse))


def test_a_server_that_others_can_reach_without_a_key_says_so(capsys):
    async def talk(http):
        signal.raise_signal(signal.SIGTERM)

    _, told = run(ServedFake(), capsys, talk, host="0.0.0.0")
    line = "jaxkv: server.host: 0.0.0.0 can be reached from other machines, and no API key is asked for; set server.api_key_file\n"
    assert line in told
    assert "no API key" not in run(ServedFake(), capsys, talk)[1]


def test_a_port_in_use_is_told_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            listen("127.0.0.1", port)
    assert str(error.value) == f"server.port: cannot listen on 127.0.0.1, port {port}: Address already in use; choose another"


def test_without_its_packages_the_command_says_what_brings_them(monkeypatch, capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: x}\n")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tmp_path / "c.yaml")]) == 2
    line = "jaxkv: error: this needs the package uvicorn, which is not installed: pip install 'jaxkv[server]'\n"
    assert capsys.readouterr().err == line


def test_a_batch_that_a_stopped_server_left_is_done_by_the_next(capsys, tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**LONG, "max_tokens": 300}}
    found = []

    async def begin(http):
        stored = await http.post("/v1/files", files={"file": ("in", json.dumps(line).encode())}, data={"purpose": "batch"})
        asked = {"input_file_id": stored.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        found.append((await http.post("/v1/batches", json=asked)).json()["id"])
        while (await http.get(f"/v1/batches/{found[0]}")).json()["status"] != "in_progress":
            await asyncio.sleep(0.005)
        signal.raise_signal(signal.SIGTERM)

    async def wait(http):
        while (batch := (await http.get(f"/v1/batches/{found[0]}")).json())["status"] != "completed":
            await asyncio.sleep(0.005)
        found.append(batch["request_counts"])
        signal.raise_signal(signal.SIGTERM)

    settings = {"files_dir": str(tmp_path), "drain_s": 0}
    assert run(ServedFake(step_s=0.005), capsys, begin, **settings)[0] == (0, True)
    assert run(ServedFake(), capsys, wait, **settings)[0] == (0, True)
    assert found[1] == {"total": 1, "completed": 1, "failed": 0}


def test_what_a_caller_sends_makes_nobody_write_to_standard_error():
    code = """
import asyncio
from tests.serving import listening

async def go():
    async with listening() as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"nonsense\\r\\n\\r\\n")
        print((await reader.read())[:12])
        writer.close()

asyncio.run(go())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("b'HTTP/1.1 400'\n", "")


def test_a_connection_keeps_no_small_packet_back():
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0, "answers would take 40 ms longer"
