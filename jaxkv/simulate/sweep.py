"""Runs the cases of a configuration, several at a time, and collects their results. Knows no policy and no picture."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxkv.config import Config
from jaxkv.simulate.cases import Case, list_cases
from jaxkv.simulate.result import Result
from jaxkv.simulate.run import simulate

FEW_TOKENS = 20_000  # of all answers: below, another process takes longer to start than the work itself
Job = tuple[int, Case, int]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """A case and its results, by seed."""

    case: Case
    results: tuple[Result, ...]

    @property
    def values(self) -> Mapping[str, Any]:
        """What makes the case."""
        return self.case.values

    @property
    def name(self) -> str:
        """`victim smallest, resume head`."""
        return self.case.name


def run_sweep(config: Config, on_result: Callable[[int, int], object] = lambda done, total: None) -> list[Outcomes]:
    """Every case with every seed; `on_result(done, total)` after each. Raises ConfigError before anything runs."""
    cases, num_seeds = list_cases(config), config.sweep.seeds
    jobs = [(index, case, seed) for seed in range(num_seeds) for index, case in enumerate(cases)]
    found: dict[tuple[int, int], Result] = {}
    on_result(0, len(jobs))
    for index, seed, result in run_jobs(jobs, num_processes(config, jobs)):
        found[index, seed] = result
        on_result(len(found), len(jobs))
    return [Outcomes(case, tuple(found[index, seed] for seed in range(num_seeds))) for index, case in enumerate(cases)]


def run_jobs(jobs: Sequence[Job], processes: int) -> Iterator[tuple[int, int, Result]]:
    """The jobs' results as they come."""
    if processes == 1:
        yield from map(run_job, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_job, jobs, chunksize=max(1, min(16, len(jobs) // (4 * processes))))


def run_job(job: Job) -> tuple[int, int, Result]:
    """One simulation."""
    index, case, seed = job
    result, _ = simulate(case.settings, case.requests(seed), case.costs, case.num_staging)
    return index, seed, result


def num_processes(config: Config, jobs: Sequence[Job]) -> int:
    """As many as were asked for, or one for each processor; one alone where there is little to do."""
    if config.simulate.processes is not None:
        return config.simulate.processes
    _, case, seed = jobs[0]
    work = len(jobs) * sum(request.answer_len for request in case.requests(seed))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if work < FEW_TOKENS else min(cores, len(jobs))
