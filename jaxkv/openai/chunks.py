"""A streamed answer, piece by piece: the bodies of the events that OpenAI's clients expect, in their order.

A choice begins with its role (chats only), goes on with text, and ends with a piece that has nothing but the finish reason; the usage comes
last of all, in a piece without choices. A prompt that is given back stands in its choice's first piece. Knows nothing of sockets, or of how
events are written on one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.openai.answers import Frame, choice_calls
from jaxkv.openai.body import Endpoint, ParsedBody
from jaxkv.openai.echo import echo_of, join_logprobs
from jaxkv.openai.logprobs import Offsets, chat_logprobs, text_logprobs
from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a client wants beside the text."""

    include_usage: bool = False
    continuous_usage: bool = False


class Chunks:
    """Makes the pieces of one answer. `usage` is told with each of them where that was asked for."""

    def __init__(self, body: ParsedBody, frame: Frame, options: StreamOptions) -> None:
        self._is_chat = body.endpoint is Endpoint.CHAT
        self._options = options
        self._head = {
            "id": frame.id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": frame.created,
            "model": body.model or frame.model,
            "system_fingerprint": frame.system_fingerprint,
        }

    def role(self, index: int) -> dict[str, Any] | None:
        """How a choice of a chat begins; a completion begins with its text."""
        if not self._is_chat:
            return None
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def end(self, index: int, finish_reason: str) -> dict[str, Any]:
        """How a choice ends."""
        content: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def chunk(self, choice: dict[str, Any], usage: dict[str, int], **extra: Any) -> dict[str, Any]:
        """A piece with one choice."""
        told = {"usage": usage} if self._options.continuous_usage else {"usage": None} if self._options.include_usage else {}
        return {**self._head, "choices": [choice], **told, **extra}

    def last(self, usage: dict[str, Any]) -> dict[str, Any] | None:
        """What follows the last choice, if anything."""
        return {**self._head, "choices": [], "usage": usage} if self._options.include_usage else None


class ChoicePieces:
    """The text of one choice as it grows. Tokens without text (half a character, the beginning of a stop string) go with the next piece."""

    def __init__(self, index: int, body: ParsedBody, tokenizer: Tokenizer | None) -> None:
        self._index, self._body, self._tokenizer = index, body, tokenizer
        self._is_chat = body.endpoint is Endpoint.CHAT
        self._wants_ids = body.return_token_ids or tokenizer is None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._calls = choice_calls(body, index)
        self._echo = echo_of(body, index, tokenizer)
        self._before: dict[str, Any] | None = None  # the prompt's logprobs, until they are told
        before = 0 if self._echo is None else len(self._echo.text)
        self._offsets = Offsets(tokenizer, body.params.skip_special_tokens, before)

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        *,
        is_last: bool,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None = None,
    ) -> list[dict[str, Any]]:
        """The choices of the next pieces; none where there is nothing to say yet."""
        self._token_ids += token_ids
        self._logprobs += logprobs
        if self._echo is not None and (token_ids or is_last):
            text = self._give_back(prompt_logprobs or ()) + text
        contents = self._contents(text, is_last)
        has_rest = is_last and ((self._wants_ids and self._token_ids) or self._logprobs or self._before)
        if not contents and (has_rest or (self._tokenizer is None and self._token_ids)):
            contents = [{"delta": {"content": ""}} if self._is_chat else {"text": ""}]
        return [self._choice(content) for content in contents]

    def finish_reason(self, reason: str) -> str:
        """Why the choice ended, as its client is told."""
        return reason if self._calls is None else self._calls.finish_reason(reason)

    def _contents(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """What is new; several pieces only where there are calls."""
        if self._calls is not None:
            return [{"delta": delta} for delta in self._calls.deltas(text, is_last=is_last)]
        content: dict[str, Any] = {"delta": {"content": text}} if self._is_chat else {"text": text}
        return [content] if text else []

    def _choice(self, content: dict[str, Any]) -> dict[str, Any]:
        """A choice with the tokens that nobody was told of: the first of several pieces has them all."""
        ids = {"token_ids": self._token_ids} if self._wants_ids else {}
        choice = {"index": self._index, **content, **ids, "logprobs": self._told_logprobs(), "finish_reason": None}
        self._token_ids, self._logprobs = [], []
        return choice

    def _told_logprobs(self) -> dict[str, Any] | None:
        if self._body.params.logprobs is None:
            return None
        if self._is_chat:
            return chat_logprobs(self._logprobs, self._tokenizer)
        told = text_logprobs(self._logprobs, self._tokenizer, self._body.params.logprobs, self._offsets.take(self._logprobs))
        before, self._before = self._before, None
        return told if before is None else join_logprobs(before, told)

    def _give_back(self, entries: Sequence[TokenLogprobs | None]) -> str:
        """The prompt, once; its logprobs go with the piece."""
        echo, self._echo = self._echo, None
        assert echo is not None
        if self._body.params.logprobs is not None:
            self._before = echo.logprobs(entries, self._tokenizer, self._body.params.logprobs)
        return echo.text
