"""Choices of one request that begin together: the chunk that ends their prompt is computed once, and each draws its first token from it.

Whoever of a group comes to the end of the prompt takes along those that have a row by then and have computed nothing of their own: they
hold its full prompt pages beside it, and get a copy of the page of the last prompt token, since each goes on writing there. The others draw
their first token too, wherever they are, in line or away, and nothing else: they find the full pages later and compute the rest of the
prompt themselves, to the same bytes, with a chunk that draws nothing.

    page size 4, prompt 10     pages of the first choice   7 8 9 | its last chunk ends in page 9
                               a fork has pages            7 8 5   9 is copied into 5 as soon as the chunk is computed

A state is copied too, from row to row. The pages are held from the plan on, so that nothing can take them away, also if the first choice
ends in this very step. Knows no token.
"""

from itertools import islice

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.need import gone_pages, near_gone
from jaxkv.scheduler.plan import FIRST_TOKENS, Fork, TableUpdate
from jaxkv.scheduler.prefix import count_found, register_prefix
from jaxkv.scheduler.sequence import Sequence, State


def plan_forks(books: Books, turn: Turn, first: Sequence) -> tuple[Fork, ...]:
    """Those that begin from the chunk that ends the prompt of `first`.

    Nobody does where some of what `first` has may yet turn out to be damaged, nor where the content of a full page has no name, unless
    there are states, beside which pages are found by nobody who has not the state as well.
    """
    num_full = (first.prompt_len - 1) // books.config.page_size if books.config.num_pages else 0
    is_named = len(first.page_keys) >= num_full or books.config.state_bytes > 0
    if first.group is None or not is_named or not first.has_progressed:
        return ()
    num_cells = num_full * books.config.page_size
    if first.num_gone > gone_pages(books.config, first, num_cells) or first.near_gone > near_gone(books.config, num_cells):
        return ()  # its chunks begin in the midst of pages
    forks = [plan_fork(books, turn, first, seq, num_full) for seq in books.residents if may_fork(first, seq)]
    return tuple(fork for fork in forks if fork is not None)


def may_fork(first: Sequence, seq: Sequence) -> bool:
    """Whether it is of the same group, has neither computed anything yet nor drawn its first token, and needs none of the pages that are
    gone."""
    if first.num_gone and seq.shift is not None:
        return False
    is_new = seq.state is State.PREFILLING and seq.num_computed == seq.num_cached and not seq.num_generated
    return is_new and seq.group == first.group and seq is not first


def plan_draws(books: Books, first: Sequence, forks: tuple[Fork, ...]) -> tuple[int, ...]:
    """The others of its group that have no token yet, as far as the program draws so many: beyond that, whoever of them is the first to
    end the prompt takes the next along. One that an operator holds says nothing.

    Nobody does where some of what `first` has may yet turn out to be damaged.
    """
    if first.group is None or not first.has_progressed:
        return ()
    begun = {first.seq_id, *(fork.seq_id for fork in forks)}
    others = (seq for seq in books.groups[first.group] if not (seq.num_generated or seq.is_held or seq.seq_id in begun))
    most = max(books.config.rows, FIRST_TOKENS) - len(begun)
    return tuple(seq.seq_id for seq in islice(others, most))


def plan_fork(books: Books, turn: Turn, first: Sequence, seq: Sequence, num_full: int) -> Fork | None:
    """Put the full pages in the place of all it has but one, which is for the copy; None where it has no such page."""
    assert seq.row is not None and seq.prompt_len == first.prompt_len, f"sequences {first.seq_id} and {seq.seq_id} have one prompt"
    if not books.config.num_pages:
        fork = books.forks[seq.seq_id] = Fork(seq.seq_id, seq.row, None, None)
        return fork
    size = books.config.page_size
    blank = seq.pages[seq.num_cells // size :]
    near_blank = seq.near[seq.num_cells // size :]
    if not blank or (books.config.near_pages and not near_blank):
        return None  # not expected, as it came in with one for its next step: it computes its prompt by itself
    page = blank[-1]
    books.pages.give_back(seq.seq_id, [other for other in seq.held_pages if other != page])
    books.pages.hold_beside(seq.seq_id, first.pages[first.num_gone : num_full])
    seq.pages, seq.num_gone = [*first.pages[:num_full], page], first.num_gone
    count_found(books, seq, num_full * size - seq.num_cells)
    turn.tables.append(TableUpdate(seq.row, 0, tuple(seq.pages)))
    near = fork_near(books, turn, first, seq, num_full, near_blank) if books.config.near_pages else None
    fork = books.forks[seq.seq_id] = Fork(seq.seq_id, seq.row, first.pages[num_full], page, near)
    return fork


def fork_near(books: Books, turn: Turn, first: Sequence, seq: Sequence, num_full: int, blank: list[int]) -> tuple[int, int]:
    """The same for the pages that layers with a window have for themselves: the one to copy, and the one for the copy."""
    assert seq.row is not None
    page = blank[-1]
    books.near.give_back(seq.seq_id, [other for other in seq.near[seq.near_gone :] if other != page])
    books.near.hold_beside(seq.seq_id, first.near[first.near_gone : num_full])
    seq.near, seq.near_gone = [*first.near[:num_full], page], first.near_gone
    turn.tables.append(TableUpdate(seq.row, 0, tuple(seq.near), is_near=True))
    return first.near[num_full], page


def begin_decoding(books: Books, fork: Fork) -> Sequence | None:
    """The prompt is computed and its last page copied: it goes on as if it had computed its own; None where it has left meanwhile."""
    if books.forks.pop(fork.seq_id, None) is None:
        return None
    seq = books.sequences[fork.seq_id]
    seq.num_cells = seq.prompt_len
    register_prefix(books, seq, 0)
    seq.has_progressed = True
    seq.state = State.DECODING
    books.counters.num_forks += 1
    return seq
