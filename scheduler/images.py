"""Images in host memory: which chunks there are, who needs them, which are kept, and how many bytes they take. Never what they contain.

An image is cut into chunks, one for each span of its sequence's pages. A span whose pages are all full never changes again and is cut alike
at every park: it is *lasting*. Its chunk may be kept when the sequence returns, so that the next park copies only what is new. A kept chunk
that nobody away needs is *spare*: it goes when an image needs the room, the one kept longest first. Prompt pages with keys are stored once
for all sequences that have them. A sequence's state is one span more, of no pages; every token changes it, so it is copied anew each time.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """A run of a sequence's logical pages, or of none: its state. `key` names the content of prompt pages that others may have too."""

    first: int
    num_pages: int
    key: Hashable | None
    is_lasting: bool
    is_near: bool = False  # of the pages that layers with a window have for themselves

    @property
    def is_state(self) -> bool:
        return self.num_pages == 0


def state_span(num_pages: int) -> Span:
    """The state of a sequence with so many pages, behind them all."""
    return Span(num_pages, 0, None, False)


def near_spans(num_pages: int, chunk_pages: int, num_gone: int) -> list[Span]:
    """Spans of the pages that layers with a window have for themselves: copied anew each time, since they are few and gone before long."""
    return [span._replace(key=None, is_lasting=False, is_near=True) for span in cut(num_pages, 0, chunk_pages, (), num_gone)]


def cut(num_pages: int, num_full: int, chunk_pages: int, page_keys: tuple[Hashable, ...] = (), num_gone: int = 0) -> list[Span]:
    """Spans of at most `chunk_pages` pages; pages with keys and pages without are never in one, and the first `num_gone` are in none.

    Example: 3 pages a chunk, 9 pages of which 8 are full, 4 of them with keys: 0-2, 3, 4-6 are lasting, 7-8 is not. With the first 5 gone:
    5-6, which is not lasting any more, since it would be cut otherwise before long, and 7-8.
    """
    num_keyed = min(len(page_keys), num_full)
    firsts = [*range(0, num_keyed, chunk_pages), *range(num_keyed, num_pages, chunk_pages)]
    spans: list[Span] = []
    for first, end in pairwise([*firsts, num_pages]):
        key = (first, page_keys[end - 1]) if end <= num_keyed else None  # keys are chained: the last one stands for all before it
        is_final = end - first == chunk_pages or end == len(page_keys)
        if num_gone <= first:
            spans.append(Span(first, end - first, key, is_final and end <= num_full))
        elif num_gone < end:
            spans.append(Span(num_gone, end - num_gone, None, False))
    return spans


@dataclass(slots=True, eq=False)
class ImageChunk:
    """Host memory for one span, by the number that plans call it by."""

    host_id: int
    span: Span
    users: set[int] = field(default_factory=set)  # sequences that are away and need it to return
    num_keepers: int = 0  # sequences that are back and would save a copy with it
    num_copies: int = 0  # in flight, to it or from it
    is_sent: bool = False  # its copy to the host is dispatched
    is_here: bool = False  # and done
    is_spoiled: bool = False  # not to be used again
    is_gone: bool = False


Kept = Mapping[int, ImageChunk]  # by first page


