"""Engines over the small Llama fixture, sized so that pools fill within a few tokens: what the tests of the engine share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv.config import Config
from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.request import Completion, SamplingParams
from jaxkv.scheduler import Scheduler
from jaxkv.transfer import HostChunk

LLAMA = Path(__file__).parent.parent / "fixtures" / "llama"
VOCAB = 320

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"path": str(LLAMA), "max_len": 128},
    "pool": {"tokens": 64, "page_size": 4},
    "scheduler": {"rows": 4, "prefill_chunk": 8, "margin_steps": 2, "host_budget_mib": None},
    "transfer": {"chunk_pages": 4},
}


def config(**fields: Any) -> Config:
    """The tiny configuration with fields named as `section__field` replaced."""
    sections = {name: dict(values) for name, values in SECTIONS.items()}
    for name, value in fields.items():
        section, _, field = name.partition("__")
        sections.setdefault(section, {})[field] = value
    return Config.model_validate(sections)


@contextmanager
def engine(**fields: Any) -> Iterator[Engine]:
    """A tiny engine that checks its scheduler's books after every step, and has given everything back at the end."""
    with Engine(config(**fields)) as made:
        plain_step = made.step

        def checked_step() -> None:
            plain_step()
            made.scheduler.check()

        made.step = checked_step  # type: ignore[method-assign]
        yield made
        settle(made)
        snapshot = made.scheduler.snapshot()
        assert snapshot.num_pages_free == snapshot.num_pages
        assert snapshot.host_bytes == 0
        assert made.num_compiles_after_warmup == 0


def renew(made: Engine, **changes: Any) -> None:
    """The same engine with other rules of its scheduler: the programs are the same."""
    assert made.is_idle
    made.scheduler = Scheduler(replace(made.parts.scheduler_config, **changes), on_drop=made.parts.transfer.discard)


def settle(made: Engine) -> None:
    """Step until nothing is left to do."""
    for _ in range(100_000):
        if made.is_idle:
            return
        made.step()
    raise AssertionError("the engine never became idle")


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    return np.random.default_rng([length, seed]).integers(3, VOCAB, length).tolist()


def run(made: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Completion]:
    """Answer all prompts together."""
    completions = made.generate(prompts, params)
    settle(made)
    return completions


def alone(made: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
    """Answer all prompts one after another."""
    return [run(made, [p], [q])[0] for p, q in zip(prompts, params, strict=True)]


def content(completion: Completion) -> tuple[Any, ...]:
    """What must be equal to the last bit: tokens, text, logprobs, finish reason, usage."""
    return (
        completion.token_ids,
        completion.text,
        (completion.logprobs, completion.prompt_logprobs),
        completion.finish_reason,
        completion.prompt_tokens,
        completion.error,
    )


def image(made: Engine, seq_id: int) -> list[HostChunk]:
    """What lies in host memory of a parked sequence's image."""
    stored = made.parts.transfer.stored
    return [stored[host_id] for host_id in made.scheduler.image(seq_id) if host_id in stored]


def step_to(made: Engine, handle: Handle, num_tokens: int) -> None:
    """Step until a request has made so many tokens."""
    while len(handle.token_ids) < num_tokens and not handle.done:
        made.step()
