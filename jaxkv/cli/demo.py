"""`jaxkv demo [CONFIG]`: eight chats through a pool that is too small."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import load_config


@dataclass(frozen=True)
class Args:
    """Run eight chats through a pool that is too small, show who runs and who is parked, and compare with an ample pool."""

    config: Annotated[Positional[Path], arg(help="a configuration")] = Path("configs/quickstart.yaml")


def run(words: Sequence[str]) -> int:
    """Run the demo; its exit code is ours."""
    args, overrides = parse_with_overrides(Args, "demo", words)
    config = load_config(args.config, overrides)
    from jaxkv.demo import run_demo
    from jaxkv.observe.log import logging_to

    with logging_to(config.log):
        return run_demo(config)
