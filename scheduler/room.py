"""Room for the next step, before its batch is built: who parks when the rows would need more pages than there are.

Pages on their way out count as room: those of sequences that are leaving, and of those whose last token this very step makes.
"""

from jaxkv.scheduler import policies
from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.build import grow
from jaxkv.scheduler.copies import dispatch_parks, has_room, image_size
from jaxkv.scheduler.need import chunk_len, has_next_cell, missing_pages
from jaxkv.scheduler.plan import Note
from jaxkv.scheduler.policies import Candidate, VictimPolicy
from jaxkv.scheduler.replay import drop_victim, send_away
from jaxkv.scheduler.sequence import DECODING, PREFILLING, RUNNING, Sequence, State
from jaxkv.scheduler.shift import shift_pages


def serve_last_tokens(books: Books, turn: Turn) -> None:
    """One that needs a page for its last token gets it first: all its pages are back right after."""
    for seq in books.residents:
        if seq.num_generated + 1 == seq.limit and seq.state is DECODING:
            grow(books, turn, seq)


def make_room(books: Books, turn: Turn) -> None:
    """Park victims one by one until the next step fits; with `hold` some steps ahead, since its pages come back late."""
    margin = books.config.margin_steps if books.config.hold else 0
    press(books, turn, "pressure", policies.VICTIMS[books.config.victim], margin)


def last_resort(books: Books, turn: Turn) -> None:
    """The planner is off or was wrong: park the smallest until the step fits. With pages on their way out, the step waits instead."""
    if turn.is_pressed_out or shortage(books) <= 0 or num_leaving(books) > 0:
        return
    press(books, turn, "last_resort", policies.smallest)
    dispatch_parks(books, turn)


def press(books: Books, turn: Turn, cause: str, pick: VictimPolicy, margin: int = 0) -> None:
    """Park until free and leaving pages cover the step's need, or until nobody is left who may be parked."""
    candidates: list[Candidate] | None = None
    while (short := shortage(books, margin)) > 0 and short > num_leaving(books):
        if candidates is None:
            candidates = list_candidates(books)
        if not candidates:
            turn.is_pressed_out = True
            return
        victim = pick(policies.spare_the_starved(candidates, books.config.starve_after))
        shares = books.pages.num_shared(victim.seq_id) > 0
        is_parked = park_victim(books, turn, books.sequences[victim.seq_id], cause)
        candidates = [c for c in candidates if c is not victim and (is_parked or has_room(books, [books.sequences[c.seq_id]]))]
        if shares:  # what it leaves behind may be another's alone now
            candidates = picture(books, [books.sequences[c.seq_id] for c in candidates])


def shortage(books: Books, margin: int = 0) -> int:
    """Pages that the step's rows lack beyond the free ones."""
    config, first = books.config, books.next_to_prefill
    num = 0
    for seq in books.residents:
        if seq.state is DECODING:
            num += 0 if has_next_cell(config, seq, margin) else missing_pages(config, seq, margin)
            num += 0 if seq.shift is None else shift_pages(books, seq)
        elif seq is first:
            num += missing_pages(config, seq, margin)
    return num - books.pages.num_free


def num_leaving(books: Books) -> int:
    """Pages that come back by themselves."""
    return books.pages.num_leaving + sum(own_pages(books, seq) for seq in books.residents if ends_now(books, seq))


def own_pages(books: Books, seq: Sequence) -> int:
    """Pages that its parking frees: those that nobody else stays with."""
    return seq.num_held - books.pages.num_shared(seq.seq_id)


def is_last_token(books: Books, seq: Sequence) -> bool:
    """Whether its next token is its last."""
    if seq.num_generated + 1 != seq.limit or (seq.num_generated and seq.prompt_left):
        return False
    ends_prompt = seq.num_cells + chunk_len(books.config, seq) == seq.prompt_len
    return seq.state is not PREFILLING or (ends_prompt and seq is books.next_to_prefill)


