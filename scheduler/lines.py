"""A line: those who wait to come back, or to come in, the more urgent first and then by time. Knows no pages and no rows."""

from bisect import insort
from collections import deque
from collections.abc import Iterator

from jaxkv.scheduler.sequence import Sequence


class Line:
    """Sequences by (priority, time of joining). Those that end in the line are dropped when they come to the front.

    Who joins is the latest of its priority, so each priority is a queue of its own, and none is ever sorted.
    """

    def __init__(self) -> None:
        self._queues: dict[int, deque[Sequence]] = {}
        self._priorities: list[int] = []  # of the queues, the most urgent first

    def append(self, seq: Sequence) -> None:
        """Join behind all of its priority."""
        queue = self._queues.get(seq.priority)
        if queue is None:
            queue = self._queues[seq.priority] = deque()
            insort(self._priorities, seq.priority)
        queue.append(seq)

    def prepend(self, seq: Sequence) -> None:
        """Join before all of its priority: it had come to the front before, and what let it in came to nothing."""
        self.append(seq)
        self._queues[seq.priority].rotate()

    def remove(self, seq: Sequence) -> None:
        """Leave, at the cost of looking past those before it in its queue."""
        self._queues[seq.priority].remove(seq)

    @property
    def first(self) -> Sequence | None:
        """The one at the front, if anybody waits."""
        while self._priorities:
            queue = self._queues[self._priorities[0]]
            while queue and queue[0].is_over:
                queue.popleft()
            if queue:
                return queue[0]
            del self._queues[self._priorities.pop(0)]
        return None

    def equals(self, priority: int) -> Iterator[Sequence]:
        """Those of one priority, in order of time."""
        return (seq for seq in self._queues.get(priority, ()) if not seq.is_over)

    def __iter__(self) -> Iterator[Sequence]:
        """All that live, in order."""
        return (seq for priority in self._priorities for seq in self.equals(priority))
