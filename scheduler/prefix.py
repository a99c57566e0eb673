"""Prompt pages that are in the pool already: shared with whoever holds them, or taken out of the cache, instead of computed again.

A sequence comes with one key per full prompt page but never for the page of its last token, so that something is always left to compute.
Keys are opaque here; equal keys promise equal pages. A page is registered once its every cell was computed by the prefill program, so pages
with generated tokens never are. Nobody writes to a page that has a key.

Where no layer sees further than a window, the pages of that window are all it takes to go on: what lies before them need not be there.
Where there are states, it takes one that was kept just there (snapshots.py), and a model of states alone has keys and no pages.
"""

from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.ledger import PageLedger
from jaxkv.scheduler.need import gate_cells, gone_pages, is_windowed, near_gone
from jaxkv.scheduler.plan import NO_PAGE, Fetch, TableUpdate
from jaxkv.scheduler.replay import go_on_if_whole
from jaxkv.scheduler.sequence import Sequence
from jaxkv.scheduler.snapshots import kept_at


class Found(NamedTuple):
    """Pages with the content of a sequence's pages first, first + 1, ..., `end` excluded; those before `first` are gone. Where there are
    states, the key behind which one was kept."""

    first: int
    pages: list[int]
    end: int
    key: Hashable | None = None
    near: tuple[int, ...] = ()  # of the layers with a window, where these have pages of their own: the last ones before `end`

    @property
    def is_any(self) -> bool:
        return bool(self.pages) or self.key is not None


def find_prefix(books: Books, seq: Sequence) -> Found:
    """The pages that it would share if it began now; it may have begun to share, but not to compute. One that is parked would share those
    that make a chunk of its image needless."""
    held = seq.num_cells // books.config.page_size
    if seq.image:
        found = books.pages.find(seq.page_keys[seq.num_gone : held]) if books.config.num_pages else []
        ends = [chunk.span.first + chunk.span.num_pages for chunk in seq.image if not chunk.span.is_state]
        end = max((end for end in ends if end <= seq.num_gone + len(found)), default=seq.num_gone)
        return Found(seq.num_gone, found[: end - seq.num_gone], end)
    if seq.num_computed != seq.num_cached or (seq.replay_to and is_windowed(books.config, seq)):
        return Found(held, [], held)
    if books.config.state_bytes:
        return find_state(books, seq)
    if is_windowed(books.config, seq):
        return find_window(books, seq)
    found = books.pages.find(seq.page_keys[held:])
    end, near = held + len(found), list[int]()
    if books.config.near_pages:
        end, near = find_seen(books.near, seq, held, end, lambda end: near_gone(books.config, end * books.config.page_size))
    return Found(held, found[: end - held], end, near=tuple(near))