def ends_now(books: Books, seq: Sequence) -> bool:
    """Whether this step is sure to be its last."""
    return is_last_token(books, seq) and seq.state in RUNNING and not seq.is_full and not missing_pages(books.config, seq)


def list_candidates(books: Books) -> list[Candidate]:
    """Residents that pressure may park: not the leader, and nobody who may not leave now."""
    leader = books.leader
    return picture(books, [seq for seq in books.residents if seq is not leader and may_leave(books, seq)])


def may_leave(books: Books, seq: Sequence) -> bool:
    """Whether it has progressed since its return, has a page to give (or its row, where there are no pages), and does not end by itself in
    this step."""
    if not seq.has_progressed or seq.state not in RUNNING:
        return False
    return (own_pages(books, seq) > 0 or not books.config.num_pages) and not ends_now(books, seq)


def picture(books: Books, residents: list[Sequence]) -> list[Candidate]:
    """Residents as a policy sees them."""
    first: dict[int, Sequence] = {}  # by priority, the one with the most tokens
    for seq in books.residents:
        if seq.priority not in first or seq.whole_cells > first[seq.priority].whole_cells:
            first[seq.priority] = seq
    return [
        Candidate(
            seq.seq_id, seq.num_cells, own_pages(books, seq), seq.order, seq.num_parks, is_last_token(books, seq),
            seq.priority, seq.num_left, seq is first[seq.priority],
        )
        for seq in residents
    ]  # fmt: skip


def park_victim(books: Books, turn: Turn, seq: Sequence, cause: str) -> bool:
    """Park it and count it; one refused (False) keeps its pages, and is told of once between two parks."""
    use, num_pages = 1 - books.pages.num_free / books.config.num_pages, seq.num_held
    if not send_away(books, turn, seq, cause):
        refuse_once(books, turn, seq)
        return False
    books.counters.pool_use_at_park.append(use)
    if cause == "last_resort":
        books.counters.num_last_resorts += 1
        turn.notes.append(Note("last_resort", seq.seq_id, "the step did not fit and no park was planned", seq.whole_cells, num_pages))
    else:
        books.counters.num_parks_pressure += 1
    return True


def refuse_once(books: Books, turn: Turn, seq: Sequence) -> None:
    """Refuse, unless that was done since it was last parked."""
    if not seq.was_refused:
        seq.was_refused = True
        refuse(books, turn, seq)


def refuse(books: Books, turn: Turn, seq: Sequence) -> None:
    """Count and tell a park that the host budget does not allow."""
    num_pages, num_bytes = image_size(books, seq)
    reason = f"its image takes {num_bytes} bytes, and {books.host.in_use} of the host budget's {books.host.budget} are held"
    books.counters.num_parks_refused += 1
    turn.notes.append(Note("park_refused", seq.seq_id, reason, seq.num_cells, num_pages, num_bytes))


def replay_one_if_stuck(books: Books, turn: Turn) -> bool:
    """Nobody runs, nothing moves and no image fits the budget: the smallest of the least urgent is dropped, so that others go on."""
    is_moving = turn.decode or turn.prefill or books.flights or books.pages.num_leaving or books.near.num_leaving
    if is_moving or not books.residents or any(seq.state is State.RESTORING or can_shift(books, seq) for seq in books.residents):
        return False
    others = [seq for seq in books.residents if seq is not books.leader]
    assert others, "a resident alone can always go on"
    others = [seq for seq in others if own_pages(books, seq) > 0] or others
    last = max(seq.priority for seq in others)
    victim = policies.smallest(picture(books, [seq for seq in others if seq.priority == last]))
    drop_victim(books, turn, books.sequences[victim.seq_id], "stuck")
    books.counters.num_parks_stuck += 1
    return True


def can_shift(books: Books, seq: Sequence) -> bool:
    """Whether the next plan shifts its context: the pages for it came back in this one."""
    return seq.shift is not None and seq.is_full and shift_pages(books, seq) <= books.pages.num_free
