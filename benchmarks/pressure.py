"""The same job through pools that hold twice, once, half and a quarter of what it needs at once.

What to expect. Copies run beside the computation, and a page is 1/1000 of a second of memory bandwidth or less, so moving pages is not the
price of a small pool. The price is that fewer rows run at once: a decode step takes nearly as long for two rows as for eight, so with a
quarter of the pool about a quarter of the rows share each step. The ceiling is an ample pool; the floor is one request after another, which
is what a small pool would force without parking. In the same run:

* armed and unused: the pool holds exactly the demand, so every step asks whether room is needed and it never is. It must be as fast as a
  pool that could hold the job many times over.
* pool use at a park: held pages / all pages when a park begins. Parking earlier than needed would show as less.
* every answer, in every pool and one after another, must be the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from common import Setup, endless, random_prompt, run, say, settle, summary, text, timed, turns

from jaxkv.engine import Engine
from jaxkv.errors import JaxkvError
from jaxkv.request import Completion, SamplingParams
from jaxkv.summary import pressure_numbers

OPTIONS: dict[str, Any] = {
    "prompt": 64,  # tokens
    "answer": 64,
    "huge": 8,  # times the demand: the pool in which parking is out of the question
}
DEMANDS = {"0.5x": 2.0, "1x": 1.0, "2x": 0.5, "4x": 0.25}  # demand over pool -> pool over demand
HUGE, ALONE = "huge", "one_after_another"


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by pool."""
    o, config = setup.options, setup.config()
    num, page_size = config.scheduler.rows, config.pool.page_size
    pages = -(-(o.prompt + o.answer - 1) // page_size)  # of one request at its end
    demand = num * pages * page_size
    sizes = {name: int(max(share * num, 1) * pages) * page_size for name, share in {**DEMANDS, HUGE: float(o.huge)}.items()}
    with setup.engines({name: {"pool.tokens": size} for name, size in sizes.items()}) as engines:
        job = _Job(engines[HUGE], num, o.prompt, o.answer)
        cases = [_Case(name, engine, sizes[name]) for name, engine in engines.items()]
        cases.append(_Case(ALONE, engines[HUGE], sizes[HUGE], alone=True))
        for round_ in range(setup.rounds):
            for case in turns(cases, round_):
                case.measure(job)
                say(f"  round {round_ + 1}, {case.name}: {case.speeds[-1]:.1f} tokens/s")
        return {
            "requests": num,
            "prompt_tokens": o.prompt,
            "answer_tokens": o.answer,
            "demand_tokens": demand,
            **_results({case.name: case for case in cases}),
        }


class _Job:
    """The requests: half of them greedy, half of them sampled."""

    def __init__(self, engine: Engine, num: int, prompt: int, answer: int) -> None:
        self.prompts = [random_prompt(engine, prompt, seed) for seed in range(num)]
        self.params = [endless(answer, temperature=float(seed % 2), seed=seed, logprobs=0) for seed in range(num)]


@dataclass(slots=True)
class _Case:
    """One pool and what happened in it."""

    name: str
    engine: Engine
    pool_tokens: int
    alone: bool = False
    speeds: list[float] = field(default_factory=list)
    answers: list[list[Completion]] = field(default_factory=list)

    def measure(self, job: _Job) -> None:
        """One round: the whole job, prompts included."""
        answers: list[Completion] = []

        def work() -> None:
            for prompts, params in self._portions(job):
                answers.extend(self.engine.generate(prompts, params))

        took = timed(work)
        settle(self.engine)
        if failed := [answer.error for answer in answers if answer.error]:
            raise JaxkvError(f"{len(failed)} of {len(answers)} requests failed in a pool of {self.pool_tokens} tokens: {failed[0]}")
        self.answers.append(answers)
        self.speeds.append(sum(len(answer.token_ids) for answer in answers) / took)

    def _portions(self, job: _Job) -> list[tuple[Sequence[list[int]], Sequence[SamplingParams]]]:
        if not self.alone:
            return [(job.prompts, job.params)]
        return [([prompt], [params]) for prompt, params in zip(job.prompts, job.params, strict=True)]


def _results(cases: dict[str, _Case]) -> dict[str, Any]:
    speed = {name: summary(case.speeds, digits=2) for name, case in cases.items()}
    huge, alone = speed[HUGE]["median"], speed[ALONE]["median"]
    reference = [_content(answer) for answer in cases[HUGE].answers[0]]
    num_runs = sum(len(case.answers) for case in cases.values())
    num_equal = sum([_content(answer) for answer in answers] == reference for case in cases.values() for answers in case.answers)
    found = {name: _pool(case, speed[name], huge, alone) for name, case in cases.items()}
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


def _pool(case: _Case, speed: dict[str, float], huge: float, alone: float) -> dict[str, Any]:
    numbers = pressure_numbers(case.engine)
    kept = (
        "num_parks",
        "num_restores",
        "num_last_resorts",
        "pool_use_at_park",
        "bytes_to_host",
        "host_bytes_peak",
        "park_ms",
        "restore_ms",
    )
    return {
        "pool_tokens": case.pool_tokens,
        "tokens_per_s": speed,
        "of_ample": round(speed["median"] / huge, 4),
        "of_one_after_another": round(speed["median"] / alone, 3),
        **{name: numbers[name] for name in kept},
    }


def _content(answer: Completion) -> tuple[Any, ...]:
    """What must be equal to the last bit."""
    return (answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.prompt_tokens)


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
