"""A step whose tokens are still on the device, and whether the next one may begin before the host has read them. Knows no engine.

What the next step needs of a token is its number, to feed it, and that the device knows by itself. That there is one, and so which cell
comes next and who reaches the limit, is certain without it. A stop is not: a row that has stopped runs once more, for nobody.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxkv.live import Live
from jaxkv.sampling import Sampled
from jaxkv.scheduler import DecodeRow, PrefillChunk
from jaxkv.scoring import Scores

Prefilled = tuple[Sampled, Scores]


@dataclass(slots=True)
class Dispatched:
    """What a step's programs compute. `chunk` and `rows` are those of its plan whose results are somebody's."""

    chunk: PrefillChunk | None
    rows: tuple[DecodeRow, ...]
    prefilled: Prefilled | None
    decoded: Sampled | None

    @property
    def first(self) -> tuple[int, ...]:
        """Who gets a first token, in the order of the draws."""
        samples = self.chunk is not None and self.chunk.is_last and not self.chunk.is_replay
        return self.chunk.seq_ids if samples and self.chunk is not None else ()

    @property
    def drawn(self) -> dict[int, tuple[bool, int]]:
        """Who gets a token, with the place of it: whether it is a first one, and which of those or of the rows."""
        firsts = {seq_id: (True, index) for index, seq_id in enumerate(self.first)}
        return firsts | {entry.seq_id: (False, entry.row) for entry in self.rows if not entry.is_replay}

    def without(self, lost: set[int]) -> None:
        """These computed from something damaged."""
        if self.chunk is not None and self.chunk.seq_id in lost:
            self.chunk = None
        self.rows = tuple(entry for entry in self.rows if entry.seq_id not in lost)


def can_wait(sequences: Iterable[Live]) -> bool:
    """Whether the next step can be built without the tokens of these: no mask and no penalty is made of them on the host."""
    return not any(sequence.wants_history or sequence.output.guide is not None for sequence in sequences)
