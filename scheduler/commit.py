"""What happened in a step, entered in the books. A report about a sequence that has ended meanwhile changes nothing."""

from jaxkv.scheduler.books import Books
from jaxkv.scheduler.copies import end, land
from jaxkv.scheduler.fork import begin_decoding
from jaxkv.scheduler.plan import Fork, Outcome, PrefillChunk
from jaxkv.scheduler.prefix import register_prefix
from jaxkv.scheduler.replay import advance
from jaxkv.scheduler.sequence import REPLAYING, Sequence, State


def enter_outcome(books: Books, outcome: Outcome) -> None:
    """Copies first, then progress, then ends: a finished sequence's pages are free before the next plan."""
    for chunk in (*outcome.parked, *outcome.restored):
        land(books, chunk)
    if outcome.prefilled is not None:
        for fork in outcome.prefilled.forks:
            forked(books, fork, outcome.finished.get(fork.seq_id, "length"))
        for seq_id in outcome.prefilled.draws:
            drawn(books, seq_id, outcome.finished.get(seq_id, "length"))
        prefilled(books, outcome.prefilled, outcome.finished.get(outcome.prefilled.seq_id, "length"))
    for seq_id in outcome.decoded:
        decoded(books, seq_id, outcome.finished.get(seq_id, "length"))
    for seq_id, reason in outcome.finished.items():
        finished(books, seq_id, reason)


def prefilled(books: Books, chunk: PrefillChunk, reason: str) -> None:
    """A chunk's cells are computed; the last chunk makes the first token."""
    seq = books.sequences.get(chunk.seq_id)
    if seq is None or seq.is_over:
        return
    assert seq.wants_chunk and seq.num_cells == chunk.start, f"{chunk} of a sequence {seq.state} with {seq.num_cells} cells"
    if seq.state is REPLAYING:
        advance(books, seq, chunk.length)
    else:
        seq.num_cells += chunk.length
    register_prefix(books, seq, chunk.start)
    if chunk.keep is not None:
        books.snapshots.settle(chunk.keep)
    if chunk.is_replay:
        return
    note_progress(books, seq)
    if chunk.is_last:
        seq.state = State.DECODING
        count_token(books, seq.seq_id, reason)
    elif seq.state is State.PREFILLING and not seq.prompt_left:  # its first token was drawn before
        seq.state = State.DECODING


def forked(books: Books, fork: Fork, reason: str) -> None:
    """One that begins from another's chunk has its first token."""
    if begin_decoding(books, fork) is not None:
        count_token(books, fork.seq_id, reason)


def drawn(books: Books, seq_id: int, reason: str) -> None:
    """One has its first token before its prompt is computed, wherever it is."""
    seq = books.sequences.get(seq_id)
    if seq is None or seq.is_over:
        return
    assert not seq.num_generated, f"the first token of sequence {seq_id} is drawn a second time"
    books.counters.num_forks += 1
    count_token(books, seq_id, reason)


def decoded(books: Books, seq_id: int, reason: str) -> None:
    """One token more; its input token has its cell now. In a replay only the cell."""
    seq = books.sequences.get(seq_id)
    if seq is None or seq.is_over:
        return
    assert seq.wants_row, f"a token of sequence {seq_id}, which is {seq.state}"
    if seq.state is REPLAYING:
        advance(books, seq, 1)
        return
    seq.num_cells += 1
    note_progress(books, seq)
    count_token(books, seq_id, reason)


def note_progress(books: Books, seq: Sequence) -> None:
    """With the first progress since its return all that came back has been verified, so its prompt pages may be found again."""
    if not seq.has_progressed:
        register_prefix(books, seq, 0)
    seq.has_progressed = True


def count_token(books: Books, seq_id: int, reason: str) -> None:
    """Count a generated token; the one that reaches the limit ends the sequence, whether the runner says so or not."""
    seq = books.sequences[seq_id]
    seq.num_generated += 1
    if seq.num_generated == seq.limit:
        finished(books, seq_id, reason)


def finished(books: Books, seq_id: int, reason: str) -> None:
    """The runner says that it has ended."""
    seq = books.sequences.get(seq_id)
    if seq is None or seq.is_over:
        return
    end(books, seq, State.FINISHED, reason)
    books.counters.num_finished += 1
