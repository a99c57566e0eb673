"""Logprobs as OpenAI's clients read them: a chat's list of tokens, a completion's parallel lists. Knows no answer around them."""

from collections.abc import Sequence
from typing import Any

from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot spell


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
        return {"token": token_text(token_id, tokenizer), "logprob": finite(logprob), "bytes": raw}

    content = [one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


def text_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None, count: int, offsets: list[int]) -> dict[str, Any]:
    """The logprobs of a completion's choice as parallel lists; `offsets` are the characters of its text before each token.

    Each of `top_logprobs` maps the `count` most likely tokens, and the chosen one, to their logprobs; where two tokens read the same, the
    more likely one stands.
    """
    return {
        "tokens": [token_text(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": [top_of(entry, tokenizer) for entry in entries] if count else None,
        "text_offset": offsets,
    }


def top_of(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, float]:
    """The likeliest tokens and the chosen one, as text."""
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(token_text(token_id, tokenizer), finite(logprob))
    return found


class Offsets:
    """Counts the characters before each token of an answer, which may come in pieces."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool, before: int = 0) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream(skip_special_tokens)
        self._length = before

    def take(self, entries: Sequence[TokenLogprobs]) -> list[int]:
        """Where each of the next tokens begins."""
        offsets = []
        for entry in entries:
            offsets.append(self._length)
            self._length += 0 if self._stream is None else len(self._stream.step(entry.token_id))
        return offsets


def finite(logprob: float) -> float:
    """The logprob, as far as JSON can spell it."""
    return logprob if logprob >= LEAST_LOGPROB else LEAST_LOGPROB  # a NaN compares false as well
