"""Parks and restores by hand, without an engine: the bytes of images, the order of things in flight, and what goes wrong."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv.transfer
from jaxkv.engine import Engine
from jaxkv.page_programs import mode_recipes
from jaxkv.pool import PoolHolder, PoolLayout, pool_sharding
from jaxkv.programs import compile_program
from jaxkv.request import SamplingParams
from jaxkv.scheduler import Chunk
from jaxkv.transfer import HostChunk, HostMemory, Landed, Transfer, TransferSettings, choose_mode, probe_host_memory
from tests.cpu import tiny
from tests.cpu.checkpoints import one_device

LAYOUT = PoolLayout(num_layers=2, num_pages=48, page_size=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", storage="uint16")
CHUNK_PAGES = 4
MODES = ["direct", "staged", "hold"]


class Bench:
    """A pool of random bits with its transfer, a donated write to overwrite pages, and a NumPy copy of what the pool must hold."""

    def __init__(self, mode: str = "direct", host: HostMemory | None = None, **settings: Any) -> None:
        mesh = one_device()
        self.rng = np.random.default_rng(0)
        self.host = host or probe_host_memory(pool_sharding(mesh), probe_bytes=2**16)
        recipes = mode_recipes(mode, LAYOUT, CHUNK_PAGES, mesh, self.host.sharding)
        programs = {name: compile_program(name, recipe, mesh).run for name, recipe in recipes.items()}
        shape = (LAYOUT.num_pages + 1, *LAYOUT.page_shape)
        self.expected = [[self.rng.integers(0, 2**16, shape, np.uint16) for _ in range(2)] for _ in range(2)]
        arrays = [tuple(jax.device_put(x.copy(), pool_sharding(mesh)) for x in layer) for layer in self.expected]
        self.pool = PoolHolder(arrays, programs["gather"], programs["scatter"])  # type: ignore[arg-type]
        chosen = {"chunk_pages": CHUNK_PAGES, "max_in_flight": 8, "blocking": False, "timeout_s": 60.0, **settings}
        self.transfer = Transfer(self.pool, LAYOUT, self.host, TransferSettings(mode=mode, **chosen))
        self._overwrite = jax.jit(lambda pool, ids, word: [(k.at[ids].set(word), v.at[ids].set(word)) for k, v in pool], donate_argnums=0)

    def overwrite(self, pages: tuple[int, ...]) -> None:
        """What a decode step does to pages that changed hands: a donated write, dispatched at once."""
        word = np.uint16(self.rng.integers(0, 2**16))
        ids = np.resize(np.array(pages, np.int32), CHUNK_PAGES)
        self.pool.arrays = self._overwrite(self.pool.arrays, ids, jnp.uint16(word))
        for array in (x for layer in self.expected for x in layer):
            array[list(pages)] = word

    def move(self, source: tuple[int, ...], target: tuple[int, ...]) -> Any:
        """What `source` holds now is expected in `target` later: call the result then."""
        kept = [[x[list(source)].copy() for x in layer] for layer in self.expected]

        def arrive() -> None:
            for layer, old in zip(self.expected, kept, strict=True):
                for array, pages in zip(layer, old, strict=True):
                    array[list(target)] = pages

        return arrive

    def check(self) -> None:
        for layer, expected in zip(self.pool.arrays, self.expected, strict=True):
            for array, wanted in zip(layer, expected, strict=True):
                assert np.array_equal(np.asarray(array), wanted)

    def land(self, step: int, seconds: float = 30) -> Landed:
        """Poll at one and the same step until nothing is in flight; the sum of what was found."""
        total, end = Landed(), time.perf_counter() + seconds
        while self.transfer.num_in_flight:
            landed = self.transfer.poll(step)
            total.parked += landed.parked
            total.restored += landed.restored
            total.failed += landed.failed
            assert time.perf_counter() < end
        return total


def chunk(seq_id: int, pages: tuple[int, ...], index: int = 0) -> Chunk:
    return Chunk(seq_id=seq_id, epoch=0, index=index, pages=pages, host_id=10 * seq_id + index)


@pytest.mark.parametrize("mode", MODES)
def test_a_thousand_images_whose_pages_were_overwritten_at_once_come_back_equal_elsewhere(mode: str) -> None:
    """Pages change hands at the gather's own dispatch, held ones when their copy was seen done."""
    bench = Bench(mode)
    for trial in range(1000):
        count = int(bench.rng.integers(1, CHUNK_PAGES + 1))
        pages = (bench.rng.permutation(LAYOUT.num_pages) + 1).tolist()
        source, target = tuple(pages[:count]), tuple(pages[5 : 5 + count])
        arrive = bench.move(source, target)
        bench.transfer.park(chunk(trial, source), step=trial)
        if mode == "hold":
            assert len(bench.land(trial).parked) == 1
        bench.overwrite(source)
        if bench.rng.random() < 0.5:
            bench.overwrite(tuple(pages[10:14]))
        bench.land(trial)
        bench.transfer.restore(chunk(trial, target), step=trial)
        if bench.rng.random() < 0.5:
            bench.overwrite(source)  # a step that runs while the copy is on its way back
        assert [c.pages for c in bench.land(trial).restored] == [target]
        assert bench.transfer.verify() == []
        bench.transfer.discard(10 * trial)
        arrive()
        if trial % 50 == 49:
            bench.check()
    bench.check()


