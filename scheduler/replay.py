"""Sequences without an image: dropped where the host budget has no room or a copy is lost, and computed again to where they were.

Owns nothing; knows no token. Cells come back in the order and by the programs that first computed them: the prompt chunk by chunk, then
one cell a step through the sequence's decode row, with the shifts of its context where they were. `Sequence.wants_chunk` and `wants_row`
say which is next, the runner knows the token.

    prompt 3, 50 generated: replay_to == 52, the cell of token 49; token 50 is fed by the step that makes token 51
"""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.copies import back_to_work, give_back, join_line, start_park
from jaxkv.scheduler.plan import Note
from jaxkv.scheduler.sequence import AWAY, Sequence, State


def send_away(books: Books, turn: Turn, seq: Sequence, cause: str) -> bool:
    """Park a resident: with an image if the host budget has room, else without one, or not at all if it is to wait (False)."""
    if start_park(books, turn, seq, cause):
        return True
    if books.config.over_budget == "replay":
        drop_victim(books, turn, seq, cause)
        return True
    return False


def drop_victim(books: Books, turn: Turn, seq: Sequence, cause: str) -> None:
    """Park a resident without an image, and tell."""
    num_pages = seq.num_held
    drop(books, seq, turn.now)
    turn.notes.append(Note("drop", seq.seq_id, cause, seq.replay_to, num_pages))


def drop(books: Books, seq: Sequence, now: float) -> None:
    """Give back all it holds now, copies in flight excepted. One that was away already keeps its park, and its place as the head."""
    was_away, was_entering = seq.state in AWAY, seq.row is not None
    for line in (books.to_park, books.to_restore):
        if seq in line:
            line.remove(seq)
    give_back(books, seq)
    for flight in books.flights.values():
        for page in flight.pages if flight.chunk.seq_id == seq.seq_id else ():
            books.ledger(flight.chunk).forget_key(page)  # it holds them until the copy lands, so it cannot share them before
    forget_cells(seq, seq.made_cells)
    seq.state = State.PARKED
    if not was_away:
        join_line(books, seq, now)
        books.counters.num_parks_dropped += 1
    elif was_entering:
        books.line_up(seq, is_first=True)


def forget_cells(seq: Sequence, num_cells: int) -> None:
    """It has no cell any more, and so many to compute again."""
    seq.replay_to, seq.num_cells, seq.num_cached, seq.num_dropped, seq.num_gone = num_cells, 0, 0, 0, 0


def start_replay(books: Books, seq: Sequence) -> None:
    """It owns a row and all its pages, some of its prompt's perhaps found in the pool; the batches compute the other cells."""
    seq.state = State.REPLAYING
    go_on_if_whole(books, seq)


def advance(books: Books, seq: Sequence, num_cells: int) -> None:
    """Cells are there again; with the last of them it goes on as before the drop."""
    books.counters.num_replayed_tokens += min(num_cells, seq.replay_to - seq.num_computed)
    seq.num_cells += num_cells
    go_on_if_whole(books, seq)


def go_on_if_whole(books: Books, seq: Sequence) -> None:
    """A replay ends with the last cell that was lost."""
    if seq.state is State.REPLAYING and seq.num_computed >= seq.replay_to:
        seq.replay_to = 0
        back_to_work(books, seq)
