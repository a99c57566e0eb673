"""A sweep on disk: a folder for each run, and what is finished. Knows neither engine nor simulator.

    DIR/sweep.json             schema version, kind and the whole configuration
    DIR/runs/NAME/config.yaml     the run's own configuration, complete
                 manifest.json    what made it and on what; "status": started, finished or failed
                 log.txt          what happened, without prompts and answers
                 outputs.jsonl    a line for each sequence
                 timeline.json    who held the pool
                 summary.json     its figures

A run is finished when its manifest says so, which is written last and at once. A killed one is begun again.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.batch.write import write_whole
from jaxkv.config import Config
from jaxkv.errors import ConfigError
from jaxkv.sweep.matrix import SCHEMA_VERSION, Run
from jaxkv.sweep.outcome import Outcome, timeline_dict

SWEEP, RUNS, MANIFEST = "sweep.json", "runs", "manifest.json"


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """A sweep's folder, opened and checked."""

    path: Path

    @classmethod
    def open(cls, path: Path, config: Config, is_simulated: bool) -> "SweepFolder":
        """Make it, or go on with one of the same kind; ConfigError for a folder of something else."""
        cls.check(path, is_simulated)
        try:
            (path / RUNS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {path}: no folder can be made there: {error.strerror or error}") from None
        write_json(path / SWEEP, {"schema_version": SCHEMA_VERSION, "kind": kind_of(is_simulated), "config": config.to_dict()})
        return cls(path)

    @staticmethod
    def check(path: Path, is_simulated: bool) -> None:
        """Refuse a folder of something else."""
        kind = kind_of(is_simulated)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output {path}: is a file, a folder is needed")
        if (path / SWEEP).exists():
            before = read_sweep(path)["kind"]
            if before != kind:
                raise ConfigError(f"--output {path}: holds {before} runs, these are {kind}; choose another folder")
        elif path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"--output {path}: is not empty and no sweep's folder, since it has no {SWEEP}; choose another")

    @contextmanager
    def held(self, part: str) -> Iterator[None]:
        """While a part of the sweep is made, nobody else makes the same part; ConfigError where somebody does."""
        with (self.path / f".part-{part}.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--output {self.path}: another sweep makes these runs just now; wait for it, or choose another folder"
                ) from None
            except OSError:
                pass  # a file system without locks
            yield

    def of(self, run: Run) -> "RunFolder":
        """The folder of a run, known by its key."""
        found = sorted((self.path / RUNS).glob(f"*-{run.key[:10]}"))
        return RunFolder(found[0] if found else self.path / RUNS / run.folder)

    def is_finished(self, run: Run) -> bool:
        """Whether it needs nothing more: its manifest says so, and its files can still be read."""
        folder = self.of(run)
        manifest = folder.manifest()
        return manifest is not None and manifest["status"] == "finished" and manifest["key"] == run.key and folder.is_whole()


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's files."""

    path: Path

    def begin(self, run: Run, manifest: dict[str, Any]) -> None:
        """What is known before it runs."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / MANIFEST, manifest)
        write_whole(self.path / "config.yaml", run.config.to_yaml())

    def finish(self, manifest: dict[str, Any], outcome: Outcome) -> None:
        """All that came of it; the manifest last."""
        write_whole(self.path / "outputs.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in outcome.lines))
        write_whole(self.path / "timeline.json", json.dumps(timeline_dict(outcome.timeline)) + "\n")
        write_json(self.path / "summary.json", {"schema_version": SCHEMA_VERSION, **outcome.figures.to_dict(), **outcome.more})
        done = {"status": "finished", "outputs_sha256": outcome.outputs_sha256}
        write_json(self.path / MANIFEST, {**manifest, **outcome.facts, **done})

    def fail(self, manifest: dict[str, Any], error: str) -> None:
        """Why there is nothing."""
        write_json(self.path / MANIFEST, {**manifest, "status": "failed", "error": error})

    def manifest(self) -> dict[str, Any] | None:
        """None where it was never begun, or what is there is no manifest."""
        try:
            found = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and {"status", "key"} <= found.keys() else None

    def is_whole(self) -> bool:
        """Whether what a finished run leaves is there; somebody may have taken or damaged a file."""
        try:
            return isinstance(self.summary(), dict) and all((self.path / name).is_file() for name in ("outputs.jsonl", "timeline.json"))
        except (OSError, ValueError):
            return False

    def summary(self) -> dict[str, Any]:
        """Its figures."""
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text(encoding="utf-8"))
        return found

    def timeline(self) -> dict[str, Any]:
        """Who held the pool."""
        found: dict[str, Any] = json.loads((self.path / "timeline.json").read_text(encoding="utf-8"))
        return found

    def outputs(self) -> Iterator[dict[str, Any]]:
        """Its sequences."""
        with (self.path / "outputs.jsonl").open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def kind_of(is_simulated: bool) -> str:
    """The word for it in files."""
    return "simulated" if is_simulated else "engine"


def read_sweep(path: Path) -> dict[str, Any]:
    """What sweep.json says; ConfigError where it is none of this version."""
    file = path / SWEEP
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} is no sweep's folder: cannot read {SWEEP}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    written = found.get("schema_version") if isinstance(found, dict) else None
    if written != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} was written by another version: its schema_version is {written}, this one reads {SCHEMA_VERSION}; "
            "choose another folder, or use the version that wrote it"
        )
    return dict(found)


def write_json(path: Path, content: Any) -> None:
    """At once, whole."""
    write_whole(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
