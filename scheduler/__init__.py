"""Who runs, who parks, who returns: integers in, a frozen `Plan` out. Standard library only.

Start reading at `scheduler.py` (the calls), then `sequence.py` (the lifecycle); `plan.py` is the seam to whoever runs the plans. The phases
of a plan are `shift.py`, `forced.py`, `room.py`, `copies.py`, `returns.py` and `build.py` with `fork.py`, in this order; `commit.py` is the
way back, `replay.py` what happens without an image, `recover.py` what happens after a step that broke off.
"""

from jaxkv.scheduler.books import Counters
from jaxkv.scheduler.need import DoesNotFit, need, pages_for, pool_cells
from jaxkv.scheduler.plan import (
    FIRST_TOKENS,
    Chunk,
    ContextShift,
    DecodeRow,
    Fetch,
    Fork,
    Note,
    Outcome,
    Plan,
    PrefillChunk,
    SchedulerConfig,
    Shift,
    TableUpdate,
)
from jaxkv.scheduler.policies import VICTIMS, Candidate
from jaxkv.scheduler.scheduler import Scheduler
from jaxkv.scheduler.sequence import State
from jaxkv.scheduler.shift import BadShift, whole_pages
from jaxkv.scheduler.views import SequenceView, Snapshot

__all__ = [
    "FIRST_TOKENS",
    "VICTIMS",
    "BadShift",
    "Candidate",
    "Chunk",
    "ContextShift",
    "Counters",
    "DecodeRow",
    "DoesNotFit",
    "Fetch",
    "Fork",
    "Note",
    "Outcome",
    "Plan",
    "PrefillChunk",
    "Scheduler",
    "SchedulerConfig",
    "SequenceView",
    "Shift",
    "Snapshot",
    "State",
    "TableUpdate",
    "need",
    "pages_for",
    "pool_cells",
    "whole_pages",
]
