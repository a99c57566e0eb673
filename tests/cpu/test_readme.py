"""The README's examples run as they are written: on the small fixture with a tokenizer of bytes, and on SmolLM2 where it is there."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import jaxkv.config
import jaxkv.startup
from jaxkv.batch import run_batch
from jaxkv.config import Config, load_config
from jaxkv.engine import Engine
from jaxkv.models import ByteTokenizer, Checkpoint, load_checkpoint
from tests.cpu.tiny import LLAMA

ROOT = Path(__file__).parents[2]


def block(language: str) -> str:
    """The README's only block in this language."""
    found = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Any configuration is read with the fixture in the model's place; the fixture speaks bytes."""

    def load(*args: Any, **kwargs: Any) -> Checkpoint:
        checkpoint = load_checkpoint(*args, **kwargs)
        object.__setattr__(checkpoint, "tokenizer", ByteTokenizer())  # frozen, and its type is that of real tokenizers
        return checkpoint

    def read(source: str, overrides: Mapping[str, Any] | None = None) -> Config:
        return load_config(ROOT / source, {**(overrides or {}), "model.path": str(LLAMA), "model.max_len": 128})

    monkeypatch.setattr(jaxkv.startup, "load_checkpoint", load)
    monkeypatch.setattr(jaxkv.config, "load_config", read)
    return read


def test_the_python_example_runs(small: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("python"), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("length 0 ") or lines[0].startswith("length 1 ")
    assert re.fullmatch(r".*[1-9]\d* parks", lines[-1], re.DOTALL), "the example's pool is meant to be tight"


def test_the_batch_example_runs(small: Callable[..., Config], tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text(block("json"), encoding="utf-8")
    config = small("configs/quickstart.yaml")
    output, summary = tmp_path / "answers.jsonl", tmp_path / "summary.json"
    assert run_batch(lambda: Engine(config), config, [str(tmp_path / "questions.jsonl")], output, summary) == 0
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == ["sea", "sky"]
    assert json.loads(summary.read_text(encoding="utf-8"))["num_completed"] == 2


@pytest.mark.slow
@pytest.mark.weights
def test_the_python_example_runs_on_real_weights(smollm2: Path, run_python: Callable[..., str]) -> None:
    lines = run_python(block("python"), cwd=ROOT).splitlines()
    assert sum(re.match(r"(stop|length) \d+ ", line) is not None for line in lines) == 4
    assert re.search(r"[1-9]\d* parks$", lines[-1])
