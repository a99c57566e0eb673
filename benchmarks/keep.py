"""What is saved when images stay in host memory after a return: the same chats through a pool that is too small, kept and not.

What to expect. A page that is full never changes, so of an image that was in host memory before only the last, partly filled chunk and what
was generated since must be copied again. Who is parked once saves nothing; the longer a chat and the oftener it is parked, the nearer comes
a park to the price of its new tokens. Transfers move whole chunks of `transfer.chunk_pages`, so smaller chunks save more of what is there,
at more transfers. Returns cost what they did: everything travels back. Every answer must be the same bytes either way.
"""

from dataclasses import dataclass, field
from typing import Any

from common import Setup, endless, random_prompt, run, say, settle, summary, text, timed, turns

from jaxkv.engine import Engine
from jaxkv.request import Completion
from jaxkv.summary import pressure_numbers

OPTIONS: dict[str, Any] = {
    "prompt": 64,  # tokens
    "answer": 640,
    "demand": 4,  # times the pool
}
MIB = 2**20


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, kept and not."""
    o, config = setup.options, setup.config()
    pages = -(-(o.prompt + o.answer - 1) // config.pool.page_size) * config.scheduler.rows // o.demand
    pool = pages * config.pool.page_size
    cases = {name: {"pool.tokens": pool, "scheduler.keep_images": kept} for name, kept in (("kept", True), ("not_kept", False))}
    with setup.engines(cases) as engines:
        found = [_Case(name, engine) for name, engine in engines.items()]
        for round_ in range(setup.rounds):
            for case in turns(found, round_):
                case.measure(o.prompt, o.answer)
        kept, not_kept = (case.results() for case in found)
        contents = [case.contents for case in found]
        saved = 1 - kept["bytes_to_host"] / max(1, not_kept["bytes_to_host"])
        faster = 1 - kept["park_s"]["median"] / max(1e-9, not_kept["park_s"]["median"])
        say(f"kept images save {saved:.1%} of the bytes copied to the host, and {faster:.1%} of the time that copies were under way")
        return {
            "chats": config.scheduler.rows,
            "prompt_tokens": o.prompt,
            "answer_tokens": o.answer,
            "pool_tokens": pool,
            "chunk_mib": round(engines["kept"].parts.transfer.chunk_bytes / MIB, 2),
            "images": {"kept": kept, "not_kept": not_kept},
            "bytes_saved": round(saved, 4),
            "park_time_saved": round(faster, 4),
            "runs": sum(len(runs) for runs in contents),
            "runs_with_equal_bytes": sum(one == contents[0][0] for runs in contents for one in runs),
        }


@dataclass(slots=True)
class _Case:
    """One engine and what happened in it."""

    name: str
    engine: Engine
    contents: list[list[tuple[Any, ...]]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    park_s: list[float] = field(default_factory=list)

    def measure(self, prompt: int, answer: int) -> None:
        """One round: the whole job."""
        rows, stats = self.engine.config.scheduler.rows, self.engine.parts.transfer.stats
        prompts = [random_prompt(self.engine, prompt, seed) for seed in range(rows)]
        params = [endless(answer, temperature=float(seed % 2), seed=seed) for seed in range(rows)]
        answers: list[Completion] = []
        before = len(stats.park_s)
        took = timed(lambda: answers.extend(self.engine.generate(prompts, params)))
        settle(self.engine)
        self.contents.append([(a.token_ids, a.text, a.finish_reason, a.error) for a in answers])
        self.speeds.append(sum(len(a.token_ids) for a in answers) / took)
        self.park_s.append(sum(stats.park_s[before:]))
        say(f"  {self.name}: {self.speeds[-1]:.1f} tokens/s")

    def results(self) -> dict[str, Any]:
        """Sums over the rounds for bytes and counts; park_s is one round's chunks, each from its dispatch until it was seen done."""
        names = ("num_parks", "num_kept_hits", "kept_bytes_saved", "bytes_to_host", "bytes_to_device", "host_bytes_peak")
        numbers = {name: pressure_numbers(self.engine)[name] for name in names}
        speed, park = summary(self.speeds, digits=2), summary(self.park_s)
        copied, saved = (numbers[name] / MIB for name in ("bytes_to_host", "kept_bytes_saved"))
        say(f"{self.name}: {text(speed, 'tokens/s')}; {numbers['num_parks']} parks, {copied:.0f} MiB copied, {saved:.0f} MiB found")
        return {**numbers, "tokens_per_s": speed, "park_s": park}


if __name__ == "__main__":
    run(__doc__, measure, rounds=1, options=OPTIONS)
