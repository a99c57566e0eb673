"""From an engine to the inboxes of its sequences: submits, follows each of them, and collects what every step brings. No thread of its own.

Everything here is called in the engine's thread, and lasts as long as the engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.request import Completion, SamplingParams
from jaxkv.serve.inbox import WAITING, Delta, Inbox, News
from jaxkv.serve.interface import ServeEngine, ServeHandle

_STILL = frozenset({"parked", WAITING})


@dataclass(slots=True)
class _Running:
    """A sequence as it is followed."""

    inbox: Inbox
    handle: ServeHandle
    num_logprobs: int = 0  # given away
    state: str = WAITING


class Post:
    """The post of one engine; `give` takes a batch of news to where the inboxes live."""

    def __init__(self, engine: ServeEngine, give: Callable[[list[News]], None]) -> None:
        self.engine, self._give = engine, give
        self._running: dict[int, _Running] = {}
        self._news: list[News] = []

    @property
    def is_still(self) -> bool:
        """Whether nobody moves but by a copy or by time."""
        return all(running.state in _STILL for running in self._running.values())

    def submit(self, inboxes: Sequence[Inbox], prompts: Sequence[Sequence[int]], params: SamplingParams, name: str) -> None:
        """Hand a request to the engine, all of its sequences or none; what is refused has ended."""
        handles: list[ServeHandle] = []
        try:
            for prompt in prompts:
                handles.extend(self.engine.submit_group(prompt, params, on_token=self._on_token, name=name).choices)
        except Exception:
            for handle in handles:
                handle.cancel()
            self._news += [News(inbox, state="ended", completion=_nothing("cancelled")) for inbox in inboxes]
            self.send()
            raise
        for inbox, handle in zip(inboxes, handles, strict=True):
            inbox.seq_id, inbox.truncates_at = handle.seq_id, handle.will_truncate_at
            self._running[handle.seq_id] = _Running(inbox, handle)

    def cancel(self, inboxes: Sequence[Inbox]) -> None:
        """End what has not ended."""
        for inbox in inboxes:
            running = None if inbox.seq_id is None else self._running.get(inbox.seq_id)
            if running is not None:
                running.handle.cancel()
                self._tell_end(running)

    def look(self) -> None:
        """Who has ended, or is in another state than before."""
        for running in list(self._running.values()):
            if running.handle.completion is not None:
                self._tell_end(running)
            elif (state := running.handle.stats.state) != running.state:
                running.state = state
                self._news.append(News(running.inbox, state=state))

    def send(self) -> None:
        """Everything since the last time."""
        if self._news:
            news, self._news = self._news, []
            self._give(news)

    def close(self) -> None:
        """The engine is no more: whoever was left has ended."""
        for running in list(self._running.values()):
            self._tell_end(running)
        self.send()

    def _on_token(self, handle: Any, token_id: int) -> None:
        """A token was accepted: what of the answer is certain now is news."""
        running = self._running.get(handle.seq_id)
        if running is None:
            return
        live = self.engine.live(handle.seq_id)
        output, is_first = live.output, len(live.output.token_ids) == 1
        logprobs = [] if output.logprobs is None else output.logprobs[running.num_logprobs :]
        running.num_logprobs += len(logprobs)
        delta = Delta(output.take_delta(), [token_id], logprobs, live.prompt_logprobs if is_first else None)
        self._news.append(News(running.inbox, delta))

    def _tell_end(self, running: _Running) -> None:
        if self._running.pop(running.handle.seq_id, None) is not None:
            completion = running.handle.completion or _nothing("cancelled")  # none where the engine broke
            self._news.append(News(running.inbox, state="ended", completion=completion))


def _nothing(reason: str) -> Completion:
    return Completion([], "", reason, 0, 0)
