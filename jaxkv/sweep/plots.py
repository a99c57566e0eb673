"""Pictures of a sweep for a paper, PNG and SVG: throughput against the pool, pauses, makespans, all figures by case, and who held the pool.

Needs the extra `plots`; runs nothing. What does not apply to a sweep (no field `pool.tokens`, nobody parked) is left out.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv.config.axes import case_name
from jaxkv.simulate.plots import COLORS, MAX_TIMELINES, check_plots, draw_figures, draw_timelines, new_figure, save
from jaxkv.simulate.table import mean
from jaxkv.sweep.folder import RUNS, RunFolder
from jaxkv.sweep.outcome import read_timeline
from jaxkv.sweep.results import CaseResults

POOL = "pool.tokens"
MAX_CASES = 10  # lines of one picture


def draw_all(cases: Sequence[CaseResults], folder: Path, into: Path) -> list[Path]:
    """Write every picture that applies; their files, PNG and SVG of each."""
    check_plots(into)
    made: list[Path] = []
    for name, draw in PICTURES.items():
        figure = draw(cases, folder)
        if figure is not None:
            made += save(figure, into / name)
    return made


def draw_pressure(cases: Sequence[CaseResults], folder: Path) -> Any:
    """Tokens per second by the size of the pool, a line for each combination of the other values."""
    lines: dict[str, list[tuple[int, CaseResults]]] = {}
    for case in cases:
        if isinstance(tokens := case.values.get(POOL), int):
            others = {field: value for field, value in case.values.items() if field != POOL}
            lines.setdefault(label(others), []).append((tokens, case))
    if not lines or max(map(len, lines.values())) < 2:
        return None
    figure, (axis,) = new_figure(1, 1, (6, 4))
    for color, (rest, points) in zip(COLORS, lines.items(), strict=False):
        points.sort(key=lambda point: point[0])
        rates = [[result.tokens_per_s for result in case.results] for _, case in points]
        middle = [sum(rate) / len(rate) for rate in rates]
        reach = [
            [m - min(rate) for m, rate in zip(middle, rates, strict=True)],
            [max(rate) - m for m, rate in zip(middle, rates, strict=True)],
        ]
        axis.errorbar([tokens for tokens, _ in points], middle, yerr=reach, marker="o", color=color, capsize=2, label=rest)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    ticks = sorted({tokens for points in lines.values() for tokens, _ in points})
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    finish(axis, "pool in tokens", "tokens per second, all requests", has_legend=len(lines) > 1)
    return figure


def draw_pauses(cases: Sequence[CaseResults], folder: Path) -> Any:
    """The share of pauses that are at most so long, over all runs of a case."""
    found = {case.name: sorted(pauses_of(case, folder)) for case in cases[:MAX_CASES]}
    if not any(found.values()):
        return None
    figure, (axis,) = new_figure(1, 1, (6, 4))
    for color, (name, pauses) in zip(COLORS, found.items(), strict=False):
        if pauses:
            shares = [(i + 1) / len(pauses) for i in range(len(pauses))]
            axis.step([0.0, *pauses], [0.0, *shares], where="post", color=color, label=f"{name} ({len(pauses)})")
    axis.set_xlim(left=0)
    finish(axis, "seconds away from the pool", "share of pauses that are no longer", has_legend=True)
    return figure


def draw_makespan(cases: Sequence[CaseResults], folder: Path) -> Any:
    """From the first arrival to the last end: the mean as a bar, every run as a dot."""
    figure, (axis,) = new_figure(1, 1, (7, 0.36 * len(cases) + 1.1))
    for place, case in enumerate(cases):
        axis.barh(place, mean(case, lambda result: result.makespan_s), color=COLORS[0], height=0.6, alpha=0.75)
        axis.plot([result.makespan_s for result in case.results], [place] * len(case.results), ".", color="#222222", markersize=4)
    axis.set_yticks(range(len(cases)), [case.name for case in cases], fontsize=8)
    axis.invert_yaxis()
    finish(axis, "makespan in seconds", "", has_legend=False)
    return figure


def draw_all_figures(cases: Sequence[CaseResults], folder: Path) -> Any:
    """A panel for each figure."""
    return draw_figures(cases, f"mean over {max(len(case.results) for case in cases)} runs; the line is from the least to the most")


def draw_timeline(cases: Sequence[CaseResults], folder: Path) -> Any:
    """Who held the pool in the first run of the first cases."""
    shown = [(case.name, read_timeline(run_of(folder, case.runs[0]).timeline())) for case in cases[:MAX_TIMELINES]]
    return draw_timelines(shown)


PICTURES: Mapping[str, Callable[[Sequence[CaseResults], Path], Any]] = {
    "pressure": draw_pressure,
    "makespan": draw_makespan,
    "pauses": draw_pauses,
    "timeline": draw_timeline,
    "figures": draw_all_figures,
}


def pauses_of(case: CaseResults, folder: Path) -> list[float]:
    """Every pause of every sequence in every run of a case, in seconds."""
    return [pause for name in case.runs for line in run_of(folder, name).outputs() for pause in line["pauses_s"]]


def run_of(folder: Path, name: str) -> RunFolder:
    """A run's folder by its name."""
    return RunFolder(folder / RUNS / name)


def label(values: Mapping[str, Any]) -> str:
    """`victim smallest`, or nothing."""
    return case_name(values) if values else ""


def finish(axis: Any, x: str, y: str, *, has_legend: bool) -> None:
    """What all have in common."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.spines[["top", "right"]].set_visible(False)
    if has_legend:
        axis.legend(frameon=False, fontsize=8)
