"""Draws the requests that a workload section describes. The same section and seed give the same requests on every machine.

fixed      every length is the longest
uniform    every length between the shortest and the longest is as likely
lognormal  most lie around the geometric middle of the two, which are two standard deviations away from it
heavy      most are short, a few very long (a Pareto tail of index 1, cut at the longest)
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path

from jaxkv.config.workload import WorkloadSection
from jaxkv.workload.prompts import read_prompts
from jaxkv.workload.trace import Request, read_trace

BYTES_PER_TOKEN = 4


def draw(workload: WorkloadSection, seed: int) -> tuple[Request, ...]:
    """The requests in order of arrival; ConfigError for a trace or for prompts that cannot be read.

    `seed` stands in for the section's own. Everything that is drawn has a stream of its own: changing one leaves the others. Prompts from
    files are taken in order, from the first one again where there are fewer than requests; a token is taken for four bytes of them.
    """
    lengths, arrivals = workload.parts
    measured = read_trace(Path(workload.trace or "")) if "trace" in (lengths, arrivals) else []
    texts = read_prompts(workload.prompts, workload.template) if workload.prompts else []
    num = len(measured) or workload.num_requests
    if lengths == "trace":
        sizes = [(request.prompt_len, request.answer_len) for request in measured]
    else:
        sizes = draw_lengths(workload, lengths, num, random.Random(f"lengths {seed}"))
    if arrivals == "trace":
        times = [request.arrival_s for request in measured]
    else:
        times = draw_arrivals(workload, arrivals, num, random.Random(f"arrivals {seed}"))
    beside = measured if lengths == "trace" else None
    priorities, choices = draw_beside(workload, "priorities", num, seed, beside), draw_beside(workload, "choices", num, seed, beside)
    leaving = draw_cancels(workload, [answer for _, answer in sizes], random.Random(f"cancels {seed}"), beside)
    found = []
    for i, (prompt_len, answer_len) in enumerate(sizes):
        text = texts[i % len(texts)] if texts else None
        found.append(
            Request(
                arrival_s=times[i],
                prompt_len=prompt_len if text is None else estimated_len(text),
                answer_len=answer_len,
                max_tokens=max(answer_len, workload.max_tokens or (measured[i].max_tokens if lengths == "trace" else 0)),
                priority=priorities[i],
                n=choices[i],
                cancel_after=leaving[i],
                patient=workload.patient or (lengths == "trace" and measured[i].patient),
                shared_len=0 if text is not None else min(prompt_len, workload.shared_prefix_len),
                text=text,
            )
        )
    return tuple(found)


def draw_beside(workload: WorkloadSection, name: str, num: int, seed: int, measured: Sequence[Request] | None) -> list[int]:
    """Priorities or numbers of choices: what a trace says where the section says nothing else, else drawn evenly."""
    given: tuple[int, ...] = getattr(workload, name)
    if measured is not None and given == WorkloadSection.model_fields[name].default:
        return [request.priority if name == "priorities" else request.n for request in measured]
    stream = random.Random(f"{name} {seed}")
    return [stream.choice(given) for _ in range(num)]


def draw_cancels(
    workload: WorkloadSection, answers: Sequence[int], stream: random.Random, measured: Sequence[Request] | None
) -> list[int | None]:
    """For each request after how many tokens its caller leaves: a share of them leave, at any token but the last with the same chance."""
    if measured is not None and not workload.cancels:
        return [request.cancel_after for request in measured]
    found: list[int | None] = []
    for answer_len in answers:
        leaves, place = stream.random() < workload.cancels, stream.random()
        found.append(1 + int(place * (answer_len - 1)) if leaves and answer_len > 1 else None)
    return found


def estimated_len(text: str) -> int:
    """Tokens of a text, for those who have no tokenizer: a quarter of its bytes."""
    return max(1, -(-len(text.encode()) // BYTES_PER_TOKEN))


def draw_lengths(workload: WorkloadSection, how: str, num: int, stream: random.Random) -> list[tuple[int, int]]:
    """Prompt and answer lengths of so many requests."""
    prompt, answer = (workload.prompt_len_min, workload.prompt_len_max), (workload.answer_len_min, workload.answer_len_max)
    return [(draw_length(how, *prompt, stream), draw_length(how, *answer, stream)) for _ in range(num)]


def draw_length(how: str, least: int, most: int, stream: random.Random) -> int:
    """One length between the two, both included."""
    share = stream.random()
    if how == "fixed":
        return most
    if how == "lognormal":
        middle, sigma = (math.log(least) + math.log(most)) / 2, (math.log(most) - math.log(least)) / 4
        return min(most, max(least, round(math.exp(stream.gauss(middle, sigma)))))
    if how == "heavy":  # P(length > x) ~ 1 / x: share 0 is the shortest, share 1 the longest
        return round(1 / ((1 - share) / least + share / most))
    return least + int(share * (most - least + 1))


def draw_arrivals(workload: WorkloadSection, how: str, num: int, stream: random.Random) -> list[float]:
    """Seconds at which so many requests come, the first at 0."""
    if how == "staggered":
        return [i * workload.every_s for i in range(num)]
    if how == "bursty":
        gaps = [_gap(workload, stream) if i and i % workload.burst == 0 else 0.0 for i in range(num)]
    elif how == "poisson":
        gaps = [_gap(workload, stream) if i else 0.0 for i in range(num)]
    else:
        return [0.0] * num
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        times.append(now)
    return times


def _gap(workload: WorkloadSection, stream: random.Random) -> float:
    """A gap of a Poisson process."""
    return -math.log(1.0 - stream.random()) * workload.every_s
