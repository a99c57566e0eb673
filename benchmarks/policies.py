"""The same chats under several policies on the live engine, and in the simulator.

What to expect. No policy makes a step faster; a policy decides how many rows share each step, how much is copied, and who waits. The
control are chats that come so far apart that the pool never fills: there all policies must take the same time, and their spread is the
noise. What matters is the ratio between policies within one round, and that every round of every policy gives the same bytes.

* eight: eight chats at once, a row for each, through a pool that holds about a third of what they need;
* four_rows: the same chats on four rows, so that there is a waiting line as well;
* apart: the same chats, each some seconds after the one before.

The same chats are then simulated with costs that were measured in the same run (`jaxkv calibrate` does the same): simulated over live
makespan says how far `jaxkv simulate` can be trusted here. All policies share one engine: they differ in the scheduler's settings only.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from common import Setup, endless, random_prompt, run, say, settle, summary, text, turns

from jaxkv.calibrate import calibrate
from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.request import Completion, SamplingParams
from jaxkv.scheduler import Scheduler
from jaxkv.simulate import Costs, Request, simulate
from jaxkv.stats import EngineStats

OPTIONS: dict[str, Any] = {
    "chats": 8,
    "shortest": 48,  # tokens of an answer
    "longest": 144,
    "prompt": 48,
    "apart": 3.0,  # seconds between two chats of the control
    "pool_share": 0.35,  # of what all chats need at their ends
}
POLICIES: dict[str, dict[str, Any]] = {
    "smallest head": {},
    "largest head": {"victim": "largest"},
    "youngest head": {"victim": "youngest"},
    "smallest pass": {"resume": "pass"},
    "reserve": {"admission": "reserve"},
}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by load and policy."""
    o = setup.options
    lengths = [round(o.shortest + (o.longest - o.shortest) * i / max(1, o.chats - 1)) for i in range(o.chats)]
    lengths = [lengths[(3 * i) % o.chats] if o.chats % 3 else lengths[i] for i in range(o.chats)]  # neither rising nor falling
    demand = sum(o.prompt + length - 1 for length in lengths)
    pool = max(int(demand * o.pool_share), o.prompt + o.longest)
    sizes = {"eight": {"scheduler.rows": o.chats, "pool.tokens": pool}, "four_rows": {"scheduler.rows": 4, "pool.tokens": pool}}
    with setup.engines(sizes) as engines:
        costs: dict[str, list[Costs]] = {name: [] for name in engines}
        loads = {
            "eight": Load(engines["eight"], costs["eight"], lengths, o.prompt, 0.0),
            "four_rows": Load(engines["four_rows"], costs["four_rows"], lengths, o.prompt, 0.0),
            "apart": Load(engines["eight"], costs["eight"], lengths, o.prompt, o.apart),
        }
        for round_ in range(setup.rounds):
            for name, load in loads.items():
                load.measure(round_)
                say(
                    f"  round {round_ + 1}, {name}: " + ", ".join(f"{policy} {runs[-1].wall_s:.1f} s" for policy, runs in load.runs.items())
                )
            for name, engine in engines.items():
                costs[name].append(calibrate(engine, repeats=3).costs)
        found = {name: load.results() for name, load in loads.items()}
    for name, one in found.items():
        for policy, figures in one["policies"].items():
            ratio = text(figures["simulated_over_live"])
            say(f"{name}, {policy}: {text(figures['wall_s'], 's')}, simulated {text(figures['simulated_s'], 's')}, over live {ratio}")
    equal = {name: one.pop("equal_runs") for name, one in found.items()}
    say(f"runs with equal bytes: {equal}")
    return {"chats": o.chats, "answer_tokens": lengths, "prompt_tokens": o.prompt, "pool_tokens": pool, "equal_runs": equal, "loads": found}


@dataclass(frozen=True, slots=True)
class Run:
    """One policy, once."""

    wall_s: float
    slowest_s: float
    longest_pause_s: float
    num_tokens: int
    num_parks: int
    num_bytes: int
    contents: list[tuple[Any, ...]]


