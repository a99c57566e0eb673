"""Cells for guessed tokens: lent for one step where nobody needs them, and taken back before the next plan. Knows no guess.

A row needs one cell, that of its own token, and asks for `num_draft` more. Its last page mostly has them; a page more is lent when the plan
is made, and comes back first of all in the next one, so that who parks, returns or waits is decided as if there were no guesses. A guess
for which there is no cell is not checked.

    pages of 4, 3 guesses, 6 cells: the row has cells 6 and 7, with a page more 6 to 9; it ends with 7 to 10 cells and keeps what it needs
"""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.near import lend_near, take_back_near
from jaxkv.scheduler.need import most_cells, pages_for, step_pages
from jaxkv.scheduler.plan import DecodeRow, TableUpdate
from jaxkv.scheduler.sequence import DECODING, REPLAYING, Sequence


def take_back(books: Books) -> None:
    """Whatever a row that decodes has beyond its next cell was lent."""
    for seq in books.residents if books.config.num_draft else ():
        take_back_near(books, seq)
        if seq.state is DECODING and (num := len(seq.pages) - step_pages(books.config, seq)) > 0:
            lent = seq.pages[-num:]
            del seq.pages[-num:]
            books.pages.give_back(seq.seq_id, lent)


def lend(books: Books, turn: Turn) -> None:
    """Give every row of the plan its cells beyond the first, as far as there are any."""
    if books.config.num_draft:
        turn.decode = [widen(books, turn, row) for row in turn.decode]


def widen(books: Books, turn: Turn, row: DecodeRow) -> DecodeRow:
    """The row with all the cells that it can use."""
    seq, config = books.sequences[row.seq_id], books.config
    num_left, num_spare = cells_left(seq), 0
    num_cells = min(1 + config.num_draft, num_left)
    if config.num_pages:
        missing = pages_for(seq.num_cells + min(num_cells + config.num_spare, num_left), config.page_size) - len(seq.pages)
        if not row.is_replay and (num := min(max(0, missing), books.pages.num_free)):
            pages = books.pages.take(seq.seq_id, num)
            turn.tables.append(TableUpdate(row.row, len(seq.pages), tuple(pages)))
            seq.pages += pages
        lend_near(books, turn, seq, num_cells)
        num_held = (min(len(seq.pages), len(seq.near)) if config.near_pages else len(seq.pages)) * config.page_size - seq.num_cells
        num_cells = min(num_cells, num_held)
        num_spare = num_held - num_cells
    return row._replace(num_cells=num_cells, num_spare=num_spare)


def cells_left(seq: Sequence) -> int:
    """Cells that it will ever need behind those it has: before its end, its next shift, or the end of its replay."""
    if seq.state is not REPLAYING:
        return most_cells(seq) - seq.num_cells
    num_lost = seq.replay_to - seq.num_computed
    return num_lost if seq.shift is None else min(num_lost, seq.shift.context_len - seq.num_cells)
