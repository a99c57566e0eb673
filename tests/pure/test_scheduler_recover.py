"""A step that breaks off at any line of the scheduler: the books are made anew, nobody fails, every cell that is read is the right one."""

import random
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import jaxkv.scheduler
from jaxkv.scheduler import SchedulerConfig, State
from jaxkv.scheduler.fake_loop import FakeLoop, all_finished

FOLDER = Path(jaxkv.scheduler.__file__).parent.resolve()
FILES = ("room", "returns", "copies", "build", "commit", "ledger", "images", "replay", "prefix", "forced", "way", "lines", "scheduler")
SPARED = {
    str(FOLDER / name) for name in ("recover.py", "check.py", "fake_runner.py", "fake_loop.py", "views.py", "plan.py")
}  # a runner reads plans too


class Bomb(Exception):
    """What nobody expects."""


@contextmanager
def bomb_at(line: int, name: str = "") -> Any:
    """Raise in the scheduler, or in that file of it, at that line, counted from here as they are run; never inside what makes the books
    anew."""
    left = line

    def at_line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                raise Bomb(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return at_line

    def at_call(frame: FrameType, *_: object) -> Any:
        path = str(Path(frame.f_code.co_filename).resolve())
        is_ours = path.startswith(str(FOLDER)) and path not in SPARED and frame.f_code.co_name != "__init__"
        return at_line if is_ours and (not name or path == str(FOLDER / f"{name}.py")) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(before)


def step(job: FakeLoop, bomb: int | None, name: str = "") -> str | None:
    """One step; where it broke off, if it did."""
    if bomb is None:
        job.step()
        return None
    try:
        with bomb_at(bomb, name):
            job.step()
    except Bomb as where:
        job.recover()
        return str(where)
    return None


def config(num_pages: int, **changes: Any) -> SchedulerConfig:
    sizes: dict[str, Any] = {"rows": 3, "page_size": 2, "prefill_chunk": 4, "max_len": 100_000, "chunk_bytes": 10, "chunk_pages": 3}
    return SchedulerConfig(num_pages=num_pages, **{**sizes, **changes})


def run_broken(seed: int) -> Counter[str]:
    """A run in which a tenth of the steps break off; what happened in it, by file."""
    rng = random.Random(seed)
    settings = config(
        rng.randint(16, 32), margin_steps=rng.choice([0, 2]), hold=rng.random() < 0.4, keep_images=rng.random() < 0.7,
        host_budget_bytes=rng.choice([None, None, 0, 60]), park_every=rng.choice([0, 2, 3]), planner=rng.random() < 0.8,
        victim=rng.choice(["smallest", "largest"]), rotate="any", rotate_after_s=10.0, over_budget=rng.choice(["replay", "wait"]),
    )  # fmt: skip
    delays = [rng.randint(0, rng.choice([0, 1, 5])) for _ in range(31)]
    job = FakeLoop(settings, delay=lambda chunk: delays[(chunk.seq_id + 3 * chunk.epoch + chunk.index) % 31])
    job.overlap = seed % 2 == 1
    prompt_len, keys, group = 0, tuple[str, ...](), 0
    for seq_id in range(6):
        if not seq_id or rng.random() < 0.6:  # else one more choice of the same request
            prompt_len, group = rng.randint(1, 20), seq_id
            keys = tuple(f"k{index}" for index in range((prompt_len - 1) // 2)) if rng.random() < 0.5 else ()
        job.add(seq_id, prompt_len, rng.randint(1, 12), page_keys=keys, group=group, priority=rng.choice([0, 0, 0, -1]))
    broken: Counter[str] = Counter()
    for _ in range(3000):
        if job.scheduler.is_idle and not job.unread:
            break
        name = rng.choice(FILES) if rng.random() < 0.5 else ""
        where = step(job, rng.randint(1, rng.choice([6, 30]) if name else 400) if rng.random() < 0.1 else None, name)
        if where is not None:
            broken[where.partition(":")[0]] += 1
    assert all_finished(job.ends) and len(job.ends) == 6, job.scheduler.snapshot()
    assert job.tokens == job.stops
    view = job.scheduler.snapshot()
    assert (view.num_pages_free, view.num_pages_leaving, view.host_bytes) == (view.num_pages, 0, 0)
    return broken


def test_a_step_may_break_off_at_any_line_of_the_scheduler() -> None:
    broken: Counter[str] = Counter()
    for seed in range(60):
        try:
            broken += run_broken(seed)
        except AssertionError as error:
            raise AssertionError(f"run_broken({seed}): {error}") from error
    assert {f"{name}.py" for name in FILES} <= broken.keys(), broken


@pytest.mark.parametrize(
    ("name", "every"), [("fork", 1), ("commit", 1), ("ledger", 4), ("prefix", 1), pytest.param("ledger", 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("state_bytes", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_a_step_in_which_choices_begin_may_break_off_at_any_line(name: str, every: int, state_bytes: int) -> None:
    """Three have a row and begin, the fourth and the fifth only draw their first token."""
    for line in range(1, 2000, every):
        job = FakeLoop(config(16, state_bytes=state_bytes))
        for seq_id in range(5):
            job.add(seq_id, 7, 4, page_keys=() if state_bytes else ("a", "b", "c"), group=0)
        job.step()
        if step(job, line, name) is None:
            assert line > 4
            return
        job.run()
        assert job.tokens == dict.fromkeys(range(5), 4)
        assert all_finished(job.ends)
    raise AssertionError("the step has no end")


@pytest.mark.slow
def test_many_steps_may_break_off_at_any_line_of_the_scheduler() -> None:
    for seed in range(1000, 5000):
        try:
            run_broken(seed)
        except AssertionError as error:
            raise AssertionError(f"run_broken({seed}): {error}") from error


def test_the_parked_and_the_waiting_are_as_they_were_and_the_residents_are_replayed() -> None:
    """16 pages of 2 for (9, 20) and (9, 12): the smaller one is parked until the other ends."""
    job = FakeLoop(config(16, rows=2, margin_steps=0))
    for seq_id, max_new in enumerate((20, 12, 12, 12)):
        job.add(seq_id, 9, max_new)
    job.run(until=lambda: job.scheduler.state(1) is State.PARKED)
    image = job.scheduler.image(1)
    made = dict(job.tokens)
    assert step(job, 20) is not None
    assert [str(job.scheduler.state(seq_id)) for seq_id in range(4)] == ["parked", "parked", "waiting", "waiting"]
    assert job.scheduler.image(1) == image and len(image) == 3
    before = job.scheduler.counters.num_parks_copied
    job.run()
    assert job.tokens == {0: 20, 1: 12, 2: 12, 3: 12}
    counters = job.scheduler.counters
    assert (before, counters.num_parks_lost, counters.num_replayed_tokens) == (1, 1, 9 + made[0] - 1)


def test_one_whose_window_needs_no_page_is_away_without_an_image_and_loses_nothing() -> None:
    job = FakeLoop(SchedulerConfig(rows=1, num_pages=4, page_size=1, prefill_chunk=4, max_len=40, chunk_bytes=1, window=1))
    job.add(0, 3, 6)
    job.run(until=lambda: job.tokens[0] == 3)
    job.scheduler.hold(0)
    job.run(until=lambda: job.scheduler.state(0) is State.PARKED)
    assert job.scheduler.image(0) == ()
    job.recover()
    job.scheduler.release(0)
    job.run()
    assert (job.tokens, job.scheduler.counters.num_replayed_tokens) == ({0: 6}, 0)
