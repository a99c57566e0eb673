"""The fixtures through paged attention and kept states, prompt chunks and single steps, against the recorded logits of transformers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import PagedCache, paged_attend, table_width
from jaxkv.models import state_shapes
from jaxkv.models.interface import Inputs, Recurrence
from jaxkv.pool import PoolArrays, PoolLayout, allocate
from tests.cpu.checkpoints import FIXTURES, TOLERANCE, load, one_device, reference

QUICK, SLOW = ("llama", "gemma3"), ("qwen2", "qwen3", "qwen3_moe", "qwen3_moe_mixed", "mistral", "gemma3_linear")
RECURRENT = ("mamba", "mamba2", "qwen3_next", "qwen3_5", "qwen3_5_moe")
ROWS = 2


class Paged:
    """A fixture with a pool; every call returns logits [n, c, v] and writes the pool."""

    def __init__(self, name: str) -> None:
        loaded = load(FIXTURES / name)
        config, self.expected = loaded.config, reference(name)
        self.layout = PoolLayout(len(config.page_layers), 40, 16, config.num_kv_heads, config.head_dim, "float32", "float32")
        self.pool: PoolArrays = allocate(self.layout, one_device())
        self.states = [tuple(jnp.zeros((ROWS, *x.shape), x.dtype) for x in layer) for layer in state_shapes(config, "float32")]
        self.graph, self.weights = nnx.split(loaded.model)
        pages = np.random.default_rng(0).permutation(self.layout.num_pages) + 1
        self.table = np.zeros((ROWS, table_width(512, 16)), np.int32)
        self.table[:, :16] = pages[: ROWS * 16].reshape(ROWS, 16)
        self._run = jax.jit(self._step, donate_argnums=(1, 2))

    def _step(self, weights: Any, pool: PoolArrays, states: Any, tokens: Any, positions: Any, valid: Any, table: Any, row: Any) -> Any:
        """`row` is that of a chunk; a step is one of all rows."""
        model, paged = nnx.merge(self.graph, weights), paged_attend(self.layout, table, positions, valid)

        def attend(layer: int, q: Any, k: Any, v: Any, cache: Any, **how: Any) -> Any:
            out, pages = paged(layer, q, k, v, cache[0], **how)
            return out, (pages, cache[1])

        def advance(layer: int, mixer: Recurrence, inputs: Inputs, cache: Any) -> Any:
            kept = cache[1][layer]
            if row is None:
                out, new = mixer.step(inputs, kept)
            else:
                out, state = mixer.chunk(inputs, tuple(x[row] for x in kept), valid.sum(dtype=jnp.int32))
                new = tuple(x.at[row].set(y) for x, y in zip(kept, state, strict=True))
            return out, (cache[0], [*cache[1][:layer], new, *cache[1][layer + 1 :]])

        hidden, (pages, states) = model(tokens.reshape(-1), positions.reshape(-1), (PagedCache(pool), states), attend, advance)
        return model.logits(hidden).reshape(*tokens.shape, -1), pages.pool, states

    def __call__(self, tokens: np.ndarray, positions: np.ndarray, valid: np.ndarray, table: np.ndarray, row: int | None) -> np.ndarray:
        where = None if row is None else jnp.int32(row)
        logits, self.pool, self.states = self._run(self.weights, self.pool, self.states, tokens, positions, valid, table, where)
        return np.asarray(logits)

    def prefill(self, row: int, prompt: np.ndarray, width: int) -> np.ndarray:
        found = []
        self.states = [tuple(x.at[row].set(0) for x in layer) for layer in self.states]
        for start in range(0, len(prompt), width):
            piece = prompt[start : start + width]
            tokens, positions = np.zeros((1, width), np.int32), np.zeros((1, width), np.int32)
            tokens[0, : len(piece)], positions[0, : len(piece)] = piece, np.arange(start, start + len(piece))
            found.append(self(tokens, positions, np.arange(width)[None] < len(piece), self.table[row : row + 1], row)[0, : len(piece)])
        return np.concatenate(found)


@pytest.fixture(scope="module", params=[*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW + RECURRENT)])
def paged(request: pytest.FixtureRequest) -> Paged:
    return Paged(request.param)


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize("which", [0, 1])
def test_prompt_logits_at_every_position_are_the_references(paged: Paged, which: int, width: int) -> None:
    expected = paged.expected
    found = paged.prefill(which, expected[f"input_ids_{which}"], width)
    assert np.abs(found - expected[f"logits_{which}"]).max() < TOLERANCE


def test_both_prompts_decoded_side_by_side_give_the_references_step_logits_and_greedy_ids(paged: Paged) -> None:
    expected = paged.expected
    last = []
    for row in range(ROWS):
        last.append(paged.prefill(row, expected[f"input_ids_{row}"], 8)[-1])
    lengths = [len(expected[f"input_ids_{row}"]) for row in range(ROWS)]
    for step in range(32):
        for row in range(ROWS):
            assert np.abs(last[row] - expected[f"step_logits_{row}"][step]).max() < TOLERANCE, (row, step)
            assert int(last[row].argmax()) == expected[f"greedy_{row}"][step]
        tokens = np.array([[logits.argmax()] for logits in last], np.int32)
        positions = np.array([[length + step] for length in lengths], np.int32)
        last = list(paged(tokens, positions, np.ones((ROWS, 1), bool), paged.table, None)[:, 0])


def test_the_pool_stays_finite(paged: Paged) -> None:
    assert all(bool(jnp.isfinite(x).all()) for layer in [*paged.pool, *paged.states] for x in layer)
