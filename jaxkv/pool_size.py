"""How large the pool is: what the configuration asks for, what the memory allows, what must fit into staging. Allocates nothing."""

from dataclasses import replace

from jax.sharding import Mesh

from jaxkv.cargo import near_weight, state_weight
from jaxkv.config import Config, available_memory_bytes
from jaxkv.errors import ConfigError
from jaxkv.models import ModelConfig
from jaxkv.pool import PoolLayout, StateArray, storage_dtype
from jaxkv.programs import Shapes
from jaxkv.states import state_arrays
from jaxkv.windows import near_layers, near_pages, sequence_pages

MIB = 2**20


def compiled_width(num: int) -> int:
    """For how many rows, or tokens of a chunk, programs are compiled: never one, which is slow, and an even number. Of three the last one
    had other last bits with `gemma3_text` in float32 on XLA:CPU, in the whole program and in no layer by itself; nothing else that was
    tried had (widths of 2 and 4 to 9, other families at three)."""
    return max(2, num + num % 2)


def check_pool(config: Config, shapes: Shapes) -> None:
    """The configuration itself refuses a pool below one chunk; a model whose limit is below the chunk is caught here."""
    tokens = config.pool.tokens or 0
    if tokens // config.pool.page_size < 1:
        raise ConfigError(f"pool.tokens: got {tokens}, less than one page of {config.pool.page_size} tokens; raise it")


def plan_layout(config: Config, model: ModelConfig, shapes: Shapes, dtype: str, backend: str) -> PoolLayout:
    """The pool's shape with as many pages as the configuration names (0 when the memory decides, or where no layer has any)."""
    kv_dtype = dtype if config.pool.kv_dtype == "auto" else config.pool.kv_dtype
    page_size, states = config.pool.page_size, state_arrays(model, dtype, backend)
    num_layers = model.num_layers - len(states) + (config.speculate.kind == "mtp")  # the draft head's is the last one
    layout = PoolLayout(
        num_layers=num_layers,
        num_pages=(config.pool.tokens or 0) // page_size if num_layers else 0,
        page_size=page_size,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=kv_dtype,
        storage=storage_dtype(backend, kv_dtype),
        states=states,
        rows=shapes.rows if states else 0,
        snapshots=config.pool.state_snapshots if states and config.pool.prefix_cache else 0,
        window=model.window,
    )
    return layout if config.pool.tokens is None else set_apart(config, model, shapes, layout)


def set_apart(config: Config, model: ModelConfig, shapes: Shapes, layout: PoolLayout) -> PoolLayout:
    """The layers with a window get pages of their own, where others see all and all rows together need fewer than the pool has.

    Not where requests shift their contexts, since a shift may need more than the window.
    """
    near, window = near_layers(model)
    num_pages = near_pages(model, shapes.rows, shapes.max_len, max(shapes.chunk, shapes.num_columns), layout.page_size, layout.num_pages)
    if not num_pages or config.request.context_shift:
        return layout
    return replace(layout, near=near, near_pages=num_pages, near_window=window)


def check_staging(config: Config, layout: PoolLayout) -> None:
    """At least one chunk, and one state where there are any, must fit the staging memory."""
    chunk = layout.page_bytes * near_weight(layout) * config.transfer.chunk_pages
    state = state_weight(layout, config.transfer.chunk_pages) * (chunk or layout.state_bytes)
    if layout.states and state > config.transfer.staging_mib * MIB:
        raise ConfigError(
            f"transfer.staging_mib: got {config.transfer.staging_mib}, one sequence's state takes {state / MIB:.1f} MiB; "
            f"raise it to {-(-state // MIB)}"
        )
    if chunk > config.transfer.staging_mib * MIB:
        raise ConfigError(
            f"transfer.staging_mib: got {config.transfer.staging_mib}, one chunk of {config.transfer.chunk_pages} pages takes "
            f"{chunk / MIB:.1f} MiB; raise it to {-(-chunk // MIB)} or lower transfer.chunk_pages"
        )


def size_pool(config: Config, model: ModelConfig, layout: PoolLayout, shapes: Shapes, mesh: Mesh, beside: int = 0) -> PoolLayout:
    """Check a given pool against the memory there is, or take a share of it: never more than all rows can fill. The states come first.
    Each page takes `beside` bytes more, of a small model that guesses."""
    device = mesh.devices.flat[0]
    stats = device.memory_stats() or {}
    free = stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else available_memory_bytes()
    per_device = (layout.page_bytes + beside) // mesh.size
    staging = config.transfer.staging_mib * MIB // mesh.size
    if layout.states:
        staging += check_states(layout, free, staging, mesh)
    staging += layout.apart.pages_bytes // mesh.size if layout.near else 0
    if not layout.num_layers:
        return layout
    if config.pool.tokens is not None:
        needed = (layout.num_pages + 1) * per_device + staging
        if free is not None and needed > free:
            raise ConfigError(
                f"pool.tokens: got {config.pool.tokens}, which takes {needed // MIB} MiB with staging; {free // MIB} MiB are free. "
                f"At most {max(0, (free - staging) // per_device - 1) * layout.page_size} fit: lower it"
            )
        return layout
    if free is None:
        raise ConfigError("pool.tokens: this device does not tell how much memory it has; set it")
    most = shapes.rows * sequence_pages(layout.window, shapes.max_len, shapes.chunk, layout.page_size)
    share = int((free * config.pool.memory_fraction - staging) / per_device) - 1
    if share * layout.page_size < shapes.chunk:
        raise ConfigError(
            f"pool.memory_fraction: got {config.pool.memory_fraction}, which leaves no room for one prompt chunk "
            f"in {free // MIB} MiB; raise it"
        )
    sized = replace(layout, num_pages=min(most, share))
    apart = sized if sized.near else set_apart(config, model, shapes, sized)
    return size_pool(config, model, replace(apart, num_pages=0), shapes, mesh) if apart.near and not sized.near else sized


def check_states(layout: PoolLayout, free: int | None, staging: int, mesh: Mesh) -> int:
    """Bytes that the states of all rows, and those that are kept, take on a device; ConfigError where they do not fit."""
    each = sum(array.num_bytes // split_of(array, mesh) for layer in layout.states for array in layer)
    needed = (layout.rows + layout.snapshots) * each
    if free is not None and needed + staging > free:
        most = max(0, (free - staging) // each - layout.snapshots)
        kept = f" and {layout.snapshots} kept states (pool.state_snapshots)" if layout.snapshots else ""
        raise ConfigError(
            f"scheduler.rows: got {layout.rows}, whose states{kept} take {needed // MIB} MiB beside {staging // MIB} MiB of staging; "
            f"{free // MIB} MiB are free, at most {most} rows fit: lower it"
        )
    return needed


def split_of(array: StateArray, mesh: Mesh) -> int:
    """Over how many devices an array of a state is split."""
    return 1 if array.split is None else mesh.size
