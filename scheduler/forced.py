"""Parks that somebody asked for: every so many tokens, on a seeded random schedule, or by name. They obey the rule of progress."""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.replay import send_away
from jaxkv.scheduler.room import refuse_once
from jaxkv.scheduler.sequence import RUNNING, Sequence, State

RANDOM_PARKS = 1 / 8  # of the residents in each step, under a random schedule


def park_forced(books: Books, turn: Turn) -> None:
    """Park every resident whose turn has come, the leader included. One that the host budget refuses is asked again only when next due."""
    is_set = books.config.park_every > 0 or books.config.park_seed is not None
    for seq in [seq for seq in books.residents if is_set or seq.park_asked]:
        if seq.state in RUNNING and seq.has_progressed and is_due(books, seq):
            seq.forced_at, seq.park_asked = seq.num_computed, False
            if send_away(books, turn, seq, "forced"):
                books.counters.num_parks_forced += 1
            else:
                seq.is_held = False
                refuse_once(books, turn, seq)


def hold(books: Books, seq: Sequence) -> None:
    """Park it, when its turn allows, and keep it away; one that is away already leaves the line."""
    seq.is_held = True
    if seq.state in (State.PARKING, State.PARKED):
        books.parked.remove(seq)
        books.line_up(seq)
    else:
        seq.park_asked = True


def release(books: Books, seq: Sequence) -> None:
    """Let it come back: at the end of the line, or not go at all where it has not left yet."""
    seq.is_held = seq.park_asked = False
    if books.held.pop(seq.seq_id, None) is not None:
        books.line_up(seq)


def is_due(books: Books, seq: Sequence) -> bool:
    """Example: park_every 8 parks at 8, 16, ... generated tokens, and after each chunk that leaves some of the prompt to do."""
    if seq.park_asked:
        return True
    every = books.config.park_every
    if every and seq.num_computed > seq.forced_at and (seq.state is State.PREFILLING or has_passed(seq, every)):
        return True
    return books.config.park_seed is not None and books.random.random() < RANDOM_PARKS


def has_passed(seq: Sequence, every: int) -> bool:
    """Whether it has reached another multiple of `every` tokens; with guesses that come true it may have leapt over it."""
    num_then = max(0, seq.forced_at + 1 - seq.prompt_len)
    return seq.num_generated // every > num_then // every
