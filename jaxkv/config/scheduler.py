"""A configuration as the scheduler's own settings, for the engine and for the simulator alike. Knows no array, no device."""

from jaxkv.config.sections import Config
from jaxkv.scheduler.plan import SchedulerConfig


def num_draft(config: Config) -> int:
    """Guesses behind each row's token in a decode step."""
    return 0 if config.speculate.kind == "none" else config.speculate.num_draft


def scheduler_config(
    config: Config,
    *,
    num_pages: int,
    max_len: int,
    chunk_bytes: int,
    budget: int | None,
    hold: bool,
    state_bytes: int = 0,
    window: int | None = None,
    near: tuple[int | None, int, int] = (None, 0, 0),
) -> SchedulerConfig:
    """Integers and names only: what the configuration says, and what only the caller knows."""
    s = config.scheduler
    return SchedulerConfig(
        rows=s.rows,
        num_pages=num_pages,
        page_size=config.pool.page_size,
        prefix_cache=config.pool.prefix_cache,
        prefill_chunk=s.prefill_chunk,
        prefill_burst=s.prefill_burst,
        max_len=max_len,
        window=window,
        near_window=near[0],
        near_pages=near[1],
        near_bytes=near[2],
        chunk_pages=config.transfer.chunk_pages,
        chunk_bytes=chunk_bytes,
        state_bytes=state_bytes,
        num_snapshots=config.pool.state_snapshots if state_bytes and config.pool.prefix_cache else 0,
        chunks_per_step=config.transfer.chunks_per_step,
        host_budget_bytes=budget,
        over_budget=s.over_budget,
        margin_steps=s.margin_steps,
        starve_after=s.starve_after,
        victim=s.victim,
        resume=s.resume,
        max_bypass=s.max_bypass,
        admission=s.admission,
        rotate=s.rotate,
        rotate_after_s=s.rotate_after_s,
        keep_images=s.keep_images,
        hold=hold,
        planner=config.debug.planner,
        park_every=config.debug.park_every,
        park_seed=config.debug.park_seed,
        num_draft=num_draft(config),
        num_spare=num_draft(config) if config.speculate.kind == "mtp" else 0,
    )