@pytest.mark.parametrize("mode", MODES)
def test_many_chunks_in_flight_at_once_do_not_touch_one_another(mode: str) -> None:
    bench = Bench(mode)
    order = (bench.rng.permutation(LAYOUT.num_pages) + 1).tolist()
    sources = [tuple(order[4 * i : 4 * i + 4]) for i in range(6)]
    targets = [tuple(order[24 + 4 * i : 28 + 4 * i]) for i in range(6)]
    arrivals = [bench.move(s, t) for s, t in zip(sources, targets, strict=True)]
    for i, source in enumerate(sources):
        bench.transfer.park(chunk(i // 2, source, i % 2), step=0)
        if mode != "hold":
            bench.overwrite(source)
    assert len(bench.land(0).parked) == 6
    for i in (3, 0, 5, 1, 4, 2):
        bench.transfer.restore(chunk(i // 2, targets[i], i % 2), step=1)
    bench.land(1)
    for arrive in arrivals:
        arrive()
    assert bench.transfer.verify() == []
    bench.check()


def test_memory_of_an_image_that_is_gone_is_written_anew_while_its_pages_may_still_be_on_their_way_back() -> None:
    bench = Bench(max_in_flight=3)
    used: set[int] = set()
    for trial in range(300):
        pages = (bench.rng.permutation(LAYOUT.num_pages) + 1).tolist()
        source, target, other, there = (tuple(pages[4 * i : 4 * i + 4]) for i in range(4))
        arrive = bench.move(source, target)
        bench.transfer.park(chunk(trial, source), step=trial)
        bench.overwrite(source)
        bench.land(trial)
        bench.transfer.restore(chunk(trial, target), step=trial)
        bench.land(trial)
        arrive()
        bench.transfer.discard(10 * trial)  # its scatter is dispatched, and perhaps no more than that
        arrive = bench.move(other, there)
        bench.transfer.park(chunk(trial, other, 1), step=trial)
        bench.overwrite(other)
        bench.land(trial)
        used |= {x.unsafe_buffer_pointer() for x in jax.tree.leaves(bench.transfer.stored[10 * trial + 1].pages)}
        bench.transfer.restore(chunk(trial, there, 1), step=trial)
        bench.land(trial)
        arrive()
        bench.transfer.discard(10 * trial + 1)
        assert bench.transfer.verify() == []
        if trial % 50 == 49:
            bench.check()
    assert len(used) < 50  # of 1200 arrays


def test_no_more_memory_is_left_for_the_next_parks_than_may_be_in_flight() -> None:
    bench = Bench(max_in_flight=2)
    for seq_id in range(5):
        bench.transfer.park(chunk(seq_id, (1, 2)), step=0)
        bench.land(0)
    for seq_id in range(5):
        bench.transfer.discard(10 * seq_id)
    assert len(bench.transfer._pages.left) == 2


@pytest.mark.parametrize(
    ("asked", "platform", "expected"),
    [("auto", "cpu", "direct"), ("auto", "gpu", "staged"), ("auto", "tpu", "staged"), ("staged", "cpu", "staged"), ("hold", "gpu", "hold")],
)
def test_copies_are_direct_where_the_devices_memory_is_the_hosts(asked: str, platform: str, expected: str) -> None:
    there = HostMemory(jaxkv.transfer.host_sharding(pool_sharding(one_device())), "pinned_host")
    assert choose_mode(asked, platform, there) == expected
    assert choose_mode(asked, platform, HostMemory(None, "numpy")) == "staged"


def test_an_image_is_in_pinned_memory_and_counted() -> None:
    bench = Bench()
    bench.transfer.park(chunk(1, (3, 4)), step=0)
    bench.land(0)
    (held,) = bench.transfer.stored.values()
    assert {x.sharding.memory_kind for x in jax.tree.leaves(held.pages)} == {"pinned_host"}
    assert bench.transfer.chunk_bytes == 4 * LAYOUT.page_bytes == 4 * 512
    stats = bench.transfer.stats
    assert (stats.bytes_to_host, stats.bytes_to_device, stats.memory_kinds) == (2048, 0, {"pinned_host"})
    assert len(stats.park_s) == 1
    bench.transfer.restore(chunk(1, (5, 6)), step=1)
    bench.land(1)
    assert (stats.bytes_to_device, len(stats.restore_s)) == (2048, 1)


# Delays, limits, time


@pytest.mark.parametrize("delay", [0, 1, 7])
def test_a_delayed_copy_is_seen_done_so_many_steps_later_and_no_sooner(delay: int) -> None:
    bench = Bench(delay_steps=delay)
    moves = ((bench.transfer.park, "parked"), (bench.transfer.restore, "restored"))
    for start, (move, settled) in zip((10, 30), moves, strict=True):
        move(chunk(1, (2, 3)), step=start)
        flight = [*bench.transfer._out, *bench.transfer._in][0]
        jax.block_until_ready((flight.host.pages, getattr(flight, "staged", None)))
        for step in range(start, start + delay):
            assert not getattr(bench.transfer.poll(step), settled)
        assert len(getattr(bench.land(start + delay), settled)) == 1


def test_chunks_in_flight_in_both_directions_share_the_staging_memory() -> None:
    bench = Bench(max_in_flight=3, delay_steps=5)
    assert bench.transfer.free_chunks == 3
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    bench.land(5)
    bench.transfer.park(chunk(2, (3, 4)), step=6)
    bench.transfer.restore(chunk(1, (5, 6)), step=6)
    assert (bench.transfer.free_chunks, bench.transfer.num_in_flight) == (1, 2)
    bench.transfer.park(chunk(3, (7, 8)), step=6)
    assert bench.transfer.free_chunks == 0
    bench.land(20)
    assert bench.transfer.free_chunks == 3


def test_a_copy_that_takes_too_long_fails_its_own_sequence_once_and_still_reports_when_it_is_done() -> None:
    bench = Bench(timeout_s=0.5, delay_steps=50)
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    time.sleep(0.55)
    bench.transfer.park(chunk(2, (3, 4)), step=40)
    landed = bench.transfer.poll(41)
    assert [(c.seq_id, landed.parked) for c, _ in landed.failed] == [(1, [])]
    assert "a copy was not done after 0." in landed.failed[0][1] and "transfer.timeout_s allows 0.5" in landed.failed[0][1]
    assert bench.transfer.poll(42).failed == []
    assert bench.transfer.num_in_flight == 2  # nothing that the copy may touch is handed on before it is done
    assert [c.seq_id for c in bench.transfer.poll(50).parked] == [1]


def test_blocking_mode_comes_back_with_the_copy_done() -> None:
    bench = Bench(blocking=True)
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    assert len(bench.transfer.poll(0).parked) == 1
    bench.transfer.restore(chunk(1, (7, 8)), step=0)
    assert len(bench.transfer.poll(0).restored) == 1


# Damage and goodbyes


def damage(held: HostChunk) -> None:
    """Flip one bit of one cell of an image in host memory."""
    leaves, tree = jax.tree.flatten(held.pages)
    words = np.array(leaves[1])
    words.reshape(-1).view(f"uint{8 * words.dtype.itemsize}")[7] ^= 1
    leaves[1] = jax.device_put(words, leaves[1].sharding)
    held.pages = jax.tree.unflatten(tree, leaves)


def test_a_damaged_image_is_reported_and_its_neighbour_is_not() -> None:
    bench = Bench()
    for seq_id, pages in ((1, (1, 2)), (2, (3, 4))):
        bench.transfer.park(chunk(seq_id, pages), step=0)
    bench.land(0)
    damage(bench.transfer.stored[10])
    for seq_id, pages in ((1, (5, 6)), (2, (7, 8))):
        bench.transfer.restore(chunk(seq_id, pages), step=1)
    bench.land(1)
    ((found, reason),) = bench.transfer.verify()
    assert found.seq_id == 1
    assert reason.startswith("a parked image came back damaged: checksum 0x")
    assert bench.transfer.verify() == []


def test_an_image_that_is_discarded_on_its_way_out_still_reports_its_pages() -> None:
    bench = Bench(delay_steps=1)
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    bench.transfer.discard(10)
    assert bench.transfer.stored == {}
    assert [c.seq_id for c in bench.land(1).parked] == [1]
    bench.check()


def test_a_copy_back_that_nobody_waits_for_any_more_writes_nothing() -> None:
    bench = Bench(delay_steps=1)
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    bench.land(1)
    bench.transfer.restore(chunk(1, (5, 6)), step=2)
    bench.transfer.abandon(1)
    assert [c.seq_id for c in bench.land(3).restored] == [1]
    assert bench.transfer.verify() == []
    bench.check()  # pages 5 and 6 hold what they held


def test_draining_waits_for_every_copy_and_forgets_every_image() -> None:
    bench = Bench(delay_steps=1000)
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    bench.transfer.drain()
    assert bench.transfer.num_in_flight == 0
    assert bench.transfer.stored == {}


# What the start-up probe finds


@pytest.fixture
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jaxkv.transfer, "HOST_KIND", "moon")
    yield


def test_the_probe_finds_pinned_memory_and_a_poll_that_does_not_wait() -> None:
    found = probe_host_memory(pool_sharding(one_device()))
    assert (found.kind, found.why_blocking) == ("pinned_host", None)


def test_an_is_ready_that_waits_for_the_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(jnp.zeros(1))

    def is_ready(self: jax.Array) -> bool:
        self.block_until_ready()
        time.sleep(0.02)
        return True

    monkeypatch.setattr(kind, "is_ready", is_ready)
    found = probe_host_memory(pool_sharding(one_device()), probe_bytes=2**16)
    assert found.kind == "pinned_host"
    assert found.why_blocking == "is_ready() waits for the copy here"


def test_images_are_numpy_arrays_where_there_is_no_pinned_memory(no_pinned_memory: None) -> None:
    host = probe_host_memory(pool_sharding(one_device()), probe_bytes=2**16)
    assert (host.sharding, host.kind) == (None, "numpy")
    assert host.why_blocking is not None and host.why_blocking.startswith("no moon memory here (")
    bench = Bench("staged", host=host, blocking=True)
    arrive = bench.move((1, 2), (5, 6))
    bench.transfer.park(chunk(1, (1, 2)), step=0)
    bench.overwrite((1, 2))
    bench.land(0)
    assert {type(x) for x in jax.tree.leaves(bench.transfer.stored[10].pages)} == {np.ndarray}
    bench.transfer.restore(chunk(1, (5, 6)), step=0)
    bench.land(0)
    arrive()
    bench.check()
    assert bench.transfer.verify() == []
    assert bench.transfer.stats.memory_kinds == {"numpy"}


# Through an engine

PROMPTS = [tiny.prompt(n, seed=n) for n in (5, 21, 12)]
PARAMS = [SamplingParams(max_tokens=9, temperature=0.8, seed=i, logprobs=2) for i in range(3)]


def roomy_engine(**fields: Any) -> AbstractContextManager[Engine]:
    """All three fit at once: whoever is parked here was told to."""
    return tiny.engine(pool__tokens=512, **fields)


def answers(**fields: Any) -> tuple[list[Any], Any, list[str]]:
    with roomy_engine(**fields) as made:
        found = [tiny.content(c) for c in tiny.run(made, PROMPTS, PARAMS)]
        return found, made.summary(), made.messages


def test_an_engine_without_pinned_memory_says_so_once_and_gives_the_same_bytes(
    no_pinned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, summary, messages = answers(debug__park_every=2, transfer__mode="hold")
    (said,) = [message for message in messages if "block" in message]
    assert said.startswith("copies will block (as transfer.blocking: true): no moon memory here")
    assert said.endswith("images are kept as numpy")
    assert summary["num_parks"] == summary["num_restores"] > 5
    assert summary["image_memory_kinds"] == ["numpy"]
    monkeypatch.undo()
    assert answers()[0] == found


def test_warming_up_moves_one_image_both_ways_counts_nothing_and_tells_its_memory_kind() -> None:
    with roomy_engine() as made:
        stats = made.parts.transfer.stats
        assert stats.memory_kinds == {"pinned_host"}
        assert (stats.bytes_to_host, stats.bytes_to_device, stats.park_s, stats.restore_s) == (0, 0, [], [])
        assert made.parts.transfer.num_in_flight == 0


def test_a_request_whose_copy_hangs_is_replayed_and_its_bytes_come_back_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    uncrowded = answers()[0]
    plain_ready, stuck = jaxkv.transfer._ready, True
    with roomy_engine(transfer__timeout_s=0.05) as made:

        def ready(tree: Any) -> bool:
            """No copy of the first request is ever done."""
            mine = [host.pages for host in tiny.image(made, 0)]
            held = tree[0] if isinstance(tree, tuple) and len(tree) == 2 else None
            return not (stuck and any(held is pages for pages in [*mine, *hanging])) and plain_ready(tree)

        hanging: list[Any] = []
        handles = [made.submit(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        tiny.step_to(made, handles[0], 3)
        monkeypatch.setattr(jaxkv.transfer, "_ready", ready)
        assert made.scheduler.park(0) == ""
        while not made.parts.transfer.num_in_flight:
            made.step()
        hanging += [host.pages for host in tiny.image(made, 0)]
        others = [tiny.content(handle.result()) for handle in handles[1:]]
        assert [tiny.content(handles[0].result()), *others] == uncrowded
        assert made.stats.num_losses == 1 and made.scheduler.counters.num_replayed_tokens > 0
        assert made.scheduler.snapshot().host_bytes > 0
        stuck = False


def test_a_damaged_image_is_replayed_and_changes_no_byte_of_any() -> None:
    uncrowded = answers()[0]
    with roomy_engine(debug__copy_delay_steps=2, pool__prefix_cache=False) as made:  # its prompt pages come back from the image
        handles = [made.submit(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)]
        tiny.step_to(made, handles[0], 3)
        assert made.scheduler.park(0) == ""
        while not tiny.image(made, 0):
            made.step()
        damage(tiny.image(made, 0)[0])
        assert [tiny.content(handle.result()) for handle in handles] == uncrowded
        assert (made.stats.num_losses, made.stats.num_failed) == (1, 0)
