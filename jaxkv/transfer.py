"""Images: moving pages and states between the pool and host memory, chunk by chunk, while the engine goes on. The only place with memory
kinds.

Three ways. *staged*: a park is a gather (pages out of the pool into staging) and an asynchronous `device_put` to pinned host memory, a
restore the mirror. *direct*, where the device's memory is the host's: the gather writes to host memory itself, into what an image that is
gone has left, and the scatter reads from there, so there is one pass each way. In both XLA orders the gather before the next donated step,
so pages are free as soon as it is dispatched; only arriving in host memory needs waiting for, and that is a poll with `is_ready()`. *hold*:
the gather writes to host memory, and pages are free when it is done. Images are opaque here: never indexed, never computed on.

What lies in host memory is known by number. Who needs it, and when it may go, the scheduler says.

Knows nothing of requests or rows: chunks come in, chunks that arrived go out.
"""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxkv.cargo import Cargo, PageCargo, StateCargo
from jaxkv.pool import PoolArrays, PoolHolder, PoolLayout, pool_sharding, state_shardings
from jaxkv.scheduler import Chunk

HOST_KIND = "pinned_host"


def host_sharding(device_sharding: NamedSharding) -> NamedSharding:
    """The same split over devices, in host memory."""
    return device_sharding.with_memory_kind(HOST_KIND)


def host_states(layout: PoolLayout, mesh: Mesh, host: "HostMemory") -> Any:
    """The same for the arrays of one sequence's state, layer by layer; None where there is no such memory."""
    if host.sharding is None:
        return None
    return jax.tree.map(host_sharding, state_shardings(layout, mesh, batched=False))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """What the start-up probe found. `sharding` None: no pinned memory, images are NumPy arrays. `why_blocking`: no polling here."""

    sharding: NamedSharding | None
    kind: str
    why_blocking: str | None = None


