"""What a plan costs: the scheduler alone, with many rows and a long line, no model and no device.

What to expect. A plan has to name every row that decodes, so it cannot cost less than a loop over the rows that reads each and makes its
entry: that floor is measured in the same run. Beyond it a plan asks of each row whether it needs a page, and only where pages are short
does it look closer. Who waits costs nothing but the first in line (with `pass` a fixed number), so a line of 4096 must cost what one of
1024 does, and 256 rows at most four times what 64 do. The situations:

* steady: every row decodes, pages are ample, the line waits for a row.
* blocked: a row is free and the first in line does not fit: every plan counts what all rows were promised.
* pass: the same with `resume: pass`, where those behind the first are looked at as well, and none of them fits.
* in_vain: the first in line is more urgent than all rows but one, and would not fit though they all made way.
* park: plans that park somebody because a step does not fit.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from figures import has_changes, machine, median_s, numbers, say, summary, text, turns, versions

from jaxkv.scheduler import DecodeRow, Outcome, Plan, Scheduler, SchedulerConfig
from jaxkv.summary import commit

PAGE, PROMPT, ANSWER = 16, 200, 3000  # tokens
ROOM = 100  # pages for each row, where they are ample
STEP_S = 0.05  # of the clock that plans see


class Job:
    """A scheduler whose plans are taken as done; plans and commits are timed."""

    def __init__(self, rows: int, num_pages: int, **changes: Any) -> None:
        sizes: dict[str, Any] = {"rows": rows, "num_pages": num_pages, "page_size": PAGE, "chunk_bytes": 1}
        self.scheduler = Scheduler(SchedulerConfig(**sizes, prefill_chunk=10**6, max_len=10**6, **changes))
        self.now = 0.0
        self.num_added = 0
        self.plan_s = self.commit_s = 0.0  # of the last turn

    def add(self, num: int, prompt: int = PROMPT, priority: int = 0) -> None:
        """So many requests more; their prompts differ a little, so that rows do not all need a page in the same step."""
        for _ in range(num):
            self.scheduler.add(self.num_added, prompt + self.num_added % PAGE, ANSWER, self.now, priority=priority)
            self.num_added += 1

    def turn(self) -> Plan:
        """One plan and its commit."""
        start = time.perf_counter()
        plan = self.scheduler.plan(self.now, 1000)
        planned = time.perf_counter()
        outcome = Outcome(plan.prefill, tuple(row.seq_id for row in plan.decode), {}, plan.park, plan.restore)
        begun = time.perf_counter()
        self.scheduler.commit(outcome, self.now)
        self.plan_s, self.commit_s = planned - start, time.perf_counter() - begun
        self.now += STEP_S
        return plan

    def start(self, num: int) -> None:
        """Turns until so many decode: each makes one prompt."""
        assert any(len(self.turn().decode) == num for _ in range(num + 2)), f"{num} rows do not decode together"


def steady(rows: int, waiting: int) -> Job:
    job = Job(rows, rows * ROOM)
    job.add(rows + waiting)
    job.start(rows)
    return job


def blocked(rows: int, waiting: int, resume: str = "head") -> Job:
    job = Job(rows + 1, rows * ROOM, resume=resume)
    job.add(rows)
    job.start(rows)
    job.add(waiting, (rows * ROOM - 1) * PAGE)  # fits the empty pool
    return job


def passing(rows: int, waiting: int) -> Job:
    return blocked(rows, waiting, "pass")


def in_vain(rows: int, waiting: int) -> Job:
    job = Job(rows, rows * ROOM)
    job.add(1, rows * ROOM * PAGE // 2, priority=-1)
    job.add(rows - 1)
    job.start(rows)
    job.add(waiting, rows * ROOM * PAGE // 2 + PAGE, priority=-1)
    return job


def parking(rows: int, waiting: int) -> Job:
    job = Job(rows, rows * ((PROMPT + rows // 2) // PAGE + 3))  # the first have made a token for each of the others when all decode
    job.add(rows + waiting)
    job.start(rows)
    while not is_park(job.turn()):
        pass
    return job


def is_park(plan: Plan) -> bool:
    return any(note.kind == "park" for note in plan.notes)


SITUATIONS: dict[str, Callable[[int, int], Job]] = {
    "steady": steady,
    "blocked": blocked,
    "pass": passing,
    "in_vain": in_vain,
    "park": parking,
}


def floor_s(rows: int, repeats: int) -> float:
    """Seconds to read so many rows and to name each."""
    job = steady(rows, 0)
    residents = job.scheduler._books.residents
    return median_s(lambda: [DecodeRow(seq.seq_id, seq.row or 0, seq.num_cells) for seq in residents if seq.state == "decoding"], repeats)


@dataclass(slots=True)
class Figures:
    """Medians of rounds, in seconds."""

    plan: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)

    def measure(self, job: Job, num_plans: int, *, only_parks: bool) -> None:
        """One round: so many plans, or as many as park within ten times so many, but at least one."""
        plans, commits = list[float](), list[float]()
        num = 0
        while num < num_plans * (10 if only_parks else 1) or not plans:
            plan, num = job.turn(), num + 1
            if not only_parks or is_park(plan):
                plans.append(job.plan_s)
                commits.append(job.commit_s)
        self.plan.append(statistics.median(plans))
        self.commit.append(statistics.median(commits))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All situations at all sizes, taking turns."""
    cases = [(name, rows, waiting) for name in SITUATIONS for rows in options.rows for waiting in options.waiting]
    figures = {case: Figures() for case in cases}
    floors: dict[int, list[float]] = {rows: [] for rows in options.rows}
    for round_ in range(options.rounds):
        for name, rows, waiting in turns(cases, round_):
            job = SITUATIONS[name](rows, waiting)
            figures[name, rows, waiting].measure(job, options.plans, only_parks=name == "park")
        for rows, found in floors.items():
            found.append(floor_s(rows, options.plans))
    return results(options, figures, floors)


