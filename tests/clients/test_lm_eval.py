"""lm-eval's `local-completions` on tasks of our own: choices by log-likelihood, a text's bits per byte, and answers that are generated.

It asks with token ids that /tokenize gave it, echoed with logprobs. One request at a time and several in a pool that is too small for them
come to the same figures, to the last bit.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.weights]
TASKS = Path(__file__).parent / "tasks"
NAMES = ("jaxkv_capitals", "jaxkv_seas", "jaxkv_sums")


@pytest.fixture
def evaluate(command, tmp_path):
    """Runs some tasks; every answer by task, and the results."""
    found = command("lm_eval")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def run(model, url, tasks, num_concurrent, *words):
        into = tmp_path / f"{model}{num_concurrent}"
        args = f"model=smollm2,base_url={url},num_concurrent={num_concurrent},max_length=384"
        what = ("--model", model, "--model_args", args, "--include_path", str(TASKS), "--tasks", ",".join(tasks), *words)
        whole = [found, "run", *what, "--output_path", str(into), "--log_samples"]
        told = subprocess.run(whole, cwd=TASKS, env=env, capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr[-3000:]
        assert "API request failed" not in told.stderr
        (results,) = into.rglob("results_*.json")
        answers = {name: samples(next(into.rglob(f"samples_{name}_*.jsonl"))) for name in tasks}
        return json.loads(results.read_text())["results"], answers, told.stderr

    return run


def samples(path):
    """What the model answered, by document."""
    return {line["doc_id"]: line["resps"] for line in map(json.loads, path.read_text().splitlines())}


def test_scores_are_the_same_one_at_a_time_and_crowded(evaluate, url):
    results, alone, told = evaluate("local-completions", f"{url}/v1/completions", NAMES, 1)
    assert "Using remote tokenizer backend" in told, "the server's own /tokenize was found"
    assert results["jaxkv_capitals"]["acc,none"] == 1.0
    assert results["jaxkv_seas"]["bits_per_byte,none"] == pytest.approx(1.195, abs=0.001)
    assert [len(alone[name]) for name in NAMES] == [8, 2, 4]
    assert all(response[0][0].strip().isdigit() for response in alone["jaxkv_sums"].values())
    again, crowded, _ = evaluate("local-completions", f"{url}/v1/completions", NAMES, 4)
    assert crowded == alone and again["jaxkv_seas"] == results["jaxkv_seas"]


def test_chats_answer_too(evaluate, url):
    _, answers, _ = evaluate("local-chat-completions", f"{url}/v1/chat/completions", NAMES[2:], 2, "--apply_chat_template")
    assert len(answers["jaxkv_sums"]) == 4 and all(response[0][0] for response in answers["jaxkv_sums"].values())
