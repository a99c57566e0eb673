"""Keys and values in int8 on the engine: an answer depends on the request alone, as in any other precision."""

from typing import Any

import pytest

from jaxkv.request import SamplingParams
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES

INT8 = {"pool__kv_dtype": "int8"}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Five that need 217 tokens together where the pool holds 64: two begin alike, two shift their contexts."""
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2}
    long = {**common, "max_tokens": 40, "context_shift": True, "context_len": 40, "n_keep": 4}
    prompts = [tiny.prompt(n) for n in (5, 20, 33, 13)]
    params = [
        SamplingParams(temperature=0, **long),
        SamplingParams(temperature=0.8, seed=7, **common),
        SamplingParams(temperature=0, prompt_logprobs=1, **common),
        SamplingParams(temperature=0.8, seed=3, **long),
    ]
    return [*prompts, [*prompts[1], 9]], [*params, SamplingParams(temperature=0.8, seed=5, **common)]


@pytest.fixture(scope="module")
def uncrowded() -> list[Any]:
    """The answers from a pool that holds everybody, never parked."""
    with tiny.engine(**INT8, pool__tokens=512, scheduler__margin_steps=0) as made:
        found = [tiny.content(c) for c in tiny.run(made, *requests())]
        assert made.scheduler.counters.num_parks == 0
        assert made.scheduler.counters.num_shifts > 1
        assert [tiny.content(c) for c in tiny.alone(made, *requests())] == found
        assert made.parts.layout.page_shape == (2, 4, 16 + 4)
        assert made.parts.fingerprint_facts["kv_dtype"] == "int8"
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"debug__park_every": 1},
        {"debug__park_seed": 11, "transfer__mode": "hold", "debug__copy_delay_steps": 2},
        {"transfer__mode": "staged", "debug__park_every": 2},
        {"scheduler__host_budget_mib": 0},
    ],
    ids=str,
)
def test_no_park_copy_or_replay_changes_an_answer(uncrowded: list[Any], settings: dict[str, Any]) -> None:
    with tiny.engine(**INT8, **settings) as made:
        assert [tiny.content(c) for c in tiny.run(made, *requests())] == uncrowded
        counters = made.scheduler.counters
        assert counters.num_parks > 0
        assert (counters.num_replayed_tokens > 0) == (settings.get("scheduler__host_budget_mib") == 0)


def test_they_are_other_answers_than_in_float32_and_close_to_them(uncrowded: list[Any]) -> None:
    prompt = [tiny.prompt(33)]
    wish = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with tiny.engine(pool__tokens=512) as made:
        (wide,) = tiny.run(made, prompt, wish)
    with tiny.engine(**INT8, pool__tokens=512) as made:
        (narrow,) = tiny.run(made, prompt, wish)
    found = [[known.logprob for known in answer.prompt_logprobs or [] if known] for answer in (wide, narrow)]
    differences = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert len(differences) == 32
    assert 1e-4 < max(differences) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gemma3", "mistral", "qwen3_moe"])
def test_other_kinds_of_layers_keep_it_too(family: str) -> None:
    prompts, params = requests()
    wishes = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=p.temperature, seed=p.seed) for p in params]
    fields = {**INT8, "model__path": str(FIXTURES / family)}
    with tiny.engine(**fields, pool__tokens=512) as made:
        expected = [tiny.content(c) for c in tiny.alone(made, prompts, wishes)]
    with tiny.engine(**fields, debug__park_every=1) as made:
        assert [tiny.content(c) for c in tiny.run(made, prompts, wishes)] == expected
        assert made.scheduler.counters.num_parks > 20


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_guesses_change_no_answer_in_int8_either(weights: str) -> None:
    fields: dict[str, Any] = {**INT8, "model__path": str(FIXTURES / "qwen3_5_moe"), "model__weight_dtype": weights}
    fields |= {"speculate__kind": "mtp", "speculate__num_draft": 3}
    prompts, params = requests()
    wishes = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=p.temperature, seed=p.seed) for p in params]
    with tiny.engine(**fields, debug__reject_drafts=True, pool__tokens=512) as made:
        expected = [tiny.content(c) for c in tiny.alone(made, prompts, wishes)]
    with tiny.engine(**fields) as made:
        assert [tiny.content(c) for c in tiny.run(made, prompts, wishes)] == expected
    with tiny.engine(**fields, debug__park_every=2) as made:
        assert [tiny.content(c) for c in tiny.run(made, prompts, wishes)] == expected
        assert made.scheduler.counters.num_parks > 20
