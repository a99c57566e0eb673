"""The first token of an answer, which the prompt's last chunk draws and no decode step: alone, and for all choices of a group at once."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.constraint import Constraint
from jaxkv.ends import lose
from jaxkv.engine import Engine
from jaxkv.live import Group, Handle
from jaxkv.models.tokenizer import ByteTokenizer
from jaxkv.recover import recover
from jaxkv.request import SamplingParams
from jaxkv.scheduler import Plan
from tests.cpu import tiny

SAMPLED = SamplingParams(temperature=5.0, top_k=20, max_tokens=3, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    with tiny.engine(pool__tokens=512) as made:
        yield give_bytes(made)


def give_bytes(made: Engine) -> Engine:
    """A tokenizer whose tokens are bytes, so that an answer can be made to have a form."""
    object.__setattr__(made.parts.checkpoint, "tokenizer", ByteTokenizer([f"<{i}>" for i in range(tiny.VOCAB - 256)]))
    return made


def drawn(top: tuple[tuple[int, float], ...], temperature: float, seed: int, choice: int, num_generated: int) -> int:
    """Gumbel-max among the likeliest tokens, by the documented key."""
    key = jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32), impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, choice), num_generated)
    noise = np.asarray(jax.random.gumbel(key, (tiny.VOCAB,), np.float32))
    return max(top, key=lambda entry: entry[1] / temperature + noise[entry[0]])[0]


def expected(found: Any, params: SamplingParams) -> list[int]:
    return [drawn(entry.top, params.temperature, params.seed, found.choice, index) for index, entry in enumerate(found.logprobs)]


def test_the_first_token_is_drawn_with_the_temperature_and_the_key_of_its_request(roomy: Engine) -> None:
    firsts = set()
    for seed in range(8):
        params = replace(SAMPLED, seed=seed)
        found = tiny.run(roomy, [tiny.prompt(10)], params)[0]
        assert found.token_ids == expected(found, params)
        firsts.add(found.token_ids[0])
    assert len(firsts) >= 4


def alone(made: Engine, prompt: list[int], params: SamplingParams) -> list[Any]:
    """What each choice says as a request of its own, with nobody beside it and nothing shared."""
    found = []
    for choice in range(params.n):
        found.append(made.submit(prompt, replace(params, n=1, cache_prompt=False), choice=choice).result())
        tiny.settle(made)
    return list(map(tiny.content, found))


def plans(made: Engine, group: Group) -> list[tuple[int, int, tuple[int, ...]]]:
    """Start and length of the chunks of its prompt, and the choices that began with each, while it runs to its end."""
    ids = {handle.seq_id: handle.choice for handle in group.choices}
    chunks, plan_step = [], made.scheduler.plan

    def plan(now: float, free_chunks: int) -> Plan:
        found = plan_step(now, free_chunks)
        if found.prefill and found.prefill.seq_id in ids:
            chunk = found.prefill
            chunks.append((chunk.start, chunk.length, tuple(ids[fork.seq_id] for fork in chunk.forks)))
        return found

    made.scheduler.plan = plan  # type: ignore[method-assign]
    try:
        group.result()
    finally:
        made.scheduler.plan = plan_step  # type: ignore[method-assign]
    tiny.settle(made)
    return chunks


# 27 tokens are 3 chunks of 8 and one of 3, and 6 full pages of 4: the seventh is copied for each of the others.
@pytest.mark.parametrize(
    ("length", "n", "chunks"),
    [
        (27, 4, [(0, 8, ()), (8, 8, ()), (16, 8, ()), (24, 3, (1, 2, 3))]),
        (28, 3, [(0, 8, ()), (8, 8, ()), (16, 8, ()), (24, 4, (1, 2))]),
        (16, 2, [(0, 8, ()), (8, 8, (1,))]),
        (3, 4, [(0, 3, (1, 2, 3))]),
        (1, 2, [(0, 1, (1,))]),
    ],
)
@pytest.mark.parametrize("cached", [True, False])
def test_all_choices_that_have_a_row_begin_with_one_computation_of_the_prompt(
    roomy: Engine, length: int, n: int, chunks: list[Any], cached: bool
) -> None:
    prompt, params = tiny.prompt(length, 60 + n), replace(SAMPLED, n=n, cache_prompt=cached, max_tokens=12, seed=length)
    expected = alone(roomy, prompt, params)
    group = roomy.submit_group(prompt, params)
    assert plans(roomy, group) == chunks
    assert [tiny.content(handle.completion) for handle in group.choices] == expected
    assert [answer.cached_tokens for answer in group.result()[1:]] == [(length - 1) // 4 * 4] * (n - 1)


@pytest.mark.parametrize("n", [6, 18])
def test_those_without_a_row_have_their_first_token_at_once_and_find_the_full_pages_later(roomy: Engine, n: int) -> None:
    """A chunk draws sixteen; the seventeenth draws its own and the last one's."""
    prompt, params = tiny.prompt(27, n), replace(SAMPLED, n=n, max_tokens=6)
    expected = alone(roomy, prompt, params)
    group = roomy.submit_group(prompt, params)
    tiny.step_to(roomy, group.choices[0], 1)
    assert [len(handle.token_ids) for handle in group.choices] == [1] * min(n, 16) + [0] * (n - 16)
    assert plans(roomy, group) == [(24, 3, ())] * (n - 4)
    assert [tiny.content(handle.completion) for handle in group.choices] == expected
    gaps = list(roomy.stats.token_gap_s)
    assert [answer.cached_tokens for answer in group.result()] == [0, *[24] * (n - 1)]
    assert len(gaps) == len(roomy.stats.token_gap_s)


