"""Pictures of a sweep for a paper, as PNG and SVG: the figures by case, and who held the pool. Needs the extra `plots`; decides nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxkv.errors import ConfigError
from jaxkv.extras import require_extra
from jaxkv.simulate.run import simulate
from jaxkv.simulate.sweep import Outcomes
from jaxkv.simulate.table import COLUMNS, mean, spread
from jaxkv.simulate.table import Outcomes as AnyOutcomes
from jaxkv.simulate.timeline import PoolTimeline

SHOWN = ("makespan s", "longest wait s", "mean completion s", "parks", "copied MiB", "fairness")
MAX_TIMELINES = 4
BLUE = "#4477aa"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#222255", "#997700", "#ee99aa")


def check_plots(folder: Path) -> None:
    """Everything that could stop the pictures after the work is done: JaxkvError now."""
    require_extra("plots", "matplotlib.figure")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots {folder}: no folder can be made there: {error.strerror or error}") from None


def draw_plots(sweep: Sequence[Outcomes], folder: Path) -> list[Path]:
    """Write the pictures; their files."""
    told = f"mean over {len(sweep[0].results)} seeds; the line is from the least to the most"
    timelines = [(outcomes.name, watch(outcomes)) for outcomes in sweep[:MAX_TIMELINES]]
    figures = {"figures": draw_figures(sweep, told), "timeline": draw_timelines(timelines)}
    return [path for name, figure in figures.items() for path in save(figure, folder / name)]


def draw_figures(sweep: Sequence[AnyOutcomes], told: str) -> Any:
    """A panel for each figure: the mean as a bar, all runs as a line."""
    tall = max(2.0, 0.28 * len(sweep) + 0.9)
    figure, axes = new_figure(2, 3, (13, 2 * tall))
    for axis, name in zip(axes, SHOWN, strict=True):
        of = COLUMNS[name][0]
        means = [mean(outcomes, of) for outcomes in sweep]
        reach = [spread(outcomes, of) for outcomes in sweep]
        errors = [
            [m - low for m, (low, _) in zip(means, reach, strict=True)],
            [high - m for m, (_, high) in zip(means, reach, strict=True)],
        ]
        axis.barh(range(len(sweep)), means, xerr=errors, color=BLUE, height=0.6, error_kw={"linewidth": 0.7, "ecolor": "#555555"})
        axis.set_yticks(range(len(sweep)), [outcomes.name for outcomes in sweep] if axis in axes[::3] else [""] * len(sweep), fontsize=8)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(told, fontsize=9)
    return figure


def draw_timelines(shown: Sequence[tuple[str, PoolTimeline]]) -> Any:
    """Who held the pool, one above the other; a strip below is a request that is parked."""
    figure, axes = new_figure(len(shown), 1, (11, 2.6 * len(shown)), sharex=True)
    for axis, (name, timeline) in zip(axes, shown, strict=True):
        draw_timeline(axis, timeline)
        axis.set_title(name, fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds")
    return figure


def watch(outcomes: Outcomes) -> PoolTimeline:
    """The first seed once more, looked at."""
    case, timeline = outcomes.case, PoolTimeline()
    simulate(case.settings, case.requests(0), case.costs, case.num_staging, timeline)
    return timeline.thinned()


def draw_timeline(axis: Any, timeline: PoolTimeline) -> None:
    """Pages by request, one upon the other, and below them a strip for each request that was parked."""
    ids = sorted({seq_id for held in timeline.pages for seq_id in held})
    layers = [[held.get(seq_id, 0) for held in timeline.pages] for seq_id in ids]
    colors = [COLORS[i % len(COLORS)] for i in range(len(ids))]
    axis.stackplot(timeline.times, layers, colors=colors, step="post", linewidth=0)
    thick = timeline.num_pages * 0.04
    for i, seq_id in enumerate(ids):
        spans = [(start, stop - start) for start, stop in timeline.parked.get(seq_id, [])]
        axis.broken_barh(spans, (-thick * (i + 1.5), thick * 0.8), color=colors[i])
    axis.axhline(timeline.num_pages, color="#222222", linewidth=0.7)
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= timeline.num_pages])
    axis.set_ylabel("pages; below: parked", fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def new_figure(rows: int, columns: int, size: tuple[float, float], **shared: bool) -> tuple[Any, list[Any]]:
    """A figure that needs no screen, and its panels."""
    figure = require_extra("plots", "matplotlib.figure").Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def save(figure: Any, path: Path) -> list[Path]:
    """As PNG and SVG; the same picture gives the same bytes, and text stays text."""
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    with require_extra("plots", "matplotlib").rc_context({"svg.hashsalt": "jaxkv", "svg.fonttype": "none"}):
        figure.savefig(files[0], dpi=100)
        figure.savefig(files[1], metadata={"Date": None, "Creator": None})
    return files
