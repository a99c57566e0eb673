"""The same chats under several policies on the live engine, and in the simulator.

What to expect. No policy makes a step faster; a policy decides how many rows share each step, how much is copied, and who waits. The
control are chats that come so far apart that the pool never fills: there all policies must take the same time, and their spread is the
noise. What matters is the ratio between policies within one round, and that every round of every policy gives the same bytes.

* eight: eight chats at once, a row for each, through a pool that holds about a third of what they need;
* four_rows: the same chats on four rows, so that there is a waiting line as well;
* apart: the same chats, each some seconds after the one before.

The runs are those of `jaxkv sweep`, with the ceilings that a sweep does not have: the same chats are simulated with costs that were
measured in the same round (`jaxkv calibrate` does the same), and simulated over live makespan says how far `jaxkv simulate` can be trusted
here. All policies share one engine: they differ in the scheduler's settings only.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Setup, run, say, settle, summary, text, turns

from jaxkv.calibrate import calibrate
from jaxkv.config import Config, load_config
from jaxkv.engine import Engine
from jaxkv.simulate import Costs, Request
from jaxkv.sweep.live import measure as measure_run
from jaxkv.sweep.live import renew
from jaxkv.sweep.outcome import Outcome
from jaxkv.sweep.simulated import run_simulated

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
    "largest head": {"scheduler.victim": "largest"},
    "youngest head": {"scheduler.victim": "youngest"},
    "smallest pass": {"scheduler.resume": "pass"},
    "reserve": {"scheduler.admission": "reserve"},
}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by load and policy."""
    o = setup.options
    lengths = [round(o.shortest + (o.longest - o.shortest) * i / max(1, o.chats - 1)) for i in range(o.chats)]
    lengths = [lengths[(3 * i) % o.chats] if o.chats % 3 else lengths[i] for i in range(o.chats)]  # neither rising nor falling
    pool = max(int(sum(o.prompt + length - 1 for length in lengths) * o.pool_share), o.prompt + o.longest)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "chats.jsonl"
        trace.write_text("".join(Request(0.0, o.prompt, length, length).to_line() for length in lengths))
        # rotation would hide what the policies do
        common = {"pool.tokens": pool, "scheduler.rotate": "none", "workload.kind": "measured", "workload.trace": str(trace)}
        sizes = {"eight": {**common, "scheduler.rows": o.chats}, "four_rows": {**common, "scheduler.rows": 4}}
        with setup.engines(sizes) as engines:
            costs: dict[str, list[Costs]] = {name: [] for name in engines}
            loads = {name: Load(engine, setup.config(sizes[name]), costs[name]) for name, engine in engines.items()}
            apart = {**sizes["eight"], "workload.arrivals": "staggered", "workload.every_s": o.apart}
            loads["apart"] = Load(engines["eight"], setup.config(apart), costs["eight"])
            for round_ in range(setup.rounds):
                for name, load in loads.items():
                    load.measure(round_)
                    took = ", ".join(f"{policy} {runs[-1].figures.makespan_s:.1f} s" for policy, runs in load.runs.items())
                    say(f"  round {round_ + 1}, {name}: {took}")
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


@dataclass(slots=True)
class Load:
    """Chats for one engine, and what came of them under each policy."""

    engine: Engine
    config: Config
    costs: list[Costs]  # of each round, shared by all loads of the engine
    runs: dict[str, list[Outcome]] = field(default_factory=lambda: {name: [] for name in POLICIES})

    def measure(self, round_: int) -> None:
        """Every policy once."""
        for name in turns(list(POLICIES), round_):
            config = self.under(name)
            renew(self.engine, config)
            self.runs[name].append(measure_run(self.engine, config))
            settle(self.engine)

    def under(self, policy: str, fields: Mapping[str, Any] | None = None) -> Config:
        """The load's configuration with a policy."""
        return load_config(self.config.to_dict(), {**POLICIES[policy], **(fields or {})})

    def results(self) -> dict[str, Any]:
        """Medians over the rounds, beside the simulated makespan."""
        runs = [run for found in self.runs.values() for run in found]
        num_equal = sum(run.outputs_sha256 == runs[0].outputs_sha256 for run in runs)
        return {"equal_runs": f"{num_equal} of {len(runs)}", "policies": {name: self._figures(name) for name in self.runs}}

    def _figures(self, name: str) -> dict[str, Any]:
        runs = [run.figures for run in self.runs[name]]
        simulated = [self._simulated(name, costs) for costs in self.costs]
        return {
            "wall_s": summary(run.makespan_s for run in runs),
            "slowest_chat_s": summary(run.slowest_s for run in runs),
            "tokens_per_s": summary((run.tokens_per_s for run in runs), digits=1),
            "longest_pause_s": summary(run.longest_pause_s for run in runs),
            "num_parks": statistics.median(run.num_parks for run in runs),
            "moved_mib": round(statistics.median(run.host_bytes + run.device_bytes for run in runs) / 2**20, 1),
            "simulated_s": summary(simulated),
            "simulated_over_live": summary(found / run.makespan_s for found, run in zip(simulated, runs, strict=True)),
        }

    def _simulated(self, policy: str, costs: Costs) -> float:
        """The makespan of the same chats in the simulator."""
        fields = {f"simulate.{name}": value for name, value in costs.to_dict().items()}
        fields["model.max_len"] = self.engine.max_len
        return run_simulated(self.under(policy, fields)).figures.makespan_s


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
