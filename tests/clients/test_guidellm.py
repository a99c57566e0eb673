"""guidellm, which makes load and measures it: streamed chats and completions, and whole ones, more at once than fit."""

import json
import os
import subprocess

import pytest

from tests.clients.conftest import figures

pytestmark = [pytest.mark.clients, pytest.mark.weights]
NUM, PROMPT, ANSWER = 8, 60, 60


@pytest.fixture
def load(command, url, tokenizer, tmp_path):
    """Makes load for the server; what it measured."""
    found = command("guidellm")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}

    def run(path, *, is_stream):
        spec = {
            "backend": {"kind": "openai_http", "target": url, "request_format": path, "stream": is_stream},
            "profile": {"kind": "concurrent", "streams": 4},
            "constraints": [{"kind": "max_requests", "count": NUM}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer)},
            "data": [{"kind": "synthetic_text", "prompt_tokens": PROMPT, "output_tokens": ANSWER}],
            "outputs": [{"kind": "json", "path": str(tmp_path / "report.json")}],
        }
        (tmp_path / "load.json").write_text(json.dumps({"metadata": {"name": "crowd"}, "spec": spec}))
        whole = [found, "run", "--config", str(tmp_path / "load.json"), "--disable-console"]
        told = subprocess.run(whole, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert told.returncode == 0, told.stdout[-4000:]
        (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
        return report

    return run


@pytest.mark.parametrize(
    ("path", "is_stream"), [("/v1/chat/completions", True), ("/v1/completions", True), ("/v1/chat/completions", False)]
)
def test_more_requests_than_fit_are_all_answered_in_full(path, is_stream, load, url):
    before = figures(url)["jaxkv_parks_total"]
    report = load(path, is_stream=is_stream)
    assert report["metrics"]["request_totals"] == {"successful": NUM, "incomplete": 0, "errored": 0, "total": NUM}
    made = report["metrics"]["output_token_count"]["successful"]
    assert made["min"] == made["max"] == ANSWER
    assert figures(url)["jaxkv_parks_total"] > before, "four at once did fit"
