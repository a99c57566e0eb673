"""One run on the engine: the load's requests at their times, from the first to the last, and what became of each.

An engine is kept from run to run while only the load, the policies or the defaults of requests change: then it gets a fresh scheduler,
as it had when it was made, and no weight is loaded again.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jaxkv.batch.loop import body_defaults
from jaxkv.batch.records import outputs_digest, token_digest
from jaxkv.config import Config, available_memory_bytes, resolve_host_budget
from jaxkv.config.sections import SchedulerSection
from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.live import Handle
from jaxkv.openai import BodyReader, Endpoint, ParsedBody
from jaxkv.scheduler import Scheduler, SchedulerConfig
from jaxkv.simulate.result import Story, summarize
from jaxkv.simulate.run import COUNTED
from jaxkv.simulate.timeline import PoolTimeline
from jaxkv.simulate.waits import Waits
from jaxkv.stats import EngineStats, spread
from jaxkv.sweep.outcome import Outcome, story_line
from jaxkv.workload.bodies import Call, make_calls

if TYPE_CHECKING:
    from jaxkv.live import Live
    from jaxkv.scheduler import Plan

PER_RUN = ("request", "log", "run", "server", "workload", "simulate", "sweep")  # sections that an engine in use may change
KEPT = ("rows", "prefill_chunk", "overlap")  # fields of the scheduler section that programs are compiled for, or that are the engine's
POLICIES = tuple(sorted({field.name for field in fields(SchedulerConfig)} & set(SchedulerSection.model_fields) - set(KEPT)))
DEBUG = ("planner", "park_every", "park_seed")  # of the debug section, what is the scheduler's
DEBUG_KEPT = ("copy_delay_steps", "reject_drafts")  # and what is not
MAX_NAP_S = 0.05
WARM_UP_TOKENS = 16


class LiveRunner:
    """Makes runs, one after another, with as few engines as it can."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._made_for: Any = None

    def run(self, config: Config) -> Outcome:
        """Everything from the first request to the last token. Raises JaxkvError for what cannot run."""
        engine = self._engine_for(config)
        try:
            return measure(engine, config)
        except BaseException:
            self.close()  # whatever is left in it is nobody's
            raise

    def close(self) -> None:
        """Give everything back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._made_for = None

    def _engine_for(self, config: Config) -> Engine:
        fits = made_for(config)
        if self._engine is None or self._made_for != fits:
            self.close()
            self._engine, self._made_for = Engine(config), fits
            warm_up(self._engine, config)
        renew(self._engine, config)
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def made_for(config: Config) -> dict[str, Any]:
    """What an engine was made for and cannot change."""
    found = {name: part for name, part in config.to_dict().items() if name not in PER_RUN and name not in ("scheduler", "debug")}
    found["scheduler"] = {name: getattr(config.scheduler, name) for name in KEPT}
    found["debug"] = {name: getattr(config.debug, name) for name in DEBUG_KEPT}
    return found | {"run": config.run.model_dump()}


def renew(engine: Engine, config: Config) -> None:
    """A scheduler with this configuration's policies, and counts from zero."""
    budget, _ = resolve_host_budget(config, available_memory_bytes())
    policies: dict[str, Any] = {name: getattr(config.scheduler, name) for name in POLICIES}
    policies |= {name: getattr(config.debug, name) for name in DEBUG}
    settings = replace(engine.parts.scheduler_config, host_budget_bytes=budget, **policies)
    engine.scheduler = Scheduler(settings, on_drop=engine.parts.transfer.discard)
    engine.stats = EngineStats()


def warm_up(engine: Engine, config: Config) -> None:
    """A few tokens for each request, and parks of all: what is touched for the first time here would slow down the first run alone."""
    renew(engine, config)
    engine.scheduler = Scheduler(
        replace(engine.scheduler.config, admission="optimistic", park_every=WARM_UP_TOKENS // 2), on_drop=engine.parts.transfer.discard
    )
    for one in read_calls(engine, config):
        params = replace(one.body.params, max_tokens=WARM_UP_TOKENS, min_tokens=0, n=1)
        with suppress(RequestError):  # told in the run itself
            engine.submit_group(one.body.prompts[0], params)
    while not engine.is_idle:
        engine.step()


@dataclass(slots=True)
class Watch:
    """An observer: when each sequence came, waited and ended, and who held the pool. Times count from `began`."""

    began: float
    waits: Waits = field(default_factory=Waits)
    timeline: PoolTimeline = field(default_factory=PoolTimeline)
    arrivals: dict[int, float] = field(default_factory=dict)
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)

    def on_submit(self, engine: Engine, sequence: "Live") -> None:
        """It is in the line."""
        self.arrivals[sequence.seq_id] = sequence.submitted_s - self.began
        self.waits.arrive(sequence.seq_id, sequence.submitted_s - self.began)

    def on_plan(self, engine: Engine, plan: "Plan", now: float) -> None:
        """Who leaves, who comes back."""
        self.waits.take(plan, now - self.began)
        self.timeline.look(engine.scheduler, now - self.began)

    def on_end(self, engine: Engine, sequence: "Live", reason: str, error: str | None, now: float) -> None:
        """It is gone."""
        self.waits.end(sequence.seq_id, now - self.began)
        self.ends[sequence.seq_id] = now - self.began, reason


@dataclass(slots=True)
class Asked:
    """A request and what came of it."""

    call: Call
    body: ParsedBody
    handles: list[Handle] = field(default_factory=list)
    refused: str | None = None

    def leave(self) -> None:
        """End each choice that has all the tokens it is to have, where nothing else would end it there."""
        for handle in self.handles:
            if not handle.done and len(handle.token_ids) >= self.call.request.ends_after:
                handle.cancel()


