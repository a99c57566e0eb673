"""An engine's figures for Prometheus: `take` after each step, `render` when somebody asks. Owns its figures, and registers none globally.

The engine keeps every gap and pause for its summary; a server runs for months, so they are counted into histograms and let go. Everything
here is called in the engine's thread, or while there is none to disturb. Counters never fall, gauges are 0 when nothing is going on.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, MutableSequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from jaxkv.serve.absent import no_engine
from jaxkv.serve.clock import StepClock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COPY_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
SHARES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)

HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From the request to its first token", SECONDS),
    "inter_token_seconds": ("Between two tokens of a sequence, pauses left out", SECONDS),
    "request_seconds": ("From the request to the end of its answer", SECONDS),
    "queue_seconds": ("From the request to the first row of each of its sequences", SECONDS),
    "pause_seconds": ("From the order to park a sequence until it runs again", SECONDS),
    "longest_pause_seconds": ("The longest pause of each sequence that has ended, 0 where it had none", (0.0, *SECONDS)),
    "park_copy_seconds": ("One chunk on its way to host memory", COPY_SECONDS),
    "restore_copy_seconds": ("One chunk on its way back", COPY_SECONDS),
    "pool_use_at_park_ratio": ("Share of the pool that was held when pressure parked a sequence", SHARES),
}
CAUSES = {
    "pressure": "num_parks_pressure",
    "priority": "num_parks_priority",
    "rotation": "num_rotations",
    "forced": "num_parks_forced",
    "last_resort": "num_last_resorts",
    "stuck": "num_parks_stuck",
    "lost": "num_parks_lost",
}
ALIASES = {  # vLLM's names for figures that mean the same
    "rows_busy": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "pool_use_ratio": "vllm:kv_cache_usage_perc",
    "parks": "vllm:num_preemptions",
    "prompt_tokens": "vllm:prompt_tokens",
    "generated_tokens": "vllm:generation_tokens",
    "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "inter_token_seconds": "vllm:inter_token_latency_seconds",
    "request_seconds": "vllm:e2e_request_latency_seconds",
    "queue_seconds": "vllm:request_queue_time_seconds",
    "cached_tokens": "vllm:prefix_cache_hits",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "draft_tokens_accepted": "vllm:spec_decode_num_accepted_tokens",
}


class Histogram:
    """Counts of values by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def drain(self, values: MutableSequence[float]) -> None:
        """Count all values, and empty the list of them."""
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value
        del values[:]

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' own: how many values were at most so large."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True))

    @property
    def total(self) -> float:
        """The sum of all values."""
        return self._sum


