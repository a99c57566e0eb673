"""The loop of a job: a few requests ahead of the engine, one line written for each that ends. Knows nothing of earlier runs."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxkv.batch.answers import AnswerWriter
from jaxkv.batch.interface import BatchEngine, BatchHandle
from jaxkv.batch.interrupt import Interrupt
from jaxkv.batch.lines import LineError, Request, parse_line
from jaxkv.batch.progress import Meter, Pace, View
from jaxkv.batch.read import RawLine
from jaxkv.batch.records import UNNAMED
from jaxkv.batch.resume import Finished
from jaxkv.batch.summary import Tally
from jaxkv.batch.write import OutputFile
from jaxkv.config import Config
from jaxkv.errors import RequestError
from jaxkv.openai import BodyReader, ParsedBody, derive_seed
from jaxkv.openai.names import served_name
from jaxkv.request import Completion
from jaxkv.workload.shard import Shard

Pending = tuple[RawLine, Request | LineError]
MAX_PROMPTS = 64  # of one line


@dataclass(frozen=True, slots=True)
class _Live:
    """A line that the engine has, with a handle for each choice of each of its prompts."""

    line: RawLine
    request: Request
    body: ParsedBody
    handles: list[BatchHandle]

    @property
    def completions(self) -> list[Completion]:
        """Those that there are."""
        return [handle.completion for handle in self.handles if handle.completion is not None]

    def cancel(self) -> None:
        """End what has not ended."""
        for handle in self.handles:
            handle.cancel()


def body_defaults(config: Config) -> dict[str, Any]:
    """What stands in for fields that a body leaves out."""
    return config.request.model_dump(exclude_none=True)


def pending_lines(lines: Iterable[RawLine], finished: Finished, shard: Shard | None = None) -> Iterator[Pending]:
    """The lines of the shard that are not finished, each as a request or as the reason why it is none. Others are read for their names."""
    seen: set[str] = set()
    for line in lines:
        found: Request | LineError
        try:
            found = parse_line(line.data, seen)
        except LineError as error:
            found = error
        if shard is not None and not shard.takes(line.ordinal):
            continue
        is_named = isinstance(found, Request) or found.code not in UNNAMED
        if (found.custom_id not in finished.custom_ids) if is_named else (line.ordinal not in finished.places):
            yield line, found


class Loop:
    """Feeds, steps, collects. At most `window` requests are with the engine at a time, so that an input of any length streams."""

    def __init__(self, engine: BatchEngine, config: Config, out: OutputFile, tally: Tally, meter: Meter, num_lines: int) -> None:
        self.window = max(16, 4 * config.scheduler.rows)
        self._engine, self._tally, self._num_lines = engine, tally, num_lines
        self._reader = BodyReader(engine.tokenizer, engine.model_config.vocab_size, body_defaults(config), MAX_PROMPTS)
        self._reader.check_defaults()
        self._run_seed, model = config.run.seed, served_name(config.model.path)
        self._writer = AnswerWriter(out, out, tally, model, engine.system_fingerprint, engine.tokenizer)
        self._pace = Pace(meter)
        self._live: list[_Live] = []

    def run(self, lines: Iterator[Pending], interrupt: Interrupt) -> None:
        """Answer all `lines`, or those that end before an interrupt; what is then in progress is cancelled."""
        self._feed(lines)
        while self._live and interrupt.signum is None:
            self._engine.step()
            self._collect()
            self._feed(lines)
            if self._pace.is_due():
                self._show()
        for live in self._live:
            live.cancel()
        self._show()

    def _feed(self, lines: Iterator[Pending]) -> None:
        while len(self._live) < self.window and (pending := next(lines, None)) is not None:
            line, found = pending
            if isinstance(found, LineError):
                self._writer.fail(line, found.custom_id, found.code, str(found))
            else:
                self._submit(line, found)

    def _submit(self, line: RawLine, request: Request) -> None:
        try:
            body = self._reader.read(request.endpoint, request.body, derive_seed(self._run_seed, request.custom_id))
            live = _Live(line, request, body, [])
            self._submit_prompts(live)
        except RequestError as error:
            self._writer.fail(line, request.custom_id, "invalid_request", error)
            return
        self._tally.unknown.update(body.unknown | request.unknown)
        self._live.append(live)

    def _submit_prompts(self, live: _Live) -> None:
        """All prompts of a line, or none of them."""
        try:
            for prompt in live.body.prompts:
                params = dataclasses.replace(live.body.params, patient=True)
                live.handles.extend(self._engine.submit_group(prompt, params, name=live.request.custom_id).choices)
        except RequestError:
            live.cancel()
            raise

    def _collect(self) -> None:
        """Write a line for each request that has ended."""
        going = []
        for live in self._live:
            completions = live.completions
            broken = [completion for completion in completions if completion.finish_reason not in ("stop", "length")]
            if broken:
                live.cancel()
                reason = broken[0].error or f"the engine ended it: {broken[0].finish_reason}"
                self._writer.fail(live.line, live.request.custom_id, "engine_error", reason)
            elif len(completions) < len(live.handles):
                going.append(live)
            else:
                self._answer(live, completions)
        self._live = going

    def _answer(self, live: _Live, completions: list[Completion]) -> None:
        truncates_at = min((handle.will_truncate_at for handle in live.handles if handle.will_truncate_at is not None), default=None)
        self._writer.answer(live.line, live.request, live.body, completions, truncates_at)

    def _show(self) -> None:
        tally = self._tally
        self._pace.show(View.of(self._engine.status(), tally.num_finished, tally.num_failed, self._num_lines))
