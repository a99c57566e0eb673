"""The decode batch as NumPy arrays: block tables and sampler knobs, one entry per row, kept up to date and copied for every dispatch.

A fresh copy each time: XLA:CPU may read an argument's memory while the program runs, so what was handed over is never written again.
"""

from collections.abc import Collection, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.attention import table_width
from jaxkv.blame import blaming
from jaxkv.live import Live
from jaxkv.overlap import Dispatched
from jaxkv.pool import PoolLayout
from jaxkv.programs import DecodeBatch, PrefillBatch, Shapes, numbers
from jaxkv.sampling import Knobs, neutral_knobs
from jaxkv.scheduler import DecodeRow, PrefillChunk, TableUpdate
from jaxkv.scoring import Targets, no_targets

_LARGE = ("history", "bias_ids", "bias", "mask")  # brought to the device only when some row uses them


class Rows:
    """Who sits in which row, and what the programs must know about them."""

    def __init__(self, shapes: Shapes, layout: PoolLayout, mesh: Mesh) -> None:
        self._shapes = shapes
        self._table = np.zeros((shapes.rows, table_width(shapes.max_len, layout.page_size)), np.int32)
        self._near = np.zeros((shapes.rows, self._table.shape[1] if layout.near else 0), np.int32)
        self._knobs = Knobs(*(np.array(x) for x in self._neutral(shapes.rows)))
        # whose the row's knobs are, and how many tokens said and dropped they describe
        self._seated: list[tuple[int, int, int] | None] = [None] * shapes.rows
        # stand in for the large arrays of those who use none; never written
        self._unused = _on_device(self._neutral(shapes.rows), mesh)
        self._unused_first = _on_device(self._neutral(shapes.first), mesh)
        self._no_targets = no_targets(shapes.chunk)
        self._no_tokens, self._no_first = np.zeros(shapes.rows, np.int32), np.zeros(shapes.first, np.int32)

    def update(self, updates: tuple[TableUpdate, ...]) -> None:
        """Enter new pages into the block tables."""
        for update in updates:
            table = self._near if update.is_near else self._table
            table[update.row, update.first : update.first + len(update.pages)] = update.pages

    def forget(self) -> None:
        """Nothing that the knobs say of a sequence is to be built upon."""
        self._seated = [None] * self._shapes.rows

    def decode_batch(self, rows: tuple[DecodeRow, ...], live: Mapping[int, Live], before: Dispatched | None = None) -> DecodeBatch:
        """The arrays of one decode step; rows not named are idle. `before` is the step before, where its tokens are still on the device."""
        b = self._shapes.rows
        source, drawn = np.arange(b, dtype=np.int32), {} if before is None else before.drawn
        tokens, positions, active, sampling = np.zeros(b, np.int32), np.zeros(b, np.int32), np.zeros(b, bool), np.zeros(b, bool)
        for entry in rows:
            sequence = live[entry.seq_id]
            if not entry.is_replay:
                with blaming(entry.seq_id):
                    self._seat(entry.row, sequence)
            if input_index(entry, sequence) < sequence.num_generated:
                tokens[entry.row] = sequence.output.token_ids[input_index(entry, sequence)]
            else:
                is_first, index = drawn[entry.seq_id]
                source[entry.row] = b * (2 if is_first else 1) + index
            positions[entry.row] = entry.position
            active[entry.row], sampling[entry.row] = True, not entry.is_replay
        present = {entry.row: live[entry.seq_id] for entry in rows if not entry.is_replay}
        decoded = self._no_tokens if before is None or before.decoded is None else before.decoded.token
        first = self._no_first if before is None or before.prefilled is None else before.prefilled[0].token
        tables, knobs = (self._table.copy(), self._near.copy()), self._copy_knobs(sampling, present)
        return DecodeBatch(tokens, positions, active, *tables, knobs, source, decoded, first)

    def prefill_batch(self, chunk: PrefillChunk, live: Mapping[int, Live]) -> PrefillBatch:
        """The arrays of one prompt chunk, padded to the chunk width."""
        sequence = live[chunk.seq_id]
        tokens = np.zeros(self._shapes.chunk, np.int32)
        tokens[: chunk.length] = sequence.prompt[chunk.start : chunk.start + chunk.length]
        samples = chunk.is_last and not chunk.is_replay
        first = [live[seq_id] for seq_id in chunk.seq_ids] if samples else []
        start, length, is_last, num_first, row = numbers(chunk.start, chunk.length, len(first), chunk.row, is_last=samples)
        targets, (table, near) = self._targets(chunk, sequence), (t[chunk.row : chunk.row + 1].copy() for t in (self._table, self._near))
        return PrefillBatch(tokens, start, length, is_last, num_first, row, table, near, self._first_knobs(first), targets)

    def _first_knobs(self, first: list[Live]) -> Knobs:
        """What the sampler must know of those that draw their first token, in their order."""
        if not first:
            return self._unused_first
        knobs = self._neutral(self._shapes.first)
        for index, sequence in enumerate(first):
            _describe(knobs, index, sequence)
            _describe_mask(knobs, index, sequence)
        needed = _needed(first)
        return knobs._replace(**{name: getattr(self._unused_first, name) for name in _LARGE if not needed[name]})

    def _targets(self, chunk: PrefillChunk, sequence: Live) -> Targets:
        """What follows each token of the chunk, where its logprob is wanted and not there yet."""
        if not sequence.wants_scores(chunk.start + chunk.length):
            return self._no_targets
        tokens = np.zeros(self._shapes.chunk, np.int32)
        following = sequence.prompt[chunk.start + 1 : chunk.start + chunk.length + 1]
        tokens[: len(following)] = following
        return Targets(tokens, np.bool_(True), np.bool_(bool(sequence.params.prompt_logprobs)))  # type: ignore[arg-type]

    def _neutral(self, rows: int) -> Knobs:
        return neutral_knobs(rows, self._shapes.max_len, self._shapes.vocab_size)

    def _seat(self, row: int, sequence: Live) -> None:
        """Bring the row's knobs up to this token. What is there of the sequence is only good if it is one token behind: the sequence may
        have gone on in another row meanwhile, and its earlier row may have had no one else in it that decodes."""
        is_one_behind = self._seated[row] == (sequence.seq_id, sequence.num_drawn - 1, sequence.num_dropped)
        if not is_one_behind or sequence.num_drawn <= sequence.params.min_tokens:
            _describe(self._knobs, row, sequence)
        self._seated[row] = (sequence.seq_id, sequence.num_drawn, sequence.num_dropped)
        knobs, length = self._knobs, len(sequence.prompt) + sequence.num_drawn - sequence.num_dropped
        knobs.num_generated[row] = sequence.num_drawn
        if sequence.wants_history:
            knobs.history[row, length - 1] = sequence.output.token_ids[-1]
            knobs.history_len[row] = length

    def _copy_knobs(self, sampling: np.ndarray, seated: dict[int, Live]) -> Knobs:
        knobs = self._knobs._asdict()
        unused = self._unused._asdict()
        needed = _needed(seated.values())
        fresh = {name: (unused[name] if name in _LARGE and not needed[name] else knobs[name].copy()) for name in Knobs._fields}
        fresh["temperature"] = np.where(
            sampling, knobs["temperature"], np.float32(0)
        )  # the others must not start the stages of the sampler
        fresh["wants_top"] = sampling & knobs["wants_top"]
        fresh["presence"] = np.where(sampling, knobs["presence"], np.float32(0))
        fresh["frequency"] = np.where(sampling, knobs["frequency"], np.float32(0))
        fresh["repetition"] = np.where(sampling, knobs["repetition"], np.float32(1))
        copied = Knobs(**fresh)
        for row, sequence in seated.items():
            _describe_mask(copied, row, sequence)
        return copied


