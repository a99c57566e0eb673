"""`jaxkv batch CONFIG --input IN... --output OUT`: a file of requests in, a file of answers out."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import Config, load_config
from jaxkv.errors import ConfigError
from jaxkv.workload.shard import Shard

if TYPE_CHECKING:
    from jaxkv.batch.interface import Inspected
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
    shard: Annotated[str | None, arg(metavar="I/N", help="do every N-th line only, beginning with the I-th, such as 1/4")] = None
    timeline: Annotated[
        Path | None, arg(metavar="FILE", help="write who held the pool, was parked and waited, for Perfetto or chrome://tracing")
    ] = None
    record_trace: Annotated[
        Path | None, arg(metavar="FILE", help="write when requests came and how long they were, for `jaxkv simulate`; never their text")
    ] = None
    profile: Annotated[Path | None, arg(metavar="DIR", help="write a JAX trace of the run, start-up left out")] = None


def run(words: Sequence[str]) -> int:
    """Run the job; its exit code is ours."""
    args, overrides = parse_with_overrides(Args, "batch", words)
    config = load_config(args.config, overrides)
    check_files(args, config)
    shard = None if args.shard is None else Shard.parse(args.shard)
    from jaxkv.batch import run_batch
    from jaxkv.observe.log import logging_to

    with logging_to(config.log), ExitStack() as keep:
        engine = partial(observed_engine, config, args, keep)
        inspect, force, retry = partial(inspected, config), args.force, args.retry_failed
        options: dict[str, Any] = {"force": force, "retry_failed": retry, "inspect": inspect, "shard": shard}
        return run_batch(engine, config, args.input, args.output, args.summary, **options)


def inspected(config: Config) -> "Inspected":
    """The model as its headers describe it, checked as an engine's start would."""
    from jaxkv.batch.interface import Inspected
    from jaxkv.startup import outline

    found = outline(config)
    return Inspected(found.info.config.vocab_size, found.info.has_tokenizer, found.facts())


def observed_engine(config: Config, args: Args, keep: ExitStack) -> "Engine":
    """An engine with what the words ask to look at it; that is finished when `keep` is closed."""
    from jaxkv.engine import Engine
    from jaxkv.observe.profile import check_folder, profiled
    from jaxkv.observe.record import TraceRecorder
    from jaxkv.observe.timeline import Timeline

    if args.profile is not None:
        check_folder(args.profile)
    timeline = None if args.timeline is None else keep.enter_context(Timeline(args.timeline))
    recorder = None if args.record_trace is None else keep.enter_context(TraceRecorder(args.record_trace))
    engine = Engine(config, on_stage=say_stage if config.log.level == "warning" else None)  # else the log tells the stages
    if timeline is not None:
        engine.observers.add(timeline)
    if recorder is not None:
        engine.observers.add(recorder)
    if args.profile is not None:
        keep.enter_context(profiled(engine, args.profile))
    return engine


def check_files(args: Args, config: Config) -> None:
    """Refuse to write the timeline, the trace or the log over what the job reads or writes."""
    log = None if config.log.file is None else Path(config.log.file)
    others = [*map(Path, args.input), args.output, Path(f"{args.output}.job.json"), args.summary]
    taken = {path.resolve() for path in others if path is not None}
    for flag, path in (("--timeline", args.timeline), ("--record-trace", args.record_trace), ("log.file", log)):
        if path is not None and path.resolve() in taken:
            raise ConfigError(f"{flag} {path}: is another file of this job; choose a file of its own")
        taken |= set() if path is None else {path.resolve()}


def say_stage(stage: str, seconds: float) -> None:
    """One line for a part of the start that is done."""
    print(f"start: {stage} {seconds:.1f} s", file=sys.stderr, flush=True)
