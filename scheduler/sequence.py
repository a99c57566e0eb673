"""One sequence as the scheduler sees it: where it is in its life, what it holds. Knows no token, no page content, no clock.

     WAITING -> PREFILLING -> DECODING -> FINISHED
                   |  ^          |  ^
                   v  |          v  |
                  PARKING -> PARKED -> RESTORING
                     |          |  `-> REPLAYING     (no image; from RESTORING, PREFILLING, DECODING too when what was computed is lost)
                     |          |          |
     from any state -'----------'----------'---> CANCELLED / FAILED

    transition                            performed by             guaranteed afterwards
    ------------------------------------  -----------------------  ------------------------------------------------------------------
    (new)      -> WAITING                 Scheduler.add            holds nothing
    WAITING    -> PREFILLING              returns.enter            owns a row and the pages of its first chunk
    PREFILLING -> DECODING                commit.prefilled, or     every prompt cell is in its pages, one token is made
                                          fork.begin_decoding
    PREFILLING, DECODING -> PARKING       copies.start_park        no row; host bytes for the whole image; its pages are leaving
    PARKING    -> PARKED                  copies.land              host bytes, no pages, no row (at once when it had computed nothing)
    PARKED     -> RESTORING               returns.enter            owns a row and all its pages, its next step's too; not scheduled
    RESTORING  -> PREFILLING, DECODING    copies.land              as before the park; its host bytes are given back, or spare
    any live   -> PARKED                  replay.drop              no row, no pages, no image: `replay_to` cells to compute again
    PARKED     -> REPLAYING               returns.enter            (dropped) owns a row and all its pages, its next step's too; makes no
                                                                   token and is no victim
    REPLAYING  -> PREFILLING, DECODING    replay.advance           as before the drop
    any        -> a terminal state        copies.end               no row; what no copy touches is given back now, the rest on landing
    FINISHED   -> PARKED                  recover.take_back_end    (at its limit, but the last token was never read) as after a drop

A first token that the chunk of another has drawn (commit.drawn) changes no state: its own prompt is still to be computed, by chunks that
draw none.

One that an operator holds is PARKED in no line: it stays until it is released, and nobody waits behind it.

Repeating a command is a no-op with a reason. Each park, restore and end starts a new epoch; a copy that lands with an old one changes
nothing but the accounts.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from jaxkv.scheduler.images import ImageChunk
from jaxkv.scheduler.plan import Chunk, ContextShift


class State(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PARKING = "parking"
    PARKED = "parked"
    RESTORING = "restoring"
    REPLAYING = "replaying"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


# What is asked of every row in every plan: a member looked up on its class takes five times as long as a name of its own.
PREFILLING, DECODING, REPLAYING = State.PREFILLING, State.DECODING, State.REPLAYING

RUNNING = frozenset({State.PREFILLING, State.DECODING})
AWAY = frozenset({State.PARKING, State.PARKED, State.RESTORING, State.REPLAYING})  # parked, and not yet back to work
OVER = frozenset({State.FINISHED, State.CANCELLED, State.FAILED})


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's record of one sequence; `order` counts arrivals, so a smaller one is older."""

    seq_id: int
    prompt_len: int
    limit: int | None  # tokens it may generate; None where only a shifting context goes on without end
    order: int
    added_at: float
    priority: int = 0  # lower goes first
    page_keys: tuple[Hashable, ...] = ()  # one per full prompt page before the last prompt token; equal keys, equal content
    group: int | None = None  # those of one group have the same prompt
    is_patient: bool = False  # nobody waits for its next token, only for its end
    keeps_prefix: bool = True  # its prompt pages stay in the pool, while there is room, when nobody holds them any more
    shift: ContextShift | None = None
    state: State = State.WAITING
    row: int | None = None
    pages: list[int] = field(default_factory=list)  # held by a resident, in logical order; 0 for those that are gone
    num_gone: int = 0  # of its first pages, those that fell out of the window: neither its pages nor its image have them
    near: list[int] = field(default_factory=list)  # the same of the layers with a window, where these have their own pages
    near_gone: int = 0  # of its first ones, those that a resident has given back
    num_cells: int = 0  # tokens whose keys and values are in its pages or its image
    num_cached: int = 0  # of these, prompt tokens that were found in the pool
    num_generated: int = 0
    replay_to: int = 0  # cells to compute again before it goes on; 0 when it lost nothing
    epoch: int = 0

    image: list[ImageChunk] = field(default_factory=list)  # while it is away
    image_pages: int = 0
    kept: dict[int, ImageChunk] = field(default_factory=dict)  # what its last park left in host memory, by first page, while it is here
    copies_due: deque[Chunk] = field(default_factory=deque)  # chunks of the park or restore under way, not yet dispatched
    copies_left: set[int] = field(default_factory=set)  # indices of those not done: due, in flight, or on another's account

    num_parks: int = 0
    num_shifts: int = 0  # times its context was shifted
    num_dropped: int = 0  # tokens that left its context; a replay counts anew
    parked_since: float | None = None
    entered_at: float = 0.0  # when it last got a row
    has_progressed: bool = True  # since its last return: a chunk or a token
    forced_at: int = 0  # cells it had computed when a forced park last came due
    park_asked: bool = False
    is_held: bool = False  # an operator's park: it stays away, out of the line, until it is released
    was_refused: bool = False  # since its last park: the host budget had no room for its image
    num_bypassed: int = 0  # others let in while it stood first in the line
    has_way: bool = False  # somebody was parked to let it in, so nobody passes it
    way_refused: bool = False  # the host budget had no room for whom it would have replaced, since it was parked
    reason: str = ""  # why it ended

    @property
    def num_held(self) -> int:
        """Pages that it holds as a resident."""
        num = len(self.pages) - self.num_gone
        return num if num > 0 else 0

    @property
    def held_pages(self) -> list[int]:
        """Which they are."""
        return self.pages[self.num_gone :] if self.num_gone else self.pages

    @property
    def num_computed(self) -> int:
        """Cells computed so far, those included that left its context."""
        return self.num_cells + self.num_dropped

    @property
    def is_full(self) -> bool:
        """Whether its next token would be written past its context."""
        is_at_end = self.shift is not None and self.num_cells == self.shift.context_len
        return is_at_end and (self.state is DECODING or self.state is REPLAYING)

    @property
    def num_left(self) -> int:
        """Tokens it may still generate; without a limit, those that its context has room for until it shifts."""
        if self.limit is not None:
            return self.limit - self.num_generated
        return self.shift.context_len - self.num_cells if self.shift else 0

    @property
    def prompt_left(self) -> int:
        """Prompt tokens still to compute."""
        return max(0, self.prompt_len - self.num_cells - self.num_dropped)

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def whole_cells(self) -> int:
        """Cells it has or, in a replay, will have at most: what it is worth, and what its pages must hold."""
        if not self.replay_to:
            return self.num_cells
        num_cells = max(self.replay_to - self.num_dropped, self.num_cells)  # it may find more in the pool than it had
        return num_cells if self.shift is None else min(num_cells, self.shift.context_len)

    @property
    def whole_computed(self) -> int:
        """Cells that it computed, lost or not, those included that left its context."""
        return max(self.replay_to, self.num_cells + self.num_dropped)

    @property
    def made_cells(self) -> int:
        """Cells to compute again if it is dropped: none where it only found some of its prompt in the pool."""
        return self.replay_to or (0 if self.num_computed == self.num_cached else self.num_computed)

    @property
    def wants_chunk(self) -> bool:
        """Whether its next cells are prompt tokens, computed for the first time or again."""
        return self.state is PREFILLING or (self.state is REPLAYING and self.num_computed < self.prompt_len)

    @property
    def wants_row(self) -> bool:
        """Whether its next cell is a generated token's, computed for the first time or again."""
        state = self.state
        return state is DECODING or (state is REPLAYING and self.num_computed >= self.prompt_len)
