"""Everything that can be wrong with a request, as a status and OpenAI's error body. Knows no route."""

from collections.abc import Mapping
from typing import Any

from jaxkv.errors import RequestError

INVALID, UNAVAILABLE, INTERNAL = "invalid_request_error", "service_unavailable_error", "server_error"
CLOSE = {"connection": "close"}  # what was not read is not read
DO_NOT_RETRY = {"x-should-retry": "false"}  # for OpenAI's own client, which would send a 5xx again


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, kind: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(spelled(message))
        self.status, self.kind, self.code, self.param = status, kind, code, param and spelled(param)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What clients read."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def spelled(text: str) -> str:
    """A text of a caller's with nothing in it that UTF-8 cannot spell."""
    return text.encode(errors="replace").decode()


def bad_request(error: RequestError) -> ApiError:
    """The request cannot be served as it is written."""
    return ApiError(400, str(error), INVALID, "invalid_request", error.param)


def bad_json(reason: str) -> ApiError:
    """The body cannot be read at all."""
    return ApiError(400, f"the body is no JSON object: {reason}", INVALID, "invalid_json")


def too_large(limit_mib: int, field: str = "server.max_body_mib") -> ApiError:
    """The body is longer than the server reads."""
    message = f"the body is larger than {limit_mib} MiB, the most this server reads ({field})"
    return ApiError(413, message, INVALID, "body_too_large", headers=CLOSE)


def files_full(reason: str) -> ApiError:
    """Nothing more can be kept."""
    return ApiError(413, f"{reason}; delete some first (DELETE /v1/files/ID)", INVALID, "files_full")


def too_slow(what: str, seconds: float) -> ApiError:
    """The request never came to its end."""
    return ApiError(408, f"the request's {what} did not arrive within {seconds:g} s", INVALID, "request_timeout", headers=CLOSE)


def no_http() -> ApiError:
    """It cannot be read at all."""
    return ApiError(400, "this is no valid HTTP request, or its headers are too long", INVALID, "invalid_http")


def no_key() -> ApiError:
    """A key is needed, and none or a wrong one came."""
    message = "this server needs an API key; send a valid one as `Authorization: Bearer KEY`"
    return ApiError(401, message, INVALID, "invalid_api_key", headers={"www-authenticate": "Bearer"})


def not_operator() -> ApiError:
    """The operator's key is needed."""
    message = "this needs an operator key as `Authorization: Bearer KEY`; the server takes them from server.operator_key_file"
    return ApiError(401, message, INVALID, "invalid_operator_key", headers={"www-authenticate": "Bearer"})


def foreign_origin() -> ApiError:
    """A web page of another site sent its visitor's browser here."""
    return ApiError(403, "requests from web pages of other sites are not served", INVALID, "foreign_origin")


def foreign_host(host: str) -> ApiError:
    """The server is called by a name that is not its own."""
    message = f"this server does not go by the name {host[:100]!r}; use its address or localhost, or list the name in server.allowed_hosts"
    return ApiError(403, message, INVALID, "foreign_host")


def no_model(asked: str, served: str) -> ApiError:
    """Another model is asked for than the one there is."""
    return ApiError(404, f"model: got {asked!r}, this server has {served!r}", INVALID, "model_not_found", "model")


def no_route(method: str, path: str) -> ApiError:
    """Nothing answers to this path."""
    return ApiError(404, f"there is nothing at {method} {path[:200]}", INVALID, "not_found")


def no_slot(slot_id: str) -> ApiError:
    """No sequence has this number now."""
    return ApiError(404, f"no sequence has the id {slot_id[:30]} now; GET /slots lists them", INVALID, "slot_not_found")


def no_files() -> ApiError:
    """The server keeps none."""
    message = "this server keeps no files, so there are no batches; its server.files_dir turns both on"
    return ApiError(404, message, INVALID, "files_off")


def no_file(file_id: str) -> ApiError:
    """No file has this id."""
    return ApiError(404, f"there is no file {file_id[:40]}; GET /v1/files lists them", INVALID, "file_not_found", "file_id")


def no_batch(batch_id: str) -> ApiError:
    """No batch has this id."""
    return ApiError(404, f"there is no batch {batch_id[:40]}; GET /v1/batches lists them", INVALID, "batch_not_found", "batch_id")


def batch_over(batch_id: str, status: str) -> ApiError:
    """It has come to its end, or nearly."""
    return ApiError(400, f"the batch {batch_id} is {status}, so it cannot be cancelled", INVALID, "batch_over", "batch_id")


def file_in_use(file_id: str, batch_id: str) -> ApiError:
    """A batch reads it."""
    message = f"the file {file_id} is the input of {batch_id}, which is not done; wait for it or cancel it first"
    return ApiError(400, message, INVALID, "file_in_use", "file_id")


def too_many_batches(most: int) -> ApiError:
    """Enough are not done yet."""
    message = f"{most} batches are not done yet, the most this server takes; wait for one"
    return ApiError(429, message, "rate_limit_error", "too_many_batches", headers={"retry-after": "60"})


def wrong_method(method: str, path: str, allowed: str | None) -> ApiError:
    """The path is there, for other methods."""
    hint = f"; allowed: {allowed}" if allowed else ""
    return ApiError(405, f"{path[:200]} does not answer to {method}{hint}", INVALID, "method_not_allowed", headers={"allow": allowed or ""})


def queue_full(num_waiting: int, most: int, after_s: int) -> ApiError:
    """Enough are waiting."""
    message = f"{num_waiting} sequences wait for a row, and at most {most} may (server.max_waiting); try again in {after_s} s"
    return ApiError(429, message, "rate_limit_error", "queue_full", headers={"retry-after": str(after_s)})


def loading() -> ApiError:
    """The engine is not there yet."""
    return ApiError(503, "the model is loading; try again soon", UNAVAILABLE, "loading", headers={"retry-after": "2"})


def stopping() -> ApiError:
    """The server is on its way out."""
    return ApiError(503, "the server is shutting down", UNAVAILABLE, "shutting_down", headers={"retry-after": "10"})


def sleeping() -> ApiError:
    """An operator put the server to sleep."""
    message = "the server sleeps until its operator wakes it (POST /wake)"
    return ApiError(503, message, UNAVAILABLE, "sleeping", headers=DO_NOT_RETRY)


def not_awake() -> ApiError:
    """The server could not be woken."""
    message = "the server could not wake and sleeps on; its log has the reason"
    return ApiError(503, message, UNAVAILABLE, "wake_failed", headers=DO_NOT_RETRY)


def broken() -> ApiError:
    """The engine is no more."""
    return ApiError(503, "the engine has stopped after a fault; the server's log has the reason", UNAVAILABLE, "engine_stopped")


def deadline(seconds: float) -> ApiError:
    """It took too long."""
    return ApiError(503, f"the request did not end within its {seconds:g} s", UNAVAILABLE, "deadline_exceeded", headers=DO_NOT_RETRY)


def cancelled() -> ApiError:
    """Somebody at the server ended it."""
    return ApiError(503, "the request was cancelled by the server's operator", UNAVAILABLE, "cancelled", headers=DO_NOT_RETRY)


def engine_error() -> ApiError:
    """One request failed; why may name what clients should not see, so only the log tells."""
    return ApiError(500, "the engine could not finish this request; the server's log has the reason", INTERNAL, "engine_error")


def internal() -> ApiError:
    """A fault of ours."""
    return ApiError(500, "something went wrong in the server; its log has more", INTERNAL, "internal_error")
