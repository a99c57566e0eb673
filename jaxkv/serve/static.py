"""The web page at `/` and its few files, read once at the start. Knows no request and no engine, and reads nothing that a request names.

The page runs under a policy that lets it load and reach nothing but this server, and that knows no way from a text to markup.
"""

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-cache",
}


def page_files() -> dict[str, bytes]:
    """The files by their paths; the page itself is `/`."""
    folder = files("jaxkv.serve") / "page"
    found = {file.name: file.read_bytes() for file in folder.iterdir() if _ending(file.name) in TYPES}
    return {("/" if name == "index.html" else f"/page/{name}"): data for name, data in sorted(found.items())}


def page_routes(pages: dict[str, bytes]) -> APIRouter:
    """One route for each file."""
    routes = APIRouter()
    for path, data in pages.items():
        routes.add_api_route(path, _answering(path, data), methods=["GET"], include_in_schema=False)
    return routes


def _answering(path: str, data: bytes) -> Callable[[Request], Awaitable[Response]]:
    media_type = TYPES[_ending("index.html" if path == "/" else path)]
    headers = {**HEADERS, "etag": f'"{hashlib.sha256(data).hexdigest()[:20]}"'}

    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=media_type, headers=headers)

    return answer


def _ending(name: str) -> str:
    return name[name.rfind(".") :]
