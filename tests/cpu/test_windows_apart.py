"""A model some of whose layers see a window, on the real engine: these have pages of their own, and every byte is that of one table."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.pool_size import size_pool
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from jaxkv.startup import outline
from tests import exactness
from tests.cpu import checkpoints, tiny
from tests.cpu.checkpoints import FIXTURES
from tests.cpu.test_speculate import NUM_DRAFT, Oracle, at_random, reset
from tests.cpu.test_speculate_small import rounds

# Window 16, chunks of 8, pages of 4: in layers with a window each of 4 rows holds 7 pages at most
ENGINES: dict[str, dict[str, Any]] = {
    "gemma3 float32 direct": {},
    "gemma3 bfloat16 hold": {"model__dtype": "bfloat16", "transfer__mode": "hold", "debug__copy_delay_steps": 2},
    "gemma3 float32 staged": {"transfer__mode": "staged"},
    "gemma3_linear float32 direct": {},
    "gemma3 int8 direct": {"pool__kv_dtype": "int8"},
}
QUICK = "gemma3 float32 direct"
LENGTHS = (5, 20, 8, 80, 33, 60)


def fields(name: str) -> dict[str, Any]:
    return {"model__path": str(FIXTURES / name.split()[0]), **ENGINES[name]}


@pytest.fixture(
    scope="module", params=[name if name == "gemma3 float32 direct" else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def made(name: str) -> Iterator[Engine]:
    with tiny.engine(**fields(name), pool__tokens=256) as engine:
        yield engine


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, temperature=0.8 * (i % 2), seed=i, frequency_penalty=0.2 * (i == 2))
        for i in range(len(LENGTHS))
    ]
    return [tiny.prompt(length) for length in LENGTHS], params


@pytest.fixture(scope="module")
def expected(name: str, made: Engine) -> list[Any]:
    """What each says alone; and where all layers have one table, since as many pages of their own would save nothing, it says the same."""
    tiny.renew(made)
    answers = list(map(tiny.content, tiny.alone(made, *requests())))
    if name != QUICK:  # one more engine to start
        with tiny.engine(**fields(name), pool__tokens=108) as shared:
            assert (shared.parts.layout.near, shared.system_fingerprint) == ((), made.system_fingerprint)
            assert list(map(tiny.content, tiny.alone(shared, *requests()))) == answers
    return answers


RULES = [
    pytest.param({"num_pages": 26}, 1, id="crowded"),
    pytest.param({"park_every": 1}, 100, id="parked at every token"),
    pytest.param({"park_every": 3, "host_budget_bytes": 0}, 30, id="computed again every 3 tokens"),
    pytest.param({"park_seed": 1, "host_budget_bytes": 30_000, "planner": False}, 10, id="at random, with images for some, unplanned"),
]


@pytest.mark.parametrize(("changes", "least_parks"), RULES)
def test_every_request_equals_itself_with_one_table(made: Engine, expected: list[Any], changes: dict[str, Any], least_parks: int) -> None:
    tiny.renew(made, **changes)
    prompts, params = requests()
    assert list(map(tiny.content, tiny.run(made, prompts, params))) == expected
    assert list(map(tiny.content, tiny.run(made, prompts[::-1], params[::-1]))) == expected[::-1]
    assert made.scheduler.counters.num_parks >= least_parks


def test_a_park_before_any_step_changes_nothing(made: Engine) -> None:
    tiny.renew(made)
    exactness.a_park_at_any_step_changes_nothing(made, every=4)


def test_layers_with_a_window_hold_and_park_the_pages_of_that_window(made: Engine, expected: list[Any]) -> None:
    tiny.renew(made)
    parts, (prompts, params) = made.parts, requests()
    layout = parts.layout
    assert (layout.near_pages, layout.near_window, len(layout.near)) == (28, 16, 2 if "linear" in made.config.model.path else 3)
    sizes = [array.shape[0] for layer in parts.pool.pages for array in layer]
    assert sorted(set(sizes)) == [29, 65] and sizes.count(29) == 2 * len(layout.near)
    handle = made.submit(prompts[3], params[3])
    tiny.step_to(made, handle, 12)
    made.hold(handle.seq_id)  # 91 cells: 23 pages, and in layers with a window cells 76 to 90, pages 19 to 22
    while parts.transfer.num_in_flight or made.scheduler.state(handle.seq_id) is not State.PARKED:
        made.step()
    (status,) = made.status().sequences
    assert (status.image_pages, status.host_bytes) == (23, 6 * parts.transfer.chunk_bytes + 2 * parts.transfer.near_bytes)
    assert parts.transfer.near_bytes == len(layout.near) * parts.transfer.chunk_bytes // (layout.num_layers - len(layout.near))
    made.release(handle.seq_id)
    assert tiny.content(handle.result()) == expected[3]
    tiny.settle(made)


def test_a_prompt_is_found_where_the_pages_of_both_kinds_are_there(made: Engine, expected: list[Any]) -> None:
    tiny.renew(made)
    prompts, params = requests()
    for cached in (0, 76, 76):
        before = made.scheduler.counters.cached_tokens
        assert tiny.content(tiny.run(made, [prompts[3]], [params[3]])[0]) == expected[3]
        assert made.scheduler.counters.cached_tokens - before == cached
    tiny.renew(made, near_pages=28, rows=4)
    assert tiny.content(tiny.run(made, [prompts[3]], [params[3]])[0]) == expected[3]


@pytest.mark.parametrize("num", [3, 6])
def test_the_choices_of_a_group_are_those_that_come_one_by_one(made: Engine, num: int) -> None:
    """Of six two have no row when the first token of all is drawn."""
    tiny.renew(made)
    params = SamplingParams(n=num, max_tokens=20, temperature=0.9, seed=5, ignore_eos=True)
    together = [done.token_ids for done in made.submit_group(tiny.prompt(45), params).result()]
    tiny.settle(made)
    assert made.scheduler.counters.num_forks == num - 1
    apart = [made.submit(tiny.prompt(45), replace(params, n=1), choice=choice).result().token_ids for choice in range(num)]
    assert together == apart
    tiny.settle(made)


@pytest.fixture(scope="module")
def guessing() -> Iterator[Engine]:
    with tiny.engine(**fields(QUICK), pool__tokens=256, speculate__kind="ngram", speculate__num_draft=NUM_DRAFT) as engine:
        assert (engine.parts.layout.near_pages, engine.parts.scheduler_config.num_draft) == (28, NUM_DRAFT)
        yield engine


@pytest.mark.parametrize(("changes", "least_parks"), RULES)
def test_guesses_change_no_byte_where_layers_have_pages_of_their_own(guessing: Engine, changes: dict[str, Any], least_parks: int) -> None:
    prompts, params = requests()
    reset(guessing, rejects=True)
    plain = tiny.alone(guessing, prompts, params)
    oracle = Oracle({tuple(prompt): one.token_ids for prompt, one in zip(prompts, plain, strict=True)}, at_random)
    reset(guessing, oracle, **changes)
    assert list(map(tiny.content, tiny.run(guessing, prompts, params))) == list(map(tiny.content, plain))
    assert oracle.num_guessed > 100
    assert guessing.scheduler.counters.num_parks >= least_parks // 2  # several tokens a step


@pytest.mark.slow
def test_a_small_model_guesses_where_layers_have_pages_of_their_own() -> None:
    """It guesses for itself, with all its layers in pages of the pool's numbers."""
    prompts, params = requests()
    path = str(FIXTURES / "gemma3")
    more: dict[str, Any] = {"pool__tokens": 256, "speculate__kind": "draft", "speculate__draft_path": path}
    found = []
    for changes in ({"debug__reject_drafts": True}, {}, {"debug__park_every": 3}):
        with tiny.engine(**fields(QUICK), **more, **changes) as made:
            assert made.parts.layout.near and made.parts.small is not None and not made.parts.small.layout.near
            found.append(list(map(tiny.content, tiny.run(made, prompts, params))))
            assert made.stats.num_draft_tokens > 10  # after a park it is told of everything again, a chunk a step
            if not changes:
                _, checked, true = rounds(made)
                assert checked == true > 25  # the likeliest token, which it knows
    assert found[1:] == found[:1] * 2


