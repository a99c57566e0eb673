"""P1 on the engine: an answer's bytes depend on nothing but the request. Everything is compared for equality, logprobs included."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.pool_size import compiled_width
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES

LENGTHS = (5, 20, 8, 33, 13, 40)  # chunk is 8: below, across and at its edges


def requests(dtype_seed: int = 0) -> tuple[list[list[int]], list[SamplingParams]]:
    """Six requests that need 329 tokens together where the pool holds 64: greedy ones, sampled ones, penalised ones, all with
    logprobs, one with those of its prompt."""
    prompts = [tiny.prompt(length, dtype_seed) for length in LENGTHS]
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=7, **common),
        SamplingParams(temperature=0, frequency_penalty=0.5, presence_penalty=0.2, repetition_penalty=1.1, **common),
        SamplingParams(temperature=0.8, seed=2**63 + 11, top_k=20, top_p=0.9, min_p=0.01, prompt_logprobs=2, **common),
        SamplingParams(temperature=1.2, seed=3, logit_bias={9: 4.0, 11: -100.0}, min_tokens=5, stop_token_ids=(40, 41), **common),
        SamplingParams(temperature=0.8, seed=7, **common),
    ]
    return prompts, params


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def tight(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tiny.engine(model__dtype=request.param) as made:
        yield made


def test_every_request_of_a_crowded_job_equals_the_same_request_alone(tight: Engine) -> None:
    prompts, params = requests()
    alone = tiny.alone(tight, prompts, params)
    parks = tight.scheduler.counters.num_parks
    crowded = tiny.run(tight, prompts, params)
    assert tight.scheduler.counters.num_parks > parks
    assert list(map(tiny.content, crowded)) == list(map(tiny.content, alone))


def test_the_order_of_arrival_changes_no_answer(tight: Engine) -> None:
    prompts, params = requests()
    forward = tiny.run(tight, prompts, params)
    backward = tiny.run(tight, prompts[::-1], params[::-1])
    assert list(map(tiny.content, backward[::-1])) == list(map(tiny.content, forward))


def test_arriving_in_the_middle_of_others_changes_no_answer(tight: Engine) -> None:
    prompts, params = requests()
    expected = tiny.alone(tight, prompts, params)
    handles = []
    for prompt, wish in zip(prompts, params, strict=True):
        handles.append(tight.submit(prompt, wish))
        for _ in range(5):
            tight.step()
    assert [tiny.content(handle.result()) for handle in handles] == list(map(tiny.content, expected))
    tiny.settle(tight)


@pytest.mark.parametrize("which", [0, 1])
def test_a_park_at_any_single_step_changes_nothing(tight: Engine, which: int) -> None:
    """One request, (33 or 5 prompt tokens, 24 generated), parked once before step k, for every k of its life, beside a neighbour."""
    prompts, params = requests()
    subject, wish = (prompts[0], params[1]) if which else (prompts[3], params[3])
    wish = replace(wish, cache_prompt=False)  # its prompt is computed each time
    expected = tiny.content(tiny.run(tight, [subject], [wish])[0])
    num_parked_at = 0
    for k in range(1, 29):
        neighbour = tight.submit(tiny.prompt(6, k), SamplingParams(max_tokens=20, temperature=1.0, seed=k, ignore_eos=True))
        handle = tight.submit(subject, wish)
        for _ in range(k):
            tight.step()
        num_parked_at += tight.scheduler.park(handle.seq_id) == "" if not handle.done else 0
        done = handle.result()
        assert tiny.content(done) == expected, f"parked before step {k}"
        neighbour.cancel()
        tiny.settle(tight)
    assert num_parked_at >= 24


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def uncrowded(request: pytest.FixtureRequest) -> tuple[str, list[object]]:
    """The answers from a pool that holds everybody, never parked."""
    prompts, params = requests()
    with tiny.engine(model__dtype=request.param, pool__tokens=512, scheduler__margin_steps=0) as made:
        answers = tiny.run(made, prompts, params)
        assert made.scheduler.counters.num_parks == 0
    return request.param, list(map(tiny.content, answers))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transfer__mode": "hold"},
        {"debug__park_every": 1},
        {"debug__park_every": 2, "debug__copy_delay_steps": 1},
        {"debug__park_every": 5, "debug__copy_delay_steps": 7},
        {"debug__park_every": 3, "transfer__mode": "hold"},
        {"debug__park_every": 3, "transfer__mode": "hold", "debug__copy_delay_steps": 7},
        {"debug__park_seed": 11},
        {"debug__park_seed": 12, "debug__copy_delay_steps": 1, "transfer__chunks_per_step": 1},
        {"debug__planner": False},
        {"debug__planner": False, "transfer__mode": "hold", "debug__copy_delay_steps": 2},
        {"transfer__blocking": True},
        {"scheduler__victim": "largest"},
        {"scheduler__victim": "youngest", "scheduler__margin_steps": 0},
        {"scheduler__victim": "oldest", "pool__tokens": 96},
        {"scheduler__host_budget_mib": 0},
        {"scheduler__host_budget_mib": 0, "scheduler__over_budget": "wait"},
        {"scheduler__host_budget_mib": 0, "scheduler__victim": "largest", "pool__tokens": 96},
        {"scheduler__host_budget_mib": 0, "scheduler__victim": "youngest", "scheduler__margin_steps": 0, "scheduler__rows": 4},
        {"scheduler__host_budget_mib": 0, "debug__park_every": 1, "pool__tokens": 128},
        {"scheduler__host_budget_mib": 0, "debug__park_seed": 11, "transfer__mode": "hold"},
        {"scheduler__host_budget_mib": 0, "debug__planner": False},
    ],
    ids=lambda settings: ", ".join(f"{name.partition('__')[2]}={value}" for name, value in settings.items()) or "tight",
)
def test_a_tight_pool_answers_as_an_ample_one(uncrowded: tuple[str, list[object]], settings: dict[str, object]) -> None:
    dtype, expected = uncrowded
    prompts, params = requests()
    with tiny.engine(model__dtype=dtype, **settings) as made:
        answers = tiny.run(made, prompts, params)
        counters = made.scheduler.counters
        assert counters.num_parks > 0
        assert counters.num_parks == counters.num_restores
        if settings.get("debug__planner") is False:
            assert counters.num_last_resorts > 0
            assert counters.num_parks_pressure == 0
        else:
            assert counters.num_last_resorts == 0
    assert list(map(tiny.content, answers)) == expected


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_park_every_parks_each_sequence_after_every_n_of_its_own_tokens(rows: int) -> None:
    """(8, 9) with N = 4 and a pool for all: one park after the prompt's chunk, then at 4 and 8 tokens."""
    wish = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    with tiny.engine(debug__park_every=4, scheduler__rows=rows) as made:
        answers = tiny.run(made, [tiny.prompt(8, i) for i in range(3)], wish)
        assert [len(answer.token_ids) for answer in answers] == [9, 9, 9]
        assert all(answer.num_parks >= 2 for answer in answers)
        assert made.scheduler.counters.num_parks_forced == sum(answer.num_parks for answer in answers)