def results(options: argparse.Namespace, figures: dict[tuple[str, int, int], Figures], floors: dict[int, list[float]]) -> dict[str, Any]:
    """The figures by situation and size, and how they grow."""
    plan: dict[str, Any] = {name: {} for name in SITUATIONS}
    for (name, rows, waiting), found in figures.items():
        plan[name][f"{rows}x{waiting}"] = spread = summary(found.plan, 1e6, 1)
        ratio = statistics.median(found.plan) / statistics.median(floors[rows])
        commit_us = statistics.median(found.commit) * 1e6
        say(f"{name:8} {rows:4} rows, {waiting:5} wait: plan {text(spread, 'us')}, {ratio:.1f} floors; commit {commit_us:.0f} us")
    (few, most), (short, long) = ((min(sizes), max(sizes)) for sizes in (options.rows, options.waiting))

    def over(name: str, one: str, other: str) -> float:
        return round(plan[name][one]["median"] / plan[name][other]["median"], 2)

    return {
        "floor_us": {str(rows): summary(found, 1e6, 1) for rows, found in floors.items()},
        "plan_us": plan,
        "commit_us": {f"{rows}x{long}": summary(figures["steady", rows, long].commit, 1e6, 1) for rows in options.rows},
        "most_rows_over_fewest": {name: over(name, f"{most}x{long}", f"{few}x{long}") for name in SITUATIONS},
        "long_line_over_short": {name: over(name, f"{most}x{long}", f"{most}x{short}") for name in SITUATIONS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="scheduling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured (default 5)")
    parser.add_argument("--rows", type=numbers, default=(64, 128, 256), help="default 64,128,256")
    parser.add_argument("--waiting", type=numbers, default=(1024, 4096), help="default 1024,4096")
    parser.add_argument("--plans", type=int, default=100, help="plans in a round (default 100)")
    options = parser.parse_args()
    if min(options.rounds, options.plans, *options.waiting) < 1 or min(options.rows) < 2:
        parser.error("--rounds, --plans and --waiting: allowed: 1 or more; --rows: 2 or more")
    say((__doc__ or "").strip() + "\n")
    header = {
        "benchmark": "scheduling",
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "uncommitted_changes": has_changes(),
        "versions": versions(["jaxkv"]),
        "rounds": options.rounds,
    }
    found = measure(options)
    print(json.dumps({**header, "hardware": machine(), **found}))


if __name__ == "__main__":
    main()
