"""Pages of the layers with a window, where other layers see everything: a group of pages of its own, beside the others.

A sequence has both kinds for the cells that its next token sees, and of those before only the others. The group has as many pages as all
rows can hold at once, so a resident never lacks one for long: only while copies of those that left are under way may it have to wait, and
these end by themselves. So nobody is parked for them, and only who takes, shares, moves and gives back pages must know of them.

    window 5, page size 2, 9 cells    pages 7 2 6 9 3   near - - 4 1 8
"""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.need import near_gone, near_lacking, near_most, pages_for, step_cells
from jaxkv.scheduler.plan import NO_PAGE, TableUpdate
from jaxkv.scheduler.sequence import Sequence, State


def drop_near(books: Books) -> None:
    """Give back what the rows' next tokens do not see any more."""
    if not books.config.near_pages:
        return
    for seq in books.residents:
        num = near_gone(books.config, seq.num_cells)
        if num > seq.near_gone:
            books.near.give_back(seq.seq_id, seq.near[seq.near_gone : num])
            seq.near[seq.near_gone : num] = [NO_PAGE] * (num - seq.near_gone)
            seq.near_gone = num


def has_room_near(books: Books) -> bool:
    """Whether one more can come in: it holds no more than a row's share."""
    return not books.config.near_pages or books.near.num_free >= near_most(books.config)


def grow_near(books: Books, turn: Turn, seq: Sequence) -> None:
    """Give it the pages that its next step lacks; the caller has looked at how many are free."""
    num = near_lacking(books.config, seq)
    if num:
        add_near(books, turn, seq, num)


def add_near(books: Books, turn: Turn, seq: Sequence, num: int) -> None:
    """So many pages more, behind those it has."""
    assert seq.row is not None
    pages = books.near.take(seq.seq_id, num)
    turn.tables.append(TableUpdate(seq.row, len(seq.near), tuple(pages), is_near=True))
    seq.near += pages


def lend_near(books: Books, turn: Turn, seq: Sequence, num_cells: int) -> None:
    """Give it the pages for so many cells more, as far as there are any free."""
    num = pages_for(seq.num_cells + num_cells, books.config.page_size) - len(seq.near) if books.config.near_pages else 0
    if (num := min(num, books.near.num_free)) > 0:
        add_near(books, turn, seq, num)


def take_back_near(books: Books, seq: Sequence) -> None:
    """Whatever a row has beyond its next step was lent."""
    if not books.config.near_pages or seq.state not in (State.DECODING, State.REPLAYING):
        return
    num = pages_for(step_cells(books.config, seq, seq.num_cells), books.config.page_size)
    books.near.give_back(seq.seq_id, seq.near[num:])
    del seq.near[num:]


def enter_near(books: Books, turn: Turn, seq: Sequence) -> None:
    """With its row it gets those of what it has, and of its next step."""
    if not books.config.near_pages:
        return
    if not seq.near:
        seq.near_gone = near_gone(books.config, seq.num_cells)
        seq.near = [NO_PAGE] * seq.near_gone
    num = pages_for(step_cells(books.config, seq, seq.num_cells), books.config.page_size) - len(seq.near)
    seq.near += books.near.take(seq.seq_id, num)
    assert seq.row is not None
    turn.tables.append(TableUpdate(seq.row, 0, tuple(seq.near), is_near=True))


def leave_near(books: Books, seq: Sequence, but: set[int] | dict[int, None]) -> None:
    """Give back all but those that a copy has yet to read or may still write."""
    books.near.give_back(seq.seq_id, [page for page in seq.near[seq.near_gone :] if page not in but])
    seq.near, seq.near_gone = [], 0
