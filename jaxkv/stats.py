"""What an engine has done so far, as numbers: times, gaps, counts. Owns no clock and no policy."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def seconds() -> "array[float]":
    """A compact list of times in seconds: eight bytes per entry."""
    return array("d")


@dataclass(slots=True)
class EngineStats:
    """Totals since the first request."""

    token_gap_s: "array[float]" = field(default_factory=seconds)  # between two tokens of one sequence, where no pause lies between
    pause_s: "array[float]" = field(default_factory=seconds)  # from the order to park until it may run again
    longest_pause_s: "array[float]" = field(default_factory=seconds)  # of each sequence that has ended; 0 where it had none
    queue_s: "array[float]" = field(default_factory=seconds)  # from the request to a sequence's first row
    ttft_s: "array[float]" = field(default_factory=seconds)
    e2e_s: "array[float]" = field(default_factory=seconds)
    num_steps: int = 0
    num_decode_steps: int = 0
    num_busy_rows: int = 0  # summed over decode steps
    num_row_steps: int = 0  # rows of decode steps that made tokens
    num_row_tokens: int = 0  # theirs: more than one each where guesses came true
    num_draft_tokens: int = 0  # guesses that were checked
    num_draft_tokens_accepted: int = 0
    num_requests: int = 0
    num_completed: int = 0
    num_cancelled: int = 0
    num_failed: int = 0
    num_faults: int = 0  # steps that broke off and were made good
    num_losses: int = 0  # sequences whose pages or image went bad, to be computed again
    prompt_tokens: int = 0
    generated_tokens: int = 0
    started_s: float | None = None
    last_token_s: float | None = None

    def count_submit(self, prompt_len: int, now: float) -> None:
        """A request was taken; its prompt counts once, however many choices it asks for."""
        self.num_requests += 1
        self.prompt_tokens += prompt_len
        self.started_s = self.started_s or now

    def count_end(self, finish_reason: str, e2e_s: float) -> None:
        """A request has ended, all its choices."""
        self.e2e_s.append(e2e_s)
        self.num_failed += finish_reason == "error"
        self.num_cancelled += finish_reason == "cancelled"
        self.num_completed += finish_reason not in ("error", "cancelled")

    def count_row(self, num_tokens: int, num_guesses: int) -> None:
        """A row of a decode step made so many tokens, one of its own and the others guessed right."""
        self.num_row_steps += 1
        self.num_row_tokens += num_tokens
        self.num_draft_tokens += num_guesses
        self.num_draft_tokens_accepted += num_tokens - 1

    @property
    def tokens_per_row_step(self) -> float | None:
        """Tokens that a row makes in a decode step, in the mean; None before the first."""
        return self.num_row_tokens / self.num_row_steps if self.num_row_steps else None

    @property
    def draft_acceptance(self) -> float | None:
        """Share of the guesses that came true; None without any."""
        return self.num_draft_tokens_accepted / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def wall_s(self) -> float:
        """From the first request to the last token."""
        return 0.0 if self.started_s is None or self.last_token_s is None else self.last_token_s - self.started_s

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second so far."""
        return self.generated_tokens / self.wall_s if self.wall_s > 0 else 0.0


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed (nearest rank); None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 1).__int__() - 1)]


def spread(values: Iterable[float], scale: float, **shares: float) -> dict[str, float | None]:
    """Named percentiles of values times a scale, rounded to three places: spread(gaps_s, 1e3, p50=0.5, max=1.0)."""
    found = list(values)
    percentiles = {name: percentile(found, share) for name, share in shares.items()}
    return {name: None if value is None else round(value * scale, 3) for name, value in percentiles.items()}
