"""Lets a job go on where it stopped: what is finished already, and whether this is still the same job.

What is finished is read from the output file itself. Whether it is the same job is told by a small file beside it, OUT.jsonl.job.json:
it holds what the answers' bytes depend on, the engine's system_fingerprint, the defaults for body fields, run.seed and the input's SHA-256.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jaxkv.batch.read import InputFacts
from jaxkv.batch.records import UNNAMED, Record, read_record
from jaxkv.batch.write import write_whole
from jaxkv.config import Config
from jaxkv.errors import ConfigError
from jaxkv.workload.shard import Shard

# Settings that decide the fingerprint: while they stay, a job with nothing left to do needs no engine to know that it is the same.
_SETTINGS = {
    "model": ("path", "dtype", "weight_dtype", "max_len"),
    "pool": ("page_size", "kv_dtype"),
    "scheduler": ("rows", "prefill_chunk"),
    "speculate": ("kind", "num_draft"),
    "mesh": ("tensor",),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What identifies a job. `system_fingerprint` is None until the engine is there."""

    input_sha256: str
    run_seed: int
    request: Mapping[str, Any]
    settings: Mapping[str, Any]
    system_fingerprint: str | None = None
    facts: Mapping[str, Any] | None = None  # what the fingerprint is made of, as far as it is known before weights are read
    shard: str | None = None  # which part of the input, such as 2/3

    @classmethod
    def of(cls, config: Config, facts: InputFacts, shard: Shard | None = None) -> Self:
        """The header of the job that `config` and the input, or a part of it, make."""
        values = config.model_dump(mode="json")
        settings = {f"{section}.{name}": values[section][name] for section, names in _SETTINGS.items() for name in names}
        request = {name: value for name, value in values["request"].items() if value is not None}
        return cls(facts.sha256, config.run.seed, request, settings, shard=None if shard is None else str(shard))

    @classmethod
    def load(cls, output: Path) -> Self | None:
        """The header beside `output`, None where there is none."""
        path = header_path(output)
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read as a job's header ({error}); remove it and use --force to go on") from error

    def save(self, output: Path) -> None:
        """Write it beside `output`."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        write_whole(header_path(output), json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def differences(self, now: "Header") -> list[str]:
        """What changed between this header and `now`, in words; fingerprints count where both are known."""
        found = []
        if self.input_sha256 != now.input_sha256:
            found.append("the input's content")
        if self.shard != now.shard:
            found.append(f"its part of the input ({self.shard or 'all'}, now {now.shard or 'all'})")
        if self.run_seed != now.run_seed:
            found.append(f"run.seed ({self.run_seed}, now {now.run_seed})")
        names = sorted({*self.request, *now.request})
        changed = [name for name in names if self.request.get(name) != now.request.get(name)]
        found += [f"request.{name} ({json.dumps(self.request.get(name))}, now {json.dumps(now.request.get(name))})" for name in changed]
        if why := self._why_another_model(now):
            settings = [name for name in now.settings if self.settings.get(name) != now.settings[name]]
            cause = ", ".join(f"{name} {self.settings.get(name)}, now {now.settings[name]}" for name in settings)
            found.append(f"the model or its settings ({cause or why})")
        return found

    def _why_another_model(self, now: "Header") -> str | None:
        """What tells that other answers must be expected: the fingerprints, or before there is one, what is known of it."""
        prints = self.system_fingerprint, now.system_fingerprint
        if None not in prints:
            return f"system_fingerprint {prints[0]}, now {prints[1]}" if prints[0] != prints[1] else None
        before, after = self.facts or {}, now.facts or {}
        changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
        return ", ".join(sorted(changed)) or None


@dataclass(slots=True)
class Finished:
    """The lines that are done: custom_ids, and for lines without one of their own, places in the input."""

    custom_ids: set[str] = field(default_factory=set)
    places: set[int] = field(default_factory=set)
    num_dropped: int = 0  # error lines that are to be done again


def header_path(output: Path) -> Path:
    """OUT.jsonl.job.json for OUT.jsonl."""
    return output.with_name(output.name + ".job.json")


def read_finished(
    output: Path, lines: Iterable[bytes], on_record: Callable[[Record], None], *, is_retry: bool, has_same_input: bool
) -> Finished:
    """Read back what is done. `is_retry` leaves error lines out. Places in another input say nothing about this one."""
    finished = Finished()
    for number, line in enumerate(lines, start=1):
        try:
            record = read_record(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{output}, line {number}: is no line of a batch job's output ({error}); choose another --output") from error
        if is_retry and record.error_code is not None:
            finished.num_dropped += 1
            continue
        if record.error_code in UNNAMED:
            if has_same_input and record.line is not None:
                finished.places.add(record.line)
        elif record.custom_id is not None:
            finished.custom_ids.add(record.custom_id)
        on_record(record)
    return finished


def refuse_other_job(output: Path, before: Header | None, now: Header, *, is_empty: bool) -> None:
    """Raise ConfigError where what is in `output` was made by another job."""
    if before is None:
        if not is_empty:
            raise ConfigError(
                f"{output} is not empty, but {header_path(output).name} is missing, so nothing says which job made it: "
                "choose another --output, or --force to add what is missing"
            )
    elif not is_empty and (changed := before.differences(now)):
        raise ConfigError(
            f"{output} was begun by another job: {'; '.join(changed)}. Choose another --output, go back to what it was, "
            "or --force to keep its lines and add what is missing"
        )
