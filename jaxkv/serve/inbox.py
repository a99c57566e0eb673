"""What has come of a sequence and nobody has read yet. Lives in the event loop; knows no engine and no socket.

A reader who is slow finds more in one piece: what waits for it is never more than the answer itself.
"""

import asyncio
from dataclasses import dataclass, field

from jaxkv.request import Completion, TokenLogprobs

AWAY = frozenset({"parking", "parked", "restoring", "replaying"})  # as the scheduler names them
WAITING = "waiting"


@dataclass(slots=True)
class Delta:
    """A piece of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first token, where they are wanted

    def add(self, other: "Delta") -> None:
        """Join a later piece to this one."""
        self.text += other.text
        self.token_ids += other.token_ids
        self.logprobs += other.logprobs
        self.prompt_logprobs = self.prompt_logprobs or other.prompt_logprobs


@dataclass(slots=True, eq=False)
class Inbox:
    """One sequence's post. `wake` is set whenever something comes; the sequences of a request share it."""

    wake: asyncio.Event
    seq_id: int | None = None  # once the engine has it
    state: str = WAITING
    truncates_at: int | None = None  # the pool itself ends the answer at so many tokens
    num_tokens: int = 0
    completion: Completion | None = None
    unread: Delta = field(default_factory=Delta)

    def take(self) -> Delta:
        """All that is unread."""
        taken, self.unread = self.unread, Delta()
        return taken

    @property
    def is_away(self) -> bool:
        """Whether it is parked, or on the way there or back."""
        return self.completion is None and self.state in AWAY


@dataclass(slots=True)
class News:
    """What one step brought for one sequence."""

    inbox: Inbox
    delta: Delta | None = None
    state: str | None = None
    completion: Completion | None = None

    def deliver(self) -> None:
        """Put it into the inbox."""
        inbox = self.inbox
        if self.delta is not None:
            inbox.unread.add(self.delta)
            inbox.num_tokens += len(self.delta.token_ids)
        inbox.state = self.state or inbox.state
        inbox.completion = self.completion or inbox.completion
        inbox.wake.set()
