"""`jaxkv calibrate CONFIG --output FILE`: what a step, a prompt chunk and a copy take here, for `jaxkv simulate`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import load_config
from jaxkv.errors import ConfigError


@dataclass(frozen=True)
class Args:
    """Measure the costs of a configuration on this machine; leave it alone meanwhile. Name the file in simulate.costs."""

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/quickstart.yaml")]
    output: Annotated[Path, arg(metavar="FILE", help="where the costs go, as JSON")]
    repeats: Annotated[int, arg(help="measurements behind each number")] = 5


def run(words: Sequence[str]) -> int:
    """Measure and write."""
    args, overrides = parse_with_overrides(Args, "calibrate", words)
    config = load_config(args.config, overrides)
    if args.repeats < 1:
        raise ConfigError(f"--repeats: got {args.repeats}, allowed: 1 or more")
    if not args.output.parent.is_dir():
        raise ConfigError(f"--output {args.output}: there is no folder {args.output.parent}")
    from jaxkv.calibrate import about, calibrate
    from jaxkv.engine import Engine
    from jaxkv.observe.log import logging_to

    with logging_to(config.log), Engine(config) as engine:
        found = calibrate(engine, args.repeats, lambda line: print(f"calibrate: {line}", file=sys.stderr, flush=True))
        args.output.write_text(json.dumps({**found.to_dict(), **about(engine)}, indent=2) + "\n", encoding="utf-8")
    return 0
