"""benchmarks/load.py: the configured load against a server on a socket, with callers that leave and errors that are told."""

import asyncio
import json
import sys
from pathlib import Path

from tests.serving import ServedFake, listening

ROOT = Path(__file__).parents[2]
WORKLOAD = "{lengths: fixed, num_requests: 4, prompt_len_max: 9, prompt_len_min: 9, answer_len_max: 20, answer_len_min: 20}"


async def load(folder, url, *words):
    (folder / "c.yaml").write_text(f"model: {{path: small}}\nworkload: {WORKLOAD}\n")
    command = [sys.executable, str(ROOT / "benchmarks" / "load.py"), str(folder / "c.yaml"), "--url", url, "--vocab-size", "250", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def test_a_load_is_sent_to_a_server_and_what_clients_saw_is_counted(tmp_path):
    async def work():
        async with listening(ServedFake(rows=8, step_s=0.002)) as (_, url):
            every = ["--workload.choices", "[2]", "--workload.arrivals", "staggered", "--workload.every-s", "0.05"]
            return (
                await load(tmp_path, url, *every),
                await load(tmp_path, url, "--workload.cancels", "1"),
                await load(tmp_path, url + "/no"),
            )

    whole, leaving, refused = asyncio.run(work())
    code, out, err = whole
    assert (code, err) == (0, "")
    found = json.loads(out.splitlines()[-1])
    assert (found["requests"], found["finished"], found["errors"]) == (4, 4, [])
    assert found["generated_tokens"] == 4 * 2 * 20
    assert found["last_arrival_s"] == 0.15 and found["makespan_s"] >= 0.15
    assert found["ttft_s"]["p50"] > 0 and found["completion_s"]["max"] >= found["ttft_s"]["max"]
    left = json.loads(leaving[1].splitlines()[-1])
    assert (left["cancelled"], left["finished"]) == (4, 0) and 4 <= left["generated_tokens"] < 80
    nowhere = json.loads(refused[1].splitlines()[-1])
    assert nowhere["refused"] == 4 and nowhere["errors"][0].startswith("404 ")


def test_a_server_that_is_not_there_is_told_and_so_is_no_address(tmp_path):
    code, out, _ = asyncio.run(load(tmp_path, "http://127.0.0.1:1"))
    found = json.loads(out.splitlines()[-1])
    assert (code, found["failed"]) == (0, 4) and found["errors"] == ["ConnectionRefusedError: [Errno 111] Connection refused"]
    assert asyncio.run(load(tmp_path, "here"))[::2] == (
        2,
        "load: error: --url: got 'here', allowed: http://HOST:PORT or https://HOST\n",
    )
