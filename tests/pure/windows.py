"""How much of a pool one sequence takes, found by trying: what the scheduler computes is compared with this."""

from collections.abc import Callable

from jaxkv.scheduler import SchedulerConfig


def held(config: SchedulerConfig, start: int, end: int) -> int:
    """Pages held in the step that computes cells start .. end - 1: those that its tokens see or are written to."""
    first = 0 if config.window is None else max(0, start - config.window + 1)
    return len({cell // config.page_size for cell in range(first, end)})


def most_in_prompt(config: SchedulerConfig, prompt_len: int) -> int:
    """Pages held at most while a prompt is computed, whichever of its pages are found in the pool."""
    chunk = config.prefill_chunk
    starts = {start for found in range(0, prompt_len, config.page_size) for start in range(found, prompt_len, chunk)}
    return max(held(config, start, min(start + chunk, prompt_len)) for start in starts)


def longest_prompt(config: SchedulerConfig) -> int:
    """Tokens of the longest prompt that the empty pool can compute."""
    return longest(config, lambda length: most_in_prompt(config, length))


def longest_answer(config: SchedulerConfig) -> int:
    """Cells of the longest sequence that the empty pool can hold, token by token."""
    return longest(config, lambda num: held(config, num - 1, num))


def longest(config: SchedulerConfig, pages: Callable[[int], int]) -> int:
    """How far one can go from 1 on until there are too few pages."""
    if config.window is None or not config.num_pages:
        return min(config.num_pages * config.page_size or config.max_len, config.max_len)
    return next((num - 1 for num in range(1, config.max_len + 1) if pages(num) > config.num_pages), config.max_len)