def probe_host_memory(device_sharding: NamedSharding, probe_bytes: int = 2**24) -> HostMemory:
    """Copy to pinned memory and poll, and see whether `is_ready()` waits for the copy; once is enough to show that it does not."""
    ways = max(device_sharding.mesh.size, 1)
    try:
        there = host_sharding(device_sharding)
        source = jax.device_put(np.zeros((1, ways, 1, probe_bytes // 4 // ways), np.float32), device_sharding)
        source.block_until_ready()
        kind = jax.device_put(source, there).sharding.memory_kind or HOST_KIND
        blocks = all(_poll_waits(source, there) for _ in range(3))  # a busy machine may take the processor away just there
    except Exception as error:
        return HostMemory(None, "numpy", f"no {HOST_KIND} memory here ({type(error).__name__})")
    return HostMemory(there, kind, "is_ready() waits for the copy here" if blocks else None)


def choose_mode(asked: str, platform: str, host: HostMemory) -> str:
    """How copies are made: direct, staged or hold."""
    if host.sharding is None:
        return "staged"
    if asked == "auto":
        return "direct" if platform == "cpu" else "staged"
    return asked


def _poll_waits(source: Array, there: NamedSharding) -> bool:
    copy = jax.device_put(source, there)
    start = time.perf_counter()
    copy.is_ready()
    polled_s = time.perf_counter() - start
    copy.block_until_ready()
    took_s = time.perf_counter() - start
    return took_s > 1e-3 and polled_s > 0.5 * took_s


@dataclass(slots=True)
class HostChunk:
    """One chunk in host memory: its pages of every layer, or a state, and the checksum."""

    pages: Any  # PoolArrays in pinned memory, or the same as NumPy arrays
    checksum: Any  # a uint32 scalar
    is_state: bool = False
    is_near: bool = False


@dataclass(slots=True)
class Outbound:
    """A chunk on its way to the host."""

    chunk: Chunk
    host: HostChunk
    started_step: int
    started_s: float
    is_wanted: bool = True  # False once it has failed


@dataclass(slots=True)
class Inbound:
    """A chunk on its way back: `staged` is its copy on the device."""

    chunk: Chunk
    host: HostChunk
    staged: Any
    started_step: int
    started_s: float
    is_wanted: bool = True  # False once it has failed, or its sequence does not wait for it any more


@dataclass(frozen=True, slots=True)
class Unverified:
    """A chunk that was scattered: the checksum of what was written must equal the image's."""

    chunk: Chunk
    expected: int
    written: Array


@dataclass(slots=True)
class Landed:
    """What a poll found: chunks that arrived, and those that failed with the reason."""

    parked: list[Chunk] = field(default_factory=list)
    restored: list[Chunk] = field(default_factory=list)
    failed: list[tuple[Chunk, str]] = field(default_factory=list)


@dataclass(slots=True)
class TransferStats:
    """Totals since the start, warm-up excluded."""

    bytes_to_host: int = 0
    bytes_to_device: int = 0
    park_s: list[float] = field(default_factory=list)  # one entry per chunk: from its dispatch until it was seen done
    restore_s: list[float] = field(default_factory=list)
    memory_kinds: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How copies are made. `max_in_flight` chunks (of pages, where there are any) share the staging memory."""

    mode: str  # direct, staged or hold
    chunk_pages: int
    max_in_flight: int
    blocking: bool
    timeout_s: float
    delay_steps: int = 0


class Transfer:
    """Owns what lies in host memory and the copies in flight. `pool` is the one holder of the pool's arrays; what comes back replaces them.

    Host memory that nobody needs any more is left for the next parks in direct mode: no more than may be in flight, of pages and
    of states each.
    """

    def __init__(self, pool: PoolHolder, layout: PoolLayout, host: HostMemory, settings: TransferSettings) -> None:
        self._settings, mesh = settings, pool.mesh
        self._pages: Cargo = PageCargo(pool, layout, settings.chunk_pages, host.sharding, pool_sharding(mesh))
        self._near: Cargo = PageCargo(pool, layout, settings.chunk_pages, host.sharding, pool_sharding(mesh), is_near=True)
        states = state_shardings(layout, mesh, batched=False)
        self._states: Cargo = StateCargo(pool, layout, settings.chunk_pages, host_states(layout, mesh, host), states)
        self._heaviest = max(self._states.weight if layout.states else 1, self._near.weight)
        self.stored: dict[int, HostChunk] = {}  # by host_id
        self._out: list[Outbound] = []
        self._in: list[Inbound] = []
        self._unverified: list[Unverified] = []
        self.stats = TransferStats()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk of pages, padding included."""
        return self._pages.num_bytes

    @property
    def near_bytes(self) -> int:
        """Bytes of one of pages of layers that have their own."""
        return self._near.num_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return self._states.num_bytes

    @property
    def free_chunks(self) -> int:
        """How many more chunks may be in flight now, whether of pages or states."""
        taken = sum(self._cargo(chunk).weight for chunk in self.flying)
        return max(0, self._settings.max_in_flight - taken) // self._heaviest

    @property
    def num_in_flight(self) -> int:
        """Copies that have not been seen done."""
        return len(self._out) + len(self._in)

    @property
    def num_out(self) -> int:
        """Of these, on their way to the host."""
        return len(self._out)

    def park(self, chunk: Chunk, step: int) -> None:
        """Start moving a chunk to the host. But in hold mode its pages may be reused at once."""
        now, cargo = time.perf_counter(), self._cargo(chunk)
        into = None
        if self._settings.mode == "direct":
            into = cargo.left.pop() if cargo.left else cargo.blank()
        arrays, checksum = cargo.take(chunk, into)
        host = HostChunk(self._to_host(arrays, cargo), checksum, is_state=chunk.row is not None, is_near=chunk.is_near)
        self.stored[chunk.host_id] = host
        self._out.append(Outbound(chunk, host, step, now))
        self.stats.bytes_to_host += cargo.num_bytes
        if self._settings.blocking:
            jax.block_until_ready((host.pages, host.checksum))

    def restore(self, chunk: Chunk, step: int) -> None:
        """Start bringing a chunk back into the pages or the slot that it names, which nobody else may hold."""
        host, cargo = self.stored[chunk.host_id], self._cargo(chunk)
        staged = host.pages if self._settings.mode == "direct" else jax.device_put(host.pages, cargo.device)
        self._in.append(Inbound(chunk, host, staged, step, time.perf_counter()))
        self.stats.bytes_to_device += cargo.num_bytes
        if self._settings.blocking:
            jax.block_until_ready(staged)

    def poll(self, step: int) -> Landed:
        """Collect the copies that are done; never waits."""
        landed = Landed()
        self._out = [flight for flight in self._out if not self._land_out(flight, step, landed)]
        self._in = [flight for flight in self._in if not self._land_in(flight, step, landed)]
        return landed

    def verify(self) -> list[tuple[Chunk, str]]:
        """Compare the checksums of what was scattered since the last call; waits for the scatters, so call it after a later step.

        A sequence runs in the very step that its scatter was issued in, but no token of it may be taken before this.
        """
        unverified, self._unverified = self._unverified, []
        return [(u.chunk, _damage(got, u.expected)) for u in unverified if (got := int(u.written)) != u.expected]

    def reset_stats(self) -> None:
        """Start counting anew, e.g. after warming up; what kind of memory images got stays known."""
        self.stats = TransferStats(memory_kinds=self.stats.memory_kinds)

    def discard(self, host_id: int) -> None:
        """Forget a chunk in host memory. Copies in flight keep their own references until they are done, and report as ever."""
        host = self.stored.pop(host_id, None)
        if host is None or self._settings.mode != "direct":
            return
        cargo = self._states if host.is_state else self._near if host.is_near else self._pages
        in_flight = [*(flight.host for flight in self._out), *(flight.host for flight in self._in)]
        has_room = len(cargo.left) < self._settings.max_in_flight // cargo.weight
        is_sound = isinstance(host.checksum, int)  # else its copy failed, and its memory may be gone
        if has_room and is_sound and not any(other is host for other in in_flight):
            cargo.left.append(host.pages)

    def abandon(self, seq_id: int) -> None:
        """A sequence does not wait for its copies back any more: they report as ever, and write nothing."""
        for flight in self._in:
            flight.is_wanted = flight.is_wanted and flight.chunk.seq_id != seq_id

    def abandon_all(self) -> None:
        """Nobody waits for a copy back any more, and nothing that was written is looked at again."""
        for flight in self._in:
            flight.is_wanted = False
        self._unverified = []

    @property
    def flying(self) -> list[Chunk]:
        """What is in flight."""
        return [flight.chunk for flight in self._out] + [flight.chunk for flight in self._in]

    def drain(self) -> None:
        """Wait for every copy in flight, then forget everything; used at the end only, and one that failed is no matter then."""
        leaving = [(flight.host.pages, flight.host.checksum) for flight in self._out]
        for arrays in (*leaving, *(flight.staged for flight in self._in)):
            with suppress(Exception):
                jax.block_until_ready(arrays)
        self._out, self._in, self.stored = [], [], {}
        self._pages.left, self._near.left, self._states.left = [], [], []

    def _cargo(self, chunk: Chunk) -> Cargo:
        if chunk.is_near:
            return self._near
        return self._pages if chunk.row is None else self._states

    def _to_host(self, arrays: PoolArrays, cargo: Cargo) -> Any:
        if cargo.host is None:
            return jax.device_get(arrays)
        return jax.device_put(arrays, cargo.host) if self._settings.mode == "staged" else arrays

    def _land_out(self, flight: Outbound, step: int, landed: Landed) -> bool:
        host = flight.host
        try:
            if self._is_late(flight, step) or not _ready((host.pages, host.checksum)):
                return self._timed_out(flight, landed)
            host.checksum = int(host.checksum)
        except Exception as error:  # the gather or the copy itself went wrong
            _fail_once(flight, f"its pages could not be copied: {error}", landed)
        self.stats.park_s.append(time.perf_counter() - flight.started_s)
        self.stats.memory_kinds.add(_memory_kind(host.pages))
        landed.parked.append(flight.chunk)
        return True

    def _land_in(self, flight: Inbound, step: int, landed: Landed) -> bool:
        try:
            if self._is_late(flight, step) or not _ready(flight.staged):
                return self._timed_out(flight, landed)
            if flight.is_wanted:
                written = self._cargo(flight.chunk).put(flight.staged, flight.chunk)
                self._unverified.append(Unverified(flight.chunk, int(flight.host.checksum), written))
        except Exception as error:  # this sequence's trouble; a compilation is counted by the guard all the same
            _fail_once(flight, f"its pages could not be put back: {error}", landed)
        landed.restored.append(flight.chunk)
        self.stats.restore_s.append(time.perf_counter() - flight.started_s)
        return True

    def _is_late(self, flight: Outbound | Inbound, step: int) -> bool:
        return step - flight.started_step < self._settings.delay_steps

    def _timed_out(self, flight: Outbound | Inbound, landed: Landed) -> bool:
        """A copy that takes too long fails once; it stays in flight, so nothing it may touch is handed on. Returns False."""
        waited = time.perf_counter() - flight.started_s
        if waited > self._settings.timeout_s:
            _fail_once(flight, f"a copy was not done after {waited:.1f} s, transfer.timeout_s allows {self._settings.timeout_s}", landed)
        return False


def _fail_once(flight: Outbound | Inbound, reason: str, landed: Landed) -> None:
    if flight.is_wanted:
        flight.is_wanted = False
        landed.failed.append((flight.chunk, reason))


def _damage(got: int, expected: int) -> str:
    return f"a parked image came back damaged: checksum {got:#010x} instead of {expected:#010x}"


def _ready(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return all(leaf.is_ready() for leaf in leaves if hasattr(leaf, "is_ready"))


def _memory_kind(pages: Any) -> str:
    leaf = jax.tree.leaves(pages)[0]
    return str(leaf.sharding.memory_kind) if isinstance(leaf, jax.Array) else "numpy"
