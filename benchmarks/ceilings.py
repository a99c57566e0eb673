"""The engine's programs run by hand, and what they are measured against: the same step's matrix products alone.

The programs get a pool of their own, so they can be timed beside an engine that is in the middle of something.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jaxkv.engine import Engine
from jaxkv.models.parameters import flat_parameters
from jaxkv.pool import allocate
from jaxkv.programs import HEAD_TILE, DecodeBatch, PrefillBatch, example_batches, take_apart


class Programs:
    """Decode and prefill of one engine, on pages of our own."""

    def __init__(self, engine: Engine) -> None:
        self._parts = engine.parts
        self._pool = allocate(engine.parts.layout, engine.parts.mesh)

    def decode(self, lengths: Sequence[int], num_steps: int = 1) -> Callable[[], None]:
        """One decode step of rows that have so many tokens each, the new one included, until its tokens are there.

        Several steps are dispatched at once and only the last is waited for, which hides the host's part in dispatching them.
        """
        batch = self._decode_batch(lengths)

        def step() -> None:
            for _ in range(num_steps):
                self._pool, sampled = self._parts.programs.decode.run(self._parts.weights, self._pool, batch)
            np.asarray(sampled.token)

        return step

    def prefill(self, length: int) -> Callable[[], None]:
        """A whole prompt, chunk by chunk, until its first token is there."""
        batches = self._prefill_batches(length)

        def prompt() -> None:
            for batch in batches:
                self._pool, sampled, _ = self._parts.programs.prefill.run(self._parts.weights, self._pool, batch)
            np.asarray(sampled.token)

        return prompt

    def _decode_batch(self, lengths: Sequence[int]) -> DecodeBatch:
        layout = self._parts.layout
        batch, _ = example_batches(self._parts.shapes, layout)
        table, positions, active = batch.table.copy(), np.zeros_like(batch.positions), np.zeros_like(batch.active)
        pages = iter(range(1, layout.num_pages + 1))
        for row, length in enumerate(lengths):
            num_pages = -(-length // layout.page_size)
            table[row, :num_pages] = [next(pages) for _ in range(num_pages)]
            positions[row], active[row] = length - 1, True
        return batch._replace(table=table, positions=positions, active=active)

    def _prefill_batches(self, length: int) -> list[PrefillBatch]:
        layout, chunk = self._parts.layout, self._parts.shapes.chunk
        _, batch = example_batches(self._parts.shapes, layout)
        num_pages = -(-length // layout.page_size)
        table = batch.table.copy()
        table[0, :num_pages] = np.arange(1, num_pages + 1)
        return [
            batch._replace(
                start=np.int32(start),  # type: ignore[arg-type]
                length=np.int32(min(chunk, length - start)),  # type: ignore[arg-type]
                is_last=np.bool_(start + chunk >= length),  # type: ignore[arg-type]
                table=table,
            )
            for start in range(0, length, chunk)
        ]


def products(engine: Engine, num_tokens: int, num_logits: int) -> Callable[[], None]:
    """The model's arithmetic for so many tokens without attention, pool or sampler, until it is done.

    `q + k + v` stands in for attention: it costs nothing, and keeps all three products from being optimised away.
    """
    parts = engine.parts
    weights, rebuild = take_apart(parts.checkpoint.model)

    def attend(layer: int, q: Array, k: Array, v: Array, cache: Any, *, scale: float, window: int | None = None) -> tuple[Array, Any]:
        t, h, d = q.shape
        mixed = q.reshape(t, k.shape[1], -1, d) + (k + v)[:, :, None]
        return mixed.reshape(t, h, d), cache

    def step(weights: Any, tokens: Array, positions: Array) -> tuple[Array, Array | None]:
        model = rebuild(weights)
        hidden, _ = model(tokens, positions, None, attend)  # returned, or nothing would have to compute it where there are no logits
        return hidden, jnp.argmax(model.logits(hidden[:num_logits]), axis=-1) if num_logits else None

    tokens = positions = jnp.arange(num_tokens, dtype=jnp.int32)
    is_float32 = parts.fingerprint_facts["dtype"] == "float32"
    with jax.default_matmul_precision("highest" if is_float32 else "default"):
        compiled = jax.jit(step).lower(weights, tokens, positions).compile()

    def work() -> None:
        jax.block_until_ready(compiled(weights, tokens, positions))

    work()
    return work


def prompt_products(engine: Engine, length: int) -> Callable[[], None]:
    """A prompt's products alone, in the same chunks and with the same padding as the engine's; one head at the end."""
    chunk = engine.parts.shapes.chunk
    inner, last = products(engine, chunk, 0), products(engine, chunk, HEAD_TILE)
    num_inner = -(-length // chunk) - 1

    def work() -> None:
        for _ in range(num_inner):
            inner()
        last()

    return work


def parameters(engine: Engine) -> dict[str, Array]:
    """The model's arrays by path, for example "layers.0.attn.q.kernel"."""
    return flat_parameters(nnx.state(engine.parts.checkpoint.model))


def weight_bytes(engine: Engine) -> int:
    """Bytes of weights that one decode step must read: all of them, but for a table that is only looked up."""
    sizes = {path: array.nbytes for path, array in parameters(engine).items()}
    if not engine.model_config.tie_embeddings:
        sizes.pop("embed.table")
    return sum(sizes.values())
