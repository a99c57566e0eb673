"""Room for the next step, before its batch is built: who parks when the rows would need more pages than there are.

Pages on their way out count as room: those of sequences that are leaving, and of those whose last token this very step makes.
"""

from jaxkv.scheduler import policies
from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.build import grow
from jaxkv.scheduler.copies import dispatch_parks, image_size, start_park
from jaxkv.scheduler.need import chunk_len, missing_pages
from jaxkv.scheduler.plan import Note
from jaxkv.scheduler.policies import Candidate, Policy
from jaxkv.scheduler.sequence import RUNNING, Sequence, State


def serve_last_tokens(books: Books, turn: Turn) -> None:
    """One that needs a page for its last token gets it first: all its pages are back right after."""
    for seq in books.residents:
        if seq.state is State.DECODING and is_last_token(books, seq):
            grow(books, turn, seq)


def make_room(books: Books, turn: Turn) -> None:
    """Park victims one by one until the next step fits; with `hold` some steps ahead, since its pages come back late."""
    margin = books.config.margin_steps if books.config.hold else 0
    if press(books, turn, "pressure", policies.VICTIMS[books.config.victim], margin):
        for seq in books.residents:
            seq.was_refused = False


def last_resort(books: Books, turn: Turn) -> None:
    """The planner is off or was wrong: park the smallest until the step fits. With pages on their way out, the step waits instead."""
    if shortage(books) <= 0 or num_leaving(books) > 0:
        return
    press(books, turn, "last_resort", policies.smallest)
    dispatch_parks(books, turn)


def press(books: Books, turn: Turn, cause: str, pick: Policy, margin: int = 0) -> bool:
    """Park until free and leaving pages cover the step's need; True if they do in the end."""
    candidates: list[Candidate] | None = None
    while shortage(books, margin) > num_leaving(books):
        if candidates is None:
            candidates = list_candidates(books)
        if not candidates:
            return False
        victim = pick(policies.spare_the_starved(candidates, books.config.starve_after))
        candidates.remove(victim)
        park_victim(books, turn, books.sequences[victim.seq_id], cause)
    return True


def shortage(books: Books, margin: int = 0) -> int:
    """Pages that the step's rows lack beyond the free ones."""
    config, first = books.config, books.next_to_prefill
    rows = (seq for seq in books.residents if seq.state is State.DECODING or seq is first)
    return sum(missing_pages(config, seq, margin) for seq in rows) - books.pages.num_free


def num_leaving(books: Books) -> int:
    """Pages that come back by themselves."""
    return books.pages.num_leaving + sum(len(seq.pages) for seq in books.residents if ends_now(books, seq))


def is_last_token(books: Books, seq: Sequence) -> bool:
    """Whether its next token is its last."""
    if seq.state is State.PREFILLING:
        is_next = seq is books.next_to_prefill and seq.num_cells + chunk_len(books.config, seq) == seq.prompt_len
        return seq.limit == 1 and is_next
    return seq.num_generated + 1 == seq.limit


def ends_now(books: Books, seq: Sequence) -> bool:
    """Whether this step is sure to be its last."""
    return is_last_token(books, seq) and seq.state in RUNNING and not missing_pages(books.config, seq)


def list_candidates(books: Books) -> list[Candidate]:
    """Residents that may be parked: not the leader, with progress since their return, and not ending in this step."""
    leader = books.leader
    return [
        Candidate(seq.seq_id, seq.num_cells, len(seq.pages), seq.order, seq.num_parks, is_last_token(books, seq))
        for seq in books.residents
        if seq.state in RUNNING and seq is not leader and seq.has_progressed and not ends_now(books, seq)
    ]


def park_victim(books: Books, turn: Turn, seq: Sequence, cause: str) -> None:
    """Park it and count it; one refused keeps its pages, and is told of once per shortage."""
    use = 1 - books.pages.num_free / books.config.num_pages
    if not start_park(books, turn, seq, cause):
        if not seq.was_refused:
            seq.was_refused = True
            refuse(books, turn, seq)
        return
    books.counters.pool_use_at_park.append(use)
    if cause == "last_resort":
        books.counters.num_last_resorts += 1
        turn.notes.append(Note("last_resort", seq.seq_id, "the step did not fit and no park was planned", seq.num_cells, seq.image_pages))
    else:
        books.counters.num_parks_pressure += 1


def refuse(books: Books, turn: Turn, seq: Sequence) -> None:
    """Count and tell a park that the host budget does not allow."""
    num_pages, _, num_bytes = image_size(books, seq)
    reason = f"its image takes {num_bytes} bytes, and {books.host.held} of the host budget's {books.host.budget} are held"
    books.counters.num_parks_refused += 1
    turn.notes.append(Note("park_refused", seq.seq_id, reason, seq.num_cells, num_pages, num_bytes))
