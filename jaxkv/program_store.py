"""Compiled programs on disk, so that a later start neither traces nor compiles. Knows how programs are kept, not what they compute.

Three kinds of files in one folder. `KEY.made-of` has for a name what a program is made of (`program_key`), and tells what it compiles to:
`NAME.program`, which has for a name the lowered program itself. So a change of our sources that changes no program costs tracing once, and
compiles nothing. `KIND.used` lists what the last start of its kind used: the next one loads that while it reads weights. Files appear
whole or not at all; one that is damaged, or that JAX cannot read, is made again.

Like JAX's own cache, the folder holds machine code that is run: it must be as trustworthy as the installation.
"""

import contextlib
import hashlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from jaxkv.program_key import Unknown, digest, machine_facts, source_facts, tell

logger = logging.getLogger("jaxkv")
FORMAT = "1"
_MAGIC = b"jaxkv program 1\n"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program that can be called, with what XLA says of it."""

    run: Callable[..., Any]
    temp_bytes: int
    flops: float


class ProgramStore:
    """Keeps the programs of one mesh in a folder. `facts` and `sources` are what every one of them depends on."""

    def __init__(self, folder: Path, mesh: Mesh, facts: str, sources: str) -> None:
        self.folder, self._devices = folder, list(mesh.devices.flat)
        self._facts, self._sources = facts, sources
        self._ahead: dict[str, Future[Compiled | None]] = {}
        self._used: dict[str, None] = {}  # names in the order of use

    def load_ahead(self, kind: str) -> None:
        """Begin to load what the last start of this kind used, on a thread of its own. Only time depends on it: `build` takes programs by
        what they are, and loads those that it misses itself."""
        loader = ThreadPoolExecutor(1, "jaxkv-programs")
        self._ahead = {name: loader.submit(self._read, name) for name in self._read_names(self._file_of(kind))}
        loader.shutdown(wait=False)

    def note_used(self, kind: str) -> None:
        """Tell the next start of this kind what this one used."""
        self._ahead.clear()
        if self._read_names(self._file_of(kind)) != list(self._used):
            self._write(self._file_of(kind), "\n".join(self._used).encode())

    def build(self, recipe: Any, lower: Callable[[], Any], options: str) -> Compiled:
        """The program of a recipe: as it was kept, else lowered, and compiled if the same was never compiled here with these options."""
        made_of = self._made_of(recipe, options)
        names = [] if made_of is None else self._read_names(f"{made_of}.made-of")
        if len(names) == 1 and (found := self._load(names[0])) is not None:
            return found
        lowered = lower()
        name = digest(FORMAT, self._facts, options, str(lowered.in_tree), str(lowered.out_tree), lowered.as_text())
        found = self._load(name)
        if found is None:
            with past_jax_cache():
                compiled = lowered.compile()
            found = examined(compiled)
            self._save(name, compiled, found)
            self._used[name] = None
        if made_of is not None:
            self._write(f"{made_of}.made-of", name.encode())
        return found

    def _made_of(self, recipe: Any, options: str) -> str | None:
        try:
            precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # set for this thread only
            return digest(FORMAT, self._facts, self._sources, options, repr(precision), tell(recipe))
        except Unknown as error:
            logger.debug("a program is traced at every start, since it is made of %s", error)
            return None

    def _file_of(self, kind: str) -> str:
        return f"{digest(FORMAT, self._facts, self._sources, kind)}.used"

    def _read_names(self, file: str) -> list[str]:
        """The names of programs in a file; none where there is no file, or anything else in it."""
        try:
            names = (self.folder / file).read_bytes().decode("ascii").split("\n")
        except (OSError, UnicodeDecodeError):
            return []
        return names if all(len(name) == 64 and name.isalnum() for name in names) else []

    def _load(self, name: str) -> Compiled | None:
        """A kept program, perhaps loaded ahead; None where there is none, or none that is whole and that JAX can read."""
        ahead = self._ahead.pop(name, None)
        found = self._read(name) if ahead is None else ahead.result()
        if found is not None:
            self._used[name] = None
        return found

    def _read(self, name: str) -> Compiled | None:
        try:
            data = (self.folder / f"{name}.program").read_bytes()
        except OSError:
            return None
        content = data[len(sealed(b"")) :]
        try:
            if data != sealed(content):
                raise ValueError("it is damaged")
            payload, in_tree, out_tree, temp_bytes, flops = pickle.loads(content)
            run = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, backend=self._devices[0].client, execution_devices=self._devices
            )
        except Exception as error:  # whatever is wrong with it: the program can be made again
            logger.info("%s.program cannot be used and is made again: %s", name, error)
            return None
        return Compiled(run, temp_bytes, flops)

    def _save(self, name: str, compiled: Any, found: Compiled) -> None:
        try:
            payload, in_tree, out_tree = serialize_executable.serialize(compiled)
            data = pickle.dumps((payload, in_tree, out_tree, found.temp_bytes, found.flops))
        except Exception as error:  # JAX raises many kinds where a program cannot be kept
            logger.info("a program cannot be kept: %s", error)
            return
        self._write(f"{name}.program", sealed(data))

    def _write(self, name: str, data: bytes) -> None:
        """Whole or not at all; a folder that cannot be written costs the next start time, and nothing else."""
        draft = self.folder / f"{name}.{os.getpid()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(data)
            os.replace(draft, self.folder / name)
        except OSError as error:
            logger.info("%s cannot be written: %s", self.folder / name, error)
            with contextlib.suppress(OSError):
                draft.unlink()


def sealed(data: bytes) -> bytes:
    """A file's content: its format, the SHA-256 of what follows, and that."""
    return _MAGIC + hashlib.sha256(data).digest() + data


def open_store(mesh: Mesh) -> ProgramStore | None:
    """A store beside JAX's own cache; None where that is off, or where nothing was measured yet: other than one CPU device."""
    folder, device = jax.config.values["jax_compilation_cache_dir"], mesh.devices.flat[0]
    is_local = folder is not None and "://" not in folder
    if not is_local or not jax.config.values["jax_enable_compilation_cache"] or (device.platform, mesh.size) != ("cpu", 1):
        return None
    try:
        return ProgramStore(Path(folder) / "programs", mesh, machine_facts(mesh), source_facts())
    except Unknown as error:
        logger.debug("compiled programs are not kept: %s", error)
        return None


def examined(compiled: Any) -> Compiled:
    """A program of JAX's with what XLA says of it."""
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return Compiled(compiled, memory.temp_size_in_bytes if memory else 0, (cost or {}).get("flops", 0.0))


@contextlib.contextmanager
def past_jax_cache() -> Iterator[None]:
    """Really compile. What JAX takes out of its own cache cannot be serialised again: run after that, a function of it is not found."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # else JAX remembers that it is on
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
