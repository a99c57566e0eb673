"""What a configuration must satisfy before a scheduler works with it."""

from collections.abc import Collection

from jaxkv.scheduler.plan import SchedulerConfig
from jaxkv.scheduler.policies import VICTIMS

RESUMES = ("head",)


def validate(config: SchedulerConfig) -> None:
    """ValueError for a size that cannot work or a policy that does not exist."""
    for name in ("rows", "num_pages", "page_size", "prefill_chunk", "max_len", "chunk_pages", "chunks_per_step"):
        _at_least(config, name, 1)
    for name in ("chunk_bytes", "margin_steps", "starve_after", "park_every"):
        _at_least(config, name, 0)
    if config.host_budget_bytes is not None:
        _at_least(config, "host_budget_bytes", 0)
    _one_of("victim", config.victim, VICTIMS)
    _one_of("resume", config.resume, RESUMES)


def _at_least(config: SchedulerConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if value < least:
        raise ValueError(f"scheduler setting {name} is {value}, but must be at least {least}")


def _one_of(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"scheduler.{name} is {value!r}, but must be one of {', '.join(allowed)}")
