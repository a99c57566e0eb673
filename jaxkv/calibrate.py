"""Measures what the simulator must know of this machine: steps, prompt chunks and copies of one warm, idle engine.

The compiled programs are run on pages that nobody holds, with lengths of our choosing, so that no prompt has to be computed first; what a
step costs beside them is told by a few steps of the engine, and a park by one that everybody else sits through.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxkv.engine import Engine
from jaxkv.programs import DecodeBatch, PrefillBatch, example_batches
from jaxkv.request import SamplingParams
from jaxkv.scheduler import Chunk
from jaxkv.simulate.costs import Costs

POLL_S = 1e-4
MAX_CONTEXT = 2048  # longer rows cost in proportion
MAX_PROMPT = 512  # of the sequence that is parked
MAX_PARK_STEPS = 24  # until it is back
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs, and how far the model is from what it was fitted to, as a share of the measured time."""

    costs: Costs
    worst_decode_error: float
    worst_prefill_error: float

    def to_dict(self) -> dict[str, Any]:
        """As the costs file has it."""
        errors = {"worst_decode_error": round(self.worst_decode_error, 4), "worst_prefill_error": round(self.worst_prefill_error, 4)}
        costs = {name: value if isinstance(value, int) else float(f"{value:.6g}") for name, value in self.costs.to_dict().items()}
        return {"costs": costs, **errors}


def calibrate(engine: Engine, repeats: int = 5, say: Say = lambda line: None) -> Calibration:
    """Measure an engine that has nothing else to do; some seconds on a small model."""
    assert engine.is_idle, "an engine in use measures its users"
    programs = ProgramTimes(engine, repeats)
    decode, decode_error = fit_decode(programs)
    prefill, prefill_error = fit_prefill(programs)
    say(f"decode step {decode['decode_s'] * 1e3:.1f} ms and {decode['decode_longest_s'] * 1e6:.1f} us a token of the longest row")
    say(f"prompt chunk {prefill['prefill_s'] * 1e3:.1f} ms")
    step_s, copy_s = measure_steps(engine, repeats, programs)
    land_s = measure_landing(engine, repeats)
    say(f"host {step_s * 1e3:.2f} ms a step; a transfer chunk {copy_s * 1e3:.2f} ms of its step, arrived after {land_s * 1e3:.2f} ms")
    layout = engine.parts.layout
    token_bytes = layout.page_bytes // layout.page_size
    costs = Costs(step_s=step_s, copy_s=copy_s, land_s=land_s, token_bytes=token_bytes, **decode, **prefill)
    return Calibration(costs, decode_error, prefill_error)


class ProgramTimes:
    """The engine's two step programs, run by hand on its own pool while nobody uses it."""

    def __init__(self, engine: Engine, repeats: int) -> None:
        self._parts = engine.parts
        self._repeats = repeats
        self.longest = min(MAX_CONTEXT, engine.parts.shapes.max_len)

    def decode_s(self, lengths: Sequence[int]) -> float:
        """One decode step of rows that have so many tokens each; rows not named are idle."""
        batch, _ = example_batches(self._parts.shapes, self._parts.layout)
        positions, active = np.zeros_like(batch.positions), np.zeros_like(batch.active)
        positions[: len(lengths)] = np.asarray(lengths) - 1
        active[: len(lengths)] = True
        mine = DecodeBatch(batch.tokens, positions, active, self._table(batch.table), batch.knobs)
        return self._median_s(lambda: self._parts.programs.decode.run(self._parts.weights, self._parts.pool.arrays, mine))

    def prefill_s(self, start: int) -> float:
        """One whole prompt chunk after so many tokens."""
        _, batch = example_batches(self._parts.shapes, self._parts.layout)
        length, start_at = np.int32(self._parts.shapes.chunk), np.int32(start)
        mine = PrefillBatch(batch.tokens, start_at, length, np.bool_(False), self._table(batch.table), batch.knobs)  # type: ignore[arg-type]
        return self._median_s(lambda: self._parts.programs.prefill.run(self._parts.weights, self._parts.pool.arrays, mine))

    def _table(self, table: Any) -> np.ndarray:
        """All of the pool's pages, one row after another, from the first one again when they are used up."""
        pages = np.arange(table.size, dtype=np.int32) % self._parts.layout.num_pages + 1
        return pages.reshape(table.shape)

    def _median_s(self, work: Callable[[], tuple[Any, Any]]) -> float:
        times = []
        for _ in range(self._repeats + 1):
            began = time.perf_counter()
            self._parts.pool.arrays, sampled = work()
            np.asarray(sampled.token)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


