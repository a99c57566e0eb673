"""Turns the tokens of one sequence into text, one accepted token at a time, and says when it ends.

Owns the detokenizer's and the stop strings' buffers, so that they stay with the request while it is parked. Knows nothing of rows, pages
or how a token was chosen.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from jaxkv.errors import JaxkvError
from jaxkv.request import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from jaxkv.guide import Guide


class TextStream(Protocol):
    """Bytes of tokens in, whole characters out."""

    def step(self, token_id: int, /) -> str: ...

    def flush(self) -> str: ...


class Detokenizer(Protocol):
    """The one thing needed of a tokenizer here."""

    def stream(self, skip_special_tokens: bool = True) -> TextStream: ...


class Output:
    """A fold over accepted tokens: the same tokens give the same text and end, however they were made.

    Several stop strings may be complete at the same token: the one that begins first in the text wins, and the text is cut before it.
    Text that could still become a stop string is held back until it cannot, or until the end. No stop of any kind ends a sequence that has
    fewer than `min_tokens` tokens; a stop string that was complete by then stays in the text. The token that ends the sequence counts and
    is in `token_ids`, but an end-of-text or stop token is not in `text`. A `guide` goes on with every token; where it says that the answer
    is whole, that is a stop whatever `min_tokens` says, since nothing could follow.
    """

    def __init__(
        self,
        tokenizer: Detokenizer | None,
        eos_ids: Collection[int],
        params: SamplingParams,
        limit: int | None,
        guide: "Guide | None" = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"limit: got {limit}; allowed: at least 1")
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self._stream = tokenizer.stream(params.skip_special_tokens) if tokenizer is not None else None
        self._end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._stops = params.stop
        self._min_tokens = params.min_tokens
        self._limit = limit
        self.guide = guide
        self._text = ""
        self._shown = 0  # characters that take_delta has given away
        self._searched = 0  # a stop string that ends here or before is no longer looked for

    def accept(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str | None:
        """Take the next token; the finish reason ("stop" or "length") once it was the last. JaxkvError where the guide is at a loss."""
        assert self.finish_reason is None, f"token {token_id} after the end ({self.finish_reason})"
        self.token_ids.append(token_id)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs)
        if self.guide is not None:
            self.guide.advance(token_id)
        may_stop = len(self.token_ids) >= self._min_tokens
        if may_stop and token_id in self._end_ids:
            return self.finish("stop")
        if self._stream is not None:
            self._text += self._stream.step(token_id)
        if may_stop and self._cut_at_stop():
            self.finish_reason = "stop"
        elif self.guide is not None and self.guide.is_complete:
            return self.finish("stop")
        elif self._limit is not None and len(self.token_ids) >= self._limit:
            return self.finish("length")
        elif self.guide is not None and self.guide.is_stuck:
            raise JaxkvError(self.guide.reason)
        self._searched = len(self._text)
        return self.finish_reason

    def finish(self, reason: str) -> str:
        """End here for `reason`: what was held back becomes text, unless it completes a stop string."""
        assert self.finish_reason is None
        if self._stream is not None:
            self._text += self._stream.flush()
        is_cut = len(self.token_ids) >= self._min_tokens and self._cut_at_stop()
        self.finish_reason = "stop" if is_cut and reason == "length" else reason
        return self.finish_reason

    @property
    def text(self) -> str:
        """The text that is certain: all of it once finished."""
        return self._text[: len(self._text) - self._num_held()]

    def take_delta(self) -> str:
        """The text that became certain since the last call."""
        text = self.text
        delta, self._shown = text[self._shown :], len(text)
        return delta

    def _cut_at_stop(self) -> bool:
        found = [start for stop in self._stops if (start := self._text.find(stop, max(0, self._searched - len(stop) + 1))) >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _num_held(self) -> int:
        """Length of the longest end of the text that a stop string begins with, e.g. 2 for text "well: ##" and stop "###"."""
        if self.finish_reason is not None or not self._stops:
            return 0
        longest = min(max(map(len, self._stops)) - 1, len(self._text))
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(self._text[-n:]) for stop in self._stops)), 0)
