"""aiperf, which makes load and measures it: streamed chats and completions, more at once than fit, and clients that give up."""

import json
import os
import subprocess
import time

import pytest

from tests.clients.conftest import figures

pytestmark = [pytest.mark.clients, pytest.mark.weights]
NUM, ANSWER = 8, 60
OPTIONS = (
    *("-m", "smollm2", "--streaming", "--concurrency", "4", "--request-count", str(NUM), "--random-seed", "7", "--ui", "none"),
    *("--prompt-input-tokens-mean", "60", "--prompt-output-tokens-mean", str(ANSWER), "--extra-inputs", "ignore_eos:true"),
    "--use-server-token-count",
)


@pytest.fixture
def load(command, url, tokenizer, tmp_path):
    """Makes load for the server; what it measured, and the answers."""
    found = command("aiperf")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}  # nobody is there: nothing is looked up elsewhere

    def run(kind, *words):
        whole = [found, "profile", "-u", url, "--endpoint-type", kind, "--tokenizer", str(tokenizer), *OPTIONS, *words]
        whole += ["--output-artifact-dir", str(tmp_path)]
        told = subprocess.run(whole, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert told.returncode == 0, told.stdout[-4000:]
        return json.loads((tmp_path / "profile_export_aiperf.json").read_text())

    return run


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_more_streams_than_fit_are_all_answered_in_full(kind, load, url):
    before = figures(url)["jaxkv_parks_total"]
    found = load(kind, *(["--per-chunk-usage"] if kind == "chat" else []))  # which it asks of chats only
    assert found["request_count"]["avg"] == NUM and found["error_summary"] == [] and not found["was_cancelled"]
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == ANSWER
    assert found["request_error_rate"]["avg"] == 0 and found["inter_token_latency"]["avg"] > 0
    assert figures(url)["jaxkv_parks_total"] > before, "four at once did fit"


def test_clients_that_give_up_leave_nothing_behind(load, url):
    before = figures(url)
    load("chat", "--request-cancellation-rate", "50", "--request-cancellation-delay", "1")
    deadline = time.monotonic() + 2
    while (after := figures(url))["jaxkv_rows_busy"] + after["jaxkv_parked"] + after["jaxkv_waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [after[f"jaxkv_{name}"] for name in ("rows_busy", "parked", "waiting", "pool_pages_used", "host_bytes")] == [0.0] * 5
    cancelled = 'jaxkv_requests_total{outcome="cancelled"}'
    assert after[cancelled] > before[cancelled], "somebody did give up"
