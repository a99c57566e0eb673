"""What one step of an engine does, phase by phase: land, plan, move, dispatch, collect. Owns nothing; all it works on is the engine's.

Plans go from the scheduler to the transfer and the programs, tokens from the programs to their sequences.
"""

import time
from typing import TYPE_CHECKING, Any

from jaxkv.blame import blaming
from jaxkv.ends import end, fail, lose
from jaxkv.forking import copy_all_forks
from jaxkv.guard import RecompileError
from jaxkv.live import Live
from jaxkv.overlap import Dispatched, Prefilled, can_wait
from jaxkv.samples import Samples, read_scores
from jaxkv.sampling import Sampled
from jaxkv.scheduler import Chunk, DecodeRow, Outcome, Plan, PrefillChunk, State
from jaxkv.scoring import Scores
from jaxkv.shifting import rotate_pages
from jaxkv.snapshots import fetch_states, keep_state

if TYPE_CHECKING:
    from jaxkv.engine import Engine


def take_step(engine: "Engine") -> Plan:
    """One turn; returns the plan that it carried out."""
    phases = engine.phases
    with engine.guard, phases.step(engine.stats.num_steps):
        with phases("land"):
            land(engine)
        with phases("plan"):
            plan = make_plan(engine)
        with phases("move"):
            shift_contexts(engine, plan)
            move(engine, plan)
        step = dispatch(engine, plan)
        engine.unread.append(step)
        with phases("collect"):
            enter(engine, step)
            num_left = 1 if may_wait(engine, step) else 0
            while len(engine.unread) > num_left:
                collect(engine, engine.unread.pop(0))
    return plan


def land(engine: "Engine") -> None:
    """Tell the scheduler which copies arrived; polled every turn, also when no batch runs."""
    engine.num_polls += 1
    landed = engine.parts.transfer.poll(engine.num_polls)
    if not (landed.parked or landed.restored or landed.failed):
        return
    for chunk, reason in landed.failed:
        lose_copy(engine, chunk, reason)
    now = time.perf_counter()
    engine.scheduler.commit(Outcome(parked=tuple(landed.parked), restored=tuple(landed.restored)), now)
    engine.observers.tell("on_landed", engine, landed, now)
    for chunk in landed.restored:
        resume(engine, chunk.seq_id, now)


def resume(engine: "Engine", seq_id: int, now: float) -> None:
    """If it is back at work, its pause is over."""
    sequence = engine.live(seq_id)
    if sequence is None or sequence.paused_s is None:
        return
    if engine.scheduler.state(seq_id) in (State.PREFILLING, State.DECODING):
        engine.stats.pause_s.append(sequence.resume(now))


def make_plan(engine: "Engine") -> Plan:
    """What this step does, and what it begins for each sequence."""
    plan = engine.scheduler.plan(time.perf_counter(), engine.parts.transfer.free_chunks)
    engine.observers.tell("on_plan", engine, plan, time.perf_counter())
    take_note(engine, plan)
    return plan


def take_note(engine: "Engine", plan: Plan) -> None:
    """Waits end and pauses begin with the plan; a sequence that had nothing to copy is back at once."""
    now = time.perf_counter()
    for note in plan.notes:
        if note.kind in ("park", "drop"):
            engine.sequences[note.seq_id].pause(now)
        elif note.kind == "restore":
            resume(engine, note.seq_id, now)
        elif note.kind == "admit":
            engine.stats.queue_s.append(now - engine.sequences[note.seq_id].submitted_s)


def shift_contexts(engine: "Engine", plan: Plan) -> None:
    """Turn the keys of contexts that drop tokens; first of all, since a dropped page may be somebody else's in this very step."""
    parts = engine.parts
    for shift in plan.shifts:
        assert parts.programs.rotate is not None, "no request shifts where the model cannot"
        with blaming(shift.seq_id):
            parts.pool.arrays = rotate_pages(parts.programs.rotate.run, parts.pool.arrays, shift, parts.layout.num_pages)


def move(engine: "Engine", plan: Plan) -> None:
    """Issue this step's copies; nothing is waited for. A chunk that did not leave has landed as far as the scheduler is concerned."""
    dropped: list[Chunk] = []
    lost: set[int] = set()
    transfer = engine.parts.transfer
    for send, chunks, for_others in ((transfer.park, plan.park, True), (transfer.restore, plan.restore, False)):
        for chunk in chunks:
            try:
                if for_others or (chunk.seq_id in engine.sequences and chunk.seq_id not in lost):  # it may belong to other images too
                    send(chunk, engine.num_polls)
                    continue
            except RecompileError:
                raise
            except Exception as error:
                lost |= lose_copy(engine, chunk, f"its pages could not be moved: {error}")
            dropped.append(chunk)
    if dropped:
        engine.scheduler.commit(Outcome(parked=tuple(dropped)), time.perf_counter())


