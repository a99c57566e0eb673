"""The engine of a server that sleeps: it has counted nothing, and nothing goes on in it. For figures only; it answers nobody."""

from types import SimpleNamespace
from typing import Any

from jaxkv.observe.observers import Observers
from jaxkv.scheduler.books import Counters
from jaxkv.stats import EngineStats
from jaxkv.status import EngineStatus


def no_engine() -> Any:
    """What has an engine's figures, all of them 0."""
    copies = SimpleNamespace(park_s=[], restore_s=[], bytes_to_host=0, bytes_to_device=0)
    return SimpleNamespace(
        stats=EngineStats(),
        observers=Observers(),
        scheduler=SimpleNamespace(counters=Counters()),
        parts=SimpleNamespace(transfer=SimpleNamespace(stats=copies)),
        num_compiles_after_warmup=0,
        status=lambda: _STATUS,
    )


_STATUS = EngineStatus(
    rows=0,
    parked=0,
    waiting=0,
    finished=0,
    pool_pages=0,
    pool_pages_free=0,
    host_bytes=0,
    tokens_per_s=0.0,
    num_parks=0,
    num_restores=0,
    sequences=(),
)
