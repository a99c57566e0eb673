"""The engine's thread, and the way to it and back: the only file with threads.

One thread makes the engine and makes every call to it. The event loop sends it commands through a queue and never waits for JAX; what a
step brought comes back in one `call_soon_threadsafe`, into the inboxes of its sequences. A second thread reads bodies (templates and
tokenizers), so that a long prompt holds up nobody's tokens. Everything but `_run` and what it calls belongs to the event loop.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxkv.errors import JaxkvError, RequestError
from jaxkv.observe.events import Event
from jaxkv.request import Completion, SamplingParams
from jaxkv.serve import errors
from jaxkv.serve.inbox import WAITING, Delta, Inbox, News
from jaxkv.serve.interface import EngineFactory, ServeEngine, ServeHandle

Result = TypeVar("Result")
logger = logging.getLogger("jaxkv")
_STALL_S = 0.005  # how long the engine's thread sleeps when a step had nothing to do
_STILL = frozenset({"parked", WAITING})
_MAX_RETRY_AFTER_S = 60


@dataclass(slots=True)
class _Running:
    """A sequence as the engine's thread follows it."""

    inbox: Inbox
    handle: ServeHandle
    num_logprobs: int = 0  # given away
    state: str = WAITING


class Service:
    """An engine that an event loop can talk to.

    `make_engine(check)` is called in the engine's thread; `check()` raises when nobody wants the engine any more, for the pauses of its
    start.
    `on_step(engine)` is called in the engine's thread after each step, for figures.
    """

    def __init__(self, make_engine: EngineFactory, *, max_waiting: int = 256, on_step: Callable[[Any], None] | None = None) -> None:
        self.engine: ServeEngine | None = None  # once it is ready; its sizes, tokenizer and fingerprint may be read from anywhere
        self.failure: BaseException | None = None
        self.is_admitting = True
        self.num_busy = 0  # sequences that have not ended
        self.max_waiting = max_waiting
        self._make, self._on_step = make_engine, on_step
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: set[Inbox] = set()
        self._ends: deque[float] = deque(maxlen=32)
        self._changed = asyncio.Event()
        self._calls: set[asyncio.Future[Any]] = set()
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(1, "jaxkv-read")
        self._running: dict[int, _Running] = {}  # the engine thread's
        self._news: list[News] = []  # the engine thread's
        self._is_stopping = self._has_stumbled = False
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
        self._thread.start()

    # For the event loop

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.engine is not None and self.failure is None and self.is_admitting

    @property
    def was_ready(self) -> bool:
        """Whether the engine ever was there."""
        return self.engine is not None

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, as far as the event loop has heard."""
        return len(self._waiting)

    def check_open(self) -> ServeEngine:
        """The engine; raises the ApiError that says why there is none, or none for new requests."""
        if self.failure is not None:
            raise errors.broken()
        if not self.is_admitting:
            raise errors.stopping()
        if self.engine is None:
            raise errors.loading()
        return self.engine

    async def work(self, do: Callable[[], Result]) -> Result:
        """Run something slow that is not JAX beside the event loop."""
        return await self._loop.run_in_executor(self._readers, do)

    async def call(self, do: Callable[[ServeEngine], Result], *, to_look: bool = False) -> Result:
        """Run something in the engine's thread, between two steps; where it is `to_look`, also while the server drains."""
        is_draining = to_look and self.engine is not None and self.failure is None and not self._is_stopping
        engine = self.engine if is_draining and self.engine is not None else self.check_open()
        future = self._loop.create_future()
        self._calls.add(future)

        def command() -> None:
            try:
                self._tell(_resolve, future, do(engine), None)
            except Exception as error:
                self._tell(_resolve, future, None, error)

        self._commands.put(command)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str) -> list[Inbox]:
        """Take a request, all of its sequences or none: the choices of the first prompt, those of the second, and so on.

        Raises RequestError for one that can never be served, ApiError for one too many.
        """
        self.check_open()
        wake, num = asyncio.Event(), len(prompts) * params.n
        if num > self.max_waiting:
            raise RequestError(
                f"the request asks for {num} sequences (prompts times n), allowed: {self.max_waiting} (server.max_waiting)", "n"
            )
        if self.num_waiting + num > self.max_waiting:
            raise errors.queue_full(self.num_waiting, self.max_waiting, self.retry_after_s())
        inboxes = [Inbox(wake) for _ in range(num)]
        self._waiting.update(inboxes)
        self.num_busy += len(inboxes)
        try:
            await self.call(lambda engine: self._submit(engine, inboxes, prompts, params, name))
        except asyncio.CancelledError:
            self.cancel(inboxes)  # the engine's thread may have them, or will before it hears of this
            raise
        return inboxes

    def cancel(self, inboxes: Iterable[Inbox]) -> None:
        """End what has not ended, whatever it is doing."""
        going = [inbox for inbox in inboxes if inbox.completion is None]
        if going:
            self._commands.put(lambda: self._cancel(going))

    def why_cancelled(self) -> errors.ApiError:
        """Why a sequence ended that its client did not end."""
        if self.failure is not None:
            return errors.broken()
        return errors.cancelled() if self.is_admitting else errors.stopping()

    def retry_after_s(self) -> int:
        """Seconds until a place in the line is likely to be free: the mean time between two ends of late."""
        if len(self._ends) < 2:
            return 1
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil((self._ends[-1] - self._ends[0]) / (len(self._ends) - 1))))

    async def wait_ready(self) -> None:
        """Until the engine is there; raises what kept it from starting."""
        while self.engine is None and self.failure is None:
            await self._change()
        if self.failure is not None:
            raise self.failure

    async def wait_broken(self) -> BaseException:
        """Until the engine breaks, if it ever does."""
        while self.failure is None:
            await self._change()
        return self.failure

    async def drain(self, seconds: float) -> bool:
        """Admit nobody any more, and wait so long for those that run; whether all of them ended."""
        self.is_admitting = False
        try:
            async with asyncio.timeout(seconds):
                while self.num_busy and self.failure is None:
                    await self._change()
        except TimeoutError:
            return False
        return True

    async def close(self, seconds: float) -> bool:
        """End everything; whether the engine's thread ended within that time (a compilation cannot be interrupted)."""
        self.is_admitting, self._is_stopping = False, True
        self._commands.put(None)
        self._readers.shutdown(wait=False, cancel_futures=True)
        try:
            async with asyncio.timeout(seconds):
                while self._thread.is_alive():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return False
        return True

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _forget(self, inboxes: Iterable[Inbox]) -> None:
        for inbox in inboxes:
            self._waiting.discard(inbox)
            self.num_busy -= 1
        self._changed.set()

    def _deliver(self, news: list[News]) -> None:
        for item in news:
            had_ended = item.inbox.completion is not None
            item.deliver()
            if item.inbox.state != WAITING:
                self._waiting.discard(item.inbox)
            if item.inbox.completion is not None and not had_ended:
                self._ends.append(time.monotonic())
                self._forget([item.inbox])

    # For the engine's thread

    def _tell(self, do: Callable[..., None], *args: Any) -> None:
        """Have the event loop do something, if there still is one."""
        try:
            self._loop.call_soon_threadsafe(do, *args)
        except RuntimeError:
            self._is_stopping = True

    def _run(self) -> None:
        engine: ServeEngine | None = None
        try:
            engine = self._make(self._check_wanted)
            self._tell(self._start, engine)
            while not self._is_stopping:
                self._take_turn(engine)
        except BaseException as error:
            self._tell(self._break, error)
        finally:
            if engine is not None:
                self._close(engine)
            self._tell(self._end)

    def _check_wanted(self) -> None:
        if self._is_stopping:
            raise JaxkvError("the server was stopped while it started")

    def _start(self, engine: ServeEngine) -> None:
        self.engine = engine
        self._changed.set()

    def _break(self, error: BaseException) -> None:
        self.failure = error
        self._changed.set()

    def _end(self) -> None:
        """The thread is over; what it did not come to will never be done."""
        self.is_admitting = False
        for future in self._calls:
            _resolve(future, None, errors.broken() if self.failure is not None else errors.stopping())

    def _take_turn(self, engine: ServeEngine) -> None:
        """Commands, then a step, then the post."""
        self._do_commands(self._patience_s(engine))
        if not engine.is_idle and not self._is_stopping:
            self._step(engine)
            if self._on_step is not None:
                self._on_step(engine)
        self._look()
        self._send()

    def _step(self, engine: ServeEngine) -> None:
        """A step that breaks off is made good by the engine, or by nobody: then the next one raises too, and that is the end."""
        try:
            engine.step()
        except Exception as error:
            if self._has_stumbled:
                raise
            self._has_stumbled = True
            logger.error(Event("failed", {"reason": f"a step broke off: {type(error).__name__}"}))
        else:
            self._has_stumbled = False

    def _patience_s(self, engine: ServeEngine) -> float | None:
        """How long a turn waits for the first command: for ever when idle, a little when nothing moves but by a copy or by time."""
        if engine.is_idle:
            return None
        return _STALL_S if all(running.state in _STILL for running in self._running.values()) else 0.0

    def _do_commands(self, wait_s: float | None) -> None:
        while True:
            try:
                command = self._commands.get(wait_s != 0, wait_s)
            except queue.Empty:
                return
            if command is not None:
                command()
            wait_s = 0.0

    def _submit(
        self, engine: ServeEngine, inboxes: list[Inbox], prompts: Sequence[Sequence[int]], params: SamplingParams, name: str
    ) -> None:
        handles: list[ServeHandle] = []
        try:
            for prompt in prompts:
                handles.extend(engine.submit_group(prompt, params, on_token=self._on_token, name=name).choices)
        except Exception:
            for handle in handles:
                handle.cancel()
            self._tell(self._forget, inboxes)
            raise
        for inbox, handle in zip(inboxes, handles, strict=True):
            inbox.seq_id, inbox.truncates_at = handle.seq_id, handle.will_truncate_at
            self._running[handle.seq_id] = _Running(inbox, handle)

    def _cancel(self, inboxes: list[Inbox]) -> None:
        for inbox in inboxes:
            running = None if inbox.seq_id is None else self._running.get(inbox.seq_id)
            if running is not None:
                running.handle.cancel()
                self._tell_end(running)

    def _on_token(self, handle: Any, token_id: int) -> None:
        """A token was accepted: what of the answer is certain now goes into the post."""
        running, engine = self._running.get(handle.seq_id), self.engine
        if running is None or engine is None:
            return
        output = engine.live(handle.seq_id).output
        logprobs = [] if output.logprobs is None else output.logprobs[running.num_logprobs :]
        running.num_logprobs += len(logprobs)
        self._news.append(News(running.inbox, Delta(output.take_delta(), [token_id], logprobs)))

    def _look(self) -> None:
        """Who has ended, or is in another state than before."""
        for running in list(self._running.values()):
            if running.handle.completion is not None:
                self._tell_end(running)
            elif (state := running.handle.stats.state) != running.state:
                running.state = state
                self._news.append(News(running.inbox, state=state))

    def _tell_end(self, running: _Running) -> None:
        if self._running.pop(running.handle.seq_id, None) is not None:
            completion = running.handle.completion or Completion([], "", "cancelled", 0, 0)  # none where the engine broke
            self._news.append(News(running.inbox, state="ended", completion=completion))

    def _send(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._tell(self._deliver, news)

    def _close(self, engine: ServeEngine) -> None:
        """Give everything back, and tell those that still waited."""
        try:
            engine.close()
        except Exception as error:
            logger.error(Event("failed", {"reason": f"the engine could not be closed: {type(error).__name__}"}))
        for running in list(self._running.values()):
            self._tell_end(running)
        self._send()


def _resolve(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    """Hand a result to whoever still waits for it."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
