"""The batch of one step: who decodes, whose chunk is prefilled, which pages their rows gain."""

from jaxkv.scheduler.books import Books, Turn
from jaxkv.scheduler.fork import plan_draws, plan_forks
from jaxkv.scheduler.near import grow_near
from jaxkv.scheduler.need import chunk_len, has_near_cell, has_next_cell, missing_pages, near_lacking
from jaxkv.scheduler.plan import DecodeRow, PrefillChunk, TableUpdate
from jaxkv.scheduler.prefix import reserve_snapshot
from jaxkv.scheduler.returns import first_in_line
from jaxkv.scheduler.sequence import AWAY, DECODING, Sequence


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
    put_off(books, turn)


def decode_row(books: Books, turn: Turn, seq: Sequence) -> None:
    """Put a sequence into the decode batch if it can have the cell its input token is written to."""
    is_decoding = seq.state is DECODING
    if not (is_decoding or seq.wants_row) or (seq.shift is not None and seq.is_full):
        return
    if (has_next_cell(books.config, seq) and has_near_cell(books.config, seq)) or grow(books, turn, seq):
        assert seq.row is not None
        turn.decode.append(DecodeRow(seq.seq_id, seq.row, seq.num_cells, not is_decoding, seq.num_dropped))


def fill_prefill(books: Books, turn: Turn, leader: Sequence) -> None:
    """The oldest prefilling sequence's chunk; if it must wait for pages, the leader's, or one that already has its pages."""
    first = books.next_to_prefill
    if first is None:
        return
    for seq in books.residents:
        if not seq.wants_chunk:
            continue
        may_take = seq is first or seq is leader or not missing_pages(books.config, seq)
        if may_take and grow(books, turn, seq):
            assert seq.row is not None
            length = chunk_len(books.config, seq)
            end = seq.num_cells + length
            is_replay = end <= seq.replay_to
            is_last = end == seq.prompt_len and (is_replay or not seq.num_generated)
            forks = plan_forks(books, turn, seq) if is_last and not is_replay else ()
            draws = plan_draws(books, seq, forks) if is_last and not is_replay else ()
            keep = None if is_replay else reserve_snapshot(books, turn, seq, end)
            turn.prefill = PrefillChunk(seq.seq_id, seq.row, seq.num_cells, length, is_last, is_replay, forks, draws, keep)
            return


def put_off(books: Books, turn: Turn) -> None:
    """Prompts first: beside a chunk the decode step waits, where nobody minds, for at most `prefill_burst` chunks in a row.

    A decode step takes about as long for one row as for all, so it is best taken when the prompts are done and every row is busy. The rows
    keep the pages that they got for it. prefill_burst 3: chunk, chunk, chunk + decode, chunk, ...
    """
    if turn.prefill and turn.decode and books.num_put_off + 1 < books.config.prefill_burst and nobody_minds(books, turn):
        books.num_put_off += 1
        books.counters.num_put_off += 1
        turn.decode.clear()
    elif turn.decode:
        books.num_put_off = 0


def nobody_minds(books: Books, turn: Turn) -> bool:
    """Whether all who would decode are patient, and so is whoever is next in line, for whom the last token of one of them may make a place;
    and nobody's return or shift waits for pages: tokens are what brings those back."""
    head = first_in_line(books)
    if head is not None and not head.is_patient:
        return False
    is_crowded = books.parked.first is not None or any(seq.state in AWAY or seq.shift is not None for seq in books.residents)
    return not is_crowded and all(books.sequences[row.seq_id].is_patient for row in turn.decode)


def grow(books: Books, turn: Turn, seq: Sequence) -> bool:
    """Give it the pages its next step lacks, all or none; False if there are too few."""
    num = missing_pages(books.config, seq)
    if num > books.pages.num_free or near_lacking(books.config, seq) > books.near.num_free:
        return False
    if num:
        assert seq.row is not None
        pages = books.pages.take(seq.seq_id, num)
        turn.tables.append(TableUpdate(seq.row, len(seq.pages), tuple(pages)))
        seq.pages += pages
    grow_near(books, turn, seq)
    return True
