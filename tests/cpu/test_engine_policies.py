"""Whatever decides who parks and who returns, answers keep their bytes: every policy on the real engine, against the request alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from tests.cpu import tiny

LENGTHS, PRIORITIES = (5, 20, 8, 33, 13, 30), (0, 10, 0, -10, 10, 0)  # 259 tokens of 64


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    plain = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, temperature=0.8)
    params = [replace(plain, seed=seed, priority=priority) for seed, priority in enumerate(PRIORITIES)]
    return [tiny.prompt(length) for length in LENGTHS], params


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    with tiny.engine(pool__tokens=512) as made:
        yield made


@pytest.mark.parametrize(
    "settings",
    [
        {"victim": "priority", "resume": "pass", "rotate": "any", "rotate_after_s": 0.0},
        {"victim": "largest", "resume": "pass", "max_bypass": 1},
        {"victim": "oldest", "rotate": "any", "rotate_after_s": 0.0},
    ],
)
def test_a_crowded_job_under_each_policy_equals_each_request_alone(roomy: Engine, settings: dict[str, Any]) -> None:
    prompts, params = requests()
    alone = tiny.alone(roomy, prompts, params)
    with tiny.engine(**{f"scheduler__{name}": value for name, value in settings.items()}) as made:
        crowded = tiny.run(made, prompts, params)
        summary = made.summary()
    assert list(map(tiny.content, crowded)) == list(map(tiny.content, alone))
    causes = ("num_parks_pressure", "num_parks_priority", "num_rotations")
    assert summary["num_parks"] == sum(summary[name] for name in causes) > 0
    assert settings.get("rotate") != "any" or summary["num_rotations"] > 0


def test_with_admission_reserve_nobody_is_parked_and_the_bytes_are_the_same(roomy: Engine) -> None:
    prompts, params = requests()
    alone = tiny.alone(roomy, prompts, params)
    with tiny.engine(scheduler__admission="reserve") as made:
        crowded = tiny.run(made, prompts, params)
        assert made.summary()["num_parks"] == 0
    assert list(map(tiny.content, crowded)) == list(map(tiny.content, alone))


def test_a_priority_arrival_takes_a_row_from_one_that_is_less_urgent(roomy: Engine) -> None:
    """Four rows are taken and 180 tokens of pool are free: rows are short, pages are not."""
    plain = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
    prompts, params = [tiny.prompt(5, seed) for seed in range(5)], [plain] * 4 + [replace(plain, priority=-10)]
    alone = tiny.alone(roomy, prompts, params)
    with tiny.engine(pool__tokens=256) as made:
        others = [made.submit(prompt, plain) for prompt in prompts[:4]]
        tiny.step_to(made, others[3], 4)
        urgent = made.submit(prompts[4], params[4])
        made.step()
        assert made.scheduler.state(urgent.seq_id) is State.DECODING  # its prompt is one chunk
        assert made.summary()["num_parks_priority"] == made.summary()["num_parks"] == 1
        completions = [handle.result() for handle in (*others, urgent)]
        assert [handle.completion.num_parks for handle in (*others, urgent) if handle.completion] == [0, 0, 0, 1, 0]
    assert list(map(tiny.content, completions)) == list(map(tiny.content, alone))


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (1.5, "priority: got 1.5, allowed: a whole number, lower is served first"),
        (True, "priority: got True, allowed: a whole number, lower is served first"),
        (2**31, "priority: got 2147483648, allowed: -2147483648 to 2147483647"),
    ],
)
def test_a_priority_that_is_no_integer_is_refused(roomy: Engine, priority: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        roomy.submit([5, 6], SamplingParams(priority=priority))
    assert (str(caught.value), caught.value.param) == (message, "priority")