class HostLedger:
    """Every chunk in host memory, in-flight copies and padding included, against a budget (None: no limit; 0: no image at all)."""

    def __init__(
        self,
        budget: int | None,
        chunk_bytes: int,
        state_bytes: int = 0,
        near_bytes: int = 0,
        *,
        keep: bool = True,
        on_drop: Callable[[int], None] = lambda host_id: None,
    ) -> None:
        """`on_drop(host_id)` is called when nobody needs a chunk any more and no copy touches it."""
        self.budget = budget
        self.chunk_bytes = chunk_bytes  # of a chunk of pages
        self.state_bytes = state_bytes  # of one that is a state
        self.near_bytes = near_bytes  # of one of pages of layers with a window
        self.held = 0  # bytes of all chunks
        self.keeps = keep
        self.peak = 0
        self.num_hits = 0  # spans that a park did not have to copy
        self.chunks: dict[int, ImageChunk] = {}
        self.spare: dict[int, ImageChunk] = {}  # the one kept longest first
        self._by_key: dict[Hashable, ImageChunk] = {}
        self._on_drop = on_drop
        self._num_made = 0

    @property
    def in_use(self) -> int:
        """Bytes that cannot be had by dropping what is spare, of which no state ever is, nor pages of layers with a window."""
        return self.held - len(self.spare) * self.chunk_bytes

    def size(self, spans: Iterable[Span]) -> int:
        """Host bytes of an image of these spans, padding included."""
        return sum(self.state_bytes if span.is_state else self.near_bytes if span.is_near else self.chunk_bytes for span in spans)

    def added(self, spans: Iterable[Span], kept: Kept) -> int:
        """Bytes that an image of these spans would add to those in use."""
        found = ((span, self._find(span, kept)) for span in spans)
        return self.size(span for span, chunk in found if chunk is None or chunk.host_id in self.spare)

    def has_room(self, num_chunks: int, added: int) -> bool:
        """Whether the budget holds images of so many chunks that add so many bytes to those in use."""
        return not num_chunks or self.budget is None or (self.budget > 0 and self.in_use + added <= self.budget)

    def take(self, seq_id: int, spans: list[Span], kept: Kept) -> list[ImageChunk] | None:
        """The chunks of an image, found or new, or None (and nothing has changed) when they do not fit."""
        if not self.has_room(len(spans), self.added(spans, kept)):
            return None
        found = [self._find(span, kept) for span in spans]
        for chunk in found:
            if chunk is not None:
                chunk.users.add(seq_id)
                self.spare.pop(chunk.host_id, None)
        self._make_room(self.size(span for span, chunk in zip(spans, found, strict=True) if chunk is None))
        self.num_hits += len(found) - found.count(None)
        image = [self._new(seq_id, span) if chunk is None else chunk for span, chunk in zip(spans, found, strict=True)]
        self.peak = max(self.peak, self.held)
        return image

    def restart(self, users: Mapping[int, set[int]], flying: Iterable[ImageChunk], known: Iterable[ImageChunk]) -> None:
        """Everything goes but for what these sequences need, by number, and what copies touch; `known` are all chunks of either kind."""
        copies = Counter(chunk.host_id for chunk in flying)
        self.chunks |= {chunk.host_id: chunk for chunk in known}
        self.held = self.size(chunk.span for chunk in self.chunks.values())
        self.spare.clear()
        for chunk in list(self.chunks.values()):
            chunk.users = set(users.get(chunk.host_id, ()))
            chunk.num_keepers, chunk.num_copies, chunk.is_gone = 0, copies[chunk.host_id], False
            self._settle(chunk)

    def send(self, chunk: ImageChunk) -> None:
        """A copy to it or from it is dispatched."""
        chunk.is_sent = True
        chunk.num_copies += 1

    def land(self, chunk: ImageChunk) -> None:
        """That copy is done."""
        chunk.is_here = True
        chunk.num_copies -= 1
        self._settle(chunk)

    def release(self, seq_id: int, image: Iterable[ImageChunk]) -> None:
        """A sequence does not need its image any more, and will not need it again."""
        for chunk in image:
            chunk.users.discard(seq_id)
            self._settle(chunk)

    def keep(self, seq_id: int, image: Iterable[ImageChunk]) -> dict[int, ImageChunk]:
        """A sequence is back: what will be the same at its next park is kept, the rest goes."""
        kept: dict[int, ImageChunk] = {}
        for chunk in image:
            chunk.users.discard(seq_id)
            if self.keeps and chunk.span.is_lasting and not chunk.is_spoiled:
                chunk.num_keepers += 1
                kept[chunk.span.first] = chunk
            self._settle(chunk)
        return kept

    def let_go(self, kept: Kept) -> None:
        """Whoever kept these has no use for them as kept ones any more."""
        for chunk in kept.values():
            chunk.num_keepers -= 1
            self._settle(chunk)

    def spoil(self, chunk: ImageChunk) -> None:
        """What it holds is not to be trusted: nobody finds it any more."""
        chunk.is_spoiled = True
        self._settle(chunk)

    def _find(self, span: Span, kept: Kept) -> ImageChunk | None:
        if span.is_state or span.is_near:
            return None
        chunk = kept.get(span.first) if span.key is None else self._by_key.get(span.key)
        is_good = chunk is not None and chunk.span[:3] == span[:3] and not chunk.is_gone and not chunk.is_spoiled
        return chunk if is_good else None

    def _new(self, seq_id: int, span: Span) -> ImageChunk:
        chunk = ImageChunk(self._num_made, span, {seq_id})
        self._num_made += 1
        self.chunks[chunk.host_id] = chunk
        self.held += self.size([span])
        if span.key is not None:
            self._by_key[span.key] = chunk
        return chunk

    def _make_room(self, num_bytes: int) -> None:
        while self.budget is not None and self.held + num_bytes > self.budget:
            self._drop(next(iter(self.spare.values())))

    def _settle(self, chunk: ImageChunk) -> None:
        """Find its place after a change: needed, spare, or gone."""
        if chunk.is_gone or chunk.users or chunk.num_copies:
            return
        if chunk.num_keepers and not chunk.is_spoiled:
            self.spare.setdefault(chunk.host_id, chunk)
        else:
            self._drop(chunk)

    def _drop(self, chunk: ImageChunk) -> None:
        """Let it go; it leaves the books last, so that nothing is lost of it where this breaks off."""
        chunk.is_gone = True
        self.spare.pop(chunk.host_id, None)
        if self._by_key.get(chunk.span.key) is chunk:
            del self._by_key[chunk.span.key]
        self._on_drop(chunk.host_id)
        if self.chunks.pop(chunk.host_id, None) is not None:
            self.held -= self.size([chunk.span])
