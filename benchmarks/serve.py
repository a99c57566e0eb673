"""Streams that each fit and together do not: what their clients see of it, over HTTP.

What to expect. A pool of half the demand has room for half of the rows, so the same answers take more decode steps. Nobody can need fewer
than the longest answer has tokens, nor fewer than the cells all sequences hold, summed over their tokens, divided by the pool: that is
`bound_steps`, and no engine that keeps a running sequence in the pool gets below it. `free_parks_steps` is what the same scheduler takes
with copies that cost nothing (simulated). What parks cost beside the rows they leave empty is seconds per decode step over those of the
ample pool, and the time between two tokens of those that run. A pause is a gap with a park in it, by the stream's own comments.

Each server is a process of its own, started once; loads take turns:

* ample: the pool holds everything; half: half of it; rotating: half, and whoever waits `--rotate-s` takes the place of one that runs;
* half_apart: half, with `--apart` seconds between chats.

Every answer must be the same text as in the ample pool's first round. With `--chat 1` the streams are chats that name no `max_tokens` and
end where the model ends them, or where `model.max_len` (prompt + answer) does; the bound is then that of the answers as they were.
"""

import http.client
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from common import Setup, run, say, summary, text, turns

from jaxkv.errors import JaxkvError
from jaxkv.simulate import Costs, Request, simulate
from jaxkv.simulate.cases import list_cases
from jaxkv.stats import spread

