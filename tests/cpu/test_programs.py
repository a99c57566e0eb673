"""What the compiled programs take beside their arguments, what they lower for, and the checksum that parked pages carry."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.forking import Copier, copy_forks, copy_recipes
from jaxkv.models import Checkpoint
from jaxkv.page_programs import checksum, transfer_recipes
from jaxkv.pool import PoolArrays, PoolHolder, PoolLayout, allocate, pool_sharding
from jaxkv.programs import (
    HEAD_TILE,
    Program,
    Recipe,
    Shapes,
    compile_program,
    example_batches,
    jit_recipe,
    shift_recipes,
    step_recipes,
    take_apart,
)
from jaxkv.scheduler import Fork, PrefillChunk
from jaxkv.transfer import host_sharding
from tests.cpu.checkpoints import LLAMA, load, one_device

SHAPES = Shapes(rows=4, chunk=8, max_len=128, vocab_size=320, transfer_pages=4)  # those of tests/cpu/tiny.py: compiled once for all
SMALL, LARGE = 16, 128  # pages
STORAGE = {"float32": "float32", "bfloat16": "uint16"}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checkpoint(request: pytest.FixtureRequest) -> Checkpoint:
    return load(LLAMA, request.param)


def layout(dtype: str, num_pages: int, storage: str | None = None) -> PoolLayout:
    return PoolLayout(3, num_pages, 4, 2, 16, dtype, storage or STORAGE[dtype])


def recipes(checkpoint: Checkpoint, shape: PoolLayout) -> dict[str, Recipe]:
    mesh = one_device()
    moves = transfer_recipes(shape, SHAPES.transfer_pages, mesh, None) | shift_recipes(checkpoint.model, shape, mesh)
    moves |= copy_recipes(shape, mesh)
    return step_recipes(checkpoint.model, shape, SHAPES, mesh) | moves


def dtype_of(checkpoint: Checkpoint) -> str:
    return str(checkpoint.model.embed.table[...].dtype)


@pytest.fixture(scope="module")
def compiled(checkpoint: Checkpoint) -> dict[int, dict[str, Program]]:
    """All programs for a small pool and for one eight times as large."""
    dtype = dtype_of(checkpoint)
    made = {num_pages: recipes(checkpoint, layout(dtype, num_pages)) for num_pages in (SMALL, LARGE)}
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        return {n: {name: compile_program(name, recipe, one_device()) for name, recipe in found.items()} for n, found in made.items()}


def test_no_program_needs_more_memory_for_a_larger_pool(compiled: dict[int, dict[str, Program]]) -> None:
    """Pointer equality would prove nothing: a program may copy the pool and write the copy back into the donated buffer."""
    small, large = ({name: program.temp_bytes for name, program in compiled[n].items()} for n in (SMALL, LARGE))
    assert small == large
    assert 0 < max(large.values()) < layout("bfloat16", LARGE).num_bytes


def test_the_pool_is_donated_and_updated_in_place(checkpoint: Checkpoint, compiled: dict[int, dict[str, Program]]) -> None:
    shape = layout(dtype_of(checkpoint), LARGE)
    weights, pool = take_apart(checkpoint.model)[0], allocate(shape, one_device())
    decode, prefill = example_batches(SHAPES, shape)
    moved = [(jnp.ones((4, *shape.page_shape), shape.storage),) * 2 for _ in range(3)]
    ids = np.array([1, 2, 3, LARGE + 1], np.int32)
    sixteen = np.arange(1, 17, dtype=np.int32)
    runs: dict[str, Callable[[PoolArrays], tuple[Any, ...]]] = {
        "decode": lambda pool: (weights, pool, decode),
        "prefill": lambda pool: (weights, pool, prefill),
        "scatter": lambda pool: (pool, moved, ids),
        "rotate": lambda pool: (pool, sixteen, sixteen, np.int32(-4)),
        "copy": lambda pool: (pool, np.stack([ids, ids[::-1], ids, ids])),
    }
    for name, arguments in runs.items():
        before, places = pool, [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pool)]
        out = compiled[LARGE][name].run(*arguments(pool))
        pool = out if name in ("rotate", "copy") else out[0]
        assert all(x.is_deleted() for x in jax.tree.leaves(before)), name
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(pool)] == places, name


@pytest.mark.parametrize("name", ["decode", "prefill", "rotate", "gather", "scatter"])
def test_a_pool_in_int8_is_updated_in_place_too(name: str) -> None:
    checkpoint, mesh = load(LLAMA), one_device()
    found = [compile_program(name, recipes(checkpoint, layout("int8", num_pages, "int8"))[name], mesh) for num_pages in (SMALL, LARGE)]
    assert found[0].temp_bytes == found[1].temp_bytes


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", ["decode", "prefill", "gather", "scatter", "rotate", "copy"])
def test_every_program_lowers_for_an_accelerator_with_its_own_cells(checkpoint: Checkpoint, platform: str, name: str) -> None:
    dtype = dtype_of(checkpoint)
    recipe = recipes(checkpoint, layout(dtype, 64, storage=dtype))[name]
    text = jit_recipe(recipe, one_device()).trace(*recipe.arguments).lower(lowering_platforms=(platform,)).as_text()
    cell = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    assert f"tensor<65x2x4x16x{cell}>" in text
    assert "ui16>" not in text or name in ("gather", "scatter")  # bits are read as words for the checksum only


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_gather_of_hold_mode_lowers_with_results_in_host_memory(platform: str) -> None:
    mesh = one_device()
    recipe = transfer_recipes(layout("bfloat16", 64, "bfloat16"), 4, mesh, host_sharding(pool_sharding(mesh)))["gather"]
    text = jit_recipe(recipe, mesh).trace(*recipe.arguments).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("pinned_host") >= 6  # K and V of three layers


def test_the_head_never_sees_one_row() -> None:
    assert HEAD_TILE == 2


# The checksum

run_checksum = jax.jit(checksum)


def image(storage: str, seed: int = 0, num_layers: int = 2) -> PoolArrays:
    """Random bits, every pattern allowed: [layers][K, V][p=2, k=2, z=4, d=4]."""
    size = np.dtype(storage).itemsize
    rng = np.random.default_rng(seed)

    def bits() -> np.ndarray:
        return rng.integers(0, 2 ** (8 * size), (2, 2, 4, 4), f"uint{8 * size}").view(storage)

    return [(bits(), bits()) for _ in range(num_layers)]  # type: ignore[misc]


def words(pages: Any) -> list[np.ndarray]:
    return [x.view(f"uint{8 * x.dtype.itemsize}") for layer in pages for x in layer]


@pytest.mark.parametrize("num_layers", [1, 5, 6, 13])  # arrays are added up by tens
@pytest.mark.parametrize("storage", ["float32", "uint16", "float16", "int8"])
def test_the_checksum_is_the_weighted_sum_that_it_says_it_is(storage: str, num_layers: int) -> None:
    pages = image(storage, num_layers=num_layers)
    total = 0
    for i, array in enumerate(words(pages)):
        for at, word in enumerate(array.reshape(-1).tolist()):
            total += (2 * i + 1) * (2 * at + 1) * word
    assert int(run_checksum(pages)) == total % 2**32


@pytest.mark.parametrize("storage", ["float32", "uint16", "float16", "int8"])
def test_any_single_flipped_bit_changes_the_checksum(storage: str) -> None:
    bits = 8 * np.dtype(storage).itemsize

    @settings(max_examples=60, derandomize=True)
    @given(st.integers(0, 3), st.integers(0, 63), st.integers(0, bits - 1), st.integers(0, 3))
    def flip(array: int, at: int, bit: int, seed: int) -> None:
        pages = image(storage, seed)
        before = int(run_checksum(pages))
        words(pages)[array].reshape(-1)[at] ^= np.array(1 << bit, f"uint{bits}")
        assert int(run_checksum(pages)) != before

    flip()


@pytest.mark.parametrize("storage", ["float32", "uint16"])
def test_two_cells_two_layers_or_keys_and_values_that_change_places_change_the_checksum(storage: str) -> None:
    pages = image(storage)
    (k0, v0), (k1, v1) = pages
    swapped = k0.copy().reshape(-1)
    swapped[[5, 9]] = swapped[[9, 5]]
    pages_swapped = k0[::-1].copy()
    others: list[Any] = [
        [(swapped.reshape(k0.shape), v0), (k1, v1)],
        [(pages_swapped, v0), (k1, v1)],
        [(v0, k0), (k1, v1)],
        [(k1, v1), (k0, v0)],
        [(k0, v0), (k1, v0)],
    ]
    sums = [int(run_checksum(x)) for x in [pages, *others]]
    assert len(set(sums)) == 6


# Gather and scatter


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_gather_and_scatter_bring_every_bit_pattern_to_other_pages_and_touch_no_more(dtype: str) -> None:
    shape = PoolLayout(2, 32, 4, 2, 8, dtype, {"bfloat16": "uint16"}.get(dtype, dtype))
    mesh = one_device()
    programs = {name: compile_program(name, recipe, mesh).run for name, recipe in transfer_recipes(shape, 4, mesh, None).items()}
    size = np.dtype(shape.storage).itemsize
    rng = np.random.default_rng(1)
    host = [tuple(rng.integers(0, 2 ** (8 * size), (33, *shape.page_shape), f"uint{8 * size}") for _ in range(2)) for _ in range(2)]
    pool: Any = jax.device_put([tuple(x.view(shape.storage) for x in layer) for layer in host], pool_sharding(mesh))
    assert dtype in ("bfloat16", "int8") or any(np.isnan(np.asarray(x)).any() for layer in pool for x in layer)

    source, target = [7, 2, 31], [5, 32, 11]
    pages, sum_out = programs["gather"](pool, np.array([*source, 0], np.int32))
    pool, sum_in = programs["scatter"](pool, pages, np.array([*target, 33], np.int32))
    assert int(sum_out) == int(sum_in)
    for layer, original in zip(pool, host, strict=True):
        for array, old in zip(layer, original, strict=True):
            expected = old.copy()
            expected[target] = old[source]
            assert np.asarray(array).tobytes() == expected.tobytes()


def test_padding_ids_beyond_the_pool_write_nothing() -> None:
    shape = layout("float32", 8)
    mesh = one_device()
    scatter = compile_program("scatter", transfer_recipes(shape, 4, mesh, None)["scatter"], mesh).run
    pages = [(jnp.ones((4, *shape.page_shape)),) * 2 for _ in range(3)]
    pool, _ = scatter(allocate(shape, mesh), pages, np.array([9, 9, 9, 9], np.int32))
    assert not any(np.asarray(x).any() for layer in pool for x in layer)


def test_forks_copy_whole_pages_and_touch_no_other(checkpoint: Checkpoint) -> None:
    """Five copies take two runs of four."""
    shape = layout(dtype_of(checkpoint), SMALL)
    mesh = one_device()
    program = compile_program("copy", copy_recipes(shape, mesh)["copy"], mesh)
    rng = np.random.default_rng(0)
    before = [tuple(rng.integers(0, 60_000, (SMALL + 1, *shape.page_shape)).astype(shape.storage) for _ in range(2)) for _ in range(3)]
    forks = [Fork(seq_id, 0, source, page) for seq_id, (source, page) in enumerate([(3, 5), (3, 1), (3, 16), (7, 2), (3, 9)])]
    chunk = PrefillChunk(9, 0, 0, 3, True, forks=tuple(forks))
    pool = PoolHolder([(jnp.array(k), jnp.array(v)) for k, v in before])
    copy_forks(Copier(is_near=False, run=program.run, layout=shape), pool, chunk)
    expected = np.arange(SMALL + 1)
    expected[[5, 1, 16, 2, 9]] = [3, 3, 3, 7, 3]
    for layer, found in zip(before, pool.arrays, strict=True):
        for pages, now in zip(layer, found, strict=True):
            np.testing.assert_array_equal(np.asarray(now), pages[expected])
