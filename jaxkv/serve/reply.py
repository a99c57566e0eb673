"""The answer to one completion request, whole or as a stream, from the inboxes of its sequences. Knows no route and no socket.

A park never shows in the answer: a stream gets comments (`: parked`, `: restored`, and something at least every other second), which
clients pass over.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from jaxkv.openai import Frame, build_answer
from jaxkv.openai.answers import build_usage
from jaxkv.openai.chunks import ChoicePieces, Chunks
from jaxkv.openai.prompts import Tokenizer
from jaxkv.request import Completion
from jaxkv.serve import errors
from jaxkv.serve.ask import Ask
from jaxkv.serve.inbox import Inbox
from jaxkv.serve.service import Service
from jaxkv.serve.sse import DONE, comment, event

KEEP_ALIVE_S = 1.0


class Reply:
    """One request on its way: its sequences are the engine's already."""

    def __init__(self, ask: Ask, inboxes: Sequence[Inbox], frame: Frame, service: Service, tokenizer: Tokenizer | None) -> None:
        self._ask, self._inboxes, self._frame = ask, inboxes, frame
        self._service, self._tokenizer = service, tokenizer
        self._deadline = None if ask.timeout_s is None else time.monotonic() + ask.timeout_s
        self._was_away = [False] * len(inboxes)
        self._has_begun = [False] * len(inboxes)
        self._has_ended = [False] * len(inboxes)
        self._chunks = Chunks(ask.body, frame, ask.options)
        self._pieces = [ChoicePieces(index, ask.body, tokenizer) for index in range(len(inboxes))]
        self._noticed = False
        self._num_tokens = 0  # told in a stream so far

    @property
    def is_stream(self) -> bool:
        """Whether events are asked for."""
        return self._ask.is_stream

    def cancel(self) -> None:
        """End what has not ended; to be called whenever nobody goes on reading."""
        self._service.cancel(self._inboxes)

    async def whole(self) -> dict[str, Any]:
        """The body of the answer once every sequence has ended; raises ApiError where one cannot."""
        try:
            while not all(self._is_over(inbox) for inbox in self._inboxes):
                await self._wait(None)
        finally:
            self.cancel()
        return build_answer(self._ask.body, self._completions, self._frame, self._tokenizer, self._truncates_at)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; what goes wrong is one of them. Whoever stops reading calls `cancel`."""
        try:
            while not all(self._has_ended):
                for part in self._unread():
                    yield part
                if not all(self._has_ended) and not await self._wait(KEEP_ALIVE_S):
                    yield comment("keep-alive")
            if (last := self._chunks.last(build_usage(self._ask.body, self._completions))) is not None:
                yield event(last)
        except errors.ApiError as error:
            yield event(error.body)
        yield DONE

    def _unread(self) -> Iterator[bytes]:
        """Whatever came of any sequence since the last time."""
        for index, inbox in enumerate(self._inboxes):
            if inbox.is_away != self._was_away[index]:
                self._was_away[index] = inbox.is_away
                if not self._has_ended[index]:
                    yield comment("parked" if inbox.is_away else "restored")
            if not self._has_ended[index]:
                yield from self._choice(index, inbox)

    def _choice(self, index: int, inbox: Inbox) -> Iterator[bytes]:
        is_over, delta, done = self._is_over(inbox), inbox.take(), inbox.completion
        self._num_tokens += len(delta.token_ids)
        of_prompt = done.prompt_logprobs if done is not None and not done.token_ids else delta.prompt_logprobs
        pieces = self._pieces[index].add(delta.text, delta.token_ids, delta.logprobs, is_last=is_over, prompt_logprobs=of_prompt)
        if pieces or is_over:
            yield from self._begin(index)
        for piece in pieces:
            yield event(self._chunks.chunk(piece, self._usage, **self._notice()))
        if is_over and inbox.completion is not None:
            self._has_ended[index] = True
            reason = self._pieces[index].finish_reason(inbox.completion.finish_reason)
            yield event(self._chunks.chunk(self._chunks.end(index, reason), self._usage))

    def _begin(self, index: int) -> Iterator[bytes]:
        if not self._has_begun[index]:
            self._has_begun[index] = True
            if (role := self._chunks.role(index)) is not None:
                yield event(self._chunks.chunk(role, self._usage, **self._notice()))

    def _notice(self) -> dict[str, Any]:
        """Where the pool may end the answer, the first piece of all says so."""
        at, self._noticed = None if self._noticed else self._truncates_at, True
        return {} if at is None else {"jaxkv": {"truncates_at": at}}

    def _is_over(self, inbox: Inbox) -> bool:
        """Whether a sequence has its answer; raises ApiError where it never will."""
        reason = None if inbox.completion is None else inbox.completion.finish_reason
        if reason == "error":
            raise errors.engine_error()
        if reason == "cancelled":
            raise self._service.why_cancelled()
        return reason is not None

    async def _wait(self, most_s: float | None) -> bool:
        """Until something comes, or so many seconds; False if nothing came. Raises ApiError past the deadline."""
        wake, left_s = self._inboxes[0].wake, None if self._deadline is None else self._deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise errors.deadline(self._ask.timeout_s or 0)
        try:
            async with asyncio.timeout(min((s for s in (most_s, left_s) if s is not None), default=None)):
                await wake.wait()
        except TimeoutError:
            return False
        wake.clear()
        return True

    @property
    def _completions(self) -> list[Completion]:
        return [inbox.completion for inbox in self._inboxes if inbox.completion is not None]

    @property
    def _truncates_at(self) -> int | None:
        return min((inbox.truncates_at for inbox in self._inboxes if inbox.truncates_at is not None), default=None)

    @property
    def _usage(self) -> dict[str, int]:
        prompt_tokens = sum(map(len, self._ask.body.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt_tokens + self._num_tokens,
        }
