"""What a configuration must satisfy before a scheduler works with it."""

from collections.abc import Collection

from jaxkv.scheduler.need import near_most
from jaxkv.scheduler.plan import SchedulerConfig
from jaxkv.scheduler.policies import RETURNS, VICTIMS

ADMISSIONS = ("optimistic", "reserve")
ROTATIONS = ("shifted", "any", "none")
OVER_BUDGET = ("replay", "wait")


def validate(config: SchedulerConfig) -> None:
    """ValueError for a size that cannot work or a policy that does not exist."""
    _at_least(config, "num_pages", 0 if config.state_bytes else 1)
    for name in ("rows", "page_size", "prefill_chunk", "prefill_burst", "max_len", "chunk_pages", "chunks_per_step"):
        _at_least(config, name, 1)
    for name in ("chunk_bytes", "state_bytes", "num_snapshots", "margin_steps", "starve_after", "park_every", "rotate_after_s"):
        _at_least(config, name, 0)
    for name in ("num_draft", "num_spare"):
        _at_least(config, name, 0)
    for name in ("near_pages", "near_bytes"):
        _at_least(config, name, 0)
    if config.near_pages:
        _check_near(config)
    if config.window is not None:
        _at_least(config, "window", 1)
    for name in ("host_budget_bytes", "max_bypass"):
        if getattr(config, name) is not None:
            _at_least(config, name, 0)
    _one_of("victim", config.victim, VICTIMS)
    _one_of("resume", config.resume, RETURNS)
    _one_of("admission", config.admission, ADMISSIONS)
    _one_of("rotate", config.rotate, ROTATIONS)
    _one_of("over_budget", config.over_budget, OVER_BUDGET)


def _check_near(config: SchedulerConfig) -> None:
    """All rows together must be able to hold what each may, so that the pages of layers with a window are never what is short."""
    if config.near_window is None or config.window is not None or config.state_bytes:
        raise ValueError("near_pages are for models some of whose layers have a window, without states")
    _at_least(config, "near_window", 1)
    least = config.rows * near_most(config)
    if config.near_pages < least:
        raise ValueError(f"scheduler setting near_pages is {config.near_pages}, but {config.rows} rows need at least {least}")


def _at_least(config: SchedulerConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if not value >= least:  # a NaN is not
        raise ValueError(f"scheduler setting {name} is {value}, but must be at least {least}")


def _one_of(name: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"scheduler.{name} is {value!r}, but must be one of {', '.join(allowed)}")
