"""What a decode step checks beside each row's own token, and what of it was true. Owns the guesses of one step; knows no page.

A row gets no more guesses than it has cells, and only where each column's sampler can be told what it must know: none where a grammar or
forbidden words make another mask after every token, and none past the token that `min_tokens` ends with. Penalties see the guesses.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from jaxkv.live import Live
from jaxkv.programs import DecodeBatch, PrefillBatch
from jaxkv.scheduler import DecodeRow, PrefillChunk
from jaxkv.speculate.head import HeadBatch, HeadChunk
from jaxkv.speculate.ngram import Lookup
from jaxkv.speculate.verify import VerifyBatch


class Drafter(Protocol):
    """Who guesses."""

    def guess(self, wanted: Mapping[int, int], live: Mapping[int, Live]) -> dict[int, list[int]]:
        """At most so many tokens for each sequence, by its id."""


class NgramDrafter:
    """Looks each sequence's last tokens up in what it was told and has said."""

    def __init__(self) -> None:
        self._found: dict[int, Lookup] = {}

    def guess(self, wanted: Mapping[int, int], live: Mapping[int, Live]) -> dict[int, list[int]]:
        """The index of a sequence grows with it, and goes with it."""
        self._found = {seq_id: lookup for seq_id, lookup in self._found.items() if seq_id in live}
        return {seq_id: self._up_to_date(live[seq_id]).guess(num) for seq_id, num in wanted.items()}

    def _up_to_date(self, sequence: Live) -> Lookup:
        lookup = self._found.setdefault(sequence.seq_id, Lookup())
        if not lookup.num_tokens:
            lookup.take(sequence.prompt.tolist())
        lookup.take(sequence.output.token_ids[lookup.num_tokens - len(sequence.prompt) :])
        return lookup


class Speculation:
    """The guesses of the step that is being taken."""

    def __init__(self, drafter: Drafter, num_columns: int, *, rejects: bool) -> None:
        """`rejects`: guesses are computed, and never taken."""
        self._drafter, self._num_columns, self._rejects = drafter, num_columns, rejects
        self._guesses: dict[int, list[int]] = {}

    def widen(self, batch: DecodeBatch, rows: tuple[DecodeRow, ...], live: Mapping[int, Live]) -> Any:
        """The arrays of the verify step for a decode batch."""
        return self.check(batch, rows, live)

    def check(self, batch: DecodeBatch, rows: tuple[DecodeRow, ...], live: Mapping[int, Live]) -> VerifyBatch:
        """The decode batch with guesses behind each row's token, or in a replay with the tokens that followed."""
        b = len(batch.tokens)
        tokens, num_tokens, is_known = np.zeros((b, self._num_columns), np.int32), np.zeros(b, np.int32), np.zeros(b, bool)
        self._guesses = self.guess(batch, {row: num for row in rows if (num := num_useful(row, live[row.seq_id])) > 0}, live)
        for row in rows:
            sequence = live[row.seq_id]
            more = known_tokens(row, sequence) if row.is_replay else self._guesses.get(row.seq_id, [])
            tokens[row.row, : 1 + len(more)] = [batch.tokens[row.row], *more]
            num_tokens[row.row], is_known[row.row] = 1 + len(more), row.is_replay
            if sequence.wants_history and not row.is_replay:
                said = batch.knobs.history_len[row.row]
                batch.knobs.history[row.row, said : said + len(more)] = more
        may_accept: Any = np.bool_(not self._rejects)
        return VerifyBatch(tokens, batch.positions, num_tokens, is_known, may_accept, batch.table, batch.near, batch.knobs)

    def guess(self, batch: DecodeBatch, wanted: Mapping[DecodeRow, int], live: Mapping[int, Live]) -> dict[int, list[int]]:
        """At most so many guesses for each row, by its sequence."""
        return self._drafter.guess({row.seq_id: num for row, num in wanted.items()}, live)

    def lengthen(self, batch: PrefillBatch, chunk: PrefillChunk, live: Mapping[int, Live]) -> Any:
        """The prompt's chunk with what whoever guesses must know of it."""
        return batch

    def hear(self, ran: tuple[DecodeRow, ...] | PrefillChunk, guesses: Any = None) -> None:
        """A program was dispatched; `guesses` are those that it makes, for the step after the tokens it samples."""

    def learn(self, live: Mapping[int, Live]) -> None:
        """The tokens of the step are taken: now it is known what its guesses come behind."""

    def forget(self) -> None:
        """The step broke off: what was heard in it may never be read."""

    def num_guesses(self, row: DecodeRow) -> int:
        """How many guesses of a row are checked."""
        return len(self._guesses.get(row.seq_id, []))

    def columns(self, row: DecodeRow, sampled: np.ndarray) -> Iterator[int]:
        """The places of a row's samples that count, in order: of its own token, and as long as a guess is what was sampled before it."""
        first, guesses = row.row * self._num_columns, self._guesses.get(row.seq_id, [])
        for column, guess in enumerate([*guesses, None]):
            yield first + column
            if self._rejects or guess != sampled[first + column]:
                return


