"""Who is being served, as the event loop has heard: how many wait for a row, whether one more may, when a place will be free.

Knows no engine and no thread.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable

from jaxkv.errors import RequestError
from jaxkv.serve import errors
from jaxkv.serve.inbox import WAITING, Inbox, News

_MAX_RETRY_AFTER_S = 60


class Crowd:
    """The sequences that have not ended. `changed` is set whenever one of them ends."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.num_busy = 0
        self.changed = asyncio.Event()
        self._waiting: set[Inbox] = set()
        self._ends: deque[float] = deque(maxlen=32)

    @property
    def num_waiting(self) -> int:
        """Those without a row."""
        return len(self._waiting)

    def admit(self, num: int) -> list[Inbox]:
        """Inboxes for the sequences of one request; raises RequestError for more than may ever wait, ApiError for more than may now."""
        if num > self.max_waiting:
            raise RequestError(
                f"the request asks for {num} sequences (prompts times n), allowed: {self.max_waiting} (server.max_waiting)", "n"
            )
        if self.num_waiting + num > self.max_waiting:
            raise errors.queue_full(self.num_waiting, self.max_waiting, self.retry_after_s())
        wake = asyncio.Event()
        inboxes = [Inbox(wake) for _ in range(num)]
        self._waiting.update(inboxes)
        self.num_busy += num
        return inboxes

    def deliver(self, news: Iterable[News]) -> None:
        """What the engine's thread had to tell."""
        for item in news:
            had_ended = item.inbox.completion is not None
            item.deliver()
            if item.inbox.state != WAITING:
                self._waiting.discard(item.inbox)
            if item.inbox.completion is not None and not had_ended:
                self._forget(item.inbox)

    def retry_after_s(self) -> int:
        """Seconds until a place in the line is likely to be free: the mean time between two ends of late."""
        if len(self._ends) < 2:
            return 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))))

    def _forget(self, inbox: Inbox) -> None:
        if inbox.seq_id is not None:  # else the engine never took it
            self._ends.append(time.monotonic())
        self.num_busy -= 1
        self.changed.set()