def find_state(books: Books, seq: Sequence) -> Found:
    """The longest beginning of its prompt behind which a state was kept, and all of whose pages that its next token sees are there."""
    size, held = books.config.page_size, seq.num_cells // books.config.page_size
    step = kept_at(books.config) // size
    for end in range(len(seq.page_keys) // step * step if books.snapshots.num_kept else 0, held, -step):
        key = seq.page_keys[end - 1]
        if books.snapshots.find(key) is None:
            continue
        first = max(held, gone_pages(books.config, seq, end * size))
        found = books.pages.find(seq.page_keys[first:end]) if books.config.num_pages else []
        if not books.config.num_pages or len(found) == end - first:
            return Found(first, found, end, key)
    return Found(held, [], held)


def find_window(books: Books, seq: Sequence) -> Found:
    """The longest beginning of its prompt of which all is there that its next token sees."""
    size, held = books.config.page_size, seq.num_cells // books.config.page_size
    end, found = find_seen(books.pages, seq, held, len(seq.page_keys), lambda end: gone_pages(books.config, seq, end * size))
    return Found(end - len(found), found, end)


def find_seen(ledger: PageLedger, seq: Sequence, held: int, end: int, gone: Callable[[int], int]) -> tuple[int, list[int]]:
    """The longest beginning of at most `end` pages before whose end all are there that the next token sees, from `gone(end)` on; and these.

    A page that is missing rules out all beginnings whose window it is in, so that a search where nothing is there looks at one page of each
    window. Page size 2, window 5, 9 keys: for 18 cells pages 7 and 8 must be there; without 7, for 14 cells 5 and 6; ...
    """
    while end > held:
        first = gone(end)
        found = ledger.find(seq.page_keys[first:end])
        if len(found) == end - first:
            return end, found
        end = first + len(found)
    return held, []


def num_in_use(books: Books, seq: Sequence, but_by: Collection[int] = ()) -> int:
    """How many of the pages it would share somebody holds (others than `but_by`): it needs so many free pages less to come in.

    One whose first step is to shift its context would have to copy those that move, so that they save nothing; nor do those that another,
    whose shift is due, moves or drops as long as it alone has them; nor those that fall out of the window while it may count on the gate.
    """
    first, found, *_ = find_prefix(books, seq)
    moving = pages_to_move(books) if found else set()
    if seq.shift is not None and seq.whole_cells == seq.shift.context_len:
        found = found[: (seq.shift.n_keep + seq.shift.n_discard) // books.config.page_size]
    if found and is_windowed(books.config, seq):
        found = found[max(0, gone_pages(books.config, seq, gate_cells(books.config, seq, 2 * books.config.margin_steps)) - first) :]
    return sum(page not in moving and any(holder not in but_by for holder in books.pages.holders(page)) for page in found)


def pages_to_move(books: Books) -> set[int]:
    """Pages that a shift which is due, now or at the end of a replay or a return, moves or drops, and that would have to be copied or kept
    if another held them too."""
    moving: set[int] = set()
    for seq in books.residents:
        if seq.shift is not None and seq.whole_cells == seq.shift.context_len:
            beyond = seq.pages[seq.shift.n_keep // books.config.page_size :]
            moving.update(page for page in beyond if len(books.pages.holders(page)) == 1)
    return moving


def share_first(books: Books, turn: Turn) -> None:
    """Look again just before the first chunk of a prompt: somebody may have computed its beginning since it got its row."""
    seq = books.next_to_prefill
    if seq is not None and seq.row is not None and (first := share_prefix(books, turn, seq)) is not None:
        if seq.pages:
            turn.tables.append(TableUpdate(seq.row, first, tuple(seq.pages[first:])))
        go_on_if_whole(books, seq)


def share_prefix(books: Books, turn: Turn, seq: Sequence) -> int | None:
    """Put the pages that are found in the place of blank ones; the first entry of its block table that changes, None if none does.

    Example with pages of 16 and chunks of 64: it holds 4 blank pages for its first chunk, and 2 are found. They replace the first two, its
    chunk starts at token 32, and of the pages 2 .. 5 that it needs it has two.
    """
    first, found, end, key, near = prefix = find_prefix(books, seq)
    if not prefix.is_any:
        return None
    if seq.image:
        books.pages.share(seq.seq_id, found)
        seq.pages = [NO_PAGE] * first + found
        return 0
    had, gone = seq.num_cells // books.config.page_size, gone_pages(books.config, seq, end * books.config.page_size)
    if found or gone > seq.num_gone:  # a window of one token is no page at all
        start = max(first, had)
        books.pages.give_back(seq.seq_id, seq.pages[seq.num_gone : gone] + seq.pages[max(had, gone) : end])
        books.pages.share(seq.seq_id, found[start - first :])
        seq.pages[:end] = [NO_PAGE] * gone + seq.pages[gone:start] + found[start - first :]
        seq.num_gone = gone
    if near or seq.near:  # a window of one token leaves none, but a longer table
        share_near(books, turn, seq, had, end, near)
    if key is not None:
        fetch_snapshot(books, turn, seq, key)
    count_found(books, seq, end * books.config.page_size - seq.num_cells)
    return had


def share_near(books: Books, turn: Turn, seq: Sequence, had: int, end: int, near: tuple[int, ...]) -> None:
    """The same for the pages that layers with a window have for themselves; it had found `had` pages before."""
    gone = end - len(near)
    start = max(gone, had)
    books.near.give_back(seq.seq_id, seq.near[seq.near_gone : gone] + seq.near[max(had, gone) : end])
    books.near.share(seq.seq_id, near[start - gone :])
    seq.near[:end] = [NO_PAGE] * gone + seq.near[gone:start] + list(near[start - gone :])
    seq.near_gone = gone
    if seq.pages and seq.row is not None:
        turn.tables.append(TableUpdate(seq.row, 0, tuple(seq.near), is_near=True))


def fetch_snapshot(books: Books, turn: Turn, seq: Sequence, key: Hashable) -> None:
    """Its row gets the state that was kept behind the key; what an earlier one brought there is of no use any more."""
    slot = books.snapshots.find(key)
    assert slot is not None and seq.row is not None, f"no state is kept behind what sequence {seq.seq_id} shares, or it has no row"
    books.snapshots.use(key)
    turn.fetches.append(Fetch(seq.seq_id, seq.row, slot))


def reserve_snapshot(books: Books, turn: Turn, seq: Sequence, end: int) -> int | None:
    """The slot that is to keep the state behind the prompt's first `end` tokens; None where it is not worth it, or not yet certain."""
    config = books.config
    num_pages = end // config.page_size
    is_wanted = config.prefix_cache and seq.keeps_prefix and seq.has_progressed and num_pages <= len(seq.page_keys)
    if not (books.snapshots.num_slots and is_wanted) or end % kept_at(config):
        return None
    return books.snapshots.reserve(seq.page_keys[num_pages - 1], turn.step)


def count_found(books: Books, seq: Sequence, num_tokens: int) -> None:
    """It has so many more of its cells without computing them."""
    seq.num_cells = seq.num_cached = seq.forced_at = seq.num_cells + num_tokens  # a forced park comes due by what it computes itself
    books.counters.cached_tokens += 0 if seq.replay_to else num_tokens


def register_prefix(books: Books, seq: Sequence, num_before: int) -> None:
    """Let the pages be found that its prompt filled since it had `num_before` cells."""
    size = books.config.page_size
    is_kept = books.config.prefix_cache and seq.keeps_prefix
    if not books.config.num_pages or (seq.replay_to and is_windowed(books.config, seq)):
        return
    for index in range(max(num_before // size, seq.num_gone), min(seq.num_cells // size, len(seq.page_keys))):
        books.pages.register(seq.pages[index], seq.page_keys[index], is_kept=is_kept)
        if seq.near_gone <= index < len(seq.near):
            books.near.register(seq.near[index], seq.page_keys[index], is_kept=is_kept)
