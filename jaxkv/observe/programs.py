"""What is compiled for a configuration, and what each program takes: shapes, FLOPs, memory, time. Loads no weights and runs nothing."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxkv.config import Config
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.forking import copy_recipes
from jaxkv.interrupt import check_interrupt
from jaxkv.models import ModelConfig, check_mesh, inspect_checkpoint, spread
from jaxkv.models.parameters import abstract_model, shardings
from jaxkv.page_programs import mode_recipes
from jaxkv.pool import PoolLayout, pool_sharding
from jaxkv.pool_size import check_pool, check_staging, plan_layout, size_pool
from jaxkv.programs import Recipe, Shapes, jit_recipe, shift_recipes, step_recipes
from jaxkv.snapshots import snapshot_recipes
from jaxkv.speculate.small import inspect_small, small_layout, small_recipes
from jaxkv.startup import choose_dtype, choose_shapes, choose_weight_dtype, make_mesh
from jaxkv.state_programs import state_recipes
from jaxkv.transfer import HOST_KIND, HostMemory, choose_mode, host_sharding, host_states

_NAMES: dict[str, tuple[str, ...]] = {"prefill": ("weights", "pool", "batch"), "decode": ("weights", "pool", "batch")}
_NAMES |= dict.fromkeys(("verify", "draft", "draft_fill"), ("weights", "pool", "batch"))
_NAMES |= {"gather": ("pool", "ids", "into"), "scatter": ("pool", "pages", "ids"), "rotate": ("pool", "sources", "targets", "distance")}
_NAMES |= {"copy": ("pool", "moves"), "take": ("states", "row", "into"), "put": ("states", "state", "row")}


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a program: its arrays, equal ones counted, and their bytes."""

    name: str
    shapes: tuple[str, ...]  # "60 x float32[49,2,16,64]"
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """One compiled program. Bytes and FLOPs are XLA's own figures, per device; None where the backend does not tell."""

    name: str
    arguments: tuple[Argument, ...]
    flops: float | None  # a loop's body counts once
    argument_bytes: int | None
    output_bytes: int | None
    aliased_bytes: int | None  # of the output, what is an argument updated in place
    temp_bytes: int | None
    code_bytes: int | None
    compile_s: float  # traced, lowered and compiled, without the cache on disk

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ProgramList:
    """All programs of a configuration and what they were compiled for."""

    model: str
    dtype: str
    devices: str
    pool_tokens: int
    programs: tuple[ProgramFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def list_programs(config: Config) -> ProgramList:
    """Compile everything for shapes alone. Raises ConfigError or ModelError as the engine would.

    Where the memory decides on the pool's size, no weights are loaded yet, so the pool is larger than the engine's by as much.
    """
    info = inspect_checkpoint(resolve_model_path(config.model.path, cache_folder(config.run.cache_dir)))
    check_mesh(info.config, config.mesh.tensor)
    mesh = make_mesh(config.mesh.tensor)
    device = mesh.devices.flat[0]
    dtype, shapes = choose_dtype(config.model.dtype, device.platform, info), choose_shapes(config, info.config)
    small = inspect_small(config, info)
    layout = sized(config, info.config, plan_layout(config, spread(info.config, mesh.size), shapes, dtype, device.platform), shapes, mesh)
    weight_dtype = choose_weight_dtype(config, info)
    model: Any = weightless_model(spread(info.config, mesh.size), dtype, mesh, weight_dtype)
    if config.speculate.kind == "mtp" and info.draft_config is not None:
        model = (model, weightless_model(spread(info.draft_config, mesh.size), dtype, mesh, weight_dtype))
    host = HostMemory(host_sharding(pool_sharding(mesh)), HOST_KIND)
    mode = choose_mode(config.transfer.mode, device.platform, host)
    recipes = step_recipes(model, layout, shapes, mesh) | mode_recipes(mode, layout, shapes.transfer_pages, mesh, host.sharding)
    recipes |= copy_recipes(layout, mesh) | snapshot_recipes(layout, mesh)
    recipes |= shift_recipes(model, layout, mesh) | state_recipes(mode, layout, mesh, host_states(layout, mesh, host))
    if small is not None:
        recipes |= small_recipes(
            weightless_model(spread(small.config, mesh.size), dtype, mesh, small.weight_dtype),
            small_layout(layout, small.config, mesh.size),
            shapes,
            mesh,
        )
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        found = tuple(measure(name, recipe, mesh) for name, recipe in recipes.items())
    return ProgramList(info.config.model_type, dtype, f"{mesh.size} x {device.device_kind}", layout.num_tokens, found)


def weightless_model(config: ModelConfig, dtype: str, mesh: jax.sharding.Mesh, weight_dtype: str | None = None) -> nnx.Module:
    """The model with a shape, a dtype and a sharding where each weight would be."""
    wanted = shardings(config, dtype, mesh, weight_dtype)
    graph, variables = abstract_model(config, dtype, weight_dtype)
    keys = {path: tuple(int(part) if part.isdigit() else part for part in path.split(".")) for path in variables}
    return nnx.merge(graph, nnx.from_flat_state([(keys[path], variable.replace(wanted[path])) for path, variable in variables.items()]))


def sized(config: Config, model: ModelConfig, layout: PoolLayout, shapes: Shapes, mesh: jax.sharding.Mesh) -> PoolLayout:
    """The pool's layout after the engine's own checks."""
    check_staging(config, layout)
    if config.pool.tokens is not None and layout.num_layers:
        check_pool(config, shapes)
    return size_pool(config, model, layout, shapes, mesh)


def measure(name: str, recipe: Recipe, mesh: jax.sharding.Mesh) -> ProgramFacts:
    """Compile one program, past the cache on disk, and ask XLA about it."""
    check_interrupt()
    cached = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        start = time.perf_counter()
        compiled = jit_recipe(recipe, mesh).lower(*recipe.arguments).compile()
        took = time.perf_counter() - start
    finally:
        jax.config.update("jax_enable_compilation_cache", cached)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    sizes = {field: getattr(memory, f"{field}_size_in_bytes", None) for field in ("argument", "output", "alias", "temp", "generated_code")}
    names = _NAMES[name.removesuffix("_near")]
    return ProgramFacts(
        name=name,
        arguments=tuple(describe(n, tree) for n, tree in zip(names, recipe.arguments, strict=False)),  # `into` is not always there
        flops=cost.get("flops"),
        argument_bytes=sizes["argument"],
        output_bytes=sizes["output"],
        aliased_bytes=sizes["alias"],
        temp_bytes=sizes["temp"],
        code_bytes=sizes["generated_code"],
        compile_s=took,
    )


def describe(name: str, tree: Any) -> Argument:
    """An argument's arrays in words, the most bytes first."""
    leaves = jax.tree.leaves(tree)
    found = Counter((str(np.dtype(leaf.dtype)), tuple(leaf.shape)) for leaf in leaves)
    ordered = sorted(found.items(), key=lambda item: -item[1] * num_bytes(*item[0]))
    shapes = tuple(f"{f'{num} x ' if num > 1 else ''}{dtype}[{','.join(map(str, shape))}]" for (dtype, shape), num in ordered)
    return Argument(name, shapes, sum(num * num_bytes(*kind) for kind, num in found.items()))


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one array."""
    return int(np.prod(shape, dtype=np.int64)) * jax.numpy.dtype(dtype).itemsize
