"""The routes for whoever runs the server: /slots, parks and cancels by hand, /metrics. Generate nothing, and never show a text."""

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxkv import __version__
from jaxkv.config import Config
from jaxkv.errors import RequestError
from jaxkv.openai.values import refuse
from jaxkv.serve import errors
from jaxkv.serve.interface import ServeEngine
from jaxkv.serve.keys import bearer
from jaxkv.serve.metrics import CONTENT_TYPE
from jaxkv.serve.schema import of_query
from jaxkv.serve.site import Site
from jaxkv.serve.sse import JsonResponse


def operator_routes(site: Site) -> APIRouter:
    """What goes on inside, and a hand on it."""
    routes = APIRouter()

    @routes.get("/slots")
    async def slots() -> JsonResponse:
        """Every row, and every sequence that has none."""
        return JsonResponse(await site.service.call(lambda engine: list_slots(engine, site.config.scheduler.rows), to_look=True))

    @routes.get("/pool")
    async def pool() -> JsonResponse:
        """What a picture of the pool needs, in one look."""
        return JsonResponse(await site.service.call(lambda engine: look_at_pool(engine, site.config), to_look=True))

    @routes.post("/slots/{slot_id}", openapi_extra=of_query(action={"type": "string", "enum": list(ACTIONS)}))
    async def act(slot_id: str, request: Request) -> JsonResponse:
        """Park, restore or cancel one sequence; needs an operator's key."""
        check_operator(site, request)
        action = request.query_params.get("action")
        if action not in ACTIONS:
            raise refuse("action", action, ", ".join(ACTIONS))
        if not (slot_id.isascii() and slot_id.isdigit() and len(slot_id) < 18):
            raise errors.no_slot(slot_id)
        return JsonResponse(await site.service.call(lambda engine: do(engine, int(slot_id), action), to_look=True))

    @routes.get("/metrics", openapi_extra=of_query(aliases={"type": "string", "enum": ["vllm"]}))
    async def metrics(request: Request) -> Response:
        """Figures for Prometheus; `?aliases=vllm` adds vLLM's names."""
        facts, aliases = metric_facts(site), request.query_params.get("aliases") == "vllm"

        def render(engine: ServeEngine | None) -> bytes:
            return site.meter.render(engine, dict(site.responses), facts, aliases=aliases)

        rests = await site.service.wait_rest()
        body = render(None) if rests else await site.service.call(render, to_look=True)
        return Response(body, media_type=CONTENT_TYPE)

    return routes


def check_operator(site: Site, request: Request) -> None:
    """Raise ApiError for whoever has no operator's key."""
    if not site.operator_keys.accept(bearer(request.headers.get("authorization"))):
        raise errors.not_operator()


def list_slots(engine: ServeEngine, num_rows: int) -> list[dict[str, Any]]:
    """The rows in order, then those without one."""
    now, status = time.perf_counter(), engine.status()
    found = [slot(sequence, now) for sequence in status.sequences]
    taken = {entry["row"] for entry in found}
    idle = [{"id": None, "row": row, "state": "idle"} for row in range(num_rows) if row not in taken]
    return sorted([*found, *idle], key=lambda entry: (entry["row"] is None, entry["row"] or 0, entry["id"] or 0))


def look_at_pool(engine: ServeEngine, config: Config) -> dict[str, Any]:
    """Pages, rows, copies and who has what; never a text. `clock_s` is of no clock but its own, for differences."""
    now, status = time.perf_counter(), engine.status()
    return {
        "clock_s": round(now, 4),
        "page_size": config.pool.page_size,
        "pages": {
            "total": status.pool_pages,
            "free": status.pool_pages_free,
            "cached": status.pool_pages_cached,
            "leaving": status.pool_pages_leaving,
        },
        "pool_bytes": status.pool_bytes,
        "host_bytes": status.host_bytes,
        "host_budget_bytes": status.host_budget_bytes,
        "rows": {"busy": status.rows, "total": config.scheduler.rows},
        "parked": status.parked,
        "waiting": status.waiting,
        "copies": {"to_host": status.copies_out, "to_device": status.copies_back},
        "generated_tokens": status.generated_tokens,
        "num_parks": status.num_parks,
        "num_restores": status.num_restores,
        "sequences": [slot(sequence, now) for sequence in status.sequences],
    }


def slot(sequence: Any, now: float) -> dict[str, Any]:
    """One sequence; never its text."""
    return {
        "id": sequence.seq_id,
        "request_id": sequence.name,
        "row": sequence.row,
        "state": sequence.state,
        "n_tokens": sequence.num_tokens,
        "n_generated": sequence.num_generated,
        "n_pages": sequence.num_pages,
        "n_pages_own": sequence.num_pages_own,
        "n_image_pages": sequence.image_pages,
        "host_bytes": sequence.host_bytes,
        "priority": sequence.priority,
        "is_preempted": sequence.since_s is not None and sequence.state != "waiting",
        "is_held": sequence.is_held,
        "n_preempt": sequence.num_parks,
        "waiting_s": None if sequence.since_s is None else round(now - sequence.since_s, 3),
    }


def do(engine: ServeEngine, seq_id: int, action: str) -> dict[str, Any]:
    """Carry out an action; a refusal is a 400 with its reason."""
    live = engine.live(seq_id)
    if live is None:
        raise errors.no_slot(str(seq_id))
    refusal = ACTIONS[action](engine, live)
    if refusal:
        raise RequestError(f"{action}: {refusal}", "action")
    return {"id": seq_id, "action": action}


def _cancel(engine: ServeEngine, live: Any) -> str:
    live.handle.cancel()
    return ""


ACTIONS: dict[str, Any] = {
    "park": lambda engine, live: engine.hold(live.seq_id),
    "restore": lambda engine, live: engine.release(live.seq_id),
    "cancel": _cancel,
}


def metric_facts(site: Site) -> dict[str, str]:
    """Labels of the one metric that says what runs here."""
    engine: Any = site.service.engine
    kinds = () if engine is None else engine.parts.transfer.stats.memory_kinds
    return {
        "version": __version__,
        "model": site.model,
        "rows": str(site.config.scheduler.rows),
        "pool_tokens": "" if engine is None else str(engine.capacity),
        "image_memory": ",".join(sorted(kinds)),
    }
