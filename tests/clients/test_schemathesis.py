"""schemathesis asks for everything that /openapi.json describes, and much that it does not: nothing is an error of the server's."""

import asyncio
import sys

import pytest

from tests.serving import ServedFake, listening

pytestmark = pytest.mark.clients
OPTIONS = (
    "--checks",
    "not_a_server_error",
    "--max-examples",
    "60",
    "--seed",
    "1",
    "--workers",
    "1",  # Python before 3.11.8 keeps one count for all threads that parse code, as hypothesis does: two of them fail now and then
    "--request-timeout",
    "20",
    "--no-color",
)


def test_whatever_schemathesis_asks_for_is_no_error_of_the_servers(tmp_path):
    async def go():
        engine = ServedFake(capacity=300)
        async with listening(engine, files_dir=str(tmp_path / "kept"), request_timeout_s=None) as (site, url):
            command = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run", f"{url}/openapi.json")
            process = await asyncio.create_subprocess_exec(
                *command, *OPTIONS, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            told, _ = await process.communicate()
            return process.returncode, told.decode(), dict(site.responses), site.service.num_busy

    code, told, responses, num_busy = asyncio.run(go())
    print(told[-3000:])
    assert code == 0, told[-6000:]
    assert responses[200] > 100 and responses[400] > 100, "it was understood, and refused where it should be"
    assert num_busy == 0
