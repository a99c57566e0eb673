"""States that were kept where a prompt's chunk ended: with one, and the pages before it, a prompt that begins alike goes on from there.

A chunk ends at a multiple of its width; where that also is the end of a page with a key, the state then is a function of the key. It is
copied into a slot of its own as soon as the chunk is computed, and from there into the row of whoever comes with the same beginning. The
slot used least recently goes first. Owns slot numbers and keys; knows no state's content.

    page size 4, chunks of 8, a prompt of 21 tokens: it has keys for 5 pages, and states are kept at 8 and 16 tokens
"""

from collections.abc import Hashable
from math import lcm
from typing import NamedTuple

from jaxkv.scheduler.plan import SchedulerConfig


class Reserved(NamedTuple):
    """A slot that a plan's chunk fills; nobody finds it before that is done."""

    key: Hashable
    step: int


class SnapshotLedger:
    """Which slot holds the state behind which key."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: dict[Hashable, int] = {}  # in the order of their last use
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved: dict[int, Reserved] = {}

    @property
    def num_kept(self) -> int:
        """States that would be found."""
        return len(self._slots)

    def find(self, key: Hashable) -> int | None:
        """The slot of the state behind this key."""
        return self._slots.get(key)

    def use(self, key: Hashable) -> None:
        """It was of use just now."""
        self._slots[key] = self._slots.pop(key)

    def reserve(self, key: Hashable, step: int) -> int | None:
        """A slot for the state behind this key, which this step's chunk computes; None where there is one, or no slot can be had.

        What a plan before the last one reserved and nobody filled is free again: the step broke off, or its sequence has left.
        """
        if key in self._slots:
            self.use(key)
            return None
        for slot in [slot for slot, reserved in self._reserved.items() if reserved.step < step - 1]:
            del self._reserved[slot]
            self._free.append(slot)
        if any(reserved.key == key for reserved in self._reserved.values()):
            return None
        if not self._free and self._slots:
            self._free.append(self._slots.pop(next(iter(self._slots))))
        if not self._free:
            return None
        slot = self._free.pop()
        self._reserved[slot] = Reserved(key, step)
        return slot

    def settle(self, slot: int) -> None:
        """The chunk is computed and the state in its slot."""
        reserved = self._reserved.pop(slot, None)
        if reserved is not None:
            self._slots[reserved.key] = slot

    def check(self) -> None:
        """Every slot is free, reserved or found by one key."""
        slots = [*self._free, *self._reserved, *self._slots.values()]
        assert sorted(slots) == list(range(self.num_slots)), f"slots of states: {slots} of {self.num_slots}"


def kept_at(config: SchedulerConfig) -> int:
    """States are kept at multiples of so many tokens."""
    return lcm(config.prefill_chunk, config.page_size)
