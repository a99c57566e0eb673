"""Which runs a configuration asks for, in which order, and what each is known by. Runs nothing, writes nothing."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxkv.config import Config, load_config
from jaxkv.config.axes import SEED, case_name, combinations
from jaxkv.errors import ConfigError
from jaxkv.simulate.cases import check_axes, make_case
from jaxkv.workload.draw import draw

SCHEMA_VERSION = 1  # of everything a sweep writes; rises when a name or a meaning changes
ASIDE = ("sweep", "log", "server")  # sections that change nothing of a run
MAX_SLUG = 60


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a case, with one seed, for the so many-th time."""

    values: Mapping[str, Any]  # by field name, what makes the case
    seed: int  # its workload.seed
    repeat: int  # from 0
    config: Config  # complete, with nothing left to vary
    is_simulated: bool
    key: str  # the same for the same configuration, load and repeat

    @property
    def name(self) -> str:
        """`victim smallest, resume head`."""
        return case_name(self.values)

    @property
    def folder(self) -> str:
        """The name of its folder."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-.")[:MAX_SLUG].strip("-.")
        return f"{slug}-s{self.seed}-r{self.repeat}-{self.key[:10]}"


def list_runs(config: Config, is_simulated: bool) -> list[Run]:
    """Every run, checked; ConfigError for what cannot run, before anything does.

    In rounds: each case once, then each with the next seed, then all seeds again for the next repeat. Every round begins with another case,
    so that a slow hour of the machine is nobody's alone.
    """
    if not config.sweep.grid and not config.sweep.zip:
        raise ConfigError(
            "sweep: nothing is varied: give fields lists of values under sweep.grid or sweep.zip; for one run as it is, "
            "--sweep.grid '{workload.seed: [0]}'"
        )
    base = config.to_dict() | {"sweep": {}}
    cases = [(values, load_config(base, values)) for values in combinations(config.sweep)]
    if is_simulated:
        check_axes(cases[0][0])
    inputs = {}
    found = []
    for repeat in range(config.sweep.repeats):
        for offset in range(config.sweep.seeds):
            first = (repeat * config.sweep.seeds + offset) % len(cases)
            for place in [*range(first, len(cases)), *range(first)]:
                values, case = cases[place]
                if (place, offset) not in inputs:
                    one = load_config(case.to_dict(), {SEED: case.workload.seed + offset})
                    inputs[place, offset] = one, _checked_input(one, is_simulated)
                one, digest = inputs[place, offset]
                key = _key(one, digest, repeat, is_simulated)
                found.append(Run(values, one.workload.seed, repeat, one, is_simulated, key))
    return found


def input_sha256(config: Config) -> str:
    """Over the load: when each request comes, how long it is, and its text if it has one; files of prompts and traces are in it."""
    requests = draw(config.workload, config.workload.seed)
    return _sha256([[request.to_line(), request.shared_len, request.text] for request in requests])


def config_sha256(config: Config) -> str:
    """Over what matters for a run."""
    found = {name: part for name, part in config.to_dict().items() if name not in ASIDE}
    found["simulate"] = {name: value for name, value in found["simulate"].items() if name != "processes"}
    return _sha256(found)


def _key(config: Config, digest: str, repeat: int, is_simulated: bool) -> str:
    return _sha256([SCHEMA_VERSION, config_sha256(config), digest, repeat, is_simulated])


def _checked_input(config: Config, is_simulated: bool) -> str:
    """The digest of its input, once it is known that it can be run."""
    costs = None
    if is_simulated:
        costs = make_case(config.to_dict(), {}).costs.to_dict()  # the content of a costs file, whatever its name
    return _sha256([input_sha256(config), costs])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
