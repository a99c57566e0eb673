"""The numbers of a run, by the names that S.json uses. Counts, then seconds and milliseconds as their names say."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.stats import EngineStats, spread

if TYPE_CHECKING:
    from jaxkv.engine import Engine

_PACKAGES = ("jaxkv", "jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "tokenizers")


def engine_summary(engine: "Engine") -> dict[str, Any]:
    """All that an engine knows of its run. Gaps between tokens leave out the pauses, which have figures of their own."""
    stats, parts = engine.stats, engine.parts
    return {
        **request_numbers(stats),
        **pressure_numbers(engine),
        "num_compiles_after_warmup": engine.num_compiles_after_warmup,
        "rows_busy_mean": round(stats.num_busy_rows / stats.num_decode_steps, 3) if stats.num_decode_steps else 0.0,
        "num_steps": stats.num_steps,
        "num_decode_steps": stats.num_decode_steps,
        **speculation_numbers(stats),
        "image_memory_kinds": sorted(parts.transfer.stats.memory_kinds),
        "system_fingerprint": parts.fingerprint,
        "fingerprint_facts": parts.fingerprint_facts,
        "config": engine.config.to_dict(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": commit(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in parts.mesh.devices.flat],
    }


def speculation_numbers(stats: EngineStats) -> dict[str, Any]:
    """What guessing was good for."""
    tokens, share = stats.tokens_per_row_step, stats.draft_acceptance
    return {
        "num_draft_tokens": stats.num_draft_tokens,
        "num_draft_tokens_accepted": stats.num_draft_tokens_accepted,
        "draft_acceptance": None if share is None else round(share, 4),
        "tokens_per_row_step": None if tokens is None else round(tokens, 4),
    }


def request_numbers(stats: EngineStats) -> dict[str, Any]:
    """What callers saw."""
    return {
        "num_requests": stats.num_requests,
        "num_completed": stats.num_completed,
        "num_failed": stats.num_failed,
        "num_cancelled": stats.num_cancelled,
        "wall_s": round(stats.wall_s, 3),
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "generated_tokens_per_s": round(stats.tokens_per_s, 3),
        "token_gap_ms": spread(stats.token_gap_s, 1e3, p50=0.5, p99=0.99, max=1.0),
        "ttft_s": spread(stats.ttft_s, 1.0, p50=0.5, p99=0.99),
        "e2e_s": spread(stats.e2e_s, 1.0, p50=0.5, p99=0.99),
        "longest_pause_s": round(max(stats.pause_s, default=0.0), 3),
    }


def pressure_numbers(engine: "Engine") -> dict[str, Any]:
    """What the full pool did."""
    counters, transfer, layout = engine.scheduler.counters, engine.parts.transfer.stats, engine.parts.layout
    snapshot = engine.scheduler.snapshot()
    use = counters.pool_use_at_park
    return {
        "num_parks": counters.num_parks,
        "num_parks_forced": counters.num_parks_forced,
        "num_parks_pressure": counters.num_parks_pressure,
        "num_parks_priority": counters.num_parks_priority,
        "num_rotations": counters.num_rotations,
        "num_parks_refused": counters.num_parks_refused,
        "num_parks_copied": counters.num_parks_copied,
        "num_parks_dropped": counters.num_parks_dropped,
        "num_parks_stuck": counters.num_parks_stuck,
        "num_parks_lost": counters.num_parks_lost,
        "num_replayed_tokens": counters.num_replayed_tokens,
        "num_losses": engine.stats.num_losses,
        "num_faults": engine.stats.num_faults,
        "num_restores": counters.num_restores,
        "num_last_resorts": counters.num_last_resorts,
        "num_kept_hits": counters.num_kept_hits,
        "kept_bytes_saved": counters.kept_bytes_saved,
        "cached_tokens": counters.cached_tokens,
        "num_forks": counters.num_forks,
        "num_shifts": counters.num_shifts,
        "host_bytes_peak": counters.host_bytes_peak,
        "host_bytes_end": counters.host_bytes,
        "pool_pages": layout.num_pages,
        "pool_pages_free_end": snapshot.num_pages_free,
        "pool_pages_cached_end": snapshot.num_pages_cached,
        "pool_tokens": layout.num_tokens,
        "pool_bytes": layout.num_bytes,
        "bytes_to_host": transfer.bytes_to_host,
        "bytes_to_device": transfer.bytes_to_device,
        "park_ms": spread(transfer.park_s, 1e3, p50=0.5, max=1.0),
        "restore_ms": spread(transfer.restore_s, 1e3, p50=0.5, max=1.0),
        "pool_use_at_park": round(sum(use) / len(use), 4) if use else None,
    }


def commit() -> str | None:
    """The commit this package runs from, if it runs from a checkout."""
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return None
    try:
        found = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
