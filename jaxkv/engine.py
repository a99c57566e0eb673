"""The engine: requests in, answers out. Owns its parts and the live sequences; what a step does stands in `step.py`.

The scheduler decides, the programs compute, the transfer moves images. All of it runs in the caller's thread.
"""

import dataclasses
import functools
import gc
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from jaxkv.checks import check_request
from jaxkv.config import Config
from jaxkv.ends import end
from jaxkv.errors import JaxkvError, RequestError
from jaxkv.guard import CompileGuard, RecompileError
from jaxkv.guides import Guides
from jaxkv.interrupt import check_interrupt
from jaxkv.live import Group, Handle, Live, OnToken, RequestStats
from jaxkv.observe.log import LogObserver, tell_stages
from jaxkv.observe.observers import Observers
from jaxkv.observe.phases import Phases
from jaxkv.output import Output
from jaxkv.overlap import Dispatched
from jaxkv.prefix import page_keys
from jaxkv.recover import recover
from jaxkv.request import Completion, SamplingParams
from jaxkv.rows import Rows
from jaxkv.scheduler import ContextShift, DoesNotFit, Scheduler, pool_cells
from jaxkv.shifting import asked_shift
from jaxkv.speculate.make import make_speculation
from jaxkv.startup import OnStage, start
from jaxkv.stats import EngineStats
from jaxkv.status import EngineStatus, read_status
from jaxkv.step import take_step
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
        self.scheduler = Scheduler(self.parts.scheduler_config, on_drop=self.parts.transfer.discard)
        self.stats = EngineStats()
        self.observers = Observers(LogObserver())
        self.phases = Phases()
        self.rows = Rows(self.parts.shapes, self.parts.layout, self.parts.mesh)
        self.speculation = make_speculation(config, self.parts.small)
        self.guard = CompileGuard(strict=config.run.compile_guard)
        self.sequences: dict[int, Live] = {}  # those that have not ended
        self.unread: list[Dispatched] = []  # steps whose tokens are still on the device: none between steps, or with overlap at most one
        self._num_submitted = 0
        self.num_polls = 0
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

    @functools.cached_property
    def guides(self) -> Guides:
        """What turns constraints and bad words into sets of tokens."""
        return Guides(self.tokenizer, self.model_config.vocab_size, self.parts.checkpoint.eos_ids)

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
        """Usable tokens of the pool; where a sequence is all state, those of all rows."""
        return self.parts.layout.num_tokens or self.config.scheduler.rows * self.max_len

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that the empty pool has room for, whatever the model's own limit."""
        settings = self.parts.scheduler_config
        return self.capacity if settings.window is None else pool_cells(settings, settings.prefill_chunk)

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
        return not self.sequences and self.parts.transfer.num_in_flight == 0

    @property
    def num_compiles_after_warmup(self) -> int:
        """Compilations during steps: 0, or the guard would have raised."""
        return self.guard.num_compiles

    def status(self) -> EngineStatus:
        """Who runs, who is parked, how full the pool is, now."""
        return read_status(self)

    def summary(self) -> dict[str, Any]:
        """All the numbers of the run so far."""
        return engine_summary(self)

    def live(self, seq_id: int) -> Live | None:
        """The sequence of a request that has not ended."""
        return self.sequences.get(seq_id)

    def request_stats(self, seq_id: int) -> RequestStats:
        """The figures of a request that has not ended."""
        live = self.sequences[seq_id]
        ttft_s = None if live.first_token_s is None else live.first_token_s - live.submitted_s
        return RequestStats(str(self.scheduler.state(seq_id)), live.num_generated, live.num_parks, live.pause_s, ttft_s)

    # Requests

    def prepare(self, params: SamplingParams) -> None:
        """Compile what `params` demand of the text, ahead of `submit` and in any one thread; RequestError for what cannot be had."""
        self.guides.prepare(params)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None, name: str | None = None, choice: int = 0
    ) -> Handle:
        """Take a request for one answer; it runs whenever somebody takes steps. Raises RequestError for one that can never be served.

        `on_token(handle, token_id)` is called in the engine's thread for every token. `name` is what logs and timelines call it. `choice`
        asks for what that choice of a group would say.
        """
        if params.n != 1:
            raise RequestError(f"n: got {params.n}, but submit takes requests for one answer; use submit_group", "n")
        return self._take(prompt, params, choice, on_token, name).choices[0]

    def submit_group(
        self, prompt: Sequence[int], params: SamplingParams, *, on_token: OnToken | None = None, name: str | None = None
    ) -> Group:
        """Take a request for `params.n` choices, as `submit` does for one; each is a sequence, and they share the prompt's pages."""
        return self._take(prompt, params, 0, on_token, name)

    def _take(self, prompt: Sequence[int], params: SamplingParams, first: int, on_token: OnToken | None, name: str | None) -> Group:
        self._check_open()
        banned = check_request(prompt, params, self.model_config.vocab_size, self.parts.checkpoint.eos_ids)
        can_shift = self.parts.programs.rotate is not None or bool(self.parts.layout.near)  # the scheduler refuses these
        shift = asked_shift(params, self.parts.scheduler_config, is_possible=can_shift)
        group, now, tokens = Group(), time.perf_counter(), np.array(prompt, np.int32)
        shares = not self.parts.layout.states or self.parts.layout.snapshots > 0  # pages alone are of no use where there are states
        is_cached = shares and self.config.pool.prefix_cache and params.cache_prompt and params.prompt_logprobs is None
        guides = [self.guides.start(params, banned) for _ in range(params.n)]
        facts: dict[str, Any] = {"page_size": self.parts.layout.page_size, "fingerprint": self.parts.fingerprint}
        keys = page_keys(tokens, params, self._num_submitted, is_cached=is_cached, **facts) if shares else ()
        place = self._place(params, keys, is_cached, shift)
        for choice, guide in enumerate(guides, first):
            limit = self._add(tokens, params, place, now)
            handle = Handle(self._num_submitted, self, choice=choice, will_truncate_at=self._truncation(len(tokens), params, limit))
            self._num_submitted += 1
            output = Output(self.tokenizer, self.parts.checkpoint.eos_ids, params, limit, guide)
            handle.token_ids = output.token_ids
            group.choices.append(handle)
            self.sequences[handle.seq_id] = Live(handle.seq_id, tokens, params, banned, output, handle, group, now, on_token, name, shift)
        self.stats.count_submit(len(tokens), now)
        for handle in group.choices:
            self.observers.tell("on_submit", self, self.sequences[handle.seq_id])
        return group

    def _place(self, params: SamplingParams, keys: tuple[bytes, ...], is_cached: bool, shift: ContextShift | None) -> dict[str, Any]:
        """What the scheduler must know of a request beside its lengths."""
        group = self._num_submitted if params.n > 1 else None
        place: dict[str, Any] = {"priority": params.priority, "page_keys": keys, "keeps_prefix": is_cached, "shift": shift, "group": group}
        return {**place, "is_patient": params.patient}

    def _add(self, tokens: np.ndarray, params: SamplingParams, place: dict[str, Any], now: float) -> int | None:
        """Tell the scheduler of the next sequence; what it refuses it refuses for the first choice, before any is taken."""
        try:
            return self.scheduler.add(self._num_submitted, len(tokens), self._most_new(params), now, **place)
        except DoesNotFit as error:
            raise RequestError(str(error), "prompt") from error

    def _most_new(self, params: SamplingParams) -> int | None:
        """How long the answer may be; one of no tokens ends where another has its first, which is not taken."""
        return None if params.max_tokens is None else max(1, params.max_tokens)

    def _truncation(self, prompt_len: int, params: SamplingParams, limit: int | None) -> int | None:
        """Where the pool itself ends the answer before anything else does."""
        asked = min(self._most_new(params) or self.max_len, self.max_len - prompt_len + 1)
        return limit if limit is not None and limit < asked else None

    def generate(
        self, prompts: Sequence[str | Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer all prompts (text or token ids), in their order; `params` is one for all or one for each.

        Where they ask for `n` choices, these stand side by side in the place of the one answer. All count as patient.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts: got one text, allowed: a list of prompts; put it in brackets", "prompts")
        wishes = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(wishes) != len(prompts):
            raise RequestError(f"params: got {len(wishes)} for {len(prompts)} prompts; give one, or one for each", "params")
        groups: list[Group] = []
        try:
            for prompt, wish in zip(prompts, wishes, strict=True):
                groups.append(self.submit_group(self._encode(prompt), dataclasses.replace(wish, patient=True)))
            return [completion for group in groups for completion in group.result()]
        except BaseException:  # nobody else holds them: a refused prompt leaves none of the others behind
            for group in groups:
                group.cancel()
            raise

    def cancel(self, handle: Handle) -> None:
        """End a request now; its pages and bytes come back as soon as no copy touches them."""
        if handle.seq_id in self.sequences:
            self.scheduler.cancel(handle.seq_id)
            end(self, handle.seq_id, "cancelled")

    def hold(self, seq_id: int) -> str:
        """Park a sequence and keep it away until `release`; "" or the reason why nothing happens."""
        return self.scheduler.hold(seq_id)

    def release(self, seq_id: int) -> str:
        """Let a held sequence come back; "" or the reason why nothing happens."""
        return self.scheduler.release(seq_id)

    def close(self) -> None:
        """Cancel what is left, wait for the copies, free everything. Closing twice is closing once."""
        if self._closed:
            return
        self._closed = True
        for sequence in list(self.sequences.values()):
            self.cancel(sequence.handle)
        self.parts.transfer.drain()
        self.unread, self.parts.pool.arrays, self.parts.pool.snapshots = [], [], []
        gc.collect()

    # One step

    def step(self) -> None:
        """One turn: copies that arrived, a plan, parks and restores, a prompt chunk, one token for every row.

        What goes wrong for one request ends that request, and whatever breaks a step off is made good: who was in the pool is computed
        again. Only interrupts and a compilation after warm-up come out of here, and after them too the engine goes on.
        """
        self._check_open()
        check_interrupt()
        if self._unfinished is not None:
            raise JaxkvError(self._unfinished)
        self._unfinished = "a step is being taken; a callback may not take another"
        try:
            plan = take_step(self)
        except BaseException as error:
            self._unfinished = f"a step broke off ({type(error).__name__}) and could not be made good; close the engine and make a new one"
            recover(self, error)
            self._unfinished = None
            if isinstance(error, RecompileError) or not isinstance(error, Exception):
                raise
            return
        self._unfinished = None
        self.stats.num_steps += 1
        self.observers.tell("on_step", self, plan, time.perf_counter())
        if not plan.prefill and not plan.decode and self.parts.transfer.num_in_flight:
            time.sleep(_IDLE_S)

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
