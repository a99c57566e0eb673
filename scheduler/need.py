"""How many cells and pages something takes: the one place that counts them. Owns nothing.

A sampled token gets its keys and values only when it is fed back, so the last one never does:

    prompt 3, 4 generated: cells  p p p 1 2 3      need(3, 4) == 6; token 4 has no cell
    P cells in all: prompt 3 can generate P - 3 + 1 tokens

A context that shifts never takes more cells than its length, whatever it generates.

Where no layer sees further than a window, the pages before it are gone, and what counts is how many a sequence holds at once:

    window 5, page size 2: the token of cell 9 sees cells 5 to 9; pages 0 and 1 (cells 0 to 3) are gone, pages 2, 3 and 4 are held
"""

from math import gcd

from jaxkv.scheduler.plan import ContextShift, SchedulerConfig
from jaxkv.scheduler.sequence import Sequence


class DoesNotFit(Exception):
    """A prompt needs `needs` tokens where only `has` can ever be had."""

    def __init__(self, needs: int, has: int, setting: str) -> None:
        super().__init__(f"the prompt has {needs} tokens, and {setting} allows {has}: shorten the prompt or raise {setting}")
        self.needs = needs
        self.has = has
        self.setting = setting


def need(prompt_len: int, num_generated: int) -> int:
    """Cells taken by a prompt and the tokens generated from it."""
    return prompt_len + num_generated - 1


