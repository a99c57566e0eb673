"""Guesses of a small model: what it knows of each sequence, and what it must be told before it can guess. Knows no scheduler.

It knows the first cells of a sequence as long as that stays in its pages. After a park, a loss or a shift it knows none, and learns them
again a chunk a step, one sequence at a time; meanwhile there are no guesses for that one.
"""

from collections.abc import Mapping

import numpy as np

from jaxkv.live import Live
from jaxkv.programs import DecodeBatch
from jaxkv.scheduler import DecodeRow
from jaxkv.speculate.small import FillBatch, GuessBatch, SmallModel
from jaxkv.speculate.speculation import KeptDrafter, Speculation

Stay = tuple[int, int]  # what changes when a sequence leaves its pages, or its tokens their positions: parks, tokens dropped


class SmallSpeculation(Speculation):
    """A small model guesses, for all rows at once, before the step that checks."""

    def __init__(self, small: SmallModel, num_columns: int, chunk: int, *, rejects: bool) -> None:
        super().__init__(KeptDrafter(), num_columns, rejects=rejects)
        self._small, self._chunk = small, chunk
        self._known: dict[int, tuple[Stay, int]] = {}  # by sequence: since when, and how many cells

    def guess(self, batch: DecodeBatch, wanted: Mapping[DecodeRow, int], live: Mapping[int, Live]) -> dict[int, list[int]]:
        """Tell it of one chunk more, where it lags behind, then ask it about all whom it knows."""
        self._known = {seq_id: known for seq_id, known in self._known.items() if seq_id in live}
        for row in wanted:
            if self._num_new(row, live[row.seq_id]) > self._num_columns:
                self._fill(batch, row, live[row.seq_id])
                break
        ready = {row: num for row in wanted if (num := self._num_new(row, live[row.seq_id])) <= self._num_columns}
        if not ready:
            return {}
        found = self._ask(batch, ready, live)
        for row in ready:
            self._learn(live[row.seq_id], row.position + 1)
        return {row.seq_id: found[row.row, : wanted[row]].tolist() for row in ready}

    def forget(self) -> None:
        """Whatever it knew is to be told again; its pages may be gone with the program that failed."""
        self._known = {}
        self._small.restart()

    def _num_known(self, sequence: Live) -> int:
        stay, num = self._known.get(sequence.seq_id, (None, 0))
        return num if stay == stay_of(sequence) else 0

    def _num_new(self, row: DecodeRow, sequence: Live) -> int:
        return row.position + 1 - self._num_known(sequence)

    def _learn(self, sequence: Live, num_cells: int) -> None:
        self._known[sequence.seq_id] = stay_of(sequence), num_cells

    def _fill(self, batch: DecodeBatch, row: DecodeRow, sequence: Live) -> None:
        start = self._num_known(sequence)
        length = min(self._chunk, row.position - start)
        tokens = np.zeros(self._chunk, np.int32)
        tokens[:length] = tokens_of(sequence, start, start + length)
        first, num = np.array(start, np.int32), np.array(length, np.int32)
        self._small.fill(FillBatch(tokens, first, num, batch.table[row.row : row.row + 1].copy()))
        self._learn(sequence, start + length)

    def _ask(self, batch: DecodeBatch, ready: Mapping[DecodeRow, int], live: Mapping[int, Live]) -> np.ndarray:
        b = len(batch.tokens)
        tokens = np.zeros((b, self._num_columns), np.int32)
        positions, num_tokens, num_cells = np.zeros(b, np.int32), np.zeros(b, np.int32), np.zeros(b, np.int32)
        for row, num in ready.items():
            first, at = row.position + 1 - num, row.row
            tokens[at, :num] = tokens_of(live[row.seq_id], first, row.position + 1)
            positions[at], num_tokens[at], num_cells[at] = first, num, num - 1 + row.num_cells + row.num_spare
        return self._small.guess(GuessBatch(tokens, positions, num_tokens, num_cells, batch.table.copy()))


def stay_of(sequence: Live) -> Stay:
    """As long as this is the same, what lies in the cells of a sequence is its own."""
    return sequence.num_parks, sequence.num_dropped


def tokens_of(sequence: Live, start: int, end: int) -> list[int]:
    """Some tokens of its context."""
    if sequence.shift is not None:
        return sequence.context[start:end]
    num, said = len(sequence.prompt), sequence.output.token_ids
    return [*sequence.prompt[start:end].tolist(), *said[max(0, start - num) : max(0, end - num)]]
