"""Which simulations a configuration asks for: every combination of the grid, each with every seed. Runs none of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxkv.config import Config, load_config, scheduler_config
from jaxkv.config.axes import case_name, combinations
from jaxkv.config.budget import AUTO_MIB, MIB
from jaxkv.errors import ConfigError
from jaxkv.scheduler.config import validate
from jaxkv.scheduler.plan import SchedulerConfig
from jaxkv.simulate.costs import Costs
from jaxkv.workload import Request, draw


@dataclass(frozen=True, slots=True)
class Case:
    """One combination of the grid's values, ready to run with any seed."""

    values: Mapping[str, Any]  # by field name, what makes this case
    config: Config
    settings: SchedulerConfig
    costs: Costs
    num_staging: int  # transfer chunks that may be in flight

    @property
    def name(self) -> str:
        """`victim smallest, resume head`."""
        return case_name(self.values)

    def requests(self, seed: int) -> tuple[Request, ...]:
        """Its load; seeds count from 0."""
        return draw(self.config.workload, self.config.workload.seed + seed)


def list_cases(config: Config) -> list[Case]:
    """Every combination, checked; ConfigError for what cannot run, before anything does."""
    base, found = config.to_dict() | {"sweep": {}}, combinations(config.sweep)
    check_axes(found[0])
    return [make_case(base, values) for values in found]


def check_axes(names: Iterable[str]) -> None:
    """ConfigError for a field of which the simulator knows nothing, so that all cases would come out the same."""
    for name in names:
        if name == "scheduler.overlap" or name.startswith("speculate."):
            raise ConfigError(
                f"sweep: {name} is varied, and the simulator knows nothing of it: all would come out the same; take it out, or ask the "
                "engine (`jaxkv sweep` without --simulate)"
            )


def make_case(base: Mapping[str, Any], values: dict[str, Any]) -> Case:
    """One combination as a configuration of its own."""
    config = load_config(base, values)
    tokens, page_size, transfer = config.pool.tokens, config.pool.page_size, config.transfer
    if tokens is None:
        raise ConfigError("pool.tokens: null takes a share of the device's memory, and a simulation has no device; set it")
    if config.speculate.kind != "none":
        raise ConfigError(
            f"speculate.kind: got {config.speculate.kind}, and the simulator knows no guesses, of which only a model says how many come "
            "true; set it to none, or ask the engine"
        )
    if tokens < page_size:
        raise ConfigError(f"pool.tokens: got {tokens}, less than one page of {page_size} tokens; raise it")
    costs = Costs.of(config.simulate)
    if transfer.blocking:  # the step that sends a chunk waits for it
        costs = replace(costs, copy_s=costs.copy_s + costs.land_s, land_s=0.0)
    chunk_bytes = costs.token_bytes * page_size * transfer.chunk_pages
    num_staging = transfer.staging_mib * MIB // chunk_bytes
    if not num_staging:
        raise ConfigError(
            f"transfer.staging_mib: got {transfer.staging_mib}, one chunk of {transfer.chunk_pages} pages takes "
            f"{chunk_bytes / MIB:.1f} MiB; raise it to {-(-chunk_bytes // MIB)} or lower transfer.chunk_pages"
        )
    budget = config.scheduler.host_budget_mib
    settings = scheduler_config(
        config,
        num_pages=tokens // page_size,
        max_len=config.model.max_len or tokens,
        chunk_bytes=chunk_bytes,
        budget=None if budget is None else (AUTO_MIB if budget == "auto" else budget) * MIB,
        hold=transfer.mode == "hold",
    )
    validate(settings)
    draw(config.workload, config.workload.seed)  # a trace is read now, not in the middle of the work
    return Case(values, config, settings, costs, num_staging)
