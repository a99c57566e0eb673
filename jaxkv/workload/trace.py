"""One request of a load, and a measured load as a file: one request a line, when it came, how long it was, how urgent. Never what was said.

    {"arrival_s": 0.0, "prompt_tokens": 120, "generated_tokens": 512, "max_tokens": 512, "priority": 0, "patient": true}

`arrival_s` counts from the first request. `max_tokens` (what was asked for at most), `priority`, `n` (choices), `cancel_after` (tokens
after which its caller left) and `patient` (nobody waited for single tokens) may be missing: then it asked for what it got, with priority 0,
for one choice, stayed, and somebody waited. Other fields are left alone.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load. It stops by itself after `answer_len` tokens, though it may have asked for more, `max_tokens`."""

    arrival_s: float
    prompt_len: int
    answer_len: int
    max_tokens: int
    priority: int = 0
    n: int = 1  # choices, of the same length each
    cancel_after: int | None = None  # tokens of each choice after which its caller leaves; None stays to the end
    shared_len: int = 0  # tokens of its prompt with which all generated prompts of the load begin
    patient: bool = False  # nobody waits for its next token, only for its end
    text: str | None = None  # the prompt, where it is not generated; `prompt_len` is then an estimate

    @property
    def ends_after(self) -> int:
        """Tokens of each choice, by whichever end comes first."""
        return self.answer_len if self.cancel_after is None else min(self.answer_len, self.cancel_after)

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller leaves before it ends by itself."""
        return self.ends_after < self.answer_len

    def to_line(self) -> str:
        """As a line of a trace."""
        fields = {
            "arrival_s": round(self.arrival_s, 6),
            "prompt_tokens": self.prompt_len,
            "generated_tokens": self.answer_len,
            "max_tokens": self.max_tokens,
            "priority": self.priority,
            **({"n": self.n} if self.n > 1 else {}),
            **({} if self.cancel_after is None else {"cancel_after": self.cancel_after}),
            **({"patient": True} if self.patient else {}),
        }
        return json.dumps(fields) + "\n"


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace in order of arrival; ConfigError with the number of the first line that is none."""
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
    requests = [_read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"the trace {path} holds no request: record one with `jaxkv batch --record-trace FILE`")
    return sorted(requests, key=lambda request: request.arrival_s)


def _read_line(line: str, where: str) -> Request:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: got a {type(fields).__name__}, a trace has one object a line, such as {EXAMPLE}")
    arrival_s = _number(fields, "arrival_s", where, 0, (int, float))
    prompt_len, answer_len = (_number(fields, name, where, 1, int) for name in ("prompt_tokens", "generated_tokens"))
    max_tokens = _number({"max_tokens": answer_len, **fields}, "max_tokens", where, 1, int)
    priority = _number({"priority": 0, **fields}, "priority", where, None, int)
    n = _number({"n": 1, **fields}, "n", where, 1, int)
    leaves = _number(fields, "cancel_after", where, 1, int) if fields.get("cancel_after") is not None else None
    patient = fields.get("patient", False)
    if not isinstance(patient, bool):
        raise ConfigError(f"{where}: patient: got {json.dumps(patient)}, allowed: true or false")
    return Request(float(arrival_s), prompt_len, answer_len, max(max_tokens, answer_len), priority, n, leaves, patient=patient)


def _number(fields: dict[str, Any], name: str, where: str, least: int | None, kind: Any) -> Any:
    """A field that is a finite number, as a float too, and not less than `least`."""
    value: Any = fields.get(name)
    is_number = isinstance(value, kind) and not isinstance(value, bool) and abs(value) <= sys.float_info.max  # NaN is not, nor is 10**400
    if is_number and (least is None or value >= least):
        return value
    word = "an integer" if kind is int else "a number"
    allowed = word if least is None else f"{word} >= {least}"
    got = "nothing" if name not in fields else json.dumps(value)
    raise ConfigError(f"{where}: {name}: got {got}, allowed: {allowed}")


EXAMPLE = '{"arrival_s": 0.0, "prompt_tokens": 120, "generated_tokens": 512}'
