"""Which candidate parks and who in the line comes in: pure functions over snapshots, chosen by name.

Adding one is one function and one line in `VICTIMS` or `RETURNS`. The guards are not theirs: a victim policy sees only candidates that may
be parked, a return policy the line in its order, the most urgent priority alone. Ties go to the younger victim
and to the one first in line.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Candidate(NamedTuple):
    """A resident that may be parked; `num_pages` is what its parking frees, `order` counts arrivals."""

    seq_id: int
    num_tokens: int
    num_pages: int
    order: int
    num_parks: int
    is_last_token: bool  # its next token is its last
    priority: int = 0  # lower is more urgent
    num_left: int = 0  # tokens it may still generate
    is_leader: bool = False  # the most tokens among all residents of its priority


class Applicant(NamedTuple):
    """One in the line, of the most urgent priority there; `num_pages` is what the gate asks of it, `fits` that this is to be had now."""

    seq_id: int
    num_tokens: int
    num_pages: int
    order: int
    num_parks: int  # 0: it may be a new one
    priority: int
    num_left: int  # tokens it may still generate
    waited_s: float  # since it was parked or added
    fits: bool


VictimPolicy = Callable[[Sequence[Candidate]], Candidate]
ReturnPolicy = Callable[[Iterable[Applicant]], Applicant | None]


def smallest(candidates: Sequence[Candidate]) -> Candidate:
    """The one that is cheapest to copy."""
    return min(candidates, key=lambda c: (c.num_pages, c.num_tokens, -c.order))


def largest(candidates: Sequence[Candidate]) -> Candidate:
    """The one that frees the most."""
    return max(candidates, key=lambda c: (c.num_pages, c.num_tokens, c.order))


def youngest(candidates: Sequence[Candidate]) -> Candidate:
    """The last to arrive."""
    return max(candidates, key=lambda c: c.order)


def oldest(candidates: Sequence[Candidate]) -> Candidate:
    """The first to arrive."""
    return min(candidates, key=lambda c: c.order)


def priority(candidates: Sequence[Candidate]) -> Candidate:
    """The least urgent, and of these the last to arrive."""
    return max(candidates, key=lambda c: (c.priority, c.order))


VICTIMS: dict[str, VictimPolicy] = {
    "smallest": smallest,
    "largest": largest,
    "youngest": youngest,
    "oldest": oldest,
    "priority": priority,
}


def head(line: Iterable[Applicant]) -> Applicant | None:
    """The first in line, and nobody while it does not fit."""
    first = next(iter(line))
    return first if first.fits else None


def bypass(line: Iterable[Applicant]) -> Applicant | None:
    """Of all that fit the one parked most often."""
    return max((one for one in line if one.fits), key=lambda one: one.num_parks, default=None)


RETURNS: dict[str, ReturnPolicy] = {"head": head, "pass": bypass}


def spare_the_starved(candidates: Sequence[Candidate], starve_after: int) -> list[Candidate]:
    """The candidates that the guards would rather see parked, while there are such.

    First none whose next token is its last; then the least urgent, whatever the policy; of these not the one with the most tokens, and
    none that was parked often already.
    """

    def hardship(candidate: Candidate) -> tuple[bool, int, bool, bool]:
        return candidate.is_last_token, -candidate.priority, candidate.is_leader, candidate.num_parks >= starve_after

    hardships = [hardship(candidate) for candidate in candidates]
    least = min(hardships)
    return [candidate for candidate, found in zip(candidates, hardships, strict=True) if found == least]
