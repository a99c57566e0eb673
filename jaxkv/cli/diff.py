"""`jaxkv diff A B`: how many answers of two batch jobs are the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse


@dataclass(frozen=True)
class Args:
    """Count identical answers by custom_id and show the first differing token of the others. Exit code 1 where something differs."""

    a: Annotated[Positional[Path], arg(help="a batch job's output")]
    b: Annotated[Positional[Path], arg(help="another's")]


def run(words: Sequence[str]) -> int:
    """Compare and print."""
    args = parse(Args, "diff", words)
    from jaxkv.diff import run_diff

    return run_diff(args.a, args.b)
