"""Who held the pool in one simulation: pages by request over time, and when each was parked. A watcher of `run`; draws nothing."""

from dataclasses import dataclass, field

from jaxkv.scheduler.scheduler import Scheduler
from jaxkv.scheduler.sequence import AWAY


@dataclass(slots=True)
class PoolTimeline:
    """Looks at every step and keeps what changed."""

    times: list[float] = field(default_factory=list)
    pages: list[dict[int, int]] = field(default_factory=list)  # by request, at each of the times
    parked: dict[int, list[tuple[float, float]]] = field(default_factory=dict)  # by request: from, until
    num_pages: int = 0
    _away: dict[int, float] = field(default_factory=dict)

    def look(self, scheduler: Scheduler, now: float) -> None:
        """Keep a picture if anybody holds more or fewer pages than before."""
        picture = scheduler.snapshot()
        self.num_pages = picture.num_pages
        held = {view.seq_id: view.num_pages for view in picture.sequences if view.num_pages}
        if not self.pages or held != self.pages[-1]:
            self.times.append(now)
            self.pages.append(held)
        away = {view.seq_id for view in picture.sequences if view.state in AWAY}
        for seq_id in away - self._away.keys():
            self._away[seq_id] = now
        for seq_id in self._away.keys() - away:
            self.parked.setdefault(seq_id, []).append((self._away.pop(seq_id), now))

    def thinned(self, most: int = 400) -> "PoolTimeline":
        """At most about so many of its pictures, the last one among them."""
        keep = [*range(0, len(self.times), max(1, len(self.times) // most)), len(self.times) - 1]
        return PoolTimeline([self.times[i] for i in keep], [self.pages[i] for i in keep], self.parked, self.num_pages)
