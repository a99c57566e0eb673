"""What guessing the next tokens is good for: the same chats without it, with guesses that are never taken, and with guesses.

What to expect. A verify step computes 1 + k tokens for each row. Where a decode step is bound by reading the weights, as with few rows,
that costs little more than one token each; where it is bound by arithmetic, as with many rows on a CPU, it costs up to 1 + k times as much.
So first the price, without / never taken: as many tokens a row must make in a step before guessing pays. Then the gain, with / without.
Guesses by looking up come true where an answer repeats what was said, as in a copied text or a list, and seldom in free prose.
The answers with guesses must be the same bytes as with guesses that are never taken.
"""

from dataclasses import dataclass, field
from typing import Any

from common import Setup, endless, run, say, settle, summary, text, timed, turns

from jaxkv.engine import Engine
from jaxkv.request import Completion

OPTIONS: dict[str, Any] = {
    "rows": (1, 4),
    "tokens": 96,  # of each answer
    "num_draft": 3,
    "kind": "ngram",
}
TEXTS = {
    "copy": "The harbour has seven piers. On the first pier stands a red crane, on the second a green crane, on the third a blue crane. "
    "Ships from the north unload timber, ships from the south unload fruit.\nThe same text once more:\nThe harbour has seven piers.",
    "list": "| city | country | river |\n|---|---|---|\n| Paris | France | Seine |\n| London | England | Thames |\n"
    "| Rome | Italy | Tiber |\n| Vienna | Austria | Danube |\n|",
    "prose": "The lighthouse keeper had not spoken to anyone for weeks when, one evening in November, somebody knocked at the door. He",
}


def measure(setup: Setup) -> dict[str, Any]:
    """All figures, for each number of rows."""
    return {
        "kind": setup.options.kind,
        "num_draft": setup.options.num_draft,
        "rows": {str(num): _rows(setup, num) for num in setup.options.rows},
    }


def _rows(setup: Setup, num: int) -> dict[str, Any]:
    o = setup.options
    common = {"scheduler.rows": num, "pool.tokens": num * 512}
    guessing = {"speculate.kind": o.kind, "speculate.num_draft": o.num_draft}
    cases = {"off": common, "never_taken": {**common, **guessing, "debug.reject_drafts": True}, "on": {**common, **guessing}}
    with setup.engines(cases) as engines:
        found = {name: _Case(engine, num, o.tokens) for name, engine in engines.items()}
        for round_ in range(setup.rounds):
            for name in turns(list(found), round_):
                for kind in TEXTS:
                    found[name].measure(kind)
    return {kind: _compared(kind, num, found) for kind in TEXTS}


@dataclass(slots=True)
class _Case:
    """One engine and what it said."""

    engine: Engine
    rows: int
    tokens: int
    speeds: dict[str, list[float]] = field(default_factory=dict)
    contents: dict[str, list[Any]] = field(default_factory=dict)
    guesses: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)

    def measure(self, kind: str) -> None:
        """All rows with the same text, half of them sampled."""
        prompts = [_tokens(self.engine, TEXTS[kind])] * self.rows
        params = [endless(self.tokens, temperature=0.7 * (seed % 2), seed=seed) for seed in range(self.rows)]
        answers: list[Completion] = []
        before = self._counts()
        took = timed(lambda: answers.extend(self.engine.generate(prompts, params)))
        settle(self.engine)
        after = self._counts()
        self.guesses[kind] = tuple(new - old for new, old in zip(after, before, strict=True))  # type: ignore[assignment]
        self.speeds.setdefault(kind, []).append(self.rows * self.tokens / took)
        self.contents.setdefault(kind, []).append([(answer.token_ids, answer.text) for answer in answers])

    def _counts(self) -> tuple[int, int, int, int]:
        stats = self.engine.stats
        return stats.num_draft_tokens, stats.num_draft_tokens_accepted, stats.num_row_tokens, stats.num_row_steps


def _tokens(engine: Engine, words: str) -> list[int]:
    """A text's tokens; for a model that came without a tokenizer, one for each byte."""
    tokenizer = engine.tokenizer
    return [3 + byte for byte in words.encode()] if tokenizer is None else tokenizer.encode(words, add_special_tokens=True)


def _compared(kind: str, num: int, cases: dict[str, _Case]) -> dict[str, Any]:
    speeds = {name: summary(case.speeds[kind], digits=2) for name, case in cases.items()}
    checked, true, tokens, steps = cases["on"].guesses[kind]
    off, never, on = (speeds[name]["median"] for name in ("off", "never_taken", "on"))
    contents = [content for name in ("never_taken", "on") for content in cases[name].contents[kind]]
    per_step, share = round(tokens / steps, 3), round(true / checked, 4) if checked else None
    say(f"{num} rows, {kind}: {text(speeds['off'], 'tokens/s')} without, x {never / off:.2f} never taken, x {on / off:.2f} with guesses")
    say(f"  {true} of {checked} guesses true, {per_step} tokens a row and step")
    return {
        "tokens_per_s": speeds,
        "price": round(off / never, 3),
        "gain": round(on / off, 3),
        "guesses": checked,
        "acceptance": share,
        "tokens_per_row_step": per_step,
        "runs": len(contents),
        "runs_with_equal_bytes": sum(content == contents[0] for content in contents),
    }


if __name__ == "__main__":
    run(__doc__, measure, rounds=3, options=OPTIONS)
