"""The two routes that generate: /v1/chat/completions and /v1/completions. Knows no sequence's life."""

import secrets
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxkv.errors import RequestError
from jaxkv.openai import Endpoint, Frame
from jaxkv.scheduler import DoesNotFit
from jaxkv.serve.ask import Ask, read_ask
from jaxkv.serve.leave import GONE, ClientLeft, unless_left
from jaxkv.serve.reply import Reply
from jaxkv.serve.schema import body_schema, of_body
from jaxkv.serve.site import Site, request_id
from jaxkv.serve.sse import EventStream, JsonResponse


def completion_routes(site: Site) -> APIRouter:
    """Both endpoints."""
    routes = APIRouter()

    @routes.post(Endpoint.CHAT.value, openapi_extra=of_body(body_schema(Endpoint.CHAT, site.model)))
    async def chat(request: Request) -> Response:
        """A chat's next message."""
        return await complete(site, Endpoint.CHAT, request)

    @routes.post(Endpoint.COMPLETION.value, openapi_extra=of_body(body_schema(Endpoint.COMPLETION, site.model)))
    async def completion(request: Request) -> Response:
        """What follows one or more prompts."""
        return await complete(site, Endpoint.COMPLETION, request)

    return routes


async def complete(site: Site, endpoint: Endpoint, request: Request) -> Response:
    """Read, submit, answer. Everything that can be refused is refused before a stream begins."""
    site.service.check_open()
    data, begun = await site.read(request), list[Reply]()
    try:
        reply = await unless_left(request.receive, begin(site, endpoint, data, request_id(request), begun))
        if reply.is_stream:
            return EventStream(reply.events(), reply.cancel)
        return JsonResponse(await unless_left(request.receive, reply.whole()))
    except ClientLeft:
        return Response(status_code=GONE)
    except BaseException:  # also when this task is cancelled in the very moment in which the engine has taken the request
        for reply in begun:
            reply.cancel()
        raise


async def begin(site: Site, endpoint: Endpoint, data: bytes, name: str, begun: list[Reply]) -> Reply:
    """The engine has the request when this returns, and when it is in `begun`: whoever cannot take the result finds it there."""
    limit_s, reader = site.config.server.request_timeout_s, site.reader()
    ask = await site.service.work(lambda: read_ask(endpoint, data, reader, site.model, limit_s))
    check_len(site, ask)
    fingerprint = site.engine.system_fingerprint  # now: a server that begins to drain has no engine for new requests, and this one is in
    inboxes = await site.service.submit(ask.body.prompts, ask.body.params, name)
    kind = "chatcmpl" if endpoint is Endpoint.CHAT else "cmpl"
    frame = Frame(f"{kind}-{secrets.token_hex(12)}", int(time.time()), site.model, fingerprint)
    reply = Reply(ask, inboxes, frame, site.service, reader.tokenizer)
    begun.append(reply)
    return reply


def check_len(site: Site, ask: Ask) -> None:
    """Refuse what can never fit before the engine's thread looks at each of its tokens, while others wait."""
    has, setting = min((site.engine.longest_prompt, "pool.tokens"), (site.engine.max_len, "model.max_len"))
    for prompt in ask.body.prompts:
        if len(prompt) > has:
            raise RequestError(str(DoesNotFit(len(prompt), has, setting)), "prompt")
