"""What crosses the seam between the scheduler and whoever runs its plans: settings in, `Plan` out, `Outcome` back.

Integers only. The scheduler owns page numbers, the runner owns what the pages contain, and neither ever sees the other's half.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

NO_PAGE = 0  # in a block table: the trash page, which nobody owns
FIRST_TOKENS = 16  # that the chunk which ends a prompt can draw, or as many as there are rows


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The sizes and the rules that a scheduler works with.

    `num_pages` counts usable pages: the trash page 0 is not one of them, so page numbers run from 1 to `num_pages`. Where a sequence is
    all state, `num_pages` is 0: nothing it does takes a page, and only rows are short.
    """

    rows: int
    num_pages: int
    page_size: int  # tokens per page
    prefill_chunk: int  # tokens
    max_len: int  # longest sequence in tokens, prompt and answer together
    window: int | None = None  # tokens that a token sees, itself included, in the layer that sees most; None: all
    near_window: int | None = None  # the same of the layers with a window, where others see all; None: they have no pages of their own
    near_pages: int = 0  # pages of theirs, as many as all rows can hold at once
    near_bytes: int = 0  # host bytes of a chunk of them
    prefill_burst: int = 16  # chunks in a row while all who would decode are patient; 1: a token after every chunk
    chunk_pages: int = 16  # pages moved by one transfer chunk
    chunk_bytes: int = 0  # host bytes one chunk occupies, padding included
    state_bytes: int = 0  # host bytes of one sequence's state, which is a chunk of its own; 0 for models that keep none
    num_snapshots: int = 0  # states kept on the device, where prompts that begin alike may go on
    chunks_per_step: int = 4  # transfer chunks dispatched in one step, parks and restores together
    host_budget_bytes: int | None = None  # None: no limit; 0: no image may be held
    over_budget: str = "replay"  # a victim whose image does not fit: replay drops it, wait lets it keep its pages and pause
    margin_steps: int = 8
    starve_after: int = 3
    victim: str = "smallest"
    resume: str = "head"
    max_bypass: int | None = None  # how many may pass the first in line; None: any number
    admission: str = "optimistic"  # reserve: whoever comes in finds room for all it may ever need, and nobody is parked
    rotate: str = "shifted"  # whom a head that has waited long may replace: any, none, or those that shifted their context
    rotate_after_s: float = 2.0
    keep_images: bool = True  # what will not change stays in host memory after a return, while the budget has room
    prefix_cache: bool = True  # prompt pages that nobody holds stay until their room is needed
    hold: bool = False  # pages of a parked chunk come back when its copy is done, not when it is dispatched
    planner: bool = True
    park_every: int = 0
    park_seed: int | None = None
    num_draft: int = 0  # guessed tokens that a decode step may check behind each row's own
    num_spare: int = 0  # cells behind those that making guesses takes


@dataclass(frozen=True, slots=True)
class ContextShift:
    """When a sequence has `context_len` cells, the `n_discard` tokens after its first `n_keep` leave and it goes on. Whole pages, but for
    `context_len`."""

    context_len: int
    n_keep: int
    n_discard: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One transfer of at most `chunk_pages` pages, to or from one place in host memory. `index` counts the chunks of the image.

    One without pages is the state, of its own size, out of the slot of a row or into it.
    """

    seq_id: int
    epoch: int
    index: int
    pages: tuple[int, ...]
    host_id: int  # written once, by a park, before any restore reads it; free again when the scheduler says so
    row: int | None = None  # whose slot holds the state; None for pages
    is_near: bool = False  # pages of the layers with a window, where these have their own


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """`pages` become entries first, first + 1, ... of the block table of `row`."""

    row: int
    first: int
    pages: tuple[int, ...]
    is_near: bool = False  # of the table for the layers with a window


@dataclass(frozen=True, slots=True)
class Shift:
    """Tokens n_keep .. n_keep + n_discard - 1 of a sequence's context leave. Those after them move up: the cells of `sources` turn back by
    `n_discard` positions and land in `pages`, page by page (mostly the very same ones)."""

    seq_id: int
    n_keep: int
    n_discard: int
    sources: tuple[int, ...]
    pages: tuple[int, ...]


class Fork(NamedTuple):
    """A sequence that begins to decode when the chunk of another ends the prompt of both. Behind the chunk `source`, the page of the last
    prompt token, is copied into `page`, and the state of the other's row, where there are states, into that of `row`. The pages before it
    are those of the other."""

    seq_id: int
    row: int
    source: int | None  # None: there are no pages
    page: int | None
    near: tuple[int, int] | None = None  # the same two of the layers with a window, where these have their own pages


class Fetch(NamedTuple):
    """A state that was kept in `slot` is copied into a row, whose sequence begins there."""

    seq_id: int
    row: int
    slot: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens start .. start + length - 1 of a sequence; the first chunk starts where any page does, or where any
    chunk does if there are states.

    `is_last`: it ends the prompt, and its program samples the first token, of `forks` and `draws` too; not where that was drawn before.
    `is_replay`: all of it was computed before, and nothing is sampled. `keep`: the slot that the state behind it is copied to.
    """

    seq_id: int
    row: int
    start: int
    length: int
    is_last: bool
    is_replay: bool = False
    forks: tuple[Fork, ...] = ()
    draws: tuple[int, ...] = ()  # sequences with the same prompt that it gives their first token and nothing else
    keep: int | None = None

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Its own sequence and those that have their first token of it, in the order in which it samples them."""
        return (self.seq_id, *(fork.seq_id for fork in self.forks), *self.draws)


class DecodeRow(NamedTuple):
    """One row of the decode batch. `position` is its input token's cell: prompt_len + generated - 1, less what shifts have dropped.

    `is_replay`: the cell was computed before; what the row samples is nobody's. Either way its token is the generated one of number
    position + num_dropped - prompt_len. It has `num_cells` cells, for its token and for guesses behind it, or in a replay for the tokens
    that follow. `num_spare` more lie behind those in its pages, for whoever makes guesses to work in.
    """

    seq_id: int
    row: int
    position: int
    is_replay: bool = False
    num_dropped: int = 0
    num_cells: int = 1
    num_spare: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened while planning that a person may want to see: kind is one of
    park, drop (parked without an image), restore, replay (the return of one that was dropped), shift, park_refused, last_resort, admit."""

    kind: str
    seq_id: int
    reason: str = ""
    num_tokens: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    kept_bytes: int = 0  # of these, found in host memory and not copied


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step does, in this order: shifts, park, restore, tables, fetches, prefill, decode."""

    step: int
    shifts: tuple[Shift, ...] = ()
    park: tuple[Chunk, ...] = ()
    restore: tuple[Chunk, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    prefill: PrefillChunk | None = None
    decode: tuple[DecodeRow, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened. A sequence in `finished` may also be the one that was prefilled or decoded, or have been in an earlier outcome: a
    stop may be told when the next step has been planned, which then computes a cell for nobody."""

    prefilled: PrefillChunk | None = None  # with its forks and draws; of those that have left since the plan nothing is entered
    decoded: tuple[int, ...] = ()  # ids of sequences whose row ran, each once for every token more, or for every cell computed again
    finished: Mapping[int, str] = field(default_factory=dict)  # id -> finish reason
    parked: tuple[Chunk, ...] = ()  # chunks whose copy to the host is done
    restored: tuple[Chunk, ...] = ()  # chunks that are back in their pages, checksum verified
