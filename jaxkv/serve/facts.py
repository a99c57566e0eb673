"""The routes that tell and translate: models, health, version, props, and the tokenizer. Generate nothing."""

from typing import Any

from fastapi import APIRouter, Request

from jaxkv import __version__
from jaxkv.errors import RequestError
from jaxkv.openai.prompts import Tokenizer, render_messages
from jaxkv.openai.template import read_template_wish
from jaxkv.openai.tools import read_tool_use
from jaxkv.openai.values import boolean, text, token_ids
from jaxkv.serve import errors
from jaxkv.serve.ask import check_model, read_object
from jaxkv.serve.schema import DETOKENIZE, TOKENIZE, of_body
from jaxkv.serve.site import Site
from jaxkv.serve.sse import JsonResponse


def fact_routes(site: Site) -> APIRouter:
    """What there is, and whether it is up."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> JsonResponse:
        """200 when requests are served; 503 while the model loads, while the server shuts down, and after a fault."""
        site.service.check_open()
        return JsonResponse({"status": "ok"})

    @routes.get("/version")
    async def version() -> JsonResponse:
        """The version of this server."""
        return JsonResponse({"version": __version__})

    @routes.get("/v1/models")
    async def models() -> JsonResponse:
        """The one model there is."""
        return JsonResponse({"object": "list", "data": [model_facts(site)]})

    @routes.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> JsonResponse:
        """That model, or 404."""
        check_model({"model": model_id}, site.model)
        return JsonResponse(model_facts(site))

    @routes.get("/props")
    async def props() -> JsonResponse:
        """Sizes, and what requests get that say nothing else."""
        engine, config = site.engine, site.config
        return JsonResponse(
            {
                "model": site.model,
                "model_type": engine.model_config.model_type,
                "system_fingerprint": engine.system_fingerprint,
                "max_model_len": site.max_model_len,
                "pool_tokens": engine.capacity,
                "page_size": config.pool.page_size,
                "rows": config.scheduler.rows,
                "request": config.request.model_dump(mode="json", exclude_none=True),
                "chat_template": _templates(engine.tokenizer).get("default"),
                "version": __version__,
            }
        )

    return routes


def tokenizer_routes(site: Site) -> APIRouter:
    """Text to tokens and back."""
    routes = APIRouter()

    @routes.post("/tokenize", openapi_extra=of_body(TOKENIZE))
    async def tokenize(request: Request) -> JsonResponse:
        """Token ids of a prompt, or of messages as the chat template writes them."""
        tokenizer, body = _tokenizer(site), read_object(await site.read(request))
        check_model(body, site.model)
        tokens, texts = await site.service.work(lambda: _encode_and_spell(tokenizer, body))
        return JsonResponse({"count": len(tokens), "max_model_len": site.max_model_len, "tokens": tokens, "token_strs": texts})

    @routes.post("/detokenize", openapi_extra=of_body(DETOKENIZE))
    async def detokenize(request: Request) -> JsonResponse:
        """The text of token ids, special ones spelled out."""
        tokenizer, body = _tokenizer(site), read_object(await site.read(request))
        check_model(body, site.model)
        read = token_ids(site.engine.model_config.vocab_size)
        return JsonResponse({"prompt": await site.service.work(lambda: _decode(tokenizer, read("tokens", body.get("tokens"))))})

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> JsonResponse:
        """What clients need to know of the tokenizer."""
        tokenizer: Any = _tokenizer(site)
        return JsonResponse(
            {
                "tokenizer_class": type(tokenizer).__name__,
                "vocab_size": tokenizer.vocab_size,
                "bos_token": getattr(tokenizer, "bos_token", None),
                "eos_token": getattr(tokenizer, "eos_token", None),
                "chat_template": _templates(tokenizer).get("default"),
                "model_max_length": site.max_model_len,
            }
        )

    return routes


def model_facts(site: Site) -> dict[str, Any]:
    """The model as clients list it."""
    facts = {"id": site.model, "object": "model", "created": site.started, "owned_by": "jaxkv", "root": site.model, "parent": None}
    return {**facts, "max_model_len": site.max_model_len}


def _tokenizer(site: Site) -> Tokenizer:
    tokenizer = site.engine.tokenizer
    if tokenizer is None:
        raise errors.bad_request(RequestError("this model has no tokenizer, so only prompts of token ids work"))
    return tokenizer


def _templates(tokenizer: Any) -> dict[str, str]:
    return dict(getattr(tokenizer, "chat_templates", {}))


def _encode_and_spell(tokenizer: Tokenizer, body: dict[str, Any]) -> tuple[list[int], list[str] | None]:
    """The ids, and where it is wished each one's text."""
    wants_texts, tokens = _flag(body, "return_token_strs", False), _encode(tokenizer, body)
    texts = [tokenizer.token_bytes(token_id).decode(errors="replace") for token_id in tokens] if wants_texts else None
    return tokens, texts


def _encode(tokenizer: Tokenizer, body: dict[str, Any]) -> list[int]:
    if body.get("messages") is not None:
        use, wish = read_tool_use({"tools": body.get("tools")}, set()), read_template_wish(body)
        rendered = render_messages(body["messages"], tokenizer, () if use is None else use.tools, wish)[0]
        return tokenizer.encode(rendered, _flag(body, "add_special_tokens", False))
    if body.get("prompt") is None:
        raise RequestError("prompt: is missing; give prompt or messages", "prompt")
    return tokenizer.encode(text("prompt", body["prompt"]), _flag(body, "add_special_tokens", True))


def _flag(body: dict[str, Any], field: str, default: bool) -> bool:
    """A truth value; null is the same as absent."""
    return boolean(field, default if body.get(field) is None else body[field])


def _decode(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    stream = tokenizer.stream(False)
    return "".join(map(stream.step, ids)) + stream.flush()
