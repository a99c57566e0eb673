"""`jaxkv report DIR`: plots of a sweep, PNG and SVG, and one page with everything that opens offline."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse
from jaxkv.errors import ConfigError


@dataclass(frozen=True)
class Args:
    """Draw what a sweep's folder holds into DIR/plots and write DIR/report.html, a single file. Needs the extra plots."""

    folder: Annotated[Positional[Path], arg(help="a sweep's folder, such as results/policies")]


def run(words: Sequence[str]) -> int:
    """Draw, write, print the files."""
    args = parse(Args, "report", words)
    from jaxkv.batch.write import write_whole
    from jaxkv.sweep.plots import draw_all
    from jaxkv.sweep.report import build_report
    from jaxkv.sweep.results import by_case, read_results

    rows = read_results(args.folder)
    cases = by_case(rows)
    if not cases:
        raise ConfigError(f"{args.folder}: has no finished run, so there is nothing to draw")
    files = draw_all(cases, args.folder, args.folder / "plots")
    page = args.folder / "report.html"
    write_whole(page, build_report(args.folder, rows, [path for path in files if path.suffix == ".svg"]))
    for path in (*files, page):
        print(path)
    return 0
