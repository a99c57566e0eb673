"""Pages that fall out of the window: given back as a sequence grows, where no layer of the model sees further than that.

    window 5, page size 2, 9 cells    pages - - 6 9 3     cells 0 to 3 are behind the window of the next token, in cell 9: page 4, the
                                                          first two are gone, and the third goes when there are 11 cells

A replay has all the pages that it will hold at once, so that it never waits: those that go become its next ones. Nothing of what it
computes is found by others meanwhile, nor does it share what they have.
"""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.need import cell_pages, gone_pages, step_cells
from jaxkv.scheduler.plan import NO_PAGE, TableUpdate
from jaxkv.scheduler.sequence import Sequence


def drop_unseen(books: Books, turn: Turn) -> None:
    """Give back what the rows' next tokens do not see any more. Their block tables need not change: nobody reads those entries."""
    if books.config.window is None:
        return
    for seq in books.residents:
        num = gone_pages(books.config, seq, seq.num_cells)
        if num > seq.num_gone:
            going = seq.pages[seq.num_gone : num]
            seq.pages[seq.num_gone : num] = [NO_PAGE] * len(going)
            seq.num_gone = num
            books.pages.give_back(seq.seq_id, going[come_round(books, turn, seq, going) :])


def come_round(books: Books, turn: Turn, seq: Sequence, going: list[int]) -> int:
    """How many of the pages a replay goes on with, and which it has put at the end of its block table."""
    if not seq.replay_to or seq.row is None:
        return 0
    left = cell_pages(books.config, step_cells(books.config, seq, seq.whole_cells)) - len(seq.pages)
    again = going[: max(0, left)]
    if again:
        turn.tables.append(TableUpdate(seq.row, len(seq.pages), tuple(again)))
        seq.pages += again
    return len(again)
