"""The lines of an output file: how answers and errors are written, and what is read back of them when a job goes on.

Beside what OpenAI's format has, each line holds `jaxkv.line`, the place of its request in the input, and an answer also has
`jaxkv.token_ids_sha256`, so that the file alone says what is done and what the digest of all answers is.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.openai import error_body

# Errors of lines that cannot be told apart by custom_id: they are known again by their place in the input.
UNNAMED = frozenset({"invalid_json", "invalid_line", "missing_custom_id", "invalid_custom_id", "duplicate_custom_id"})


@dataclass(frozen=True, slots=True)
class Record:
    """What a finished line says about the job."""

    custom_id: str | None
    line: int | None
    error_code: str | None = None  # None for an answer
    token_ids_sha256: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def token_digest(token_ids: Sequence[int]) -> str:
    """SHA-256, in hex, of the ids as decimals with commas between: ids 5, 17 hash the four bytes `5,17`."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def outputs_digest(digests: Mapping[str, str]) -> str:
    """SHA-256 over the answers of a job, whatever their order in the file.

    It hashes one line per answered custom_id, in the order of their code points: the custom_id as JSON (non-ASCII kept), one space, its
    `token_digest`, one newline, all in UTF-8. Error lines are left out.
    """
    total = hashlib.sha256()
    for custom_id in sorted(digests):
        total.update(f"{json.dumps(custom_id, ensure_ascii=False)} {digests[custom_id]}\n".encode())
    return total.hexdigest()


def short_id(custom_id: str | None, line: int) -> str:
    """24 hex digits that are the same whenever this line is answered."""
    return hashlib.sha256(f"{line}:{custom_id}".encode()).hexdigest()[:24]


def answer_line(custom_id: str, line: int, body: Mapping[str, Any], token_ids: Iterable[Sequence[int]]) -> bytes:
    """A request that was answered; `token_ids` are those of each choice."""
    digest = token_digest([token_id for ids in token_ids for token_id in ids])
    return _line(custom_id, line, 200, body, None, {"token_ids_sha256": digest})


def error_line(custom_id: str | None, line: int, where: str, code: str, error: Exception | str) -> bytes:
    """A request that failed; `where` is its file and line number."""
    is_ours = code == "engine_error"
    body = error_body(error, code, "server_error" if is_ours else "invalid_request_error")
    return _line(custom_id, line, 500 if is_ours else 400, body, {"code": code, "message": str(error), "line": where}, {})


def read_record(data: bytes) -> Record:
    """What a line of an output file says; raise ValueError for one that is no such line."""
    found = json.loads(data)
    if not isinstance(found, dict) or "custom_id" not in found or "error" not in found:
        raise ValueError("it has no custom_id or no error field")
    custom_id, own, error = found["custom_id"], found.get("jaxkv") or {}, found["error"]
    if error is not None:
        return Record(custom_id, own.get("line"), str(error.get("code")))
    body = found["response"]["body"]
    usage = body["usage"]
    digest = own.get("token_ids_sha256") or token_digest([i for choice in body["choices"] for i in choice.get("token_ids", ())])
    return Record(custom_id, own.get("line"), None, digest, usage["prompt_tokens"], usage["completion_tokens"])


def _line(custom_id: str | None, line: int, status: int, body: Mapping[str, Any], error: Any, own: Mapping[str, Any]) -> bytes:
    name = short_id(custom_id, line)
    record = {
        "id": f"batch_req_{name}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{name}", "body": body},
        "error": error,
        "jaxkv": {"line": line, **own},
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode(errors="replace") + b"\n"
