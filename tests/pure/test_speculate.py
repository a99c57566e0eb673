"""Guesses without a device: what is looked up, what cells are lent, and that whatever comes true, the scheduler keeps its promises."""

import random
from collections import Counter

import pytest

from jaxkv.scheduler import SchedulerConfig
from jaxkv.scheduler.fake_loop import FakeLoop
from jaxkv.speculate.ngram import LONGEST, Lookup
from tests.pure.random_runs import run_seed


def searched(tokens: list[int], num: int) -> list[int]:
    """The slow and obvious way to look up."""
    for length in range(min(LONGEST, len(tokens)), 0, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                found = list(tokens)
                while len(found) < len(tokens) + num:
                    found.append(found[place + len(found) - len(tokens)])
                return found[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([7, 8, 9, 1, 7, 8], [9, 1, 7, 8, 9]),
        ([5, 5], [5, 5, 5, 5, 5]),
        ([1, 2, 1, 3, 1], [3, 1, 3, 1, 3]),  # what came last
        ([4, 2, 9, 3, 2, 8, 4, 2], [9, 3, 2, 8, 4]),  # behind both, not behind one
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_the_longest_run_last_is_guessed(tokens: list[int], guess: list[int]) -> None:
    lookup = Lookup()
    lookup.take(tokens)
    assert lookup.guess(5) == guess == searched(tokens, 5)


def test_looking_up_finds_what_a_search_finds_however_the_tokens_came() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        tokens = [rng.randint(0, rng.choice([1, 3, 8])) for _ in range(rng.randint(1, 60))]
        lookup, num = Lookup(), 0
        while num < len(tokens):
            more = tokens[num : num + rng.randint(1, 5)]
            lookup.take(more)
            num += len(more)
            assert lookup.guess(4) == searched(tokens[:num], 4)


def loop(num_pages: int, *, num_true: int, **settings: int) -> FakeLoop:
    """Pages of 4 cells, 3 guesses a row, of which so many come true."""
    job = FakeLoop(SchedulerConfig(rows=2, num_pages=num_pages, page_size=4, prefill_chunk=8, max_len=100, num_draft=3, **settings))
    job.runner.num_true = lambda row: num_true
    return job


@pytest.mark.parametrize(("num_true", "num_cells"), [(0, [4] * 9), (3, [4, 4, 1]), (1, [4, 4, 4, 3, 1])])
def test_a_row_has_cells_for_its_guesses_but_none_past_its_last_token(num_true: int, num_cells: list[int]) -> None:
    """Prompt 5 and 10 tokens: the first comes from the prompt, 9 cells are needed for the others."""
    job = loop(20, num_true=num_true)
    job.add(0, 5, 10)
    found = []
    while not job.scheduler.is_idle:
        found += [row.num_cells for row in job.step().decode]
    assert found[:6] == ([4, 4, 4, 4, 4, 4] if num_true == 0 else num_cells)[:6]
    assert job.tokens[0] == 10


def test_the_pools_last_cells_are_shared_out_and_a_lent_page_comes_back_before_anybody_parks() -> None:
    """4 pages of 4, two rows of 5 + 4 tokens: each needs 2 pages, so nobody is ever parked, and no guess goes past what there is."""
    job = loop(4, num_true=0, margin_steps=0)
    job.add(0, 5, 4)
    job.add(1, 5, 4)
    rows = []
    while not job.scheduler.is_idle:
        rows += [(row.seq_id, row.position, row.num_cells) for row in job.step().decode]
    assert all(position + num_cells <= 8 for _, position, num_cells in rows)
    assert job.scheduler.counters.num_parks == 0


def test_a_lent_page_is_not_missed_by_one_that_comes_in() -> None:
    """Pages 1 .. 6: the first has 2 and is lent one; the second needs 4, and comes in at once."""
    job = loop(6, num_true=0, margin_steps=0)
    job.add(0, 6, 3)
    job.step()
    plan = job.step()
    assert [(row.num_cells, row.position) for row in plan.decode] == [(2, 6)]  # its limit; a page more would be of no use
    job = loop(6, num_true=0, margin_steps=0)
    job.add(0, 6, 12)
    job.step()
    assert [(row.num_cells, row.position) for row in job.step().decode] == [(4, 6)]
    assert job.scheduler.snapshot().num_pages_free == 3
    job.add(1, 16, 1)
    job.step()
    assert job.scheduler.state(1) == "prefilling"


def test_random_runs_keep_every_promise_whatever_comes_true() -> None:
    totals: Counter[str] = Counter()
    for seed in range(120):
        for more in ({}, {"states": True}, {"windows": True}, {"near": True}):
            try:
                totals += Counter(run_seed(seed, num_draft=1 + seed % 4, **more).counts)
            except Exception as error:
                raise AssertionError(f"run_seed({seed}, num_draft={1 + seed % 4}, **{more}): {error}") from error
    names = ("num_finished", "num_parks_pressure", "num_parks_dropped", "num_replayed_tokens", "num_shifts", "num_restores")
    assert all(totals[name] > 20 for name in names), totals


def test_guesses_that_come_true_save_steps() -> None:
    num_steps = []
    for num_true in (0, 1, 3):
        job = loop(20, num_true=num_true)
        job.add(0, 8, 25)
        job.run()
        num_steps.append(job.num_steps)
    assert num_steps == [25, 13, 7]