def lose_copy(engine: "Engine", chunk: Chunk, reason: str) -> set[int]:
    """A copy failed or came back damaged: those that cannot go on without it are computed again. Returns who."""
    lost = engine.scheduler.spoil(chunk)
    for seq_id in lost:
        lose(engine, seq_id, reason)
    return set(lost)


def dispatch(engine: "Engine", plan: Plan) -> Dispatched:
    """Run the prompt chunk, then the decode step; the device does them in this order."""
    parts = engine.parts
    prefilled: Prefilled | None = None
    decoded: Sampled | None = None
    before = engine.unread[-1] if engine.unread else None
    engine.rows.update(plan.tables)
    fetch_states(parts.programs, parts.pool, plan)
    if plan.prefill is not None:
        with engine.phases("prefill"), blaming(*plan.prefill.seq_ids):
            batch: Any = engine.rows.prefill_batch(plan.prefill, engine.sequences)
            if engine.speculation is not None:
                batch = engine.speculation.lengthen(batch, plan.prefill, engine.sequences)
            parts.pool.arrays, sampled, scores, *guesses = parts.programs.prefill.run(parts.weights, parts.pool.arrays, batch)
            if engine.speculation is not None:
                engine.speculation.hear(plan.prefill, *guesses)
            keep_state(parts.programs, parts.pool, plan.prefill.row, plan.prefill.keep)
            copy_all_forks(parts.programs, parts.pool, parts.layout, plan.prefill)
            prefilled = sampled, scores
    if plan.decode:
        with engine.phases("decode"), blaming(*(entry.seq_id for entry in plan.decode)):
            rows: Any = engine.rows.decode_batch(plan.decode, engine.sequences, before)
            if engine.speculation is not None:
                rows = engine.speculation.widen(rows, plan.decode, engine.sequences)
            parts.pool.arrays, decoded, *guesses = parts.programs.decode.run(parts.weights, parts.pool.arrays, rows)
            if engine.speculation is not None:
                engine.speculation.hear(plan.decode, *guesses)
        engine.stats.num_decode_steps += 1
        engine.stats.num_busy_rows += len(plan.decode)
    return Dispatched(plan.prefill, plan.decode, prefilled, decoded)


def enter(engine: "Engine", step: Dispatched) -> None:
    """Tell the scheduler what is certain before any token is read: which cells there are, how many tokens, and so who is at the limit.

    Where guesses are checked nothing is certain, since how many are true is read with the tokens.
    """
    step.without(lose_damaged(engine))
    if engine.speculation is not None:
        return
    for seq_id in step.drawn:
        if (sequence := engine.live(seq_id)) is not None:
            sequence.num_unread += 1
    settle(engine, step, [entry.seq_id for entry in step.rows], {})


def settle(engine: "Engine", step: Dispatched, decoded: list[int], finished: dict[int, str]) -> None:
    """Tell the scheduler of a step: its chunk, and who has a cell more, once for each."""
    if step.chunk is None and not step.rows:
        return
    now = time.perf_counter()
    engine.scheduler.commit(Outcome(prefilled=step.chunk, decoded=tuple(decoded), finished=finished), now)
    for seq_id in (*decoded, *(step.chunk.seq_ids if step.chunk else ())):
        resume(engine, seq_id, now)  # one whose replay is complete


def may_wait(engine: "Engine", step: Dispatched) -> bool:
    """Whether its tokens are read in the next step, while the device is busy: somebody goes on, and the host need not know with which."""
    if not engine.config.scheduler.overlap or engine.speculation is not None:
        return False
    drawn = [sequence for seq_id in step.drawn if (sequence := engine.live(seq_id)) is not None]
    return can_wait(drawn) and any(engine.scheduler.state(sequence.seq_id) is State.DECODING for sequence in drawn)


def collect(engine: "Engine", step: Dispatched) -> None:
    """Wait for the tokens and hand them to their sequences; what is drawn for one that has ended meanwhile is nobody's."""
    finished: dict[int, str] = {}
    failed: dict[int, str] = {}
    first, samples = read(step)
    if step.chunk is not None and step.prefilled is not None:
        take_scores(engine, step.chunk, step.prefilled[1])
    for index, seq_id in enumerate(step.first):
        assert first is not None, "who draws a first token is part of a chunk"
        accept(engine, seq_id, index, first, finished, failed)
    if step.chunk is not None:
        note_draws(engine, step.chunk)
    ran = [seq_id for entry in step.rows for seq_id in accept_row(engine, entry, samples, finished, failed)]
    if engine.speculation is not None:
        engine.speculation.learn(engine.sequences)
        settle(engine, step, [seq_id for seq_id in ran if seq_id in engine.sequences], finished)
    elif finished:
        engine.scheduler.commit(Outcome(finished=finished), time.perf_counter())
    for seq_id, reason in failed.items():
        fail(engine, seq_id, reason)
    for seq_id, reason in finished.items():
        if seq_id in engine.sequences:
            end(engine, seq_id, reason)


