"""The application: routes, and the gate before them. Knows no engine and no socket."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxkv import __version__
from jaxkv.errors import RequestError
from jaxkv.serve import errors
from jaxkv.serve.completions import completion_routes
from jaxkv.serve.errors import ApiError
from jaxkv.serve.facts import fact_routes, tokenizer_routes
from jaxkv.serve.file_routes import FILES, batch_routes, file_routes
from jaxkv.serve.gate import Gate
from jaxkv.serve.hosts import hosts_for
from jaxkv.serve.leave import GONE
from jaxkv.serve.operator import operator_routes
from jaxkv.serve.rest import rest_routes
from jaxkv.serve.site import Site
from jaxkv.serve.sse import JsonResponse
from jaxkv.serve.static import page_files, page_routes

ROUTES = (completion_routes, fact_routes, tokenizer_routes, operator_routes, rest_routes, file_routes, batch_routes)


def build_app(site: Site) -> ASGIApp:
    """The whole server as an ASGI application."""
    app = FastAPI(
        title="jaxkv", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )  # their pages load from elsewhere
    for routes in ROUTES:
        app.include_router(routes(site))
    pages = page_files() if site.config.server.page else {}
    app.include_router(page_routes(pages))
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(Exception, _fault)
    server = site.config.server
    larger = {FILES: (server.max_file_mib, "server.max_file_mib")}
    hosts = hosts_for(server.host, server.allowed_hosts, has_keys=bool(site.keys))
    return Gate(app, site.keys, site.operator_keys, server.max_body_mib, site.responses, hosts, pages, larger)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {name: value for name, value in error.headers.items() if value}
    return JsonResponse(error.body, status_code=error.status, headers=headers)


async def _fault(request: Request, error: Exception) -> Response:
    """A fault of ours; the framework raises it on, and the gate writes it into the log."""
    return await _api_error(request, errors.internal())


async def _left(request: Request, error: Exception) -> Response:
    """The client was gone before its request was whole."""
    return Response(status_code=GONE)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return await _api_error(request, errors.bad_request(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework itself refuses."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        return await _api_error(request, errors.wrong_method(method, path, (error.headers or {}).get("Allow")))
    if error.status_code == 404:
        return await _api_error(request, errors.no_route(method, path))
    return await _api_error(request, ApiError(error.status_code, str(error.detail), errors.INVALID, "invalid_request"))


async def _validation_error(request: Request, error: Exception) -> Response:
    """A parameter that the framework could not read."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"][1:]))
    return await _request_error(request, RequestError(f"{where}: {first['msg']}", where))
