"""Way for the first in line: who parks so that it can come in, because it is more urgent or because it has waited long.

Nobody parks in vain: it is done only where the first in line fits afterwards, rows and pages on their way out counted. The gate then lets
it in as soon as they are there, and nobody passes it meanwhile.
"""

from collections.abc import Callable

from jaxkv.scheduler import policies
from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.copies import has_room
from jaxkv.scheduler.need import gate_pages
from jaxkv.scheduler.policies import Candidate
from jaxkv.scheduler.prefix import num_in_use
from jaxkv.scheduler.replay import send_away
from jaxkv.scheduler.returns import first_in_line, gate_margin, promised_pages, spare_pages
from jaxkv.scheduler.room import ends_now, may_leave, num_leaving, picture, refuse
from jaxkv.scheduler.sequence import Sequence, State

Picker = Callable[[list[Candidate], Callable[[Candidate], bool]], Candidate]  # from candidates, and who of them would be enough


def make_way(books: Books, turn: Turn) -> None:
    """Park the less urgent for the first in line, or for a head that has waited long those that have had their turn."""
    head = first_in_line(books)
    if head is None or head.state is State.PARKING or books.config.admission == "reserve":
        return
    if head.has_way and (books.pages.num_leaving or books.num_rows_leaving):
        return  # of those who left for it; while their pages come back the others grow, and may take what was just enough
    num_parked = 0
    if residents := [seq for seq in books.residents if seq.priority > head.priority and may_leave(books, seq)]:
        num_parked = park_for(books, turn, head, residents, by_policy(books), "priority")
        books.counters.num_parks_priority += num_parked
    if not num_parked and is_due(books, turn, head):
        residents = [seq for seq in books.residents if may_rotate(books, turn, head, seq)]
        books.counters.num_rotations += park_for(books, turn, head, residents, smallest_that_does, "rotation") if residents else 0


def is_due(books: Books, turn: Turn, head: Sequence) -> bool:
    """Whether it was parked, and long enough ago for somebody to leave for it."""
    after_s = books.config.rotate_after_s
    return books.config.rotate != "none" and head.parked_since is not None and turn.now - head.parked_since >= after_s


def may_rotate(books: Books, turn: Turn, head: Sequence, seq: Sequence) -> bool:
    """Whether it may leave for the head, the leader included: it has had its turn and, unless anyone may, its context was shifted.

    Those with the context they began with end by themselves before long.
    """
    is_rotated = books.config.rotate == "any" or seq.num_shifts > 0
    has_had_turn = turn.now - seq.entered_at >= books.config.rotate_after_s
    return is_rotated and has_had_turn and seq.priority >= head.priority and may_leave(books, seq)


def park_for(books: Books, turn: Turn, head: Sequence, residents: list[Sequence], pick: Picker, cause: str) -> int:
    """Park as many of the residents as let the head in, all or none; returns how many. A refusal is told of once while the head waits.

    A rotation never drops an image: what it would gain is lost on the replay.
    """
    victims = choose_victims(books, head, residents, pick)
    may_drop = cause == "priority" and books.config.over_budget == "replay"
    if not may_drop and not has_room(books, victims):
        if not head.way_refused:
            head.way_refused = True
            refuse(books, turn, victims[0])
        return 0
    for seq in victims:
        is_parked = send_away(books, turn, seq, cause)
        assert is_parked, "the host budget was looked at before"
        head.has_way = True
    return len(victims)


def choose_victims(books: Books, head: Sequence, residents: list[Sequence], pick: Picker) -> list[Sequence]:
    """Who leaves so that the head fits; nobody where it fits already, or would not even with all of them gone."""
    margin = gate_margin(books)
    spare = spare_pages(books, margin) + num_leaving(books)
    has_row = bool(books.free_rows or books.num_rows_leaving) or any(ends_now(books, seq) for seq in books.residents)
    shared = num_in_use(books, head, {seq.seq_id for seq in residents})  # pages that stay, whoever leaves

    def fits_without(victims: list[Sequence]) -> bool:
        own_margin = margin if len(victims) < len(books.residents) else 0
        promised = sum(promised_pages(books, seq, margin) for seq in victims)
        return spare + promised + num_freed(books, victims) >= gate_pages(books.config, head, own_margin) - shared

    if has_row and spare >= gate_pages(books.config, head, margin if books.residents else 0) - num_in_use(books, head):
        return []
    if not fits_without(residents):
        return []
    candidates, victims = picture(books, residents), list[Sequence]()
    while not (has_row or victims) or not fits_without(victims):
        victim = pick(candidates, lambda candidate: fits_without([*victims, books.sequences[candidate.seq_id]]))
        candidates = [other for other in candidates if other is not victim]
        victims.append(books.sequences[victim.seq_id])
    return victims


def num_freed(books: Books, victims: list[Sequence]) -> int:
    """Pages that come back when all of them leave: those that nobody else stays with."""
    if not any(books.pages.num_shared(seq.seq_id) for seq in victims):
        return sum(seq.num_held for seq in victims)
    leaving = {seq.seq_id for seq in victims}
    return len({page for seq in victims for page in seq.held_pages if leaving.issuperset(books.pages.holders(page))})


def by_policy(books: Books) -> Picker:
    """The configured victim policy behind its guards."""
    pick, starve_after = policies.VICTIMS[books.config.victim], books.config.starve_after
    return lambda candidates, lets_in: pick(policies.spare_the_starved(candidates, starve_after))


def smallest_that_does(candidates: list[Candidate], lets_in: Callable[[Candidate], bool]) -> Candidate:
    """The smallest whose pages let the head in, else the largest."""
    enough = [candidate for candidate in candidates if lets_in(candidate)]
    return policies.smallest(enough) if enough else policies.largest(candidates)
