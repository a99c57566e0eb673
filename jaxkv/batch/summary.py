"""The job's part of the summary: counts over the whole job, times and rates over this run. Knows nothing of the engine's figures."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxkv.batch.records import Record, outputs_digest
from jaxkv.request import Completion
from jaxkv.stats import percentile


@dataclass(slots=True)
class Tally:
    """What has come of the lines so far."""

    num_completed: int = 0
    num_failed: int = 0
    num_earlier: int = 0  # of both, finished by earlier runs
    prompt_tokens: int = 0
    generated_tokens: int = 0
    generated_now: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    e2e_s: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def num_finished(self) -> int:
        """Lines that need nothing more."""
        return self.num_completed + self.num_failed

    def count(self, record: Record) -> None:
        """Add a finished line."""
        if record.error_code is not None:
            self.num_failed += 1
            return
        assert record.custom_id is not None
        self.num_completed += 1
        self.prompt_tokens += record.prompt_tokens
        self.generated_tokens += record.completion_tokens
        self.digests[record.custom_id] = record.token_ids_sha256

    def count_earlier(self, record: Record) -> None:
        """Add a line that an earlier run finished."""
        self.count(record)
        self.num_earlier += 1

    def time(self, choices: Sequence[Completion]) -> None:
        """Add the times of an answer made now: its first token, and its last, of whichever choice."""
        self.generated_now += sum(len(completion.token_ids) for completion in choices)
        self.e2e_s.append(max(completion.e2e_s for completion in choices))
        if first := [completion.ttft_s for completion in choices if completion.ttft_s is not None]:
            self.ttft_s.append(min(first))

    def summary(self, wall_s: float) -> dict[str, Any]:
        """The figures. Tokens per second counts what was made in this run's `wall_s` seconds; `num_earlier` lines came from runs before."""
        return {
            "num_requests": self.num_finished,
            "num_completed": self.num_completed,
            "num_failed": self.num_failed,
            "num_earlier": self.num_earlier,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "generated_tokens_per_s": self.generated_now / wall_s if wall_s > 0 else 0.0,
            "wall_s": wall_s,
            "ttft_s": percentiles(self.ttft_s),
            "e2e_s": percentiles(self.e2e_s),
            "outputs_sha256": outputs_digest(self.digests),
            "unknown_fields": dict(sorted(self.unknown.items())),
        }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50 and p99; None where there are no values."""
    return {"p50": percentile(values, 0.50), "p99": percentile(values, 0.99)}