def read(step: Dispatched) -> tuple[Samples | None, Samples | None]:
    """Wait for the tokens; what the device could not compute raises here."""
    first = samples = None
    if step.prefilled is not None and step.first:
        with blaming(*step.first):
            first = Samples(step.prefilled[0])
    if step.decoded is not None:
        with blaming(*(entry.seq_id for entry in step.rows)):
            samples = Samples(step.decoded)
    return first, samples


def take_scores(engine: "Engine", chunk: PrefillChunk, scores: Scores) -> None:
    """The prompt's own logprobs, where they are wanted: each is taken once, however often its chunk is computed."""
    sequence, end = next(filter(None, map(engine.live, chunk.seq_ids)), None), chunk.start + chunk.length
    if sequence is not None and sequence.wants_scores(end):
        with blaming(chunk.seq_id):
            tokens = sequence.prompt[chunk.start + 1 : end + 1]
            sequence.take_scores(chunk.start, read_scores(scores, tokens, sequence.params.prompt_logprobs or 0))


def note_draws(engine: "Engine", chunk: PrefillChunk) -> None:
    """Those that have a token but are not at work: what lies before the next one is no gap between steps."""
    for seq_id in chunk.draws:
        sequence = engine.live(seq_id)
        if sequence is not None:
            sequence.drew_ahead, sequence.last_token_s = True, None


def lose_damaged(engine: "Engine") -> set[int]:
    """The sequences whose images came back damaged: what they computed in this step is nobody's."""
    return {seq_id for chunk, reason in engine.parts.transfer.verify() for seq_id in lose_copy(engine, chunk, reason)}


def accept_row(engine: "Engine", entry: DecodeRow, samples: Samples | None, finished: dict[int, str], failed: dict[int, str]) -> list[int]:
    """What a row made goes to its sequence, whose id comes back once for every cell that counts: guesses that were true are tokens too."""
    if entry.is_replay or samples is None:
        return [entry.seq_id] * entry.num_cells
    if engine.live(entry.seq_id) is None:  # it has ended since
        return []
    num, speculation = 0, engine.speculation
    for place in (entry.row,) if speculation is None else speculation.columns(entry, samples.token):
        if entry.seq_id in finished or entry.seq_id in failed:
            break
        accept(engine, entry.seq_id, place, samples, finished, failed)
        num += 1
    engine.stats.count_row(num, 0 if speculation is None else speculation.num_guesses(entry))
    return [entry.seq_id] * num


def accept(engine: "Engine", seq_id: int, row: int, samples: Samples, finished: dict[int, str], failed: dict[int, str]) -> None:
    """One token for one sequence. What goes wrong here is that sequence's alone."""
    sequence, now = engine.live(seq_id), time.perf_counter()
    if sequence is None:
        return
    sequence.num_unread = max(0, sequence.num_unread - 1)  # with guesses they are read at once
    try:
        reason = take_token(engine, sequence, row, samples, now)
    except Exception as error:
        failed[seq_id] = f"the token could not be taken: {type(error).__name__}: {error}"
        return
    if reason is not None:
        finished[seq_id] = reason


def take_token(engine: "Engine", sequence: Live, row: int, samples: Samples, now: float) -> str | None:
    """The finish reason, where this is the end. A request for no token ends where others have their first, which is nobody's then."""
    if sequence.params.max_tokens == 0:
        sequence.cached_tokens = engine.scheduler.cached_tokens(sequence.seq_id)
        return sequence.output.finish("length")
    token_id = int(samples.token[row])
    reason = sequence.output.accept(token_id, samples.logprobs(row, sequence.params.logprobs))
    count_token(engine, sequence, now)
    if sequence.on_token is not None:
        sequence.on_token(sequence.handle, token_id)
    return reason


def count_token(engine: "Engine", sequence: Live, now: float) -> None:
    """Its times and gaps, for the figures."""
    stats = engine.stats
    sequence.num_faults = 0
    stats.generated_tokens += 1
    stats.last_token_s = now
    if sequence.first_token_s is None:
        sequence.first_token_s = now
        sequence.cached_tokens = engine.scheduler.cached_tokens(sequence.seq_id)
        if sequence.group.first_token_s is None:
            sequence.group.first_token_s = now
            stats.ttft_s.append(now - sequence.submitted_s)
    elif sequence.drew_ahead:
        sequence.drew_ahead, sequence.cached_tokens = False, engine.scheduler.cached_tokens(sequence.seq_id)
    elif sequence.last_token_s is not None:
        stats.token_gap_s.append(now - sequence.last_token_s)
    sequence.last_token_s = now if sequence.paused_s is None else None  # it may have left since the token was drawn
