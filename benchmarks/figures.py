"""Timing, spreads, and what is known of the machine and the commit: what benchmarks need that never touch JAX.

Knows no benchmark and no engine.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxkv import provenance
from jaxkv.provenance import has_changes, versions

T = TypeVar("T")
__all__ = ["has_changes", "machine", "median_s", "numbers", "say", "summary", "text", "timed", "turns", "versions"]


def say(text: str) -> None:
    """A line for the person who waits."""
    print(text, flush=True)


def numbers(text: str) -> tuple[int, ...]:
    """`1,4,8` as numbers."""
    return tuple(int(word) for word in text.split(","))


# Numbers


def timed(work: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median_s(work: Callable[[], Any], repeats: int) -> float:
    """The median of some calls: one number for a round."""
    return statistics.median(timed(work) for _ in range(repeats))


def summary(values: Iterable[float], scale: float = 1.0, digits: int = 3) -> dict[str, float]:
    """Median and spread of the rounds."""
    found = [value * scale for value in values]
    return {"median": round(statistics.median(found), digits), "min": round(min(found), digits), "max": round(max(found), digits)}


def text(spread: Mapping[str, float], unit: str = "") -> str:
    """A summary for a person: `51.4 (50.9..53.0) ms`."""
    return f"{spread['median']:g} ({spread['min']:g}..{spread['max']:g}){' ' + unit if unit else ''}"


def turns(items: Sequence[T], round_: int) -> list[T]:
    """The items, beginning with another one in every round: nobody is always the first."""
    first = round_ % len(items)
    return [*items[first:], *items[:first]]


# Where and of what


def machine() -> dict[str, Any]:
    """The machine without its accelerators, and how busy it was with something else, or with this, at the end."""
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {**provenance.machine(), "memory_gib": memory_gib, "python": platform.python_version()}
