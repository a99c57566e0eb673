"""`jaxkv compare A B`: how two sides of a sweep, or two sweeps, differ, and whether that is more than noise."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Console
from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse


@dataclass(frozen=True)
class Args:
    """Pair runs of one seed, repeat and other values; print B over A with its spread. A side is DIR or DIR:field=value,field=value."""

    a: Annotated[Positional[str], arg(metavar="A", help="such as results/policies:scheduler.victim=smallest")]
    b: Annotated[Positional[str], arg(metavar="B", help="such as results/policies:scheduler.victim=largest")]
    json: Annotated[bool, arg(help="one JSON object instead of the table")] = False


def run(words: Sequence[str]) -> int:
    """Compare and print."""
    args = parse(Args, "compare", words)
    from jaxkv.sweep.compare import compare, parse_side, table

    a, b = parse_side(args.a), parse_side(args.b)
    found = compare(a, b)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    Console(width=None if sys.stdout.isatty() else 140).print(table(found, a, b))
    if found.num_equal_outputs is not None:
        print(f"outputs are the same bytes in {found.num_equal_outputs} of {found.num_pairs} pairs")
    if found.num_unpaired:
        print(f"{found.num_unpaired} runs have no partner and are left out")
    return 0
