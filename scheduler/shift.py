"""Contexts that shift: a sequence whose context is full drops tokens and goes on, however small the pool. Knows no rotation, only pages.

Only whole pages leave, so what stays keeps its place within its page, and the block table and the keys' rotation are all that changes:

    page size 4, context_len 14, n_keep 4, n_discard 4      (k: kept, -: dropped, letters: cells that move up)
    before   k k k k | - - - - | a b c d | e f
    after    k k k k | a b c d | e f                        10 cells; the next token is written to position 10

It happens before the very step that would write past the context's length, so when it happens depends on the sequence alone. A page that
others hold too is copied as it is turned; one that only the prefix cache knows is forgotten there.
"""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.need import pages_for, step_pages
from jaxkv.scheduler.plan import ContextShift, Note, SchedulerConfig, Shift, TableUpdate
from jaxkv.scheduler.sequence import Sequence


class BadShift(Exception):
    """A context shift that cannot work; `field` is the setting to blame."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def whole_pages(config: SchedulerConfig, context_len: int | None, n_keep: int, n_discard: int | None) -> ContextShift:
    """The shift asked for, in whole pages: both numbers are rounded up. None is the longest context, and half of what is not kept.

    Raises BadShift where there is no page to drop, and where `check_shift` does.
    """
    size = config.page_size
    length = config.max_len if context_len is None else context_len
    keep = pages_for(n_keep, size) * size
    most = max(0, length // size * size - keep)  # in full pages
    half = min(pages_for((length - keep) // 2, size) * size, most)
    shift = ContextShift(length, keep, half if n_discard is None else pages_for(n_discard, size) * size)
    check_shift(config, shift)
    return shift


def check_shift(config: SchedulerConfig, shift: ContextShift) -> None:
    """Raise BadShift unless the context fits the model and the empty pool, and there is a page to drop in it."""
    size, length = config.page_size, shift.context_len
    if config.near_pages:
        raise BadShift("context_shift", "got true, but the layers with a window keep no more than that here, and a shift may need more")
    if not 1 <= length <= config.max_len:
        raise BadShift("context_len", f"got {length}, allowed: 1 to {config.max_len}, which is model.max_len")
    if pages_for(length, size) > config.num_pages:
        usable = config.num_pages * size
        raise BadShift("context_len", f"got {length}, and the pool holds {usable} tokens: lower it, or raise pool.tokens")
    most = length // size * size - shift.n_keep
    if shift.n_keep < 0 or shift.n_keep % size or most < size:
        raise BadShift(
            "n_keep",
            f"got {shift.n_keep} tokens in whole pages of {size}, which leaves none to drop of context_len {length}; "
            f"allowed: 0 to {max(0, length // size - 1) * size}",
        )
    if not size <= shift.n_discard <= most or shift.n_discard % size:
        raise BadShift(
            "n_discard",
            f"got {shift.n_discard} tokens in whole pages of {size}, allowed: {size} to {most}, what fills pages in context_len {length} "
            f"after {shift.n_keep} kept tokens",
        )


def shift_contexts(books: Books, turn: Turn) -> None:
    """Shift every context that has no cell left for its next token; one that lacks pages for copies waits for them."""
    for seq in books.residents:
        if seq.shift is not None and seq.is_full and shift_pages(books, seq) <= books.pages.num_free:
            shift_context(books, turn, seq)


def shift_pages(books: Books, seq: Sequence) -> int:
    """Free pages that the shift takes which is due: for copies of pages that others hold too and for the next token, less what it frees.
    Mostly 0.

    A replay shares none of the pages that will move: their keys were forgotten when they first did.
    """
    if not seq.is_full:
        return 0
    assert seq.shift is not None
    first, after = bounds(books, seq)
    num_copied = sum(is_shared(books, page) for page in seq.pages[after:])
    num_freed = sum(not is_shared(books, page) for page in seq.pages[first:after])
    num_next = 0 if seq.replay_to else pages_for(seq.num_cells - seq.shift.n_discard + 1, books.config.page_size)
    num_blank = max(0, num_next - (len(seq.pages) - (after - first)))
    return max(0, num_copied + num_blank - num_freed)


def copied_pages(books: Books, seq: Sequence) -> int:
    """Pages that shifts may take at most, sooner or later, for copies of what others hold too."""
    assert seq.shift is not None
    return sum(is_shared(books, page) for page in seq.pages[seq.shift.n_keep // books.config.page_size :])


def shift_context(books: Books, turn: Turn, seq: Sequence) -> None:
    """Drop the pages after the kept ones; those behind them move up, into pages of its own."""
    assert seq.shift is not None and seq.row is not None
    keep, discard = seq.shift.n_keep, seq.shift.n_discard
    is_replay = seq.num_dropped < seq.num_shifts * discard
    first, after = bounds(books, seq)
    dropped, sources = seq.pages[first:after], tuple(seq.pages[after:])
    seq.num_cells -= discard
    seq.num_dropped += discard
    pages = landing_pages(books, seq, sources, dropped)
    seq.pages[first:] = pages
    forget_images(books, seq, first)
    if not is_replay:
        seq.num_shifts += 1
        books.counters.num_shifts += 1
        reason = f"the context is full: {discard} tokens leave it"
        turn.notes.append(Note("shift", seq.seq_id, reason, seq.num_cells, len(seq.pages)))
    turn.shifts.append(Shift(seq.seq_id, keep, discard, sources, tuple(pages[: len(sources)])))
    turn.tables.append(TableUpdate(seq.row, first, tuple(pages)))


def landing_pages(books: Books, seq: Sequence, sources: tuple[int, ...], dropped: list[int]) -> list[int]:
    """The pages that moved cells land in, and behind them those it needs next and has: one that is back never waits before its first step,
    and a replay never."""
    num_blank = step_pages(books.config, seq) - (len(seq.pages) - len(dropped))
    blank = [page for page in dropped if not is_shared(books, page)][: max(0, num_blank)]
    books.pages.give_back(seq.seq_id, [page for page in dropped if page not in blank])
    shared = [page for page in sources if is_shared(books, page)]
    copies = iter(books.pages.take(seq.seq_id, len(shared)))
    pages = [next(copies) if page in shared else page for page in sources]
    books.pages.give_back(seq.seq_id, shared)
    if not seq.replay_to:  # others hold all that it drops: `shift_pages` has counted on these
        blank += books.pages.take(seq.seq_id, max(0, num_blank - len(blank)))
    for page in (*pages, *blank):
        books.pages.forget_key(page)
    return [*pages, *blank]


def bounds(books: Books, seq: Sequence) -> tuple[int, int]:
    """Its first page that leaves, and the first behind those."""
    assert seq.shift is not None
    size = books.config.page_size
    return seq.shift.n_keep // size, (seq.shift.n_keep + seq.shift.n_discard) // size


def is_shared(books: Books, page: int) -> bool:
    """Whether another holds the page too, be it only to copy it on the way out."""
    return len(books.pages.holders(page)) > 1


def forget_images(books: Books, seq: Sequence, num_kept: int) -> None:
    """Beyond the pages that stay, what is kept in host memory is not what the pages hold any more, and no key names them."""
    seq.page_keys = seq.page_keys[:num_kept]
    void = {first: chunk for first, chunk in seq.kept.items() if first + chunk.span.num_pages > num_kept}
    seq.kept = {first: chunk for first, chunk in seq.kept.items() if first not in void}
    books.host.let_go(void)
