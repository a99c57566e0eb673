"""`jaxkv batch` with a real model: what the model's headers rule out is refused before its weights are read."""

import json
from pathlib import Path

import pytest

import jaxkv.startup
from jaxkv.cli.main import main
from tests.cpu import tiny


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """The words of a job with two lines, of which one fails."""
    (tmp_path / "tiny.yaml").write_text(tiny.config().to_yaml())
    lines = [{"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": [5, 6], **more}} for name, more in BODIES]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["batch", str(tmp_path / "tiny.yaml"), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]


BODIES = (("a", {"max_tokens": 3}), ("b", {"temperature": 9}))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxkv.startup, "load_checkpoint", None)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--request.logit-bias", "{320: 1.0}"],
            'request.logit_bias key: got "320", allowed: a token id from 0 to 319',
        ),
        (["--request.stop", "x"], "request.stop: this model has no tokenizer, so there is no text to look in; use stop_token_ids"),
        (
            ["--request.stop-token-ids", "[320]"],
            "request.stop_token_ids[0]: got 320, allowed: a whole number from 0 to 319",
        ),
    ],
)
def test_a_default_that_the_model_cannot_take(job: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main([*job, *words]) == 2
    assert capsys.readouterr().err.startswith(f"jaxkv: error: {message}")


def test_a_setting_that_changes_answers_when_a_job_goes_on(
    job: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(job) == 3
    assert main([*job, "--model.dtype", "float32", "--retry-failed"]) == 3  # what auto is here
    monkeypatch.setattr(jaxkv.startup, "load_checkpoint", None)
    capsys.readouterr()
    assert main([*job, "--scheduler.rows", "5", "--retry-failed"]) == 2
    said = capsys.readouterr().err
    assert "was begun by another job: the model or its settings (" in said and "scheduler.rows 4, now 5" in said
