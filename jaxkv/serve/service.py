"""The engine's thread, and the way to it and back: the only file with threads.

One thread makes the engine and makes every call to it. The event loop sends it commands through a queue and never waits for JAX; what a
step brought comes back in one `call_soon_threadsafe`, into the inboxes of its sequences. A second thread reads bodies (templates and
tokenizers), so that a long prompt holds up nobody's tokens. Everything but `_run` and what it calls belongs to the event loop.

A server that sleeps has no engine: the thread closes it, forgets it, and makes another one to wake up.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxkv.errors import JaxkvError
from jaxkv.memory import give_back_memory
from jaxkv.observe.events import Event
from jaxkv.request import SamplingParams
from jaxkv.serve import errors
from jaxkv.serve.crowd import Crowd
from jaxkv.serve.inbox import Inbox, News
from jaxkv.serve.interface import EngineFactory, ServeEngine
from jaxkv.serve.life import Command, Life, OnEngine, do_nothing
from jaxkv.serve.post import Post

Result = TypeVar("Result")
logger = logging.getLogger("jaxkv")


class Service:
    """An engine that an event loop can talk to.

    `make_engine(check)` is called in the engine's thread; `check()` raises when nobody wants the engine any more, for the pauses of its
    start. `on_step(engine)` is called there after each step, and `on_close(engine)` before an engine is closed, for figures.
    """

    def __init__(
        self,
        make_engine: EngineFactory,
        *,
        max_waiting: int = 256,
        on_step: OnEngine = do_nothing,
        on_close: OnEngine = do_nothing,
    ) -> None:
        self.engine: ServeEngine | None = None  # once it is ready; its sizes, tokenizer and fingerprint may be read from anywhere
        self.failure: BaseException | None = None
        self.is_admitting, self.was_ready, self.is_sleeping = True, False, False
        self.crowd = Crowd(max_waiting)
        self._make, self._on_step, self._on_close = make_engine, on_step, on_close
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._calls: set[asyncio.Future[Any]] = set()
        self._turning, self._turned = asyncio.Lock(), asyncio.Future[None]()
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(1, "jaxkv-read")
        self._is_stopping = self._is_resting = False
        self._thread = threading.Thread(target=self._run, name="jaxkv-engine", daemon=True)
        self._thread.start()

    # For the event loop

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self.engine is not None and self.failure is None and self.is_admitting and not self.is_sleeping

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row, as far as the event loop has heard."""
        return self.crowd.num_waiting

    @property
    def num_busy(self) -> int:
        """Sequences that have not ended."""
        return self.crowd.num_busy

    def check_open(self) -> ServeEngine:
        """The engine; raises the ApiError that says why there is none, or none for new requests."""
        if self.failure is not None:
            raise errors.broken()
        if not self.is_admitting:
            raise errors.stopping()
        if self.is_sleeping:
            raise errors.sleeping()
        if self.engine is None:
            raise errors.loading()
        return self.engine

    async def work(self, do: Callable[[], Result]) -> Result:
        """Run something slow that is not JAX beside the event loop."""
        return await self._loop.run_in_executor(self._readers, do)

    async def call(self, do: Callable[[ServeEngine], Result], *, to_look: bool = False) -> Result:
        """Run something in the engine's thread, between two steps; where it is `to_look`, also while the server drains."""
        is_draining = to_look and self.engine is not None and self.failure is None and not self._is_stopping
        if not is_draining:
            self.check_open()
        return await self._command(lambda post: do(post.engine))

    async def _command(self, do: Callable[[Post], Result]) -> Result:
        future = self._loop.create_future()
        self._calls.add(future)

        def command(post: Post) -> None:
            try:
                self._tell(_resolve, future, do(post), None)
            except Exception as error:
                self._tell(_resolve, future, None, error)

        self._commands.put(command)
        try:
            return await future
        finally:
            self._calls.discard(future)

    async def submit(self, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str) -> list[Inbox]:
        """Take a request, all of its sequences or none: the choices of the first prompt, those of the second, and so on.

        Raises RequestError for one that can never be served, ApiError for one too many. Grammars are compiled beside the engine's thread.
        """
        engine = self.check_open()
        if params.constraint is not None or params.bad_words:
            await self.work(lambda: engine.prepare(params))
            self.check_open()
        inboxes = self.crowd.admit(len(prompts) * params.n)
        try:
            await self._command(lambda post: post.submit(inboxes, prompts, params, name))
        except asyncio.CancelledError:
            self.cancel(inboxes)  # the engine's thread may have them, or will before it hears of this
            raise
        return inboxes

    def cancel(self, inboxes: Iterable[Inbox]) -> None:
        """End what has not ended, whatever it is doing."""
        going = [inbox for inbox in inboxes if inbox.completion is None]
        if going:
            self._commands.put(lambda post: post.cancel(going))

    def why_cancelled(self) -> errors.ApiError:
        """Why a sequence ended that its client did not end."""
        if self.failure is not None:
            return errors.broken()
        if not self.is_admitting:
            return errors.stopping()
        return errors.sleeping() if self.is_sleeping else errors.cancelled()

    async def wait_ready(self) -> None:
        """Until the engine is there; raises what kept it from starting."""
        while self.engine is None and self.failure is None:
            await self._change()
        if self.failure is not None:
            raise self.failure

    async def wait_open(self) -> None:
        """Until requests are served, which may be never."""
        while not self.is_ready:
            await self._change()

    async def wait_broken(self) -> BaseException:
        """Until the engine breaks, if it ever does."""
        while self.failure is None:
            await self._change()
        return self.failure

    async def drain(self, seconds: float) -> bool:
        """Admit nobody any more, and wait so long for those that run; whether all of them ended."""
        self.is_admitting = False
        return await self._settle(seconds)

    async def sleep(self, seconds: float) -> None:
        """Admit nobody, wait so long for those that run, end the others, and free all that the engine has; nothing if it sleeps."""
        async with self._turning:
            if self.is_sleeping:
                return
            self.check_open()
            self.is_sleeping = True
            await self._settle(seconds)
            self.engine = None
            await self._turn(self._lie_down)

    async def wake(self) -> None:
        """Make an engine again; raises what keeps it from starting, and then sleeps on. Nothing if it does not sleep."""
        async with self._turning:
            if not self.is_sleeping:
                return
            self.is_sleeping = False
            try:
                await self._turn(self._get_up)
            except JaxkvError as error:
                self.is_sleeping = True
                logger.error(Event("failed", {"reason": f"the server could not wake: {error}"}))
                raise errors.not_awake() from None

    async def wait_rest(self) -> bool:
        """Whether there is no engine because the server sleeps or wakes up; where one is just being closed, until that is done."""
        if self.is_sleeping and self.engine is None and not self._turned.done():
            await asyncio.wait({self._turned})
        return self.was_ready and self.engine is None and self.failure is None and not self._is_stopping

    async def _turn(self, how: Command) -> None:
        """Until the engine's thread has lain down or got up; raises ApiError where it is over."""
        if self.failure is not None or self._is_stopping:
            raise errors.broken() if self.failure is not None else errors.stopping()
        self._turned = self._loop.create_future()
        self._calls.add(self._turned)
        self._commands.put(how)
        try:
            await self._turned
        finally:
            self._calls.discard(self._turned)

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

    async def _settle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self.num_busy and self.failure is None:
                    await self._change()
        except TimeoutError:
            return False
        return True

    async def _change(self) -> None:
        self.crowd.changed.clear()
        await self.crowd.changed.wait()

    # For the engine's thread

    def _tell(self, do: Callable[..., None], *args: Any) -> None:
        """Have the event loop do something, if there still is one."""
        try:
            self._loop.call_soon_threadsafe(do, *args)
        except RuntimeError:
            self._is_stopping = True

    def _run(self) -> None:
        try:
            self._live()
            while not self._is_stopping:
                self._rest()
                self._live_again()
        except BaseException as error:
            self._tell(self._break, error)
        finally:
            self._tell(self._end)

    def _live(self) -> None:
        """One engine, from its start until the server stops or sleeps; raises what keeps it from starting."""
        post = Post(self._make(self._check_wanted), lambda news: self._tell(self._deliver, news))
        life = Life(post, self._commands, self._on_step, self._on_close)
        self._tell(self._start, post.engine)
        try:
            while not self._is_stopping and not self._is_resting:
                life.take_turn(lambda: not self._is_stopping)
        except BaseException as error:
            self._is_stopping = True
            self._tell(self._break, error)  # before those that wait hear that they have ended
        finally:
            life.close()

    def _rest(self) -> None:
        """Without an engine, until it is wanted again; whoever asks for something else meanwhile was told that the server sleeps."""
        give_back_memory()
        self._tell(self._turn_over, None)
        while self._is_resting and not self._is_stopping:
            if self._commands.get() == self._get_up:
                self._is_resting = False

    def _live_again(self) -> None:
        if self._is_stopping:
            return
        try:
            self._live()
        except Exception as error:
            self._is_resting = True
            self._tell(self._turn_over, JaxkvError(str(error) or type(error).__name__))

    def _lie_down(self, post: Post) -> None:
        self._is_resting = True

    def _get_up(self, post: Post) -> None:
        """Where it was not even closed yet: whoever asked for sleep is gone."""
        self._is_resting = False
        self._tell(self._start, post.engine)

    def _check_wanted(self) -> None:
        if self._is_stopping:
            raise JaxkvError("the server was stopped while it started")

    # What the engine's thread tells the event loop

    def _start(self, engine: ServeEngine) -> None:
        self.engine, self.was_ready = engine, True
        self._turn_over(None)

    def _turn_over(self, error: Exception | None) -> None:
        _resolve(self._turned, None, error)
        self.crowd.changed.set()

    def _deliver(self, news: list[News]) -> None:
        self.crowd.deliver(news)

    def _break(self, error: BaseException) -> None:
        self.failure = error
        self.crowd.changed.set()

    def _end(self) -> None:
        """The thread is over; what it did not come to will never be done."""
        self.is_admitting = False
        for future in self._calls:
            _resolve(future, None, errors.broken() if self.failure is not None else errors.stopping())


def _resolve(future: "asyncio.Future[Any]", result: Any, error: Exception | None) -> None:
    """Hand a result to whoever still waits for it."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
