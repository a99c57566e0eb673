"""The invariants of the books, checked after every step in tests. Slow and obvious on purpose."""

from collections import Counter

from jaxkv.scheduler.books import Books
from jaxkv.scheduler.ledger import PageLedger
from jaxkv.scheduler.need import cell_pages, gone_pages, is_windowed, most_cells, near_gone, near_most, need, pages_for
from jaxkv.scheduler.plan import NO_PAGE
from jaxkv.scheduler.sequence import AWAY, RUNNING, Sequence, State


def check_books(books: Books) -> None:
    """AssertionError if a page, a host byte, a row or a park is lost or counted twice."""
    books.pages.check()
    books.snapshots.check()
    live = [seq for seq in books.sequences.values() if not seq.is_over]
    assert books.num_live == len(live), "the count of live sequences is wrong"
    check_rows(books, live)
    check_pages(books, live)
    check_near(books, live)
    check_host(books, live)
    check_parks(books, live)
    check_keys(books, live)
    check_forks(books)
    check_groups(books, live)
    for seq in live:
        check_sequence(books, seq)


def check_rows(books: Books, live: list[Sequence]) -> None:
    """A row has one owner: a resident, or a copy that has yet to read or to write the state there."""
    owners = [seq for seq in live if seq.state in RUNNING or seq.state in (State.RESTORING, State.REPLAYING)]
    assert books.residents == sorted(owners, key=lambda seq: seq.order), "the residents are not those that own a row, in order of arrival"
    rows = [seq.row for seq in owners]
    rows += [chunk.row for seq in live if seq.state is State.PARKING for chunk in seq.copies_due]
    rows += [flight.row for flight in books.flights.values()]
    assert sorted([*books.free_rows, *(row for row in rows if row is not None)]) == list(range(books.config.rows)), f"rows {rows}"


def check_pages(books: Books, live: list[Sequence]) -> None:
    """Who holds a page lists it, as a resident or in a park or a flight, and so many times is it held: one owner or refcount == owners."""
    held = [(page, seq.seq_id) for seq in live for page in seq.held_pages]
    check_held(books.pages, held, leaving_pages(books, live, is_near=False))


def check_near(books: Books, live: list[Sequence]) -> None:
    """The same for the pages that layers with a window have for themselves."""
    books.near.check()
    held = [(page, seq.seq_id) for seq in live for page in seq.near[seq.near_gone :]]
    check_held(books.near, held, leaving_pages(books, live, is_near=True))
    for seq in live if books.config.near_pages else ():
        assert seq.near[: seq.near_gone] == [NO_PAGE] * seq.near_gone and NO_PAGE not in seq.near[seq.near_gone :]
        if seq.row is not None:
            assert seq.near_gone <= near_gone(books.config, seq.num_cells), f"near pages are gone too soon: {seq.near}"
            assert len(seq.near) * books.config.page_size >= seq.num_cells, f"{seq.num_cells} cells in {seq.near}"
            assert len(seq.near) - near_gone(books.config, seq.num_cells) <= near_most(books.config), f"{seq.near} are too many"


def leaving_pages(books: Books, live: list[Sequence], *, is_near: bool) -> list[tuple[int, int]]:
    """Pages that a copy has yet to read or may still write, and of whom."""
    due = [(chunk, seq.seq_id) for seq in live if seq.state is State.PARKING for chunk in seq.copies_due]
    flying = [(flight.chunk, flight.chunk.seq_id) for flight in books.flights.values() if flight.pages]
    return [(page, seq_id) for chunk, seq_id in (*due, *flying) if chunk.is_near == is_near for page in chunk.pages]


def check_held(ledger: PageLedger, held: list[tuple[int, int]], leaving: list[tuple[int, int]]) -> None:
    """Who lists a page holds it, and so many times is it held."""
    listed: dict[int, list[int]] = {}
    for page, seq_id in [*held, *leaving]:
        listed.setdefault(page, []).append(seq_id)
    for page, names in listed.items():
        holders = ledger.holders(page)
        assert len(names) == len(holders) and set(names) == set(holders), f"page {page} is listed by {names} and belongs to {holders}"
    assert not any(ledger.is_leaving(*entry) for entry in held), "a held page is leaving"
    assert all(ledger.is_leaving(*entry) for entry in leaving), "a leaving page is held"
    assert len(listed) + ledger.num_free == ledger.num_pages, "free, held, in flight and cached pages are not all there are"


def check_keys(books: Books, live: list[Sequence]) -> None:
    """A page that can be found has the content its key names, for everyone who holds it: the prompt page that it is, whole."""
    for seq in live:
        for index, page in enumerate(seq.held_pages, seq.num_gone):
            key = books.pages.key(page)
            assert key is None or key == seq.page_keys[index], f"sequence {seq.seq_id} has {key} as page {index}"
            is_whole = (index + 1) * books.config.page_size <= seq.num_cells
            others = [holder for holder in books.pages.holders(page) if holder != seq.seq_id and holder not in books.forks]
            assert is_whole or (key is None and not others), f"page {page} is shared and still written to"


def check_forks(books: Books) -> None:
    """Who begins from another's chunk has its pages and one for the copy, and does not run before the plan is carried out."""
    for fork in books.forks.values():
        seq = books.sequences[fork.seq_id]
        assert (seq.state, seq.row) == (State.PREFILLING, fork.row) and seq.num_computed == seq.num_cached, f"{fork} of one {seq.state}"
        if fork.page is None:
            assert not seq.pages and not books.config.num_pages, f"{fork} of one with pages"
            continue
        assert (seq.pages[-1], len(seq.pages)) == (fork.page, pages_for(seq.prompt_len, books.config.page_size)), f"{fork} into {seq.pages}"
        assert books.pages.holders(fork.page) == (fork.seq_id,) and books.pages.key(fork.page) is None, f"{fork} writes into a shared page"


