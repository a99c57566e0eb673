"""`jaxkv serve CONFIG`: OpenAI's endpoints over one engine."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.cli.batch import say_stage
from jaxkv.config import Config, load_config
from jaxkv.extras import require_extra

if TYPE_CHECKING:
    from jaxkv.engine import Engine
    from jaxkv.serve.interface import CheckWanted

PACKAGES = ("fastapi", "uvicorn", "orjson", "prometheus_client", "python_multipart")


@dataclass(frozen=True)
class Args:
    """Serve OpenAI's HTTP API until SIGTERM or Ctrl-C, and then finish what is running within server.drain_s.

    Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 after a fault of the engine, 2 something to correct first.
    """

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/server.yaml")]


def run(words: Sequence[str]) -> int:
    """Serve; the exit code is ours."""
    args, overrides = parse_with_overrides(Args, "serve", words)
    config = load_config(args.config, overrides)
    for package in PACKAGES:
        require_extra("server", package)
    from jaxkv.observe.log import logging_to
    from jaxkv.serve.run import serve

    with logging_to(config.log):
        code, has_ended = asyncio.run(serve(config, lambda check: make_engine(config, check)))
    if not has_ended:  # its thread is inside XLA, which no process leaves in peace
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def make_engine(config: Config, check: "CheckWanted") -> "Engine":
    """The engine, made in the thread that will use it."""
    from jaxkv.engine import Engine
    from jaxkv.openai import BodyReader

    def on_stage(stage: str, seconds: float) -> None:
        check()
        if config.log.level == "warning":  # else the log tells the stages
            say_stage(stage, seconds)

    engine = Engine(config, on_stage=on_stage)
    BodyReader(engine.tokenizer, engine.model_config.vocab_size, config.request.model_dump(exclude_none=True)).check_defaults()
    return engine
