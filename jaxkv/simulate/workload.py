"""Draws the requests that a workload section describes. The same section and seed give the same requests on every machine.

fixed      every length is the longest
uniform    every length between the shortest and the longest is as likely
lognormal  most lie around the geometric middle of the two, which are two standard deviations away from it
heavy      most are short, a few very long (a Pareto tail of index 1, cut at the longest)
"""

import math
import random
from pathlib import Path

from jaxkv.config.workload import WorkloadSection
from jaxkv.simulate.trace import Request, read_trace


def draw(workload: WorkloadSection, seed: int) -> tuple[Request, ...]:
    """The requests in order of arrival; ConfigError for a trace that cannot be read.

    `seed` stands in for the section's own. Lengths, arrivals and priorities have streams of their own: changing one leaves the others.
    """
    lengths, arrivals = workload.parts
    measured = read_trace(Path(workload.trace or "")) if "trace" in (lengths, arrivals) else []
    num = len(measured) or workload.num_requests
    if lengths == "trace":
        sizes = [(request.prompt_len, request.answer_len) for request in measured]
    else:
        sizes = draw_lengths(workload, lengths, num, random.Random(f"lengths {seed}"))
    if arrivals == "trace":
        times = [request.arrival_s for request in measured]
    else:
        times = draw_arrivals(workload, arrivals, num, random.Random(f"arrivals {seed}"))
    stream = random.Random(f"priorities {seed}")
    priorities = [stream.choice(workload.priorities) for _ in range(num)]
    return tuple(
        Request(
            arrival_s=times[i],
            prompt_len=sizes[i][0],
            answer_len=sizes[i][1],
            max_tokens=max(sizes[i][1], workload.max_tokens or (measured[i].max_tokens if lengths == "trace" else 0)),
            priority=measured[i].priority if lengths == "trace" and workload.priorities == (0,) else priorities[i],
        )
        for i in range(num)
    )


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
