"""What all benchmarks share: the command line, engines, prompts, timing, spreads, and the JSON line at the end.

Knows no benchmark. A script calls `run(__doc__, measure, ...)`, and `measure(setup)` returns its results as a dict.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from figures import has_changes, machine, median_s, numbers, say, summary, text, timed, turns, versions

from jaxkv.config import Config, load_config, split_overrides
from jaxkv.engine import Engine
from jaxkv.errors import JaxkvError
from jaxkv.live import Handle
from jaxkv.models import ModelError
from jaxkv.request import SamplingParams
from jaxkv.summary import commit

__all__ = [
    "Setup",
    "clear",
    "endless",
    "median_s",
    "random_prompt",
    "read_bandwidth",
    "run",
    "say",
    "seat",
    "settle",
    "summary",
    "text",
    "timed",
    "turns",
]
PACKAGES = ("jaxkv", "jax", "jaxlib", "flax", "numpy", "torch", "transformers", "accelerate")
NUM_BLOCKS = 16  # of the array that the bandwidth is measured with
T = TypeVar("T")


# The command line


@dataclass(frozen=True)
class Setup:
    """What was asked for: a configuration with overrides, the rounds, and the script's own options."""

    name: str
    path: Path
    overrides: Mapping[str, Any]
    rounds: int
    options: argparse.Namespace
    facts: dict[str, Any] = field(default_factory=dict)  # what the engines say of themselves

    def config(self, fields: Mapping[str, Any] | None = None) -> Config:
        """The configuration with the command line's overrides, and with what the experiment itself must set."""
        return load_config(self.path, {**self.overrides, **(fields or {})})

    def engine(self, fields: Mapping[str, Any] | None = None) -> Engine:
        """An engine for it, warmed up."""
        start = time.perf_counter()
        engine = Engine(self.config(fields))
        self.facts.setdefault("dtype", engine.parts.fingerprint_facts["dtype"])
        say(f"  engine with {_shown(fields or {})}: ready after {time.perf_counter() - start:.1f} s")
        return engine

    @contextmanager
    def engines(self, fields: Mapping[T, Mapping[str, Any]]) -> Iterator[dict[T, Engine]]:
        """Several engines at once, so that what is compared can take turns."""
        with ExitStack() as stack:
            yield {name: stack.enter_context(self.engine(values)) for name, values in fields.items()}


def run(doc: str | None, measure: Callable[[Setup], dict[str, Any]], *, rounds: int, options: Mapping[str, Any]) -> None:
    """The whole of a script: read the command line, say what the ceiling is, measure, print one line of JSON."""
    name = Path(sys.argv[0]).stem
    try:
        setup = read_setup(name, doc or "", sys.argv[1:], rounds, options)
        say((doc or "").strip() + "\n")
        results = measure(setup)
    except (JaxkvError, ModelError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps({**header(setup), **results}))


def read_setup(name: str, doc: str, words: Sequence[str], rounds: int, options: Mapping[str, Any]) -> Setup:
    """CONFIG [--rounds N] [--option V] [--section.field V]. An option's default tells its type; several numbers are written 1,4,8."""
    overrides, rest = split_overrides(words)
    parser = argparse.ArgumentParser(prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a configuration; any field can be set with --section.field VALUE")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"how often everything is measured (default {rounds})")
    for option, default in options.items():
        kind = numbers if isinstance(default, tuple) else type(default)
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        parser.add_argument(f"--{option.replace('_', '-')}", type=kind, default=default, help=f"default {shown}")
    found = parser.parse_args(rest)
    if found.rounds < 1:
        parser.error(f"--rounds: got {found.rounds}, allowed: 1 or more")
    return Setup(name, found.config, overrides, found.rounds, found)


# What goes into the JSON beside the results


def header(setup: Setup) -> dict[str, Any]:
    """Which benchmark this was, of what, where."""
    return {
        "benchmark": setup.name,
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "uncommitted_changes": has_changes(),
        "versions": versions(PACKAGES),
        "hardware": hardware(),
        "model": setup.config().model.path,
        **setup.facts,
        "rounds": setup.rounds,
    }


def hardware() -> dict[str, Any]:
    """The machine, and how busy it was with something else, or with this, at the end."""
    import jax

    return {**machine(), "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]}


def _shown(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items()) or "the configuration as it is"


# The machine's ceiling


def read_bandwidth(num_bytes: int = 2**28) -> Callable[[], float]:
    """A function that measures how many bytes per second can be read from memory: all processors sum a large array, twice; the better."""
    data = np.ones((NUM_BLOCKS, num_bytes // 4 // NUM_BLOCKS), np.float32)
    workers = ThreadPoolExecutor(os.cpu_count() or 1)  # NumPy sums outside of Python's lock

    def measure() -> float:
        return data.nbytes / min(timed(lambda: list(workers.map(np.sum, data))) for _ in range(3))

    measure()
    return measure


# Requests


def random_prompt(engine: Engine, length: int, seed: int) -> list[int]:
    """Token ids without meaning: the arithmetic does not care."""
    return [int(i) for i in np.random.default_rng([length, seed]).integers(3, engine.model_config.vocab_size, length)]


def endless(num_tokens: int, **fields: Any) -> SamplingParams:
    """Exactly so many tokens, greedy unless told otherwise; nothing of an earlier round is found in the pool."""
    return SamplingParams(**{"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False, **fields})


def seat(engine: Engine, lengths: Sequence[int], max_tokens: int, on_token: Any = None) -> list[Handle]:
    """Requests with prompts of these lengths, stepped until each has made its first token."""
    prompts = [random_prompt(engine, length, seed) for seed, length in enumerate(lengths)]
    handles = [engine.submit(prompt, endless(max_tokens), on_token=on_token) for prompt in prompts]
    while not all(handle.token_ids for handle in handles):
        engine.step()
    return handles


def clear(engine: Engine, handles: Iterable[Handle]) -> None:
    """End requests and wait for what still moves."""
    for handle in handles:
        handle.cancel()
    settle(engine)


def settle(engine: Engine) -> None:
    """Step until nothing is left to do."""
    while not engine.is_idle:
        engine.step()
