"""Streams that each fit and together do not: what their clients see of it, over HTTP.

What to expect. A pool of half the demand has room for half of the rows, so the same answers take more decode steps. Nobody can need fewer
than the longest answer has tokens, nor fewer than the cells all sequences hold, summed over their tokens, divided by the pool: that is
`bound_steps`, and no engine that keeps a running sequence in the pool gets below it. `free_parks_steps` is what the same scheduler takes
with copies that cost nothing (simulated, with the steps' own times). What parks cost beside the rows they leave empty is `park_cost`: the
decode steps beyond those, and the seconds by which steps with copies are longer than steps without; the aim is 0.05 of the run. A pause is
a gap with a park in it, by the stream's own comments.

The load is the configuration's `workload`, the tight pool its `pool.tokens`. Each server is a process of its own, started once; loads take
turns:

* ample: the pool holds everything; tight: the configured pool; rotating: that, and whoever waits `--rotate-s` takes the place of one that
  runs, so that no gap should be over 2 s;
* tight_apart: tight, with `--apart` seconds between requests, whatever `workload.arrivals` says.

Every answer must be the same text as in the ample pool's first round. With `--chat 1` the streams are chats that name no `max_tokens` and
end where the model ends them, or where `model.max_len` does; the figures are then those of the answers as they were.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from common import Setup, run, say, summary, text, turns
from servers import Stream, figures, server

from jaxkv.config import Config
from jaxkv.errors import ConfigError
from jaxkv.scheduler import Plan
from jaxkv.simulate import Costs, Request
from jaxkv.simulate.cases import list_cases
from jaxkv.simulate.run import Simulation
from jaxkv.sizing import read_shape
from jaxkv.stats import spread
from jaxkv.workload.bodies import CHATS, Call, make_calls

OPTIONS: dict[str, Any] = {"apart": 3.0, "rotate_s": 0.5, "chat": 0, "temperature": 0.7}
LOADS = {"ample": "ample", "tight": "tight", "rotating": "rotating", "tight_apart": "tight"}  # by name: its server
LONGEST_GAP_S = 2.0  # the aim with rotation
SPACE = 80  # tokens of a chat around the words that make it long
WORDS = ("ship", "river", "stone", "night")


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by load."""
    o, config = setup.options, setup.config()
    calls = read_calls(config, is_chat=bool(o.chat))
    demand = sum(_held(config, call, is_chat=bool(o.chat)) for call in calls)
    pool_tokens = _tight_tokens(config, demand)
    pools: dict[str, dict[str, Any]] = {
        "ample": {"pool.tokens": demand},
        "tight": {"pool.tokens": pool_tokens, "scheduler.rotate": "none"},
        "rotating": {"pool.tokens": pool_tokens, "scheduler.rotate": "any", "scheduler.rotate_after_s": o.rotate_s},
    }
    with ExitStack() as stack:
        ports = {name: stack.enter_context(server(setup.path, {**setup.overrides, **fields})) for name, fields in pools.items()}
        loads = {name: Load(setup, name, ports[which], calls, pools[which]) for name, which in LOADS.items()}
        for round_ in range(setup.rounds):
            for load in turns(list(loads.values()), round_):
                load.measure()
                say(f"  round {round_ + 1}, {load.name}: {load.walls[-1]:.1f} s, {load.num_tokens / load.walls[-1]:.1f} tokens/s")
    setup.facts["dtype"] = config.model.dtype
    found = {name: load.results(loads["ample"]) for name, load in loads.items()}
    for name, one in found.items():
        one["step_over_ample"] = round(one["ms_per_decode_step"]["median"] / found["ample"]["ms_per_decode_step"]["median"], 3)
        say(
            f"{name}: {text(one['tokens_per_s'], 'tokens/s')}, completed {one['completed']}, identical {one['identical']}, gaps "
            f"{one['gap_ms']} ms, longest {one['longest_gap_s']} s, {one['decode_steps']} decode steps of {one['bound_steps']}, "
            f"parks cost {one['park_cost']['share']:.1%}"
        )
    facts = {"requests": len(calls), "chat": bool(o.chat), "demand_tokens": demand, "pool_tokens": pool_tokens}
    return {**facts, "workload": config.workload.model_dump(mode="json"), "loads": found}


