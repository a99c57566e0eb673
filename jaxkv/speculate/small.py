"""A small model that guesses: its own weights, its own layers of the pages that the pool's numbers name, two programs. Knows no request.

Its pages lie beside the pool under the same numbers, so that the block tables serve both, and travel nowhere: what it has to know of a
sequence that comes back is computed again, a chunk at a time (`fill`). `guess` takes the tokens that are new to it, for all rows at once,
and goes on by itself: the likeliest token behind them, fed back, and so on.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxkv.attention import paged_attend, table_width
from jaxkv.config import Config
from jaxkv.errors import ConfigError
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.interrupt import check_interrupt
from jaxkv.models import CheckpointInfo, ModelConfig, check_mesh, inspect_checkpoint, load_checkpoint, load_tokenizer, spread
from jaxkv.pool import PoolArrays, PoolLayout, allocate
from jaxkv.program_store import ProgramStore
from jaxkv.programs import (
    Program,
    Recipe,
    Shapes,
    Weights,
    compile_program,
    pool_shapes,
    pool_shardings,
    run_layers,
    take_apart,
    whole_logits,
)
from jaxkv.sampling import HostOrDevice, first_best


class FillBatch(NamedTuple):
    """A chunk of what one sequence has said and was told."""

    tokens: Int[HostOrDevice, " t"]
    start: Int[HostOrDevice, ""]
    length: Int[HostOrDevice, ""]
    table: Int[HostOrDevice, "1 w"]


class GuessBatch(NamedTuple):
    """The tokens of every row that are new; an idle row has none. `num_cells` are those that its pages have from the first on."""

    tokens: Int[HostOrDevice, "b c"]
    positions: Int[HostOrDevice, " b"]
    num_tokens: Int[HostOrDevice, " b"]
    num_cells: Int[HostOrDevice, " b"]
    table: Int[HostOrDevice, "b w"]


class SmallModel:
    """All that the small model runs on."""

    def __init__(self, weights: Weights, layout: PoolLayout, mesh: Mesh, fill: Program, guess: Program, chunk: int) -> None:
        self.layout, self.programs, self.chunk = layout, (fill, guess), chunk
        self._weights, self._mesh = weights, mesh
        self._arrays = allocate(layout, mesh)

    def fill(self, batch: FillBatch) -> None:
        """Take in a chunk."""
        self._arrays = self.programs[0].run(self._weights, self._arrays, batch)

    def guess(self, batch: GuessBatch) -> np.ndarray:
        """[b, k] guesses; waits for them."""
        self._arrays, guesses = self.programs[1].run(self._weights, self._arrays, batch)
        return np.asarray(guesses)

    def restart(self) -> None:
        """New pages, if the old ones cannot be read any more."""
        if any(array.is_deleted() for layer in self._arrays for array in layer):
            self._arrays = allocate(self.layout, self._mesh)


def check_pair(model: ModelConfig, target: ModelConfig) -> None:
    """ConfigError for a model that cannot guess for the other."""
    if model.state_layers:
        raise ConfigError(f"speculate.draft_path: {model.model_type} keeps states, which are in no page; take a model of attention alone")
    if not target.page_layers:
        raise ConfigError(f"speculate.kind: got draft, but {target.model_type} has no pages to share with another; take ngram or none")
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculate.draft_path: its vocabulary has {model.vocab_size} tokens, that of model.path {target.vocab_size}; take one with "
            "the same tokenizer"
        )


def check_tokenizers(small: CheckpointInfo, target: CheckpointInfo) -> None:
    """ConfigError where equal ids are different text: no guess would come true. Where one has no tokenizer nothing is known."""
    ours, theirs = load_tokenizer(small), load_tokenizer(target)
    place = None if ours is None or theirs is None else ours.first_difference(theirs)
    if place is not None:
        raise ConfigError(
            f"speculate.draft_path: its token {place} is another one than that of model.path; take a model with the same tokenizer"
        )


def small_layout(layout: PoolLayout, model: ModelConfig, num_shards: int) -> PoolLayout:
    """The small model's pages under the pool's numbers."""
    shape = {"num_layers": model.num_layers, "num_kv_heads": spread(model, num_shards).num_kv_heads, "head_dim": model.head_dim}
    return replace(layout, **shape, states=(), rows=0, snapshots=0, window=None, near=(), near_pages=0, near_window=None)  # type: ignore[arg-type]


def small_recipes(model: Any, layout: PoolLayout, shapes: Shapes, mesh: Mesh) -> dict[str, Recipe]:
    """Its two programs."""
    weights, rebuild = take_apart(model)
    weights_in = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)
    pool, pages, everywhere = pool_shapes(layout, layout.num_pages + 1, mesh), pool_shardings(layout, mesh), NamedSharding(mesh, P())
    fill, guess = example_small_batches(shapes, layout)
    return {
        "draft_fill": Recipe(fill_step(rebuild, layout), (weights_in, pool, fill), 1, pages),
        "draft": Recipe(guess_step(rebuild, layout, mesh), (weights_in, pool, guess), 1, (pages, everywhere)),
    }


def example_small_batches(shapes: Shapes, layout: PoolLayout) -> tuple[FillBatch, GuessBatch]:
    """Batches that do nothing."""
    width, b = table_width(shapes.max_len, layout.page_size), shapes.rows

    def ints(*shape: int) -> Any:
        return np.zeros(shape, np.int32)

    nothing: Any = np.int32(0)
    fill = FillBatch(ints(shapes.chunk), nothing, nothing, ints(1, width))
    return fill, GuessBatch(ints(b, shapes.num_columns), ints(b), ints(b), ints(b), ints(b, width))


def fill_step(rebuild: Callable[[Any], Any], layout: PoolLayout) -> Callable[..., PoolArrays]:
    """The keys of a chunk."""

    def fill(weights: Weights, pool: PoolArrays, batch: FillBatch) -> PoolArrays:
        at = jnp.arange(batch.tokens.shape[0])
        valid = at < batch.length
        positions = jnp.where(valid, batch.start + at, 0)
        attend = paged_attend(layout, jnp.asarray(batch.table), positions[None], valid[None])
        return _run(rebuild(weights), layout, batch.tokens, positions, pool, attend)[1]

    return fill


def guess_step(rebuild: Callable[[Any], Any], layout: PoolLayout, mesh: Mesh) -> Callable[..., tuple[PoolArrays, Int[Array, "b k"]]]:
    """The keys of new tokens, and what may come behind them: one guess less for each row than there are columns."""

    def guess(weights: Weights, pool: PoolArrays, batch: GuessBatch) -> tuple[PoolArrays, Int[Array, "b k"]]:
        model, (b, c) = rebuild(weights), batch.tokens.shape
        first, num, table = jnp.asarray(batch.positions), jnp.asarray(batch.num_tokens), jnp.asarray(batch.table)
        column = jnp.arange(c)[None]
        valid = (column < num[:, None]).reshape(b * c)
        positions = jnp.where(valid, (first[:, None] + column).reshape(b * c), 0)
        attend = paged_attend(layout, jnp.repeat(table, c, axis=0), positions[:, None], valid[:, None])
        hidden, pool = _run(model, layout, jnp.asarray(batch.tokens).reshape(b * c), positions, pool, attend)
        last = jnp.maximum(num - 1, 0)[:, None, None]
        best = first_best(whole_logits(model, jnp.take_along_axis(hidden.reshape(b, c, -1), last, axis=1)[:, 0], mesh))
        guesses = jnp.zeros((b, c - 1), jnp.int32).at[:, 0].set(best)

        def turn(i: Array, carry: tuple[PoolArrays, Array]) -> tuple[PoolArrays, Array]:
            pool, guesses = carry
            at = num + i - 1
            has_cell = (at < jnp.asarray(batch.num_cells)) & (num > 0)
            here = jnp.where(has_cell, first + at, 0)
            attend = paged_attend(layout, table, here[:, None], has_cell[:, None])
            hidden, pool = _run(model, layout, lax.dynamic_index_in_dim(guesses, i - 1, axis=1, keepdims=False), here, pool, attend)
            best = first_best(whole_logits(model, hidden, mesh))
            return pool, lax.dynamic_update_slice_in_dim(guesses, best[:, None], i, axis=1)

        return lax.fori_loop(1, c - 1, turn, (pool, guesses))

    return guess


def _run(model: Any, layout: PoolLayout, tokens: Any, positions: Any, pool: PoolArrays, attend: Any) -> tuple[Array, PoolArrays]:
    hidden, pool = run_layers(model, layout, tokens, positions, pool, attend, None)  # type: ignore[arg-type]
    return hidden, [tuple(layer) for layer in pool]


def inspect_small(config: Config, target: CheckpointInfo) -> CheckpointInfo | None:
    """The small model's headers, where one is asked for; ConfigError for one that cannot guess for the other."""
    path = config.speculate.draft_path
    if config.speculate.kind != "draft" or path is None:  # the configuration has refused draft without a path
        return None
    info = inspect_checkpoint(resolve_model_path(path, cache_folder(config.run.cache_dir)))
    check_mesh(info.config, config.mesh.tensor)
    check_pair(info.config, target.config)
    check_tokenizers(info, target)
    return info


def load_small(info: CheckpointInfo, dtype: str, mesh: Mesh) -> Any:
    """Its weights, before the pool takes a share of what memory is left."""
    return load_checkpoint(info, dtype=dtype, mesh=mesh, on_tensor=lambda done, total: check_interrupt()).model


def start_small(model: Any, config: ModelConfig, layout: PoolLayout, shapes: Shapes, mesh: Mesh, store: ProgramStore | None) -> SmallModel:
    """Compiled, or taken out of the store, and run once."""
    own = small_layout(layout, config, mesh.size)
    recipes = small_recipes(model, own, shapes, mesh)
    programs = {name: compile_program(name, recipe, mesh, store) for name, recipe in recipes.items()}
    small = SmallModel(take_apart(model)[0], own, mesh, programs["draft_fill"], programs["draft"], shapes.chunk)
    fill, guess = example_small_batches(shapes, own)
    small.fill(fill)
    small.guess(guess)
    return small
