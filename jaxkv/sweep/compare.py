"""Two sides of one or two sweeps, run by run: ratios with their spread over pairs, and whether they are more than noise. Runs nothing.

A pair is two runs with the same seed, repeat and values of all fields that neither side names. Each figure's ratio is B over A; over the
pairs the geometric mean, the least and the most, and the interval that holds the mean with 95 % (Student's t of the logarithms). A
difference is within noise where that interval holds 1.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxkv.config.files import parse_word
from jaxkv.config.load import canonical
from jaxkv.errors import ConfigError
from jaxkv.sweep.results import Row, read_results

COMPARED = ("makespan_s", "tokens_per_s", "mean_completion_s", "longest_wait_s", "longest_pause_s", "total_wait_s", "fairness", "num_parks")
T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """What is compared: a sweep's folder and the values that its runs must have."""

    text: str
    folder: Path
    values: Mapping[str, Any]

    def rows(self) -> list[Row]:
        """Its finished runs; ConfigError where it has none."""
        found = [row for row in read_results(self.folder) if row["status"] == "finished"]
        if not found:
            raise ConfigError(f"{self.folder}: has no finished run")
        for field, value in self.values.items():
            if field not in found[0]["case"]:
                raise ConfigError(f"{self.text}: {field} is not varied there; varied are {', '.join(found[0]['case'])}")
            there = list(dict.fromkeys(json.dumps(row["case"][field]) for row in found))
            found = [row for row in found if row["case"][field] == value]
            if not found:
                raise ConfigError(f"{self.text}: no finished run has {field} = {json.dumps(value)}; there are {', '.join(there)}")
        return found


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure, B over A, over the pairs in which neither is 0. None where there is nothing to say."""

    figure: str
    a_mean: float
    b_mean: float
    num_pairs: int
    ratio: float | None
    least: float | None
    most: float | None
    low: float | None  # the interval of the mean; None for fewer than two pairs
    high: float | None
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """As `--json` has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures, and what the pairs are."""

    num_pairs: int
    num_unpaired: int
    num_equal_outputs: int | None  # None where one side is simulated and says nothing
    ratios: tuple[Ratio, ...]

    def to_dict(self) -> dict[str, Any]:
        """As `--json` has it."""
        return {**asdict(self), "ratios": [ratio.to_dict() for ratio in self.ratios]}


def parse_side(text: str) -> Side:
    """`DIR` or `DIR:field=value,field=value`."""
    folder, colon, words = text.rpartition(":")
    if not colon or Path(text).exists():
        return Side(text, Path(text), {})
    values = {}
    for word in words.split(","):
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{text}: got {word!r}, allowed after the folder: field=value, such as {folder}:scheduler.victim=smallest")
        values[canonical(name)] = parse_word(value)
    return Side(text, Path(folder), values)


def compare(a: Side, b: Side) -> Comparison:
    """B over A; ConfigError where no run of one has a partner in the other."""
    if (a.folder.resolve(), a.values) == (b.folder.resolve(), b.values):
        raise ConfigError(f"{a.text} and {b.text} are the same runs; name other values, such as {a.folder}:scheduler.victim=largest")
    named = {*a.values, *b.values}
    ours, theirs = _by_key(a.rows(), named, a.text), _by_key(b.rows(), named, b.text)
    keys = [key for key in ours if key in theirs]
    if not keys:
        raise ConfigError(f"{a.text} and {b.text}: no run of one has the seed, the repeat and the other values of one of the other")
    pairs = [(ours[key], theirs[key]) for key in keys]
    is_said = all(row["kind"] == "engine" for pair in pairs for row in pair)
    equal = sum(one["outputs_sha256"] == other["outputs_sha256"] for one, other in pairs) if is_said else None
    ratios = tuple(ratio_of(name, [(row[name], other[name]) for row, other in pairs]) for name in COMPARED)
    return Comparison(len(pairs), len(ours) + len(theirs) - 2 * len(pairs), equal, ratios)


def _by_key(rows: Sequence[Row], named: set[str], text: str) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        rest = {field: value for field, value in row["case"].items() if field not in named}
        key = json.dumps([rest, row["seed"], row["repeat"]], sort_keys=True)
        if key in found:
            raise ConfigError(f"{text}: several runs differ only in {', '.join(sorted(named))}; name a value of each, as field=value")
        found[key] = row
    return found


def ratio_of(figure: str, pairs: Sequence[tuple[float, float]]) -> Ratio:
    """One figure over all pairs."""
    a_mean, b_mean = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    logs = [math.log(b / a) for a, b in pairs if a > 0 and b > 0]
    if not logs:
        verdict = "both 0" if not a_mean and not b_mean else "no ratio, one is 0"
        return Ratio(figure, a_mean, b_mean, 0, None, None, None, None, None, verdict)
    middle = statistics.fmean(logs)
    ratio, least, most = (round(math.exp(log), 6) for log in (middle, min(logs), max(logs)))
    if len(logs) < 2:
        return Ratio(figure, a_mean, b_mean, 1, ratio, least, most, None, None, "one pair: no spread")
    half = quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = (round(math.exp(log), 6) for log in (middle - half, middle + half))
    verdict = "within noise" if low <= 1 <= high else "higher" if ratio > 1 else "lower"
    return Ratio(figure, a_mean, b_mean, len(logs), ratio, least, most, low, high, verdict)


def quantile(freedom: int) -> float:
    """Student's t: what 95 % lie within, for so many degrees of freedom."""
    return T_95[freedom - 1] if freedom <= len(T_95) else 1.96 + 2.5 / freedom


def table(found: Comparison, a: Side, b: Side) -> Table:
    """A line for each figure."""
    made = Table(
        title=f"B over A, {found.num_pairs} {'pair' if found.num_pairs == 1 else 'pairs'}\nA: {a.text}\nB: {b.text}", title_justify="left"
    )
    made.add_column("figure")
    for name in ("A", "B", "B / A", "least to most", "95 % of the mean"):
        made.add_column(name, justify="right")
    made.add_column("")
    for one in found.ratios:
        spread = "" if one.least is None else f"{one.least:.3f} to {one.most:.3f}"
        sure = "" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        made.add_row(one.figure, f"{one.a_mean:.3f}", f"{one.b_mean:.3f}", ratio, spread, sure, one.verdict)
    return made
