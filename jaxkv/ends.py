"""How a sequence leaves an engine, and how it goes on when what it had computed is lost. Owns nothing; knows no step."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxkv.engine import Engine


def fail(engine: "Engine", seq_id: int, reason: str) -> None:
    """End a sequence with an error; nothing happens when it has ended."""
    if seq_id in engine.sequences:
        engine.scheduler.fail(seq_id, reason)
        end(engine, seq_id, "error", reason)


def lose(engine: "Engine", seq_id: int, reason: str) -> None:
    """What a sequence has computed, or its image, is no good any more: drop it, to be computed again.

    Its tokens are on the host, so nothing of the answer is lost. Nothing happens when it has ended.
    """
    sequence, now = engine.live(seq_id), time.perf_counter()
    if sequence is None or engine.scheduler.replay(seq_id, now):
        return
    engine.parts.transfer.abandon(seq_id)
    engine.stats.num_losses += 1
    if sequence.paused_s is None:
        sequence.pause(now)
    engine.observers.tell("on_loss", engine, sequence, reason, now)


def end(engine: "Engine", seq_id: int, reason: str, error: str | None = None) -> None:
    """The one place where a sequence leaves; the scheduler has ended it already."""
    sequence, now, stats = engine.sequences.pop(seq_id), time.perf_counter(), engine.stats
    if sequence.paused_s is not None:
        stats.pause_s.append(sequence.resume(now))
    stats.longest_pause_s.append(sequence.longest_pause_s)
    sequence.handle.completion = sequence.complete(now, reason, error)
    engine.parts.transfer.abandon(seq_id)
    engine.scheduler.forget(seq_id)
    if sequence.group.done:
        stats.count_end(sequence.group.finish_reason, now - sequence.submitted_s)
    engine.observers.tell("on_end", engine, sequence, reason, error, now)
