"""One batch from its input to its files: as `jaxkv batch` does it, by the same rules, but as an ordinary client of the server's engine.

Killed and started again it goes on: what is in its output is done. Decides nothing about when it runs.
"""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice

from jaxkv.batch.answers import AnswerWriter
from jaxkv.batch.lines import LineError, Request, parse_line
from jaxkv.batch.loop import Pending, pending_lines
from jaxkv.batch.read import RawLine, Source, read_lines, scan
from jaxkv.batch.records import Record
from jaxkv.batch.resume import Finished, Header, read_finished
from jaxkv.batch.summary import Tally
from jaxkv.batch.write import OutputFile
from jaxkv.config import Config
from jaxkv.errors import RequestError
from jaxkv.observe.events import Event
from jaxkv.openai import BodyReader, ParsedBody, derive_seed
from jaxkv.serve import errors
from jaxkv.serve.ask import check_model
from jaxkv.serve.batch_record import BatchRecord
from jaxkv.serve.batch_window import Window
from jaxkv.serve.errors import ApiError
from jaxkv.serve.files import FileStore
from jaxkv.serve.inbox import Inbox
from jaxkv.serve.service import Service

FLEX = 10  # the priority of a line that asks for none
MAX_LINES = 50_000
LINES_AT_A_TIME = 200  # looked at in one piece, so that nobody waits long for the event loop or the thread that reads
OTHER_SETTINGS = "the server has another model or other settings than when this batch began; create it again"
RETRY_S = 0.2  # after the line was full
_ROOM_EVERY_S = 1.0
logger = logging.getLogger("jaxkv")