class Meter:
    """The figures of one engine since its start."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self._highest: dict[tuple[str, ...], float] = {}
        self._before: dict[tuple[str, ...], float] = {}  # what engines counted that are gone
        self._clock = StepClock()

    def keep(self, engine: Any) -> None:
        """The engine will be gone: the next one's counts are added to its."""
        self.take(engine)
        for _ in self._counters(engine, {}):
            pass
        self._before = dict(self._highest)
        self._clock.forget()

    def take(self, engine: Any) -> None:
        """Count what the last step brought."""
        self._clock.watch(engine)
        stats, transfer, counters = engine.stats, engine.parts.transfer.stats, engine.scheduler.counters
        found = {
            "time_to_first_token_seconds": stats.ttft_s,
            "inter_token_seconds": stats.token_gap_s,
            "request_seconds": stats.e2e_s,
            "queue_seconds": stats.queue_s,
            "pause_seconds": stats.pause_s,
            "longest_pause_seconds": stats.longest_pause_s,
            "park_copy_seconds": transfer.park_s,
            "restore_copy_seconds": transfer.restore_s,
            "pool_use_at_park_ratio": counters.pool_use_at_park,
        }
        for name, values in found.items():
            if values:
                self._histograms[name].drain(values)

    def render(self, engine: Any, responses: Mapping[int, int], facts: dict[str, str], *, aliases: bool) -> bytes:
        """All figures as Prometheus reads them; without an engine, which a server that sleeps has not, as they were at its end."""
        sleeps = GaugeMetricFamily("jaxkv_sleeping", "1 while the server sleeps or wakes up", engine is None)
        engine = no_engine() if engine is None else engine
        self.take(engine)
        info = InfoMetricFamily("jaxkv", "What is served", facts)
        families = [*self._counters(engine, responses), *self._clocked(), *gauges(engine), sleeps, *self._drawn(), info]
        if aliases:
            families += [alias(family, facts["model"]) for family in families if family.name.removeprefix("jaxkv_") in ALIASES]
        registry = CollectorRegistry()
        registry.register(Ready(families))
        return generate_latest(registry)

    def _counters(self, engine: Any, responses: Mapping[int, int]) -> Iterator[Metric]:
        stats, transfer, counters = engine.stats, engine.parts.transfer.stats, engine.scheduler.counters
        ends = {"completed": stats.num_completed, "cancelled": stats.num_cancelled, "failed": stats.num_failed}
        yield self._counter("requests_received", "Requests that the engine took", stats.num_requests)
        yield self._counter("requests", "Requests by how they ended", ends, "outcome")
        answers = CounterMetricFamily("jaxkv_http_responses", "Answers by HTTP status", labels=["status"])
        for status, number in responses.items():
            answers.add_metric([str(status)], number)
        yield answers
        yield self._counter("prompt_tokens", "Prompt tokens of all requests", stats.prompt_tokens)
        yield self._counter("generated_tokens", "Tokens of all answers", stats.generated_tokens)
        yield self._counter("cached_tokens", "Prompt tokens found in the pool", counters.cached_tokens)
        yield self._counter("replayed_tokens", "Tokens computed again, instead of copied back", counters.num_replayed_tokens)
        yield self._counter("parks", "Sequences sent away", counters.num_parks)
        yield self._counter("parks_by_cause", "Parks by why", {c: getattr(counters, f) for c, f in CAUSES.items()}, "cause")
        kinds = {"copied": counters.num_parks_copied, "dropped": counters.num_parks_dropped}
        yield self._counter("parks_by_kind", "Parks by what becomes of the pages", kinds, "kind")
        yield self._counter("parks_refused", "Parks that the host budget had no room for", counters.num_parks_refused)
        yield self._counter("restores", "Sequences that came back", counters.num_restores)
        replayed = counters.num_restores_replayed
        ways = {"copied": counters.num_restores - replayed, "replayed": replayed}
        yield self._counter("restores_by_kind", "Returns by how the pages were filled", ways, "kind")
        yield self._counter("ended_parked", "Sequences that ended while they were away", counters.num_ended_parked)
        directions = {"to_host": transfer.bytes_to_host, "to_device": transfer.bytes_to_device}
        yield self._counter("copied_bytes", "Bytes moved", directions, "direction")
        yield self._counter("kept_bytes_saved", "Bytes that a park found in host memory", counters.kept_bytes_saved)
        yield self._counter("steps", "Turns of the engine", stats.num_steps)
        yield self._counter("decode_steps", "Of these, with a decode batch", stats.num_decode_steps)
        yield self._counter("draft_tokens", "Guessed tokens that were checked", stats.num_draft_tokens)
        yield self._counter("draft_tokens_accepted", "Of these, those that came true", stats.num_draft_tokens_accepted)
        yield self._counter("faults", "Steps that broke off and were made good", stats.num_faults)
        yield self._counter("losses", "Sequences whose pages or image went bad", stats.num_losses)
        yield self._counter("compilations", "Programs compiled after the start: 0 where all is well", engine.num_compiles_after_warmup)

    def _clocked(self) -> Iterator[Metric]:
        """The clock's own counts: they go on from one engine to the next."""
        for name, text, values in (
            ("step_seconds", "Seconds of the engine's steps, by what they had beside them", self._clock.seconds),
            ("steps_by_work", "These steps, by the same", self._clock.steps),
        ):
            family = CounterMetricFamily(f"jaxkv_{name}", text, labels=["work"])
            for work, value in values.items():
                family.add_metric([work], value)
            yield family

    def _counter(self, name: str, text: str, value: Any, label: str | None = None) -> Metric:
        family = CounterMetricFamily(f"jaxkv_{name}", text, labels=[] if label is None else [label])
        for key, number in value.items() if label is not None else [(None, value)]:
            place = (name,) if key is None else (name, key)
            self._highest[place] = max(self._highest.get(place, 0), self._before.get(place, 0) + number)
            family.add_metric(list(place[1:]), self._highest[place])
        return family

    def _drawn(self) -> Iterator[Metric]:
        for name, (text, _) in HISTOGRAMS.items():
            histogram = self._histograms[name]
            yield HistogramMetricFamily(f"jaxkv_{name}", text, buckets=histogram.buckets, sum_value=histogram.total)


class Ready(Collector):
    """Families that were made already, for a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        return self._families


def gauges(engine: Any) -> Iterator[Metric]:
    """How things stand."""
    status = engine.status()
    held = sum(sequence.is_held for sequence in status.sequences)
    yield GaugeMetricFamily("jaxkv_rows_busy", "Sequences that run", status.rows)
    yield GaugeMetricFamily("jaxkv_parked", "Sequences that are away, held ones included", status.parked)
    yield GaugeMetricFamily("jaxkv_held", "Sequences that an operator parked", held)
    yield GaugeMetricFamily("jaxkv_waiting", "Sequences that wait for their first row", status.waiting)
    yield GaugeMetricFamily("jaxkv_host_bytes", "Bytes of images in host memory", status.host_bytes)
    used = status.pool_pages - status.pool_pages_free
    yield GaugeMetricFamily("jaxkv_pool_pages_used", "Pages that somebody holds", used)
    yield GaugeMetricFamily("jaxkv_pool_use_ratio", "Share of the pool that somebody holds", used / max(status.pool_pages, 1))


def alias(family: Metric, model: str) -> Metric:
    """The same figures by another server's name, with the label that its dashboards choose by."""
    name = ALIASES[family.name.removeprefix("jaxkv_")]
    other = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        other.add_sample(sample.name.replace(family.name, name, 1), {**sample.labels, "model_name": model}, sample.value)
    return other
