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
from jaxkv.errors import ConfigError
from jaxkv.programs import DecodeBatch, PrefillBatch, example_batches
from jaxkv.request import SamplingParams
from jaxkv.scheduler import Chunk, Scheduler
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


def calibrate(engine: Engine, repeats: int = 5, say: Say = lambda line: None, temperature: float = 1.0) -> Calibration:
    """Measure an engine that has nothing else to do; some seconds on a small model. Its rows sample, as requests do that say nothing of it,
    unless `temperature` is 0."""
    assert engine.is_idle, "an engine in use measures its users"
    if not engine.parts.layout.num_layers:
        raise ConfigError(
            f"model.path: {engine.config.model.path} has states and no pages, and the simulator knows pages alone; take another"
        )
    if engine.speculation is not None:
        raise ConfigError(f"speculate.kind: got {engine.config.speculate.kind}, and the simulator knows one token a step; take none")
    programs = ProgramTimes(engine, temperature)
    decode, decode_error = fit_decode(programs, repeats)
    prefill, prefill_error = fit_prefill(programs, repeats)
    say(
        f"decode step {decode['decode_s'] * 1e3:.1f} ms, and {decode['decode_longest_s'] * 1e6:.1f} us a token of the longest row, "
        f"{decode['decode_token_s'] * 1e6:.1f} of any; at most {decode_error:.0%} off"
    )
    say(f"prompt chunk {prefill['prefill_s'] * 1e3:.1f} ms")
    step_s, copy_s = measure_steps(engine, repeats, programs, temperature)
    land_s = measure_landing(engine, repeats)
    say(f"host {step_s * 1e3:.2f} ms a step; a transfer chunk {copy_s * 1e3:.2f} ms of its step, arrived after {land_s * 1e3:.2f} ms")
    config, on_drop = engine.parts.scheduler_config, engine.parts.transfer.discard
    engine.scheduler = Scheduler(config, on_drop=on_drop)  # the old one may believe that some pages still hold a prompt
    layout = engine.parts.layout
    token_bytes = layout.page_bytes // layout.page_size
    costs = Costs(step_s=step_s, copy_s=copy_s, land_s=land_s, token_bytes=token_bytes, **decode, **prefill)
    return Calibration(costs, decode_error, prefill_error)


class ProgramTimes:
    """The engine's two step programs, run by hand on its own pool: whatever was in a page is lost."""

    def __init__(self, engine: Engine, temperature: float) -> None:
        self._parts, self._temperature = engine.parts, temperature
        self.rows, self.chunk = engine.parts.shapes.rows, engine.parts.shapes.chunk
        self.longest = min(MAX_CONTEXT, engine.parts.shapes.max_len)

    def decode(self, lengths: Sequence[int]) -> Callable[[], float]:
        """Seconds of a decode step of rows that have so many tokens each; rows not named are idle."""
        batch, _ = example_batches(self._parts.shapes, self._parts.layout)
        positions, active = np.zeros_like(batch.positions), np.zeros_like(batch.active)
        positions[: len(lengths)] = np.asarray(lengths) - 1
        active[: len(lengths)] = True
        knobs = batch.knobs._replace(temperature=np.full_like(batch.knobs.temperature, self._temperature))
        mine = batch._replace(positions=positions, active=active, table=self._table(batch.table), knobs=knobs)
        return lambda: self._timed(self._parts.programs.decode.run, mine)

    def prefill(self, start: int) -> Callable[[], float]:
        """Seconds of a whole prompt chunk after so many tokens."""
        _, batch = example_batches(self._parts.shapes, self._parts.layout)
        mine = batch._replace(
            start=np.int32(start),  # type: ignore[arg-type]
            length=np.int32(self.chunk),  # type: ignore[arg-type]
            is_last=np.bool_(False),  # type: ignore[arg-type]
            table=self._table(batch.table),
        )
        return lambda: self._timed(self._parts.programs.prefill.run, mine)

    def _table(self, table: Any) -> np.ndarray:
        """All of the pool's pages, one row after another, from the first one again when they are used up."""
        pages = np.arange(table.size, dtype=np.int32) % max(1, self._parts.layout.num_pages) + 1
        return pages.reshape(table.shape)

    def _timed(self, program: Callable[..., tuple[Any, ...]], batch: DecodeBatch | PrefillBatch) -> float:
        began = time.perf_counter()
        self._parts.pool.arrays, sampled, *_ = program(self._parts.weights, self._parts.pool.arrays, batch)
        np.asarray(sampled.token)
        return time.perf_counter() - began


def fit_decode(programs: ProgramTimes, repeats: int) -> tuple[dict[str, float], float]:
    """Decode's three numbers from short, long and mixed rows, and the worst error."""
    rows, far = programs.rows, programs.longest
    near = min(64, far)
    cases = [[near] * rows, [far // 4] * rows, [far // 2] * rows, [far] * rows, [far, *[near] * (rows - 1)], [far // 2] * (rows // 2)]
    features = [[1.0, max(lengths), sum(lengths)] for lengths in cases]
    found, error = fit(features, medians([programs.decode(lengths) for lengths in cases], repeats))
    return dict(zip(("decode_s", "decode_longest_s", "decode_token_s"), found, strict=True)), error


def fit_prefill(programs: ProgramTimes, repeats: int) -> tuple[dict[str, float], float]:
    """Prefill's two numbers, and the worst error."""
    last = max(0, programs.longest - programs.chunk)
    starts = [0, last // 3, 2 * last // 3, last]
    found, error = fit([[1.0, start] for start in starts], medians([programs.prefill(start) for start in starts], repeats))
    return dict(zip(("prefill_s", "prefill_token_s"), found, strict=True)), error


def medians(works: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """The median of each, where all take turns: a slow minute of the machine is everybody's. The first time does not count."""
    rounds = [[work() for work in works] for _ in range(repeats + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


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


def measure_steps(engine: Engine, repeats: int, programs: ProgramTimes, temperature: float) -> tuple[float, float]:
    """Seconds of a step beside its program, and what one transfer chunk adds to the steps around it.

    Two sequences, or one where there is one row, that fit the pool whole: nobody is parked but by us. What they say is nonsense, since the
    program in between writes where it likes.
    """
    num = min(2, engine.config.scheduler.rows)
    share = min(engine.capacity // num - engine.config.pool.page_size, engine.max_len)
    answer_len = max(1, min(share // 2, (2 + MAX_PARK_STEPS) * repeats))
    prompt_len = max(1, min(MAX_PROMPT, share - answer_len))
    params = SamplingParams(max_tokens=answer_len, temperature=temperature, ignore_eos=True, cache_prompt=False)
    handles = [engine.submit([1] * prompt_len, params) for _ in range(num)]
    while not all(handle.token_ids for handle in handles):
        engine.step()
    program = programs.decode([prompt_len + repeats] * num)
    pairs = [(_timed(engine.step), program()) for _ in range(repeats)]
    quiet_s = statistics.median(step_s for step_s, _ in pairs)
    extra = [park_once(engine, handles[0].seq_id, quiet_s) for _ in range(repeats) if not handles[0].done]
    for handle in handles:
        handle.cancel()
    while not engine.is_idle:
        engine.step()
    beside_s = statistics.median(step_s - program_s for step_s, program_s in pairs)
    return max(0.0, beside_s), max(0.0, statistics.median(extra or [0.0]))


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
