"""Who owns which page. Owns page numbers; never what the pages contain.

A page is free, held by one sequence, or leaving: still owned, and a copy may touch it, but nobody computes with it any more.
"""


class PageLedger:
    """The owner of every page; pages are numbered 1 .. num_pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack: page 1 goes out first, and the last one back is the next one out
        self._owner: list[int | None] = [None] * (num_pages + 1)
        self._leaving: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    def take(self, seq_id: int, num: int) -> list[int]:
        """Hand out exactly `num` pages; the caller has looked at `num_free`."""
        assert 0 <= num <= len(self._free), f"{num} pages asked of {len(self._free)} free"
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._owner[page] = seq_id
        return pages

    def leave(self, seq_id: int, pages: list[int] | tuple[int, ...]) -> None:
        """Mark pages as on their way out: they come back by `give_back` when nothing touches them any more."""
        for page in pages:
            assert self._owner[page] == seq_id, f"page {page} leaves from {seq_id}, but belongs to {self._owner[page]}"
            self._leaving.add(page)

    def give_back(self, seq_id: int, pages: list[int] | tuple[int, ...]) -> None:
        """Free pages, held or leaving."""
        for page in reversed(pages):
            assert self._owner[page] == seq_id, f"page {page} comes back from {seq_id}, but belongs to {self._owner[page]}"
            self._owner[page] = None
            self._leaving.discard(page)
            self._free.append(page)

    def owner(self, page: int) -> int | None:
        return self._owner[page]

    def is_leaving(self, page: int) -> bool:
        return page in self._leaving

    def check(self) -> None:
        """free + held + leaving == all pages, and no page is two of them."""
        free = set(self._free)
        owned = {page for page in range(1, self.num_pages + 1) if self._owner[page] is not None}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & owned, f"free and owned: {sorted(free & owned)}"
        assert len(free) + len(owned) == self.num_pages, "a page is lost"
        assert self._leaving <= owned, f"leaving without an owner: {sorted(self._leaving - owned)}"
