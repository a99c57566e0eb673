"""A model whose every layer sees a window, on the real engine: pages that fell out are others' at once, and no byte changes for it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxkv.engine import Engine
from jaxkv.pool_size import plan_layout, size_pool
from jaxkv.programs import Shapes
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from jaxkv.startup import outline
from tests import exactness
from tests.cpu import checkpoints, tiny
from tests.cpu.checkpoints import FIXTURES

# Window 16, chunks of 8, pages of 4: a sequence holds 7 pages at most, and 12 are there in all
LENGTHS = (5, 20, 8, 90, 33, 60)
MISTRAL = {"model__path": str(FIXTURES / "mistral"), "pool__tokens": 512}
ENGINES: dict[str, dict[str, Any]] = {
    "float32 direct": MISTRAL,
    "bfloat16 hold": {**MISTRAL, "model__dtype": "bfloat16", "transfer__mode": "hold", "debug__copy_delay_steps": 2},
    "bfloat16 staged": {**MISTRAL, "model__dtype": "bfloat16", "transfer__mode": "staged"},
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if "bfloat16" in name else name for name in ENGINES])
def made(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tiny.engine(**ENGINES[request.param]) as engine:
        yield engine


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Six requests, greedy and sampled, with logprobs; all but two are longer than the pool they will run in."""
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, temperature=0.8 * (i % 2), seed=i, frequency_penalty=0.2 * (i == 2))
        for i in range(len(LENGTHS))
    ]
    return [tiny.prompt(length) for length in LENGTHS], params


def reset(made: Engine, **changes: Any) -> None:
    """Other rules, in 12 of its pages unless told otherwise."""
    tiny.renew(made, **{"num_pages": 12, **changes})


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Any]:
    """What each request says alone, while it keeps every page from its first token on."""
    reset(made, num_pages=128, window=None)
    return list(map(tiny.content, tiny.alone(made, *requests())))


RULES = [
    pytest.param({"num_pages": 7}, 0, id="one at a time"),
    pytest.param({}, 1, id="crowded"),
    pytest.param({"park_every": 1}, 100, id="parked at every token"),
    pytest.param({"park_every": 3, "host_budget_bytes": 0}, 30, id="computed again every 3 tokens"),
    pytest.param({"park_seed": 1, "host_budget_bytes": 30_000, "planner": False}, 10, id="at random, with images for some, unplanned"),
    pytest.param({"num_pages": 128, "park_every": 2, "keep_images": False}, 50, id="in an ample pool"),
]


@pytest.mark.parametrize(("changes", "least_parks"), RULES)
def test_every_request_equals_itself_with_all_its_pages(
    made: Engine, expected: list[Any], changes: dict[str, Any], least_parks: int
) -> None:
    reset(made, **changes)
    prompts, params = requests()
    assert list(map(tiny.content, tiny.run(made, prompts, params))) == expected
    assert list(map(tiny.content, tiny.run(made, prompts[::-1], params[::-1]))) == expected[::-1]
    assert made.scheduler.counters.num_parks >= least_parks


def test_a_park_before_any_step_changes_nothing(made: Engine) -> None:
    reset(made, num_pages=16)
    exactness.a_park_at_any_step_changes_nothing(made, every=4)


def test_a_sequence_and_its_image_have_the_pages_of_its_window(made: Engine, expected: list[Any]) -> None:
    reset(made)
    prompts, params = requests()
    handle = made.submit(prompts[3], params[3])
    while len(handle.token_ids) < 12:
        made.step()
        (view,) = made.scheduler.snapshot().sequences
        assert view.num_pages <= 7
    made.hold(handle.seq_id)  # 101 cells: the next token sees cells 86 to 101, so pages 21 to 25 are there
    while made.parts.transfer.num_in_flight or made.scheduler.state(handle.seq_id) is not State.PARKED:
        made.step()
    (status,) = made.status().sequences
    assert (status.image_pages, status.host_bytes) == (5, 2 * made.parts.transfer.chunk_bytes)
    assert made.scheduler.snapshot().num_pages_free == 12
    made.release(handle.seq_id)
    assert tiny.content(handle.result()) == expected[3]
    tiny.settle(made)


def test_a_prompt_is_found_by_the_pages_of_its_window(made: Engine, expected: list[Any]) -> None:
    reset(made)
    prompts, params = requests()
    for cached in (0, 88, 88):  # of 90 tokens, in a pool that never held 50 of them
        before = made.scheduler.counters.cached_tokens
        assert tiny.content(tiny.run(made, [prompts[3]], [params[3]])[0]) == expected[3]
        assert made.scheduler.counters.cached_tokens - before == cached
    tiny.run(made, [tiny.prompt(70, 1), tiny.prompt(70, 2)], [params[0]] * 2)  # all pages are others' now
    before = made.scheduler.counters.cached_tokens
    assert tiny.content(tiny.run(made, [prompts[3]], [params[3]])[0]) == expected[3]
    assert made.scheduler.counters.cached_tokens == before


def test_the_choices_of_a_group_are_those_that_come_one_by_one(made: Engine) -> None:
    reset(made, num_pages=24)
    params = SamplingParams(n=3, max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
    together = [done.token_ids for done in made.submit_group(tiny.prompt(45), params).result()]
    tiny.settle(made)
    assert made.scheduler.counters.num_forks == 2
    apart = [made.submit(tiny.prompt(45), replace(params, n=1), choice=choice).result().token_ids for choice in range(3)]
    assert together == apart
    tiny.settle(made)


def test_what_a_window_means_is_said_once_at_load(made: Engine) -> None:
    said = "every layer sees the last 16 tokens: a sequence holds at most 28 tokens of the pool, however long it is"
    assert made.messages[1:] == [said]


def test_where_the_memory_decides_the_pool_is_no_larger_than_all_rows_can_fill() -> None:
    config = tiny.config(**{**MISTRAL, "pool__tokens": None})
    plan = outline(config)
    shapes = Shapes(plan.shapes.rows, plan.shapes.chunk, 128, plan.shapes.vocab_size, plan.shapes.transfer_pages)
    layout = plan_layout(config, plan.info.config, shapes, "float32", "cpu")
    assert size_pool(config, plan.info.config, layout, shapes, checkpoints.one_device()).num_tokens == 4 * 28
