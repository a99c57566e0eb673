"""Kept states on the real engine: prompts of models with states are found again, and every answer is what it is without."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.recover import restart_pool
from jaxkv.request import SamplingParams
from tests.cpu import averages, tiny
from tests.cpu.checkpoints import FIXTURES
from tests.cpu.test_states import HYBRID, PURE

ENGINES: dict[str, dict[str, Any]] = {
    "hybrid float32 direct": {},
    "pure bfloat16 hold": {"model__dtype": "bfloat16", "transfer__mode": "hold", "debug__copy_delay_steps": 2},
    "qwen3_5 float32 staged": {"transfer__mode": "staged"},
    "mamba bfloat16 direct": {"model__dtype": "bfloat16"},
    "qwen3_next bfloat16 direct": {"model__dtype": "bfloat16"},
}
SLOW = ("pure", "qwen3_5", "mamba", "qwen3_next")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with averages.family():
        folder = tmp_path_factory.mktemp("averages")
        yield {name: str(averages.write_checkpoint(folder, *shape)) for name, shape in {"hybrid": HYBRID, "pure": PURE}.items()}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if name.split()[0] in SLOW else name for name in ENGINES]
)
def made(request: pytest.FixtureRequest, models: dict[str, str]) -> Iterator[Engine]:
    name = request.param.split()[0]
    path = models.get(name, str(FIXTURES / name))
    with tiny.engine(model__path=path, pool__tokens=256, pool__state_snapshots=4, **ENGINES[request.param]) as engine:
        yield engine


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Six requests, greedy and sampled: three begin with the same 20 tokens, two are the same prompt."""
    base = tiny.prompt(20, 1)
    prompts = [base + tiny.prompt(n, 2) for n in (3, 14, 25)] + [tiny.prompt(40, 3), tiny.prompt(40, 3), tiny.prompt(7, 4)]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2, temperature=0.8 * (i % 2), seed=i) for i in range(6)]
    return prompts, params


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Any]:
    """What each says alone, when it computes its whole prompt."""
    tiny.renew(made)
    prompts, params = requests()
    answers = list(map(tiny.content, tiny.alone(made, prompts, [replace(p, cache_prompt=False) for p in params])))
    assert (made.scheduler.counters.cached_tokens, made.scheduler.counters.num_parks) == (0, 0)
    return answers


def test_prompts_that_begin_alike_go_on_from_a_kept_state_to_the_same_bytes(made: Engine, expected: list[Any]) -> None:
    tiny.renew(made)
    prompts, params = requests()
    found = []
    for prompt, wish, answer in zip(prompts, params, expected, strict=True):
        before = made.scheduler.counters.cached_tokens
        assert tiny.content(tiny.run(made, [prompt], [wish])[0]) == answer
        found.append(made.scheduler.counters.cached_tokens - before)
    assert found == [0, 16, 16, 0, 32, 0]  # chunks of 8 in pages of 4; the page of the last token is always computed


RULES = [
    pytest.param({}, 0, id="crowded"),
    pytest.param({"park_every": 1}, 60, id="parked at every token"),
    pytest.param({"park_every": 3, "host_budget_bytes": 0}, 20, id="computed again every 3 tokens"),
    pytest.param({"num_pages": 20, "num_snapshots": 1, "planner": False}, 0, id="in less room"),
]


@pytest.mark.parametrize(("changes", "least_parks"), RULES)
def test_every_request_equals_itself_alone(made: Engine, expected: list[Any], changes: dict[str, Any], least_parks: int) -> None:
    tiny.renew(made, **{**changes, "num_pages": changes.get("num_pages", 64) if made.parts.layout.num_layers else 0})
    prompts, params = requests()
    for _ in range(2):
        assert list(map(tiny.content, tiny.run(made, prompts, params))) == expected
        assert list(map(tiny.content, tiny.run(made, prompts[::-1], params[::-1]))) == expected[::-1]
    assert made.scheduler.counters.num_parks >= least_parks
    assert made.scheduler.counters.cached_tokens > 0


def test_the_choices_of_a_group_compute_the_chunks_of_their_prompt_once(made: Engine) -> None:
    tiny.renew(made)
    params = SamplingParams(n=3, max_tokens=8, temperature=0.9, seed=5, ignore_eos=True)
    together = [done.token_ids for done in made.submit_group(tiny.prompt(21), params).result()]
    tiny.settle(made)
    cached = 2 * 20 if made.parts.layout.num_layers else 0  # whole pages; a state alone is copied, and no token of it found
    assert (made.scheduler.counters.cached_tokens, made.scheduler.counters.num_forks) == (cached, 2)
    wishes = [replace(params, n=1, cache_prompt=False)] * 3
    apart = [made.submit(tiny.prompt(21), wish, choice=choice).result().token_ids for choice, wish in enumerate(wishes)]
    assert together == apart
    tiny.settle(made)


def test_kept_states_are_made_anew_with_the_pool(made: Engine, expected: list[Any]) -> None:
    tiny.renew(made)
    prompts, params = requests()
    made.parts.pool.snapshots[0][0].delete()
    restart_pool(made)
    assert [array.shape[0] for layer in made.parts.pool.snapshots for array in layer] == [4] * 2 * len(made.parts.layout.states)
    assert not any(np.asarray(array).any() for layer in made.parts.pool.snapshots for array in layer)
    tiny.renew(made)
    assert list(map(tiny.content, tiny.run(made, prompts, params))) == expected


def test_slots_count_in_the_pools_bytes_and_nothing_is_said_of_prompts_that_are_not_found(made: Engine) -> None:
    layout = made.parts.layout
    assert layout.states_bytes == (4 + 4) * layout.state_bytes
    assert "not found again" not in made.messages[1]
    names = [program.name for program in made.parts.programs.all()]
    assert names[-2:] == ["keep", "fetch"]
