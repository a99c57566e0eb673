"""Models whose sequences have a state, on the real engine: parks, replays, faults and reused slots change no byte."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxkv.calibrate import calibrate
from jaxkv.cargo import state_weight
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, RequestError
from jaxkv.pool import PoolLayout, StateArray
from jaxkv.pool_size import check_staging, check_states
from jaxkv.request import SamplingParams
from tests.cpu import averages, checkpoints, tiny

LENGTHS = (5, 20, 8, 33, 13, 40)  # chunk is 8: below, across and at its edges
HYBRID, PURE = (3, (0, 2)), (2, (0, 1))  # state, attention, state; and states alone
ENGINES: dict[str, dict[str, Any]] = {
    "hybrid bfloat16 direct": {"model__dtype": "bfloat16"},
    "pure float32 hold": {"transfer__mode": "hold", "debug__copy_delay_steps": 2},
    "hybrid float32 staged": {"transfer__mode": "staged"},
    "pure bfloat16 direct": {"model__dtype": "bfloat16"},
}
SLOW = ("hybrid float32 staged", "pure bfloat16 direct")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with averages.family():
        folder = tmp_path_factory.mktemp("averages")
        yield {name: str(averages.write_checkpoint(folder, *shape)) for name, shape in {"hybrid": HYBRID, "pure": PURE}.items()}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ENGINES])
def made(request: pytest.FixtureRequest, models: dict[str, str]) -> Iterator[Engine]:
    with tiny.engine(model__path=models[request.param.split()[0]], **ENGINES[request.param]) as engine:
        yield engine


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Six requests, greedy and sampled, with logprobs."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=0.8 * (i % 2), seed=i, frequency_penalty=0.2 * (i == 2))
        for i in range(6)
    ]
    return [tiny.prompt(length) for length in LENGTHS], params


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Any]:
    """What each request says when nobody else is there and it is never parked."""
    answers = list(map(tiny.content, tiny.alone(made, *requests())))
    assert made.scheduler.counters.num_parks == 0
    return answers


RULES = [
    pytest.param({}, 0, id="crowded"),
    pytest.param({"park_every": 1}, 100, id="parked at every token"),
    pytest.param({"park_every": 3}, 30, id="parked every 3 tokens"),
    pytest.param({"park_every": 3, "host_budget_bytes": 0}, 30, id="computed again every 3 tokens"),
    pytest.param({"park_seed": 1, "host_budget_bytes": 3000, "planner": False}, 10, id="at random, with images for some, unplanned"),
]


@pytest.mark.parametrize(("changes", "least_parks"), RULES)
def test_every_request_equals_itself_alone(made: Engine, expected: list[Any], changes: dict[str, Any], least_parks: int) -> None:
    tiny.renew(made, **changes)
    prompts, params = requests()
    assert list(map(tiny.content, tiny.run(made, prompts, params))) == expected
    assert list(map(tiny.content, tiny.run(made, prompts[::-1], params[::-1]))) == expected[::-1]
    counters = made.scheduler.counters
    assert counters.num_parks >= least_parks
    assert bool(counters.num_parks_copied) == (changes.get("host_budget_bytes") != 0 and counters.num_parks > 0)


def test_a_fresh_sequence_in_a_used_row_sees_nothing_of_who_was_there(made: Engine, expected: list[Any]) -> None:
    tiny.renew(made)
    prompts, params = requests()
    for num_steps in (1, 3, 9, 14):  # in its prompt, at its end, between tokens
        others = [made.submit(tiny.prompt(30, row), SamplingParams(max_tokens=30, ignore_eos=True)) for row in range(4)]
        for _ in range(num_steps):
            made.step()
        made.scheduler.park(others[1].seq_id)
        made.step()
        for handle in others:
            handle.cancel()
        assert tiny.content(tiny.run(made, prompts[:1], params[:1])[0]) == expected[0]
    for parts in made.parts.pool.states:  # whatever may lie there
        assert all(np.asarray(array).any() for array in parts)


def test_a_damaged_state_is_computed_again(made: Engine, expected: list[Any]) -> None:
    tiny.renew(made)
    prompts, params = requests()
    handle = made.submit(prompts[3], params[3])
    tiny.step_to(made, handle, 6)
    made.hold(handle.seq_id)
    while made.parts.transfer.num_in_flight or str(made.scheduler.state(handle.seq_id)) != "parked":
        made.step()
    state = tiny.image(made, handle.seq_id)[-1]
    assert state.is_state
    state.checksum ^= 1
    made.release(handle.seq_id)
    assert tiny.content(handle.result()) == expected[3]
    tiny.settle(made)
    counters = made.scheduler.counters
    assert (counters.num_parks_copied, counters.num_restores_replayed) == (1, 1)


def choices_apart(made: Engine, prompt: list[int], params: SamplingParams) -> list[Any]:
    """What each choice says as a request of its own."""
    handles = [made.submit(prompt, replace(params, n=1), choice=choice) for choice in range(params.n)]
    return [tiny.content(handle.result()) for handle in handles]


def test_the_choices_of_a_group_go_on_from_one_state_that_is_copied_for_each(made: Engine) -> None:
    tiny.renew(made)
    params = SamplingParams(n=3, max_tokens=8, temperature=0.9, seed=5, ignore_eos=True, logprobs=2)
    for length in (3, 8, 17):  # within the first page, at the end of a page and a chunk, and beyond
        group = made.submit_group(tiny.prompt(length), params)
        together = [tiny.content(done) for done in group.result()]
        assert together == choices_apart(made, tiny.prompt(length), params)
    tiny.settle(made)
    num_shared = 2 * (0 + 4 + 16) if made.parts.layout.num_layers else 0
    assert (made.scheduler.counters.cached_tokens, made.scheduler.counters.num_forks) == (num_shared, 6)


@pytest.mark.parametrize("changes", [{}, {"park_every": 2}, {"park_every": 3, "host_budget_bytes": 0}, {"park_seed": 3}], ids=str)
def test_a_group_larger_than_the_rows_has_its_first_tokens_at_once_and_says_what_each_says_alone(
    made: Engine, changes: dict[str, Any]
) -> None:
    tiny.renew(made)
    params = SamplingParams(n=6, max_tokens=9, temperature=0.9, seed=8, ignore_eos=True, logprobs=2)
    expected = choices_apart(made, tiny.prompt(7), params)
    tiny.settle(made)
    tiny.renew(made, **changes)
    group = made.submit_group(tiny.prompt(7), params)
    if not changes:
        tiny.step_to(made, group.choices[0], 1)
        assert [len(handle.token_ids) for handle in group.choices] == [1] * 6
    assert [tiny.content(done) for done in group.result()] == expected
    tiny.settle(made)
    assert made.scheduler.counters.num_forks >= 3
    assert bool(made.scheduler.counters.num_parks) == bool(changes)


def test_the_state_counts_in_images_and_copies_in_the_pools_bytes_and_the_budget(made: Engine) -> None:
    tiny.renew(made)
    parts, is_pure = made.parts, not made.parts.layout.num_layers
    num_layers, is_half = 2, "bfloat16" in made.messages[0]
    state_bytes = num_layers * (3 * 8 * (2 if is_half else 4) + 8 * 4 * 4)
    assert parts.layout.state_bytes == parts.transfer.state_bytes == parts.scheduler_config.state_bytes == state_bytes
    assert parts.layout.num_bytes == parts.layout.pages_bytes + 4 * state_bytes
    assert (parts.layout.num_pages, parts.layout.pages_bytes) == (0, 0) if is_pure else parts.layout.num_pages == 16
    before = parts.transfer.stats.bytes_to_host
    handle = made.submit(tiny.prompt(9), SamplingParams(max_tokens=9, ignore_eos=True))
    tiny.step_to(made, handle, 4)
    made.hold(handle.seq_id)
    while made.parts.transfer.num_in_flight or str(made.scheduler.state(handle.seq_id)) != "parked":
        made.step()
    (status,) = made.status().sequences
    image_bytes = state_bytes + (0 if is_pure else parts.transfer.chunk_bytes)
    assert (status.host_bytes, status.image_pages) == (image_bytes, 0 if is_pure else 3)
    assert made.status().host_bytes == image_bytes == parts.transfer.stats.bytes_to_host - before
    made.release(handle.seq_id)
    handle.result()
    tiny.settle(made)


def test_what_a_state_means_is_said_once_at_load(made: Engine) -> None:
    said = made.messages[1]
    if made.parts.layout.num_layers:
        assert said.startswith("each sequence has a state of ") and "pool.prefix_cache has no effect without pool.state_snapshots" in said
        assert "pool of 64 tokens" in made.messages[0] and "states of 4 rows" in made.messages[0]
    else:
        assert "no pages: pool.tokens limits nothing, only rows are short" in said
        assert "states of 4 rows" in made.messages[0] and "pool of" not in made.messages[0]


def test_a_model_of_states_alone_has_room_for_all_its_rows_and_is_not_calibrated(made: Engine) -> None:
    if made.parts.layout.num_layers:
        assert made.capacity == 64
        return
    assert (made.capacity, made.status().pool_pages) == (4 * 128, 0)
    with pytest.raises(ConfigError, match="has states and no pages, and the simulator knows pages alone; take another"):
        calibrate(made)


def test_more_requests_than_rows_wait_for_a_row_and_a_more_urgent_one_parks_another(made: Engine) -> None:
    tiny.renew(made)
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
    expected = [tiny.run(made, [tiny.prompt(7, seed)], [params])[0].token_ids for seed in range(5)]
    tiny.renew(made)
    handles = [made.submit(tiny.prompt(7, seed), replace(params, priority=1)) for seed in range(4)]
    for _ in range(7):
        made.step()
    urgent = made.submit(tiny.prompt(7, 4), params)
    assert [handle.result().token_ids for handle in (*handles, urgent)] == expected
    tiny.settle(made)
    assert made.scheduler.counters.num_parks_priority >= 1


def test_a_context_shift_of_a_model_with_states_is_refused(models: dict[str, str], made: Engine) -> None:
    message = "context_shift: got true, but this model's keys do not simply turn with their position, so they cannot be moved"
    with pytest.raises(ConfigError, match="request." + message):
        Engine(tiny.config(model__path=models["hybrid"], request__context_shift=True))
    with pytest.raises(RequestError, match=message):
        made.submit([5, 6], SamplingParams(context_shift=True))


# As Qwen3.5-4B: 24 layers of a state, 8 of 32,768 bytes a token; 16 pages of 16 tokens make a chunk of 8 MiB
STATE = (StateArray((3, 8192), "bfloat16", "bfloat16"), StateArray((32, 128, 128), "float32", "float32", 0))
LARGE = PoolLayout(8, 256, 16, 4, 256, "bfloat16", "bfloat16", (STATE,) * 24, 4)


def test_a_state_larger_than_a_chunk_counts_as_several_where_staging_is_shared_out() -> None:
    assert (LARGE.state_bytes, LARGE.page_bytes * 16, state_weight(LARGE, 16)) == (51_511_296, 2**23, 7)
    check_staging(tiny.config(transfer__staging_mib=56, transfer__chunk_pages=16), LARGE)
    with pytest.raises(ConfigError, match=r"transfer.staging_mib: got 55, one sequence's state takes 56.0 MiB; raise it to 56"):
        check_staging(tiny.config(transfer__staging_mib=55, transfer__chunk_pages=16), LARGE)


def test_states_that_do_not_fit_the_device_are_refused_by_the_number_of_rows_that_do() -> None:
    mesh, free = checkpoints.one_device(), 160 * 2**20
    assert check_states(LARGE, 250 * 2**20, 2**20, mesh) == 4 * 51_511_296
    message = r"scheduler.rows: got 4, whose states take 196 MiB beside 1 MiB of staging; 160 MiB are free, at most 3 rows fit: lower it"
    with pytest.raises(ConfigError, match=message):
        check_states(LARGE, free, 2**20, mesh)
