"""The output file of a job: whole lines only, one system call each, one writer at a time. Knows nothing of what a line means."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from jaxkv.errors import ConfigError, JaxkvError


class OutputFile:
    """A file to which finished lines are appended, locked against a second job for as long as it is open.

    A line is out of our hands once `append` returns: killing the process loses none. A kill in the middle of one leaves a torn last line
    (no newline), which `lines` leaves out and `cut_torn_line` removes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = self._open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise ConfigError(f"--output {path}: must be a regular file, since a job that goes on reads it again")
        self._lock(self._fd)

    @property
    def is_empty(self) -> bool:
        """Whether there is not a byte."""
        return self.path.stat().st_size == 0

    def lines(self) -> Iterator[bytes]:
        """The whole lines there are."""
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line

    def cut_torn_line(self) -> int:
        """Remove what stands after the last newline; the number of bytes removed."""
        end = self.path.stat().st_size
        whole = sum(map(len, self.lines()))
        if whole < end:
            os.ftruncate(self._fd, whole)
        return end - whole

    def append(self, line: bytes) -> None:
        """Write one whole line."""
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise JaxkvError(
                f"cannot write {self.path}: {error.strerror}; finished lines are kept, the same command goes on from there"
            ) from error

    def keep_only(self, is_kept: Callable[[bytes], bool]) -> None:
        """Drop the other lines, at once or (when killed) not at all."""
        beside = self.path.with_name(self.path.name + ".tmp")
        fd = self._open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._lock(fd)
        old, self._fd = self._fd, fd
        for line in self.lines():
            if is_kept(line):
                self.append(line)
        os.fsync(fd)
        os.replace(beside, self.path)
        os.close(old)

    def close(self) -> None:
        """Close the file and let others have it."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def _open(path: Path, flags: int) -> int:
        try:
            return os.open(path, flags, 0o644)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"--output {self.path}: another job is writing it; wait for it or choose another file") from None
        except OSError:
            pass  # a file system without locks


def write_whole(path: Path, text: str) -> None:
    """Write a small file at once: the old content or the new, never half of it."""
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        raise JaxkvError(f"cannot write {path}: {error.strerror}") from error
