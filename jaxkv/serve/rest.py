"""The routes that put the server to sleep and wake it: all memory of the device and the host is free meanwhile. Know no engine."""

from fastapi import APIRouter, Request

from jaxkv.errors import RequestError
from jaxkv.serve.operator import check_operator
from jaxkv.serve.schema import of_query
from jaxkv.serve.site import Site
from jaxkv.serve.sse import JsonResponse

LEVELS = ("1", "2")  # let what runs end, within server.drain_s; end it at once


def rest_routes(site: Site) -> APIRouter:
    """Sleep, wake, and which of the two it is."""
    routes = APIRouter()

    @routes.post("/sleep", openapi_extra=of_query(level={"type": "string", "enum": list(LEVELS)}))
    async def sleep(request: Request) -> JsonResponse:
        """Let what runs end (`?level=2` ends it at once), and free pool, weights and images; needs an operator's key."""
        check_operator(site, request)
        level = request.query_params.get("level", "1")
        if level not in LEVELS:
            raise RequestError(f"level: got {level[:20]!r}, allowed: 1 (what runs may end in server.drain_s) or 2 (it is ended)", "level")
        await site.service.sleep(site.config.server.drain_s if level == "1" else 0)
        return state(site)

    @routes.post("/wake")
    @routes.post("/wake_up", include_in_schema=False)  # as vLLM calls it
    async def wake(request: Request) -> JsonResponse:
        """Load the model again, with the programs that were compiled before; needs an operator's key."""
        check_operator(site, request)
        await site.service.wake()
        return state(site)

    @routes.get("/is_sleeping")
    async def is_sleeping() -> JsonResponse:
        """Whether it does, as vLLM answers."""
        return state(site)

    return routes


def state(site: Site) -> JsonResponse:
    """Whether the server sleeps."""
    return JsonResponse({"is_sleeping": site.service.is_sleeping})
