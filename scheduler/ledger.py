"""Who holds which page, and which pages can be found again. Owns page numbers; never what the pages contain.

A page is free, held by one or more sequences, or cached: held by nobody, but found by its key until somebody needs the room. A holder may
be on its way out: it still holds the page, and a copy may touch it, but it no longer computes with it. A page that only such ones hold
comes back by itself.
"""

from collections import Counter
from collections.abc import Hashable, Iterable


class PageLedger:
    """The holders of every page; pages are numbered 1 .. num_pages.

    Keys are opaque: whoever registers a page under one says that its content is settled for good as long as anybody can find it. The least
    recently used cached page is the first to go; of one sequence's pages the last, since a prefix without its beginning is found by nobody.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_leaving = 0  # pages whose every holder is on its way out
        self.num_evicted = 0  # cached pages given away so far
        self._free = list(range(num_pages, 0, -1))  # a stack: page 1 goes out first, and the last one back is the next one out
        self._holders: dict[int, dict[int, bool]] = {}  # page -> who holds it, and whether that one is on its way out
        self._num_shared: Counter[int] = Counter()  # holder -> its pages that another, who stays, holds too
        self._keys: dict[int, Hashable] = {}
        self._pages: dict[Hashable, int] = {}
        self._kept: set[int] = set()  # registered pages that are cached once nobody holds them
        self._cached: dict[int, None] = {}  # in the order of their last use

    def restart(self, leaving: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Everything is free and nothing is found any more, but for the pages that (holder, pages) are still on their way out of."""
        num_evicted = self.num_evicted
        self.__init__(self.num_pages)  # type: ignore[misc]
        self.num_evicted = num_evicted
        for seq_id, pages in leaving:
            for page in pages:
                self._holders.setdefault(page, {})
                self._change(page, seq_id, True)
        self._free = [page for page in self._free if page not in self._holders]

    @property
    def num_free(self) -> int:
        """Pages that can be had now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and that would be found."""
        return len(self._cached)

    def take(self, seq_id: int, num: int) -> list[int]:
        """Hand out exactly `num` pages; the caller has looked at `num_free`."""
        assert 0 <= num <= self.num_free, f"{num} pages asked of {self.num_free} free"
        pages = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for page in pages:
            self._holders[page] = {seq_id: False}
        return pages

    def share(self, seq_id: int, pages: Iterable[int]) -> None:
        """Hold pages that were found, beside whoever holds them."""
        for page in pages:
            holders = self._holders.setdefault(page, {})
            assert page in self._keys and seq_id not in holders, f"page {page} cannot be shared with {seq_id}"
            self._cached.pop(page, None)
            self._change(page, seq_id, False)

    def hold_beside(self, seq_id: int, pages: Iterable[int]) -> None:
        """Hold pages beside the one who fills them; they need not be found yet."""
        for page in pages:
            assert seq_id not in self._holders.get(page, {seq_id}), f"page {page} cannot be held beside {self._named(page)} by {seq_id}"
            self._change(page, seq_id, False)

    def leave(self, seq_id: int, pages: Iterable[int]) -> None:
        """Say that a holder is on its way out: it gives back when nothing touches its pages any more."""
        for page in pages:
            assert seq_id in self._holders.get(page, ()), f"page {page} leaves from {seq_id}, but belongs to {self._named(page)}"
            self._change(page, seq_id, True)

    def give_back(self, seq_id: int, pages: list[int] | tuple[int, ...]) -> None:
        """Hold pages no longer; those that nobody else holds are free, or cached."""
        for page in reversed(pages):
            assert seq_id in self._holders.get(page, ()), f"page {page} comes back from {seq_id}, but belongs to {self._named(page)}"
            self._change(page, seq_id, None)
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._kept:
                self._cached[page] = None
            else:
                self.forget_key(page)
                self._free.append(page)

    def register(self, page: int, key: Hashable, *, is_kept: bool) -> None:
        """Let a held page be found by its key; of two pages with the same one the first stays. `is_kept`: also when nobody holds it."""
        assert page in self._holders, f"page {page} is held by nobody"
        if key in self._pages or page in self._keys:
            return
        self._keys[page], self._pages[key] = key, page
        if is_kept:
            self._kept.add(page)

    def forget_key(self, page: int) -> None:
        """Let nobody find a page any more, as before its content changes; nothing happens to one that is not registered."""
        if page in self._keys:
            del self._pages[self._keys.pop(page)]
            self._kept.discard(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """The pages registered under the first keys, up to the first that is not there."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def num_held(self, pages: Iterable[int]) -> int:
        """How many of the pages somebody holds."""
        return sum(page in self._holders for page in pages)

    def num_shared(self, seq_id: int) -> int:
        """How many of its pages would stay held if it gave all of them back: another holds them, and is not on its way out."""
        return self._num_shared.get(seq_id, 0)

    def holders(self, page: int) -> tuple[int, ...]:
        """Who holds a page, the first one first."""
        return tuple(self._holders.get(page, ()))

    def owner(self, page: int) -> int | None:
        """The first of a page's holders."""
        return next(iter(self._holders.get(page, ())), None)

    def key(self, page: int) -> Hashable | None:
        """What a page is found by."""
        return self._keys.get(page)

    def is_leaving(self, page: int, seq_id: int) -> bool:
        """Whether that holder of a page is on its way out."""
        return self._holders.get(page, {}).get(seq_id, False)

    def check(self) -> None:
        """free + held + cached == all pages, no page is two of them, and what is counted on the way is what a recount finds."""
        free, held, cached = set(self._free), self._holders.keys(), self._cached.keys()
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & held, f"free and owned: {sorted(free & held)}"
        assert not cached & (free | held), f"cached and free or owned: {sorted(cached & (free | held))}"
        assert len(free) + len(held) + len(cached) == self.num_pages, "a page is lost"
        assert {page: key for key, page in self._pages.items()} == self._keys, "keys and pages do not agree"
        assert not free & self._keys.keys(), "a free page can be found"
        assert cached <= self._kept <= self._keys.keys(), "a cached page cannot be found"
        num_leaving, num_shared = 0, Counter[int]()
        for page, holders in self._holders.items():
            stay = [holder for holder, leaves in holders.items() if not leaves]
            assert holders, f"page {page} is held by nobody"
            num_leaving += not stay
            if len(stay) > 1:
                num_shared.update(stay)
        assert (num_leaving, num_shared) == (self.num_leaving, self._num_shared), "leaving or shared pages are miscounted"

    def _change(self, page: int, seq_id: int, leaves: bool | None) -> None:
        """Make one a holder that stays or leaves, or (None) no holder, and keep the counts of what that changes."""
        holders = self._holders[page]
        self._count(holders, -1)
        if leaves is None:
            del holders[seq_id]
        else:
            holders[seq_id] = leaves
        self._count(holders, 1)

    def _count(self, holders: dict[int, bool], one: int) -> None:
        """Example: {7: False} counts nothing, {7: False, 8: False} a shared page for each, {7: False, 8: True} nothing, {8: True} a leaving
        page."""
        if not holders:
            return
        stay = [holder for holder, leaves in holders.items() if not leaves]
        if not stay:
            self.num_leaving += one
        elif len(stay) > 1:
            for holder in stay:
                self._num_shared[holder] += one
                if not self._num_shared[holder]:
                    del self._num_shared[holder]

    def _evict(self) -> int:
        page = next(iter(self._cached))
        self.num_evicted += 1
        self.forget_key(page)
        return self._free.pop()

    def _named(self, page: int) -> str:
        return " and ".join(map(str, self.holders(page))) or "None"
