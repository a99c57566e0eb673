"""`jaxkv batch CONFIG --input IN... --output OUT`: a file of requests in, a file of answers out."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import load_config

if TYPE_CHECKING:
    from jaxkv.engine import Engine


@dataclass(frozen=True)
class Args:
    """Answer every line of the input (OpenAI batch format). Running the same command again does only what is missing.

    Exit codes: 0 every line has an answer, 3 some lines failed, 130 interrupted (finished lines are kept), 2 something to correct first.
    """

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/quickstart.yaml")]
    input: Annotated[tuple[str, ...], arg(metavar="FILE ...", help="files, globs, .gz files, or - for standard input")]
    output: Annotated[Path, arg(metavar="FILE", help="where the answers go, one line each, as they finish")]
    summary: Annotated[Path | None, arg(metavar="FILE", help="write figures about the whole job to this JSON file")] = None
    force: Annotated[bool, arg(help="go on with an output that another configuration, model or input made")] = False
    retry_failed: Annotated[bool, arg(help="do lines again that ended with an error")] = False


def run(words: Sequence[str]) -> int:
    """Run the job; its exit code is ours."""
    args, overrides = parse_with_overrides(Args, "batch", words)
    config = load_config(args.config, overrides)
    from jaxkv.batch import run_batch

    def engine() -> "Engine":
        from jaxkv.engine import Engine

        return Engine(config, on_stage=say_stage)

    return run_batch(engine, config, args.input, args.output, args.summary, force=args.force, retry_failed=args.retry_failed)


def say_stage(stage: str, seconds: float) -> None:
    """One line for a part of the start that is done."""
    print(f"start: {stage} {seconds:.1f} s", file=sys.stderr, flush=True)
