"""From a configuration to a warm engine: check, load, size the pool, compile, run every program once. Takes no requests.

What can be refused is refused before weights are read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxkv.config import Config, available_memory_bytes, num_draft, resolve_host_budget, scheduler_config
from jaxkv.errors import ConfigError
from jaxkv.fetch import cache_folder, resolve_model_path
from jaxkv.fingerprint import early_facts, fingerprint, fingerprint_facts
from jaxkv.forking import copy_recipes, warm_up_copies
from jaxkv.interrupt import check_interrupt
from jaxkv.models import (
    Checkpoint,
    CheckpointInfo,
    ModelConfig,
    about_copies,
    check_mesh,
    inspect_checkpoint,
    load_checkpoint,
    load_draft_head,
    spread,
)
from jaxkv.page_programs import mode_recipes
from jaxkv.pool import PoolHolder, PoolLayout, allocate, pool_sharding
from jaxkv.pool_size import MIB, check_pool, check_staging, compiled_width, plan_layout, size_pool
from jaxkv.program_store import open_store
from jaxkv.programs import HEAD_TILE, Programs, Shapes, Weights, build_programs, example_batches, example_verify_batch, take_apart
from jaxkv.scheduler import Chunk, SchedulerConfig
from jaxkv.shifting import ROTATE_PAGES, check_default_shift
from jaxkv.snapshots import allocate_snapshots, snapshot_recipes, warm_up_snapshots
from jaxkv.speculate.head import example_head_batch, example_head_chunk
from jaxkv.speculate.small import SmallModel, inspect_small, load_small, small_layout, start_small
from jaxkv.state_programs import state_recipes
from jaxkv.states import about_states
from jaxkv.transfer import HostMemory, Transfer, TransferSettings, choose_mode, host_states, probe_host_memory
from jaxkv.windows import about_windows

OnStage = Callable[[str, float], None]


@dataclass(slots=True)
class Parts:
    """All that an engine runs on, ready."""

    checkpoint: Checkpoint
    weights: Weights
    mesh: Mesh
    layout: PoolLayout
    shapes: Shapes
    programs: Programs
    pool: PoolHolder
    transfer: Transfer
    small: SmallModel | None  # that guesses
    host: HostMemory
    scheduler_config: SchedulerConfig
    fingerprint_facts: dict[str, object]
    fingerprint: str
    messages: list[str]


def start(config: Config, on_stage: OnStage | None = None) -> Parts:
    """Do everything up to the first request. Raises ConfigError, or the models' own error, with one clear message."""
    stage = Stages(on_stage)
    plan = outline(config)
    info, mesh, dtype, shapes = plan.info, plan.mesh, plan.dtype, plan.shapes
    use_compilation_cache(cache_folder(config.run.cache_dir))
    store, kind = open_store(mesh), repr((plan.facts(), config.pool, config.transfer))
    if store is not None:
        store.load_ahead(kind)
    stage("check")
    checkpoint = load_checkpoint(
        info,
        dtype=dtype,
        mesh=mesh,
        weight_dtype=plan.weight_dtype,
        on_stage=on_stage,
        on_tensor=lambda done, total: check_interrupt(),
    )
    model = checkpoint.model
    if config.speculate.kind == "mtp":
        model = (model, load_draft_head(info, dtype=dtype, mesh=mesh, weight_dtype=plan.weight_dtype))
    small_model = None if plan.small is None else load_small(plan.small, dtype, mesh)
    stage.skip()
    host = probe_host_memory(pool_sharding(mesh))
    beside = 0 if plan.small is None else small_layout(plan.layout, plan.small.config, mesh.size).page_bytes
    layout = size_pool(config, info.config, plan.layout, shapes, mesh, beside)
    check_default_shift(config, info.config, num_pages=layout.num_pages, max_len=shapes.max_len)
    mode = choose_mode(config.transfer.mode, mesh.devices.flat[0].platform, host)
    moves = mode_recipes(mode, layout, shapes.transfer_pages, mesh, host.sharding) | copy_recipes(layout, mesh)
    moves |= state_recipes(mode, layout, mesh, host_states(layout, mesh, host)) | snapshot_recipes(layout, mesh)
    programs = build_programs(model, layout, shapes, mesh, moves, store, exact_float32=dtype == "float32")
    small = None if plan.small is None else start_small(small_model, plan.small.config, layout, shapes, mesh, store)
    if store is not None:
        store.note_used(kind)
    stage("compile")
    kept = allocate_snapshots(layout, mesh)
    pool = PoolHolder(allocate(layout, mesh), **programs.movers(), num_states=len(layout.states), snapshots=kept, near=layout.near)
    transfer = Transfer(pool, layout, host, transfer_settings(config, layout, host, mode))
    weights, _ = take_apart(model)
    warm_up(weights, pool, transfer, programs, layout, shapes, has_head=config.speculate.kind == "mtp")
    stage("warm up")
    budget, clamped = resolve_host_budget(config, available_memory_bytes())
    facts = fingerprint_facts(checkpoint, dtype, plan.weight_dtype, layout, shapes, mesh)
    return Parts(
        checkpoint=checkpoint,
        weights=weights,
        mesh=mesh,
        layout=layout,
        shapes=shapes,
        programs=programs,
        pool=pool,
        transfer=transfer,
        small=small,
        host=host,
        scheduler_config=scheduler_config(
            config,
            num_pages=layout.num_pages,
            max_len=shapes.max_len,
            chunk_bytes=transfer.chunk_bytes,
            state_bytes=transfer.state_bytes,
            budget=budget,
            hold=mode == "hold",
            window=layout.window,
            near=(layout.near_window, layout.near_pages, transfer.near_bytes),
        ),
        fingerprint_facts=facts,
        fingerprint=fingerprint(facts),
        messages=[banner(plan, layout, transfer), *remarks(config, info.config, layout, shapes, host, clamped)],
    )


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known and was checked before weights are read. The layout has 0 pages where the memory decides."""

    info: CheckpointInfo
    mesh: Mesh
    dtype: str
    weight_dtype: str | None  # int8; None: as the model
    shapes: Shapes
    layout: PoolLayout
    small: CheckpointInfo | None  # of a small model that guesses

    def facts(self) -> dict[str, object]:
        """What is known of the fingerprint."""
        return early_facts(self.info, self.dtype, self.weight_dtype, self.layout, self.shapes, self.mesh)


def outline(config: Config) -> Outline:
    """Read the checkpoint's headers, and refuse what can be refused."""
    info = inspect_checkpoint(resolve_model_path(config.model.path, cache_folder(config.run.cache_dir)))
    check_mesh(info.config, config.mesh.tensor)
    mesh = make_mesh(config.mesh.tensor)
    backend = mesh.devices.flat[0].platform
    dtype = choose_dtype(config.model.dtype, backend, info)
    shapes = choose_shapes(config, info.config)
    if config.speculate.kind == "mtp" and info.draft_config is None:
        raise ConfigError(
            f"speculate.kind: got mtp, but {config.model.path} has no draft head; take ngram or none, or a Hugging Face folder of "
            "Qwen3-Next, Qwen3.5 or Qwen3.6 with tensors named mtp.*"
        )
    layout = plan_layout(config, spread(info.config, mesh.size), shapes, dtype, backend)
    check_staging(config, layout)
    if config.pool.tokens is not None and layout.num_layers:
        check_pool(config, shapes)
        check_default_shift(config, info.config, num_pages=layout.num_pages, max_len=shapes.max_len)
    return Outline(info, mesh, dtype, choose_weight_dtype(config, info), shapes, layout, inspect_small(config, info))