def test_answers_of_one_token_need_no_row(roomy: Engine) -> None:
    prompt, params = tiny.prompt(27), replace(SAMPLED, n=16, max_tokens=1)
    expected = alone(roomy, prompt, params)
    before = roomy.scheduler.counters.num_admitted
    group = roomy.submit_group(prompt, params)
    assert [tiny.content(answer) for answer in group.result()] == expected
    assert roomy.scheduler.counters.num_admitted - before == 4


def test_what_lies_between_a_token_drawn_ahead_and_the_next_is_no_gap_between_steps(roomy: Engine) -> None:
    before = len(roomy.stats.token_gap_s)
    roomy.submit_group(tiny.prompt(27), replace(SAMPLED, n=6, max_tokens=3)).result()
    assert len(roomy.stats.token_gap_s) - before == 4 * 2 + 2 * 1


@pytest.fixture(scope="module")
def narrow() -> Iterator[Engine]:
    with tiny.engine(scheduler__rows=2, pool__tokens=128) as made:
        yield give_bytes(made)


@pytest.mark.parametrize("which", [3, 5])
@pytest.mark.parametrize("does", ["park", "cancel", "lose", "break"])
def test_what_befalls_one_that_drew_ahead_before_its_prompt_is_computed_changes_nothing(narrow: Engine, does: str, which: int) -> None:
    prompt, params = tiny.prompt(27, 5), replace(SAMPLED, n=6, max_tokens=5, logprobs=2, cache_prompt=False, prompt_logprobs=2)
    expected = alone(narrow, prompt, params)
    for num_steps in range(1, 14):
        group = narrow.submit_group(prompt, params)
        for _ in range(num_steps):
            narrow.step()
        handle = group.choices[which]
        if does == "cancel":
            handle.cancel()
        elif does == "park":
            narrow.scheduler.park(handle.seq_id)
        elif does == "lose":
            lose(narrow, handle.seq_id, "a test")
        else:
            recover(narrow, RuntimeError("a test"))
        found = [tiny.content(answer) for answer in group.result()]
        tiny.settle(narrow)
        is_left_out = {which} if does == "cancel" else set()
        assert [one for choice, one in enumerate(found) if choice not in is_left_out] == [
            one for choice, one in enumerate(expected) if choice not in is_left_out
        ], f"{does} {which} after {num_steps} steps"


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 0.0},
        {"logit_bias": {5: 100.0, 9: 99.0, 11: 98.5}},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5, "repetition_penalty": 1.3},
        {"min_tokens": 3, "ignore_eos": False, "stop_token_ids": tuple(range(3, 30))},
        {"top_p": 0.4, "min_p": 0.01, "top_k": 0, "temperature": 1.5},
        {"max_tokens": 1},
        {"max_tokens": 0},
        {"logprobs": None},
        {"constraint": Constraint("regex", "[a-e]{4,9}"), "max_tokens": 12},
        {"bad_words": ("e", "ab"), "max_tokens": 12},
        {"context_shift": True, "context_len": 22, "n_keep": 4, "n_discard": 8, "max_tokens": 20},
        {"context_shift": True, "context_len": 25, "max_tokens": 20, "frequency_penalty": 0.7},
        {"prompt_logprobs": 3},
        {"prompt_logprobs": 0, "max_tokens": 0},
    ],
    ids=str,
)
def test_whatever_is_asked_of_the_sampler_is_asked_for_every_choice(roomy: Engine, wish: dict[str, Any]) -> None:
    prompt, params = tiny.prompt(22, 4), replace(SAMPLED, n=4, **wish)
    expected = alone(roomy, prompt, params)
    before = roomy.scheduler.counters.num_forks
    group = roomy.submit_group(prompt, params).result()
    tiny.settle(roomy)
    assert list(map(tiny.content, group)) == expected
    assert roomy.scheduler.counters.num_forks - before == 3
    if "prompt_logprobs" in wish:
        assert [len(answer.prompt_logprobs) for answer in group] == [22] * 4


def test_the_logprobs_of_a_prompt_are_computed_once_for_all_choices_and_nobody_elses_pages_are_used(roomy: Engine) -> None:
    prompt = tiny.prompt(27, 9)
    tiny.run(roomy, [prompt], replace(SAMPLED, max_tokens=1))  # its pages are there now
    num_cached = roomy.scheduler.snapshot().num_pages_cached
    params = replace(SAMPLED, n=3, prompt_logprobs=4)
    group = roomy.submit_group(prompt, params)
    assert plans(roomy, group) == [(0, 8, ()), (8, 8, ()), (16, 8, ()), (24, 3, (1, 2))]
    first, second, third = (answer.prompt_logprobs or [] for answer in group.result())
    assert first == second == third
    assert [None if entry is None else entry.token_id for entry in first] == [None, *prompt[1:]]
    assert tiny.run(roomy, [prompt], replace(params, n=1))[0].prompt_logprobs == first
    assert roomy.scheduler.snapshot().num_pages_cached == num_cached


