"""Who comes back and who comes in: one line, the parked before the waiting, and nobody passes its head.

One gate for all: pages for what each holds, its remaining prompt, one token and the margin, for the newcomer and for every resident. With
`hold`, where room is made `margin_steps` early, the gate stands as much higher: the distance between the two is what prevents flapping.
"""

from collections import deque

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.copies import dispatch_restores, start_restore
from jaxkv.scheduler.need import gate_pages, step_pages
from jaxkv.scheduler.plan import Note, TableUpdate
from jaxkv.scheduler.sequence import Sequence, State


def let_in(books: Books, turn: Turn) -> None:
    """Start returns and admissions from the head of the line for as long as the head fits."""
    dispatch_restores(books, turn)
    margin = books.config.margin_steps * (2 if books.config.hold else 1)
    spare: int | None = None
    while (line := front(books)) and is_ready(books, turn, line[0]):
        spare = spare_pages(books, margin) if spare is None else spare
        seq = line[0]
        own_margin = margin if books.residents else 0
        if gate_pages(books.config, seq, own_margin) > spare:
            return
        line.popleft()
        enter(books, turn, seq)
        spare -= gate_pages(books.config, seq, margin)
        dispatch_restores(books, turn)


def spare_pages(books: Books, margin: int) -> int:
    """Pages that are neither held or leaving nor promised to a resident; below zero where more is promised than there is."""
    promised = sum(gate_pages(books.config, seq, margin) - len(seq.pages) for seq in books.residents)
    return books.pages.num_free - promised


def front(books: Books) -> deque[Sequence] | None:
    """The line whose first is the head: parked before waiting. Those that ended in the line are dropped here."""
    for line in (books.parked, books.waiting):
        while line and line[0].is_over:
            line.popleft()
        if line:
            return line
    return None


def is_ready(books: Books, turn: Turn, seq: Sequence) -> bool:
    """Whether all but pages is there: a row, its whole image, a chunk to send."""
    has_chunk = turn.chunks_left > 0 or not seq.image_pages
    return bool(books.free_rows) and seq.state is not State.PARKING and has_chunk


def enter(books: Books, turn: Turn, seq: Sequence) -> None:
    """Give it a row and, all at once, the pages of its image and of its next step: its first progress needs nothing more."""
    is_new = seq.state is State.WAITING
    row = books.enter_row(seq)
    seq.pages = books.pages.take(seq.seq_id, step_pages(books.config, seq))
    turn.tables.append(TableUpdate(row, 0, tuple(seq.pages)))
    turn.notes.append(Note("admit" if is_new else "restore", seq.seq_id, "", seq.num_cells, len(seq.pages), seq.image_bytes))
    if is_new:
        seq.state = State.PREFILLING
        books.counters.num_admitted += 1
    else:
        seq.has_progressed = False
        start_restore(books, seq)
