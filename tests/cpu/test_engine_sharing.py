"""Shared prompt pages on the engine: whoever finds them says what it would have said alone, to the last bit; groups of choices too."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.request import SamplingParams
from tests.cpu import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7)
SYSTEM = tiny.prompt(26, 5)  # six and a half pages of 4: six are shared


def questions(num: int = 6) -> list[list[int]]:
    """Prompts that begin alike and end in 1 to 11 tokens of their own."""
    return [SYSTEM + tiny.prompt(1 + 2 * index, 40 + index) for index in range(num)]


def wishes(num: int = 6) -> list[SamplingParams]:
    """Greedy, sampled and penalised ones in turn."""
    kinds = [GREEDY, SAMPLED, replace(SAMPLED, seed=2**63 + 3, top_p=0.9), replace(GREEDY, frequency_penalty=0.5, repetition_penalty=1.2)]
    return [kinds[index % 4] for index in range(num)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def computed(request: pytest.FixtureRequest) -> tuple[str, list[Any]]:
    """What each question is answered without any cache, one after another."""
    with tiny.engine(model__dtype=request.param, pool__prefix_cache=False, pool__tokens=512) as made:
        answers = tiny.alone(made, questions(), wishes())
        assert made.scheduler.counters.cached_tokens == 0
    return request.param, list(map(tiny.content, answers))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def roomy(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tiny.engine(model__dtype=request.param, pool__tokens=512) as made:
        yield made


def test_a_found_prefix_gives_the_bytes_of_a_computed_one(computed: tuple[str, list[Any]]) -> None:
    dtype, expected = computed
    with tiny.engine(model__dtype=dtype, pool__tokens=512) as made:
        first = tiny.alone(made, questions(), wishes())
        assert [answer.cached_tokens for answer in first] == [0, 24, 24, 24, 24, 24]
        again = tiny.alone(made, questions(), wishes())
        assert [answer.cached_tokens for answer in again] == [24, 28, 28, 32, 32, 36]
        together = tiny.run(made, questions(), wishes())
    assert list(map(tiny.content, first)) == expected
    assert list(map(tiny.content, again)) == expected
    assert list(map(tiny.content, together)) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"pool__tokens": 64},
        {"pool__tokens": 64, "transfer__mode": "hold", "debug__copy_delay_steps": 2},
        {"pool__tokens": 64, "scheduler__victim": "largest", "scheduler__keep_images": False},
        {"pool__tokens": 512, "debug__park_every": 1},
        {"pool__tokens": 80, "debug__park_every": 2, "debug__copy_delay_steps": 3},
        {"pool__tokens": 96, "debug__park_seed": 3, "transfer__mode": "hold"},
        {"pool__tokens": 72, "debug__planner": False},
    ],
    ids=lambda settings: ", ".join(f"{name.partition('__')[2]}={value}" for name, value in settings.items()),
)
def test_under_parks_and_evictions_every_answer_is_the_same(computed: tuple[str, list[Any]], settings: dict[str, Any]) -> None:
    dtype, expected = computed
    with tiny.engine(model__dtype=dtype, **settings) as made:
        for _ in range(2):
            assert list(map(tiny.content, tiny.run(made, questions(), wishes()))) == expected
        assert made.scheduler.counters.num_parks > 0
        assert made.scheduler.counters.cached_tokens > 0


def test_a_park_before_any_single_step_of_a_sharer_changes_nothing(roomy: Engine) -> None:
    prompt = SYSTEM + tiny.prompt(9, 3)
    expected = tiny.content(tiny.run(roomy, [prompt], replace(SAMPLED, cache_prompt=False))[0])
    num_parked = 0
    for k in range(1, 15):
        other = roomy.submit(SYSTEM + tiny.prompt(3, 90 + k), replace(GREEDY, max_tokens=30))
        tiny.step_to(roomy, other, 1)
        handle = roomy.submit(prompt, SAMPLED)
        for _ in range(k):
            roomy.step()
        num_parked += not handle.done and roomy.scheduler.park(handle.seq_id) == ""
        roomy.step()
        other.cancel()
        done = handle.result()
        assert (tiny.content(done), done.cached_tokens >= 24) == (expected, True), f"parked before step {k}"
    assert num_parked >= 11


def test_different_salts_share_nothing_and_neither_does_one_that_wants_no_cache() -> None:
    with tiny.engine(pool__tokens=512) as made:
        for params, found in [
            (replace(GREEDY, cache_salt="a"), 0),
            (replace(GREEDY, cache_salt="b"), 0),
            (replace(GREEDY, cache_prompt=False), 0),
            (GREEDY, 0),
            (replace(GREEDY, cache_prompt=False), 0),
            (replace(GREEDY, cache_salt="b"), 24),
            (GREEDY, 24),
        ]:
            assert tiny.run(made, [SYSTEM], params)[0].cached_tokens == found
        assert made.summary()["cached_tokens"] == 48
        assert made.summary()["pool_pages_cached_end"] == 3 * 6


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("num", [2, 3, 5])
def test_the_choices_of_a_group_are_the_answers_of_as_many_requests(roomy: Engine, num: int, cached: bool) -> None:
    prompt, params = SYSTEM + tiny.prompt(4, num), replace(SAMPLED, cache_prompt=cached)
    alone = []
    for choice in range(num):
        alone.append(roomy.submit(prompt, replace(params, cache_prompt=False), choice=choice).result())
        tiny.settle(roomy)
    group = roomy.submit_group(prompt, replace(params, n=num)).result()
    tiny.settle(roomy)
    assert list(map(tiny.content, group)) == list(map(tiny.content, alone))
    assert [answer.choice for answer in group] == list(range(num))
    assert len({tuple(answer.token_ids) for answer in group}) == num
    # The four rows begin and end together, so that a fifth finds what they shared only where it stays without them.
    assert [answer.cached_tokens for answer in group[1:]] == [28] * min(3, num - 1) + [28 if cached else 0] * (num - 4)


def test_choice_0_is_what_a_request_for_one_says(roomy: Engine) -> None:
    one = tiny.run(roomy, [SYSTEM], SAMPLED)[0]
    first, _ = roomy.generate([SYSTEM], replace(SAMPLED, n=2))
    assert tiny.content(first) == tiny.content(one)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("settings", [{}, {"debug__park_every": 1}, {"debug__park_every": 3, "transfer__mode": "hold"}])
def test_a_group_in_a_tight_pool_takes_turns_and_says_the_same(roomy: Engine, prefix_cache: bool, settings: dict[str, Any]) -> None:
    # 33 prompt tokens and 4 times 24 more: 129 cells of 64.
    prompt, params = tiny.prompt(33, 8), replace(SAMPLED, n=4, max_tokens=24)
    expected = list(map(tiny.content, roomy.generate([prompt], params)))
    with tiny.engine(model__dtype=roomy.config.model.dtype, pool__prefix_cache=prefix_cache, **settings) as made:
        assert list(map(tiny.content, made.generate([prompt], params))) == expected
        tiny.settle(made)
        assert made.scheduler.counters.num_parks > 0
        assert prefix_cache or made.scheduler.snapshot().num_pages_cached == 0


def test_a_group_counts_as_one_request() -> None:
    with tiny.engine(pool__tokens=512) as made:
        made.generate([SYSTEM], replace(GREEDY, n=3))
        stats = made.stats
        assert (stats.num_requests, stats.num_completed, stats.prompt_tokens, stats.generated_tokens) == (1, 1, 26, 36)
        assert (len(stats.ttft_s), len(stats.e2e_s)) == (1, 1)


def test_a_group_that_is_given_up_leaves_nothing_and_one_choice_can_leave_alone(roomy: Engine) -> None:
    expected = list(map(tiny.content, roomy.generate([SYSTEM], replace(SAMPLED, n=3))))
    num_cancelled = roomy.stats.num_cancelled
    group = roomy.submit_group(SYSTEM, replace(SAMPLED, n=3))
    roomy.step()
    roomy.step()
    group.choices[1].cancel()
    assert not group.done
    done = group.result()
    assert [answer.finish_reason for answer in done] == ["length", "cancelled", "length"]
    assert [tiny.content(done[0]), tiny.content(done[2])] == [expected[0], expected[2]]
    assert group.finish_reason == "cancelled"
    for num_steps in range(8):
        group = roomy.submit_group(SYSTEM, replace(SAMPLED, n=3, cache_prompt=False))
        for _ in range(num_steps):
            roomy.step()
        group.cancel()
        assert group.done
        tiny.settle(roomy)
        assert roomy.scheduler.snapshot().num_pages_free == 128
    assert roomy.stats.num_cancelled == num_cancelled + 9


def test_a_choice_that_fails_ends_alone(roomy: Engine) -> None:
    expected = list(map(tiny.content, roomy.generate([SYSTEM], replace(SAMPLED, n=3))))

    def listen(handle: Any, token_id: int) -> None:
        if handle.choice == 0 and len(handle.token_ids) == 3:
            raise ValueError("no more")

    failed = roomy.stats.num_failed
    group = roomy.submit_group(SYSTEM, replace(SAMPLED, n=3), on_token=listen)
    done = group.result()
    assert [answer.finish_reason for answer in done] == ["error", "length", "length"]
    assert list(map(tiny.content, done[1:])) == expected[1:]
    assert (group.finish_reason, roomy.stats.num_failed) == ("error", failed + 1)


@pytest.mark.parametrize(("n", "got"), [(0, "got 0, allowed: 1 to 128"), (129, "got 129, allowed: 1 to 128")])
def test_a_number_of_choices_out_of_range_is_refused(roomy: Engine, n: int, got: str) -> None:
    with pytest.raises(RequestError, match=f"^n: {got}$"):
        roomy.submit_group(SYSTEM, replace(GREEDY, n=n))
    with pytest.raises(RequestError, match=r"^n: got 1.5, allowed: a whole number from 1 to 128$"):
        roomy.submit_group(SYSTEM, replace(GREEDY, n=1.5))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^n: got 2, but submit takes requests for one answer; use submit_group$"):
        roomy.submit(SYSTEM, replace(GREEDY, n=2))


def test_a_group_fits_if_its_longest_choice_does() -> None:
    with tiny.engine() as made:
        group = made.submit_group(tiny.prompt(50), replace(GREEDY, n=3, max_tokens=None))
        assert [handle.will_truncate_at for handle in group.choices] == [15, 15, 15]
        assert [len(answer.token_ids) for answer in group.result()] == [15, 15, 15]
        with pytest.raises(RequestError, match=r"the prompt has 65 tokens, and pool.tokens allows 64"):
            made.submit_group(tiny.prompt(65), replace(GREEDY, n=3))
        tiny.settle(made)
