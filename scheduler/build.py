"""The batch of one step: who decodes, whose chunk is prefilled, which pages their rows gain, and the end of one when nobody can go on."""

from jaxkv.scheduler import policies
from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.copies import end, image_size
from jaxkv.scheduler.need import chunk_len, has_next_cell, missing_pages
from jaxkv.scheduler.plan import DecodeRow, Note, PrefillChunk, TableUpdate
from jaxkv.scheduler.policies import Candidate
from jaxkv.scheduler.sequence import Sequence, State


def fill_batch(books: Books, turn: Turn) -> None:
    """Rows get their next page, the leader first, then the oldest; one that cannot have it waits this step."""
    leader = books.leader
    if leader is None:
        return
    decode_row(books, turn, leader)
    for seq in books.residents:
        if seq is not leader:
            decode_row(books, turn, seq)
    fill_prefill(books, turn, leader)


def decode_row(books: Books, turn: Turn, seq: Sequence) -> None:
    """Put a sequence into the decode batch if it can have the cell its input token is written to."""
    if seq.state is State.DECODING and (has_next_cell(books.config, seq) or grow(books, turn, seq)):
        assert seq.row is not None
        turn.decode.append(DecodeRow(seq.seq_id, seq.row, seq.num_cells))


def fill_prefill(books: Books, turn: Turn, leader: Sequence) -> None:
    """The oldest prefilling sequence's chunk; if it must wait for pages, the leader's, or one that already has its pages."""
    first = books.next_to_prefill
    for seq in books.residents:
        if seq.state is not State.PREFILLING:
            continue
        may_take = seq is first or seq is leader or not missing_pages(books.config, seq)
        if may_take and grow(books, turn, seq):
            assert seq.row is not None
            length = chunk_len(books.config, seq)
            is_last = seq.num_cells + length == seq.prompt_len
            turn.prefill = PrefillChunk(seq.seq_id, seq.row, seq.num_cells, length, is_last)
            return


def grow(books: Books, turn: Turn, seq: Sequence) -> bool:
    """Give it the pages its next step lacks, all or none; False if there are too few."""
    num = missing_pages(books.config, seq)
    if num > books.pages.num_free:
        return False
    if num:
        assert seq.row is not None
        pages = books.pages.take(seq.seq_id, num)
        turn.tables.append(TableUpdate(seq.row, len(seq.pages), tuple(pages)))
        seq.pages += pages
    return True


def end_one_if_stuck(books: Books, turn: Turn) -> None:
    """Nobody runs, nothing moves, and no image fits the host budget: the smallest resident but the leader ends, so that others go on."""
    is_moving = turn.decode or turn.prefill or books.flights or books.pages.num_leaving
    if is_moving or not books.residents or any(seq.state is State.RESTORING for seq in books.residents):
        return
    others = [seq for seq in books.residents if seq is not books.leader]
    assert others, "a resident alone can always go on"
    sizes = [Candidate(seq.seq_id, seq.num_cells, len(seq.pages), seq.order, seq.num_parks, False) for seq in others]
    seq = books.sequences[policies.smallest(sizes).seq_id]
    num_pages, num_bytes = image_size(books, seq)
    reason = (
        f"the pool is full and nobody can go on: this sequence's image takes {num_bytes} bytes, and {books.host.in_use} of the host "
        f"budget's {books.host.budget} are held; raise scheduler.host_budget_mib or pool.tokens"
    )
    end(books, seq, State.FAILED, reason)
    books.counters.num_failed += 1
    turn.notes.append(Note("over_budget", seq.seq_id, reason, seq.num_cells, num_pages, num_bytes))
