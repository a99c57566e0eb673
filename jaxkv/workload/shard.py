"""A part of a job for one of several machines: every n-th piece, so that all parts together are the whole and no two overlap."""

import re
from dataclasses import dataclass
from typing import Self

from jaxkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """The `index`-th of `count` parts, both from 1: 2/3 has the pieces 2, 5, 8 and so on."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2/3`; ConfigError for anything that is no part."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(f"--shard: got {text!r}, allowed: i/n with 1 <= i <= n, such as 2/3")
        return cls(int(match[1]), int(match[2]))

    def takes(self, ordinal: int) -> bool:
        """Whether the piece of this number, from 1, is in it."""
        return (ordinal - self.index) % self.count == 0

    def num_of(self, total: int) -> int:
        """How many of so many pieces it has."""
        return max(0, (total - self.index) // self.count + 1)

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
