"""What the tests of batch jobs share: writing inputs, running a job with a stand-in engine, reading what came out."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.batch import run_batch
from jaxkv.config import Config, load_config
from jaxkv.testing import FakeEngine


def line(custom_id: Any, prompt: str | None = None, **body: Any) -> dict[str, Any]:
    """A completion request."""
    body = {"prompt": prompt if prompt is not None else f"say {custom_id}", **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def config(**overrides: Any) -> Config:
    return load_config({"model": {"path": "fake"}}, {name.replace("__", "."): value for name, value in overrides.items()})


def write(path: Path, *lines: Any) -> Path:
    """Dicts as JSON, strings as they are."""
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in lines), encoding="utf-8")
    return path


@dataclass
class Ran:
    """What a job left behind."""

    code: int
    entries: list[dict[str, Any]]
    said: str
    engines: list[FakeEngine]
    summary: dict[str, Any]

    @property
    def by_id(self) -> dict[str, dict[str, Any]]:
        return {entry["custom_id"]: entry for entry in self.entries}

    @property
    def texts(self) -> dict[str, str]:
        return {e["custom_id"]: e["response"]["body"]["choices"][0]["text"] for e in self.entries if e["error"] is None}

    @property
    def errors(self) -> list[tuple[str | None, str, str]]:
        return [(e["custom_id"], e["error"]["code"], e["error"]["message"]) for e in self.entries if e["error"] is not None]


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def run(
    folder: Path, *inputs: str | Path, make: Callable[[], FakeEngine] = FakeEngine, settings: Config | None = None, **options: Any
) -> Ran:
    """Run a job in `folder` with output out.jsonl and summary s.json."""
    engines: list[FakeEngine] = []
    stderr = io.StringIO()

    def build() -> FakeEngine:
        engines.append(make())
        return engines[-1]

    output, summary = folder / "out.jsonl", folder / "s.json"
    summary.unlink(missing_ok=True)
    names = [str(name) for name in inputs] or [str(folder / "in.jsonl")]
    code = run_batch(build, settings or config(), names, output, summary, stderr=stderr, **options)
    found = json.loads(summary.read_text()) if summary.exists() else {}
    return Ran(code, entries(output), stderr.getvalue(), engines, found)
