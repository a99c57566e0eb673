"""A look at a running engine: for progress bars, the live view and, later, a server's pages. Read-only."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxkv.scheduler import SequenceView

if TYPE_CHECKING:
    from jaxkv.engine import Engine
    from jaxkv.live import Live


@dataclass(frozen=True, slots=True)
class SequenceStatus:
    """One request that has not ended."""

    seq_id: int
    state: str
    row: int | None
    num_tokens: int  # prompt tokens computed and tokens generated
    num_generated: int
    num_pages: int
    num_parks: int
    text: str
    image_pages: int = 0  # in host memory, or on the way there or back
    name: str | None = None  # what its caller calls it
    priority: int = 0
    host_bytes: int = 0  # of its image, padding included
    is_held: bool = False  # parked by an operator
    num_pages_own: int = 0  # of its pages, those that nobody else holds
    since_s: float | None = None  # when it came, if it waits, or was parked, if it is away; of the clock `time.perf_counter`


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Counts for a line, sequences for a table."""

    rows: int  # running
    parked: int  # or on the way to it, or back
    waiting: int
    finished: int
    pool_pages: int
    pool_pages_free: int
    host_bytes: int
    tokens_per_s: float
    num_parks: int
    num_restores: int
    sequences: tuple[SequenceStatus, ...]
    pool_pages_cached: int = 0  # of those free, prompts that may be found again
    pool_pages_leaving: int = 0  # of those held, on their way out
    pool_bytes: int = 0
    host_budget_bytes: int | None = None
    copies_out: int = 0  # transfers in flight
    copies_back: int = 0
    generated_tokens: int = 0


def read_status(engine: "Engine") -> EngineStatus:
    """Everything as it is between two steps."""
    snapshot, counters = engine.scheduler.snapshot(), engine.scheduler.counters
    sequences = []
    for view in snapshot.sequences:
        live = engine.live(view.seq_id)
        if live is not None:
            sequences.append(read_sequence(engine, view, live))
    return EngineStatus(
        rows=snapshot.num_running,
        parked=snapshot.num_parked,
        waiting=snapshot.num_waiting,
        finished=engine.stats.num_completed,
        pool_pages=snapshot.num_pages,
        pool_pages_free=snapshot.num_pages_free,
        host_bytes=snapshot.host_bytes,
        tokens_per_s=engine.stats.tokens_per_s,
        num_parks=counters.num_parks,
        num_restores=counters.num_restores,
        sequences=tuple(sequences),
        pool_pages_cached=snapshot.num_pages_cached,
        pool_pages_leaving=snapshot.num_pages_leaving,
        pool_bytes=engine.parts.layout.num_bytes,
        host_budget_bytes=engine.parts.scheduler_config.host_budget_bytes,
        copies_out=engine.parts.transfer.num_out,
        copies_back=engine.parts.transfer.num_in_flight - engine.parts.transfer.num_out,
        generated_tokens=engine.stats.generated_tokens,
    )


def read_sequence(engine: "Engine", view: SequenceView, live: "Live") -> SequenceStatus:
    """One request, from what the scheduler and the engine know of it."""
    return SequenceStatus(
        seq_id=view.seq_id,
        state=str(view.state),
        row=view.row,
        num_tokens=view.num_tokens,
        num_generated=live.num_generated,
        num_pages=view.num_pages,
        num_parks=view.num_parks,
        text=live.output.text,
        image_pages=view.image_pages,
        name=live.name,
        priority=view.priority,
        host_bytes=engine.scheduler.image_bytes(view.seq_id),
        is_held=view.is_held,
        num_pages_own=view.num_pages - view.num_shared,
        since_s=live.submitted_s if view.state == "waiting" else view.parked_since,
    )