def read_calls(config: Config, *, is_chat: bool) -> list[Call]:
    """The configured load; as chats without an end of their own where these are wanted."""
    workload = config.workload
    if workload.cancels or set(workload.choices) != {1}:
        raise ConfigError("workload: whole answers of one choice each are compared here; set cancels to 0 and choices to [1]")
    calls = make_calls(config, read_shape(config, None).vocab_size)
    return [_as_chat(i, call) for i, call in enumerate(calls)] if is_chat else calls


def _as_chat(i: int, call: Call) -> Call:
    """Its own text, or a wish for a long story with words in it to make the prompt nearly as long as drawn; no word about the length."""
    kept = {name: value for name, value in call.body.items() if name in ("seed", "priority")}
    told = call.request.text
    if told is None:
        words = " ".join(WORDS[(i + k) % len(WORDS)] for k in range(max(1, call.request.prompt_len - SPACE)))
        told = f"Write story number {i}, a very long one with many chapters, about these words: {words}"
    return replace(call, url=CHATS, body={**kept, "messages": [{"role": "user", "content": told}]})


def _held(config: Config, call: Call, *, is_chat: bool) -> int:
    """Cells of the pages that a request takes in the end; a text is of a length that nobody knows before."""
    page, request = config.pool.page_size, call.request
    length = request.prompt_len + request.answer_len
    if is_chat or request.text is not None:
        if config.model.max_len is None:
            raise ConfigError("model.max_len: is null, and a chat may then take any number of tokens; set it")
        length = config.model.max_len
    return -(-length // page) * page


def _tight_tokens(config: Config, demand: int) -> int:
    tokens = config.pool.tokens
    if tokens is None or tokens >= demand:
        raise ConfigError(f"pool.tokens: got {tokens}, and the load takes {demand} at most: set fewer, so that it does not fit")
    return tokens


class Load:
    """Some requests for one server, and what came of them in each round."""

    def __init__(self, setup: Setup, name: str, port: int, calls: Sequence[Call], fields: dict[str, Any]) -> None:
        self.name = name
        self.walls: list[float] = []
        self._setup, self._port, self._calls, self._fields = setup, port, calls, fields
        self._times = [call.request.arrival_s for call in calls]
        if name.endswith("apart"):
            self._times = [i * setup.options.apart for i in range(len(calls))]
        self._figures: list[dict[str, float]] = []  # how much each rose in a round
        self._streams: list[list[Stream]] = []

    @property
    def num_tokens(self) -> int:
        """Of the last round."""
        return sum(stream.num_tokens for stream in self._streams[-1])

    def measure(self) -> None:
        """One round."""
        before, begun = figures(self._port), time.perf_counter()
        streams = [Stream(begun + at) for at in self._times]
        body = {"temperature": self._setup.options.temperature}
        asking = [
            threading.Thread(target=stream.run, args=(self._port, call.url, {**call.body, **body}))
            for stream, call in zip(streams, self._calls, strict=True)
        ]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        self.walls.append(max(stream.last for stream in streams) - begun)
        self._figures.append({name: value - before.get(name, 0.0) for name, value in figures(self._port).items()})
        self._streams.append(streams)

    def results(self, ample: "Load") -> dict[str, Any]:
        """Over all rounds; gaps and pauses over all streams of all rounds. What is right is what the ample pool's first round gave."""
        right = ample._streams[0]
        streams = [stream for round_ in self._streams for stream in round_]
        pairs = [pair for round_ in self._streams for pair in zip(round_, right, strict=True)]
        whole = [mine for mine, other in pairs if mine.reason and not mine.error and mine.num_tokens == other.num_tokens]
        gaps, pauses = [s for stream in streams for s in stream.gaps], [s for stream in streams for s in stream.pauses]
        steps = [found["decode_steps_total"] for found in self._figures]
        longest = max([*gaps, *pauses], default=0.0)
        return {
            "completed": f"{len(whole)} of {len(streams)}",
            "identical": f"{sum(mine.text == other.text for mine, other in pairs)} of {len(streams)}",
            "errors": sorted({stream.error for stream in streams if stream.error})[:3],
            "wall_s": summary(self.walls),
            "tokens_per_s": summary((sum(s.num_tokens for s in r) / w for r, w in zip(self._streams, self.walls, strict=True)), digits=1),
            "ttft_s": spread([stream.first - stream.begun for stream in streams], 1.0, p50=0.5, max=1.0),
            "gap_ms": spread(gaps, 1e3, p50=0.5, p99=0.99, max=1.0),
            "parks": summary((found["parks_total"] for found in self._figures), digits=0),
            "pauses": len(pauses),
            "pause_max_s": round(max(pauses, default=0.0), 2),
            "longest_gap_s": round(longest, 2),
            "no_gap_over_2_s": longest <= LONGEST_GAP_S,
            "decode_steps": round(statistics.median(steps)),
            "ms_per_decode_step": summary((wall / num for wall, num in zip(self.walls, steps, strict=True)), 1e3),
            **self._least_steps([(stream.num_prompt, stream.num_tokens) for stream in right]),
        }

    def _least_steps(self, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """What no engine gets below, what this scheduler takes where copies are free, and what they cost beside that."""
        cells = sum(prompt + made for prompt, answer in lengths for made in range(1, answer))
        bound = max(max(answer for _, answer in lengths) - 1, -(-cells // self._fields["pool.tokens"]))
        free = [self._free_parks(lengths, found) for found in self._figures]
        costs = [self._park_cost(*three) for three in zip(self.walls, self._figures, free, strict=True)]
        return {
            "bound_steps": None if any(self._times) else bound,
            "free_parks_steps": round(statistics.median(free)),
            "park_cost": {name: round(statistics.median(cost[name] for cost in costs), 4) for name in costs[0]},
        }

    def _free_parks(self, lengths: Sequence[tuple[int, int]], found: dict[str, float]) -> int:
        """Decode steps of the same scheduler whose copies take no time, with the times that steps took in this round."""
        case = list_cases(self._setup.config({**self._fields, "sweep.grid": {}, "sweep.zip": {}}))[0]
        requests = [Request(at, prompt, answer, answer) for at, (prompt, answer) in zip(self._times, lengths, strict=True)]
        chunks = sum(-(-prompt // case.config.scheduler.prefill_chunk) for prompt, _ in lengths)
        step_s = _quiet_s(found)
        prompt_s = max(0.0, _work(found, "step_seconds", "prompt") - _work(found, "steps_by_work", "prompt") * step_s) / chunks
        costs = Costs(0.0, step_s, 0.0, 0.0, prompt_s, 0.0, copy_s=0.0, land_s=0.0, token_bytes=case.costs.token_bytes)
        simulation = Counted(case.settings, requests, costs, case.num_staging)
        simulation.run()
        return simulation.num_decode_steps

    def _park_cost(self, wall_s: float, found: dict[str, float], free_steps: int) -> dict[str, float]:
        """Of one round: seconds that steps with copies took beyond others, and that nothing but copies went on; steps beyond free parks."""
        quiet_s = _quiet_s(found)
        longer_s = _work(found, "step_seconds", "copies") - _work(found, "steps_by_work", "copies") * quiet_s
        moving_s = longer_s + _work(found, "step_seconds", "waiting")
        more_steps = found["decode_steps_total"] - free_steps if found["parks_total"] else 0
        steps_s = max(0.0, more_steps * quiet_s)
        share = (max(0.0, moving_s) + steps_s) / wall_s
        return {"share": share, "moving_s": moving_s, "more_steps": more_steps, "more_steps_s": steps_s}


class Counted(Simulation):
    """Counts the steps with rows to decode, as an engine does: a prompt's chunk alone is none."""

    num_decode_steps = 0

    def _compute(self, plan: Plan) -> None:
        self.num_decode_steps += bool(plan.decode)
        super()._compute(plan)


def _work(found: dict[str, float], name: str, work: str) -> float:
    return found[f'{name}_total{{work="{work}"}}']


def _quiet_s(found: dict[str, float]) -> float:
    """Seconds of a step with nothing beside its rows."""
    return _work(found, "step_seconds", "rows") / max(1.0, _work(found, "steps_by_work", "rows"))


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
