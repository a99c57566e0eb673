"""The same job through pools that hold twice, once, half and a quarter of what it needs at once.

What to expect. Copies run beside the computation, and a page is 1/1000 of a second of memory bandwidth or less, so moving pages is not the
price of a small pool. The price is that fewer rows run at once: a decode step takes nearly as long for two rows as for eight, so with a
quarter of the pool about a quarter of the rows share each step. The ceiling is an ample pool; the floor is one request after another, which
is what a small pool would force without parking. In the same run:

* armed and unused: the pool holds exactly the demand, so every step asks whether room is needed and it never is. It must be as fast as a
  pool that could hold the job many times over.
* pool use at a park: held pages / all pages when a park begins. Parking earlier than needed would show as less.
* every answer, in every pool and one after another, must be the same bytes.

The runs are those of `jaxkv sweep`, with all engines loaded at once; configs/pressure.yaml is the same job without the ceilings.
"""

from dataclasses import dataclass, field
from typing import Any

from common import Setup, run, say, settle, summary, text, turns

from jaxkv.config import Config
from jaxkv.engine import Engine
from jaxkv.errors import JaxkvError
from jaxkv.summary import pressure_numbers
from jaxkv.sweep.live import measure_calls, read_calls, renew
from jaxkv.sweep.outcome import Outcome

OPTIONS: dict[str, Any] = {
    "prompt": 64,  # tokens
    "answer": 64,
    "huge": 8,  # times the demand: the pool in which parking is out of the question
}
DEMANDS = {"0.5x": 2.0, "1x": 1.0, "2x": 0.5, "4x": 0.25}  # demand over pool -> pool over demand
HUGE, ALONE = "huge", "one_after_another"
KEPT = ("num_parks", "num_restores", "num_last_resorts", "pool_use_at_park", "bytes_to_host", "host_bytes_peak", "park_ms", "restore_ms")


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by pool."""
    o, plain = setup.options, setup.config()
    num, page_size = plain.scheduler.rows, plain.pool.page_size
    pages = -(-(o.prompt + o.answer - 1) // page_size)  # of one request at its end
    demand = num * pages * page_size
    sizes = {name: int(max(share * num, 1) * pages) * page_size for name, share in {**DEMANDS, HUGE: float(o.huge)}.items()}
    load: dict[str, Any] = {"workload.lengths": "fixed", "workload.num_requests": num, "workload.patient": True}  # as a batch job is
    load |= {f"workload.{part}_len_{end}": getattr(o, part) for part in ("prompt", "answer") for end in ("min", "max")}
    fields = {name: {**load, "pool.tokens": size} for name, size in sizes.items()}
    with setup.engines(fields) as engines:
        cases = {name: Case(engine, setup.config(fields[name])) for name, engine in engines.items()}
        cases[ALONE] = Case(engines[HUGE], setup.config(fields[HUGE]), is_alone=True)
        for round_ in range(setup.rounds):
            for name in turns(list(cases), round_):
                cases[name].measure()
                say(f"  round {round_ + 1}, {name}: {cases[name].speeds[-1]:.1f} tokens/s")
    job = {"requests": num, "prompt_tokens": o.prompt, "answer_tokens": o.answer, "demand_tokens": demand}
    return {**job, **results(cases)}


@dataclass(slots=True)
class Case:
    """One pool and what happened in it."""

    engine: Engine
    config: Config
    is_alone: bool = False
    speeds: list[float] = field(default_factory=list)
    answers: list[list[Any]] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)  # of the last round

    def measure(self) -> None:
        """One round: the whole job, prompts included."""
        renew(self.engine, self.config)
        asked = read_calls(self.engine, self.config)
        portions = [[one] for one in asked] if self.is_alone else [asked]
        outcomes = [measure_calls(self.engine, portion) for portion in portions]
        settle(self.engine)
        self.check(outcomes)
        num_tokens = sum(line["num_tokens"] for outcome in outcomes for line in outcome.lines)
        self.speeds.append(num_tokens / sum(outcome.figures.makespan_s for outcome in outcomes))
        self.answers.append([(line["custom_id"], line["token_ids"], line["text"]) for outcome in outcomes for line in outcome.lines])
        self.numbers = pressure_numbers(self.engine)

    def check(self, outcomes: list[Outcome]) -> None:
        """Nobody may have failed."""
        ended = [line["ended"] for outcome in outcomes for line in outcome.lines]
        if bad := [word for word in ended if word != "finished"]:
            raise JaxkvError(f"{len(bad)} of {len(ended)} requests ended as {bad[0]} in a pool of {self.config.pool.tokens} tokens")


def results(cases: dict[str, Case]) -> dict[str, Any]:
    """Speeds beside the ceiling and the floor, and whether all bytes are the same."""
    speed = {name: summary(case.speeds, digits=2) for name, case in cases.items()}
    huge, alone = speed[HUGE]["median"], speed[ALONE]["median"]
    reference = cases[HUGE].answers[0]
    num_runs = sum(len(case.answers) for case in cases.values())
    num_equal = sum(answers == reference for case in cases.values() for answers in case.answers)
    found = {name: pool(case, speed[name], huge, alone) for name, case in cases.items()}
    for name, one in found.items():
        of = f"{one['of_ample']:.3f} of ample, {one['of_one_after_another']:.2f} of one after another"
        say(f"{name}: {text(speed[name], 'tokens/s')}, {of}; {one['num_parks']} parks, pool use {one['pool_use_at_park']}")
    say(f"{num_equal} of {num_runs} runs gave the same bytes")
    return {
        "pools": found,
        "armed_over_huge": round(speed["1x"]["median"] / huge, 4),
        "armed_num_parks": found["1x"]["num_parks"],
        "runs": num_runs,
        "runs_with_equal_bytes": num_equal,
    }


def pool(case: Case, speed: dict[str, float], huge: float, alone: float) -> dict[str, Any]:
    """One case's figures; parks and bytes are those of the last round."""
    return {
        "pool_tokens": case.config.pool.tokens,
        "tokens_per_s": speed,
        "of_ample": round(speed["median"] / huge, 4),
        "of_one_after_another": round(speed["median"] / alone, 3),
        **{name: case.numbers[name] for name in KEPT},
    }


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
