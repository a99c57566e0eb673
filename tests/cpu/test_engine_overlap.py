"""A step begins before the last one's tokens are read: no byte changes, and a token in flight is taken with its cell or not at all."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import jaxkv.step
from jaxkv.engine import Engine
from jaxkv.live import Handle
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from tests.cpu import tiny
from tests.cpu.test_engine_constraints import give_bytes, prompts, wishes
from tests.cpu.test_engine_faults import PLACES, Injected, break_once

LENGTHS = (5, 20, 8, 33, 13, 17)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Six that need twice the pool and more; nobody's next step is built from a token."""
    common = {"max_tokens": 14, "ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0.8, seed=7, **common),
        SamplingParams(temperature=1.2, seed=3, logit_bias={9: 4.0, 11: -100.0}, min_tokens=5, stop_token_ids=(40, 41), **common),
        SamplingParams(temperature=0.8, seed=2**63 + 11, top_k=20, top_p=0.9, min_p=0.01, prompt_logprobs=2, **common),
        SamplingParams(temperature=0.8, seed=7, **{**common, "max_tokens": 1}),
        SamplingParams(temperature=0.8, seed=7, **{**common, "max_tokens": 9}),
    ]
    return [tiny.prompt(length) for length in LENGTHS], params


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """Each alone, in the simple way."""
    with tiny.engine(scheduler__overlap=False) as made:
        return list(map(tiny.content, tiny.alone(made, *requests())))


@pytest.fixture(scope="module")
def made() -> Iterator[Engine]:
    with tiny.engine(scheduler__overlap=True) as engine:
        yield engine


def count_ahead(made: Engine) -> list[int]:
    """Grows by one with each step that leaves its tokens unread."""
    plain, steps = made.step, list[int]()

    def step() -> None:
        plain()
        steps.extend([1] * len(made.unread))

    made.step = step  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_is_dispatched_before_the_last_ones_tokens_are_read(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    events: list[str] = []
    with tiny.engine(scheduler__overlap=overlap) as made:

        def told(event: str, plain: Any) -> Any:
            def call(*arguments: Any) -> Any:
                events.append(event)
                return plain(*arguments)

            return call

        object.__setattr__(made.parts.programs.decode, "run", told("run", made.parts.programs.decode.run))
        monkeypatch.setattr(jaxkv.step, "Samples", told("read", jaxkv.step.Samples))
        tiny.run(made, [tiny.prompt(5)], SamplingParams(max_tokens=5, ignore_eos=True))
    simple = ["read", "run", "read", "run", "read", "run", "read", "run", "read"]
    assert events == (["run", "read", "run", "read", "run", "read", "run", "read", "read"] if overlap else simple)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transfer__mode": "hold"},
        {"transfer__mode": "staged", "debug__park_every": 2, "debug__copy_delay_steps": 1},
        {"debug__park_every": 1},
        {"debug__park_seed": 11, "transfer__chunks_per_step": 1},
        {"debug__planner": False},
        {"scheduler__host_budget_mib": 0},
        {"scheduler__host_budget_mib": 0, "debug__park_every": 2},
    ],
    ids=lambda settings: ", ".join(f"{name.partition('__')[2]}={value}" for name, value in settings.items()) or "tight",
)
def test_answers_are_those_of_each_request_alone(expected: list[Any], settings: dict[str, Any]) -> None:
    with tiny.engine(scheduler__overlap=True, **settings) as made:
        steps = count_ahead(made)
        assert list(map(tiny.content, tiny.run(made, *requests()))) == expected
        assert made.scheduler.counters.num_parks > 0 and len(steps) > 10


def test_forms_and_penalties_are_served_beside_others_in_the_simple_way(made: Engine) -> None:
    pytest.importorskip("llguidance")
    with tiny.engine(scheduler__overlap=False, pool__tokens=256) as simple:
        expected = [tiny.content(answer) for answer in tiny.run(give_bytes(simple), prompts(), wishes())]
    with tiny.engine(scheduler__overlap=True, debug__park_every=3) as tight:
        assert [tiny.content(answer) for answer in tiny.run(give_bytes(tight), prompts(), wishes())] == expected


def test_choices_that_begin_together_go_on_from_first_tokens_that_nobody_has_read(made: Engine) -> None:
    wish = SamplingParams(max_tokens=12, temperature=0.9, seed=5, n=3, ignore_eos=True, logprobs=1)
    forks = made.scheduler.counters.num_forks
    together = [tiny.content(answer) for answer in made.submit_group(tiny.prompt(21), wish).result()]
    tiny.settle(made)
    alone = [tiny.content(made.submit(tiny.prompt(21), replace(wish, n=1), choice=choice).result()) for choice in range(3)]
    assert together == alone and made.scheduler.counters.num_forks == forks + 2


