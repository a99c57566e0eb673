"""Which tokens may come next where a request demands a form or forbids words: one guide per sequence, kept with it on the host.

Knows nothing of rows, programs or parks, and not how a grammar is compiled.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxkv.errors import JaxkvError
from jaxkv.masks import all_tokens, allow, forbid, is_allowed, mask_width

if TYPE_CHECKING:
    from jaxkv.bad_words import BadWords


class Guide:
    """What one sequence may say next: a fold over its accepted tokens.

    `mask` has bit i % 32 of word i // 32 set where token i may come. With a form (`matcher`) the `ends`, the request's own end tokens, may
    come exactly where it can end, and never among the first `min_tokens`. `is_complete`: the form is whole and nothing can follow, so that
    the answer ends here.
    """

    def __init__(self, matcher: Any, words: "BadWords | None", ends: Collection[int], min_tokens: int, vocab_size: int) -> None:
        self._matcher, self._words, self._min_tokens, self._vocab_size = matcher, words, min_tokens, vocab_size
        self._ends = np.array(sorted(ends), np.int64)
        self._num_tokens, self._tail = 0, b""
        self.is_complete = False
        self.mask = self._find_mask()

    @property
    def is_stuck(self) -> bool:
        """Whether nothing may come though the form is not whole."""
        return not self.is_complete and not self.mask.any()

    @property
    def reason(self) -> str:
        """Why it is stuck."""
        said = "" if self._matcher is None else one_line(self._matcher.get_error())
        return f"no token may come next: {said or 'all that could is forbidden'}"

    def advance(self, token_id: int) -> None:
        """Take the next token of the answer; raises JaxkvError for one that may not come."""
        if not is_allowed(self.mask, token_id):
            raise JaxkvError(f"token {token_id} may not come here, but logit_bias forbids all that may")
        self._num_tokens += 1
        if self._matcher is not None and token_id not in self._ends:
            self._matcher.consume_token(token_id)
        if self._words is not None:
            self._tail = self._words.tail(self._tail, token_id)
        self.mask = self._find_mask()

    def _find_mask(self) -> np.ndarray:
        mask, may_end = self._find_form()
        if self._words is not None:
            mask &= self._words.mask
            forbid(mask, self._words.completing(self._tail))
        if self._matcher is None:
            return mask
        is_early = self._num_tokens < self._min_tokens
        if is_early:
            forbid(mask, self._ends)
        self.is_complete = may_end and self._num_tokens > 0 and not mask.any()
        if may_end and not is_early:
            allow(mask, self._ends)
        return mask

    def _find_form(self) -> tuple[np.ndarray, bool]:
        """The tokens that go on with the form, and whether it may end here."""
        if self._matcher is None:
            return all_tokens(self._vocab_size), True
        found = np.zeros(mask_width(self._vocab_size + 1), np.uint32)  # one token more than there is stands for the end
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(found.ctypes.data, found.nbytes)
        may_end = is_allowed(found, self._vocab_size)
        forbid(found, np.array([self._vocab_size]))
        return found[: mask_width(self._vocab_size)], may_end


def one_line(message: str) -> str:
    """What a library has to say, on one line of bearable length: its first and, where one says "error:", that one too."""
    lines = [line.strip() if len(line) <= 160 else f"{line[:157].strip()}..." for line in message.splitlines() if line.strip()]
    return " ".join([*lines[:1], *(line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: "))])
