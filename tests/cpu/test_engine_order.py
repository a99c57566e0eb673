"""The order of steps changes no byte: prompts first, a token after every chunk, parks in between, and each request alone."""

import dataclasses

import pytest

from jaxkv.engine import Engine
from jaxkv.request import Completion, SamplingParams
from tests.cpu.tiny import alone, content, engine, prompt, run, settle

LENGTHS = (8, 21, 3, 16, 30, 5, 9)  # chunks of 8: whole ones, parts, one token beyond
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
PARAMS = [
    SamplingParams(max_tokens=6 + 2 * i, temperature=0.0 if i % 3 == 0 else 0.9, seed=i, logprobs=i % 2 or None, ignore_eos=True)
    for i in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    """Each request alone, in a pool with room for everybody."""
    with engine(pool__tokens=512) as made:
        return alone(made, PROMPTS, PARAMS)


def submitted(made: Engine, patient: set[int]) -> list[Completion]:
    """All together, some of them patient."""
    params = [dataclasses.replace(one, patient=i in patient) for i, one in enumerate(PARAMS)]
    handles = [made.submit(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    settle(made)
    return [handle.result() for handle in handles]


@pytest.mark.parametrize(("burst", "fields"), [(1, {"pool__tokens": 64}), (16, {"pool__tokens": 64}), (3, {"debug__park_every": 3})])
def test_bytes_do_not_depend_on_the_order_of_steps(expected: list[Completion], fields: dict[str, int], burst: int) -> None:
    with engine(**fields, scheduler__prefill_burst=burst) as made:
        found = run(made, PROMPTS, PARAMS)
        num_parks = made.summary()["num_parks"]
    assert [content(one) for one in found] == [content(one) for one in expected]
    assert num_parks > 0


def test_bytes_do_not_depend_on_who_is_patient(expected: list[Completion]) -> None:
    with engine(pool__tokens=96, debug__park_seed=3) as made:
        assert [content(one) for one in submitted(made, {0, 2, 4, 5})] == [content(one) for one in expected]


def test_a_job_takes_fewer_decode_steps_than_the_same_requests_with_somebody_waiting() -> None:
    with engine(pool__tokens=512) as made:
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        run(made, [prompt(16, seed) for seed in range(4)], params)
        first = made.stats.num_decode_steps
        for seed in range(4, 8):
            made.submit(prompt(16, seed), params)
        settle(made)
        assert (first, made.stats.num_decode_steps - first) == (9, 15)
