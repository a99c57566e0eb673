"""How fast prompts are computed, and what a long one does to the chats beside it, for several chunk widths.

The ceiling, measured in the same run. A chunk of n tokens reads the weights once and does n times the arithmetic, so it is bound by
arithmetic from a few dozen tokens on: the ceiling is the same chunks' matrix products alone. Wider chunks spread the reading of weights
over more tokens and take longer: a chat beside them waits for one chunk in each step, so the width is a trade between the newcomer's
first token and everybody else's next one.

The promise under test: a prompt of 1000 tokens beside eight running chats delays each of their tokens by no more than one chunk takes.
"""

import statistics
import time
from typing import Any

from ceilings import Programs, prompt_products
from common import Setup, clear, endless, random_prompt, run, say, seat, settle, summary, text, timed, turns

from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.stats import spread

OPTIONS: dict[str, Any] = {
    "chunks": (32, 64, 128, 256),
    "prompt": 1000,  # tokens of the newcomer
    "chats": 8,
    "chat_prompt": 64,
    "quiet_steps": 8,  # steps without the newcomer, to know what a gap is otherwise
}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, by chunk width."""
    o = setup.options
    answer = 2 * o.quiet_steps + 2 * o.prompt // min(o.chunks) + 16
    pool = o.prompt + 64 + o.chats * (o.chat_prompt + answer + 32)
    fixed = {"scheduler.rows": o.chats + 1, "pool.tokens": pool}
    with setup.engines({width: {**fixed, "scheduler.prefill_chunk": width} for width in o.chunks}) as engines:
        widths = [_Width(engine, width, o, answer) for width, engine in engines.items()]
        for round_ in range(setup.rounds):
            for one in turns(widths, round_):
                one.measure()
        return {"prompt_tokens": o.prompt, "chats": o.chats, "chunks": {str(one.width): one.results() for one in widths}}


class _Width:
    """One engine with one chunk width."""

    def __init__(self, engine: Engine, width: int, options: Any, answer: int) -> None:
        self.width = width
        self._engine = engine
        self._options = options
        self._answer = answer
        self._program = Programs(engine).prefill(options.prompt)
        self._products = prompt_products(engine, options.prompt)
        self._times: dict[str, list[float]] = {}
        self._delays: list[float] = []

    def measure(self) -> None:
        """One round: the prompt by its program, its products, through the idle engine, and beside running chats."""
        o = self._options
        num_chunks = -(-o.prompt // self.width)
        took = timed(self._program)
        self._note("chunk", took / num_chunks)
        self._note("program", o.prompt / took)
        self._note("products", o.prompt / timed(self._products))
        self._note("engine", o.prompt / timed(self._alone))
        self._beside()

    def _alone(self) -> None:
        prompt = random_prompt(self._engine, self._options.prompt, 0)
        self._engine.submit(prompt, endless(1)).result()

    def _beside(self) -> None:
        """Chats run, a newcomer arrives; gaps of the chats before it and while its prompt is computed."""
        o, engine = self._options, self._engine
        last: dict[int, float] = {}
        gaps: list[float] = []

        def on_token(handle: Handle, _: int) -> None:
            now = time.perf_counter()
            if handle.seq_id in last:
                gaps.append(now - last[handle.seq_id])
            last[handle.seq_id] = now

        chats = seat(engine, [o.chat_prompt] * o.chats, self._answer, on_token)
        engine.step()
        gaps.clear()
        for _ in range(o.quiet_steps):
            engine.step()
        quiet = statistics.median(gaps)
        gaps.clear()
        newcomer = engine.submit(random_prompt(engine, o.prompt, 1), endless(1))
        newcomer.result()
        clear(engine, chats)
        settle(engine)
        self._note("quiet", quiet)
        self._note("gap", statistics.median(gaps))
        self._note("gap max", max(gaps))
        self._note("ttft", newcomer.completion.ttft_s or 0.0 if newcomer.completion else 0.0)
        self._delays += [gap - quiet for gap in gaps]

    def _note(self, name: str, value: float) -> None:
        self._times.setdefault(name, []).append(value)

    def results(self) -> dict[str, Any]:
        """Medians and spreads over the rounds; delays over all gaps of all rounds."""
        t = self._times
        chunk_ms = summary(t["chunk"], 1e3)
        speed = {name: summary(t[name], digits=1) for name in ("engine", "program", "products")}
        delay_ms = spread(self._delays, 1e3, p50=0.5, p99=0.99, max=1.0)
        say(
            f"chunks of {self.width}: {text(speed['engine'], 'tokens/s')}, products {text(speed['products'], 'tokens/s')}; one chunk "
            f"{text(chunk_ms, 'ms')}; chats wait {delay_ms['p50']} ms more (p99 {delay_ms['p99']}, max {delay_ms['max']})"
        )
        return {
            "tokens_per_s": speed["engine"],
            "program_tokens_per_s": speed["program"],
            "products_tokens_per_s": speed["products"],
            "of_products": round(speed["engine"]["median"] / speed["products"]["median"], 3),
            "chunk_ms": chunk_ms,
            "quiet_gap_ms": summary(t["quiet"], 1e3),
            "gap_ms": summary(t["gap"], 1e3),
            "gap_max_ms": summary(t["gap max"], 1e3),
            "delay_ms": delay_ms,
            "delay_p50_in_chunks": round((delay_ms["p50"] or 0.0) / chunk_ms["median"], 3),
            "newcomer_ttft_s": summary(t["ttft"]),
        }


if __name__ == "__main__":
    run(__doc__, measure, rounds=3, options=OPTIONS)