def test_a_shift_is_refused_where_windows_keep_no_more_and_possible_where_all_requests_shift(made: Engine, name: str) -> None:
    with pytest.raises(RequestError, match="context_shift: got true, but the layers with a window keep no more than that here"):
        made.submit([5, 6], SamplingParams(context_shift=True))
    assert outline(tiny.config(**fields(name), pool__tokens=256)).layout.near
    assert not outline(tiny.config(**fields(name), pool__tokens=256, request__context_shift=True)).layout.near
    assert outline(tiny.config(**fields(name), pool__tokens=256, speculate__kind="ngram")).layout.near


def test_it_is_said_once_at_load(made: Engine) -> None:
    (said,) = made.messages[1:]
    assert "layers see the last 16 tokens: beside the pool they have 28 pages for all rows" in said and "contexts do not shift" in said


def test_where_the_memory_decides_the_layers_with_a_window_get_theirs_first() -> None:
    config = tiny.config(model__path=str(FIXTURES / "gemma3"), pool__tokens=None)
    plan = outline(config)
    assert not plan.layout.near
    layout = size_pool(config, plan.info.config, plan.layout, plan.shapes, checkpoints.one_device())
    assert (layout.near, layout.near_pages, layout.num_pages) == ((0, 1, 2), 28, 4 * 32)  # max_len is 128


MESH = """
from tests.cpu import tiny
from tests.cpu.test_windows_apart import requests

ENGINE = dict(model__path={path!r}, mesh__tensor=2, pool__tokens=256)
with tiny.engine(**ENGINE) as made:
    assert made.parts.layout.near
    alone = [tiny.content(c) for c in tiny.alone(made, *requests())]
for fields in (dict(debug__park_every=3), dict(debug__park_every=3, transfer__mode="staged")):
    with tiny.engine(**ENGINE, **fields) as made:
        assert [tiny.content(c) for c in tiny.run(made, *requests())] == alone
        assert made.scheduler.counters.num_parks_copied > 30
print("exact")
"""


@pytest.mark.slow
def test_two_devices_split_both_kinds_of_pages_and_park_exactly(run_python: Callable[..., str]) -> None:
    assert run_python(MESH.format(path=str(FIXTURES / "gemma3")), devices=2) == "exact\n"