def test_the_same_seed_in_two_rows_gives_the_same_text(tight: Engine) -> None:
    wish = SamplingParams(max_tokens=20, temperature=0.8, seed=7, ignore_eos=True)
    first, second = tiny.run(tight, [tiny.prompt(8)] * 2, wish)
    assert tiny.content(first) == tiny.content(second)


def test_each_of_three_rows_gives_the_same_bits() -> None:
    """Compiled for three, the last row of this family in float32 had other last bits."""
    wish = SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True, logprobs=2, cache_prompt=False)
    with tiny.engine(model__path=str(FIXTURES / "gemma3"), model__dtype="float32", scheduler__rows=3) as made:
        assert made.parts.shapes.rows == 4
        answers = list(map(tiny.content, tiny.run(made, [tiny.prompt(11)] * 3, wish)))
    assert answers == answers[:1] * 3


def test_each_place_in_a_chunk_of_three_gives_the_same_bits() -> None:
    """A prompt found in part is cut elsewhere, so its tokens come to other places of a chunk."""
    wish = SamplingParams(max_tokens=12, temperature=0.7, ignore_eos=True, logprobs=2, cache_prompt=False)
    with tiny.engine(model__path=str(FIXTURES / "gemma3"), model__dtype="float32", pool__tokens=512, scheduler__prefill_chunk=3) as made:
        assert made.parts.shapes.chunk == 4
        for seed in range(3):
            prompt = tiny.prompt(22, seed)
            expected = tiny.content(tiny.run(made, [prompt], [wish])[0])
            found = replace(wish, cache_prompt=True)
            tiny.run(made, [[*prompt[: 9 + seed], 5]], [found])
            before = made.scheduler.counters.cached_tokens
            assert tiny.content(tiny.run(made, [prompt], [found])[0]) == expected
            assert made.scheduler.counters.cached_tokens > before


@pytest.mark.parametrize(("num", "width"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 6)])
def test_programs_are_compiled_for_an_even_number_of_rows_and_tokens(num: int, width: int) -> None:
    assert compiled_width(num) == width


