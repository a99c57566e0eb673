"""Runs a batch job: checks what it was given, goes on where an earlier run stopped, feeds the engine and writes each line as it finishes.

Knows nothing of models, pools or parks.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from jaxkv.batch.interface import BatchEngine, EngineFactory, Inspect
from jaxkv.batch.interrupt import Interrupt
from jaxkv.batch.loop import Loop, Pending, body_defaults, pending_lines
from jaxkv.batch.progress import choose_meter
from jaxkv.batch.read import Source, find_sources, read_lines, scan
from jaxkv.batch.records import read_record
from jaxkv.batch.resume import Finished, Header, header_path, read_finished, refuse_other_job
from jaxkv.batch.summary import Tally
from jaxkv.batch.write import OutputFile, write_whole
from jaxkv.config import Config
from jaxkv.errors import ConfigError
from jaxkv.models import ByteTokenizer
from jaxkv.openai import BodyReader
from jaxkv.workload.shard import Shard

EXIT_DONE, EXIT_SOME_FAILED, EXIT_INTERRUPTED = 0, 3, 130


def run_batch(
    engine: BatchEngine | EngineFactory,
    config: Config,
    inputs: Sequence[str],
    output: str | Path,
    summary: str | Path | None = None,
    *,
    force: bool = False,
    retry_failed: bool = False,
    inspect: Inspect | None = None,
    shard: Shard | None = None,
    stderr: TextIO | None = None,
    stdin: BinaryIO | None = None,
) -> int:
    """Answer every line of `inputs` (paths, globs, `-`) that `output` does not answer yet; give the exit code.

    0: every line of the job has an answer. 3: some have an error line. 130: interrupted, what is finished is kept. What a user must change
    raises JaxkvError, before `engine` (a function that builds one) is called where possible; it is not called when nothing is missing. An
    engine that is handed over as such stays open. `output` of another configuration, model or input is refused; `force` keeps its lines and
    adds what is missing. `retry_failed` drops error lines and does them again. `inspect` tells of the model before `engine` is
    called, so that what does not fit it can be refused by then. With a `shard` only its lines are the job.
    """
    stream = stderr if stderr is not None else sys.stderr
    paths = _Paths(Path(output).expanduser(), Path(summary).expanduser() if summary is not None else None)
    paths.check_folders()
    try:
        with ExitStack() as keep:
            sources = find_sources(inputs, keep, stdin)
            paths.check_against(sources)
            out = keep.enter_context(OutputFile(paths.output))
            return _Job(engine, config, sources, out, paths.summary, stream, force, retry_failed, inspect, shard).run()
    except KeyboardInterrupt:
        _say_interrupted(stream, paths.output)
        return EXIT_INTERRUPTED


@dataclasses.dataclass(frozen=True)
class _Paths:
    output: Path
    summary: Path | None

    def check_folders(self) -> None:
        """Refuse a file that could not be written, or stands for two things."""
        for flag, path in (("--output", self.output), ("--summary", self.summary)):
            if path is not None and not path.parent.is_dir():
                raise ConfigError(f"{flag} {path}: there is no folder {path.parent}")
            if path is not None and path.is_dir():
                raise ConfigError(f"{flag} {path}: is a folder, a file is needed")
        if self.summary is not None and self.summary.resolve() in (self.output.resolve(), header_path(self.output).resolve()):
            raise ConfigError(f"--summary {self.summary}: is the job's own output; choose another file")

    def check_against(self, sources: Sequence[Source]) -> None:
        """Refuse to write over what is read."""
        for source in sources:
            for flag, path in (("--output", self.output), ("--summary", self.summary)):
                if path is not None and source.path is not None and source.path.resolve() == path.resolve():
                    raise ConfigError(f"{flag} {path}: is also an input; choose another file")


@dataclasses.dataclass
class _Job:
    engine: BatchEngine | EngineFactory
    config: Config
    sources: Sequence[Source]
    out: OutputFile
    summary: Path | None
    stderr: TextIO
    force: bool
    retry_failed: bool
    inspect: Inspect | None
    shard: Shard | None

    def run(self) -> int:
        """Find out what is missing, do it, and say how it went."""
        facts = scan(self.sources)
        before, now = Header.load(self.out.path), Header.of(self.config, facts, self.shard)
        self._refuse_other(before, now)
        tally, has_same_input = Tally(), before is not None and before.input_sha256 == now.input_sha256
        finished = read_finished(
            self.out.path, self.out.lines(), tally.count_earlier, is_retry=self.retry_failed, has_same_input=has_same_input
        )
        pending = pending_lines(read_lines(self.sources), finished, self.shard)
        first = next(pending, None)
        if first is None and before is not None and before.settings == now.settings:
            print("batch: nothing is missing, so no model is loaded", file=self.stderr)
            return self._finish(tally, {"system_fingerprint": before.system_fingerprint}, 0.0)
        now = self._inspected(before, now)
        with self._opened() as engine:
            for message in engine.messages:
                print(f"batch: {message}", file=self.stderr)
            now = dataclasses.replace(now, system_fingerprint=engine.system_fingerprint)
            self._refuse_other(before, now)
            self._prepare(now, finished)
            num_lines = facts.num_lines if self.shard is None else self.shard.num_of(facts.num_lines)
            return self._work(engine, chain([] if first is None else [first], pending), tally, num_lines)

    def _work(self, engine: BatchEngine, lines: "chain[Pending]", tally: Tally, num_lines: int) -> int:
        began = time.monotonic()
        with closing(choose_meter(self.stderr)) as meter, Interrupt() as interrupt:
            loop = Loop(engine, self.config, self.out, tally, meter, num_lines)
            loop.run(lines, interrupt)
        if interrupt.signum is not None:
            _say_interrupted(self.stderr, self.out.path, tally)
            return 128 + interrupt.signum
        return self._finish(tally, engine.summary(), time.monotonic() - began)

    def _inspected(self, before: Header | None, now: Header) -> Header:
        """Refuse what the model's headers rule out, before its weights are read."""
        if self.inspect is None:
            return now
        model = self.inspect()
        tokenizer = ByteTokenizer() if model.has_tokenizer else None  # any one: no text is read
        BodyReader(tokenizer, model.vocab_size, body_defaults(self.config)).check_defaults()
        now = dataclasses.replace(now, facts=json.loads(json.dumps(model.facts)))
        self._refuse_other(before, now)
        return now

    def _refuse_other(self, before: Header | None, now: Header) -> None:
        if not self.force:
            refuse_other_job(self.out.path, before, now, is_empty=self.out.is_empty)

    def _opened(self) -> AbstractContextManager[BatchEngine]:
        return self.engine() if callable(self.engine) else nullcontext(self.engine)

    def _prepare(self, header: Header, finished: Finished) -> None:
        """Bring the output into the state from which lines are added."""
        if self.out.cut_torn_line():
            print(f"batch: the last line of {self.out.path} was cut short by a kill; its request is done again", file=self.stderr)
        if finished.num_dropped:
            self.out.keep_only(lambda line: read_record(line).error_code is None)
        header.save(self.out.path)

    def _finish(self, tally: Tally, engine_summary: dict[str, Any], wall_s: float) -> int:
        for name, count in sorted(tally.unknown.items()):
            print(f"batch: warning: unknown field {name} was left aside in {count} {'line' if count == 1 else 'lines'}", file=self.stderr)
        failed = f"; {tally.num_failed} failed, --retry-failed does them again" if tally.num_failed else ""
        print(f"batch: {tally.num_completed} answered{failed}; {self.out.path}", file=self.stderr, flush=True)
        if self.summary is not None:
            content = {"config": self.config.to_dict(), **engine_summary, **tally.summary(wall_s)}
            write_whole(self.summary, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return EXIT_SOME_FAILED if tally.num_failed else EXIT_DONE


def _say_interrupted(stream: TextIO, output: Path, tally: Tally | None = None) -> None:
    kept = f"{tally.num_finished} finished lines are" if tally is not None else "finished lines are"
    print(f"batch: interrupted; {kept} kept in {output}, and the same command goes on from there", file=stream, flush=True)


__all__ = ["EXIT_DONE", "EXIT_INTERRUPTED", "EXIT_SOME_FAILED", "run_batch"]
