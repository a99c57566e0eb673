"""After a step that broke off, whatever raised and wherever: the engine goes on. Owns nothing; knows no phase.

All that an answer needs is on the host: the prompt, the tokens so far and the sampler's state, which is a function of both. So those who
were in the pool are dropped and computed again, to the byte; those who wait or are parked notice nothing. A sequence ends only where steps
with it keep breaking off.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxkv.blame import Fault
from jaxkv.ends import end, fail
from jaxkv.pool import allocate
from jaxkv.scheduler import Outcome
from jaxkv.snapshots import allocate_snapshots

if TYPE_CHECKING:
    from jaxkv.engine import Engine

MAX_FAULTS = 2  # steps that may break off with a sequence until it ends, without a token of it between them


def recover(engine: "Engine", error: BaseException) -> None:
    """Bring books, pool, copies and sequences to where the next step can begin."""
    cause = error.__cause__ if isinstance(error, Fault) and error.__cause__ is not None else error
    reason, where = f"a step broke off: {type(cause).__name__}: {cause}", f"{type(cause).__name__} {place(cause)}"
    blamed = find_blamed(engine, error) if isinstance(error, Exception) else ()
    now, transfer = time.perf_counter(), engine.parts.transfer
    engine.stats.num_faults += 1
    transfer.abandon_all()
    engine.rows.forget()
    if engine.speculation is not None:
        engine.speculation.forget()
    restart_pool(engine)
    engine.unread.clear()
    for sequence in engine.sequences.values():
        sequence.num_unread = 0
    generated = {seq_id: sequence.num_generated for seq_id, sequence in engine.sequences.items()}
    engine.scheduler.recover(transfer.flying, generated, now)
    engine.observers.tell("on_fault", engine, where, now)
    end_finished(engine)
    for seq_id in blamed:
        blame(engine, seq_id, reason)
    for seq_id, sequence in engine.sequences.items():
        if engine.scheduler.is_away(seq_id) and sequence.paused_s is None:
            sequence.pause(now)


def place(error: BaseException) -> str:
    """Where it was raised; its own words may quote a prompt or an answer."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f"in {Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno}"


def find_blamed(engine: "Engine", error: BaseException) -> tuple[int, ...]:
    """Those that the step computed for when it broke off; where that says nothing, all that are in the pool, and else all."""
    if isinstance(error, Fault):
        return error.seq_ids
    views = engine.scheduler.snapshot().sequences
    return tuple(view.seq_id for view in views if view.row is not None) or tuple(engine.sequences)


def blame(engine: "Engine", seq_id: int, reason: str) -> None:
    """Count a fault; too many in a row end a sequence."""
    sequence = engine.live(seq_id)
    if sequence is None:
        return
    sequence.num_faults += 1
    if sequence.num_faults >= MAX_FAULTS:
        fail(engine, seq_id, reason)


def restart_pool(engine: "Engine") -> None:
    """A program that fails may have consumed the pool, or left what cannot be read: then there is a new one, of zeros."""
    parts = engine.parts
    try:
        held = [*parts.pool.arrays, *parts.pool.snapshots]
        jax.block_until_ready(held)
        is_lost = any(array.is_deleted() for layer in held for array in layer)
    except Exception:
        is_lost = True
    if is_lost:
        parts.pool.arrays, parts.pool.snapshots = [], []  # the old ones go first
        parts.pool.arrays = allocate(parts.layout, parts.mesh)
        parts.pool.snapshots = allocate_snapshots(parts.layout, parts.mesh)


def end_finished(engine: "Engine") -> None:
    """Those whose last token was taken before the step broke off have their whole answer."""
    for seq_id, sequence in list(engine.sequences.items()):
        reason = sequence.output.finish_reason
        if reason is not None:
            engine.scheduler.commit(Outcome(finished={seq_id: reason}), time.perf_counter())
            end(engine, seq_id, reason)
