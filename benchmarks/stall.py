"""What the others feel while one is parked: their gaps between tokens without parks, with forced and with natural ones.

What to expect. A park is a gather (pages into staging, in line with the steps, at memory speed) and a copy to host memory beside the next
steps; a restore is the mirror. So a bystander's gap may grow by the gather or the scatter of one step's chunks, and by what the copy takes
away from the memory bandwidth. The promise: never by more than one step. Compared in the same run:

* direct, staged or hold, waiting for copies (blocking) or not, and with the victim's pages in one piece or scattered over the pool;
* none: nobody is parked; forced: the longest is parked again and again; natural: chats outgrow the pool;
* a park of n bytes, and its restore, against a plain memcpy of n bytes by one thread into memory that has been used before. The best
  possible is 1; a gather and a copy, or a copy and its checksum, are two passes, so 2 is what to aim at.
"""

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import Setup, clear, run, say, seat, summary, text, timed, turns

from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.scheduler import Chunk
from jaxkv.stats import percentile, spread

OPTIONS: dict[str, Any] = {
    "victim": 1000,  # tokens of the one that is parked
    "chat": 64,  # tokens of each bystander's prompt
    "parks": 4,  # forced, in each round
    "quiet_steps": 12,
    "natural_steps": 72,
    "copies": 5,  # parks, restores and memcpys per round
}
POLL_S = 1e-4
PARK_STEPS = 16  # a victim is back after fewer
LAYOUTS = ("contiguous", "scattered")
WAYS = {
    "direct": {"transfer.mode": "direct", "transfer.blocking": False},
    "staged": {"transfer.mode": "staged", "transfer.blocking": False},
    "staged_blocking": {"transfer.mode": "staged", "transfer.blocking": True},
    "hold": {"transfer.mode": "hold", "transfer.blocking": False},
    "hold_blocking": {"transfer.mode": "hold", "transfer.blocking": True},
}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by way of copying."""
    o, rows = setup.options, setup.config().scheduler.rows
    pool = o.victim + (rows - 1) * o.chat + rows * (_answer(o) + 16)
    with setup.engines({name: {**fields, "pool.tokens": pool} for name, fields in WAYS.items()}) as engines:
        ways = [_Way(name, engine, o) for name, engine in engines.items()]
        copies = _Copies({name: engine for name, engine in engines.items() if "blocking" not in name}, o)
        for round_ in range(setup.rounds):
            for way in turns(ways, round_):
                way.measure(round_)
            copies.measure(round_)
        return {
            "victim_tokens": o.victim,
            "victim_mb": round(o.victim * engines["staged"].parts.layout.page_bytes / engines["staged"].parts.layout.page_size / 1e6, 1),
            "bystanders": rows - 1,
            "gaps_ms": {way.name: way.results() for way in ways},
            "copies": copies.results(),
        }


def _answer(options: Any) -> int:
    """Tokens that the victim and the chats beside it make at most."""
    return int(options.quiet_steps + PARK_STEPS * options.parks + options.chat)


@dataclass(slots=True)
class Gaps:
    """Seconds between two tokens of one sequence by what was going on, but not across its own park."""

    kind: str = "warm up"
    seconds: dict[str, list[float]] = field(default_factory=dict)
    _last: dict[int, tuple[float, int]] = field(default_factory=dict)  # by sequence: when, and parks so far

    def on_token(self, handle: Handle, _: int) -> None:
        """The engine calls it for every token."""
        now, num_parks = time.perf_counter(), handle.stats.num_parks
        then, parks_then = self._last.get(handle.seq_id, (now, -1))
        if parks_then == num_parks:
            self.seconds.setdefault(self.kind, []).append(now - then)
        self._last[handle.seq_id] = (now, num_parks)


class _Way:
    """One way of copying: its engine, and the gaps seen with it."""

    def __init__(self, name: str, engine: Engine, options: Any) -> None:
        self.name = name
        self._engine = engine
        self._options = options
        self._gaps = Gaps()
        self._num_parks: dict[str, int] = {}

    def measure(self, round_: int) -> None:
        """One round of everything."""
        for layout in turns(LAYOUTS, round_):
            order_free_pages(self._engine, layout, round_)
            self._forced(layout)
        order_free_pages(self._engine, "contiguous", round_)
        self._natural()

    def _forced(self, layout: str) -> None:
        """The longest beside chats: first in peace, then parked again and again."""
        o, engine = self._options, self._engine
        victim = seat(engine, [o.victim], _answer(o))
        chats = seat(engine, [o.chat] * (engine.config.scheduler.rows - 1), _answer(o), self._gaps.on_token)
        self._gaps.kind = "none"
        for _ in range(o.quiet_steps):
            engine.step()
        self._gaps.kind = f"forced_{layout}"
        before = engine.scheduler.counters.num_parks
        for _ in range(o.parks):
            engine.scheduler.park(victim[0].seq_id)
            self._until_back(victim[0])
        self._count(f"forced_{layout}", engine.scheduler.counters.num_parks - before)
        self._gaps.kind = "warm up"
        clear(engine, [*victim, *chats])

    def _until_back(self, victim: Handle) -> None:
        """Step until it has been away and has made two more tokens."""
        parks = victim.stats.num_parks
        num = len(victim.token_ids) + 2
        for _ in range(PARK_STEPS):
            if victim.stats.num_parks > parks and len(victim.token_ids) >= num:
                return
            self._engine.step()

    def _natural(self) -> None:
        """Chats of equal length that all get in, and together outgrow the pool some steps later."""
        o, engine, scheduler = self._options, self._engine, self._engine.config.scheduler
        share = engine.capacity // scheduler.rows
        # While the later ones' prompts are computed the earlier ones grow, and the gate wants its margin (twice, with hold).
        early = -(-share // scheduler.prefill_chunk) * scheduler.rows // 2
        prompt = max(1, share - early - 2 * scheduler.margin_steps - engine.config.pool.page_size)
        chats = seat(engine, [prompt] * scheduler.rows, 2 * share, self._gaps.on_token)
        self._gaps.kind = "natural"
        before = engine.scheduler.counters.num_parks
        for _ in range(o.natural_steps):
            engine.step()
        self._count("natural", engine.scheduler.counters.num_parks - before)
        self._gaps.kind = "warm up"
        clear(engine, chats)

    def _count(self, kind: str, num: int) -> None:
        self._num_parks[kind] = self._num_parks.get(kind, 0) + num

    def results(self) -> dict[str, Any]:
        """Percentiles over all gaps of all rounds; the longest also in steps of the quiet time."""
        step = percentile(self._gaps.seconds["none"], 0.5) or 0.0
        found: dict[str, Any] = {}
        for kind in ("none", *(f"forced_{layout}" for layout in LAYOUTS), "natural"):
            gaps = self._gaps.seconds.get(kind, [])
            ms = spread(gaps, 1e3, p50=0.5, p99=0.99, max=1.0)
            longest = round(max(gaps, default=0.0) / step, 2)
            found[kind] = {**ms, "num": len(gaps), "max_in_steps": longest, "num_parks": self._num_parks.get(kind, 0)}
            say(f"{self.name}, {kind}: p50 {ms['p50']} ms, p99 {ms['p99']} ms, max {ms['max']} ms ({longest} steps)")
        return found


class _Copies:
    """Parks and restores of whole chunks by the idle engine's own transfer, and a memcpy of as many bytes."""

    def __init__(self, engines: dict[str, Engine], options: Any) -> None:
        self._engines = engines
        self._num = options.copies
        transfer, layout = engines["staged"].parts.transfer, engines["staged"].parts.layout
        chunk_pages = engines["staged"].config.transfer.chunk_pages
        wanted = -(-options.victim // layout.page_size // chunk_pages)
        self._num_chunks = max(1, min(wanted, transfer.free_chunks, layout.num_pages // chunk_pages))
        self._chunk_pages = chunk_pages
        self._num_bytes = self._num_chunks * transfer.chunk_bytes
        self._source, self._target = np.ones(self._num_bytes, np.uint8), np.zeros(self._num_bytes, np.uint8)
        self._times: dict[str, list[float]] = {}

    def measure(self, round_: int) -> None:
        """One round: medians of a few copies of each kind."""
        for _ in range(2):
            np.copyto(self._target, self._source)
        self._note("memcpy", [timed(lambda: np.copyto(self._target, self._source)) for _ in range(self._num)])
        self._note("memcpy_fresh", [timed(self._source.copy) for _ in range(self._num)])
        for name, engine in self._engines.items():
            for layout in turns(LAYOUTS, round_):
                pairs = [self._there_and_back(engine, layout) for _ in range(self._num)]
                self._note(f"park_{name}_{layout}", [park for park, _ in pairs])
                self._note(f"restore_{name}_{layout}", [restore for _, restore in pairs])

    def _there_and_back(self, engine: Engine, layout: str) -> tuple[float, float]:
        transfer = engine.parts.transfer
        pages = list(range(1, engine.parts.layout.num_pages + 1))
        if layout == "scattered":
            random.Random(0).shuffle(pages)
        size = self._chunk_pages
        chunks = [Chunk(-1, 0, index, tuple(pages[index * size : (index + 1) * size]), -1 - index) for index in range(self._num_chunks)]

        def park() -> None:
            for chunk in chunks:
                transfer.park(chunk, 0)
            self._land(engine, "parked")

        def restore() -> None:
            for chunk in chunks:
                transfer.restore(chunk, 0)
            self._land(engine, "restored")
            assert not transfer.verify()

        took = timed(park), timed(restore)
        for chunk in chunks:
            transfer.discard(chunk.host_id)
        return took

    def _land(self, engine: Engine, what: str) -> None:
        num = 0
        while num < self._num_chunks:
            time.sleep(POLL_S)  # polling without a pause would take a processor away from the copies
            num += len(getattr(engine.parts.transfer.poll(step=2**30), what))

    def _note(self, name: str, seconds: list[float]) -> None:
        self._times.setdefault(name, []).append(statistics.median(seconds))

    def results(self) -> dict[str, Any]:
        """Milliseconds, and how many memcpys each copy took."""
        ms = {name: summary(values, 1e3) for name, values in self._times.items()}
        memcpy = ms["memcpy"]["median"]
        over = {name: round(value["median"] / memcpy, 2) for name, value in ms.items() if name != "memcpy"}
        for name, value in ms.items():
            say(f"{name} of {self._num_bytes / 1e6:.1f} MB: {text(value, 'ms')}" + (f", {over[name]} memcpys" if name in over else ""))
        return {"mb": round(self._num_bytes / 1e6, 2), "ms": ms, "over_memcpy": over}


def order_free_pages(engine: Engine, layout: str, seed: int) -> None:
    """Put the free pages of an idle engine in order or in disorder, as a long history of other requests would."""
    free = engine.scheduler._books.pages._free  # a stack; no public way, since nobody but a benchmark may care
    free.sort(reverse=True)
    if layout == "scattered":
        random.Random(seed).shuffle(free)


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