@pytest.mark.parametrize(
    "settings",
    [
        {"pool__prefix_cache": False, "transfer__mode": "hold", "debug__copy_delay_steps": 2},
        {"scheduler__host_budget_mib": 0},
        {"scheduler__host_budget_mib": 0, "debug__park_every": 2},
        {"debug__planner": False, "scheduler__over_budget": "wait"},
        {"debug__park_seed": 5},
    ],
    ids=str,
)
def test_in_a_tight_pool_choices_that_began_together_say_what_they_say_alone(roomy: Engine, settings: dict[str, Any]) -> None:
    prompt, params = tiny.prompt(27, 2), replace(SAMPLED, n=4, max_tokens=20, logprobs=2)
    expected = alone(roomy, prompt, params)
    with tiny.engine(**settings) as made:
        give_bytes(made)
        others = [made.submit(tiny.prompt(9, seed), replace(params, n=1, max_tokens=9)) for seed in range(2)]
        groups = [made.submit_group(prompt, params) for _ in range(2)]
        assert [list(map(tiny.content, group.result())) for group in groups] == [expected, expected]
        assert all(other.result().finish_reason == "length" for other in others)
        assert made.scheduler.counters.num_parks > 0


@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("does", ["park", "cancel", "lose"])
def test_what_befalls_one_choice_around_the_step_in_which_all_begin_changes_nothing(roomy: Engine, does: str, which: int) -> None:
    prompt, params = tiny.prompt(27, 2), replace(SAMPLED, n=4, max_tokens=8, logprobs=2, cache_prompt=False)
    expected = alone(roomy, prompt, params)
    for num_steps in range(1, 7):
        group = roomy.submit_group(prompt, params)
        for _ in range(num_steps):
            roomy.step()
        handle = group.choices[which]
        if does == "cancel":
            handle.cancel()
        elif does == "park":
            roomy.scheduler.park(handle.seq_id)
        else:
            lose(roomy, handle.seq_id, "a test")
        found = [tiny.content(answer) for answer in group.result()]
        tiny.settle(roomy)
        is_left_out = {which} if does == "cancel" else set()
        assert [one for choice, one in enumerate(found) if choice not in is_left_out] == [
            one for choice, one in enumerate(expected) if choice not in is_left_out
        ], f"{does} {which} after {num_steps} steps"


@pytest.mark.parametrize(("listener", "leaves"), [(0, (0,)), (0, (1, 2)), (1, (0,)), (2, (1,)), (0, (0, 1, 2, 3))])
def test_a_choice_may_leave_in_the_very_step_in_which_all_begin(roomy: Engine, listener: int, leaves: tuple[int, ...]) -> None:
    """A callback at the first token of one choice ends others, of which some have theirs already and some have not yet."""
    prompt, params = tiny.prompt(27, 2), replace(SAMPLED, n=4, max_tokens=8, logprobs=2, cache_prompt=False)
    expected = alone(roomy, prompt, params)
    group: Group | None = None

    def listen(handle: Handle, token_id: int) -> None:
        if handle.choice == listener and len(handle.token_ids) == 1:
            assert group is not None
            for choice in leaves:
                group.choices[choice].cancel()

    group = roomy.submit_group(prompt, params, on_token=listen)
    done = group.result()
    tiny.settle(roomy)
    assert [answer.finish_reason for answer in done] == ["cancelled" if choice in leaves else "length" for choice in range(4)]
    assert [len(done[choice].token_ids) for choice in leaves] == [int(choice <= listener) for choice in leaves]
    stay = [choice for choice in range(4) if choice not in leaves]
    assert [tiny.content(done[choice]) for choice in stay] == [expected[choice] for choice in stay]
    assert roomy.scheduler.snapshot().num_pages_free == 128


@pytest.mark.parametrize(("program", "num_forks"), [("prefill", 2), ("copy", 0)])
def test_a_step_that_breaks_off_as_all_begin_is_made_good(program: str, num_forks: int) -> None:
    """One that is back begins alone: nothing that it has was verified before the chunk in which it ends its prompt."""
    prompt, params = tiny.prompt(12, 2), replace(SAMPLED, n=3, max_tokens=6, logprobs=2)
    with tiny.engine() as made:
        expected = alone(made, prompt, params)
        broken, plain = getattr(made.parts.programs, program), getattr(made.parts.programs, program).run

        def fail_once(*arguments: Any) -> Any:
            object.__setattr__(broken, "run", plain)
            raise RuntimeError("no")

        object.__setattr__(broken, "run", fail_once)
        group = made.submit_group(prompt, params)
        assert list(map(tiny.content, group.result())) == expected
        assert (made.stats.num_faults, made.scheduler.counters.num_forks) == (1, num_forks)
