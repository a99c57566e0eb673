"""What other people's clients share: where each is installed, and one server over SmolLM2, in a process of its own, for all of them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import httpx2
import pytest

from jaxkv.models.load_gguf import open_gguf

FOLDER = os.environ.get("JAXKV_CLIENTS")  # one virtual environment for each, named after its command
START_S = 180.0
FIELDS = {
    "model.max_len": 512,
    "pool.tokens": 384,  # two or three short chats: who comes then is parked, and no client may notice
    "scheduler.rows": 4,
    "server.port": 0,
    "server.page": "false",
}


@pytest.fixture(scope="session")
def command() -> Callable[[str], str]:
    """Finds a client's command, or skips the test."""

    def find(name: str) -> str:
        own = None if FOLDER is None else shutil.which(str(Path(FOLDER).expanduser().absolute() / name / "bin" / name))
        found = own or shutil.which(name)
        if found is None:
            pytest.skip(f"needs the command {name}: make test-clients installs it")
        return found

    return find


@pytest.fixture(scope="session")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server over SmolLM2 whose pool is small; it ends in order, without a fault, and nothing is left in it."""
    config = tmp_path_factory.mktemp("server") / "server.yaml"
    config.write_text(f"model: {{path: {smollm2}}}\nserver: {{model_name: smollm2}}\n")
    words = [f"--{name}={value}" for name, value in FIELDS.items()]
    process = subprocess.Popen([sys.executable, "-m", "jaxkv", "serve", str(config), *words], stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    ready = threading.Event()
    assert process.stderr is not None
    reading = threading.Thread(target=_read, args=(process.stderr, lines, ready))
    reading.start()
    try:
        assert ready.wait(START_S) and process.poll() is None, "".join(lines)
        address = re.findall(r"serving smollm2 on (http://\S+)/v1\n", "".join(lines))[0]
        yield address
        check_quiet(address)
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        reading.join()
        process.stderr.close()
    assert code == 0 and "Traceback" not in "".join(lines), "".join(lines)


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as transformers reads one; clients that make load make their prompts with it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    found = open_gguf(smollm2).tokenizer()
    assert found is not None
    found.save(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def _read(told: IO[str], lines: list[str], ready: threading.Event) -> None:
    """What a server says, until it ends: read, so that it never waits for us."""
    for line in told:
        lines.append(line)
        if "serving smollm2" in line:
            ready.set()
    ready.set()


def check_quiet(address: str) -> None:
    """Nobody is left, and nothing went wrong: no error of the server's, no fault, nothing compiled, no pages held."""
    found = figures(address)
    assert not [name for name, value in found.items() if name.startswith('jaxkv_http_responses_total{status="5') and value]
    for name in ("rows_busy", "waiting", "parked", "pool_pages_used", "host_bytes", "faults_total", "losses_total", "compilations_total"):
        assert found[f"jaxkv_{name}"] == 0, name


def figures(address: str) -> dict[str, float]:
    """Everything of /metrics by name and labels."""
    told = [line.rpartition(" ") for line in httpx2.get(f"{address}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in told}
