"""What a step takes: a small model whose numbers `jaxkv calibrate` measures. Knows plans, decides nothing.

    step      step_s, whatever it does
    decode    decode_s + decode_longest_s * (tokens of the longest row) + decode_token_s * (tokens of all rows): the program has a row for
              every place in the batch, used or not, and its attention goes on until the longest row is through
    prefill   prefill_s + prefill_token_s * (tokens before the chunk)
    copies    copy_s for each chunk that leaves in this step; a chunk has arrived land_s after it left or after the one before it arrived

Computing again after a lost image goes through the same two programs, so it has no cost of its own.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from jaxkv.config.workload import SimulateSection
from jaxkv.errors import ConfigError
from jaxkv.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, and the bytes of a token. The defaults are SmolLM2's in float32, 8 rows, on two CPU cores: decode as measured (38 ms for one
    row at 200 tokens, 44 for eight), prompt chunks and copies rounded from runs on a busy machine."""

    step_s: float = 0.0005
    decode_s: float = 0.0371
    decode_longest_s: float = 0.0
    decode_token_s: float = 4.3e-6
    prefill_s: float = 0.09
    prefill_token_s: float = 25e-6
    copy_s: float = 0.004
    land_s: float = 0.010
    token_bytes: int = 46080

    @classmethod
    def of(cls, section: SimulateSection) -> Self:
        """What the section says, else what its costs file says, else what was measured once."""
        given = {name: value for name in NAMES if (value := getattr(section, name)) is not None}
        return replace(cls(**({} if section.costs is None else read_costs(Path(section.costs)))), **given)

    def step(self, plan: Plan) -> float:
        """Seconds that a step of this plan takes."""
        took_s = self.step_s
        if plan.decode:
            longest = total = 0
            for row in plan.decode:
                total += row.position
                if row.position > longest:
                    longest = row.position
            took_s += self.decode_s + self.decode_longest_s * longest + self.decode_token_s * total
        if plan.prefill:
            took_s += self.prefill_s + self.prefill_token_s * plan.prefill.start
        if plan.park or plan.restore:
            took_s += self.copy_s * (len(plan.park) + len(plan.restore))
        return took_s

    def to_dict(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


NAMES = tuple(field.name for field in fields(Costs))


def read_costs(path: Path) -> dict[str, Any]:
    """The costs in a file of `jaxkv calibrate`; ConfigError for what is missing, too many or below zero."""
    try:
        found = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the costs {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    costs = found.get("costs") if isinstance(found, dict) else None
    if not isinstance(costs, dict) or set(costs) != set(NAMES):
        raise ConfigError(f"{path} must hold `costs` with {', '.join(NAMES)}: write it with `jaxkv calibrate CONFIG --output FILE`")
    for name, value in costs.items():
        kind, least = (int, 1) if name == "token_bytes" else ((int, float), 0)
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < float("inf"):
            raise ConfigError(f"{path}: {name}: got {json.dumps(value)}, allowed: {'integer' if least else 'number'} >= {least}")
    return costs
