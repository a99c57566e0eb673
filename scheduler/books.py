"""Everything the scheduler keeps: the one mutable object of this package, passed to the functions that plan and commit.

`Books` is what lasts, `Turn` is the plan being written in this step.
"""

import bisect
import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jaxkv.scheduler.images import HostLedger, ImageChunk
from jaxkv.scheduler.ledger import PageLedger
from jaxkv.scheduler.lines import Line
from jaxkv.scheduler.plan import Chunk, DecodeRow, Fetch, Fork, Note, Plan, PrefillChunk, SchedulerConfig, Shift, TableUpdate
from jaxkv.scheduler.sequence import Sequence
from jaxkv.scheduler.snapshots import SnapshotLedger


@dataclass(slots=True)
class Flight:
    """A dispatched chunk, and what comes back when it lands."""

    chunk: Chunk
    image_chunk: ImageChunk
    is_park: bool
    pages: tuple[int, ...] = ()
    row: int | None = None


@dataclass(slots=True)
class Counters:
    """What happened so far; monotone, except `host_bytes`, which is held now, and ends that are taken back."""

    num_admitted: int = 0
    num_finished: int = 0  # taken back where the last token is lost with a step that broke off
    num_cancelled: int = 0
    num_failed: int = 0
    num_parks: int = 0
    num_parks_forced: int = 0
    num_parks_pressure: int = 0
    num_parks_priority: int = 0  # for one of a more urgent priority that stood first in the line
    num_rotations: int = 0  # for the head, which had waited long
    num_parks_stuck: int = 0  # since no image fitted the host budget and nobody could go on
    num_parks_lost: int = 0  # since what a resident had computed was lost
    num_parks_copied: int = 0  # of all parks, those with an image
    num_parks_dropped: int = 0  # and those without: computed again later
    num_parks_refused: int = 0
    num_last_resorts: int = 0
    num_restores: int = 0  # returns, by copies or by replay
    num_restores_replayed: int = 0  # of these, by replay
    num_replayed_tokens: int = 0  # computed again
    num_shifts: int = 0  # contexts that were full and dropped tokens, replays not counted
    num_put_off: int = 0  # decode steps that made way for a prompt chunk
    num_ended_parked: int = 0  # ended between a park and the end of the return
    num_kept_hits: int = 0  # chunks that a park found in host memory and did not copy
    kept_bytes_saved: int = 0  # theirs, padding included
    num_forks: int = 0  # choices that drew their first token from the chunk of another
    cached_tokens: int = 0  # prompt tokens found in the pool instead of computed
    host_bytes: int = 0
    host_bytes_peak: int = 0
    pool_use_at_park: list[float] = field(default_factory=list)  # held pages / all pages, at each park that pressure caused


@dataclass(slots=True)
class Turn:
    """One plan while it is written."""

    step: int
    now: float
    chunks_left: int
    is_pressed_out: bool = False  # the step does not fit, and nobody is left to park
    shifts: list[Shift] = field(default_factory=list)
    park: list[Chunk] = field(default_factory=list)
    restore: list[Chunk] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    prefill: PrefillChunk | None = None
    decode: list[DecodeRow] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def plan(self) -> Plan:
        return Plan(
            self.step,
            tuple(self.shifts),
            tuple(self.park),
            tuple(self.restore),
            tuple(self.tables),
            tuple(self.fetches),
            self.prefill,
            tuple(self.decode),
            tuple(self.notes),
        )


class Books:
    """The sequences, the rows, the lines, the copies in flight and the two ledgers."""

    def __init__(self, config: SchedulerConfig, on_drop: Callable[[int], None] = lambda host_id: None) -> None:
        self.config = config
        self.pages = PageLedger(config.num_pages)
        self.near = PageLedger(config.near_pages)
        self.snapshots = SnapshotLedger(config.num_snapshots if config.state_bytes else 0)
        self.host = HostLedger(
            config.host_budget_bytes, config.chunk_bytes, config.state_bytes, config.near_bytes, keep=config.keep_images, on_drop=on_drop
        )
        self.counters = Counters()
        self.random = random.Random(config.park_seed)
        self.num_steps = 0
        self.num_added = 0
        self.num_live = 0
        self.num_put_off = 0  # decode steps in a row that made way for a chunk
        self.sequences: dict[int, Sequence] = {}
        self.residents: list[Sequence] = []  # those that own a row, oldest first
        self.free_rows = list(range(config.rows))  # a heap
        self.waiting = Line()
        self.parked = Line()  # PARKING and PARKED
        self.held: dict[int, Sequence] = {}  # PARKING and PARKED as well, but by an operator, and in no line
        self.to_park: deque[Sequence] = deque()  # those with park chunks to dispatch
        self.to_restore: deque[Sequence] = deque()
        self.flights: dict[tuple[int, int, int], Flight] = {}  # by sequence, epoch and index
        self.forks: dict[int, Fork] = {}  # of the plan that is being carried out, by sequence
        self.groups: dict[int, list[Sequence]] = {}  # those that live of each group, in order of arrival

    def ledger(self, chunk: Chunk) -> PageLedger:
        """Whose pages a chunk has."""
        return self.near if chunk.is_near else self.pages

    @property
    def leader(self) -> Sequence | None:
        """The resident with the most tokens among the most urgent; of equals the older."""
        leader: Sequence | None = None
        most = 0
        for seq in self.residents:
            num_cells = seq.whole_cells
            if leader is None or seq.priority < leader.priority or (num_cells > most and seq.priority == leader.priority):
                leader, most = seq, num_cells
        return leader

    @property
    def next_to_prefill(self) -> Sequence | None:
        """The one whose chunk comes next: the most urgent whose prompt is not computed, and of these the oldest."""
        prefilling = [seq for seq in self.residents if seq.num_cells < seq.prompt_len and seq.wants_chunk]
        return min(prefilling, key=lambda seq: seq.priority, default=None)

    def join_group(self, seq: Sequence) -> None:
        """One more of its group, if it has one."""
        if seq.group is not None:
            self.groups.setdefault(seq.group, []).append(seq)

    def leave_group(self, seq: Sequence) -> None:
        """One less; of a group that is all gone nothing is kept."""
        if seq.group is not None:
            self.groups[seq.group].remove(seq)
            if not self.groups[seq.group]:
                del self.groups[seq.group]

    def line_up(self, seq: Sequence, *, is_first: bool = False) -> None:
        """One that is away waits for its return, or to be released."""
        if seq.is_held:
            self.held[seq.seq_id] = seq
        elif is_first:
            self.parked.prepend(seq)
        else:
            self.parked.append(seq)

    def enter_row(self, seq: Sequence) -> int:
        """Give it the lowest free row."""
        seq.row = heapq.heappop(self.free_rows)
        bisect.insort(self.residents, seq, key=lambda other: other.order)
        return seq.row

    @property
    def num_rows_leaving(self) -> int:
        """Rows that nobody sits in, but whose state a copy has yet to read, or may still write: they come back by themselves."""
        return self.config.rows - len(self.free_rows) - len(self.residents)

    def leave_row(self, seq: Sequence, *, is_free: bool = True) -> None:
        """Take its row back, if it has one; one whose state a copy is about to touch is not `is_free` yet."""
        if seq.row is not None:
            self.residents.remove(seq)
            row, seq.row = seq.row, None
            self.free_row(row if is_free else None)

    def free_row(self, row: int | None) -> None:
        """A row, if this is one, is anybody's again."""
        if row is not None:
            heapq.heappush(self.free_rows, row)
