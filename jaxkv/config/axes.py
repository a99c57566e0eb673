"""What a sweep varies: every combination of its grid's values with every line of its zip. Knows no engine, runs nothing."""

import itertools
import json
from collections.abc import Mapping
from typing import Any

from jaxkv.config.fields import yaml_word
from jaxkv.config.load import canonical
from jaxkv.config.workload import SweepSection
from jaxkv.errors import ConfigError

SEED = "workload.seed"  # what sweep.seeds sets


def combinations(sweep: SweepSection) -> list[dict[str, Any]]:
    """The values of each case by field name; one case without any where nothing is varied. ConfigError for axes that contradict."""
    grid, zipped = _axes("grid", sweep.grid), _axes("zip", sweep.zip)
    if both := [name for name in grid if name in zipped]:
        raise ConfigError(f"sweep: {both[0]} stands in grid and in zip, so two axes would set it; take it out of one of them")
    if sweep.seeds > 1 and SEED in grid | zipped:
        where = "grid" if SEED in grid else "zip"
        raise ConfigError(f"sweep.seeds: got {sweep.seeds}, which sets {SEED}, as sweep.{where} does; take one of them out")
    lengths = {name: len(values) for name, values in zipped.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} has {num}" for name, num in lengths.items())
        raise ConfigError(f"sweep.zip: its lists go together, value by value, and must be of one length: {told}")
    lines: list[dict[str, Any]] = [dict(zip(zipped, values, strict=True)) for values in zip(*zipped.values(), strict=True)] or [{}]
    products = (dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values()))
    found = [{**one, **line} for one in products for line in lines]
    words = [json.dumps(values, sort_keys=True, default=str) for values in found]
    if len(set(words)) < len(words):
        again = next(values for place, values in enumerate(found) if words[place] in words[:place])
        raise ConfigError(f"sweep: the case {case_name(again)} stands twice; take one out, or ask for more sweep.repeats")
    return found


def _axes(kind: str, given: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Its fields by their own names, each with at least one value."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, values in given.items():
        field = canonical(name)
        if field.startswith("sweep."):
            raise ConfigError(f"sweep.{kind}: {field} says what is compared and cannot be compared itself; take it out")
        if field in found:
            raise ConfigError(f"sweep.{kind}: one field stands twice, with dashes and with underscores")
        if not values:
            raise ConfigError(f"sweep.{kind}: {field} has no values; name some, or leave it out")
        found[field] = values
    return found


def case_name(values: Mapping[str, Any]) -> str:
    """`victim smallest, resume head`."""
    return ", ".join(f"{field.rpartition('.')[2]} {yaml_word(value)}" for field, value in values.items()) or "as configured"
