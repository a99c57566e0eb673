"""Words that an answer never contains: which tokens would complete one. Knows no grammar and no request."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from jaxkv.masks import all_tokens, forbid


class Spellings:
    """The text of every token of a vocabulary, in an order in which those that begin alike stand together."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self._ids, self._sorted = np.array(order, np.int64), [tokens[i] for i in order]

    def beginning_with(self, start: bytes) -> np.ndarray:
        """The ids of all tokens that begin with `start`, which is UTF-8 and so has no byte 255."""
        first = bisect_left(self._sorted, start)
        return self._ids[first : bisect_left(self._sorted, start[:-1] + bytes([start[-1] + 1]), lo=first)]

    def containing(self, part: bytes) -> np.ndarray:
        """The ids of all tokens that hold `part`."""
        return np.array([i for i, token in enumerate(self.tokens) if part in token], np.int64)


class BadWords:
    """The words of one request. One that begins in a token and ends in another is met like one within a token."""

    def __init__(self, words: Iterable[str], spellings: Spellings) -> None:
        self._words, self._spellings = tuple(word.encode() for word in words), spellings
        self._longest = max(map(len, self._words))
        self.mask = all_tokens(len(spellings.tokens))  # without the tokens that hold a whole word
        for word in self._words:
            forbid(self.mask, spellings.containing(word))

    def tail(self, tail: bytes, token_id: int) -> bytes:
        """The last bytes of an answer that ended with `tail` and goes on with a token: as many as can begin a word."""
        return (tail + self._spellings.tokens[token_id])[-self._longest :]

    def completing(self, tail: bytes) -> np.ndarray:
        """The ids of tokens that would complete a word which `tail` has begun.

        With the word "rain" and "a tra" so far they are "in", "ins", "ink", ...
        """
        found = [np.zeros(0, np.int64)]
        for word in self._words:
            for length in range(1, min(len(word) - 1, len(tail)) + 1):
                if tail.endswith(word[:length]):
                    found.append(self._spellings.beginning_with(word[length:]))
        return np.concatenate(found)
