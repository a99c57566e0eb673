"""How many cells and pages something takes: the one place that counts them. Owns nothing.

A sampled token gets its keys and values only when it is fed back, so the last one never does:

    prompt 3, 4 generated: cells  p p p 1 2 3      need(3, 4) == 6; token 4 has no cell
    P cells in all: prompt 3 can generate P - 3 + 1 tokens

A context that shifts never takes more cells than its length, whatever it generates.
"""

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
    """Pages that hold so many cells here: none where a sequence is all state."""
    return pages_for(num_cells, config.page_size) if config.num_pages else 0


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
    pool_tokens = config.num_pages * config.page_size or config.max_len
    has, setting = min((pool_tokens, "pool.tokens"), (config.max_len, "model.max_len"))
    if prompt_len > has:
        raise DoesNotFit(prompt_len, has, setting)
    longest = has - prompt_len + 1
    return longest if max_new is None else min(max_new, longest)


def check_keys_fit(config: SchedulerConfig, prompt_len: int, num_keys: int) -> None:
    """ValueError for more page keys than a prompt has full pages before its last token, or for any where pages are not all there is."""
    if config.state_bytes and num_keys:
        raise ValueError(f"got {num_keys} page keys, allowed: 0 where a sequence has a state, which is in no page")
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


def step_pages(config: SchedulerConfig, seq: Sequence, margin: int = 0) -> int:
    """Pages it must hold to run its next chunk or decode step and `margin` tokens more."""
    held = seq.whole_cells
    left = seq.prompt_len - (held if seq.shift is None else seq.whole_computed)
    num_cells = held + margin + (1 if left <= 0 else left if left < config.prefill_chunk else config.prefill_chunk)
    most = most_cells(seq)
    return cell_pages(config, num_cells if num_cells < most else most)


def gate_pages(config: SchedulerConfig, seq: Sequence, margin: int) -> int:
    """Pages to be had before it, or anyone beside it, is let in: what it holds, its remaining prompt, one token and the margin.

    With admission `reserve` that is all it may ever need.
    """
    held = seq.whole_cells
    if seq.shift is None:
        held = held if held > seq.prompt_len else seq.prompt_len
    else:
        held += max(0, seq.prompt_len - seq.whole_computed)
    num_cells, most = held + 1 + margin, most_cells(seq)
    return cell_pages(config, num_cells if num_cells < most and config.admission != "reserve" else most)


def missing_pages(config: SchedulerConfig, seq: Sequence, margin: int = 0) -> int:
    """Pages it lacks for its next step."""
    num = step_pages(config, seq, margin) - len(seq.pages)
    return num if num > 0 else 0