class Stages:
    """Times the stages of the start-up, one after another."""

    def __init__(self, on_stage: OnStage | None) -> None:
        self._on_stage = on_stage
        self._since = time.perf_counter()

    def __call__(self, name: str) -> None:
        """The stage that just ended."""
        if self._on_stage is not None:
            self._on_stage(name, time.perf_counter() - self._since)
        self.skip()

    def skip(self) -> None:
        """What went by was told by somebody else."""
        check_interrupt()
        self._since = time.perf_counter()


def make_mesh(tensor: int) -> Mesh:
    """The first `tensor` devices on one axis."""
    devices = jax.devices()
    if tensor > len(devices):
        raise ConfigError(
            f"mesh.tensor: got {tensor}, but there are {len(devices)} {devices[0].platform} devices; lower it"
            + (", or set XLA_FLAGS=--xla_force_host_platform_device_count" if devices[0].platform == "cpu" else "")
        )
    return Mesh(np.array(devices[:tensor]), ("tensor",))


def choose_dtype(asked: str, backend: str, info: CheckpointInfo) -> str:
    """`auto` is float32 on a CPU, which has no fast bfloat16, and the checkpoint's own elsewhere."""
    if asked != "auto":
        return asked
    return "float32" if backend == "cpu" else info.config.dtype


def choose_weight_dtype(config: Config, info: CheckpointInfo) -> str | None:
    """`auto` is as they are stored: int8 where a folder was converted so, else None, the model's dtype."""
    return info.weight_dtype if config.model.weight_dtype == "auto" else config.model.weight_dtype


