"""A batch as the server remembers it, across restarts too, and as OpenAI's API shows it. Runs nothing."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jaxkv.batch.write import write_whole
from jaxkv.errors import RequestError
from jaxkv.openai import Endpoint
from jaxkv.openai.values import refuse, shown, text

WINDOW, WINDOW_S = "24h", 24 * 3600
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
MAX_ERRORS = 20
_FIELDS = frozenset({"input_file_id", "endpoint", "completion_window", "metadata"})
_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_NO_COUNTS = {"total": 0, "completed": 0, "failed": 0}


@dataclass(slots=True)
class BatchRecord:
    """One batch. `output_id` and `error_id` are files that appear when it has ended; `job` is what its answers depend on (batch.resume)."""

    id: str
    input_id: str
    endpoint: str
    model: str
    output_id: str
    error_id: str
    metadata: dict[str, str] | None = None
    status: str = "validating"
    ending: str | None = None  # what it will have become when its files are ready
    times: dict[str, int] = field(default_factory=lambda: {"created": int(time.time())})  # by status
    counts: dict[str, int] = field(default_factory=lambda: dict(_NO_COUNTS))
    errors: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)  # of output_id and error_id, those that there are
    job: dict[str, Any] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing will happen to it any more."""
        return self.status in ENDED

    @property
    def expires(self) -> int:
        """When its window ends, in seconds since 1970."""
        return self.times["created"] + WINDOW_S

    def turn(self, status: str) -> None:
        """Another status, from now on."""
        self.status = status
        self.times.setdefault(status, int(time.time()))

    def add_error(self, code: str, message: str, line: int | None = None) -> None:
        """Say why it fails; the first few are enough."""
        if len(self.errors) < MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "param": None, "line": line})

    def save(self, folder: Path) -> None:
        """Write it down."""
        write_whole(folder / f"{self.id}.json", json.dumps(asdict(self)))

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        statuses = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_id if self.output_id in self.files else None,
            "error_file_id": self.error_id if self.error_id in self.files else None,
            "created_at": self.times["created"],
            "expires_at": self.expires,
            **{f"{status}_at": self.times.get(status) for status in statuses},
            "request_counts": self.counts,
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True)
class BatchAsk:
    """What a client asks for."""

    input_id: str
    endpoint: str
    metadata: dict[str, str] | None


def read_batch_ask(body: Mapping[str, Any]) -> BatchAsk:
    """Check the body of a new batch; raises RequestError for the first field that is wrong."""
    if unknown := sorted(name for name in body.keys() - _FIELDS if body[name] is not None):
        raise RequestError(
            f"{unknown[0][:40]}: is not supported here, allowed: {', '.join(sorted(_FIELDS))}; leave it out", unknown[0][:40]
        )
    endpoints = [endpoint.value for endpoint in Endpoint]
    if body.get("endpoint") not in endpoints:
        raise refuse("endpoint", body.get("endpoint"), " or ".join(endpoints))
    if body.get("completion_window") != WINDOW:
        raise refuse("completion_window", body.get("completion_window"), WINDOW)
    return BatchAsk(text("input_file_id", body.get("input_file_id")), body["endpoint"], _metadata(body.get("metadata")))


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > _MAX_PAIRS:
        got = f"{len(given)} pairs" if isinstance(given, dict) else shown(given)
        raise RequestError(f"metadata: got {got}, allowed: an object of at most {_MAX_PAIRS} pairs", "metadata")
    for key, value in given.items():
        if len(text("metadata", key)) > _MAX_KEY or not isinstance(value, str) or len(text("metadata", value)) > _MAX_VALUE:
            allowed = f"strings, the key of at most {_MAX_KEY} characters and the value of at most {_MAX_VALUE}"
            raise refuse("metadata", {key: value}, allowed)
    return given