def _needed(present: Collection[Live]) -> dict[str, bool]:
    """Which of the large arrays some of them use."""
    has_bias = any(s.params.logit_bias or s.num_drawn < s.params.min_tokens for s in present)
    has_history, has_mask = any(s.wants_history for s in present), any(s.output.guide is not None for s in present)
    return {"history": has_history, "bias_ids": has_bias, "bias": has_bias, "mask": has_mask}


def _on_device(knobs: Knobs, mesh: Mesh) -> Knobs:
    return Knobs(*jax.device_put(tuple(knobs), NamedSharding(mesh, PartitionSpec())))


def input_index(entry: DecodeRow, sequence: Live) -> int:
    """Which generated token's cell this row computes: the newest's, or in a replay that of the one that was fed there before.

    Prompt 3: position 3 is fed generated token 0, position 52 token 49, or token 59 if shifts have dropped 10.
    """
    return entry.position + entry.num_dropped - len(sequence.prompt)


def _describe(knobs: Knobs, row: int, sequence: Live) -> None:
    """Write all that the sampler must know of a sequence into one row."""
    p = sequence.params
    knobs.temperature[row] = p.temperature
    knobs.top_p[row], knobs.min_p[row], knobs.top_k[row] = p.top_p, p.min_p, p.top_k
    knobs.presence[row], knobs.frequency[row], knobs.repetition[row] = p.presence_penalty, p.frequency_penalty, p.repetition_penalty
    knobs.seed[row] = (p.seed >> 32, p.seed & 0xFFFFFFFF)
    knobs.choice[row] = sequence.handle.choice
    knobs.num_generated[row] = sequence.num_drawn
    knobs.wants_top[row] = bool(p.logprobs)
    if sequence.wants_history:
        said = sequence.context
        knobs.history[row, : len(said)] = said
        knobs.prompt_len[row], knobs.history_len[row] = sequence.prompt_in_context, len(said)
    _describe_bias(knobs, row, sequence)


def _describe_mask(knobs: Knobs, row: int, sequence: Live) -> None:
    """What may come next, where the request demands something of it: another mask after every token."""
    if sequence.output.guide is not None:
        knobs.is_masked[row], knobs.mask[row] = True, sequence.output.guide.mask


def _describe_bias(knobs: Knobs, row: int, sequence: Live) -> None:
    """The request's own biases, then minus infinity for what min_tokens still keeps away. Ids beyond any vocabulary pad the rest."""
    biases = list(sequence.params.logit_bias.items())
    if sequence.num_drawn < sequence.params.min_tokens:
        biases += [(token_id, -np.inf) for token_id in sequence.banned]
    knobs.bias_ids[row] = np.iinfo(np.int32).max
    for i, (token_id, bias) in enumerate(biases):
        knobs.bias_ids[row, i], knobs.bias[row, i] = token_id, bias
