"""Finds the input files of a job and reads their lines, compressed or not. Knows nothing of what a line means.

The input is read twice, once for its SHA-256 and its number of lines, once for the work: what can be read only once (standard input, a
pipe) is first copied to a temporary file without a name.
"""

import glob
import gzip
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from jaxkv.errors import ConfigError

STDIN = "-"
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Source:
    """One input file. `copy` holds the bytes of one that could be read only once."""

    name: str
    path: Path | None
    copy: IO[bytes] | None = None


@dataclass(frozen=True, slots=True)
class InputFacts:
    """What identifies an input: SHA-256 over the SHA-256 of each file's content after decompression, in order. Blank lines are no lines."""

    sha256: str
    num_lines: int


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank: its place among all lines of the job, from 1, and where it stands, such as `in.jsonl:7`."""

    ordinal: int
    where: str
    data: bytes


def find_sources(inputs: Sequence[str], keep: ExitStack, stdin: BinaryIO | None = None) -> list[Source]:
    """The files that `inputs` (paths, globs, `-`) name, each once; raise ConfigError for one that is not there or cannot be read.

    Temporary copies last until `keep` is closed.
    """
    if not inputs:
        raise ConfigError("--input: got none, allowed: one or more files, globs or - for standard input")
    if list(inputs).count(STDIN) > 1:
        raise ConfigError("--input: got - more than once, but standard input can be read once")
    sources, seen = [], set()
    for text in inputs:
        if text == STDIN:
            sources.append(Source("<stdin>", None, _copy(stdin if stdin is not None else sys.stdin.buffer, keep)))
            continue
        for path in _matches(text):
            if (real := path.resolve()) not in seen:
                seen.add(real)
                sources.append(_checked(path, keep))
    return sources


def scan(sources: Iterable[Source]) -> InputFacts:
    """Read everything once."""
    total, num_lines = hashlib.sha256(), 0
    for source in sources:
        digest = hashlib.sha256()
        for line in _lines(source):
            digest.update(line)
            num_lines += not line.isspace()
        total.update(digest.digest())
    return InputFacts(total.hexdigest(), num_lines)


def read_lines(sources: Iterable[Source]) -> Iterator[RawLine]:
    """The lines of all files in order, one at a time."""
    ordinal = 0
    for source in sources:
        for number, line in enumerate(_lines(source), start=1):
            if not line.isspace():
                ordinal += 1
                yield RawLine(ordinal, f"{source.name}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _matches(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.exists():
        return [path]
    if not glob.has_magic(text):
        raise ConfigError(f"--input {text}: there is no such file")
    found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
    if not found:
        raise ConfigError(f"--input {text}: no file matches")
    return found


def _checked(path: Path, keep: ExitStack) -> Source:
    if path.is_dir():
        raise ConfigError(f"--input {path}: is a folder; name files, such as {path}/*.jsonl")
    try:
        with path.open("rb") as file:
            copy = None if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else _copy(file, keep)
    except OSError as error:
        raise ConfigError(f"--input {path}: cannot be read: {error.strerror}") from error
    return Source(str(path), path, copy)


def _copy(file: BinaryIO | IO[bytes], keep: ExitStack) -> IO[bytes]:
    copy = keep.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - keep closes it
    shutil.copyfileobj(file, copy)
    copy.flush()
    return copy


def _lines(source: Source) -> Iterator[bytes]:
    """Lines with their ends, from the beginning."""
    file = _reopened(source)
    with file:
        is_gzip = file.read(2) == _GZIP_MAGIC
        file.seek(0)
        try:
            yield from gzip.GzipFile(fileobj=file) if is_gzip else file
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ConfigError(f"--input {source.name}: is a broken gzip file: {error}") from error
        except OSError as error:
            raise ConfigError(f"--input {source.name}: cannot be read: {error.strerror}") from error


def _reopened(source: Source) -> BinaryIO:
    if source.copy is not None:
        file = os.fdopen(os.dup(source.copy.fileno()), "rb")
        file.seek(0)
        return file
    assert source.path is not None
    try:
        return source.path.open("rb")
    except OSError as error:
        raise ConfigError(f"--input {source.name}: cannot be read: {error.strerror}") from error
