"""One engine's life: turn after turn of commands, a step, the post. Called in the engine's thread; starts none and ends none."""

import logging
import queue
from collections.abc import Callable
from typing import Any

from jaxkv.observe.events import Event
from jaxkv.serve.interface import ServeEngine
from jaxkv.serve.post import Post

Command = Callable[[Post], None]
OnEngine = Callable[[Any], None]
logger = logging.getLogger("jaxkv")
_STALL_S = 0.005  # how long a turn waits for a command when a step had nothing to do


def do_nothing(engine: Any) -> None:
    """For whoever wants to know nothing."""


class Life:
    """`commands` are what others want done between two steps; None only ends the waiting for one."""

    def __init__(self, post: Post, commands: "queue.SimpleQueue[Command | None]", on_step: OnEngine, on_close: OnEngine) -> None:
        self._post, self._commands = post, commands
        self._on_step, self._on_close = on_step, on_close
        self._has_stumbled = False

    def take_turn(self, is_wanted: Callable[[], bool]) -> None:
        """Commands, then a step where one is still wanted, then the post."""
        post = self._post
        self._do_commands()
        if not post.engine.is_idle and is_wanted():
            self._step(post.engine)
            self._on_step(post.engine)
        post.look()
        post.send()

    def close(self) -> None:
        """Give everything back, and tell those that still waited."""
        for end in (self._on_close, lambda engine: engine.close()):
            try:
                end(self._post.engine)
            except Exception as error:
                logger.error(Event("failed", {"reason": f"the engine could not be closed: {type(error).__name__}"}))
        self._post.close()

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

    def _do_commands(self) -> None:
        """What was asked for; waits for the first for ever when idle, a little when nothing moves but by a copy or by time."""
        wait_s: float | None = None if self._post.engine.is_idle else _STALL_S if self._post.is_still else 0.0
        while True:
            try:
                command = self._commands.get(wait_s != 0, wait_s)
            except queue.Empty:
                return
            if command is not None:
                command(self._post)
            wait_s = 0.0
