"""A sweep as a table: a line for each case, the mean over its seeds, and how far from the best of those it may be compared with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rich.table import Table

from jaxkv.simulate.result import Result

Figure = Callable[[Result], float]


class Outcomes(Protocol):
    """A case with the results of its runs."""

    @property
    def values(self) -> Mapping[str, Any]: ...

    @property
    def name(self) -> str: ...

    @property
    def results(self) -> Sequence[Result]: ...


COLUMNS: dict[str, tuple[Figure, str]] = {
    "makespan s": (lambda r: r.makespan_s, ".1f"),
    "longest wait s": (lambda r: r.longest_wait_s, ".1f"),
    "mean completion s": (lambda r: r.mean_completion_s, ".1f"),
    "total waiting s": (lambda r: r.total_wait_s, ".1f"),
    "tokens/s": (lambda r: r.tokens_per_s, ".1f"),
    "parks": (lambda r: r.num_parks, ".1f"),
    "dropped": (lambda r: r.num_parks_dropped, ".1f"),
    "replayed": (lambda r: r.num_replayed_tokens, ".0f"),
    "copied MiB": (lambda r: (r.host_bytes + r.device_bytes) / 2**20, ".0f"),
    "fairness": (lambda r: r.fairness, ".3f"),
    "failed": (lambda r: r.num_failed + r.num_refused, ".1f"),
}
ONLY_WHERE_ANY = ("dropped", "replayed", "failed")  # left out where all are 0
NEXT_TO_BEST = ("makespan s", "longest wait s")  # these are also shown over the best


def mean(outcomes: Outcomes, figure: Figure) -> float:
    """Over the seeds."""
    return sum(map(figure, outcomes.results)) / len(outcomes.results)


def spread(outcomes: Outcomes, figure: Figure) -> tuple[float, float]:
    """The least and the most over the seeds."""
    found = [figure(result) for result in outcomes.results]
    return min(found), max(found)


def load_of(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two cases must have in common to be compared: all but the scheduler's fields, the rows and the budget included."""
    return tuple((name, str(value)) for name, value in values.items() if not name.startswith("scheduler."))


def over_best(sweep: Sequence[Outcomes], figure: Figure) -> list[float]:
    """Each case's mean over the least among the cases with the same load and pool."""
    best: dict[tuple[Any, ...], float] = {}
    for outcomes in sweep:
        key = load_of(outcomes.values)
        best[key] = min(best.get(key, float("inf")), mean(outcomes, figure))
    return [mean(outcomes, figure) / best[load_of(outcomes.values)] if best[load_of(outcomes.values)] else 1.0 for outcomes in sweep]


def make_table(sweep: Sequence[Outcomes], title: str | None = None) -> Table:
    """The means by case."""
    seeds = len(sweep[0].results)
    title = title or f"means over {seeds} {'seed' if seeds == 1 else 'seeds'}, seconds of the simulated clock"
    table = Table(title=title, title_justify="left")
    table.add_column("case")
    cells: list[list[str]] = [[outcomes.name] for outcomes in sweep]
    for name, (figure, form) in COLUMNS.items():
        means = [mean(outcomes, figure) for outcomes in sweep]
        if name in ONLY_WHERE_ANY and not any(means):
            continue
        add_column(table, cells, name, [format(value, form) for value in means])
        if name in NEXT_TO_BEST and len(sweep) > 1:
            add_column(table, cells, "/ best", [f"{ratio:.3f}" for ratio in over_best(sweep, figure)])
    for row in cells:
        table.add_row(*row)
    return table


def add_column(table: Table, cells: list[list[str]], name: str, words: Sequence[str]) -> None:
    """One column, numbers to the right."""
    table.add_column(name, justify="right")
    for row, word in zip(cells, words, strict=True):
        row.append(word)