@pytest.mark.parametrize("settings", [{}, {"debug__park_every": 1}, {"scheduler__host_budget_mib": 0, "debug__park_every": 2}])
def test_a_cancel_at_any_step_takes_no_token_more_and_changes_nobody(settings: dict[str, Any]) -> None:
    wish = SamplingParams(max_tokens=10, temperature=0.8, seed=4, ignore_eos=True)
    with tiny.engine(scheduler__overlap=True, **settings) as made:
        answers = [answer.token_ids for answer in tiny.alone(made, [tiny.prompt(9), tiny.prompt(17)], [wish] * 2)]
        for k in range(1, 18):
            leaving, staying = (made.submit(tiny.prompt(length), wish) for length in (9, 17))
            for _ in range(k):
                made.step()
            num_taken = len(leaving.token_ids)
            leaving.cancel()
            assert staying.result().token_ids == answers[1]
            assert leaving.token_ids == answers[0][:num_taken]
            tiny.settle(made)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_at_any_token_ends_there(overlap: bool) -> None:
    """The row that has stopped runs once more, beside one that goes on, and nobody hears of it. Token or text, with parks or without."""
    wish = SamplingParams(max_tokens=12, temperature=1.2, seed=6, ignore_eos=True, logprobs=1)
    with tiny.engine(scheduler__overlap=overlap, debug__park_every=5) as made:
        give_bytes(made)
        whole, other = tiny.alone(made, [tiny.prompt(9), tiny.prompt(14)], [wish] * 2)
        assert len(whole.text) > 4
        for k, token in enumerate(whole.token_ids):
            text = whole.text[k % len(whole.text) :][:2]
            stops = replace(wish, stop_token_ids=(token,)), replace(wish, stop=(text,))
            beside, *stopped = [made.submit(tiny.prompt(length), p) for length, p in ((14, wish), (9, stops[0]), (9, stops[1]))]
            by_id, by_text = (handle.result() for handle in stopped)
            assert (by_id.token_ids, by_id.finish_reason) == (whole.token_ids[: whole.token_ids.index(token) + 1], "stop")
            assert by_id.logprobs == (whole.logprobs or [])[: len(by_id.token_ids)]
            assert by_text.text == whole.text[: whole.text.find(text)]
            assert beside.result().token_ids == other.token_ids
            tiny.settle(made)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_breaks_a_step_off_is_made_good(expected: list[Any], place: str, late: bool) -> None:
    """The tokens that nobody had read are drawn again, to the byte; an answer that had its last one among them is not over."""
    with tiny.engine(scheduler__overlap=True, debug__park_every=3) as made:
        for after in (5, 9):
            has_happened = break_once(*PLACES[place](made), after=after, late=late)
            assert list(map(tiny.content, tiny.run(made, *requests()))) == expected
            assert has_happened()
        assert made.stats.num_failed == 0


@pytest.mark.parametrize("after", range(0, 16, 3))
def test_tokens_that_cannot_be_read_are_drawn_again(expected: list[Any], monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    with tiny.engine(scheduler__overlap=True) as made:
        monkeypatch.setattr(jaxkv.step, "Samples", jaxkv.step.Samples)  # to be put back
        has_happened = break_once(jaxkv.step, "Samples", after=after)
        assert list(map(tiny.content, tiny.run(made, *requests()))) == expected
        assert has_happened() and (made.stats.num_faults, made.stats.num_failed) == (1, 0)


def test_a_last_token_that_cannot_be_read_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the scheduler the sequence is over as soon as the token is drawn."""
    wishes = [SamplingParams(max_tokens=num, temperature=0, ignore_eos=True) for num in (4, 9)]
    with tiny.engine(scheduler__overlap=True) as made:
        expected = list(map(tiny.content, tiny.alone(made, [tiny.prompt(5), tiny.prompt(7)], wishes)))
        first, second = (made.submit(tiny.prompt(length), wish) for length, wish in zip((5, 7), wishes, strict=True))
        while made.scheduler.state(first.seq_id) is not State.FINISHED:
            made.step()
        assert (len(first.token_ids), first.done) == (3, False)
        monkeypatch.setattr(jaxkv.step, "Samples", jaxkv.step.Samples)  # to be put back
        break_once(jaxkv.step, "Samples", after=0)
        made.step()
        assert made.scheduler.state(first.seq_id) is State.PARKED and len(first.token_ids) == 3
        assert [tiny.content(first.result()), tiny.content(second.result())] == expected


@pytest.mark.parametrize("place", ["plan", "commit", "rows", "decode", "poll"])
def test_an_interrupt_comes_out_and_the_engine_goes_on(expected: list[Any], place: str) -> None:
    with tiny.engine(scheduler__overlap=True) as made:
        break_once(*PLACES[place](made), after=9, error=KeyboardInterrupt)
        handles = [made.submit(prompt, wish) for prompt, wish in zip(*requests(), strict=True)]
        with pytest.raises(KeyboardInterrupt):
            tiny.settle(made)
        assert [tiny.content(handle.result()) for handle in handles] == expected


def test_a_callback_may_cancel_another_whose_token_is_in_flight(made: Engine) -> None:
    wish = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    expected = [answer.token_ids for answer in tiny.alone(made, [tiny.prompt(5), tiny.prompt(7)], [wish] * 2)]
    victim = made.submit(tiny.prompt(7), wish)

    def on_token(handle: Handle, _: int) -> None:
        if len(handle.token_ids) == 4:
            victim.cancel()

    assert made.submit(tiny.prompt(5), wish, on_token=on_token).result().token_ids == expected[0]
    assert victim.completion is not None and victim.completion.finish_reason == "cancelled"
    assert victim.token_ids == expected[1][: len(victim.token_ids)]
    tiny.settle(made)


def test_an_error_in_taking_a_token_ends_its_own_request_alone(made: Engine) -> None:
    wish = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    expected = [answer.token_ids for answer in tiny.alone(made, [tiny.prompt(5), tiny.prompt(7)], [wish] * 2)]

    def on_token(handle: Handle, _: int) -> None:
        if len(handle.token_ids) == 4:
            raise Injected("mine")

    broken, other = made.submit(tiny.prompt(7), wish, on_token=on_token), made.submit(tiny.prompt(5), wish)
    assert other.result().token_ids == expected[0]
    assert broken.result().error == "the token could not be taken: Injected: mine"
    assert broken.token_ids == expected[1][:4]
    tiny.settle(made)
