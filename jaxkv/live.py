"""A sequence as the engine sees it: prompt, parameters, what it has said so far, and the caller's handle. Knows nothing of rows or pages.

Everything a sequence needs to go on lives here, on the host, so that parking its pages parks all of it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxkv.output import Output
from jaxkv.request import Completion, SamplingParams, TokenLogprobs
from jaxkv.scheduler import ContextShift

if TYPE_CHECKING:
    from jaxkv.engine import Engine

OnToken = Callable[["Handle", int], None]


@dataclass(slots=True)
class Live:
    """One sequence that has not ended."""

    seq_id: int
    prompt: np.ndarray  # int32
    params: SamplingParams
    banned: tuple[int, ...]  # ids kept away until min_tokens
    output: Output
    handle: "Handle"
    group: "Group"
    submitted_s: float
    on_token: OnToken | None = None
    name: str | None = None  # what logs and timelines call it
    shift: ContextShift | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None  # None again after a pause: a gap is measured between steps, not across a park
    paused_s: float | None = None  # when it left the device, while it is away
    pause_s: float = 0.0
    longest_pause_s: float = 0.0
    num_parks: int = 0
    num_unread: int = 0  # tokens that are drawn and still on the device
    num_faults: int = 0  # steps that broke off because of it, since its last token
    cached_tokens: int = 0
    drew_ahead: bool = False  # its first token came out of another's chunk, before its own prompt was computed

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """As far as they are wanted and computed, by whichever choice."""
        return self.group.prompt_logprobs

    @property
    def num_generated(self) -> int:
        """Tokens accepted so far."""
        return len(self.output.token_ids)

    @property
    def num_drawn(self) -> int:
        """Tokens so far, those included that the host has not read."""
        return self.num_generated + self.num_unread

    @property
    def context(self) -> list[int]:
        """Prompt and answer so far, without what shifts have dropped."""
        said = [*self.prompt.tolist(), *self.output.token_ids]
        if self.shift is not None:
            del said[self.shift.n_keep : self.shift.n_keep + self.num_dropped]
        return said

    @property
    def num_dropped(self) -> int:
        """Tokens that shifts have dropped before the newest is fed: a context of 38 drops 12 at 38, 50, 62, ... cells."""
        if self.shift is None:
            return 0
        num_cells = len(self.prompt) + self.num_drawn - 1
        return max(0, (num_cells - self.shift.context_len) // self.shift.n_discard + 1) * self.shift.n_discard

    @property
    def prompt_in_context(self) -> int:
        """How many of the context's first tokens are the prompt's. Prompt 10, kept 4, dropped 8: 4, dropped 4: 6."""
        length = len(self.prompt)
        if self.shift is None or length <= self.shift.n_keep:
            return length
        return max(self.shift.n_keep, length - self.num_dropped)

    @property
    def wants_history(self) -> bool:
        """Whether a penalty looks at the tokens so far."""
        p = self.params
        return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1

    def wants_scores(self, end: int) -> bool:
        """Whether the chunk of the prompt that ends before token `end` brings logprobs that are wanted and not here: it may be a replay."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < min(end + 1, len(self.prompt))

    def take_scores(self, start: int, found: list[TokenLogprobs]) -> None:
        """Logprobs of the prompt's tokens from `start` + 1 on; those that are here already stay."""
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        num_known = len(self.prompt_logprobs)
        assert start < num_known, f"logprobs of the prompt from token {start + 1} on, but only {num_known} are known"
        self.prompt_logprobs.extend(found[num_known - 1 - start :])

    def pause(self, now: float) -> None:
        """Its pages leave the device."""
        self.num_parks += 1
        self.paused_s, self.last_token_s = now, None

    def resume(self, now: float) -> float:
        """Its pages are back; returns how long they were away, in seconds."""
        away = 0.0 if self.paused_s is None else now - self.paused_s
        self.pause_s += away
        self.longest_pause_s = max(self.longest_pause_s, away)
        self.paused_s = None
        return away

    def complete(self, now: float, reason: str, error: str | None = None) -> Completion:
        """The answer as it stands."""
        if self.output.finish_reason is None:
            try:
                self.output.finish(reason)
            except Exception:  # the tokenizer's trouble: there is an end all the same, with the text so far
                self.output.finish_reason = reason
        return Completion(
            token_ids=self.output.token_ids,
            text=self.output.text,
            finish_reason=reason if error is not None else str(self.output.finish_reason),
            prompt_tokens=len(self.prompt),
            seed=self.params.seed,
            logprobs=self.output.logprobs,
            error=error,
            choice=self.handle.choice,
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            num_parks=self.num_parks,
            pause_s=self.pause_s,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.submitted_s,
            e2e_s=now - self.submitted_s,
        )


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Where a request is and what it has been through so far."""

    state: str
    num_tokens: int
    num_parks: int
    pause_s: float
    ttft_s: float | None


@dataclass(slots=True)
class Handle:
    """A caller's view of one request, or of one choice of it: iterate for token ids, `result()` for the answer, `cancel()` to leave.

    Iterating and `result()` take engine steps, which serve every other request too.
    """

    seq_id: int
    _engine: "Engine"
    token_ids: list[int] = field(default_factory=list)
    completion: Completion | None = None
    will_truncate_at: int | None = None  # the pool itself ends the answer here, with finish_reason "length"
    choice: int = 0

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self.completion is not None

    @property
    def stats(self) -> RequestStats:
        """Its state and figures now; the state of an ended one is its finish reason."""
        if self.completion is not None:
            c = self.completion
            return RequestStats(c.finish_reason, len(c.token_ids), c.num_parks, c.pause_s, c.ttft_s)
        return self._engine.request_stats(self.seq_id)

    def cancel(self) -> None:
        """End the request now, in whatever state it is; nothing happens when it has ended."""
        if not self.done:
            self._engine.cancel(self)

    def result(self) -> Completion:
        """Step until the answer is complete."""
        while self.completion is None:
            self._engine.step()
        return self.completion

    def __iter__(self) -> Iterator[int]:
        given = 0
        while True:
            while given < len(self.token_ids):
                yield self.token_ids[given]
                given += 1
            if self.done:
                return
            self._engine.step()


@dataclass(slots=True)
class Group:
    """A caller's view of one request with any number of choices, each of which has a handle of its own, in order."""

    choices: list[Handle] = field(default_factory=list)
    first_token_s: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)  # as far as they are wanted and computed

    @property
    def done(self) -> bool:
        """Whether all choices are complete."""
        return all(handle.done for handle in self.choices)

    @property
    def finish_reason(self) -> str:
        """How the request as a whole ended: an error or a cancel of one choice is one of the request, else as the first choice did."""
        reasons = [handle.completion.finish_reason for handle in self.choices if handle.completion is not None]
        return next((worst for worst in ("error", "cancelled") if worst in reasons), reasons[0])

    def cancel(self) -> None:
        """End all choices that have not ended."""
        for handle in self.choices:
            handle.cancel()

    def result(self) -> list[Completion]:
        """Step until all choices are complete."""
        return [handle.result() for handle in self.choices]