@dataclass(slots=True)
class Load:
    """Chats for one engine, `apart_s` seconds apart, and what came of them."""

    engine: Engine
    costs: list[Costs]  # of each round, shared by all loads of the engine
    lengths: list[int]
    prompt_len: int
    apart_s: float
    runs: dict[str, list[Run]] = field(default_factory=lambda: {name: [] for name in POLICIES})

    def measure(self, round_: int) -> None:
        """Every policy once."""
        for name in turns(list(POLICIES), round_):
            self.engine.scheduler = Scheduler(self.settings(POLICIES[name]), on_drop=self.engine.parts.transfer.discard)
            self.engine.stats = EngineStats()
            self.runs[name].append(self._run())

    def settings(self, policy: Mapping[str, Any]) -> Any:
        """The engine's own settings with another policy; rotation would hide what the policies do."""
        return replace(self.engine.parts.scheduler_config, rotate="none", **policy)

    def _run(self) -> Run:
        engine, handles, num_bytes = self.engine, list[Handle](), self._moved()
        chats = [(random_prompt(engine, self.prompt_len, i), self._params(i, length)) for i, length in enumerate(self.lengths)]
        began = time.perf_counter()
        while len(handles) < len(chats) or not all(handle.done for handle in handles):
            due = began + len(handles) * self.apart_s
            if len(handles) < len(chats) and time.perf_counter() >= due:
                handles.append(engine.submit(*chats[len(handles)]))
            elif engine.is_idle:
                time.sleep(max(0.0, due - time.perf_counter()))
            else:
                engine.step()
        wall_s = time.perf_counter() - began
        settle(engine)
        answers = [handle.result() for handle in handles]
        return Run(
            wall_s=wall_s,
            slowest_s=max(answer.e2e_s for answer in answers),
            longest_pause_s=max(engine.stats.pause_s, default=0.0),
            num_tokens=sum(self.lengths),
            num_parks=engine.scheduler.counters.num_parks,
            num_bytes=self._moved() - num_bytes,
            contents=[content(answer) for answer in answers],
        )

    def _params(self, i: int, length: int) -> SamplingParams:
        return endless(length, temperature=float(i % 2), seed=i, logprobs=0)

    def _moved(self) -> int:
        stats = self.engine.parts.transfer.stats
        return stats.bytes_to_host + stats.bytes_to_device

    def results(self) -> dict[str, Any]:
        """Medians over the rounds, beside the simulated makespan."""
        reference = next(iter(self.runs.values()))[0].contents
        runs = [run for found in self.runs.values() for run in found]
        num_equal = sum(run.contents == reference for run in runs)
        return {"equal_runs": f"{num_equal} of {len(runs)}", "policies": {name: self._figures(name) for name in self.runs}}

    def _figures(self, name: str) -> dict[str, Any]:
        runs = self.runs[name]
        wall = summary(run.wall_s for run in runs)
        simulated = [self.simulated(POLICIES[name], costs) for costs in self.costs]
        return {
            "wall_s": wall,
            "slowest_chat_s": summary(run.slowest_s for run in runs),
            "tokens_per_s": summary((run.num_tokens / run.wall_s for run in runs), digits=1),
            "longest_pause_s": summary(run.longest_pause_s for run in runs),
            "num_parks": statistics.median(run.num_parks for run in runs),
            "moved_mib": round(statistics.median(run.num_bytes for run in runs) / 2**20, 1),
            "simulated_s": summary(simulated),
            "simulated_over_live": summary(found / run.wall_s for found, run in zip(simulated, runs, strict=True)),
        }

    def simulated(self, policy: Mapping[str, Any], costs: Costs) -> float:
        """The makespan of the same chats in the simulator."""
        requests = [Request(i * self.apart_s, self.prompt_len, length, length) for i, length in enumerate(self.lengths)]
        num_staging = self.engine.parts.transfer.free_chunks
        result, _ = simulate(self.settings(policy), requests, costs, num_staging)
        return result.makespan_s


def content(answer: Completion) -> tuple[Any, ...]:
    """What must be equal to the last bit."""
    return (answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.prompt_tokens)


if __name__ == "__main__":
    run(__doc__, measure, rounds=3, options=OPTIONS)
