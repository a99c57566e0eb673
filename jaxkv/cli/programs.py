"""`jaxkv programs CONFIG`: the compiled programs with their shapes, arithmetic, memory and compile time."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import load_config

if TYPE_CHECKING:
    from jaxkv.observe.programs import Argument, ProgramList

MAX_SHAPES = 3  # of one argument in the table; JSON has all


@dataclass(frozen=True)
class Args:
    """Compile every program of a configuration, without loading weights or running anything, and list what each takes."""

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/quickstart.yaml")]
    json: Annotated[bool, arg(help="one JSON object instead of a table, with every shape")] = False


def run(words: Sequence[str]) -> int:
    """Compile and print."""
    args, overrides = parse_with_overrides(Args, "programs", words)
    config = load_config(args.config, overrides)
    from jaxkv.observe.log import logging_to
    from jaxkv.observe.programs import list_programs

    with logging_to(config.log):
        found = list_programs(config)
    if args.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        console = Console()
        console.width = console.width if console.is_terminal else 140
        console.print(table(found))
    return 0


def table(found: "ProgramList") -> Table:
    """One line for each program."""
    title = f"{found.model} in {found.dtype} on {found.devices}, pool of {found.pool_tokens} tokens"
    made = Table(title=title, title_justify="left", show_lines=True)
    made.add_column("program")
    made.add_column("arguments", overflow="fold")
    for name in ("FLOPs", "arguments", "results", "in place", "temporary", "compiled in"):
        made.add_column(name, justify="right")
    for program in found.programs:
        sizes = (program.argument_bytes, program.output_bytes, program.aliased_bytes, program.temp_bytes)
        arguments = "\n".join(map(in_words, program.arguments))
        made.add_row(program.name, arguments, short(program.flops), *map(mebibytes, sizes), f"{program.compile_s:.2f} s")
    return made


def in_words(argument: "Argument") -> str:
    """`pool: 60 x float32[49,3,16,64]`, the largest arrays only."""
    more = len(argument.shapes) - MAX_SHAPES
    return f"{argument.name}: {', '.join(argument.shapes[:MAX_SHAPES])}" + (f" and {more} more" if more > 0 else "")


def short(number: float | None) -> str:
    """A count with the letter of its size: 2.1 G."""
    if number is None:
        return "unknown"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"


def mebibytes(number: int | None) -> str:
    """Bytes as MiB, or as KiB where they are few."""
    if number is None:
        return "unknown"
    return f"{number / 2**20:.1f} MiB" if number >= 2**20 else f"{number / 2**10:.1f} KiB"
