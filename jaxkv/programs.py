"""The compiled programs: what each one computes, its fixed shape, and compiling them all before the first request.

The only place with `jax.jit`. Up to ten programs make up an engine: decode (one token for every row; with speculation verify is in its
place, which checks guesses behind it), prefill (one chunk of one prompt), gather (sixteen pages out of the pool), scatter (sixteen pages
back), copy (four pages and states within it), rotate (the keys of sixteen pages move to other positions), take (a state out of its row's
slot) and put (back into one), keep (a state where a prompt may be found again) and fetch (it from there). Their shapes come from the
configuration alone, so nothing that happens later can ask for another.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jaxkv.attention import Attend, PagedCache, paged_attend, table_width
from jaxkv.interrupt import check_interrupt
from jaxkv.pool import PoolArrays, PoolLayout, pool_sharding, state_shapes, state_shardings
from jaxkv.program_store import ProgramStore, examined
from jaxkv.sampling import HostOrDevice, Knobs, Sampled, neutral_knobs, sample, sample_first
from jaxkv.scheduler import FIRST_TOKENS
from jaxkv.scoring import Scores, Targets, no_targets, score
from jaxkv.shifting import ROTATE_PAGES, key_mover, rotate_step
from jaxkv.speculate.head import example_head_batch, example_head_chunk, prefill_with_head, verify_with_head
from jaxkv.speculate.verify import VerifyBatch, example_verify, verify_step
from jaxkv.states import Advance, advance_chunk, advance_rows

HEAD_TILE = 2  # rows of a chunk that the output head sees: never one row, XLA:CPU is many times slower there


@dataclass(frozen=True, slots=True)
class Shapes:
    """Everything a program's shape is made of, apart from the model and the pool."""

    rows: int  # of the decode batch as compiled: at least 2
    chunk: int  # prompt tokens per prefill
    max_len: int  # tokens, prompt and answer together
    vocab_size: int
    transfer_pages: int  # pages per gather and scatter
    num_columns: int = 1  # tokens of each row in a decode step: its own, and guesses behind it

    @property
    def first(self) -> int:
        """First tokens that the chunk which ends a prompt can draw, for the choices of its request."""
        return max(self.rows, FIRST_TOKENS)


class DecodeBatch(NamedTuple):
    """One token for every row. An inactive row writes to the trash page and its result is unused.

    The input of row i is number source[i] of `tokens`, `decoded` and `first`, one behind the other: i is the host's own token for it. The
    other two are what the step before has drawn, for its rows and as first tokens, and the host has not read.
    """

    tokens: Int[HostOrDevice, " b"]
    positions: Int[HostOrDevice, " b"]
    active: Bool[HostOrDevice, " b"]
    table: Int[HostOrDevice, "b w"]
    near: Int[HostOrDevice, "b v"]  # of the layers whose pages are a group of their own; v is 0 where there are none
    knobs: Knobs
    source: Int[HostOrDevice, " b"]
    decoded: Int[HostOrDevice, " b"]
    first: Int[HostOrDevice, " f"]


