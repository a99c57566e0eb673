"""Books made anew after a step that broke off, at whatever line: from what each sequence is known to have, not from what was half done.

Whoever waits, is parked with its whole image in host memory, or is leaving with every copy under way stays as it is. Everybody else is
dropped, to be computed again, and the pool is empty but for the pages that a copy may still touch. A token that was entered and never read
is taken back, with its cell: be it that its sequence has left since, with that cell in its image, or that it had ended with that token.
Knows no reason.
"""

from collections.abc import Iterable, Mapping

from jaxkv.scheduler.books import Books, Flight
from jaxkv.scheduler.images import ImageChunk
from jaxkv.scheduler.lines import Line
from jaxkv.scheduler.need import need
from jaxkv.scheduler.plan import Chunk
from jaxkv.scheduler.replay import forget_cells
from jaxkv.scheduler.sequence import AWAY, Sequence, State
from jaxkv.scheduler.snapshots import SnapshotLedger


def recover(books: Books, flying: Iterable[Chunk], generated: Mapping[int, int], now: float) -> None:
    """`flying` are the copies that the runner really has in flight, `generated` how many tokens each live sequence really has."""
    chunks = {(chunk.seq_id, chunk.epoch, chunk.index) for chunk in flying}
    flights = {key: flight for key, flight in books.flights.items() if key in chunks}
    coming = {flight.image_chunk.host_id for flight in flights.values() if flight.is_park}
    for seq in books.sequences.values():
        if seq.state is State.FINISHED and generated.get(seq.seq_id, seq.num_generated) < seq.num_generated:
            take_back_end(books, seq)
    live = [seq for seq in books.sequences.values() if not seq.is_over]
    stays = {seq.seq_id for seq in live if keeps_image(seq, coming) and generated.get(seq.seq_id, seq.num_generated) == seq.num_generated}
    for seq in live:
        seq.num_generated = generated.get(seq.seq_id, seq.num_generated)
        if seq.seq_id not in stays and (seq.state is not State.WAITING or seq.row is not None):
            drop_everything(books, seq, now)
        seq.row, seq.pages, seq.kept = None, [], {}
        seq.near, seq.near_gone = [], 0
        seq.copies_due.clear()
    books.forks.clear()
    books.snapshots = SnapshotLedger(books.snapshots.num_slots)
    restart_flights(books, flights)
    restart_images(books, live, flights)
    restart_lines(books, live)
    recount(books, live)


def take_back_end(books: Books, seq: Sequence) -> None:
    """Its last token has been lost: it goes on from the one before."""
    seq.state, seq.reason = State.DECODING, ""
    books.counters.num_finished -= 1


def keeps_image(seq: Sequence, coming: set[int]) -> bool:
    """Whether it is away with all it needs to return: every chunk of its image is in host memory, or on its way there."""
    if seq.state not in (State.PARKING, State.PARKED) or seq.row is not None or seq.copies_due or seq.parked_since is None:
        return False
    return all((chunk.is_here or chunk.host_id in coming) and not (chunk.is_spoiled or chunk.is_gone) for chunk in seq.image)


def drop_everything(books: Books, seq: Sequence, now: float) -> None:
    """What it held is nobody's now; how many cells that were is known from its tokens."""
    was_new = seq.state is State.WAITING
    begun = 0 if was_new else min(seq.made_cells, seq.prompt_len if seq.num_generated else seq.prompt_len - 1)
    forget_cells(seq, need(seq.prompt_len, seq.num_generated) if seq.num_generated > 1 else begun)
    if seq.shift is not None:  # one that was only planned, or whose tokens are taken back, is to come
        seq.num_shifts = min(seq.num_shifts, -(-max(0, seq.replay_to - seq.shift.context_len) // seq.shift.n_discard))
    seq.image, seq.image_pages = [], 0
    seq.copies_left.clear()
    seq.epoch += 1
    if was_new:
        return
    if seq.state not in AWAY or seq.parked_since is None:
        seq.num_parks += 1
        seq.parked_since = now
    seq.state = State.PARKED
    seq.park_asked = seq.was_refused = seq.has_way = seq.way_refused = False


def restart_flights(books: Books, flights: dict[tuple[int, int, int], Flight]) -> None:
    """A page or a row's state that a copy may touch belongs to the flight; all the others are free, and no page is found by a key."""
    books.flights.clear()
    books.flights.update(flights)
    for flight in flights.values():
        is_touched = books.config.hold or not flight.is_park
        flight.pages, flight.row = (flight.chunk.pages, flight.chunk.row) if is_touched else ((), None)
    for ledger in (books.pages, books.near):
        ledger.restart((flight.chunk.seq_id, flight.pages) for flight in flights.values() if books.ledger(flight.chunk) is ledger)
    books.to_park.clear()
    books.to_restore.clear()


def restart_images(books: Books, live: list[Sequence], flights: Mapping[tuple[int, int, int], Flight]) -> None:
    """Host memory holds the images of those who keep theirs, and what a copy touches."""
    users: dict[int, set[int]] = {}
    for seq in live:
        for chunk in seq.image:
            users.setdefault(chunk.host_id, set()).add(seq.seq_id)
        waits = {index for index, chunk in enumerate(seq.image) if not chunk.is_here}
        seq.copies_left = waits
        if seq.state is State.PARKING and not waits:
            seq.state = State.PARKED
    books.host.restart(users, [flight.image_chunk for flight in flights.values()], _chunks(live, flights.values()))


def _chunks(live: list[Sequence], flights: Iterable[Flight]) -> list[ImageChunk]:
    return [*(chunk for seq in live for chunk in seq.image), *(flight.image_chunk for flight in flights)]


def restart_lines(books: Books, live: list[Sequence]) -> None:
    """Everybody is in a line: the parked by how long, the waiting by age. All rows are free whose state no copy may touch."""
    books.residents.clear()
    touched = {flight.row for flight in books.flights.values()}
    books.free_rows[:] = [row for row in range(books.config.rows) if row not in touched]
    books.parked, books.waiting, books.held = Line(), Line(), {}
    books.groups.clear()
    for seq in live:
        books.join_group(seq)
    for seq in sorted(live, key=lambda seq: (seq.parked_since or 0.0, seq.order)):
        if seq.state is State.WAITING:
            books.waiting.append(seq)
        else:
            books.line_up(seq)


def recount(books: Books, live: list[Sequence]) -> None:
    """The totals that must agree with who is where; what has no other cause was lost."""
    counters = books.counters
    books.num_live = len(live)
    counters.num_parks = counters.num_restores + counters.num_ended_parked + sum(seq.state in AWAY for seq in live)
    causes = (counters.num_parks_forced, counters.num_parks_pressure, counters.num_parks_priority, counters.num_last_resorts)
    counters.num_parks_lost = counters.num_parks - sum(causes) - counters.num_rotations - counters.num_parks_stuck
    counters.num_parks_dropped = counters.num_parks - counters.num_parks_copied