def test_two_engines_with_the_same_fingerprint_agree_byte_for_byte_and_another_width_has_another_fingerprint() -> None:
    prompts, params = requests()
    seen = []
    for settings in ({}, {"pool__tokens": 96, "scheduler__victim": "largest"}, {"scheduler__rows": 5}):
        with tiny.engine(**settings) as made:
            seen.append((made.system_fingerprint, list(map(tiny.content, tiny.run(made, prompts, params)))))
    assert seen[0] == seen[1]
    assert seen[2][0] != seen[0][0]


def test_an_engine_closed_in_the_middle_of_everything_leaves_the_next_one_clean() -> None:
    prompts, params = requests()
    with tiny.engine() as made:
        expected = list(map(tiny.content, tiny.run(made, prompts, params)))
    first = Engine(tiny.config(debug__park_every=2, debug__copy_delay_steps=3))
    handles = [first.submit(prompt, wish) for prompt, wish in zip(prompts, params, strict=True)]
    for _ in range(9):
        first.step()
    first.close()
    assert {handle.completion.finish_reason for handle in handles if handle.completion} == {"cancelled"}
    with tiny.engine() as made:
        assert list(map(tiny.content, tiny.run(made, prompts, params))) == expected


def test_a_sequence_away_on_the_host_is_seen_in_every_state() -> None:
    """With copies delayed by two steps the states of a forced park can be watched from outside."""
    with tiny.engine(debug__copy_delay_steps=2) as made:
        handle = made.submit(tiny.prompt(8), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
        tiny.step_to(made, handle, 4)
        assert made.scheduler.park(handle.seq_id) == ""
        states: list[State] = []
        while not handle.done:
            made.step()
            if not handle.done and (not states or states[-1] != made.scheduler.state(handle.seq_id)):
                states.append(made.scheduler.state(handle.seq_id))
        assert states == [State.PARKING, State.RESTORING, State.DECODING] or states == [
            State.PARKING,
            State.PARKED,
            State.RESTORING,
            State.DECODING,
        ]
        assert handle.completion is not None and handle.completion.num_parks == 1 and handle.completion.pause_s > 0


def test_penalties_know_what_was_said_in_another_row_since_this_row_was_last_had() -> None:
    """Row 1, then row 0, then row 1 again, in which meanwhile somebody only prefilled: nobody else's history lies between."""
    wish = SamplingParams(
        max_tokens=40, temperature=0, repetition_penalty=1.8, presence_penalty=0.5, frequency_penalty=0.7, ignore_eos=True
    )
    with tiny.engine(scheduler__rows=2, pool__tokens=512) as made:
        expected = tiny.content(tiny.run(made, [tiny.prompt(5)], [wish])[0])
        first = made.submit(tiny.prompt(3, 3), SamplingParams(max_tokens=50, ignore_eos=True))
        handle = made.submit(tiny.prompt(5), wish)

        def row() -> int | None:
            return next(seq.row for seq in made.scheduler.snapshot().sequences if seq.seq_id == handle.seq_id)

        tiny.step_to(made, handle, 5)
        rows = [row()]
        first.cancel()
        made.scheduler.park(handle.seq_id)
        tiny.step_to(made, handle, 10)
        rows.append(row())
        long = made.submit(tiny.prompt(120, 1), SamplingParams(max_tokens=3))
        made.step()
        made.step()
        for leaving in (long, handle):
            made.scheduler.park(leaving.seq_id)
            made.step()
        tiny.step_to(made, handle, len(handle.token_ids) + 2)
        rows.append(row())
        assert rows == [1, 0, 1]
        assert tiny.content(handle.result()) == expected


def test_what_a_program_was_given_is_never_written_again() -> None:
    """XLA:CPU may read an argument's memory while the program runs, so each dispatch has arrays of its own.

    What is on the device already is nobody's to write."""
    prompts, params = requests()
    with tiny.engine() as made:
        given: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        for program in (made.parts.programs.decode, made.parts.programs.prefill):

            def run(weights: Any, pool: Any, batch: Any, plain: Callable[..., Any] = program.run) -> Any:
                arrays = [x for x in jax.tree.leaves(batch) if isinstance(x, np.ndarray) and x.ndim]
                given.append((arrays, [x.copy() for x in arrays]))
                return plain(weights, pool, batch)

            object.__setattr__(program, "run", run)
        tiny.run(made, prompts, params)
    assert len(given) > 100
    for arrays, copies in given:
        assert all(np.array_equal(array, copy) for array, copy in zip(arrays, copies, strict=True))
