"""`jaxkv sweep CONFIG`: every run that its sweep section asks for, each in a folder of its own, on the engine or simulated."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import load_config
from jaxkv.errors import JaxkvError
from jaxkv.workload.shard import Shard

if TYPE_CHECKING:
    from jaxkv.sweep.folder import SweepFolder
    from jaxkv.sweep.matrix import Run

EXIT_DONE, EXIT_SOME_FAILED = 0, 3
WRITE_EVERY_S = 10.0  # simulated runs are many and quick


@dataclass(frozen=True)
class Args:
    """Run every case of the sweep section with every seed, compared ones in turns. The same command again does only what is missing.

    Exit codes: 0 all runs are finished (with --shard, those of this part), 3 some failed, 130 interrupted (finished runs are kept), 2
    something to correct first.
    """

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/policies.yaml")]
    output: Annotated[Path | None, arg(metavar="DIR", help="where the runs go; default: results/NAME-OF-CONFIG")] = None
    simulate: Annotated[bool, arg(help="on the simulator, without a model")] = False
    dry_run: Annotated[bool, arg(help="show what would be run, and about how long it takes")] = False
    shard: Annotated[str | None, arg(metavar="I/N", help="every N-th run only, beginning with the I-th, for one of N machines")] = None


def run(words: Sequence[str]) -> int:
    """List, make what is missing, tell."""
    args, overrides = parse_with_overrides(Args, "sweep", words)
    config = load_config(args.config, overrides)
    shard = Shard(1, 1) if args.shard is None else Shard.parse(args.shard)
    from jaxkv.sweep.folder import SweepFolder
    from jaxkv.sweep.matrix import list_runs

    runs = list_runs(config, args.simulate)
    path = args.output or Path("results") / args.config.stem
    mine = [one for place, one in enumerate(runs, start=1) if shard.takes(place)]
    if not args.simulate:
        check_engines(mine)
    if args.dry_run:
        SweepFolder.check(path, args.simulate)
        Console(width=None if sys.stdout.isatty() else 160).print(matrix(mine, SweepFolder(path)))
        print(estimate(mine, SweepFolder(path)))
        return EXIT_DONE
    folder = SweepFolder.open(path, config, args.simulate)
    with folder.held(f"{shard.index}-{shard.count}"):
        missing = [one for one in mine if not folder.is_finished(one)]
        if len(missing) < len(mine):
            print(f"sweep: {len(mine) - len(missing)} of {len(mine)} runs are finished already", file=sys.stderr)
        try:
            make_with_bar(missing, folder, runs)
        finally:
            failed = tell(folder, runs)
    return EXIT_SOME_FAILED if failed else EXIT_DONE


def check_engines(runs: "Sequence[Run]") -> None:
    """Refuse what no engine could be made for, before the first one is."""
    from jaxkv.startup import outline
    from jaxkv.sweep.live import made_for

    seen: list[object] = []
    for one in runs:
        if (fits := made_for(one.config)) not in seen:
            seen.append(fits)
            outline(one.config)


def make_with_bar(missing: "Sequence[Run]", folder: "SweepFolder", runs: "Sequence[Run]") -> None:
    """Those that are missing of all runs; a bar with the time left where a person looks, else a line for each. What came out so far is
    written meanwhile, so that it is there whatever ends the sweep."""
    from jaxkv.sweep.loop import run_all
    from jaxkv.sweep.results import collect, write_results

    columns = (TextColumn("sweep"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with bar:
        task, due = bar.add_task("", total=len(missing)), time.monotonic()
        for num, done in enumerate(run_all(missing, folder), start=1):
            name = f"{done.run.name}, seed {done.run.seed}, repeat {done.run.repeat}"
            bar.update(task, advance=1, description=name)
            if done.error is not None:
                bar.console.print(f"sweep: {name}: failed: {done.error}", style="red", highlight=False, markup=False, soft_wrap=True)
            elif bar.disable:
                print(f"sweep: {num} of {len(missing)}: {name}", file=sys.stderr, flush=True)
            if not done.run.is_simulated or time.monotonic() >= due:
                write_results(folder.path, collect(folder, runs))
                due = time.monotonic() + WRITE_EVERY_S


def tell(folder: "SweepFolder", runs: "Sequence[Run]") -> int:
    """Write and show what there is; how many failed."""
    from jaxkv.sweep.results import collect, table, warnings, write_results

    rows = collect(folder, runs)
    write_results(folder.path, rows)
    failed = [row for row in rows if row["status"] == "failed"]
    if len(failed) < len(rows):
        Console(width=None if sys.stdout.isatty() else 200).print(table(rows))
    for line in warnings(rows):
        print(f"sweep: warning: {line}", file=sys.stderr)
    left = len(runs) - len(rows)
    told = [f"{len(rows) - len(failed)} of {len(runs)} runs finished"]
    told += [f"{len(failed)} failed, the same command does them again"] if failed else []
    told += [f"{left} not made yet"] if left else []
    print(f"sweep: {'; '.join(told)}; {folder.path}", file=sys.stderr)
    return len(failed)


def matrix(runs: "Sequence[Run]", folder: "SweepFolder") -> Table:
    """A line for each case: its values, and how many of its runs are finished."""
    found = Table(title=f"{len(runs)} runs", title_justify="left")
    cases: dict[str, list[Run]] = {}
    for one in runs:
        cases.setdefault(one.name, []).append(one)
    for field in runs[0].values if runs else ():
        found.add_column(field)
    for name in ("runs", "finished"):
        found.add_column(name, justify="right")
    for members in cases.values():
        done = sum(folder.is_finished(one) for one in members)
        found.add_row(*(str(value) for value in members[0].values.values()), str(len(members)), str(done))
    return found


def estimate(runs: "Sequence[Run]", folder: "SweepFolder") -> str:
    """About how long the missing runs take, from one simulation of each case."""
    from jaxkv.sweep.loop import num_processes
    from jaxkv.sweep.simulated import run_simulated

    missing = [one for one in runs if not folder.is_finished(one)]
    if not missing:
        return "nothing is missing"
    simulated_s: dict[str, float] = {}
    began = time.perf_counter()
    try:
        for one in missing:
            if one.name not in simulated_s:
                simulated_s[one.name] = run_simulated(one.config).figures.makespan_s
    except JaxkvError as error:
        return f"no estimate: {error}"
    each_s = (time.perf_counter() - began) / len(simulated_s)
    if missing[0].is_simulated:
        return f"{len(missing)} to make, about {duration(each_s * len(missing) / num_processes(missing))}"
    total_s = sum(simulated_s[one.name] for one in missing)
    return f"{len(missing)} to make, about {duration(total_s)} by the simulator's costs, and the starts of the engine"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    for size, word in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {word}"
    return f"{seconds:.1f} s"
