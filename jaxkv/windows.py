"""Models that see a window only: how many pages a sequence of theirs holds, and what is said of it. Knows no array and no sequence.

Pages that fall out of every layer's window are given back (scheduler/window.py), so a sequence holds those of the window, of the chunk that
is computed, and one more where the two do not begin with a page.
"""

from jaxkv.config import Config
from jaxkv.pool import PoolLayout


def sequence_pages(window: int | None, num_tokens: int, chunk: int, page_size: int) -> int:
    """Pages that a sequence of so many tokens holds at most."""
    pages = -(-num_tokens // page_size)
    return pages if window is None else min(pages, -(-(window + chunk) // page_size) + 1)


def image_pages(window: int | None, num_tokens: int, page_size: int) -> tuple[int, int]:
    """First and last page (this one excluded) of the image of a sequence of so many tokens."""
    gone = 0 if window is None else max(0, num_tokens - window + 1) // page_size
    return gone, -(-num_tokens // page_size)


def about_windows(config: Config, layout: PoolLayout, max_len: int) -> list[str]:
    """What is to be said once about a model whose every layer sees a window, and which goes further than that."""
    if layout.window is None or layout.window >= max_len:
        return []
    most = sequence_pages(layout.window, max_len, config.scheduler.prefill_chunk, layout.page_size) * layout.page_size
    return [f"every layer sees the last {layout.window} tokens: a sequence holds at most {most} tokens of the pool, however long it is"]
