"""Which candidate parks: pure functions over a snapshot, chosen by name. Adding one is one function and one line in `VICTIMS`.

The guards (the leader, progress, starvation) are not theirs: they see only candidates that may be parked. Ties go to the younger one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A resident that may be parked; `num_pages` is what its parking frees, `order` counts arrivals."""

    seq_id: int
    num_tokens: int
    num_pages: int
    order: int
    num_parks: int
    is_last_token: bool  # its next token is its last


Policy = Callable[[Sequence[Candidate]], Candidate]


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


VICTIMS: dict[str, Policy] = {"smallest": smallest, "largest": largest, "youngest": youngest, "oldest": oldest}


def spare_the_starved(candidates: Sequence[Candidate], starve_after: int) -> list[Candidate]:
    """The candidates that the guards would rather see parked: not about to end, not parked often already, while there are such."""

    def hardship(candidate: Candidate) -> tuple[bool, bool]:
        return candidate.is_last_token, candidate.num_parks >= starve_after

    least = min(map(hardship, candidates))
    return [candidate for candidate in candidates if hardship(candidate) == least]