def num_useful(row: DecodeRow, sequence: Live) -> int:
    """Guesses that can be checked behind a row's token."""
    if row.is_replay or sequence.output.guide is not None:
        return 0
    num_early = sequence.params.min_tokens - sequence.num_generated if sequence.banned else 0
    return min(row.num_cells, num_early if num_early > 0 else row.num_cells) - 1


def known_tokens(row: DecodeRow, sequence: Live) -> list[int]:
    """Behind the first of a replay, the tokens that were fed there before."""
    first = row.position + row.num_dropped - len(sequence.prompt)
    return sequence.output.token_ids[first + 1 : first + row.num_cells]


class KeptDrafter:
    """Guesses that were made beside the tokens they come behind, kept until those are fed; parks change nothing about them."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, list[int]]] = {}  # by sequence: how many tokens it had, what may come next

    def keep(self, sequence: Live, guesses: list[int]) -> None:
        """What may come behind the tokens that it has now."""
        self._kept[sequence.seq_id] = sequence.num_generated, guesses

    def guess(self, wanted: Mapping[int, int], live: Mapping[int, Live]) -> dict[int, list[int]]:
        """Nothing for one that has gone on since."""
        self._kept = {seq_id: kept for seq_id, kept in self._kept.items() if seq_id in live}
        found = {seq_id: (num, *self._kept.get(seq_id, (None, []))) for seq_id, num in wanted.items()}
        return {seq_id: guesses[:num] for seq_id, (num, at, guesses) in found.items() if at == live[seq_id].num_generated}


class HeadSpeculation(Speculation):
    """The model's own draft head guesses, inside the programs that make the tokens before."""

    def __init__(self, num_columns: int, page_size: int, *, rejects: bool) -> None:
        self._keeper = KeptDrafter()
        super().__init__(self._keeper, num_columns, rejects=rejects)
        self._page_size = page_size
        self._heard: list[tuple[tuple[DecodeRow, ...] | PrefillChunk, Any]] = []  # in this step

    def widen(self, batch: DecodeBatch, rows: tuple[DecodeRow, ...], live: Mapping[int, Live]) -> HeadBatch:
        """With the cells that there are for new guesses."""
        num_cells = np.zeros(len(batch.tokens), np.int32)
        for row in rows:
            num_cells[row.row] = row.num_cells + row.num_spare
        return HeadBatch(self.check(batch, rows, live), num_cells)

    def lengthen(self, batch: PrefillBatch, chunk: PrefillChunk, live: Mapping[int, Live]) -> HeadChunk:
        """With the tokens one further on, as far as they are known: behind the prompt where its first token was drawn before."""
        sequence, end = live[chunk.seq_id], chunk.start + chunk.length
        following = np.zeros(len(batch.tokens), np.int32)
        known = [*sequence.prompt, *sequence.output.token_ids[:1]][chunk.start + 1 : end + 1]
        following[: len(known)] = known
        num_cells: Any = np.int32(-(-end // self._page_size) * self._page_size)
        return HeadChunk(batch, following, num_cells)

    def hear(self, ran: tuple[DecodeRow, ...] | PrefillChunk, guesses: Any = None) -> None:
        """They are read when the tokens are."""
        self._heard.append((ran, guesses))

    def learn(self, live: Mapping[int, Live]) -> None:
        """Keep the guesses of those that go on."""
        for ran, guesses in self._heard:
            found = np.asarray(guesses)
            if isinstance(ran, PrefillChunk):
                if ran.is_last and not ran.is_replay and ran.seq_id in live:
                    self._keeper.keep(live[ran.seq_id], found.tolist())
                continue
            for row in ran:
                if not row.is_replay and row.seq_id in live:
                    self._keeper.keep(live[row.seq_id], found[row.row].tolist())
        self.forget()

    def forget(self) -> None:
        self._heard = []
