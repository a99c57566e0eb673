"""From finished completions to the bodies that OpenAI's clients expect. Knows nothing of files, sockets or the engine's inside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.openai.body import Endpoint, ParsedBody
from jaxkv.openai.echo import echo_of, join_logprobs
from jaxkv.openai.logprobs import Offsets, chat_logprobs, text_logprobs
from jaxkv.openai.prompts import Tokenizer
from jaxkv.openai.tool_answers import ChoiceCalls
from jaxkv.request import Completion


@dataclass(frozen=True, slots=True)
class Frame:
    """What an answer carries beside its choices. `id` and `created` are the only parts that differ between equal runs."""

    id: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: str


def build_answer(
    body: ParsedBody, completions: Sequence[Completion], frame: Frame, tokenizer: Tokenizer | None, truncates_at: int | None = None
) -> dict[str, Any]:
    """The whole answer, one choice per completion, those of the first prompt first. Each prompt counts once in the usage.

    `truncates_at`: the number of tokens at which the pool ends it, where it might.
    """
    is_chat = body.endpoint is Endpoint.CHAT
    build_choice = _chat_choice if is_chat else _text_choice
    answer = {
        "id": frame.id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": frame.created,
        "model": body.model or frame.model,
        "system_fingerprint": frame.system_fingerprint,
        "choices": [build_choice(index, body, completion, tokenizer) for index, completion in enumerate(completions)],
        "usage": build_usage(body, completions),
        "seed": completions[0].seed,
    }
    return answer if truncates_at is None else answer | {"jaxkv": {"truncates_at": truncates_at}}


def build_usage(body: ParsedBody, completions: Sequence[Completion]) -> dict[str, Any]:
    """What was read and made; each prompt counts once, however many choices it has."""
    firsts = completions[:: len(completions) // len(body.prompts)]
    prompt_tokens = sum(completion.prompt_tokens for completion in firsts)
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if body.return_cached_tokens:  # only where asked for: it depends on who was there before
        usage["prompt_tokens_details"] = {"cached_tokens": sum(completion.cached_tokens for completion in firsts)}
    return usage


def error_body(error: Exception | str, code: str, kind: str = "invalid_request_error") -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "param", None), "code": code}}


def choice_calls(body: ParsedBody, index: int) -> ChoiceCalls | None:
    """What finds the calls in a choice, if there may be any."""
    return None if body.tool_use is None else ChoiceCalls(body.tool_use, body.prompts[0], body.params.seed, index)


def _chat_choice(index: int, body: ParsedBody, completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    logprobs = None if completion.logprobs is None else chat_logprobs(completion.logprobs, tokenizer)
    message, finish_reason = {"content": completion.text}, completion.finish_reason
    if (calls := choice_calls(body, index)) is not None:
        message = calls.message(completion.text)
        finish_reason = calls.finish_reason(finish_reason)
    return {
        "index": index,
        "message": {"role": "assistant", **message},
        **_token_ids(body, completion, tokenizer),
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def _text_choice(index: int, body: ParsedBody, completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    echo, count, logprobs = echo_of(body, index, tokenizer), body.params.logprobs or 0, None
    before = "" if echo is None else echo.text
    if (entries := completion.logprobs) is not None:
        offsets = Offsets(tokenizer, body.params.skip_special_tokens, len(before)).take(entries)
        logprobs = text_logprobs(entries, tokenizer, count, offsets)
        if echo is not None:
            logprobs = join_logprobs(echo.logprobs(completion.prompt_logprobs or [], tokenizer, count), logprobs)
    ids = _token_ids(body, completion, tokenizer)
    return {"index": index, "text": before + completion.text, **ids, "logprobs": logprobs, "finish_reason": completion.finish_reason}


def _token_ids(body: ParsedBody, completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"token_ids": list(completion.token_ids)} if body.return_token_ids or tokenizer is None else {}
