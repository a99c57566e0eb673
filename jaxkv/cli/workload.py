"""`jaxkv workload CONFIG`: the load that a configuration describes, written down for any engine: a batch file, a trace."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import Config, load_config
from jaxkv.errors import ConfigError
from jaxkv.workload.bodies import make_calls
from jaxkv.workload.draw import draw
from jaxkv.workload.shard import Shard


@dataclass(frozen=True)
class Args:
    """Write the requests of the workload section: what is asked (OpenAI batch format) and when (a trace). Without either, count them."""

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/policies.yaml")]
    output: Annotated[Path | None, arg(metavar="FILE", help="a batch file for `jaxkv batch` or any other engine")] = None
    trace: Annotated[Path | None, arg(metavar="FILE", help="a trace: when each comes and how long it is")] = None
    vocab_size: Annotated[int | None, arg(metavar="N", help="ids of generated prompts are below; default: the model's own")] = None
    shard: Annotated[str | None, arg(metavar="I/N", help="every N-th request only, beginning with the I-th, such as 1/4")] = None


def run(words: Sequence[str]) -> int:
    """Draw and write."""
    args, overrides = parse_with_overrides(Args, "workload", words)
    config = load_config(args.config, overrides)
    shard = Shard.parse(args.shard) if args.shard is not None else Shard(1, 1)
    for flag, path in (("--output", args.output), ("--trace", args.trace)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
    requests = draw(config.workload, config.workload.seed)
    mine = [request for i, request in enumerate(requests, start=1) if shard.takes(i)]
    if args.output is not None:
        calls = make_calls(config, vocab_size(config, args.vocab_size))
        args.output.write_text("".join(call.to_line() for i, call in enumerate(calls, start=1) if shard.takes(i)), encoding="utf-8")
    if args.trace is not None:
        args.trace.write_text("".join(request.to_line() for request in mine), encoding="utf-8")
    if args.output is None and args.trace is None:
        prompt, answer = sum(request.prompt_len for request in mine), sum(request.ends_after * request.n for request in mine)
        sys.stdout.write(
            f"{len(mine)} requests, {prompt} prompt tokens, {answer} answer tokens, the last arrival after {mine[-1].arrival_s:.1f} s\n"
            if mine
            else "0 requests\n"
        )
    return 0


def vocab_size(config: Config, given: int | None) -> int:
    """What was given, else what the model has."""
    if given is not None:
        if given < 2:
            raise ConfigError(f"--vocab-size: got {given}, allowed: 2 or more")
        return given
    from jaxkv.sizing import read_shape

    return read_shape(config, None).vocab_size
