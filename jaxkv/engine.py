"""The engine: requests in, answers out, one step at a time. Owns the loop and the live sequences.

The scheduler decides, the programs compute, the transfer moves images; this file carries plans from one to the others and tokens to their
sequences. All of it runs in the caller's thread.
"""

import gc
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxkv.checks import check_request
from jaxkv.config import Config
from jaxkv.errors import JaxkvError, RequestError
from jaxkv.guard import CompileGuard, RecompileError
from jaxkv.live import Handle, Live, OnToken, RequestStats
from jaxkv.observe.log import LogObserver, tell_stages
from jaxkv.observe.observers import Observers
from jaxkv.observe.phases import Phases
from jaxkv.output import Output
from jaxkv.request import Completion, SamplingParams
from jaxkv.rows import Rows
from jaxkv.samples import Samples
from jaxkv.sampling import Sampled
from jaxkv.scheduler import Chunk, DoesNotFit, Outcome, Plan, Scheduler, State
from jaxkv.startup import OnStage, start
from jaxkv.stats import EngineStats
from jaxkv.status import EngineStatus, read_status
from jaxkv.summary import engine_summary

_IDLE_S = 2e-4  # how long a step sleeps when it only waits for copies


class Engine:
    """Serves requests for one model through one pool.

    Use it as a context manager: `with Engine(config) as engine: engine.generate(["Once upon a time"])`. Starting loads the weights,
    compiles every program and runs each once; raises ConfigError or ModelError with one clear message when that cannot work.
    """

    def __init__(self, config: Config, on_stage: OnStage | None = None) -> None:
        self.config = config
        self.parts = start(config, tell_stages(on_stage))
        self.scheduler = Scheduler(self.parts.scheduler_config)
        self.stats = EngineStats()
        self.observers = Observers(LogObserver())
        self.phases = Phases()
        self._rows = Rows(self.parts.shapes, self.parts.layout)
        self._guard = CompileGuard(strict=config.run.compile_guard)
        self._live: dict[int, Live] = {}
        self._num_submitted = 0
        self._num_polls = 0
        self._closed = False
        self._unfinished: str | None = None  # the step that is being taken, or how it broke off

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # What a caller may look at

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None when it has none."""
        return self.parts.checkpoint.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's sizes."""
        return self.parts.checkpoint.config

    @property
    def max_len(self) -> int:
        """Longest sequence in tokens, prompt and answer together."""
        return self.parts.shapes.max_len

    @property
    def capacity(self) -> int:
        """Usable tokens of the pool."""
        return self.parts.layout.num_tokens

    @property
    def system_fingerprint(self) -> str:
        """Two engines with the same one give the same bytes for the same request."""
        return self.parts.fingerprint

    @property
    def messages(self) -> list[str]:
        """What the start-up has to say, each line once."""
        return self.parts.messages

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do, copies included."""
        return not self._live and self.parts.transfer.num_in_flight == 0

    @property
    def num_compiles_after_warmup(self) -> int:
        """Compilations during steps: 0, or the guard would have raised."""
        return self._guard.num_compiles

    def status(self) -> EngineStatus:
        """Who runs, who is parked, how full the pool is, now."""
        return read_status(self)

    def summary(self) -> dict[str, Any]:
        """All the numbers of the run so far."""
        return engine_summary(self)

    def live(self, seq_id: int) -> Live | None:
        """The sequence of a request that has not ended."""
        return self._live.get(seq_id)

    def request_stats(self, seq_id: int) -> RequestStats:
        """The figures of a request that has not ended."""
        live = self._live[seq_id]
        ttft_s = None if live.first_token_s is None else live.first_token_s - live.submitted_s
        return RequestStats(str(self.scheduler.state(seq_id)), live.num_generated, live.num_parks, live.pause_s, ttft_s)

    # Requests

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None, name: str | None = None) -> Handle:
        """Take a request; it runs whenever somebody takes steps. Raises RequestError for one that can never be served.

        `on_token(handle, token_id)` is called in the engine's thread for every token. `name` is what logs and timelines call it.
        """
        self._check_open()
        banned = check_request(prompt, params, self.model_config.vocab_size, self.parts.checkpoint.eos_ids)
        seq_id, now = self._num_submitted, time.perf_counter()
        try:
            limit = self.scheduler.add(seq_id, len(prompt), params.max_tokens, now)
        except DoesNotFit as error:
            raise RequestError(str(error), "prompt") from error
        self._num_submitted += 1
        handle = Handle(seq_id, self)
        asked = min(params.max_tokens or self.max_len, self.max_len - len(prompt) + 1)
        if limit < asked:
            handle.will_truncate_at = limit
        output = Output(self.tokenizer, self.parts.checkpoint.eos_ids, params, limit)
        self._live[seq_id] = Live(seq_id, np.array(prompt, np.int32), params, banned, output, handle, now, on_token, name)
        handle.token_ids = output.token_ids
        self.stats.num_requests += 1
        self.stats.prompt_tokens += len(prompt)
        self.stats.started_s = self.stats.started_s or now
        self.observers.tell("on_submit", self, self._live[seq_id])
        return handle

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer all prompts (text or token ids), in their order; `params` is one for all or one for each."""
        wishes = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(wishes) != len(prompts):
            raise RequestError(f"params: got {len(wishes)} for {len(prompts)} prompts; give one, or one for each", "params")
        handles: list[Handle] = []
        try:
            handles.extend(self.submit(self._encode(prompt), wish) for prompt, wish in zip(prompts, wishes, strict=True))
            return [handle.result() for handle in handles]
        except BaseException:  # nobody else holds them: a refused prompt leaves none of the others behind
            for handle in handles:
                handle.cancel()
            raise

    def cancel(self, handle: Handle) -> None:
        """End a request now; its pages and bytes come back as soon as no copy touches them."""
        if handle.seq_id in self._live:
            self.scheduler.cancel(handle.seq_id)
            self._end(handle.seq_id, "cancelled")

    def close(self) -> None:
        """Cancel what is left, wait for the copies, free everything. Closing twice is closing once."""
        if self._closed:
            return
        self._closed = True
        for sequence in list(self._live.values()):
            self.cancel(sequence.handle)
        self.parts.transfer.drain()
        self.parts.pool.arrays = []
        gc.collect()

    # One step

    def step(self) -> None:
        """One turn: copies that arrived, a plan, parks and restores, a prompt chunk, one token for every row.

        What goes wrong for one request ends that request. An exception out of here (an interrupt, say) leaves a plan half done, so that no
        page can be trusted: after it the engine can only be closed.
        """
        self._check_open()
        if self._unfinished is not None:
            raise JaxkvError(self._unfinished)
        self._unfinished = "a step is being taken; a callback may not take another"
        try:
            with self._guard, self.phases.step(self.stats.num_steps):
                with self.phases("land"):
                    self._land()
                with self.phases("plan"):
                    plan = self._plan()
                with self.phases("move"):
                    self._move(plan)
                prefilled, decoded = self._dispatch(plan)
                with self.phases("collect"):
                    self._collect(plan, prefilled, decoded)
        except BaseException as error:
            self._unfinished = f"a step broke off ({type(error).__name__}), so no page can be trusted; close the engine and make a new one"
            raise
        self._unfinished = None
        self.stats.num_steps += 1
        self.observers.tell("on_step", self, plan, time.perf_counter())
        if not plan.prefill and not plan.decode and self.parts.transfer.num_in_flight:
            time.sleep(_IDLE_S)

    def _land(self) -> None:
        """Tell the scheduler which copies arrived; polled every turn, also when no batch runs."""
        self._num_polls += 1
        landed = self.parts.transfer.poll(self._num_polls)
        if not (landed.parked or landed.restored or landed.failed):
            return
        now = time.perf_counter()
        self.scheduler.commit(Outcome(parked=tuple(landed.parked), restored=tuple(landed.restored)), now)
        self.observers.tell("on_landed", self, landed, now)
        for chunk, reason in landed.failed:
            self._fail(chunk.seq_id, reason)
        for chunk in landed.restored:
            self._resume(chunk.seq_id, now)

    def _resume(self, seq_id: int, now: float) -> None:
        sequence = self._live.get(seq_id)
        if sequence is not None and sequence.paused_s is not None and self.scheduler.state(seq_id) in (State.PREFILLING, State.DECODING):
            self.stats.pause_s.append(sequence.resume(now))
            self.parts.transfer.discard(seq_id)

    def _plan(self) -> Plan:
        """What this step does, and what it begins and ends for each sequence."""
        plan = self.scheduler.plan(time.perf_counter(), self.parts.transfer.free_chunks)
        self.observers.tell("on_plan", self, plan, time.perf_counter())
        self._take_note(plan)
        return plan

    def _take_note(self, plan: Plan) -> None:
        """Pauses begin with the plan; a sequence that had nothing to copy is back at once; one that cannot go on ends here."""
        now = time.perf_counter()
        for note in plan.notes:
            if note.kind == "park":
                self._live[note.seq_id].pause(now)
            elif note.kind == "restore":
                self._resume(note.seq_id, now)
            elif note.kind == "over_budget":
                self._end(note.seq_id, "error", note.reason)

    def _move(self, plan: Plan) -> None:
        """Issue this step's copies; nothing is waited for. A chunk that did not leave has landed as far as the scheduler is concerned."""
        dropped: list[Chunk] = []
        for move, chunks in ((self.parts.transfer.park, plan.park), (self.parts.transfer.restore, plan.restore)):
            for chunk in chunks:
                try:
                    if chunk.seq_id in self._live:
                        move(chunk, self._num_polls)
                        continue
                except RecompileError:
                    raise
                except Exception as error:
                    self._fail(chunk.seq_id, f"its pages could not be moved: {error}")
                dropped.append(chunk)
        if dropped:
            self.scheduler.commit(Outcome(parked=tuple(dropped)), time.perf_counter())

    def _dispatch(self, plan: Plan) -> tuple[Sampled | None, Sampled | None]:
        """Run the prompt chunk, then the decode step; the device does them in this order."""
        parts, prefilled, decoded = self.parts, None, None
        self._rows.update(plan.tables)
        if plan.prefill is not None:
            with self.phases("prefill"):
                batch = self._rows.prefill_batch(plan.prefill, self._live[plan.prefill.seq_id])
                parts.pool.arrays, prefilled = parts.programs.prefill.run(parts.weights, parts.pool.arrays, batch)
        if plan.decode:
            with self.phases("decode"):
                rows = self._rows.decode_batch(plan.decode, self._live)
                parts.pool.arrays, decoded = parts.programs.decode.run(parts.weights, parts.pool.arrays, rows)
            self.stats.num_decode_steps += 1
            self.stats.num_busy_rows += len(plan.decode)
        return prefilled, decoded

    def _collect(self, plan: Plan, prefilled: Sampled | None, decoded: Sampled | None) -> None:
        """Wait for the tokens, hand them to their sequences, tell the scheduler."""
        finished: dict[int, str] = {}
        failed: dict[int, str] = {}
        samples = None if decoded is None else Samples(decoded)
        for chunk, reason in self.parts.transfer.verify():
            self._fail(chunk.seq_id, reason)
        if plan.prefill is not None and plan.prefill.is_last and prefilled is not None:
            self._accept(plan.prefill.seq_id, 0, Samples(prefilled), finished, failed)
        if samples is not None:
            for entry in plan.decode:
                self._accept(entry.seq_id, entry.row, samples, finished, failed)
        if plan.prefill is None and not plan.decode:
            return
        present = tuple(entry.seq_id for entry in plan.decode if entry.seq_id in self._live)
        outcome = Outcome(prefilled=plan.prefill, decoded=present, finished=finished)
        self.scheduler.commit(outcome, time.perf_counter())
        for seq_id, reason in failed.items():
            self._fail(seq_id, reason)
        for seq_id, reason in finished.items():
            if seq_id in self._live:
                self._end(seq_id, reason)

    def _accept(self, seq_id: int, row: int, samples: Samples, finished: dict[int, str], failed: dict[int, str]) -> None:
        """One token for one sequence. What goes wrong here is that sequence's alone."""
        sequence, now = self._live.get(seq_id), time.perf_counter()
        if sequence is None:
            return
        try:
            token_id = int(samples.token[row])
            reason = sequence.output.accept(token_id, samples.logprobs(row, sequence.params.logprobs))
            self._count_token(sequence, now)
            if sequence.on_token is not None:
                sequence.on_token(sequence.handle, token_id)
        except Exception as error:
            failed[seq_id] = f"the token could not be taken: {type(error).__name__}: {error}"
            return
        if reason is not None:
            finished[seq_id] = reason

    def _count_token(self, sequence: Live, now: float) -> None:
        stats = self.stats
        stats.generated_tokens += 1
        stats.last_token_s = now
        if sequence.first_token_s is None:
            sequence.first_token_s = now
            stats.ttft_s.append(now - sequence.submitted_s)
        elif sequence.last_token_s is not None:
            stats.token_gap_s.append(now - sequence.last_token_s)
        sequence.last_token_s = now

    # Ends

    def _fail(self, seq_id: int, reason: str) -> None:
        if seq_id in self._live:
            self.scheduler.fail(seq_id, reason)
            self._end(seq_id, "error", reason)

    def _end(self, seq_id: int, reason: str, error: str | None = None) -> None:
        """The one place where a sequence leaves."""
        sequence, now = self._live.pop(seq_id), time.perf_counter()
        if sequence.paused_s is not None:
            self.stats.pause_s.append(sequence.resume(now))
        sequence.handle.completion = sequence.complete(now, reason, error)
        self.parts.transfer.discard(seq_id)
        self.scheduler.forget(seq_id)
        self.stats.e2e_s.append(now - sequence.submitted_s)
        if error is not None:
            self.stats.num_failed += 1
        elif reason == "cancelled":
            self.stats.num_cancelled += 1
        else:
            self.stats.num_completed += 1
        self.observers.tell("on_end", self, sequence, reason, error, now)

    # Checks

    def _check_open(self) -> None:
        if self._closed:
            raise JaxkvError("the engine is closed; make a new one")

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError("prompt: this model has no tokenizer; give token ids", "prompt")
        return self.tokenizer.encode(prompt, add_special_tokens=True)
