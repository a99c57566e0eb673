"""The fields of a server: where it listens, what it lets in, how long it waits. Knows no socket."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from jaxkv.config.section import Section


def _as_tuple(value: Any) -> Any:
    """Let a list stand for a tuple and a lone name for a list of one."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


class ServerSection(Section):
    """How `jaxkv serve` meets its clients."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on; this one is for programs on the same machine")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    model_name: str | None = Field(
        default=None, min_length=1, description="what clients call the model; null is the last part of model.path"
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="seconds after which any request ends, parked or not; null is no limit"
    )
    drain_s: float = Field(default=30.0, ge=0, allow_inf_nan=False, description="seconds that running requests get after SIGTERM")
    page: bool = Field(default=True, description="whether / is a web page with chats and a picture of the pool")
    max_waiting: int = Field(default=256, ge=1, description="sequences that may wait for a row; further requests are answered with 429")
    max_prompts: int = Field(default=64, ge=1, description="prompts of one completion request")
    max_body_mib: int = Field(default=8, ge=1, description="largest body of a request in MiB")
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_as_tuple, json_schema_input_type=str | list[str])] = Field(
        default=(),
        description="names that browsers may call the server by; checked on a loopback address without keys, and where any is given",
    )
    api_key_file: str | None = Field(
        default=None,
        min_length=1,
        description="file of API keys, one a line; $JAXKV_API_KEYS has more, with commas; none lets everybody in",
    )
    operator_key_file: str | None = Field(
        default=None, min_length=1, description="file of keys for parks, restores and cancels by hand; $JAXKV_OPERATOR_KEYS has more"
    )
    files_dir: str | None = Field(
        default=None, min_length=1, description="folder for files and batches of clients (/v1/files, /v1/batches); null has none"
    )
    max_file_mib: int = Field(default=100, ge=1, description="largest file that a client may store, in MiB")
    files_quota_mib: int = Field(
        default=1024, ge=1, description="most that all files together may take, what batches write included, in MiB"
    )
