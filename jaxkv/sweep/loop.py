"""Makes the runs of a sweep that are not finished yet, one by one or, simulated, several at a time. Owns order and failures."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jaxkv.config import Config
from jaxkv.errors import JaxkvError
from jaxkv.observe.log import logging_to
from jaxkv.sweep.folder import RunFolder, SweepFolder
from jaxkv.sweep.manifest import new_manifest
from jaxkv.sweep.matrix import Run
from jaxkv.sweep.outcome import Outcome
from jaxkv.sweep.simulated import run_simulated

FEW = 4  # simulated runs: below, more processes take longer to start than the work itself
Make = Callable[[Config], Outcome]


@dataclass(frozen=True, slots=True)
class Done:
    """One run is over."""

    run: Run
    folder: RunFolder
    error: str | None


def run_all(runs: Sequence[Run], folder: SweepFolder) -> Iterator[Done]:
    """Make every one of these; a failed one is told and stops nothing. An interrupt comes out, and leaves the finished ones finished."""
    yield from run_all_in([(run, folder.of(run)) for run in runs])


def run_all_in(jobs: Sequence[tuple[Run, RunFolder]]) -> Iterator[Done]:
    """The same with a folder for each."""
    if not jobs:
        return
    processes = num_processes([run for run, _ in jobs])
    if processes > 1:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            yield from pool.imap_unordered(_simulated_job, jobs)
    elif jobs[0][0].is_simulated:
        yield from map(_simulated_job, jobs)
    else:
        yield from _live_jobs(jobs)


def num_processes(runs: Sequence[Run]) -> int:
    """One for the engine; for the simulator as configured, else one for each processor where there is enough to do."""
    if not runs[0].is_simulated:
        return 1
    if (asked := runs[0].config.simulate.processes) is not None:
        return min(asked, len(runs))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if len(runs) < FEW else min(cores, len(runs))


def _simulated_job(job: tuple[Run, RunFolder]) -> Done:
    return make(*job, run_simulated)


def _live_jobs(jobs: Sequence[tuple[Run, RunFolder]]) -> Iterator[Done]:
    from jaxkv.sweep.live import LiveRunner

    with ExitStack() as keep:
        runner = keep.enter_context(LiveRunner())
        for run, folder in jobs:
            yield make(run, folder, runner.run)


def make(run: Run, folder: RunFolder, how: Make) -> Done:
    """One run with all its files."""
    manifest = new_manifest(run) | {"started_at": datetime.now(UTC).isoformat(timespec="seconds")}
    folder.begin(run, manifest)
    began = time.perf_counter()
    try:
        with logging_to(log_of(run.config, folder.path)):
            outcome = how(run.config)
    except Exception as error:
        told = str(error) if isinstance(error, JaxkvError) or _is_models(error) else f"{type(error).__name__}: {error}"
        folder.fail(manifest | _took(began), told)
        return Done(run, folder, told)
    folder.finish(manifest | _took(began), outcome)
    return Done(run, folder, None)


def log_of(config: Config, path: Path) -> Any:
    """The log section with the run's own file; parks and restores are always told."""
    level = "info" if config.log.level == "warning" else config.log.level
    return config.log.model_copy(update={"file": str(path / "log.txt"), "level": level})


def _took(began: float) -> dict[str, float]:
    return {"wall_s": round(time.perf_counter() - began, 3)}


def _is_models(error: Exception) -> bool:
    from jaxkv.models.errors import ModelError

    return isinstance(error, ModelError)
