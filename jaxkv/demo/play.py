"""Runs the chats: all at once, or one after another. Knows nothing of how it is shown."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.demo.chats import Chat
from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.request import Completion

OnStep = Callable[[Engine, Sequence[Handle]], None]


@dataclass(frozen=True, slots=True)
class Played:
    """What one way of running the eight gave, in their order."""

    completions: list[Completion]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        """Generated tokens, all chats together."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def tokens_per_s(self) -> float:
        """From the first request to the last answer."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def num_completed(self) -> int:
        """Those that came to their own end."""
        return sum(completion.finish_reason in ("stop", "length") for completion in self.completions)


def play_together(engine: Engine, chats: Sequence[Chat], on_step: OnStep) -> Played:
    """All at once; whatever does not fit is the engine's business."""
    start = time.perf_counter()
    handles = [engine.submit(chat.prompt_ids, chat.params) for chat in chats]
    completions = _finish(engine, handles, handles, on_step)
    return Played(completions, time.perf_counter() - start)


def play_alone(engine: Engine, chats: Sequence[Chat], on_step: OnStep) -> Played:
    """One after another, each with the whole pool to itself."""
    start = time.perf_counter()
    handles: list[Handle] = []
    for chat in chats:
        handles.append(engine.submit(chat.prompt_ids, chat.params))
        _finish(engine, handles[-1:], handles, on_step)
    return Played([handle.result() for handle in handles], time.perf_counter() - start)


def _finish(engine: Engine, wanted: Sequence[Handle], shown: Sequence[Handle], on_step: OnStep) -> list[Completion]:
    while not all(handle.done for handle in wanted):
        engine.step()
        on_step(engine, shown)
    return [handle.result() for handle in wanted]


def content(completion: Completion) -> tuple[Any, ...]:
    """All of an answer that must not depend on the pool: token ids, text, logprobs, why it ended, what it counted."""
    c = completion
    return c.token_ids, c.text, c.logprobs, c.finish_reason, c.prompt_tokens, c.error


def num_identical(a: Played, b: Played) -> int:
    """How many answers are the same in every part. Logprobs are compared as numbers, so to the last bit."""
    return sum(content(x) == content(y) for x, y in zip(a.completions, b.completions, strict=True))
