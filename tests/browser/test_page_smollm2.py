"""The web page over the real server and real weights: eight chats through a pool too small for them all come to their end, with pauses."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.webdriver import browser

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.browser, pytest.mark.weights, pytest.mark.slow]


@pytest.fixture
def address(smollm2):
    fields = ["--model.path", str(smollm2), "--model.max_len", "512", "--pool.tokens", "512", "--server.port", "0"]
    command = [sys.executable, "-m", "jaxkv", "serve", "configs/server.yaml", *fields, "--log.level", "warning"]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        yield next(found[1] for line in server.stderr if (found := re.search(r"on (http://\S+)/v1", line)))
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        server.stderr.close()


def test_eight_chats_in_a_small_pool_all_come_to_their_end_with_pauses(address):
    with browser() as window:
        window.open(f"{address}/")
        window.until(lambda: window.text("#link").endswith("512 tokens of pool"))
        window.click("#eight")
        window.until(lambda: any(state.startswith("parked") for state in window.texts(".state")), 60)
        window.until(lambda: window.texts("td.away") and window.text("#parked") != "0", 60)
        window.until(lambda: window.texts(".state") == ["done"] * 8, 180)
        assert all(re.match(r"(said all|as long as allowed): \d+ tokens", text) for text in window.texts(".sum"))
        assert any("parked" in text for text in window.texts(".sum")) and int(window.text("#parks")) > 0
        window.until(lambda: window.text("#busy") == "0")
        assert window.complaints() == []
