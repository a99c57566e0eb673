"""From finished completions to the bodies that OpenAI's clients expect. Knows nothing of files, sockets or the engine's inside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.openai.body import Endpoint, ParsedBody
from jaxkv.openai.prompts import Tokenizer
from jaxkv.openai.tool_answers import ChoiceCalls
from jaxkv.request import Completion, TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot spell


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


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """One token as text; as with OpenAI `bytes:\\xe2\\x82` for part of a character; `token_id:7` without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The logprobs of a chat's choice, one entry per token, the one that ended it included."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
        return {"token": token_text(token_id, tokenizer), "logprob": _finite(logprob), "bytes": raw}

    content = [one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, count: int) -> dict[str, Any]:
    """The logprobs of a completion's choice as parallel lists; `text_offset` counts characters of the answer before each token is added.

    Each of `top_logprobs` maps the `count` most likely tokens, and the chosen one, to their logprobs; where two tokens read the same, the
    more likely one stands.
    """
    return {
        "tokens": [token_text(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(entry, tokenizer) for entry in entries] if count else None,
        "text_offset": _offsets(entries, tokenizer),
    }


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
    logprobs = None if completion.logprobs is None else text_logprobs(completion.logprobs, tokenizer, body.params.logprobs or 0)
    ids = _token_ids(body, completion, tokenizer)
    return {"index": index, "text": completion.text, **ids, "logprobs": logprobs, "finish_reason": completion.finish_reason}


def _token_ids(body: ParsedBody, completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {"token_ids": list(completion.token_ids)} if body.return_token_ids or tokenizer is None else {}


def _top(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(token_text(token_id, tokenizer), _finite(logprob))
    return found


def _offsets(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        return [0] * len(entries)
    stream, offsets, length = tokenizer.stream(), [], 0
    for entry in entries:
        offsets.append(length)
        length += len(stream.step(entry.token_id))
    return offsets


def _finite(logprob: float) -> float:
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB  # a NaN compares false as well
