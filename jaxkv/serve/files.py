"""Files of clients and of batches: one folder, names of our own, a quota. Knows no route, and nothing of what is in them.

A file is ID.content with its facts in ID.json beside it; what has no facts is not there yet, or is being written by a batch. No name on
disk comes from a client, and a client's id is only ever looked up among those that are known.
"""

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from jaxkv.batch.write import write_whole
from jaxkv.errors import ConfigError
from jaxkv.serve import errors

MIB = 2**20
MAX_FILES = 10_000
_CONTENT = re.compile(r"(file-[0-9a-f]{24})\.content(\.part)?")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is known of a file. `filename` is what its client calls it."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created: int

    def to_json(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created,
            "expires_at": None,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files of one folder, which is this server's alone while it is open."""

    def __init__(self, folder: Path, quota_mib: int) -> None:
        self.folder, self._quota_mib = folder, quota_mib
        self._num_reserved = 0  # bytes that are on their way
        self._lock: int | None = lock_folder(folder)
        self._files = {file.id: file for file in read_records(folder, "file-", self._read)}

    def close(self) -> None:
        """Let others have the folder; a second time does nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def all(self) -> list[StoredFile]:
        """All, the oldest first."""
        return sorted(self._files.values(), key=lambda file: (file.created, file.id))

    def get(self, file_id: str) -> StoredFile:
        """One that is known; raises ApiError."""
        if file_id not in self._files:
            raise errors.no_file(file_id)
        return self._files[file_id]

    def content(self, file_id: str) -> Path:
        """Where the content of one of our ids lies, or will."""
        return self.folder / f"{file_id}.content"

    @contextmanager
    def arriving(self, num_bytes: int) -> Generator[tuple[str, Path]]:
        """Room for a file that comes: its id, and where to write it until `add`. What was not added is gone afterwards."""
        self.check_room(num_bytes)
        file_id = new_id("file-")
        draft = self.content(file_id).with_suffix(".content.part")
        self._num_reserved += num_bytes
        try:
            yield file_id, draft
        finally:
            self._num_reserved -= num_bytes
            draft.unlink(missing_ok=True)

    def check_room(self, num_bytes: int) -> None:
        """Raise ApiError where so many more bytes do not fit."""
        if len(self._files) >= MAX_FILES:
            raise errors.files_full(f"there are {MAX_FILES} files, the most this server keeps")
        if self.num_bytes + self._num_reserved + num_bytes > self._quota_mib * MIB:
            raise errors.files_full(f"the files here may take {self._quota_mib} MiB together (server.files_quota_mib)")

    @property
    def num_bytes(self) -> int:
        """Bytes of all contents, those that batches are writing included."""
        with os.scandir(self.folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries if _CONTENT.fullmatch(entry.name))

    def add(self, file_id: str, filename: str, purpose: str) -> StoredFile:
        """Make a file known whose content, or its draft, is written."""
        path = self.content(file_id)
        with suppress(FileNotFoundError):
            os.replace(path.with_suffix(".content.part"), path)
        file = StoredFile(file_id, filename, purpose, path.stat().st_size, int(time.time()))
        write_whole(self.folder / f"{file_id}.json", json.dumps(asdict(file)))
        self._files[file_id] = file
        return file

    def delete(self, file_id: str) -> None:
        """Forget a file and what is in it."""
        self.get(file_id)
        for path in (self.folder / f"{file_id}.json", self.content(file_id)):
            path.unlink(missing_ok=True)
        del self._files[file_id]

    def sweep(self, is_kept: Callable[[str], bool]) -> None:
        """Remove contents that nobody knows: what a kill left behind."""
        for path in list(self.folder.iterdir()):
            found = _CONTENT.fullmatch(path.name)
            if found and (found[2] or (found[1] not in self._files and not is_kept(found[1]))):
                path.unlink()

    def _read(self, facts: dict[str, Any]) -> StoredFile:
        file = StoredFile(**facts)
        path = self.content(file.id)
        if path.is_symlink() or not path.is_file():
            raise ValueError("its content is gone")
        return file


def lock_folder(folder: Path) -> int:
    """Make a folder this process's own, for as long as what comes back is open; raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"server.files_dir: {folder} cannot be used: {error.strerror}; choose another folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"server.files_dir: {folder} is another server's; choose another folder") from None
    except OSError:
        pass  # a file system without locks
    return lock


def read_records(folder: Path, prefix: str, read: Callable[[dict[str, Any]], Found]) -> Iterable[Found]:
    """What the records in a folder say; one that says nothing sensible, or is a link, is left out."""
    for path in sorted(folder.glob(f"{prefix}*.json")):
        if not re.fullmatch(rf"{prefix}[0-9a-f]{{24}}", path.stem) or path.is_symlink():
            continue
        with suppress(OSError, ValueError, TypeError, KeyError):
            facts = json.loads(path.read_text(encoding="utf-8"))
            if facts["id"] == path.stem:
                yield read(facts)


def new_id(prefix: str) -> str:
    """One that nobody had before, and nobody guesses."""
    return prefix + secrets.token_hex(12)