class BatchRun:
    """Runs a batch until it has ended. Cancelled, it stops where it is, and another run goes on from there."""

    def __init__(self, record: BatchRecord, store: FileStore, service: Service, config: Config, model: str, window: Window) -> None:
        self.record, self._store, self._service, self._config, self._model = record, store, service, config, model
        self._source = Source(record.input_id, store.content(record.input_id))
        self._tally, self._window, self._room_checked = Tally(), window, 0.0

    async def run(self) -> None:
        """All that is missing, and the end."""
        record = self.record
        if record.status == "validating":
            await self._validate()
        if record.status == "in_progress":
            try:
                await self._work()
            finally:
                record.counts.update(completed=self._tally.num_completed, failed=self._tally.num_failed)
        self.finish()

    def finish(self) -> None:
        """Make its files known; may be done again after a kill."""
        record = self.record
        if record.ending is None:
            self._end("cancelled" if record.status == "cancelling" else "failed")
        for file_id, name in ((record.output_id, "output"), (record.error_id, "error")):
            path = self._store.content(file_id)
            if path.exists():
                with OutputFile(path) as file:
                    file.cut_torn_line()
                    is_empty = file.is_empty
                if is_empty:
                    path.unlink()
                elif file_id not in record.files:
                    self._store.add(file_id, f"{record.id}_{name}.jsonl", "batch_output")
                    record.files.append(file_id)
        assert record.ending is not None
        self._turn(record.ending)

    async def _validate(self) -> None:
        """Every line is a request of its own for this endpoint, or nothing is run at all."""
        record, lines, seen, num = self.record, read_lines([self._source]), set[str](), 0
        while found := await self._service.work(lambda: [self._fault(line, seen) for line in islice(lines, LINES_AT_A_TIME)]):
            num += len(found)
            for fault in filter(None, found):
                record.add_error(*fault)
        record.counts["total"] = num
        if num == 0:
            record.add_error("empty_file", "the input has no line")
        if num > MAX_LINES:
            record.add_error("too_many_lines", f"the input has {num} lines, at most {MAX_LINES} are taken; make several batches of it")
        if record.errors:
            self._end("failed")
        else:
            self._turn("in_progress")

    def _fault(self, line: RawLine, seen: set[str]) -> tuple[str, str, int] | None:
        """What is wrong with a line itself; its body is looked at later."""
        if len(line.data) > self._config.server.max_body_mib * 2**20:
            allowed = f"at most {self._config.server.max_body_mib} MiB (server.max_body_mib)"
            return "line_too_long", f"the line has {len(line.data)} bytes, allowed: {allowed}", line.ordinal
        try:
            request = parse_line(line.data, seen)
        except LineError as error:
            return error.code, str(error), line.ordinal
        if request.endpoint.value != self.record.endpoint:
            message = f"url: got {request.endpoint.value}, the batch is for {self.record.endpoint}"
            return "mismatched_endpoint", message, line.ordinal
        return None

    async def _work(self) -> None:
        """Answer what has no answer yet, until the window ends."""
        record = self.record
        with ExitStack() as keep:
            answers, faults = (keep.enter_context(OutputFile(self._store.content(i))) for i in (record.output_id, record.error_id))
            for file in (answers, faults):
                file.cut_torn_line()
            if not await self._is_same_job():
                record.add_error("other_settings", OTHER_SETTINGS)
                self._end("failed")
                return
            finished = await self._service.work(lambda: read_both(answers, faults, self._tally.count_earlier))
            reader, fingerprint = self._reader(), self._service.check_open().system_fingerprint
            writer = AnswerWriter(answers, faults, self._tally, self._model, fingerprint, reader.tokenizer)
            try:
                async with asyncio.timeout(record.expires - time.time()) as window:
                    await self._answer_all(pending_lines(read_lines([self._source]), finished), reader, writer)
            except TimeoutError:
                if not window.expired():
                    raise
                await self._expire(writer, answers, faults)
                return
        self._end("completed")

    async def _is_same_job(self) -> bool:
        """Whether what is done was done with the settings that the server has now; the first time, they are noted."""
        facts = await self._service.work(lambda: scan([self._source]))
        fingerprint = self._service.check_open().system_fingerprint
        now = dataclasses.replace(Header.of(self._config, facts), system_fingerprint=fingerprint)
        if self.record.job is not None:
            changed = Header(**self.record.job).differences(now)
            if changed:
                logger.error(Event("failed", {"batch": self.record.id, "reason": f"begun with other settings: {'; '.join(changed)}"}))
            return not changed
        self.record.job = json.loads(json.dumps({name: getattr(now, name) for name in now.__dataclass_fields__}))
        self.record.save(self._store.folder)
        return True

    def _reader(self) -> BodyReader:
        """Reads bodies, whatever becomes of the engine: one that sleeps must not be kept."""
        engine, config = self._service.check_open(), self._config
        defaults = config.request.model_dump(exclude_none=True)
        return BodyReader(engine.tokenizer, engine.model_config.vocab_size, defaults, config.server.max_prompts)

    async def _answer_all(self, pending: Iterator[Pending], reader: BodyReader, writer: AnswerWriter) -> None:
        async with asyncio.TaskGroup() as group:
            while (found := await self._service.work(lambda: self._read_next(pending, reader))) is not None:
                line, request, body = found
                if isinstance(body, ParsedBody):
                    num = len(body.prompts) * body.params.n
                    await self._window.enter(num)
                    task = group.create_task(self._answer(line, request, body, writer))
                    task.add_done_callback(partial(self._left, num))  # also of one that never began
                else:
                    writer.fail(line, request.custom_id, *body)
                    self._count()
                    await asyncio.sleep(0)

    def _read_next(self, pending: Iterator[Pending], reader: BodyReader) -> tuple[RawLine, Request, ParsedBody | tuple[str, str]] | None:
        """The next line with its body, or with the code and the words of what is wrong with it."""
        if (found := next(pending, None)) is None:
            return None
        line, request = found
        assert isinstance(request, Request), "the input was looked at before"
        try:
            return line, request, self._read_body(request, reader)
        except RequestError as error:
            return line, request, ("invalid_request", str(error))
        except ApiError as error:
            return line, request, (error.code, str(error))

    def _read_body(self, request: Request, reader: BodyReader) -> ParsedBody:
        check_model(request.body, self._model)
        body = reader.read(request.endpoint, request.body, derive_seed(self._config.run.seed, request.custom_id))
        params = dataclasses.replace(body.params, patient=True)
        if request.body.get("priority") is None and request.body.get("service_tier") is None:
            params = dataclasses.replace(params, priority=FLEX)
        return dataclasses.replace(body, params=params)

    def _left(self, num: int, task: "asyncio.Task[None]") -> None:
        self._window.leave(num)

    async def _answer(self, line: RawLine, request: Request, body: ParsedBody, writer: AnswerWriter) -> None:
        try:
            inboxes = await self._finished(line, body)
            completions = [inbox.completion for inbox in inboxes if inbox.completion is not None]
            broken = [completion for completion in completions if completion.finish_reason not in ("stop", "length")]
            if broken:
                is_error = any(completion.finish_reason == "error" for completion in broken)
                why = errors.engine_error() if is_error else errors.cancelled()
                writer.fail(line, request.custom_id, "engine_error", str(why))
            else:
                at = min((inbox.truncates_at for inbox in inboxes if inbox.truncates_at is not None), default=None)
                writer.answer(line, request, body, completions, at)
            self._count()
        except RequestError as error:
            writer.fail(line, request.custom_id, "invalid_request", error)
            self._count()

    async def _finished(self, line: RawLine, body: ParsedBody) -> list[Inbox]:
        """The request's sequences when all have ended, however often the server has to be waited for."""
        while True:
            inboxes: list[Inbox] = []
            try:
                inboxes = await self._service.submit(body.prompts, body.params, f"{self.record.id}:{line.ordinal}")
                while not all(inbox.completion for inbox in inboxes):
                    await inboxes[0].wake.wait()
                    inboxes[0].wake.clear()
                if self._service.is_ready or not any(_is_cancelled(inbox) for inbox in inboxes):
                    return inboxes
            except ApiError as error:
                if error.status == 429:
                    await asyncio.sleep(RETRY_S)
            finally:
                self._service.cancel(inboxes)
            await self._service.wait_open()

    def _count(self) -> None:
        """A line was written."""
        self.record.counts.update(completed=self._tally.num_completed, failed=self._tally.num_failed)
        now = time.monotonic()
        if now - self._room_checked > _ROOM_EVERY_S:
            self._room_checked = now
            self._store.check_room(0)

    async def _expire(self, writer: AnswerWriter, answers: OutputFile, faults: OutputFile) -> None:
        finished = await self._service.work(lambda: read_both(answers, faults, lambda record: None))
        pending = pending_lines(read_lines([self._source]), finished)
        while lines := await self._service.work(lambda: list(islice(pending, LINES_AT_A_TIME))):
            for line, request in lines:
                writer.fail(line, request.custom_id, "batch_expired", "the request was not answered before the completion window ended")
        self._end("expired")

    def _end(self, ending: str) -> None:
        self.record.ending = ending
        self._turn("finalizing")

    def _turn(self, status: str) -> None:
        self.record.turn(status)
        self.record.save(self._store.folder)


def read_both(answers: OutputFile, faults: OutputFile, on_record: Callable[[Record], None]) -> Finished:
    """What is done already, as both files say."""
    finished = Finished()
    for file in (answers, faults):
        found = read_finished(file.path, file.lines(), on_record, is_retry=False, has_same_input=True)
        finished.custom_ids |= found.custom_ids
        finished.places |= found.places
    return finished


def _is_cancelled(inbox: Inbox) -> bool:
    return inbox.completion is not None and inbox.completion.finish_reason == "cancelled"
