"""A runner without a device: it carries out plans on pages whose cells say what was written there, and checks every read.

A cell is (content, token, epoch, turned): whose it is, which of its tokens, in which epoch it was computed, and by how many positions its
key was turned back since, by shifts of the context. The content of a prompt page with a key is its key, whoever computed it; everything
else is its sequence's own. So a sequence that shares a page reads what it would have computed, or this is an AssertionError.

The runner is as unkind as a device may be. A held copy reads its pages only when it lands, a restore scribbles over its pages when it
starts and fills them when it lands, also after a cancel, and copies land as late as `delay` says. What is dropped is gone, and computed
again it has another epoch. So a page handed on too soon, a row scheduled too early, a token computed twice that was not lost, or again by
another program, or a host byte over the budget is an AssertionError here. `fake_loop.py` turns plans into steps.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from jaxkv.scheduler.plan import (
    Chunk,
    DecodeRow,
    Fetch,
    Fork,
    Outcome,
    Plan,
    PrefillChunk,
    SchedulerConfig,
    Shift,
    TableUpdate,
)

Written = tuple[Hashable, int, int, int]  # content, token, the epoch in which it was computed, positions turned back since
Cell = Written | None
Pages = list[list[Cell]]
Slot = tuple[int, int, int] | None  # whose state it is, how often that one had lost all before, and how many tokens it has seen


@dataclass(slots=True)
class Copy:
    """A chunk on its way; `cells` are those of a staged park, or of a restore."""

    chunk: Chunk
    is_park: bool
    lands_at: int
    cells: Pages | None
    slot: Slot = None


class FakeRunner:
    """The pages, states, block tables and host images of a machine that does not exist."""

    def __init__(self, config: SchedulerConfig, delay: Callable[[Chunk], int] = lambda chunk: 0, num_staging: int = 1000) -> None:
        """`delay(chunk)` is how many steps after the next one a copy lands; `num_staging` how many chunks may be in flight."""
        self.config = config
        self.delay = delay
        self.num_staging = num_staging
        self.time = 0
        self.pool: Pages = [[None] * config.page_size for _ in range(config.num_pages + 1)]
        self.near: Pages = [[None] * config.page_size for _ in range(config.near_pages + 1)]  # of layers with a window, where apart
        self.tables: list[list[int]] = [[] for _ in range(config.rows)]
        self.near_tables: list[list[int]] = [[] for _ in range(config.rows)]
        self.slots: list[Slot] = [None] * config.rows
        self.kept: list[tuple[Hashable, int] | None] = [None] * config.num_snapshots  # behind which key, after how many tokens
        self.host: dict[int, tuple[Pages, Slot, int]] = {}  # by the number that chunks call it by: what, and bytes
        self.flights: list[Copy] = []
        self.written: dict[int, list[Written]] = {}  # what the cells of each context must hold
        self.num_written: dict[int, int] = {}  # tokens, those included that left the context
        self.epochs: dict[int, int] = {}
        self.num_lost: dict[int, int] = {}  # times that all was gone
        self.keys: dict[int, tuple[Hashable, ...]] = {}
        self.found: dict[int, int] = {}  # prompt cells that were there already
        self.programs: dict[int, list[tuple[str, int]]] = {}  # which one first computed each token, at which position
        self.num_true: Callable[[DecodeRow], int] = lambda row: 0  # how many guesses behind a row's token come true

    @property
    def free_chunks(self) -> int:
        return self.num_staging - len(self.flights)

    @property
    def host_bytes(self) -> int:
        """Counted apart from the scheduler: stored chunks and chunks in flight."""
        flying = {copy.chunk.host_id: self._num_bytes(copy.chunk) for copy in self.flights}
        return sum(({host_id: num for host_id, (_, _, num) in self.host.items()} | flying).values())

    def _num_bytes(self, chunk: Chunk) -> int:
        if chunk.is_near:
            return self.config.near_bytes
        return self.config.chunk_bytes if chunk.row is None else self.config.state_bytes

    def start(self, seq_id: int, page_keys: tuple[Hashable, ...] = ()) -> None:
        """A new sequence, of which nothing is computed."""
        self.written[seq_id] = []
        self.num_written[seq_id] = 0
        self.epochs[seq_id] = 0
        self.num_lost[seq_id] = 0
        self.keys[seq_id] = page_keys
        self.found[seq_id] = 0
        self.programs[seq_id] = []

    def lose(self, seq_id: int) -> None:
        """What a sequence had computed is gone, its image too: its flights land as strays."""
        self.written[seq_id] = []
        self.num_written[seq_id] = 0
        self.found[seq_id] = 0
        self.epochs[seq_id] += 1
        self.num_lost[seq_id] += 1

    def unlearn(self, seq_id: int, num_cells: int) -> None:
        """Beyond these, what was computed of a sequence is nobody's."""
        del self.programs[seq_id][num_cells:]

    def lose_pool(self) -> None:
        """Every page and state is blank again; copies out of them that are under way read what there was."""
        for copy in self.flights:
            if copy.is_park and copy.cells is None:
                copy.cells, copy.slot = self._gather(copy.chunk), self._slot(copy.chunk)
        self.slots, self.kept = [None] * self.config.rows, [None] * self.config.num_snapshots
        self.pool = [[None] * self.config.page_size for _ in self.pool]
        self.near = [[None] * self.config.page_size for _ in self.near]
        self.tables, self.near_tables = [[] for _ in self.tables], [[] for _ in self.tables]

    def drop(self, seq_id: int) -> None:
        """A sequence has ended; its flights land as strays."""
        self.written.pop(seq_id, None)

    def drop_chunk(self, host_id: int) -> None:
        """A place in host memory is not needed any more: nothing may be on its way to it or from it."""
        assert not any(copy.chunk.host_id == host_id for copy in self.flights), f"host chunk {host_id} goes while a copy touches it"
        self.host.pop(host_id, None)

    def landed(self) -> Outcome:
        """The copies that are done by now."""
        done = [copy for copy in self.flights if copy.lands_at <= self.time]
        self.flights = [copy for copy in self.flights if copy.lands_at > self.time]
        for copy in done:
            (self._land_park if copy.is_park else self._land_restore)(copy)
        parked = tuple(copy.chunk for copy in done if copy.is_park)
        return Outcome(parked=parked, restored=tuple(copy.chunk for copy in done if not copy.is_park))

    def run(self, plan: Plan) -> Outcome:
        """Carry out a plan in its order; the ends are for the caller to say."""
        for shift in plan.shifts:
            self._shift(shift)
        for note in plan.notes:
            if note.kind == "drop":
                self.lose(note.seq_id)
        for chunk in plan.park:
            self._park(chunk)
        for chunk in plan.restore:
            self._restore(chunk)
        for update in plan.tables:
            self._update(update)
        for fetch in plan.fetches:
            self._fetch(fetch)
        if plan.prefill:
            self._prefill(plan.prefill)
        decoded = [seq_id for row in plan.decode for seq_id in self._decode(row)]
        assert self.config.host_budget_bytes is None or self.host_bytes <= self.config.host_budget_bytes, "the host budget is exceeded"
        self.time += 1
        return Outcome(prefilled=plan.prefill, decoded=tuple(decoded))

    def _shift(self, shift: Shift) -> None:
        for source, page in zip(shift.sources, shift.pages, strict=True):
            assert not self._is_touched(page), f"{shift} writes a page that a copy in flight may touch"
            self.pool[page] = [cell and turn_back(cell, shift.n_discard) for cell in self.pool[source]]
        if context := self.written.get(shift.seq_id):
            first = shift.n_keep + shift.n_discard
            self.written[shift.seq_id] = context[: shift.n_keep] + [turn_back(cell, shift.n_discard) for cell in context[first:]]

    def _park(self, chunk: Chunk) -> None:
        assert chunk.host_id not in self.host, f"{chunk} is copied a second time"
        self.epochs[chunk.seq_id] = chunk.epoch
        assert bool(chunk.pages) != (chunk.row is not None), f"{chunk} is neither pages nor a state"
        cells = None if self.config.hold else self._gather(chunk)
        self._send(chunk, True, cells, None if self.config.hold else self._slot(chunk))

    def _send(self, chunk: Chunk, is_park: bool, cells: Pages | None, slot: Slot) -> None:
        self.flights.append(Copy(chunk, is_park, self.time + 1 + self.delay(chunk), cells, slot))

    def _land_park(self, copy: Copy) -> None:
        found = (self._gather(copy.chunk), self._slot(copy.chunk)) if copy.cells is None else (copy.cells, copy.slot)
        self.host[copy.chunk.host_id] = (*found, self._num_bytes(copy.chunk))

    def _slot(self, chunk: Chunk) -> Slot:
        return None if chunk.row is None else self.slots[chunk.row]

    def _gather(self, chunk: Chunk) -> Pages:
        return [list(self._pool(chunk)[page]) for page in chunk.pages]

    def _pool(self, chunk: Chunk) -> Pages:
        return self.near if chunk.is_near else self.pool

    def _restore(self, chunk: Chunk) -> None:
        self.epochs[chunk.seq_id] = chunk.epoch
        for page in chunk.pages:
            self._pool(chunk)[page] = [None] * self.config.page_size
        if chunk.row is not None:
            self.slots[chunk.row] = None
        cells, slot, _ = self.host[chunk.host_id]
        self._send(chunk, False, cells, slot)

    def _land_restore(self, copy: Copy) -> None:
        assert copy.cells is not None
        if copy.chunk.row is not None:
            self.slots[copy.chunk.row] = copy.slot
        for page, cells in zip(copy.chunk.pages, copy.cells, strict=True):
            self._pool(copy.chunk)[page] = list(cells)

    def _update(self, update: TableUpdate) -> None:
        table = (self.near_tables if update.is_near else self.tables)[update.row]
        assert update.first <= len(table), f"{update} leaves a hole after {len(table)} entries"
        table[update.first :] = update.pages

    def _fetch(self, fetch: Fetch) -> None:
        assert not self._touching_state(fetch.row), f"{fetch} writes a state that a copy in flight may touch"
        kept = self.kept[fetch.slot]
        assert kept is not None and kept[0] == self._key(fetch.seq_id, kept[1] - 1), f"{fetch} brings the state behind {kept}"
        self.slots[fetch.row] = (fetch.seq_id, self.num_lost[fetch.seq_id], kept[1])

    def _prefill(self, chunk: PrefillChunk) -> None:
        if chunk.start > len(self.written[chunk.seq_id]):
            self._find(chunk.seq_id, chunk.row, chunk.start)
        first = 0 if self.config.state_bytes else self.found[chunk.seq_id]
        assert (chunk.start - first) % self.config.prefill_chunk == 0, f"{chunk} is cut askew"
        end = chunk.start + chunk.length
        is_known = end <= len(self.programs[chunk.seq_id])  # by the runner; the scheduler may not have heard of a chunk that ends nothing
        assert chunk.is_replay == is_known or not (chunk.is_last or chunk.is_replay), f"{chunk} after {self.programs[chunk.seq_id]}"
        for position in range(chunk.start, end):
            self._write(chunk.seq_id, chunk.row, position, "prefill")
        self._read(chunk.seq_id, chunk.row, chunk.start, end)
        if chunk.keep is not None:
            key = self._key(chunk.seq_id, end - 1)
            assert key is not None and end % self.config.page_size == 0 and end % self.config.prefill_chunk == 0, f"{chunk} keeps a state"
            self.kept[chunk.keep] = (key, end)
        for fork in chunk.forks:
            self._fork(chunk, fork)

    def _fork(self, chunk: PrefillChunk, fork: Fork) -> None:
        """What it reads from now on is what the other has computed."""
        assert chunk.is_last and not chunk.is_replay and not self.written[fork.seq_id], f"{fork} begins in the midst of something"
        end = chunk.start + chunk.length
        if fork.page is not None and fork.source is not None:
            assert not self._is_touched(fork.page), f"{fork} writes a page that a copy in flight may touch"
            self.pool[fork.page] = list(self.pool[fork.source])
        if fork.near is not None:
            source, page = fork.near
            assert not self._is_touched(page, is_near=True), f"{fork} writes a page that a copy in flight may touch"
            self.near[page] = list(self.near[source])
        if self.config.state_bytes:
            self._check_slot(fork.seq_id, fork.row)
            self.slots[fork.row] = (fork.seq_id, self.num_lost[fork.seq_id], end)
        self.written[fork.seq_id] = list(self.written[chunk.seq_id])
        self.num_written[fork.seq_id] = end
        known = self.programs[fork.seq_id]
        known += [("prefill", position) for position in range(len(known), end)]
        self._read(fork.seq_id, fork.row, end, end)

    def _decode(self, row: DecodeRow) -> list[int]:
        """Its token and the guesses that come true, one after the other; of the others something is left in the cells behind."""
        assert 1 <= row.num_cells <= 1 + self.config.num_draft, f"{row} where {self.config.num_draft} guesses are checked"
        num = row.num_cells if row.is_replay else min(row.num_cells, 1 + self.num_true(row))
        for position in range(row.position, row.position + num):
            self._decode_cell(row._replace(position=position))
        for position in range(row.position + num, row.position + row.num_cells) if self.config.num_pages else ():
            self._put(row.seq_id, row.row, position, ("untrue", position, 0, 0))
        return [row.seq_id] * num

    def _decode_cell(self, row: DecodeRow) -> None:
        token, num_known = self.num_written[row.seq_id], len(self.programs[row.seq_id])
        assert self._key(row.seq_id, token) is None, f"{row} writes into a prompt page"
        assert row.is_replay == (token < num_known), f"{row} after {num_known} cells"
        assert row.position + row.num_dropped == token, f"{row} is fed the wrong token after {token}"
        self._write(row.seq_id, row.row, row.position, "decode")
        self._read(row.seq_id, row.row, row.position, row.position + 1)

    def _find(self, seq_id: int, row: int, start: int) -> None:
        """Its first chunk starts behind prompt pages that it shares: they must be there, whole, with the content it would have computed."""
        assert not self.written[seq_id] and start % self.config.page_size == 0, (
            f"sequence {seq_id} shares {start} cells after {self.written}"
        )
        cells = [cell for page in self.tables[row] for cell in self.pool[page]][:start]
        for position, cell in enumerate(cells):
            is_right = position < self._first_seen(start) or cell == (self._key(seq_id, position), position, 0, 0)
            assert is_right, f"sequence {seq_id} finds {cell} at {position}"
        for position, cell in enumerate(self._near_cells(row)[:start]):
            is_right = position < self._first_near(start) or cell == (self._key(seq_id, position), position, 0, 0)
            assert is_right, f"sequence {seq_id} finds {cell} at {position} near its next token"
        if self.config.state_bytes:
            expected = (seq_id, self.num_lost[seq_id], start)
            assert self.slots[row] == expected, f"the state in row {row} is {self.slots[row]}, not {expected}"
        self.written[seq_id] += [self._cell(seq_id, position) for position in range(start)]
        self.programs[seq_id] += [("prefill", position) for position in range(len(self.programs[seq_id]), start)]
        self.found[seq_id] = self.num_written[seq_id] = start

    def _cell(self, seq_id: int, token: int) -> Written:
        """What is computed now: in a prompt page with a key the same for all who have it, whenever it is computed."""
        key = self._key(seq_id, token)
        return (seq_id, token, self.epochs[seq_id], 0) if key is None else (key, token, 0, 0)

    def _key(self, seq_id: int, token: int) -> Hashable | None:
        page, keys = token // self.config.page_size, self.keys[seq_id]
        return keys[page] if page < len(keys) else None

    def _write(self, seq_id: int, row: int, position: int, program: str) -> None:
        written, programs, token = self.written[seq_id], self.programs[seq_id], self.num_written[seq_id]
        assert position == len(written), f"sequence {seq_id} computes position {position} after {len(written)}"
        written.append(self._cell(seq_id, token))
        self.num_written[seq_id] += 1
        if token == len(programs):
            programs.append((program, position))
        now = program, position
        assert programs[token] == now, f"token {token} of sequence {seq_id} was computed by {programs[token]}, now by {now}"
        if self.config.state_bytes:
            self._advance(seq_id, row, token)
        if self.config.num_pages:
            self._fill(seq_id, row, position)

    def _advance(self, seq_id: int, row: int, token: int) -> None:
        """The state of its row sees one token more; with the first one it begins, whatever another has left there."""
        before = (seq_id, self.num_lost[seq_id], token)
        assert not token or self.slots[row] == before, f"the state in row {row} is {self.slots[row]}, not {before}"
        self._check_slot(seq_id, row)
        self.slots[row] = (seq_id, self.num_lost[seq_id], token + 1)

    def _check_slot(self, seq_id: int, row: int) -> None:
        flying = self._touching_state(row)
        assert not flying, f"sequence {seq_id} changes the state in row {row}, which {flying} may touch"

    def _touching_state(self, row: int) -> list[Copy]:
        """Copies in flight that read a row's state later, or have yet to fill it."""
        return [copy for copy in self.flights if copy.chunk.row == row and (not copy.is_park or copy.cells is None)]

    def _fill(self, seq_id: int, row: int, position: int) -> None:
        self._put(seq_id, row, position, self.written[seq_id][position])

    def _put(self, seq_id: int, row: int, position: int, content: Written) -> None:
        page, cell = divmod(position, self.config.page_size)
        assert not self._is_touched(self.tables[row][page]), f"sequence {seq_id} writes a page that a copy in flight may touch"
        self.pool[self.tables[row][page]][cell] = content
        if self.config.near_pages:
            near = self.near_tables[row][page]
            assert not self._is_touched(near, is_near=True), f"sequence {seq_id} writes a page that a copy in flight may touch"
            self.near[near][cell] = content

    def _is_touched(self, page: int, *, is_near: bool = False) -> bool:
        """Whether a copy in flight reads the page later, or has yet to fill it."""
        touching = [copy.chunk for copy in self.flights if not copy.is_park or copy.cells is None]
        return any(page in chunk.pages for chunk in touching if chunk.is_near == is_near)

    def _read(self, seq_id: int, row: int, start: int, num_cells: int) -> None:
        """What the tokens from cell `start` on see."""
        if not self.config.num_pages:
            return
        first = self._first_seen(start)
        cells = [cell for page in self.tables[row] for cell in self.pool[page]][first:num_cells]
        expected = self.written[seq_id][first:]
        assert cells == expected, f"sequence {seq_id} in row {row} reads {cells}, not {expected}"
        if self.config.near_pages:
            first = self._first_near(start)
            cells, expected = self._near_cells(row)[first:num_cells], self.written[seq_id][first:]
            assert cells == expected, f"sequence {seq_id} in row {row} reads {cells} near its token, not {expected}"

    def _near_cells(self, row: int) -> list[Cell]:
        return [cell for page in self.near_tables[row] for cell in self.near[page]]

    def _first_near(self, position: int) -> int:
        return max(0, position - (self.config.near_window or 0) + 1)

    def _first_seen(self, position: int) -> int:
        """The first cell that the token in some cell sees."""
        return 0 if self.config.window is None else max(0, position - self.config.window + 1)


def turn_back(cell: Written, num_positions: int) -> Written:
    """A cell whose key was turned back once more."""
    content, token, epoch, turned = cell
    return content, token, epoch, turned + num_positions
