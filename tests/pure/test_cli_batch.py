"""`jaxkv batch` hands over what the words say. The job itself is tested beside jaxkv/batch."""

from pathlib import Path

import pytest

import jaxkv.batch
from jaxkv.cli.main import main

CONFIG = "model: {path: smollm2}\npool: {tokens: 640}\n"


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Replace the runner by one that keeps what it was given and returns 3, in a folder with a configuration."""
    calls = []

    def run_batch(engine, config, inputs, output, summary, *, force, retry_failed, inspect, shard):
        calls.append((config, inputs, output, summary, force, retry_failed, shard))
        return 3

    monkeypatch.setattr(jaxkv.batch, "run_batch", run_batch)
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(CONFIG)
    return calls


def test_the_runner_gets_files_flags_and_overrides_and_gives_the_exit_code(job):
    words = ["batch", "c.yaml", "--input", "a.jsonl", "b/*.jsonl.gz", "--output", "o.jsonl", "--summary", "s.json"]
    assert main([*words, "--retry-failed", "--pool.tokens", "1280", "--force", "--debug.planner=false", "--shard", "2/3"]) == 3
    config, inputs, output, summary, force, retry_failed, shard = job[0]
    assert (config.pool.tokens, config.debug.planner, config.model.path) == (1280, False, "smollm2")
    assert (list(inputs), output, summary) == (["a.jsonl", "b/*.jsonl.gz"], Path("o.jsonl"), Path("s.json"))
    assert force is True and retry_failed is True and (shard.index, shard.count) == (2, 3)


def test_standard_input_is_a_dash_and_flags_are_off_unless_said(job):
    assert main(["batch", "c.yaml", "--input", "-", "--output", "o.jsonl"]) == 3
    assert job[0][1:] == (("-",), Path("o.jsonl"), None, False, False, None)


def test_a_wrong_field_is_one_line_before_anything_runs(job, capsys):
    assert main(["batch", "c.yaml", "--input", "-", "--output", "o", "--scheduler.rows", "none"]) == 2
    assert capsys.readouterr().err == "jaxkv: error: scheduler.rows: got 'none', allowed: integer >= 1\n"
    assert job == []


def test_a_missing_flag_is_named(job, capsys):
    assert main(["batch", "c.yaml", "--input", "-"]) == 2
    assert "--output" in capsys.readouterr().err
