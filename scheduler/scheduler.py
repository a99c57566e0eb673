"""The scheduler: sequences are added, each step is planned, what happened is committed.

It decides who runs, who parks and who returns, and owns page numbers and host byte counts. It never sees a token, an array or a clock
(`now` is handed in), so that the same `Scheduler` runs behind the engine, the simulator and the fake runner of the tests.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping

from jaxkv.scheduler.books import Books, Counters, Turn
from jaxkv.scheduler.build import fill_batch
from jaxkv.scheduler.check import check_books
from jaxkv.scheduler.commit import enter_outcome
from jaxkv.scheduler.config import validate
from jaxkv.scheduler.copies import dispatch_parks, end, spoil
from jaxkv.scheduler.drafts import lend, take_back
from jaxkv.scheduler.forced import hold, park_forced, release
from jaxkv.scheduler.near import drop_near
from jaxkv.scheduler.need import answer_limit, check_keys_fit
from jaxkv.scheduler.plan import Chunk, ContextShift, Outcome, Plan, SchedulerConfig
from jaxkv.scheduler.prefix import share_first
from jaxkv.scheduler.recover import recover
from jaxkv.scheduler.replay import drop
from jaxkv.scheduler.returns import let_in
from jaxkv.scheduler.room import last_resort, make_room, replay_one_if_stuck, serve_last_tokens
from jaxkv.scheduler.sequence import AWAY, RUNNING, Sequence, State
from jaxkv.scheduler.shift import check_shift, shift_contexts
from jaxkv.scheduler.views import Snapshot, snapshot
from jaxkv.scheduler.way import make_way
from jaxkv.scheduler.window import drop_unseen


class Scheduler:
    """Who runs, who parks, who returns. Not thread-safe: one loop owns it."""

    def __init__(self, config: SchedulerConfig, on_drop: Callable[[int], None] = lambda host_id: None) -> None:
        """Raises ValueError for sizes or names that cannot work. `on_drop(host_id)`: a place in host memory is not needed any more."""
        validate(config)
        self.config = config
        self._books = Books(config, on_drop)

    def add(
        self,
        seq_id: int,
        prompt_len: int,
        max_new: int | None,
        now: float,
        *,
        priority: int = 0,
        page_keys: tuple[Hashable, ...] = (),
        group: int | None = None,
        keeps_prefix: bool = True,
        is_patient: bool = False,
        shift: ContextShift | None = None,
    ) -> int | None:
        """Put a new sequence into the waiting line and return how many tokens it may generate at most.

        That is `max_new`, or less where the pool or the model's length ends it sooner, which no context ever does that shifts. One of a
        lower `priority` goes first. `page_keys` name the content of its full prompt pages before the last prompt token, `keeps_prefix` says
        whether they stay to be found when nobody holds them. Those of one `group` have one prompt, and may begin together.
        One that `is_patient` lets prompts go before its next token.

        Raises DoesNotFit if the prompt alone can never fit, BadShift for a shift that cannot work, ValueError for a length below 1, a
        priority that is no integer, too many keys or an id in use.
        """
        books = self._books
        if seq_id in books.sequences:
            raise ValueError(f"sequence {seq_id} is known already: forget it after its end, or choose another id")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"a priority is an integer, lower goes first; got {priority!r}")
        if shift is not None:
            check_shift(self.config, shift)
        limit = answer_limit(self.config, prompt_len, max_new, shift)
        check_keys_fit(self.config, prompt_len, len(page_keys))
        seq = Sequence(
            seq_id,
            prompt_len,
            limit,
            order=books.num_added,
            added_at=now,
            priority=priority,
            page_keys=page_keys,
            group=group,
            keeps_prefix=keeps_prefix,
            is_patient=is_patient,
            shift=shift,
        )
        books.sequences[seq_id] = seq
        books.waiting.append(seq)
        books.join_group(seq)
        books.num_added += 1
        books.num_live += 1
        return limit

    def cancel(self, seq_id: int) -> str:
        """End it as CANCELLED now, whatever it is doing; "" or the reason why nothing happened."""
        refusal = self._end(seq_id, State.CANCELLED, "cancelled")
        self._books.counters.num_cancelled += not refusal
        return refusal

    def fail(self, seq_id: int, reason: str) -> str:
        """End it as FAILED now, whatever it is doing; "" or the reason why nothing happened."""
        refusal = self._end(seq_id, State.FAILED, reason)
        self._books.counters.num_failed += not refusal
        return refusal

    def park(self, seq_id: int) -> str:
        """Ask the next plan to park it, once it has made progress since its return; "" or the reason why nothing happens."""
        seq = self._books.sequences.get(seq_id)
        if seq is None:
            return f"sequence {seq_id} is not known"
        if seq.state not in RUNNING:
            return f"sequence {seq_id} is {seq.state}"
        if seq.park_asked:
            return f"sequence {seq_id} is to be parked already"
        seq.park_asked = True
        return ""

    def hold(self, seq_id: int) -> str:
        """Park it as `park` does, and keep it away until `release`; "" or the reason why nothing happens.

        It is in no line, so that nobody waits behind it. One that is away already stays away. A park that the host budget has no room for
        is told as refused, and then forgotten.
        """
        seq = self._books.sequences.get(seq_id)
        if seq is None:
            return f"sequence {seq_id} is not known"
        if seq.is_over or seq.state is State.WAITING:
            return f"sequence {seq_id} is {seq.state}"
        if seq.is_held:
            return f"sequence {seq_id} is held already"
        hold(self._books, seq)
        return ""

    def release(self, seq_id: int) -> str:
        """Let a held one come back, at the end of the line; "" or the reason why nothing happens."""
        seq = self._books.sequences.get(seq_id)
        if seq is None:
            return f"sequence {seq_id} is not known"
        if not seq.is_held:
            return f"sequence {seq_id} is not held"
        release(self._books, seq)
        return ""

    def replay(self, seq_id: int, now: float) -> str:
        """What it has computed is lost, in the pool or on the host: it is computed again when its turn in the line comes.

        "" or the reason why nothing happened. Copies of it that are in flight land as strays.
        """
        seq = self._books.sequences.get(seq_id)
        if seq is None:
            return f"sequence {seq_id} is not known"
        if seq.is_over or seq.state is State.WAITING:
            return f"sequence {seq_id} is {seq.state}"
        self._books.counters.num_parks_lost += seq.state not in AWAY
        drop(self._books, seq, now)
        return ""

    def recover(self, flying: Iterable[Chunk], generated: Mapping[int, int], now: float) -> None:
        """A plan or its outcome broke off somewhere: make the books anew. Everybody who was in the pool is dropped, to be computed again.

        `flying` are the copies that the runner still has in flight, `generated` the tokens that each live sequence has: fewer than were
        entered where some were never read.
        """
        recover(self._books, flying, generated, now)

    def forget(self, seq_id: int) -> None:
        """Drop the record of a sequence that has ended; copies still in flight are accounted for all the same."""
        seq = self._books.sequences[seq_id]
        assert seq.is_over, f"sequence {seq_id} is {seq.state}: only an ended one can be forgotten"
        del self._books.sequences[seq_id]

    def plan(self, now: float, free_chunks: int) -> Plan:
        """Decide the next step. `free_chunks`: transfer chunks that the runner can take now."""
        books = self._books
        turn = Turn(books.num_steps, now, min(free_chunks, self.config.chunks_per_step))
        books.num_steps += 1
        books.forks.clear()
        take_back(books)
        drop_unseen(books, turn)
        drop_near(books)
        shift_contexts(books, turn)
        share_first(books, turn)
        park_forced(books, turn)
        serve_last_tokens(books, turn)
        if self.config.planner:
            make_room(books, turn)
            make_way(books, turn)
        dispatch_parks(books, turn)
        let_in(books, turn)
        last_resort(books, turn)
        fill_batch(books, turn)
        if replay_one_if_stuck(books, turn):
            fill_batch(books, turn)
        lend(books, turn)
        return turn.plan()

    def commit(self, outcome: Outcome, now: float) -> None:
        """Enter what happened: copies that are done, at any time, and the progress of the last plan."""
        enter_outcome(self._books, outcome)

    def check(self) -> None:
        """AssertionError if a page, a host byte, a row or a park is lost or counted twice."""
        check_books(self._books)

    @property
    def is_idle(self) -> bool:
        """Nobody lives and no copy is in flight."""
        return not self._books.num_live and not self._books.flights

    @property
    def counters(self) -> Counters:
        """What happened so far."""
        counters, host = self._books.counters, self._books.host
        counters.host_bytes, counters.host_bytes_peak = host.held, host.peak
        counters.num_kept_hits, counters.kept_bytes_saved = host.num_hits, host.num_hits * host.chunk_bytes
        return counters

    def state(self, seq_id: int) -> State:
        """Where a sequence is in its life; KeyError for one never added or forgotten."""
        return self._books.sequences[seq_id].state

    def is_away(self, seq_id: int) -> bool:
        """Whether it was parked and is not back at work."""
        return self.state(seq_id) in AWAY

    def image(self, seq_id: int) -> tuple[int, ...]:
        """The places in host memory that it needs to return, in the order of its pages; none while it is here."""
        seq = self._books.sequences.get(seq_id)
        return () if seq is None else tuple(chunk.host_id for chunk in seq.image)

    def image_bytes(self, seq_id: int) -> int:
        """What that takes, padding and the state included."""
        books, seq = self._books, self._books.sequences.get(seq_id)
        return 0 if seq is None else books.host.size(chunk.span for chunk in seq.image)

    def spoil(self, chunk: Chunk) -> tuple[int, ...]:
        """A copy failed, or what came back was damaged: nobody will find that place again. Returns who cannot go on because of it:
        its own sequence, and when the copy to the host is what failed, all those whose image it belongs to."""
        return spoil(self._books, chunk)

    def cached_tokens(self, seq_id: int) -> int:
        """How many tokens of its prompt were found in the pool; KeyError for one never added or forgotten."""
        return self._books.sequences[seq_id].num_cached

    def snapshot(self) -> Snapshot:
        """A frozen picture of everything that lives."""
        return snapshot(self._books)

    def page_owners(self) -> tuple[int | None, ...]:
        """Who holds each page, from page 1 on; None where it is free. For pictures of the pool: its cost grows with the pool."""
        pages = self._books.pages
        return tuple(pages.owner(page) for page in range(1, pages.num_pages + 1))

    def _end(self, seq_id: int, state: State, reason: str) -> str:
        seq = self._books.sequences.get(seq_id)
        if seq is None:
            return f"sequence {seq_id} is not known"
        if seq.is_over:
            return f"sequence {seq_id} is {seq.state}"
        end(self._books, seq, state, reason)
        return ""
