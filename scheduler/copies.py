"""Sequences on the move: parks and restores are started, dispatched chunk by chunk, landed, and given back exactly once.

Owns nothing; knows no bytes' content and no reason to park.
"""

from collections import deque
from collections.abc import Iterator

from jaxkv.scheduler.books import Books, Flight, Turn
from jaxkv.scheduler.need import pages_for
from jaxkv.scheduler.plan import Chunk, Note
from jaxkv.scheduler.sequence import AWAY, Sequence, State


def image_size(books: Books, seq: Sequence) -> tuple[int, int, int]:
    """Pages, chunks and host bytes (padding included) that its image takes."""
    num_pages = pages_for(seq.num_cells, books.config.page_size)
    num_chunks = -(-num_pages // books.config.chunk_pages)
    return num_pages, num_chunks, num_chunks * books.config.chunk_bytes


def has_room(books: Books, residents: list[Sequence]) -> bool:
    """Whether the host budget holds the images of all of them, beside those it holds now."""
    sizes = [image_size(books, seq) for seq in residents]
    return books.host.has_room(sum(size[1] for size in sizes), sum(size[2] for size in sizes))


def start_park(books: Books, turn: Turn, seq: Sequence, cause: str) -> bool:
    """Send a resident away, or leave all as it was and say False when its image does not fit the host budget."""
    num_pages, num_chunks, num_bytes = image_size(books, seq)
    if not books.host.reserve(num_chunks, num_bytes):
        return False
    image, spare = seq.pages[:num_pages], seq.pages[num_pages:]
    books.pages.give_back(seq.seq_id, spare)
    books.pages.leave(seq.seq_id, image)
    books.leave_row(seq)
    seq.pages = []
    seq.epoch += 1
    seq.image_pages, seq.image_bytes = num_pages, num_bytes
    seq.copies_due = cut(books, seq, image)
    seq.state = State.PARKING if num_chunks else State.PARKED
    seq.num_parks += 1
    seq.parked_since = turn.now
    seq.park_asked = seq.was_refused = seq.has_way = seq.way_refused = False
    seq.num_bypassed = 0
    books.parked.append(seq)
    if num_chunks:
        books.to_park.append(seq)
    books.counters.num_parks += 1
    turn.notes.append(Note("park", seq.seq_id, cause, seq.num_cells, num_pages, num_bytes))
    return True


def start_restore(books: Books, seq: Sequence) -> None:
    """Begin to fill the pages it was just given."""
    seq.epoch += 1
    seq.copies_due = cut(books, seq, seq.pages[: seq.image_pages])
    seq.state = State.RESTORING
    if seq.copies_due:
        books.to_restore.append(seq)
    else:
        finish_restore(books, seq)


def finish_restore(books: Books, seq: Sequence) -> None:
    """Back to work, as it was before the park."""
    books.host.release(seq.image_bytes)
    seq.image_pages = seq.image_bytes = 0
    seq.parked_since = None
    seq.state = State.PREFILLING if seq.num_cells < seq.prompt_len else State.DECODING
    books.counters.num_restores += 1


def cut(books: Books, seq: Sequence, pages: list[int]) -> deque[Chunk]:
    """An image's pages as chunks of its present epoch."""
    size = books.config.chunk_pages
    starts = range(0, len(pages), size)
    return deque(Chunk(seq.seq_id, seq.epoch, index, tuple(pages[start : start + size])) for index, start in enumerate(starts))


def dispatch_parks(books: Books, turn: Turn) -> None:
    """Send park chunks, those that left first before others. Staged pages are free at once, held ones when they land."""
    for seq, chunk in due(books.to_park, turn):
        turn.park.append(chunk)
        flight = depart(books, seq, chunk)
        if books.config.hold:
            flight.pages = chunk.pages
        else:
            books.pages.give_back(seq.seq_id, chunk.pages)


def dispatch_restores(books: Books, turn: Turn) -> None:
    """Send restore chunks, in the order of the returns."""
    for seq, chunk in due(books.to_restore, turn):
        turn.restore.append(chunk)
        depart(books, seq, chunk)


def due(line: deque[Sequence], turn: Turn) -> Iterator[tuple[Sequence, Chunk]]:
    """The next chunks of a line, as many as this step may still send."""
    while line:
        if not line[0].copies_due:
            line.popleft()
        elif turn.chunks_left:
            turn.chunks_left -= 1
            yield line[0], line[0].copies_due.popleft()
        else:
            return


def depart(books: Books, seq: Sequence, chunk: Chunk) -> Flight:
    """Enter a chunk in the register of flights."""
    flight = Flight(chunk)
    books.flights[chunk.seq_id, chunk.epoch, chunk.index] = flight
    seq.copies_out.add(chunk.index)
    return flight


def land(books: Books, chunk: Chunk) -> None:
    """A copy is done: its accounts are settled once; the sequence moves on if this was the last chunk of its present epoch."""
    flight = books.flights.pop((chunk.seq_id, chunk.epoch, chunk.index), None)
    if flight is None:
        return  # reported before
    books.pages.give_back(chunk.seq_id, flight.pages)
    books.host.release(flight.num_bytes)
    seq = books.sequences.get(chunk.seq_id)
    if seq is None or seq.epoch != chunk.epoch:
        return
    seq.copies_out.discard(chunk.index)
    if seq.copies_due or seq.copies_out:
        return
    if seq.state is State.PARKING:
        seq.state = State.PARKED
    else:
        finish_restore(books, seq)


def end(books: Books, seq: Sequence, state: State, reason: str) -> None:
    """End a live sequence. What no copy touches comes back now; what is in flight comes back when it lands."""
    books.counters.num_ended_parked += seq.state in AWAY
    books.leave_row(seq)
    _give_back(books, seq)
    seq.state, seq.reason = state, reason
    seq.epoch += 1
    seq.pages = []
    seq.copies_due.clear()
    seq.copies_out.clear()
    seq.image_pages = seq.image_bytes = 0
    seq.parked_since = None
    books.num_live -= 1


def _give_back(books: Books, seq: Sequence) -> None:
    in_flight: set[int] = set()
    for index in seq.copies_out:
        flight = books.flights[seq.seq_id, seq.epoch, index]
        flight.num_bytes = books.config.chunk_bytes
        if seq.state is State.RESTORING:
            flight.pages = flight.chunk.pages
            books.pages.leave(seq.seq_id, flight.pages)
            in_flight.update(flight.pages)
    if seq.state is State.PARKING:
        for chunk in seq.copies_due:
            books.pages.give_back(seq.seq_id, chunk.pages)
    books.pages.give_back(seq.seq_id, [page for page in seq.pages if page not in in_flight])
    books.host.release(seq.image_bytes - len(seq.copies_out) * books.config.chunk_bytes)
