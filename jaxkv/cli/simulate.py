"""`jaxkv simulate CONFIG`: what the scheduler would do with a load, without a model and without waiting."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import Config, load_config
from jaxkv.errors import ConfigError

if TYPE_CHECKING:
    from jaxkv.simulate.sweep import Outcomes


@dataclass(frozen=True)
class Args:
    """Simulate the configuration's workload with the engine's own scheduler, for every case of its sweep, and compare them."""

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/quickstart.yaml")]
    results: Annotated[Path | None, arg(metavar="FILE", help="write every run with its figures to this file, one JSON object a line")] = (
        None
    )
    plots: Annotated[Path | None, arg(metavar="DIR", help="draw the figures, and who held the pool, as PNG and SVG")] = None
    json: Annotated[bool, arg(help="one JSON object for each case instead of the table")] = False


def run(words: Sequence[str]) -> int:
    """Simulate, compare, draw."""
    args, overrides = parse_with_overrides(Args, "simulate", words)
    config = load_config(args.config, overrides)
    from jaxkv.simulate.table import make_table

    if args.plots is not None:
        from jaxkv.simulate.plots import check_plots

        check_plots(args.plots)
    if args.results is not None and not args.results.parent.is_dir():
        raise ConfigError(f"--results {args.results}: there is no folder {args.results.parent}")
    sweep = run_with_bar(config)
    if args.results is not None:
        args.results.write_text("".join(lines(sweep)), encoding="utf-8")
    if args.json:
        sys.stdout.writelines(case_lines(sweep))
    else:
        console = Console()
        console.width = console.width if console.is_terminal else 200
        console.print(make_table(sweep))
    if args.plots is not None:
        from jaxkv.simulate.plots import draw_plots

        for path in draw_plots(sweep, args.plots):
            print(path, file=sys.stderr)
    return 0


def run_with_bar(config: Config) -> "list[Outcomes]":
    """The whole sweep; a bar shows how far it is where a person looks."""
    from jaxkv.simulate.sweep import run_sweep

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True, disable=not sys.stderr.isatty())
    with bar:
        task = bar.add_task("")

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            bar.refresh()

        return run_sweep(config, show)


def lines(sweep: "Sequence[Outcomes]") -> list[str]:
    """Every run as a line of JSON: what made it, and its figures."""
    return [
        json.dumps({"case": dict(outcomes.case.values), "seed": outcomes.case.config.workload.seed + seed, **result.to_dict()}) + "\n"
        for outcomes in sweep
        for seed, result in enumerate(outcomes.results)
    ]


def case_lines(sweep: "Sequence[Outcomes]") -> list[str]:
    """Every case as a line of JSON: the means over its seeds."""
    found = []
    for outcomes in sweep:
        runs = [result.to_dict() for result in outcomes.results]
        means = {name: round(sum(run[name] for run in runs) / len(runs), 6) for name in runs[0]}
        found.append(json.dumps({"case": dict(outcomes.case.values), "seeds": len(runs), **means}) + "\n")
    return found