def measure(engine: Engine, config: Config) -> Outcome:
    """One run of an idle engine."""
    return measure_calls(engine, read_calls(engine, config))


def read_calls(engine: Engine, config: Config) -> list[Asked]:
    """The load as this engine's requests."""
    calls = make_calls(config, engine.model_config.vocab_size)
    reader = BodyReader(engine.tokenizer, engine.model_config.vocab_size, body_defaults(config))
    return [Asked(call, patiently(reader.read(Endpoint(call.url), call.body, 0), call.request.patient)) for call in calls]


def patiently(body: ParsedBody, is_patient: bool) -> ParsedBody:
    """Whether somebody waits for single tokens is nothing that a body can say."""
    return replace(body, params=replace(body.params, patient=is_patient))


def measure_calls(engine: Engine, asked: Sequence[Asked]) -> Outcome:
    """The same with requests that are read already, or with some of them."""
    moved = engine.parts.transfer.stats
    before = moved.bytes_to_host, moved.bytes_to_device, engine.num_compiles_after_warmup
    watch = Watch(time.perf_counter())
    engine.observers.add(watch)
    try:
        drive(engine, asked, watch.began)
    finally:
        engine.observers.remove(watch)
    counters = engine.scheduler.counters
    counts = {name: getattr(counters, name) for name in COUNTED}
    counts |= {"host_bytes": moved.bytes_to_host - before[0], "device_bytes": moved.bytes_to_device - before[1]}
    counts |= {"host_peak_bytes": counters.host_bytes_peak, "num_steps": engine.stats.num_steps}
    stories = [story for one in asked for story in tell(one, watch)]
    lines = [line for one in asked for line in to_lines(one, watch)]
    digests = {one.call.custom_id: token_digest([i for handle in one.handles for i in ids_of(one, handle)]) for one in asked if one.handles}
    more = engine_figures(engine.stats, engine.num_compiles_after_warmup - before[2])
    return Outcome(summarize(stories, counts), more, lines, watch.timeline, outputs_digest(digests), facts_of(engine))


def drive(engine: Engine, asked: Sequence[Asked], began: float) -> None:
    """Submit each at its time, step until all is done; callers leave when they have what they want."""
    coming, going = list(asked), list[Asked]()
    while coming or not engine.is_idle:
        while coming and time.perf_counter() - began >= coming[0].call.request.arrival_s:
            going.append(submit(engine, coming.pop(0)))
        if engine.is_idle and coming:
            time.sleep(min(MAX_NAP_S, max(0.0, began + coming[0].call.request.arrival_s - time.perf_counter())))
            continue
        engine.step()
        for one in going:
            if one.call.request.ends_after < one.call.request.max_tokens:
                one.leave()
        going = [one for one in going if not all(handle.done for handle in one.handles)]


def submit(engine: Engine, one: Asked) -> Asked:
    """Put it in the line; what the engine refuses is told with the others."""
    try:
        one.handles = list(engine.submit_group(one.body.prompts[0], one.body.params, name=one.call.custom_id).choices)
    except RequestError as error:
        one.refused = str(error)
    return one


def ids_of(one: Asked, handle: Handle) -> list[int]:
    """The tokens that its caller took."""
    return handle.token_ids[: one.call.request.ends_after]


def tell(one: Asked, watch: Watch) -> list[Story]:
    """What became of each choice."""
    request = one.call.request
    if one.refused is not None:
        return [Story(request.arrival_s, request.arrival_s, 0, 0, 0.0, (), "refused")] * request.n
    found = []
    for handle in one.handles:
        end_s, reason = watch.ends[handle.seq_id]
        left_early = reason == "cancelled" and request.is_cancelled
        ended = "failed" if reason == "error" else "cancelled" if left_early else "finished"
        pauses, arrival_s = watch.waits.pauses_s(handle.seq_id), watch.arrivals[handle.seq_id]
        line_s = watch.waits.line_s.get(handle.seq_id, end_s - arrival_s)
        found.append(Story(arrival_s, end_s, len(ids_of(one, handle)), len(pauses), line_s, pauses, ended))
    return found


def to_lines(one: Asked, watch: Watch) -> list[dict[str, Any]]:
    """Each choice as outputs.jsonl has it: how it went, and what was said."""
    if one.refused is not None:
        return [story_line(one.call.custom_id, i, story) | {"error": one.refused} for i, story in enumerate(tell(one, watch))]
    found = []
    for i, (handle, story) in enumerate(zip(one.handles, tell(one, watch), strict=True)):
        answer = handle.completion
        said = {"token_ids": ids_of(one, handle), "text": None if answer is None else answer.text}
        said |= {"error": answer.error} if answer is not None and answer.error is not None else {}
        found.append(story_line(one.call.custom_id, i, story) | said)
    return found


def engine_figures(stats: EngineStats, num_compiles: int) -> dict[str, Any]:
    """What only an engine has."""
    return {
        "ttft_s": spread(stats.ttft_s, 1.0, p50=0.5, p99=0.99, max=1.0),
        "token_gap_ms": spread(stats.token_gap_s, 1e3, p50=0.5, p99=0.99, max=1.0),
        "num_decode_steps": stats.num_decode_steps,
        "num_compiles_after_warmup": num_compiles,
    }


def facts_of(engine: Engine) -> dict[str, Any]:
    """What the answers' bytes depend on, and where they were made."""
    return {
        "system_fingerprint": engine.system_fingerprint,
        "fingerprint_facts": engine.parts.fingerprint_facts,
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in engine.parts.mesh.devices.flat],
    }
