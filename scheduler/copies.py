"""Sequences on the move: parks and restores are started, dispatched chunk by chunk, landed, and given back exactly once.

Owns nothing; knows no bytes' content and no reason to park.
"""

from collections import deque
from collections.abc import Iterator

from jaxkv.scheduler.books import Books, Flight, Turn
from jaxkv.scheduler.images import Span, cut, near_spans, state_span
from jaxkv.scheduler.near import leave_near
from jaxkv.scheduler.need import cell_pages
from jaxkv.scheduler.plan import Chunk, Note
from jaxkv.scheduler.sequence import AWAY, Sequence, State


def spans(books: Books, seq: Sequence) -> list[Span]:
    """The spans that an image of it would have now, its pages' and its state's: none while it only shares what it found."""
    config, num_cells = books.config, seq.num_cells if seq.num_computed > seq.num_cached else 0
    num_pages = cell_pages(config, num_cells)
    found = cut(num_pages, min(num_pages, num_cells // config.page_size), config.chunk_pages, seq.page_keys, seq.num_gone)
    if config.near_pages and num_pages:
        found += near_spans(num_pages, config.chunk_pages, seq.near_gone)
    return [*found, state_span(num_pages)] if config.state_bytes and num_cells else found


def image_size(books: Books, seq: Sequence) -> tuple[int, int]:
    """Pages of its image, and the host bytes (padding included) that it adds to those in use."""
    image = spans(books, seq)
    return sum(span.num_pages for span in image if not span.is_near), books.host.added(image, seq.kept)


def has_room(books: Books, residents: list[Sequence]) -> bool:
    """Whether the host budget holds the images of all of them, beside those it holds now."""
    images = [(spans(books, seq), seq.kept) for seq in residents]
    return books.host.has_room(sum(len(image) for image, _ in images), sum(books.host.added(image, kept) for image, kept in images))


def start_park(books: Books, turn: Turn, seq: Sequence, cause: str) -> bool:
    """Send a resident and its image away, or leave all as it was and say False when the image does not fit the host budget."""
    image = books.host.take(seq.seq_id, spans(books, seq), seq.kept)
    if image is None:
        return False
    if seq.num_computed == seq.num_cached:
        seq.num_cells = seq.num_cached = 0
    books.host.let_go(seq.kept)
    seq.image, seq.kept = image, {}
    seq.image_pages = sum(chunk.span.num_pages for chunk in image if not chunk.span.is_near)
    seq.copies_due = begin_copies(seq, [not chunk.is_sent for chunk in image])
    seq.copies_left = {index for index, chunk in enumerate(image) if not chunk.is_here}
    leaving = {page: None for chunk in seq.copies_due for page in chunk.pages if not chunk.is_near}
    books.pages.leave(seq.seq_id, list(leaving))
    near = {page: None for chunk in seq.copies_due for page in chunk.pages if chunk.is_near}
    books.near.leave(seq.seq_id, list(near))
    leave_near(books, seq, near)
    books.pages.give_back(seq.seq_id, [page for page in seq.held_pages if page not in leaving])
    books.leave_row(seq, is_free=all(chunk.row is None for chunk in seq.copies_due))
    seq.pages, seq.num_gone = [], seq.num_gone if seq.num_cells else 0
    seq.state = State.PARKING if seq.copies_left else State.PARKED
    if seq.copies_due:
        books.to_park.append(seq)
    join_line(books, seq, turn.now)
    books.counters.num_parks_copied += 1
    num_bytes = books.host.size(chunk.span for chunk in image)
    new_bytes = books.host.size(image[chunk.index].span for chunk in seq.copies_due)
    turn.notes.append(Note("park", seq.seq_id, cause, seq.num_cells, seq.image_pages, num_bytes, num_bytes - new_bytes))
    return True


def join_line(books: Books, seq: Sequence, now: float) -> None:
    """A park begins, with or without an image: the end of the line."""
    seq.num_parks += 1
    seq.parked_since = now
    seq.park_asked = seq.was_refused = seq.has_way = seq.way_refused = False
    seq.num_bypassed = 0
    books.line_up(seq)
    books.counters.num_parks += 1


def start_restore(books: Books, seq: Sequence, num_shared: int) -> None:
    """Begin to fill the pages it was just given, all but the first `num_shared`, which it found in the pool."""
    seq.copies_due = begin_copies(seq, [chunk.span.is_near or chunk.span.first >= num_shared for chunk in seq.image])
    seq.copies_left = {chunk.index for chunk in seq.copies_due}
    seq.state = State.RESTORING
    if seq.copies_due:
        books.to_restore.append(seq)
    go_on(books, seq)


def begin_copies(seq: Sequence, is_due: list[bool]) -> deque[Chunk]:
    """The transfers of a new epoch: the chunks of its image that are due."""
    seq.epoch += 1
    due: deque[Chunk] = deque()
    for index, chunk in enumerate(seq.image):
        if is_due[index]:
            span = chunk.span
            pages = tuple((seq.near if span.is_near else seq.pages)[span.first : span.first + span.num_pages])
            row = seq.row if span.is_state else None
            due.append(Chunk(seq.seq_id, seq.epoch, index, pages, chunk.host_id, row, is_near=span.is_near))
    return due


def go_on(books: Books, seq: Sequence) -> None:
    """The next state of one that moves, once no copy is due or under way."""
    if seq.copies_due or seq.copies_left:
        return
    if seq.state is State.PARKING:
        seq.state = State.PARKED
    elif seq.state is State.RESTORING:
        finish_restore(books, seq)


def finish_restore(books: Books, seq: Sequence) -> None:
    """Back to work, as it was before the park."""
    seq.kept = books.host.keep(seq.seq_id, seq.image)
    seq.image = []
    seq.image_pages = 0
    back_to_work(books, seq)


def back_to_work(books: Books, seq: Sequence) -> None:
    """The return is complete, by copies or by replay."""
    seq.parked_since = None
    books.counters.num_restores_replayed += seq.state is State.REPLAYING
    seq.state = State.PREFILLING if seq.prompt_left else State.DECODING
    books.counters.num_restores += 1


def dispatch_parks(books: Books, turn: Turn) -> None:
    """Send park chunks, those that left first before others. What is staged is free at once, what is held when it lands."""
    for seq, chunk in due(books.to_park, turn):
        if seq.image[chunk.index].is_sent:  # by another sequence with the same pages
            books.ledger(chunk).give_back(seq.seq_id, chunk.pages)
            go_on(books, seq)
            continue
        turn.park.append(chunk)
        flight = depart(books, turn, seq, chunk)
        if books.config.hold:
            flight.pages, flight.row = chunk.pages, chunk.row
        else:
            books.ledger(chunk).give_back(seq.seq_id, chunk.pages)
            books.free_row(chunk.row)


def dispatch_restores(books: Books, turn: Turn) -> None:
    """Send restore chunks, in the order of the returns."""
    for seq, chunk in due(books.to_restore, turn):
        turn.restore.append(chunk)
        depart(books, turn, seq, chunk)


def due(line: deque[Sequence], turn: Turn) -> Iterator[tuple[Sequence, Chunk]]:
    """The next chunks of a line, for as long as this step may send any."""
    while line:
        if not line[0].copies_due:
            line.popleft()
        elif turn.chunks_left:
            yield line[0], line[0].copies_due.popleft()
        else:
            return


def depart(books: Books, turn: Turn, seq: Sequence, chunk: Chunk) -> Flight:
    """Enter a chunk in the register of flights."""
    turn.chunks_left -= 1
    flight = Flight(chunk, seq.image[chunk.index], is_park=seq.state is State.PARKING)
    books.flights[chunk.seq_id, chunk.epoch, chunk.index] = flight
    books.host.send(flight.image_chunk)
    return flight


def land(books: Books, chunk: Chunk) -> None:
    """A copy is done: its accounts are settled once, and those move on who waited for nothing else."""
    flight = books.flights.pop((chunk.seq_id, chunk.epoch, chunk.index), None)
    if flight is None:
        return  # reported before
    books.ledger(chunk).give_back(chunk.seq_id, flight.pages)
    books.free_row(flight.row)
    books.host.land(flight.image_chunk)
    for seq in waiting_for(books, flight):
        seq.copies_left.discard(seq.image.index(flight.image_chunk))  # of another sequence's image it may be another one
        go_on(books, seq)


def waiting_for(books: Books, flight: Flight) -> list[Sequence]:
    """Those that cannot move on before a copy is done: of a restore its own sequence, of a park all whose image the chunk belongs to."""
    if flight.is_park:
        return [books.sequences[seq_id] for seq_id in sorted(flight.image_chunk.users)]
    seq = books.sequences.get(flight.chunk.seq_id)
    return [seq] if seq is not None and seq.epoch == flight.chunk.epoch else []


def spoil(books: Books, chunk: Chunk) -> tuple[int, ...]:
    """Trust a place in host memory no more; returns those that cannot go on."""
    lost: set[int] = set()
    image_chunk = books.host.chunks.get(chunk.host_id)
    if image_chunk is not None:
        books.host.spoil(image_chunk)
        lost |= set() if image_chunk.is_here else image_chunk.users
    seq = books.sequences.get(chunk.seq_id)
    if seq is not None and not seq.is_over and seq.epoch == chunk.epoch:
        lost.add(chunk.seq_id)
    return tuple(sorted(lost))


def end(books: Books, seq: Sequence, state: State, reason: str) -> None:
    """End a live sequence. What no copy touches comes back now; what is in flight comes back when it lands."""
    books.counters.num_ended_parked += seq.state in AWAY
    books.held.pop(seq.seq_id, None)
    books.leave_group(seq)
    give_back(books, seq)
    seq.state, seq.reason = state, reason
    seq.parked_since = None
    books.num_live -= 1


def give_back(books: Books, seq: Sequence) -> None:
    """Take its row, its pages and its image; what a copy in flight may touch comes back when that lands, under an epoch that is past."""
    books.forks.pop(seq.seq_id, None)
    touched = _give_back_pages(books, seq)
    books.leave_row(seq, is_free=seq.row not in touched)
    books.host.release(seq.seq_id, seq.image)
    books.host.let_go(seq.kept)
    seq.image, seq.kept, seq.pages = [], {}, []
    seq.image_pages = 0
    seq.epoch += 1
    seq.copies_due.clear()
    seq.copies_left.clear()


def _give_back_pages(books: Books, seq: Sequence) -> list[int]:
    """Returns its row, if a copy in flight may still write its state there."""
    in_flight: set[int] = set()
    near: set[int] = set()
    rows: list[int] = []
    if seq.state is State.RESTORING:
        for index in seq.copies_left - {chunk.index for chunk in seq.copies_due}:
            flight = books.flights[seq.seq_id, seq.epoch, index]
            flight.pages, flight.row = flight.chunk.pages, flight.chunk.row
            books.ledger(flight.chunk).leave(seq.seq_id, flight.pages)
            (near if flight.chunk.is_near else in_flight).update(flight.pages)
            rows += [] if flight.row is None else [flight.row]
    elif seq.state is State.PARKING:
        for chunk in seq.copies_due:
            books.ledger(chunk).give_back(seq.seq_id, chunk.pages)
            books.free_row(chunk.row)
    leave_near(books, seq, near)
    books.pages.give_back(seq.seq_id, [page for page in seq.held_pages if page not in in_flight])
    return rows