def pages_for(num_cells: int, page_size: int) -> int:
    """Pages that hold so many cells."""
    return -(-num_cells // page_size)


def cell_pages(config: SchedulerConfig, num_cells: int) -> int:
    """Pages that hold so many cells here, those included that are gone: none where a sequence is all state."""
    return pages_for(num_cells, config.page_size) if config.num_pages else 0


def is_windowed(config: SchedulerConfig, seq: Sequence) -> bool:
    """Whether its pages go as they fall out of the window. A context that shifts keeps them: the shift may bring them into sight again."""
    return config.window is not None and seq.shift is None


def gone_pages(config: SchedulerConfig, seq: Sequence, num_cells: int) -> int:
    """Of the pages of its first so many cells those that no token after these sees any more."""
    if config.window is None or seq.shift is not None or not config.num_pages:
        return 0
    return max(0, num_cells - config.window + 1) // config.page_size


def row_pages(config: SchedulerConfig, num_tokens: int) -> int | None:
    """Pages that the next `num_tokens` tokens of a sequence and the window before them lie in at most; None where no page is ever gone.

    Chunks begin at multiples of what divides a chunk and a page, tokens anywhere. Window 5, page size 2: a token needs 3 pages, in cell
    8 or 9; a chunk of 4 that begins with a page needs 4: cells 4 to 11.
    """
    if config.window is None:
        return None
    size = config.page_size
    firsts = range(0, size, gcd(num_tokens, size) if num_tokens > 1 else size)
    return max(pages_for(first + num_tokens, size) - (first - config.window + 1) // size for first in firsts)


def most_pages(config: SchedulerConfig, prompt_len: int, num_cells: int) -> int:
    """Pages it holds at once, at most, on the way to so many cells, of which the first `prompt_len` are computed in chunks."""
    pages, chunk, one = cell_pages(config, num_cells), row_pages(config, config.prefill_chunk), row_pages(config, 1)
    if chunk is None or one is None:
        return pages
    return max(min(cell_pages(config, min(prompt_len, num_cells)), chunk), min(pages, one))


def answer_limit(config: SchedulerConfig, prompt_len: int, max_new: int | None, shift: ContextShift | None = None) -> int | None:
    """Tokens a prompt may generate, None without end; DoesNotFit when the prompt alone is too long, ValueError for a length below 1."""
    if prompt_len < 1:
        raise ValueError(f"a prompt has at least 1 token, got {prompt_len}")
    if max_new is not None and max_new < 1:
        raise ValueError(f"a sequence generates at least 1 token, got {max_new}")
    if shift is not None:
        if prompt_len > shift.context_len:
            raise DoesNotFit(prompt_len, shift.context_len, "context_len")
        return max_new
    has, setting = min((pool_cells(config, config.prefill_chunk), "pool.tokens"), (config.max_len, "model.max_len"))
    if prompt_len > has:
        raise DoesNotFit(prompt_len, has, setting)
    longest = min(pool_cells(config, 1), config.max_len) - prompt_len + 1
    return longest if max_new is None else min(max_new, longest)


def pool_cells(config: SchedulerConfig, num_tokens: int) -> int:
    """Cells that the empty pool has for one sequence which is computed so many tokens at a time: all there can be, where it holds the
    window and these."""
    most = row_pages(config, num_tokens)
    is_endless = not config.num_pages or (most is not None and most <= config.num_pages)
    return config.max_len if is_endless else config.num_pages * config.page_size


def check_keys_fit(config: SchedulerConfig, prompt_len: int, num_keys: int) -> None:
    """ValueError for more page keys than a prompt has full pages before its last token, or for any where pages are not all there is."""
    if config.state_bytes and num_keys and not config.num_snapshots:
        raise ValueError(f"got {num_keys} page keys, allowed: 0 where a sequence has a state, which is in no page, and none is kept")
    most = (prompt_len - 1) // config.page_size
    if num_keys > most:
        raise ValueError(f"got {num_keys} page keys for {prompt_len} prompt tokens, allowed: {most} in pages of {config.page_size}")


def most_cells(seq: Sequence) -> int:
    """Cells it takes at most, from now on, if it runs to its limit."""
    if seq.shift is None:
        assert seq.limit is not None, "only a context that shifts has no end"
        return need(seq.prompt_len, seq.limit)
    if seq.limit is None:
        return seq.shift.context_len
    return min(seq.shift.context_len, need(seq.prompt_len, seq.limit) - seq.num_dropped)


def chunk_len(config: SchedulerConfig, seq: Sequence) -> int:
    """Prompt tokens in its next prefill chunk; 0 once the prompt is computed."""
    return min(config.prefill_chunk, seq.prompt_left)


def has_next_cell(config: SchedulerConfig, seq: Sequence, margin: int = 0) -> bool:
    """Whether its pages hold `margin` + 1 cells more: the quick question, to which the answer is yes in most steps of most rows."""
    return seq.num_cells + margin < len(seq.pages) * config.page_size


def step_cells(config: SchedulerConfig, seq: Sequence, held: int, margin: int = 0) -> int:
    """Cells it has after its next chunk or decode step and `margin` tokens more, where it has `held` before."""
    left = seq.prompt_len - (held if seq.shift is None else seq.whole_computed)
    num_cells = held + margin + (1 if left <= 0 else left if left < config.prefill_chunk else config.prefill_chunk)
    most = most_cells(seq)
    return num_cells if num_cells < most else most


def step_pages(config: SchedulerConfig, seq: Sequence, margin: int = 0) -> int:
    """Pages it must have to run its next chunk or decode step and `margin` tokens more, gone ones included; in a replay those of all it
    had and its next step then.

    Where pages go on the way, those of the next step of the replay; and no more for the margin than it will hold at once.
    """
    if not is_windowed(config, seq):
        return cell_pages(config, step_cells(config, seq, seq.whole_cells, margin))
    pages = cell_pages(config, step_cells(config, seq, seq.num_cells))
    if not margin:
        return pages
    num_cells, prompt_len = step_cells(config, seq, seq.num_cells, margin), seq.prompt_len if seq.prompt_left or seq.replay_to else 0
    return max(pages, min(cell_pages(config, num_cells), seq.num_gone + most_pages(config, prompt_len, num_cells)))


def entry_pages(config: SchedulerConfig, seq: Sequence) -> int:
    """Pages it has when it gets its row, gone ones included: those of what it had and of its next step. Where pages go in a replay, as
    many as it will hold at once: those that go come round again."""
    whole = step_cells(config, seq, seq.whole_cells)
    if not (seq.replay_to and is_windowed(config, seq)):
        return cell_pages(config, whole)
    return min(cell_pages(config, whole), seq.num_gone + most_pages(config, seq.prompt_len, whole))


def gate_cells(config: SchedulerConfig, seq: Sequence, margin: int) -> int:
    """Cells there must be pages for before it, or anyone beside it, is let in: what it has, its remaining prompt, one token and the margin.

    With admission `reserve` that is all it may ever need.
    """
    held = seq.whole_cells
    if seq.shift is None:
        held = held if held > seq.prompt_len else seq.prompt_len
    else:
        held += max(0, seq.prompt_len - seq.whole_computed)
    num_cells, most = held + 1 + margin, most_cells(seq)
    return num_cells if num_cells < most and config.admission != "reserve" else most


def gate_pages(config: SchedulerConfig, seq: Sequence, margin: int) -> int:
    """Pages that it holds at most until it has so many cells."""
    num_cells = gate_cells(config, seq, margin)
    if not is_windowed(config, seq):
        return cell_pages(config, num_cells)
    return most_pages(config, seq.prompt_len if seq.prompt_left or seq.replay_to else 0, num_cells)


def near_gone(config: SchedulerConfig, num_cells: int) -> int:
    """Of the pages of its first so many cells those that the layers with a window need not keep, where these have their own."""
    if config.near_window is None or not config.near_pages:
        return 0
    return max(0, num_cells - config.near_window + 1) // config.page_size


def near_most(config: SchedulerConfig) -> int:
    """Pages of its own that a row holds at once, at most, in the layers with a window: those of the window, of a step, and one."""
    return pages_for((config.near_window or 0) + max(config.prefill_chunk, 1 + config.num_draft), config.page_size) + 1


def near_lacking(config: SchedulerConfig, seq: Sequence) -> int:
    """Pages that the layers with a window lack for its next step."""
    if not config.near_pages:
        return 0
    return max(0, pages_for(step_cells(config, seq, seq.num_cells), config.page_size) - len(seq.near))


def has_near_cell(config: SchedulerConfig, seq: Sequence) -> bool:
    """The quick question, as `has_next_cell`."""
    return not config.near_pages or seq.num_cells < len(seq.near) * config.page_size


def missing_pages(config: SchedulerConfig, seq: Sequence, margin: int = 0) -> int:
    """Pages it lacks for its next step."""
    num = step_pages(config, seq, margin) - len(seq.pages)
    return num if num > 0 else 0