def fit_decode(programs: ProgramTimes) -> tuple[dict[str, float], float]:
    """Decode's three numbers from short, long and mixed rows, and the worst error."""
    rows, far = programs._parts.shapes.rows, programs.longest
    near = min(64, far)
    cases = [[near] * rows, [far // 4] * rows, [far // 2] * rows, [far] * rows, [far, *[near] * (rows - 1)], [far // 2] * (rows // 2)]
    features = [[1.0, max(lengths), sum(lengths)] for lengths in cases]
    found, error = fit(features, [programs.decode_s(lengths) for lengths in cases])
    return dict(zip(("decode_s", "decode_longest_s", "decode_token_s"), found, strict=True)), error


def fit_prefill(programs: ProgramTimes) -> tuple[dict[str, float], float]:
    """Prefill's two numbers, and the worst error."""
    last = max(0, programs.longest - programs._parts.shapes.chunk)
    starts = [0, last // 3, 2 * last // 3, last]
    found, error = fit([[1.0, start] for start in starts], [programs.prefill_s(start) for start in starts])
    return dict(zip(("prefill_s", "prefill_token_s"), found, strict=True)), error


def fit(features: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[list[float], float]:
    """The factors, none below zero, that bring the features closest to the times (in relative terms), and the worst relative error."""
    x, y = np.asarray(features, np.float64), np.asarray(times, np.float64)
    kept = list(range(x.shape[1]))
    while True:
        found = np.zeros(x.shape[1])
        found[kept] = np.linalg.lstsq(x[:, kept] / y[:, None], np.ones_like(y), rcond=None)[0]
        if (found >= 0).all():
            return [float(value) for value in found], float(np.abs(x @ found / y - 1).max())
        kept.remove(int(found.argmin()))


def measure_steps(engine: Engine, repeats: int, programs: ProgramTimes) -> tuple[float, float]:
    """Seconds of a step beside its program, and what one transfer chunk adds to the steps around it.

    Two sequences, or one where there is one row, that fit the pool whole: nobody is parked but by us.
    """
    num = min(2, engine.config.scheduler.rows)
    share = min(engine.capacity // num - engine.config.pool.page_size, engine.max_len)
    answer_len = max(1, min(share // 2, 2 * repeats + MAX_PARK_STEPS * repeats))
    prompt_len = max(1, min(MAX_PROMPT, share - answer_len))
    params = SamplingParams(max_tokens=answer_len, temperature=0.0, ignore_eos=True)
    handles = [engine.submit([1] * prompt_len, params) for _ in range(num)]
    while not all(handle.token_ids for handle in handles):
        engine.step()
    quiet_s, lengths = statistics.median(_timed(engine.step) for _ in range(repeats)), [prompt_len + repeats] * num
    extra = [park_once(engine, handles[0].seq_id, quiet_s) for _ in range(repeats) if not handles[0].done]
    for handle in handles:
        handle.cancel()
    while not engine.is_idle:
        engine.step()
    return max(0.0, quiet_s - programs.decode_s(lengths)), max(0.0, statistics.median(extra or [0.0]))


def park_once(engine: Engine, seq_id: int, quiet_s: float) -> float:
    """Park one sequence beside the others and let it come back: seconds lost by them for each chunk that travelled."""
    counters, stats = engine.scheduler.counters, engine.parts.transfer.stats
    chunk_bytes, before, moved = engine.parts.transfer.chunk_bytes, counters.num_restores, stats.bytes_to_host + stats.bytes_to_device
    engine.scheduler.park(seq_id)
    took_s, num = 0.0, 0
    while counters.num_restores == before and num < MAX_PARK_STEPS:
        took_s += _timed(engine.step)
        num += 1
    num_chunks = (stats.bytes_to_host + stats.bytes_to_device - moved) // chunk_bytes
    return (took_s - num * quiet_s) / max(1, num_chunks)


def measure_landing(engine: Engine, repeats: int) -> float:
    """Seconds from a chunk's dispatch until it has arrived in host memory, on an idle engine."""
    transfer, layout = engine.parts.transfer, engine.parts.layout
    num_pages = min(engine.config.transfer.chunk_pages, layout.num_pages)
    chunk, times = Chunk(-1, 0, 0, tuple(range(1, num_pages + 1)), host_id=-1), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        transfer.park(chunk, 0)
        while not transfer.poll(step=2**30).parked:
            time.sleep(POLL_S)
        times.append(time.perf_counter() - began)
        transfer.discard(-1)
    return statistics.median(times[1:])


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def about(engine: Engine) -> Mapping[str, Any]:
    """Which model and machine the costs are of."""
    config = engine.config
    return {
        "model": config.model.path,
        "rows": config.scheduler.rows,
        "prefill_chunk": config.scheduler.prefill_chunk,
        "chunk_pages": config.transfer.chunk_pages,
        "system_fingerprint": engine.system_fingerprint,
    }
