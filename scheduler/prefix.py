"""Prompt pages that are in the pool already: shared with whoever holds them, or taken out of the cache, instead of computed again.

A sequence comes with one key per full prompt page but never for the page of its last token, so that something is always left to compute.
Keys are opaque here; equal keys promise equal pages. A page is registered once its every cell was computed by the prefill program, so pages
with generated tokens never are. Nobody writes to a page that has a key.
"""

from collections.abc import Collection

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.plan import TableUpdate
from jaxkv.scheduler.replay import go_on_if_whole
from jaxkv.scheduler.sequence import Sequence


def find_prefix(books: Books, seq: Sequence) -> list[int]:
    """The pages that it would share if it began now; it may have begun to share, but not to compute. One that is parked would share those
    that make a chunk of its image needless."""
    if seq.image:
        found = books.pages.find(seq.page_keys[: seq.num_cells // books.config.page_size])
        ends = [chunk.span.first + chunk.span.num_pages for chunk in seq.image if chunk.span.key is not None]
        return found[: max((end for end in ends if end <= len(found)), default=0)]
    if seq.num_computed != seq.num_cached:
        return []
    return books.pages.find(seq.page_keys[seq.num_cells // books.config.page_size :])


def num_in_use(books: Books, seq: Sequence, but_by: Collection[int] = ()) -> int:
    """How many of the pages it would share somebody holds (others than `but_by`): it needs so many free pages less to come in.

    One whose first step is to shift its context would have to copy those that move, so that they save nothing; nor do those that another,
    whose shift is due, moves or drops as long as it alone has them.
    """
    found = find_prefix(books, seq)
    moving = pages_to_move(books) if found else set()
    if seq.shift is not None and seq.whole_cells == seq.shift.context_len:
        found = found[: (seq.shift.n_keep + seq.shift.n_discard) // books.config.page_size]
    return sum(page not in moving and any(holder not in but_by for holder in books.pages.holders(page)) for page in found)


def pages_to_move(books: Books) -> set[int]:
    """Pages that a shift which is due moves or drops, and that would have to be copied or kept if another held them too."""
    moving: set[int] = set()
    for seq in books.residents:
        if seq.shift is not None and seq.is_full:
            beyond = seq.pages[seq.shift.n_keep // books.config.page_size :]
            moving.update(page for page in beyond if len(books.pages.holders(page)) == 1)
    return moving


def share_first(books: Books, turn: Turn) -> None:
    """Look again just before the first chunk of a prompt: somebody may have computed its beginning since it got its row."""
    seq = books.next_to_prefill
    if seq is not None and seq.row is not None and (first := share_prefix(books, seq)) is not None:
        turn.tables.append(TableUpdate(seq.row, first, tuple(seq.pages[first:])))
        go_on_if_whole(books, seq)


def share_prefix(books: Books, seq: Sequence) -> int | None:
    """Put the pages that are found in the place of blank ones; the first entry of its block table that changes, None if none does.

    Example with pages of 16 and chunks of 64: it holds 4 blank pages for its first chunk, and 2 are found. They replace the first two, its
    chunk starts at token 32, and of the pages 2 .. 5 that it needs it has two.
    """
    found = find_prefix(books, seq)
    if not found:
        return None
    if seq.image:
        books.pages.share(seq.seq_id, found)
        seq.pages = found
        return 0
    first = seq.num_cells // books.config.page_size
    blank = seq.pages[first : first + len(found)]
    books.pages.give_back(seq.seq_id, blank)
    books.pages.share(seq.seq_id, found)
    seq.pages[first : first + len(blank)] = found
    count_found(books, seq, len(found) * books.config.page_size)
    return first


def count_found(books: Books, seq: Sequence, num_tokens: int) -> None:
    """It has so many more of its cells without computing them."""
    seq.num_cells = seq.num_cached = seq.forced_at = seq.num_cells + num_tokens  # a forced park comes due by what it computes itself
    books.counters.cached_tokens += 0 if seq.replay_to else num_tokens


def register_prefix(books: Books, seq: Sequence, num_before: int) -> None:
    """Let the pages be found that its prompt filled since it had `num_before` cells."""
    size = books.config.page_size
    is_kept = books.config.prefix_cache and seq.keeps_prefix
    for index in range(num_before // size, min(seq.num_cells // size, len(seq.page_keys))):
        books.pages.register(seq.pages[index], seq.page_keys[index], is_kept=is_kept)
