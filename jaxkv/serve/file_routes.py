"""The routes of files and batches: /v1/files, /v1/batches. Know neither disk nor engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import FileResponse
from starlette.types import Receive, Scope, Send

from jaxkv.errors import RequestError
from jaxkv.serve import errors
from jaxkv.serve.ask import read_object
from jaxkv.serve.batches import Batches
from jaxkv.serve.schema import BATCH, UPLOAD, Schema, of_body, of_query
from jaxkv.serve.site import Site
from jaxkv.serve.sse import JsonResponse
from jaxkv.serve.upload import receive_file

FILES, BATCHES = "/v1/files", "/v1/batches"
MAX_LISTED_FILES, MAX_LISTED_BATCHES, LISTED_BATCHES = 10_000, 100, 20
_WORD: Schema = {"type": "string"}
_PAGE: dict[str, Schema] = {"limit": {"type": "integer", "minimum": 1}, "after": _WORD}


class WholeFile(FileResponse):
    """All of a file that is there now. A range is passed over: one that is none would be answered in the framework's words."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, media_type="application/octet-stream", stat_result=path.stat())
        del self.headers["accept-ranges"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = [(name, value) for name, value in scope["headers"] if name != b"range"]
        await super().__call__({**scope, "headers": headers}, receive, send)


def file_routes(site: Site) -> APIRouter:
    """What clients store, and what batches wrote."""
    routes = APIRouter()

    @routes.post(FILES, openapi_extra=of_body(UPLOAD, "multipart/form-data"))
    async def upload(request: Request) -> JsonResponse:
        """Store a file of requests, one a line."""
        store = batches_of(site).store
        return JsonResponse((await receive_file(request, store, site.service, site.config.server.max_file_mib)).to_json())

    @routes.get(FILES, openapi_extra=of_query(**_PAGE, purpose=_WORD, order={"type": "string", "enum": ["asc", "desc"]}))
    async def files(request: Request) -> JsonResponse:
        """All files, the newest first; `purpose`, `order`, `limit` and `after` choose among them."""
        query = request.query_params
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order: got {order[:20]!r}, allowed: asc or desc", "order")
        found = [file for file in batches_of(site).store.all() if query.get("purpose") in (None, file.purpose)]
        return page(
            [file.to_json() for file in (found if order == "asc" else reversed(found))], request, MAX_LISTED_FILES, MAX_LISTED_FILES
        )

    @routes.get(FILES + "/{file_id}")
    async def file(file_id: str) -> JsonResponse:
        """What is known of one file."""
        return JsonResponse(batches_of(site).store.get(file_id).to_json())

    @routes.get(FILES + "/{file_id}/content")
    async def content(file_id: str) -> WholeFile:
        """What is in it."""
        store = batches_of(site).store
        return WholeFile(store.content(store.get(file_id).id))

    @routes.delete(FILES + "/{file_id}")
    async def delete(file_id: str) -> JsonResponse:
        """Forget one file."""
        batches = batches_of(site)
        batches.check_unused(file_id)
        batches.store.delete(file_id)
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})

    return routes


def batch_routes(site: Site) -> APIRouter:
    """Files of requests that are answered when there is time."""
    routes = APIRouter()

    @routes.post(BATCHES, openapi_extra=of_body(BATCH))
    async def create(request: Request) -> JsonResponse:
        """Begin a batch over a stored file."""
        batches = batches_of(site)
        return JsonResponse(batches.create(read_object(await site.read(request))).to_json())

    @routes.get(BATCHES, openapi_extra=of_query(**_PAGE))
    async def listed(request: Request) -> JsonResponse:
        """All batches, the newest first; `limit` and `after` choose among them."""
        return page([record.to_json() for record in batches_of(site).all()], request, LISTED_BATCHES, MAX_LISTED_BATCHES)

    @routes.get(BATCHES + "/{batch_id}")
    async def batch(batch_id: str) -> JsonResponse:
        """How one is doing."""
        return JsonResponse(batches_of(site).get(batch_id).to_json())

    @routes.post(BATCHES + "/{batch_id}/cancel")
    async def cancel(batch_id: str) -> JsonResponse:
        """End one early; the answers that it has stay."""
        return JsonResponse(batches_of(site).cancel(batch_id).to_json())

    return routes


def batches_of(site: Site) -> Batches:
    """The server's batches; raises ApiError where it keeps no files, or is on its way out."""
    if site.batches is None:
        raise errors.no_files()
    if not site.service.is_admitting:
        raise errors.stopping()
    return site.batches


def page(entries: Sequence[dict[str, Any]], request: Request, default: int, most: int) -> JsonResponse:
    """Some of a list, as `limit` and `after` (the id of the last one seen) say."""
    query = request.query_params
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise RequestError(f"limit: got {limit[:20]!r}, allowed: a whole number from 1 to {most}", "limit")
    after, first = query.get("after"), 0
    if after is not None:
        places = [place for place, entry in enumerate(entries) if entry["id"] == after]
        if not places:
            raise RequestError(f"after: there is nothing with the id {after[:40]!r} in this list", "after")
        first = places[0] + 1
    shown = entries[first : first + int(limit)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return JsonResponse({"object": "list", "data": shown, **ends, "has_more": first + len(shown) < len(entries)})
