"""The pool's sizes and the bits of a cell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cells import decode, encode
from jaxkv.pool import TRASH_PAGE, PoolLayout, allocate, storage_dtype
from tests.cpu.checkpoints import one_device


def layout(dtype: str = "float32", storage: str | None = None) -> PoolLayout:
    return PoolLayout(num_layers=3, num_pages=10, page_size=16, num_kv_heads=2, head_dim=8, dtype=dtype, storage=storage or dtype)


def test_usable_tokens_leave_out_the_trash_page_and_bytes_do_not() -> None:
    pool = layout()
    assert TRASH_PAGE == 0
    assert pool.num_tokens == 160
    assert pool.page_bytes == 3 * 2 * 2 * 16 * 8 * 4  # layers, K and V, heads, tokens, dims, bytes: 6144
    assert pool.num_bytes == 11 * 6144
    assert layout("bfloat16", "uint16").page_bytes == 3072


def test_a_pool_takes_the_bytes_it_says_and_is_all_zeros() -> None:
    pool = allocate(layout(), one_device())
    arrays = jax.tree.leaves(pool)
    assert [x.shape for x in arrays] == [(11, 2, 16, 8)] * 6
    assert sum(x.nbytes for x in arrays) == layout().num_bytes
    assert not any(np.asarray(x).any() for x in arrays)


def test_bfloat16_is_kept_as_its_bits_on_a_cpu_only() -> None:
    assert storage_dtype("cpu", "bfloat16") == "uint16"
    assert storage_dtype("cpu", "float32") == "float32"
    assert storage_dtype("cpu", "float16") == "float16"
    assert storage_dtype("cuda", "bfloat16") == "bfloat16"
    assert storage_dtype("tpu", "bfloat16") == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "storage"), [("float32", "float32"), ("bfloat16", "uint16"), ("bfloat16", "bfloat16"), ("float16", "float16")]
)
def test_a_cell_gives_back_the_value_rounded_once(dtype: str, storage: str) -> None:
    values = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float32)
    cells = encode(jnp.asarray(values), layout(dtype, storage))
    assert str(cells.dtype) == storage
    found = decode(cells, layout(dtype, storage))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(found), values.astype(jnp.dtype(dtype)).astype(np.float32))


def test_one_in_bfloat16_is_the_word_3f80() -> None:
    assert int(encode(jnp.ones((1, 1, 1)), layout("bfloat16", "uint16"))[0, 0, 0]) == 0x3F80


def test_a_float16_cell_never_becomes_infinite() -> None:
    kept = decode(encode(jnp.array([1e6, -1e6, 3.0]), layout("float16")), layout("float16"))
    assert kept.tolist() == [65504.0, -65504.0, 3.0]


def test_a_cell_in_int8_is_its_numbers_and_the_bytes_of_their_scale() -> None:
    shape = PoolLayout(num_layers=1, num_pages=1, page_size=16, num_kv_heads=1, head_dim=4, dtype="int8", storage="int8")
    assert shape.page_shape == (1, 16, 8)
    cell = np.asarray(encode(jnp.array([0.5, -1.27, 0.0, 0.02]), shape))
    assert cell[:4].tolist() == [50, -127, 0, 2]
    assert cell[4:].view(np.float32) == np.float32(1.27) / np.float32(127)
    np.testing.assert_allclose(decode(jnp.asarray(cell), shape), [0.5, -1.27, 0.0, 0.02], atol=1e-7)


def test_a_cell_in_int8_is_off_by_at_most_half_a_step_of_its_own_token_and_head() -> None:
    """A large neighbour costs nothing, so a scale is nobody's but the cell's."""
    values = np.random.default_rng(0).standard_normal((50, 2, 8)).astype(np.float32) * np.logspace(-6, 6, 100).reshape(50, 2, 1)
    found = np.asarray(decode(encode(jnp.asarray(values, jnp.float32), layout("int8")), layout("int8")))
    step = np.abs(values).max(-1, keepdims=True) / 127
    assert (np.abs(found - values) <= 0.5001 * step).all()
    assert np.abs(found).max(-1) == pytest.approx(np.abs(values).max(-1))


@pytest.mark.parametrize("value", [0.0, 1e-40, 3.4e38, np.inf])
def test_a_cell_in_int8_is_finite_whatever_comes(value: float) -> None:
    found = np.asarray(decode(encode(jnp.array([value, -value, 0, 0, 0, 0, 0, 0]), layout("int8")), layout("int8")))
    assert np.isfinite(found).all()
    assert found[0] == -found[1] >= 0