def choose_shapes(config: Config, model: ModelConfig) -> Shapes:
    """What the programs will be compiled for."""
    max_len = config.model.max_len or model.max_position
    if max_len > model.max_position:
        raise ConfigError(f"model.max_len: got {max_len}, the model goes to {model.max_position}; lower it")
    scheduler = config.scheduler
    rows, chunk = compiled_width(scheduler.rows), max(HEAD_TILE, compiled_width(scheduler.prefill_chunk))
    return Shapes(rows, chunk, max_len, model.vocab_size, config.transfer.chunk_pages, 1 + num_draft(config))


def transfer_settings(config: Config, layout: PoolLayout, host: HostMemory, mode: str) -> TransferSettings:
    """The transfer section, with what the probe found."""
    t = config.transfer
    return TransferSettings(
        mode=mode,
        chunk_pages=t.chunk_pages,
        max_in_flight=t.staging_mib * MIB // (layout.page_bytes * t.chunk_pages or layout.state_bytes),
        blocking=t.blocking or host.why_blocking is not None,
        timeout_s=t.timeout_s,
        delay_steps=config.debug.copy_delay_steps,
    )


def remarks(config: Config, model: ModelConfig, layout: PoolLayout, shapes: Shapes, host: HostMemory, clamped: str | None) -> list[str]:
    """What else is to be said once."""
    said = [*about_states(config, layout), *about_windows(config, model, layout, shapes.max_len), *about_copies(model, config.mesh.tensor)]
    return [*said, *(line for line in (clamped, blocking_message(config, host)) if line)]


def blocking_message(config: Config, host: HostMemory) -> str | None:
    """Said once where blocking copies were not asked for but are all there is."""
    if host.why_blocking is None or config.transfer.blocking:
        return None
    return f"copies will block (as transfer.blocking: true): {host.why_blocking}; images are kept as {host.kind}"


def banner(plan: Outline, layout: PoolLayout, transfer: Transfer) -> str:
    """One line about what runs where, with the memory kind that the image parked in warming up really got."""
    device, kinds = plan.mesh.devices.flat[0], ", ".join(sorted(transfer.stats.memory_kinds))
    numbers = plan.dtype if plan.weight_dtype is None else f"{plan.dtype} with weights in {plan.weight_dtype}"
    pages = f"pool of {layout.num_tokens} tokens ({layout.num_pages} pages of {layout.page_size}, {layout.pages_bytes / MIB:.0f} MiB)"
    states = f"states of {layout.rows} rows ({layout.states_bytes / MIB:.0f} MiB)"
    room = [*([pages] if layout.num_layers else []), *([states] if layout.states else [])]
    return (
        f"{plan.info.config.model_type} in {numbers} on {plan.mesh.size} x {device.device_kind}; {', '.join(room)}; "
        f"parked images go to {kinds} memory"
    )


def use_compilation_cache(folder: Path) -> None:
    """Keep compiled programs on disk, unless the user has chosen a place already."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def warm_up(
    weights: Weights,
    pool: PoolHolder,
    transfer: Transfer,
    programs: Programs,
    layout: PoolLayout,
    shapes: Shapes,
    *,
    has_head: bool = False,
) -> None:
    """Run every program once on the trash page, and park and restore one image, so that the first park costs what the hundredth does."""
    decode, prefill = example_batches(shapes, layout)
    verify = example_verify_batch(shapes, layout)
    rows: Any = decode if shapes.num_columns == 1 else example_head_batch(verify) if has_head else verify
    prompt: Any = example_head_chunk(prefill) if has_head else prefill
    pool.arrays, sampled, *_ = programs.prefill.run(weights, pool.arrays, prompt)
    pool.arrays, sampled, *_ = programs.decode.run(weights, pool.arrays, rows)
    np.asarray(sampled.token)
    warm_up_copies(programs, pool, layout)
    if programs.rotate is not None:
        beyond = np.full(ROTATE_PAGES, layout.num_pages + 1, np.int32)
        pool.arrays = programs.rotate.run(pool.arrays, beyond, beyond, np.int32(0))
    warm_up_snapshots(programs, pool)
    chunks = [Chunk(-1, 0, 0, (0,), host_id=-1)] if layout.num_layers else []
    chunks += [Chunk(-1, 0, 0, (0,), host_id=-1, is_near=True)] if layout.near else []
    for chunk in [*chunks, *([Chunk(-1, 0, 1, (), host_id=-1, row=0)] if layout.states else [])]:
        for move, settled in ((transfer.park, "parked"), (transfer.restore, "restored")):
            move(chunk, step=0)
            landed = transfer.poll(step=2**30)
            while not getattr(landed, settled):
                time.sleep(1e-4)
                landed = transfer.poll(step=2**30)
        assert not transfer.verify()
        transfer.discard(-1)
    transfer.reset_stats()