def check_groups(books: Books, live: list[Sequence]) -> None:
    """Each that lives is in its group once, and a group that is all gone is no more."""
    listed = [seq for group in books.groups.values() for seq in group]
    assert all(books.groups.values()) and len(listed) == len(set(listed)), "a group is empty, or lists somebody twice"
    assert set(listed) == {seq for seq in live if seq.group is not None}, "the groups are not of those that live"


def check_host(books: Books, live: list[Sequence]) -> None:
    """Every chunk in host memory is one that an image, a keeper or a copy needs; the budget holds."""
    host = books.host
    assert host.held == host.size(chunk.span for chunk in host.chunks.values()), f"{host.held} bytes held, but not in {host.chunks}"
    assert host.budget is None or host.held <= host.budget, f"{host.held} bytes of {host.budget}"
    assert not any(chunk.span.is_state and (chunk.num_keepers or len(chunk.users) > 1) for chunk in host.chunks.values()), "a state is kept"
    users = {(chunk.host_id, seq.seq_id) for seq in live for chunk in seq.image}
    assert users == {(chunk.host_id, seq_id) for chunk in host.chunks.values() for seq_id in chunk.users}, "the images are not those in use"
    kept = Counter(chunk.host_id for seq in live for chunk in seq.kept.values() if not chunk.is_gone)
    flying = Counter(flight.image_chunk.host_id for flight in books.flights.values())
    for host_id, chunk in host.chunks.items():
        assert (chunk.num_keepers, chunk.num_copies) == (kept[host_id], flying[host_id]), f"{chunk} is kept or copied by somebody else"
        assert chunk.users or kept[host_id] or flying[host_id], f"{chunk} is needed by nobody"
        assert (host_id in host.spare) == (not chunk.users and not flying[host_id]), f"{chunk} is spare, or is not"
    assert kept.keys() | flying.keys() | host.spare.keys() <= host.chunks.keys(), "a chunk is used that is gone"
    due = {chunk.host_id for seq in live for chunk in seq.copies_due}
    lost = [chunk for chunk in host.chunks.values() if chunk.users and not (chunk.is_here or chunk.num_copies or chunk.host_id in due)]
    assert not lost, f"nobody copies {lost}"


def check_parks(books: Books, live: list[Sequence]) -> None:
    """Every park was followed by a return or an end, or is still going on; nobody is in two lines."""
    counters = books.counters
    away = sum(seq.state in AWAY for seq in live)
    assert counters.num_parks == counters.num_restores + counters.num_ended_parked + away, f"{counters} and {away} away"
    assert counters.num_parks == counters.num_parks_copied + counters.num_parks_dropped, f"{counters}"
    causes = (counters.num_parks_forced, counters.num_parks_pressure, counters.num_parks_priority, counters.num_last_resorts)
    others = (counters.num_rotations, counters.num_parks_stuck, counters.num_parks_lost)
    assert counters.num_parks == sum(causes) + sum(others), f"a park without a cause: {counters}"
    in_line = [*books.parked, *books.waiting, *books.held.values()]
    assert all(seq.is_held for seq in books.held.values()) and not any(seq.is_held for seq in books.parked), (
        "an operator's park is in the line"
    )
    expected = [seq for seq in live if seq.state in (State.WAITING, State.PARKING, State.PARKED)]
    assert {seq.seq_id for seq in in_line} == {seq.seq_id for seq in expected} and len(in_line) == len(expected), "the lines are wrong"


def check_sequence(books: Books, seq: Sequence) -> None:
    """Its cells, pages and image agree with its state."""
    is_drawn = seq.num_generated == 1 and seq.whole_computed < seq.prompt_len  # its first token, before its own prompt was computed
    if seq.num_generated and not is_drawn:
        assert seq.whole_computed == need(seq.prompt_len, seq.num_generated)
    assert not is_drawn or seq.state is not State.DECODING
    assert seq.whole_cells <= most_cells(seq)
    assert not seq.replay_to or (seq.num_computed < seq.replay_to and seq.state in (State.PARKED, State.REPLAYING))
    assert (seq.state is State.REPLAYING) <= (seq.replay_to > 0)
    num_pages = cell_pages(books.config, seq.whole_cells)
    assert (seq.row is None) == (seq.state in (State.WAITING, State.PARKING, State.PARKED))
    assert (seq.parked_since is not None) == (seq.state in AWAY)
    if seq.state in AWAY:
        num_held = 0 if seq.replay_to else num_pages - seq.num_gone
        assert seq.image_pages == num_held == sum(chunk.span.num_pages for chunk in seq.image if not chunk.span.is_near)
        has_state = bool(books.config.state_bytes and seq.num_cells and not seq.replay_to)
        assert [chunk.span.is_state for chunk in seq.image] == [False] * (len(seq.image) - has_state) + [True] * has_state
        assert not seq.kept
    else:
        assert not seq.image and not seq.image_pages
    if seq.row is None:
        assert not seq.pages
    else:
        least = cell_pages(books.config, seq.num_cells) if is_windowed(books.config, seq) else num_pages
        assert len(seq.pages) >= least, f"{least} pages of cells in {len(seq.pages)} pages"
        assert seq.pages.count(NO_PAGE) == seq.num_gone and NO_PAGE not in seq.held_pages, f"{seq.num_gone} gone of {seq.pages}"
    assert seq.num_gone <= gone_pages(books.config, seq, seq.num_cells), f"{seq.num_gone} pages are gone too soon, at {seq.num_cells} cells"