OPTIONS: dict[str, Any] = {"chats": 4, "prompt": 285, "answer": 512, "apart": 3.0, "rotate_s": 0.5, "pool_share": 0.5, "chat": 0}
LOADS = {"ample": "ample", "half": "half", "rotating": "rotating", "half_apart": "half"}  # by name: its server
READY = re.compile(r"http://127\.0\.0\.1:(\d+)")
START_S = 300.0


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by load."""
    o = setup.options
    page, length = setup.config().pool.page_size, o.prompt + o.answer
    demand = o.chats * -(-length // page) * page
    half = max(int(demand * o.pool_share), -(-length // page) * page)
    common = {"model.max_len": length, "scheduler.rows": o.chats}
    pools = {
        "ample": {**common, "pool.tokens": demand},
        "half": {**common, "pool.tokens": half, "scheduler.rotate": "none"},
        "rotating": {**common, "pool.tokens": half, "scheduler.rotate": "any", "scheduler.rotate_after_s": o.rotate_s},
    }
    with ExitStack() as stack:
        ports = {name: stack.enter_context(server(setup, fields)) for name, fields in pools.items()}
        loads = [Load(name, ports[which], o, pools[which]) for name, which in LOADS.items()]
        for round_ in range(setup.rounds):
            for load in turns(loads, round_):
                load.measure()
                say(f"  round {round_ + 1}, {load.name}: {load.walls[-1]:.1f} s, {load.num_tokens / load.walls[-1]:.1f} tokens/s")
    setup.facts["dtype"] = setup.config().model.dtype
    expected = next(load for load in loads if load.name == "ample").texts[0]
    lengths = next(load for load in loads if load.name == "ample").lengths if o.chat else [(o.prompt, o.answer)] * o.chats
    found = {load.name: load.results(setup, expected, lengths) for load in loads}
    ample_ms = found["ample"]["ms_per_decode_step"]["median"]
    for name, one in found.items():
        one["step_over_ample"] = round(one["ms_per_decode_step"]["median"] / ample_ms, 3)
        say(
            f"{name}: {text(one['tokens_per_s'], 'tokens/s')}, completed {one['completed']}, identical {one['identical']}, "
            f"gaps {one['gap_ms']} ms, longest pause {one['pause_max_s']} s, {one['decode_steps']} decode steps of {one['bound_steps']}"
        )
    return {"chats": o.chats, "prompt_tokens": o.prompt, "answer_tokens": o.answer, "demand_tokens": demand, "loads": found}


@contextmanager
def server(setup: Setup, fields: dict[str, Any]) -> Iterator[int]:
    """The port of a server in a process of its own, once it serves; it is asked to stop at the end."""
    words = [f"--{name}={value}" for name, value in {**setup.overrides, **fields, "server.port": 0, "server.page": "false"}.items()]
    command = [sys.executable, "-m", "jaxkv", "serve", str(setup.path), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    port: list[int] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if not port and (match := READY.search(line)):
                port.append(int(match[1]))

    threading.Thread(target=read, daemon=True).start()
    try:
        deadline = time.monotonic() + START_S
        while not (port and _is_healthy(port[0])):
            if process.poll() is not None or time.monotonic() > deadline:
                raise JaxkvError(f"a server did not start: {(lines or ['it said nothing'])[-1].strip()}")
            time.sleep(0.2)
        yield port[0]
    finally:
        process.terminate()
        process.wait()


def _is_healthy(port: int) -> bool:
    try:
        return _get(port, "/health")[0] == 200
    except OSError:
        return False


def _get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@dataclass(slots=True)
class Stream:
    """What one client saw."""

    begun: float
    first: float = 0.0
    last: float = 0.0
    text: str = ""
    reason: str | None = None
    num_tokens: int = 0
    num_prompt: int = 0
    gaps: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    _was_parked: bool = False

    def take(self, line: str) -> None:
        """A line of the stream, now."""
        now = time.perf_counter()
        self._was_parked = self._was_parked or line.startswith(": parked")
        if not line.startswith("data: {"):
            return
        body = json.loads(line.removeprefix("data: "))
        if usage := body.get("usage"):
            self.num_tokens, self.num_prompt = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in body.get("choices", []):
            self.reason = choice["finish_reason"] or self.reason
            if said := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                self._note(now)
                self.text += said

    def _note(self, now: float) -> None:
        if self.first:
            (self.pauses if self._was_parked else self.gaps).append(now - self.last)
        self.first, self.last, self._was_parked = self.first or now, now, False


class Load:
    """Some chats for one server, and what came of them in each round."""

    def __init__(self, name: str, port: int, options: Any, fields: dict[str, Any]) -> None:
        self.name = name
        self.walls: list[float] = []
        self.texts: list[list[str]] = []
        self._port, self._options, self._fields = port, options, fields
        self._steps: list[float] = []
        self._parks: list[float] = []
        self._streams: list[list[Stream]] = []

    @property
    def num_tokens(self) -> int:
        """Of the last round."""
        return sum(stream.num_tokens for stream in self._streams[-1])

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and its answer, in the first round."""
        return [(stream.num_prompt, stream.num_tokens) for stream in self._streams[0]]

    def measure(self) -> None:
        """One round."""
        apart = self._options.apart if self.name.endswith("apart") else 0.0
        before, begun = self._figures(), time.perf_counter()
        streams = [Stream(begun + i * apart) for i in range(self._options.chats)]
        asking = [threading.Thread(target=self._ask, args=(i, stream)) for i, stream in enumerate(streams)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        self.walls.append(max(stream.last for stream in streams) - begun)
        after = self._figures()
        self._steps.append(after["decode_steps"] - before["decode_steps"])
        self._parks.append(after["parks"] - before["parks"])
        self._streams.append(streams)
        self.texts.append([stream.text for stream in streams])

    def _ask(self, i: int, stream: Stream) -> None:
        o = self._options
        time.sleep(max(0.0, stream.begun - time.perf_counter()))
        path, body = (_chat if o.chat else _completion)(i, o)
        body |= {"seed": i, "temperature": 0.7, "stream": True, "stream_options": {"include_usage": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as answer:
            for line in answer:
                stream.take(line.decode().rstrip("\n"))
        connection.close()

    def _figures(self) -> dict[str, float]:
        found = _get(self._port, "/metrics")[1]
        return {name: sum(map(float, re.findall(rf"^jaxkv_{name}_total ([\d.e+]+)$", found, re.M))) for name in ("decode_steps", "parks")}

    def results(self, setup: Setup, expected: list[str], lengths: list[tuple[int, int]]) -> dict[str, Any]:
        """Over all rounds; gaps and pauses over all streams of all rounds."""
        streams = [stream for round_ in self._streams for stream in round_]
        whole = [s for round_ in self._streams for s, (_, num) in zip(round_, lengths, strict=True) if s.reason and s.num_tokens == num]
        same = sum(found == wanted for round_ in self.texts for found, wanted in zip(round_, expected, strict=True))
        gaps, pauses = [s for stream in streams for s in stream.gaps], [s for stream in streams for s in stream.pauses]
        steps = zip(self.walls, self._steps, strict=True)
        return {
            "completed": f"{len(whole)} of {len(streams)}",
            "identical": f"{same} of {len(streams)}",
            "wall_s": summary(self.walls),
            "tokens_per_s": summary((sum(s.num_tokens for s in r) / w for r, w in zip(self._streams, self.walls, strict=True)), digits=1),
            "ttft_s": spread([stream.first - stream.begun for stream in streams], 1.0, p50=0.5, max=1.0),
            "gap_ms": spread(gaps, 1e3, p50=0.5, p99=0.99, max=1.0),
            "parks": summary(self._parks, digits=0),
            "pauses": len(pauses),
            "pause_max_s": round(max(pauses, default=0.0), 2),
            "decode_steps": summary(self._steps, digits=0)["median"],
            "ms_per_decode_step": summary((wall / num for wall, num in steps), 1e3),
            **self._least_steps(setup, lengths),
        }

    def _least_steps(self, setup: Setup, lengths: list[tuple[int, int]]) -> dict[str, Any]:
        """What no engine gets below, and what this scheduler takes where copies are free."""
        apart = self._options.apart if self.name.endswith("apart") else 0.0
        cells = sum(prompt + made for prompt, answer in lengths for made in range(1, answer))
        case = list_cases(setup.config({**self._fields, "sweep.grid": {}}))[0]
        requests = [Request(i * apart, prompt, answer, answer) for i, (prompt, answer) in enumerate(lengths)]
        free = Costs(copy_s=0.0, land_s=0.0, token_bytes=case.costs.token_bytes)
        result, _ = simulate(case.settings, requests, free, case.num_staging)
        bound = max(max(answer for _, answer in lengths) - 1, -(-cells // self._fields["pool.tokens"]))
        return {"bound_steps": None if apart else bound, "free_parks_steps": result.num_steps}


def _completion(i: int, options: Any) -> tuple[str, dict[str, Any]]:
    """Token ids without meaning, and exactly so many tokens after them."""
    prompt = np.random.default_rng(i).integers(1000, 40000, options.prompt).tolist()
    return "/v1/completions", {"prompt": prompt, "ignore_eos": True, "max_tokens": options.answer}


def _chat(i: int, options: Any) -> tuple[str, dict[str, Any]]:
    """A wish for a long story with words in it to make the prompt nearly as long as asked, and no word about the answer's length."""
    words = " ".join(["ship", "river", "stone", "night"][(i + k) % 4] for k in range(max(1, options.prompt - 80)))
    wish = f"Write story number {i}, a very long one with many chapters, about these words: {words}"
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": wish}]}


if __name__ == "__main__":
    run(__doc__, measure, rounds=2, options=OPTIONS)
