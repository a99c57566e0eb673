"""A whole run of the scheduler from one integer: `run_seed(n)`. Requests come and go, alone and in groups, while copies are late and steps
break off; what is promised is checked after every event, and at the end everybody has its tokens and nothing is left.
"""

import random
from dataclasses import replace
from typing import Any

from jaxkv.scheduler import VICTIMS, Chunk, ContextShift, SchedulerConfig
from tests.pure.faulty_loop import FAULTS
from tests.pure.watched_loop import WatchedLoop

EVENTS = {"step": 20, "add": 5, "park": 2, "cancel": 1, "fail": 0.4, "replay": 0.8, "fault": 1.5, "hold": 0.4, "release": 0.6}


def random_config(rng: random.Random) -> SchedulerConfig:
    """Settings from a small and nasty range; the larger pools are those in which pressure, not the door, decides."""
    chunk_pages = rng.choice([1, 2, 3, 5])
    num_pages = rng.choice([rng.randint(1, 8), rng.randint(6, 16), rng.randint(6, 30)])
    image_bytes = 10 * -(-num_pages // chunk_pages)
    return SchedulerConfig(
        rows=rng.choice([1, 2, 3, 3, 4, 4, 6]),
        num_pages=num_pages,
        page_size=rng.choice([1, 1, 1, 2, 4]),
        prefill_chunk=rng.choice([1, 4, 6]),
        max_len=rng.choice([12] + [1000] * 5),
        chunk_pages=chunk_pages,
        chunk_bytes=10,
        chunks_per_step=rng.choice([1, 2, 4]),
        host_budget_bytes=rng.choice([None, None, None, 0, 10, 30, image_bytes, 2 * image_bytes]),
        over_budget=rng.choice(["replay", "replay", "wait"]),
        margin_steps=rng.choice([0, 0, 0, 1, 4]),
        starve_after=rng.choice([0, 1, 3]),
        victim=rng.choice(["smallest", *VICTIMS]),
        resume=rng.choice(["head", "head", "pass"]),
        max_bypass=rng.choice([None, None, 0, 1, 4]),
        admission=rng.choice(["optimistic"] * 7 + ["reserve"]),
        rotate=rng.choice(["shifted", "any", "any", "none"]),
        rotate_after_s=rng.choice([0, 2, 10]),
        hold=rng.random() < 0.5,
        keep_images=rng.random() < 0.7,
        prefix_cache=rng.random() < 0.7,
        planner=rng.random() < 0.7,
        park_every=rng.choice([0] * 16 + [1, 3]),
        park_seed=rng.choice([None] * 12 + [rng.randint(0, 1000)]),
    )


def with_states(rng: random.Random, config: SchedulerConfig) -> SchedulerConfig:
    """The same for a model whose sequences have a state, beside their pages or instead of any."""
    state_bytes, budget = rng.choice([3, 25]), config.host_budget_bytes
    changes: dict[str, Any] = {"state_bytes": state_bytes, "host_budget_bytes": budget and budget + rng.choice([0, 1, 2]) * state_bytes}
    if rng.random() < 0.4:
        changes |= {"num_pages": 0, "chunk_bytes": 0, "max_len": rng.choice([12, 40])}
    else:
        changes |= {"num_pages": rng.randint(6, 30)}
    kept = random.Random(f"snapshots {rng.getstate()}").choice([0, 1, 2, 5])  # leaves the other draws as they are
    return replace(config, **changes, num_snapshots=kept)


def with_window(rng: random.Random, config: SchedulerConfig) -> SchedulerConfig:
    """The same for a model whose layers all see a window only."""
    return replace(config, window=rng.choice([1, 2, 3, 5, 8, 13]), num_pages=rng.randint(3, 16), max_len=rng.choice([12, 40, 60]))


def with_near(rng: random.Random, config: SchedulerConfig) -> SchedulerConfig:
    """The same for a model some of whose layers see a window only, and have pages of their own."""
    window = rng.choice([1, 2, 3, 5, 8, 13])
    most = -(-(window + max(config.prefill_chunk, 1 + config.num_draft)) // config.page_size) + 1
    return replace(config, near_window=window, near_pages=config.rows * most, near_bytes=7)


def random_loop(
    rng: random.Random, *, states: bool = False, windows: bool = False, near: bool = False, num_draft: int = 0, overlap: bool | None = None
) -> WatchedLoop:
    """A loop whose copies land early, late or out of order, and whose guesses come true or not."""
    burst = random.Random(f"burst {rng.getstate()}").choice([1, 2, 3, 16])  # leaves the other draws as they are
    luck = random.Random(f"luck {rng.getstate()}")
    config = replace(random_config(rng), prefill_burst=burst, num_draft=num_draft)
    config = with_states(rng, config) if states else config
    config = with_window(rng, config) if windows else with_near(rng, config) if near else config
    max_delay = rng.choice([0, 0, 1, 3] if config.park_every else [0, 0, 1, 3, 12])

    def delay(chunk: Chunk) -> int:
        return rng.randint(0, max_delay)

    job = WatchedLoop(config, delay, rng.choice([1, 2, 1000]), max_delay)
    job.forgets = rng.random() < 0.5
    job.runner.num_true = lambda row: luck.randint(0, num_draft)
    job.overlap = random.Random(f"overlap {rng.getstate()}").random() < 0.5 if overlap is None else overlap
    return job


def random_shift(rng: random.Random, config: SchedulerConfig, prompt_len: int) -> ContextShift | None:
    """A context for that prompt that shifts, where pool and model leave room for one."""
    size = config.page_size
    most_len = min(config.max_len, config.num_pages * size)
    if prompt_len > most_len:
        return None
    length = rng.randint(prompt_len, most_len)
    num_pages = length // size
    if not num_pages:
        return None
    num_kept = rng.choice([0, rng.randint(0, num_pages - 1)])
    return ContextShift(length, num_kept * size, rng.randint(1, num_pages - num_kept) * size)


class Crowd:
    """Who comes: prompts of a small family, so that some begin alike, and answers that end early, late or not by themselves."""

    def __init__(self, job: WatchedLoop, rng: random.Random) -> None:
        self.job, self.rng = job, rng
        self.most_prompt = max(1, job.longest // rng.choice([1, 4, 8, 16]))
        self.most_new = max(2, min(24, job.longest // rng.choice([1, 1, 2])))
        self.priorities = rng.choice([(0,), (0,), (0, 0, -10, 10), range(-4, 4)])
        self.shares = rng.random() < 0.5
        self.moods = random.Random(f"patience {rng.getstate()}")  # leaves the other draws as they are
        self.patience = self.moods.choice([0, 0.9, 1, 1])
        self.shift_rate = rng.choice([0, 0, 0.2, 0.8])
        self.group_sizes: list[int] | None = None  # None: as `shares` says
        if job.scheduler.config.state_bytes:
            self.shares, self.shift_rate = self.shares and job.scheduler.config.num_snapshots > 0, 0
            self.group_sizes = None if self.shares else self.moods.choice([[1], [1, 1, 2, 3, 5]])
        if job.scheduler.config.near_pages:
            self.shift_rate = 0

    @property
    def num_added(self) -> int:
        return len(self.job.tokens)

    def add(self) -> None:
        """One request: a sequence, or a group with one prompt; or one that is refused."""
        rng, longest = self.rng, self.job.longest
        prompt_len = rng.choice([rng.randint(1, self.most_prompt)] * 8 + [longest, max(1, longest - 1), longest + 1])
        if prompt_len > longest:
            self.job.add_too_long(prompt_len)
            return
        num = self.moods.choice(self.group_sizes) if self.group_sizes else rng.choice([1, 1, 1, 2, 3]) if self.shares else 1
        group = self.num_added if num > 1 else None
        more: dict[str, Any] = {"group": group, "priority": rng.choice(self.priorities), "keeps_prefix": rng.random() < 0.7}
        more["is_patient"] = self.moods.random() < self.patience
        if self.shares and rng.random() < 0.8:
            more["page_keys"] = self.keys(prompt_len)
        for _ in range(num):
            max_new, stop = rng.choice([None, 1, *[rng.randint(1, self.most_new)] * 3]), rng.randint(self.most_new // 2, self.most_new)
            shift = random_shift(rng, self.job.scheduler.config, prompt_len) if rng.random() < self.shift_rate else None
            if shift is not None:
                stop = stop * rng.choice([1, 3])
            self.job.add(self.num_added, prompt_len, max_new, rng.choice([None, None, stop]) if max_new else stop, **more, shift=shift)

    def keys(self, prompt_len: int) -> tuple[str, ...]:
        """A common beginning, then one of two ways to go on at each page."""
        path, found = "", []
        for _ in range((prompt_len - 1) // self.job.scheduler.config.page_size):
            path += self.rng.choice("aaaaaaab")
            found.append(path)
        return tuple(found)

    def anybody(self) -> int:
        """Somebody who was added, mostly one who lives; or nobody."""
        live = [seq_id for seq_id in self.job.tokens if seq_id not in self.job.ends]
        return self.rng.choice(live) if live and self.rng.random() < 0.9 else self.rng.randint(0, self.num_added)


def run_seed(
    seed: int, *, states: bool = False, windows: bool = False, near: bool = False, num_draft: int = 0, overlap: bool | None = None
) -> WatchedLoop:
    """One whole run, of a model with states or without, that sees a window only or all, with guesses or without; unless it is told, every
    second one without hears of stops a step late."""
    rng = random.Random(seed)
    job = random_loop(rng, states=states, windows=windows, near=near, num_draft=num_draft, overlap=overlap)
    crowd = Crowd(job, rng)
    events, weights = list(EVENTS), list(EVENTS.values())
    if rng.random() < 0.4:  # an undisturbed one
        weights = [weight if event in ("step", "add") else 0 for event, weight in EVENTS.items()]
    for event in ["add"] * rng.randint(1, 6) + rng.choices(events, weights, k=rng.choice([5, 12, 25])):
        job.tick = rng.choice([0.0, 1.0, 1.0, 3.0])
        if event == "step":
            for _ in range(rng.choice([1, 1, 2, 5])):
                job.step()
        elif event == "add":
            crowd.add()
        elif event == "fault":
            job.fault(rng.choice(FAULTS), rng.randint(0, 8))
        else:
            getattr(job, event)(crowd.anybody())
    job.tick = 1.0
    job.finish()
    return job
