"""Who comes back and who comes in: one line, by priority, the parked before the waiting; the return policy says who of it is next.

One gate for all: pages for what each holds, its remaining prompt, one token and the margin, for the newcomer and for every resident. With
`hold`, where room is made `margin_steps` early, the gate stands as much higher: the distance between the two is what prevents flapping.
"""

from collections.abc import Iterator
from itertools import chain, islice

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.copies import dispatch_restores, start_restore
from jaxkv.scheduler.near import enter_near, has_room_near
from jaxkv.scheduler.need import entry_pages, gate_pages, is_windowed
from jaxkv.scheduler.plan import NO_PAGE, Note, TableUpdate
from jaxkv.scheduler.policies import RETURNS, Applicant
from jaxkv.scheduler.prefix import num_in_use, share_prefix
from jaxkv.scheduler.replay import start_replay
from jaxkv.scheduler.sequence import Sequence, State
from jaxkv.scheduler.shift import copied_pages, is_shared, shift_pages

LOOK_AHEAD = 32  # new ones that a policy may choose from: a plan does not walk the whole waiting line


def let_in(books: Books, turn: Turn) -> None:
    """Start returns and admissions, for as long as the policy finds one that fits."""
    dispatch_restores(books, turn)
    margin = gate_margin(books)
    spare: int | None = None
    while books.free_rows and (head := first_in_line(books)):
        spare = spare_pages(books, margin) if spare is None else spare
        seq = choose(books, turn, head, spare)
        if seq is None:
            return
        head.num_bypassed += seq is not head
        spare -= gate_pages(books.config, seq, margin) - num_spared(books, seq)
        enter(books, turn, seq)
        dispatch_restores(books, turn)


def gate_margin(books: Books) -> int:
    """Tokens that every resident must have room for before anyone is let in."""
    return books.config.margin_steps * (2 if books.config.hold else 1)


def spare_pages(books: Books, margin: int) -> int:
    """Pages that are neither held or leaving nor promised to a resident; below zero where more is promised than there is."""
    return books.pages.num_free - sum(promised_pages(books, seq, margin) for seq in books.residents)


def promised_pages(books: Books, seq: Sequence, margin: int) -> int:
    """Pages that a resident may still count on. With `reserve` those too that will stand for shared ones, where shifts copy what others
    hold or a window leaves it to them."""
    num_pages, is_reserved = gate_pages(books.config, seq, margin) - seq.num_held, books.config.admission == "reserve"
    if seq.shift is not None:
        return num_pages + (copied_pages(books, seq) if is_reserved else shift_pages(books, seq))
    return num_pages + (sum(is_shared(books, page) for page in seq.pages) if is_reserved and is_windowed(books.config, seq) else 0)


def num_spared(books: Books, seq: Sequence) -> int:
    """Pages that it need not take, since others have them. With `reserve` none where they are its own sooner or later: where a context may
    shift, which copies what is shared, or with a window."""
    if books.config.admission == "reserve" and (
        is_windowed(books.config, seq) or any(one.shift is not None for one in (seq, *books.residents))
    ):
        return 0
    return num_in_use(books, seq)


def first_in_line(books: Books) -> Sequence | None:
    """The head, or who takes its place: the most urgent of both lines, the parked before the waiting."""
    parked, waiting = books.parked.first, books.waiting.first
    if parked is None or (waiting is not None and waiting.priority < parked.priority):
        return waiting
    return parked


def choose(books: Books, turn: Turn, head: Sequence, spare: int) -> Sequence | None:
    """Whom the policy lets in now. Nobody passes a head that others left for, or that was passed often enough."""
    most = books.config.max_bypass
    is_alone = head.has_way or (most is not None and head.num_bypassed >= most)
    line = iter((head,)) if is_alone else equals(books, head)
    chosen = RETURNS[books.config.resume](applicant(books, turn, seq, spare) for seq in line)
    return None if chosen is None else books.sequences[chosen.seq_id]


def equals(books: Books, head: Sequence) -> Iterator[Sequence]:
    """The head and those behind it of the same priority, as far as a plan looks."""
    return chain(books.parked.equals(head.priority), islice(books.waiting.equals(head.priority), LOOK_AHEAD))


def applicant(books: Books, turn: Turn, seq: Sequence, spare: int) -> Applicant:
    """The picture of one in the line. It fits if its pages are there, its whole image is, and a chunk may be sent."""
    num_pages = gate_pages(books.config, seq, gate_margin(books) if books.residents else 0)
    if num_pages > spare:
        num_pages -= num_spared(books, seq)
    is_ready = seq.state is not State.PARKING and (turn.chunks_left > 0 or not seq.image) and has_room_near(books)
    since = seq.added_at if seq.parked_since is None else seq.parked_since
    return Applicant(
        seq.seq_id, seq.whole_cells, num_pages, seq.order, seq.num_parks, seq.priority, seq.num_left, turn.now - since,
        fits=is_ready and num_pages <= spare,
    )  # fmt: skip


def enter(books: Books, turn: Turn, seq: Sequence) -> None:
    """Give it a row and, all at once, the pages of what it had computed and of its next step: its first progress needs nothing more."""
    kind = "admit" if seq.state is State.WAITING else "replay" if seq.replay_to else "restore"
    (books.waiting if kind == "admit" else books.parked).remove(seq)
    row = books.enter_row(seq)
    if share_prefix(books, turn, seq) is None:
        seq.pages = [NO_PAGE] * seq.num_gone
    num_shared = len(seq.pages)
    seq.pages += books.pages.take(seq.seq_id, entry_pages(books.config, seq) - num_shared)
    seq.entered_at, seq.has_way = turn.now, False
    turn.tables.append(TableUpdate(row, 0, tuple(seq.pages)))
    enter_near(books, turn, seq)
    num_bytes = books.host.size(chunk.span for chunk in seq.image)
    turn.notes.append(Note(kind, seq.seq_id, "", seq.whole_cells, seq.num_held, num_bytes))
    if kind == "admit":
        seq.state = State.PREFILLING
        books.counters.num_admitted += 1
        return
    seq.has_progressed = False
    if kind == "replay":
        start_replay(books, seq)
    else:
        start_restore(books, seq, num_shared)
