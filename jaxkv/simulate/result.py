"""What a simulation comes to: a line for each request, and the figures of the whole. Owns no clock."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Story:
    """What became of one request. A wait is a time in the waiting line or away from the pool, until it runs again."""

    arrival_s: float
    end_s: float
    num_tokens: int
    num_parks: int
    line_s: float  # from its arrival until it was let in
    pauses_s: tuple[float, ...]  # each from a park until it ran again
    ended: str  # finished, cancelled, failed, refused

    @property
    def longest_wait_s(self) -> float:
        """The longest time at a stretch in which it did not run."""
        return max(self.line_s, *self.pauses_s, 0.0)

    @property
    def total_wait_s(self) -> float:
        """All its waits."""
        return self.line_s + sum(self.pauses_s)

    @property
    def took_s(self) -> float:
        """From its arrival to its end."""
        return self.end_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one simulation; seconds of the simulated clock."""

    makespan_s: float  # from the first arrival to the last end
    longest_wait_s: float
    longest_pause_s: float  # of waits, those after a park
    mean_completion_s: float
    slowest_s: float
    total_wait_s: float
    tokens_per_s: float
    fairness: float  # Jain's index of tokens per second over requests: 1 all alike, 1/n one has it all
    num_parks: int
    num_parks_dropped: int
    num_restores: int
    num_replayed_tokens: int
    num_rotations: int
    num_last_resorts: int
    host_bytes: int  # copied to the host
    device_bytes: int  # copied back
    host_peak_bytes: int  # held at once
    num_steps: int
    num_finished: int
    num_cancelled: int
    num_failed: int
    num_refused: int

    def to_dict(self) -> dict[str, Any]:
        """By name, as results.jsonl has it."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}


def fairness(stories: Sequence[Story]) -> float:
    """Jain, Chiu and Hawe (1984): the square of the sum over n times the sum of squares, of each request's tokens per second."""
    speeds = [story.num_tokens / story.took_s for story in stories if story.took_s > 0]
    squares = sum(speed * speed for speed in speeds)
    return sum(speeds) ** 2 / (len(speeds) * squares) if squares else 1.0


def summarize(stories: Sequence[Story], counts: dict[str, int]) -> Result:
    """The figures of a run from its requests, and from what was counted beside them."""
    served = [story for story in stories if story.ended != "refused"]
    makespan_s = max((story.end_s for story in served), default=0.0) - min((story.arrival_s for story in served), default=0.0)
    num_tokens = sum(story.num_tokens for story in served)
    return Result(
        makespan_s=makespan_s,
        longest_wait_s=max((story.longest_wait_s for story in served), default=0.0),
        longest_pause_s=max((pause for story in served for pause in story.pauses_s), default=0.0),
        mean_completion_s=sum(story.took_s for story in served) / len(served) if served else 0.0,
        slowest_s=max((story.took_s for story in served), default=0.0),
        total_wait_s=sum(story.total_wait_s for story in served),
        tokens_per_s=num_tokens / makespan_s if makespan_s else 0.0,
        fairness=fairness(served),
        num_finished=sum(story.ended == "finished" for story in stories),
        num_cancelled=sum(story.ended == "cancelled" for story in stories),
        num_failed=sum(story.ended == "failed" for story in stories),
        num_refused=len(stories) - len(served),
        **counts,
    )
