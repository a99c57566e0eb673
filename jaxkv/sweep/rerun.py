"""Makes a run again from its manifest and says whether the same came out, and if not, what differs. Writes nothing of the old run."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.config import Config
from jaxkv.config.load import resolve_config
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.sweep.folder import MANIFEST, RunFolder
from jaxkv.sweep.loop import run_all_in
from jaxkv.sweep.matrix import SCHEMA_VERSION, Run, config_sha256, input_sha256

COMPARED = ("jaxkv_version", "commit", "versions", "python", "xla_flags", "machine", "devices", "fingerprint_facts", "costs")
PASSING = ("machine.available_memory_mib", "machine.load_average")  # of the moment: no answer depends on them
NEEDED = frozenset({"status", "key", "kind", "case", "seed", "repeat", "config_sha256", "input_sha256"})


@dataclass(frozen=True, slots=True)
class Rerun:
    """What came of it."""

    is_same: bool
    outputs_sha256: str
    before_sha256: str
    differences: tuple[str, ...]  # of what made it, in words
    first: str | None  # the first sequence that differs


def rerun(path: Path, output: Path | None) -> Rerun:
    """Make the run of this manifest (or of its folder) again, in `output` if it is to be kept. ConfigError for what cannot be."""
    folder, manifest, config = read_run(path)
    if output is not None and output.exists():
        raise ConfigError(f"--output {output}: exists already; choose another folder")
    run = Run(manifest["case"], manifest["seed"], manifest["repeat"], config, manifest["kind"] == "simulated", manifest["key"])
    with ExitStack() as keep:
        place = Path(keep.enter_context(tempfile.TemporaryDirectory())) / "run" if output is None else output
        (done,) = run_all_in([(run, RunFolder(place))])
        if done.error is not None:
            raise JaxkvError(f"the run failed this time: {done.error}")
        now = done.folder.manifest()
        assert now is not None
        is_same = now["outputs_sha256"] == manifest["outputs_sha256"]
        first = None if is_same else first_difference(folder, done.folder)
    return Rerun(is_same, now["outputs_sha256"], manifest["outputs_sha256"], tuple(differences(manifest, now)), first)


def read_run(path: Path) -> tuple[RunFolder, dict[str, Any], Config]:
    """A finished run's folder, manifest and configuration, just as they were; the environment is left aside."""
    folder = RunFolder(path if path.is_dir() else path.parent)
    file = folder.path / MANIFEST if path.is_dir() else path
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the manifest {file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        written = manifest.get("schema_version") if isinstance(manifest, dict) else None
        raise ConfigError(f"{file}: its schema_version is {written}, this one reads {SCHEMA_VERSION}; use the version that wrote it")
    if manifest.get("status") in ("started", "failed"):
        raise ConfigError(f"{file}: the run is {manifest['status']}, so there is nothing to compare with")
    if missing := NEEDED - manifest.keys():
        raise ConfigError(f"{file}: {', '.join(sorted(missing))} missing, so it is no manifest of a run")
    config = resolve_config(folder.path / "config.yaml", environ={}).config
    if config_sha256(config) != manifest["config_sha256"]:
        raise ConfigError(
            f"{folder.path / 'config.yaml'} is not what the run was made with: its config_sha256 is another than in {MANIFEST}"
        )
    if input_sha256(config) != manifest["input_sha256"]:
        raise ConfigError(f"{file}: the run's input is not there any more: files of workload.prompts or workload.trace have changed")
    return folder, manifest, config


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """`fingerprint_facts.jaxlib: 0.10.1, now 0.10.2`, for all that may explain another outcome."""
    old, new = ({name: value for part in COMPARED for name, value in _flat(part, which.get(part))} for which in (before, now))
    for name in dict.fromkeys([*old, *new]):
        if name not in PASSING and old.get(name) != new.get(name):
            yield f"{name}: {_word(old.get(name))}, now {_word(new.get(name))}"


def first_difference(before: RunFolder, now: RunFolder) -> str | None:
    """Which sequence is the first that is not the same, and where."""
    for old, new in zip(before.outputs(), now.outputs(), strict=False):
        name = f"{old['custom_id']}, choice {old['choice']}"
        if "token_ids" not in old or "token_ids" not in new:
            if old != new:
                return name
            continue
        a, b = old["token_ids"], new["token_ids"]
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            return f"{name}, at token {place} of {len(a)}"
    return None


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(f"{name}.{key}", part)
    else:
        yield name, value


def _word(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
