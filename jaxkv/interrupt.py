"""Ctrl-C that cannot get lost: a handler that remembers it, and the question asked where the work can stop. Knows no command.

Python drops a KeyboardInterrupt that is raised inside a callback (JAX's own at garbage collection, a finaliser, one out of XLA), so raising
it is not enough: it is remembered too, and raised again at the next `check_interrupt`.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_INTERRUPTED = 130
SHOW_CURSOR = "\x1b[?25h"  # live views hide it


class CtrlC:
    """While open, the first SIGINT is raised as KeyboardInterrupt and remembered; a second one ends the process at once."""

    def __init__(self) -> None:
        self.is_noted = False
        self._before: Any = None
        self._told: Callable[[Any], Any] = sys.unraisablehook

    def check(self) -> None:
        """Raise the interrupt that was remembered, if there is one: wherever it was raised first, the work is still going on."""
        if self.is_noted:
            raise KeyboardInterrupt

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.is_noted:
            end_at_once()
        self.is_noted = True
        signal.signal(signum, self.handle)  # stays for the second one, which `_kill_next` let go to the system
        raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            return self  # a background job, which a Ctrl-C is not meant for
        try:
            self._before = signal.signal(signal.SIGINT, self.handle)
        except ValueError:
            return self  # not the main thread: signals are somebody else's affair
        _kill_next()
        self._told, sys.unraisablehook = sys.unraisablehook, self._hear
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            sys.unraisablehook = self._told
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, dropped: Any) -> None:
        """Python tells what it drops; of an interrupt that is remembered nothing need be told."""
        if not (self.is_noted and dropped.exc_type is KeyboardInterrupt):
            self._told(dropped)


def check_interrupt() -> None:
    """Stop here if the process was interrupted and the KeyboardInterrupt was dropped: between stages, compilations, tensors and steps.

    Who is asked stands in the process's own table of signal handlers. Without an open `CtrlC` nothing happens.
    """
    if has_interrupt(signal.getsignal(signal.SIGINT)):
        raise KeyboardInterrupt


def has_interrupt(handler: Any) -> bool:
    """Whether this signal handler is that of a `CtrlC` that remembers one."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, CtrlC) and owner.is_noted


def end_at_once() -> None:
    """Leave without cleaning up."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
    os.write(2, b"jaxkv: interrupted twice\n")
    os._exit(EXIT_INTERRUPTED)


def _kill_next() -> None:
    """Let the system reset the handler when it is called, as System V did, where the C library can.

    Python's handler waits for Python code to run, and a compilation in XLA can take minutes. So a second Ctrl-C in there kills the process.
    """
    try:
        set_once = ctypes.CDLL(None).sysv_signal
    except (OSError, AttributeError):
        return
    set_once.restype, set_once.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    set_once(signal.SIGINT, set_once(signal.SIGINT, None))
