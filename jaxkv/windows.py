"""Models that see a window only: how many pages a sequence of theirs holds, and what is said of it. Knows no array and no sequence.

Pages that fall out of every layer's window are given back (scheduler/window.py), so a sequence holds those of the window, of the chunk that
is computed, and one more where the two do not begin with a page.
"""

from jaxkv.config import Config
from jaxkv.models import ModelConfig
from jaxkv.pool import PoolLayout


def sequence_pages(window: int | None, num_tokens: int, chunk: int, page_size: int) -> int:
    """Pages that a sequence of so many tokens holds at most."""
    pages = -(-num_tokens // page_size)
    return pages if window is None else min(pages, -(-(window + chunk) // page_size) + 1)


def image_pages(window: int | None, num_tokens: int, page_size: int) -> tuple[int, int]:
    """First and last page (this one excluded) of the image of a sequence of so many tokens."""
    gone = 0 if window is None else max(0, num_tokens - window + 1) // page_size
    return gone, -(-num_tokens // page_size)


def near_layers(model: ModelConfig) -> tuple[tuple[int, ...], int]:
    """The layers with a window, counted among those that have keys, where others see all; and the widest of their windows."""
    windows = {place: model.window_of(layer) for place, layer in enumerate(model.page_layers)}
    near = {place: window for place, window in windows.items() if window is not None}
    return (tuple(near), max(near.values())) if near and model.window is None and not model.state_layers else ((), 0)


def near_pages(model: ModelConfig, rows: int, max_len: int, step: int, page_size: int, pool_pages: int) -> int:
    """Pages for these layers alone: as many as all rows can hold at once, which compute up to `step` tokens at a time; 0 where that is no
    less than the pool has, or can be filled.

    Then they lie in the pool's own pages: whoever has room for those of the other layers has room for these too.
    """
    near, window = near_layers(model)
    num = rows * (-(-(window + step) // page_size) + 1)
    return num if near and num < min(pool_pages, rows * -(-max_len // page_size)) else 0


def about_windows(config: Config, model: ModelConfig, layout: PoolLayout, max_len: int) -> list[str]:
    """What is to be said once about a model with layers that see a window, and which goes further than that."""
    if layout.near:
        size = layout.apart.pages_bytes / 2**20
        return [
            f"{len(layout.near)} of {layout.num_layers} layers see the last {layout.near_window} tokens: beside the pool they have "
            f"{layout.near_pages} pages for all rows ({size:.0f} MiB); contexts do not shift"
        ]
    near, window = near_layers(model)
    if config.request.context_shift and near and window < max_len:
        return [
            f"{len(near)} of {layout.num_layers} layers see the last {window} tokens, and keep all pages until a sequence ends, as with "
            "request.context_shift: true they have one table with the others"
        ]
    if layout.window is None or layout.window >= max_len:
        return []
    most = sequence_pages(layout.window, max_len, config.scheduler.prefill_chunk, layout.page_size) * layout.page_size
    return [f"every layer sees the last {layout.window} tokens: a sequence holds at most {most} tokens of the pool, however long it is"]
