"""The batches of a server: takes them, runs some beside each other and everything else, ends them early where a client asks.

They are written down beside the files they read and write, so that a server that is started again goes on with them.
"""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from jaxkv.config import Config
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.observe.events import Event
from jaxkv.openai.names import served_name
from jaxkv.serve import errors
from jaxkv.serve.batch_record import BatchRecord, read_batch_ask
from jaxkv.serve.batch_run import BatchRun
from jaxkv.serve.batch_window import Window
from jaxkv.serve.errors import ApiError
from jaxkv.serve.files import FileStore, new_id, read_records
from jaxkv.serve.service import Service

MAX_OPEN = 100  # batches that have not ended
MAX_TOGETHER = 8  # of these, how many are worked on at a time
MAX_KEPT = 1000  # in all; the oldest that have ended are forgotten, their files stay
logger = logging.getLogger("jaxkv")


class Batches:
    """Those of one folder. `start` begins to run them, until `close`."""

    def __init__(self, store: FileStore, config: Config) -> None:
        self.store, self._config = store, config
        self._model = config.server.model_name or served_name(config.model.path)
        self._records = {record.id: record for record in read_records(store.folder, "batch_", lambda facts: BatchRecord(**facts))}
        store.sweep(self._is_being_written)
        self._news = asyncio.Event()
        self._running: dict[str, asyncio.Task[None]] = {}  # by id
        self._works: dict[str, asyncio.Task[None]] = {}  # what of these `cancel` ends
        self._window = Window(min(2 * config.scheduler.rows, max(1, config.server.max_waiting // 2)))
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, config: Config) -> Self | None:
        """Those of the folder that the configuration names, if it does; raises ConfigError."""
        folder = config.server.files_dir
        if folder is None:
            return None
        if config.server.max_file_mib > config.server.files_quota_mib:
            raise ConfigError(
                f"server.max_file_mib: got {config.server.max_file_mib}, more than server.files_quota_mib, which is "
                f"{config.server.files_quota_mib}; lower it or raise the other"
            )
        return cls(FileStore(Path(folder).expanduser(), config.server.files_quota_mib), config)

    def start(self, service: Service) -> None:
        """Run what there is, and what will come."""
        self._task = asyncio.create_task(self._run(service))

    async def close(self) -> None:
        """Stop where it is; what is done is kept."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        self.store.close()

    def all(self) -> list[BatchRecord]:
        """All, the newest first."""
        return sorted(self._records.values(), key=lambda record: (record.times["created"], record.id), reverse=True)

    def get(self, batch_id: str) -> BatchRecord:
        """One that is known; raises ApiError."""
        if batch_id not in self._records:
            raise errors.no_batch(batch_id)
        return self._records[batch_id]

    def create(self, body: Mapping[str, Any]) -> BatchRecord:
        """Take a batch; raises ApiError or RequestError."""
        asked = read_batch_ask(body)
        self.store.get(asked.input_id)
        if len(self._open) >= MAX_OPEN:
            raise errors.too_many_batches(MAX_OPEN)
        output_id, error_id = new_id("file-"), new_id("file-")
        record = BatchRecord(new_id("batch_"), asked.input_id, asked.endpoint, self._model, output_id, error_id, asked.metadata)
        record.save(self.store.folder)
        self._records[record.id] = record
        for old in self.all()[MAX_KEPT:]:
            if old.has_ended:
                (self.store.folder / f"{old.id}.json").unlink(missing_ok=True)
                del self._records[old.id]
        self._news.set()
        return record

    def cancel(self, batch_id: str) -> BatchRecord:
        """End it now, with the answers it has; raises ApiError where it has ended."""
        record = self.get(batch_id)
        if record.has_ended or record.status == "finalizing":
            raise errors.batch_over(batch_id, record.status)
        if record.status != "cancelling":
            record.turn("cancelling")
            record.save(self.store.folder)
            if batch_id in self._works:
                self._works[batch_id].cancel()
            self._news.set()
        return record

    def check_unused(self, file_id: str) -> None:
        """Raise ApiError where a batch still needs a file."""
        for record in self._open:
            if file_id == record.input_id:
                raise errors.file_in_use(file_id, record.id)

    @property
    def _open(self) -> list[BatchRecord]:
        return [record for record in reversed(self.all()) if not record.has_ended]

    def _is_being_written(self, file_id: str) -> bool:
        return any(file_id in (record.output_id, record.error_id) for record in self._open)

    async def _run(self, service: Service) -> None:
        """Some beside each other, the oldest first; those to be cancelled at once, since nothing has to be ready for that."""
        try:
            while True:
                self._news.clear()
                waiting = [record for record in self._open if record.id not in self._running]
                ending = [record for record in waiting if record.status in ("cancelling", "finalizing")]
                others = [record for record in waiting if record not in ending][: max(0, MAX_TOGETHER - len(self._running))]
                for record in [*ending, *(others if service.is_ready else ())]:
                    self._running[record.id] = asyncio.create_task(self._run_one(record, service))
                await (self._news.wait() if service.is_ready or not others else self._ready_or_news(service))
        finally:  # the server stops
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _ready_or_news(self, service: Service) -> None:
        tasks = [asyncio.ensure_future(service.wait_open()), asyncio.ensure_future(self._news.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_one(self, record: BatchRecord, service: Service) -> None:
        """Run it; what goes wrong ends this batch and nothing else."""
        run = BatchRun(record, self.store, service, self._config, self._model, self._window)
        work = self._works[record.id] = asyncio.create_task(run.run())
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:  # the server stops
            work.cancel()
            await asyncio.wait([work])
            raise
        finally:
            del self._running[record.id], self._works[record.id]
            self._news.set()
        if work.cancelled():  # by `cancel`
            self._finish(run)
        elif (error := work.exception()) is not None and not record.has_ended and service.is_admitting:
            self._fail(run, error)

    def _fail(self, run: BatchRun, error: BaseException) -> None:
        """What ended a batch, as far as its client should know; an engine that is not there now ends none."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ApiError) and error.status == 503:
            return
        reason = str(error) if isinstance(error, ApiError) else "something went wrong in the server; its log has more"
        code = error.code if isinstance(error, ApiError) else "internal_error"
        told = str(error) if isinstance(error, JaxkvError) else type(error).__name__
        logger.error(Event("failed", {"batch": run.record.id, "reason": told}))
        run.record.add_error(code, reason)
        self._finish(run)

    def _finish(self, run: BatchRun) -> None:
        """The end of one that did not come to it by itself; where not even that can be written down, it is tried at the next start."""
        try:
            run.finish()
        except Exception as error:
            logger.error(Event("failed", {"batch": run.record.id, "reason": f"its end cannot be written down: {type(error).__name__}"}))
            run.record.turn("failed")
