"""Frozen pictures of the books, for live views and tests."""

from dataclasses import dataclass

from jaxkv.scheduler.books import Books
from jaxkv.scheduler.sequence import AWAY, Sequence, State


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One live sequence. `num_tokens` are its prompt and generated tokens so far, `num_cells` those whose keys and values exist."""

    seq_id: int
    state: State
    row: int | None
    prompt_len: int
    limit: int | None
    num_tokens: int
    num_cells: int
    num_generated: int
    num_shifts: int
    num_pages: int  # held by it as a resident
    image_pages: int
    parked_since: float | None
    num_parks: int
    priority: int
    replay_to: int = 0  # cells to compute again before it goes on
    is_held: bool = False  # away until an operator lets it go
    num_shared: int = 0  # of its pages, those that another, who stays, holds too
    whole_cells: int = 0  # what it has or, in a replay, will have at most
    num_gone: int = 0  # pages that fell out of the window


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All live sequences in order of arrival, and the ledgers."""

    sequences: tuple[SequenceView, ...]
    num_pages: int
    num_pages_free: int  # those cached included: they are given away when their room is needed
    num_pages_cached: int  # prompt pages that nobody holds
    num_pages_leaving: int
    host_bytes: int
    num_running: int
    num_parked: int  # parking, parked, restoring or replaying
    num_waiting: int


def view(seq: Sequence, num_shared: int = 0) -> SequenceView:
    """The picture of one sequence, of whose pages so many are held by others too."""
    num_tokens = seq.prompt_len + seq.num_generated
    return SequenceView(
        seq.seq_id, seq.state, seq.row, seq.prompt_len, seq.limit, num_tokens, seq.num_cells, seq.num_generated, seq.num_shifts,
        seq.num_held, seq.image_pages, seq.parked_since, seq.num_parks, seq.priority, seq.replay_to, seq.is_held, num_shared,
        seq.whole_cells, seq.num_gone,
    )  # fmt: skip


def snapshot(books: Books) -> Snapshot:
    """The picture of everything that lives."""
    live = [seq for seq in books.sequences.values() if not seq.is_over]
    num_parked = sum(seq.state in AWAY for seq in live)
    num_waiting = sum(seq.state is State.WAITING for seq in live)
    return Snapshot(
        sequences=tuple(view(seq, books.pages.num_shared(seq.seq_id)) for seq in live),
        num_pages=books.config.num_pages,
        num_pages_free=books.pages.num_free,
        num_pages_cached=books.pages.num_cached,
        num_pages_leaving=books.pages.num_leaving,
        host_bytes=books.host.held,
        num_running=len(live) - num_parked - num_waiting,
        num_parked=num_parked,
        num_waiting=num_waiting,
    )