class PrefillBatch(NamedTuple):
    """One chunk of one prompt, padded to the chunk width."""

    tokens: Int[HostOrDevice, " t"]
    start: Int[HostOrDevice, ""]
    length: Int[HostOrDevice, ""]
    is_last: Bool[HostOrDevice, ""]
    num_first: Int[HostOrDevice, ""]  # tokens to draw if it is the last one: of the sequence itself, and of other choices
    row: Int[HostOrDevice, ""]  # whose slot holds its state
    table: Int[HostOrDevice, "1 w"]
    near: Int[HostOrDevice, "1 v"]
    knobs: Knobs  # one entry for each, the sequence's own first
    targets: Targets


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program with what compiling it took and what running it needs beside its arguments."""

    name: str
    run: Callable[..., Any]
    compile_s: float
    temp_bytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class Programs:
    """All programs of an engine."""

    decode: Program  # or verify
    prefill: Program
    gather: Program | None = None  # None: no layer of this model has pages
    scatter: Program | None = None
    copy: Program | None = None
    rotate: Program | None = None  # None: this model's contexts cannot shift
    take: Program | None = None  # None: no layer has a state
    put: Program | None = None
    keep: Program | None = None  # None: no states are kept
    fetch: Program | None = None
    gather_near: Program | None = None  # None: no layers have pages of their own
    scatter_near: Program | None = None
    copy_near: Program | None = None

    def movers(self) -> dict[str, Callable[..., Any]]:
        """Those that move pages out and in, and those that do so with states."""
        some = {"gather": self.gather, "scatter": self.scatter, "take": self.take, "put": self.put}
        some |= {"gather_near": self.gather_near, "scatter_near": self.scatter_near}
        return {name: program.run for name, program in some.items() if program is not None}

    def all(self) -> tuple[Program, ...]:
        """In the order in which a request meets them."""
        some = (self.prefill, self.decode, self.gather, self.scatter, self.copy, self.rotate, self.take, self.put, self.keep, self.fetch)
        near = (self.gather_near, self.scatter_near, self.copy_near)
        return tuple(program for program in (*some, *near) if program is not None)


def example_verify_batch(shapes: Shapes, layout: PoolLayout) -> VerifyBatch:
    """The same for the program that checks guesses."""
    width, knobs = table_width(shapes.max_len, layout.page_size), neutral_knobs(shapes.rows, shapes.max_len, shapes.vocab_size)
    return example_verify(shapes.rows, shapes.num_columns, width, width if layout.near else 0, knobs)


def example_batches(shapes: Shapes, layout: PoolLayout) -> tuple[DecodeBatch, PrefillBatch]:
    """Batches that do nothing, as NumPy arrays of the compiled shapes: for compiling and for warming up."""
    width = table_width(shapes.max_len, layout.page_size)

    def ints(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int32)

    near_width = width if layout.near else 0
    b, c = shapes.rows, shapes.chunk
    knobs = neutral_knobs(b, shapes.max_len, shapes.vocab_size)
    tables, own = (ints(b, width), ints(b, near_width)), np.arange(b, dtype=np.int32)
    decode = DecodeBatch(ints(b), ints(b), np.zeros(b, bool), *tables, knobs, own, ints(b), ints(shapes.first))
    start, length, is_last, num_first, row = numbers(0, 1, 1, 0, is_last=True)
    first = neutral_knobs(shapes.first, shapes.max_len, shapes.vocab_size)
    prefill = PrefillBatch(ints(c), start, length, is_last, num_first, row, ints(1, width), ints(1, near_width), first, no_targets(c))
    return decode, prefill


def numbers(start: int, length: int, num_first: int, row: int, *, is_last: bool) -> tuple[Any, Any, Any, Any, Any]:
    """Those of a chunk as a program takes them."""
    return np.int32(start), np.int32(length), np.bool_(is_last), np.int32(num_first), np.int32(row)


Weights = list[Array]
Pair = tuple[nnx.Module, nnx.Module]  # a model and its draft head
Rebuild = Callable[[Weights], Any]


def take_apart(model: nnx.Module | Pair) -> tuple[Weights, Rebuild]:
    """The arrays of a model, or of one with its head, as a plain list, and how a program makes the model of them again.

    A list, because every call of a program walks its arguments on the host: flax's own state of SmolLM2 takes 2.5 ms a step, a list 0.2.
    """
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return leaves, lambda weights: nnx.merge(graph, jax.tree.unflatten(structure, weights))


def decode_step(rebuild: Rebuild, layout: PoolLayout, mesh: Mesh) -> Callable[..., tuple[PoolArrays, Sampled]]:
    """One token for every row: [b] tokens in, [b] tokens out."""

    def decode(weights: Weights, pool: PoolArrays, batch: DecodeBatch) -> tuple[PoolArrays, Sampled]:
        model = rebuild(weights)
        active = jnp.asarray(batch.active)
        attend = paged_attend(
            layout, jnp.asarray(batch.table), jnp.asarray(batch.positions)[:, None], active[:, None], jnp.asarray(batch.near)
        )
        tokens = jnp.take(jnp.concatenate([batch.tokens, batch.decoded, batch.first]), batch.source, mode="clip")
        with jax.named_scope("layers"):
            hidden, pool = run_layers(model, layout, tokens, batch.positions, pool, attend, advance_rows(layout, active))
        with jax.named_scope("head"):
            logits = whole_logits(model, hidden, mesh)
        with jax.named_scope("sample"):
            return pool, sample(logits, batch.knobs)

    return decode


def prefill_step(rebuild: Rebuild, layout: PoolLayout, vocab_size: int, mesh: Mesh) -> Callable[..., tuple[PoolArrays, Sampled, Scores]]:
    """One chunk of one prompt."""
    compute = chunk_step(layout, vocab_size, mesh)

    def prefill(weights: Weights, pool: PoolArrays, batch: PrefillBatch) -> tuple[PoolArrays, Sampled, Scores]:
        pool, sampled, scores, _ = compute(rebuild(weights), pool, batch)
        return pool, sampled, scores

    return prefill


def chunk_step(layout: PoolLayout, vocab_size: int, mesh: Mesh) -> Callable[..., tuple[PoolArrays, Sampled, Scores, Array]]:
    """The same for a model, with its hidden states; the chunk that ends the prompt also samples first tokens from one row of logits, the
    others skip the head.

    Where the prompt's own logprobs are wanted the head runs over the whole chunk.
    """

    def compute(model: Any, pool: PoolArrays, batch: PrefillBatch) -> tuple[PoolArrays, Sampled, Scores, Array]:
        at = jnp.arange(batch.tokens.shape[0])
        valid = at < batch.length
        positions = jnp.where(valid, batch.start + at, 0)
        attend = paged_attend(layout, jnp.asarray(batch.table), positions[None], valid[None], jnp.asarray(batch.near))
        advance = advance_chunk(layout, jnp.asarray(batch.row), jnp.asarray(batch.start), jnp.asarray(batch.length))
        with jax.named_scope("layers"):
            hidden, pool = run_layers(model, layout, batch.tokens, positions, pool, attend, advance)
        first = jnp.maximum(batch.length - HEAD_TILE, 0)
        tile = lax.dynamic_slice_in_dim(hidden, first, HEAD_TILE, axis=0)

        def whole(rows: Array) -> Array:
            return whole_logits(model, rows, mesh)

        def head(_: None) -> Array:
            logits = whole(tile)
            return lax.dynamic_slice_in_dim(logits, batch.length - 1 - first, 1, axis=0)

        with jax.named_scope("head"):
            logits = lax.cond(batch.is_last, head, lambda _: jnp.zeros((1, vocab_size), jnp.float32), None)
        with jax.named_scope("sample"):
            num_first = jnp.where(batch.is_last, jnp.asarray(batch.num_first), 0)
            sampled = sample_first(logits, batch.knobs, num_first)
        with jax.named_scope("score"):
            return pool, sampled, score(hidden, jnp.asarray(batch.length), batch.targets, vocab_size, whole), hidden

    return compute


def run_layers(
    model: Any, layout: PoolLayout, tokens: Any, positions: Any, pool: PoolArrays, attend: Attend, advance: Advance
) -> tuple[Array, PoolArrays]:
    """Hidden states, and the pool with what these tokens changed in pages and states."""
    cache: Any = PagedCache(pool[: layout.num_layers], None, pool[layout.num_layers :])  # type: ignore[arg-type]
    more = (advance,) if layout.states else ()
    hidden, cache = model(tokens, positions, cache, attend, *more)
    return hidden, [*cache.pool, *cache.states]


def whole_logits(model: Any, hidden: Array, mesh: Mesh) -> Array:
    """Sampling sees whole rows of logits on every device, so that a draw does not depend on how the head was split."""
    logits = model.logits(hidden)
    return logits if mesh.size == 1 else lax.with_sharding_constraint(logits, NamedSharding(mesh, P()))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A program before it is compiled: the function, the shapes of its arguments, which one is donated, where its results go."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: int | None
    out_shardings: Any


def step_recipes(model: nnx.Module | Pair, layout: PoolLayout, shapes: Shapes, mesh: Mesh) -> dict[str, Recipe]:
    """The programs that compute tokens: prefill, and decode or verify; both guess too where the model comes with a draft head."""
    weights, rebuild = take_apart(model)
    decode, prefill = example_batches(shapes, layout)
    everywhere, states = NamedSharding(mesh, P()), state_shardings(layout, mesh)
    pool, pages = page_shapes(layout, mesh) + state_shapes(layout, states), pool_shardings(layout, mesh) + states
    weights_in = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), weights)
    whole = functools.partial(whole_logits, mesh=mesh)
    if isinstance(model, tuple):
        compute, verify = chunk_step(layout, shapes.vocab_size, mesh), verify_with_head(rebuild, layout, run_layers, whole)
        chunk = prefill_with_head(rebuild, layout, compute, whole, shapes.num_columns - 1)
        guesses = example_head_batch(example_verify_batch(shapes, layout))
        return {
            "prefill": Recipe(chunk, (weights_in, pool, example_head_chunk(prefill)), 1, (pages, everywhere, everywhere, everywhere)),
            "verify": Recipe(verify, (weights_in, pool, guesses), 1, (pages, everywhere, everywhere)),
        }
    chunk = prefill_step(rebuild, layout, shapes.vocab_size, mesh)
    made = {"prefill": Recipe(chunk, (weights_in, pool, prefill), 1, (pages, everywhere, everywhere))}
    if shapes.num_columns > 1:
        verify = verify_step(rebuild, layout, run_layers, whole)
        return made | {"verify": Recipe(verify, (weights_in, pool, example_verify_batch(shapes, layout)), 1, (pages, everywhere))}
    return made | {"decode": Recipe(decode_step(rebuild, layout, mesh), (weights_in, pool, decode), 1, (pages, everywhere))}


def shift_recipes(model: nnx.Module | Pair, layout: PoolLayout, mesh: Mesh) -> dict[str, Recipe]:
    """The program that moves keys to other positions, for families that have one."""
    move = key_mover(type(model), getattr(model, "config", None))
    if move is None or layout.states or layout.near or isinstance(model, tuple):
        return {}
    ids, pool = np.zeros(ROTATE_PAGES, np.int32), pool_shapes(layout, layout.num_pages + 1, mesh)
    return {"rotate": Recipe(rotate_step(move, layout), (pool, ids, ids, np.int32(0)), 0, pool_shardings(layout, mesh))}


def pool_shapes(layout: PoolLayout, num_pages: int, mesh: Mesh) -> list[Any]:
    """So many pages of every layer, as shapes."""
    pages = jax.ShapeDtypeStruct((num_pages, *layout.page_shape), layout.storage, sharding=pool_sharding(mesh))
    return [(pages, pages)] * layout.num_layers


def page_shapes(layout: PoolLayout, mesh: Mesh) -> list[Any]:
    """All pages of every layer that has any, as shapes."""
    apart, together = (pool_shapes(group, group.num_pages + 1, mesh) for group in (layout.apart, layout.together))
    return [apart.pop() if layer in layout.near else together.pop() for layer in range(layout.num_layers)]


def pool_shardings(layout: PoolLayout, mesh: Mesh) -> list[Any]:
    """Where they live."""
    return [(pool_sharding(mesh), pool_sharding(mesh))] * layout.num_layers


def build_programs(
    model: nnx.Module | Pair,
    layout: PoolLayout,
    shapes: Shapes,
    mesh: Mesh,
    moves: dict[str, Recipe],
    store: ProgramStore | None,
    *,
    exact_float32: bool,
) -> Programs:
    """Compile every program, from shapes alone, or take it out of the store; `moves` are the recipes of those that move pages."""
    recipes = step_recipes(model, layout, shapes, mesh) | moves | shift_recipes(model, layout, mesh)
    with jax.default_matmul_precision("highest" if exact_float32 else "default"):
        found = {name: compile_program(name, recipe, mesh, store) for name, recipe in recipes.items()}
    return Programs(**{"decode" if name == "verify" else name: program for name, program in found.items()})


def jit_recipe(recipe: Recipe, mesh: Mesh) -> Any:
    """The jitted function; every NumPy argument is replicated over the mesh."""
    everywhere = NamedSharding(mesh, P())
    return jax.jit(
        recipe.function,
        donate_argnums=() if recipe.donate is None else recipe.donate,
        in_shardings=jax.tree.map(lambda x: getattr(x, "sharding", None) or everywhere, recipe.arguments),
        out_shardings=recipe.out_shardings,
        keep_unused=True,  # memory that is given up for a result is not read
        compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )


def compile_program(name: str, recipe: Recipe, mesh: Mesh, store: ProgramStore | None = None) -> Program:
    """Lower and compile one program for its arguments, or take it out of the store where it was kept."""
    check_interrupt()
    start, platform = time.perf_counter(), mesh.devices.flat[0].platform

    def lower() -> Any:
        return jit_recipe(recipe, mesh).lower(*recipe.arguments)

    found = examined(lower().compile()) if store is None else store.build(recipe, lower, repr(compiler_options(platform)))
    run = one_at_a_time(found.run) if mesh.size > 1 and platform == "cpu" else found.run
    return Program(name, run, time.perf_counter() - start, found.temp_bytes, found.flops)


def one_at_a_time(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for every run: XLA:CPU deadlocks when several forced host devices have many collectives queued."""

    def run(*arguments: Any) -> Any:
        return jax.block_until_ready(compiled(*arguments))

    return run


def compiler_options(platform: str) -> dict[str, str | int | bool] | None:
    """Flags that exactness needs. On a GPU autotuning could choose other kernels in the next process, so it is off."""
    return {"xla_gpu_autotune_level": 0, "xla_gpu_deterministic_ops": True} if platform in ("gpu", "cuda", "rocm") else None
