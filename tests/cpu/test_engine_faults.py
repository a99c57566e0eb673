"""A raise in any part of a step: the engine goes on, everybody's bytes are those of the request alone, all is given back."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jaxkv.step
from jaxkv.engine import Engine
from jaxkv.errors import JaxkvError
from jaxkv.live import Handle
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from tests.cpu import tiny
from tests.cpu.test_engine_exact import requests


class Injected(Exception):
    """What nobody expects."""


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    prompts, params = requests()
    with tiny.engine() as made:
        return list(map(tiny.content, tiny.alone(made, prompts, params)))


@pytest.fixture
def made() -> Iterator[Engine]:
    """Parked and restored all the time, so that every part of a step has something to do. That nothing leaks is checked at the end."""
    with tiny.engine(debug__park_every=3) as engine:
        yield engine


def break_once(owner: Any, name: str, *, after: int = 4, error: type[BaseException] = Injected, late: bool = False) -> Callable[[], bool]:
    """Make one call raise, after so many that do not; `late`: once it has done its work. Says whether it has happened."""
    plain, calls = getattr(owner, name), 0

    def broken(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 != after:
            return plain(*arguments, **named)
        if late:
            plain(*arguments, **named)
        raise error("injected")

    try:
        setattr(owner, name, broken)
    except AttributeError:  # frozen
        object.__setattr__(owner, name, broken)
    return lambda: calls > after


def run_all(made: Engine) -> list[Any]:
    prompts, params = requests()
    return list(map(tiny.content, tiny.run(made, prompts, params)))


PLACES: dict[str, Callable[[Engine], tuple[Any, str]]] = {
    "poll": lambda made: (made.parts.transfer, "poll"),
    "plan": lambda made: (made.scheduler, "plan"),
    "commit": lambda made: (made.scheduler, "commit"),
    "rows": lambda made: (made.rows, "decode_batch"),
    "chunk": lambda made: (made.rows, "prefill_batch"),
    "tables": lambda made: (made.rows, "update"),
    "prefill": lambda made: (made.parts.programs.prefill, "run"),
    "decode": lambda made: (made.parts.programs.decode, "run"),
    "verify": lambda made: (made.parts.transfer, "verify"),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_whatever_breaks_a_step_off_is_made_good(made: Engine, expected: list[Any], place: str, late: bool) -> None:
    """Before it has done anything, and after: a program that raises late has consumed the pool, which it was given for good."""
    owner, name = PLACES[place](made)
    has_happened = break_once(owner, name, after=9, late=late)
    assert run_all(made) == expected
    assert has_happened()
    summary = made.summary()
    assert (summary["num_faults"], summary["num_failed"], summary["num_completed"]) == (1, 0, 6)
    assert summary["num_replayed_tokens"] > 0


@pytest.mark.parametrize("name", ["_gather", "_scatter"])
def test_a_copy_that_raises_is_its_own_sequences_trouble(made: Engine, expected: list[Any], name: str) -> None:
    has_happened = break_once(made.parts.pool, name)
    assert run_all(made) == expected
    assert has_happened() and (made.stats.num_faults, made.stats.num_losses) == (0, 1)


def test_a_scatter_that_consumed_the_pool_costs_everybody_a_replay_and_nobody_a_byte(made: Engine, expected: list[Any]) -> None:
    has_happened = break_once(made.parts.pool, "_scatter", late=True)
    assert run_all(made) == expected
    assert has_happened() and made.stats.num_failed == 0


def test_a_copy_to_the_device_that_raises_is_its_own_sequences_trouble(made: Engine, expected: list[Any]) -> None:
    plain, calls = made.parts.transfer.restore, 0

    def restore(chunk: Any, step: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Injected
        plain(chunk, step)

    made.parts.transfer.restore = restore  # type: ignore[method-assign]
    assert run_all(made) == expected
    assert (calls > 3, made.stats.num_losses) == (True, 1)


def test_tokens_that_cannot_be_read_are_drawn_again(made: Engine, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device could not compute raises where its result is read; the pool that came with it is not to be trusted either."""
    plain, calls = jaxkv.step.Samples, 0

    def samples(sampled: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 7:
            raise Injected("out of memory")
        return plain(sampled)

    monkeypatch.setattr(jaxkv.step, "Samples", samples)
    assert run_all(made) == expected
    assert made.stats.num_faults == 1


def test_what_a_callback_raises_ends_its_own_request_alone(made: Engine, expected: list[Any]) -> None:
    prompts, params = requests()

    def on_token(handle: Handle, _: int) -> None:
        if len(handle.token_ids) == 5:
            raise Injected("mine")

    handles = [made.submit(p, q, on_token=on_token if i == 2 else None) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    answers = [handle.result() for handle in handles]
    assert answers.pop(2).error == "the token could not be taken: Injected: mine"
    assert list(map(tiny.content, answers)) == [content for i, content in enumerate(expected) if i != 2]
    assert (made.stats.num_faults, made.stats.num_failed) == (0, 1)


def test_a_request_with_which_every_step_breaks_off_ends_and_the_others_complete(made: Engine, expected: list[Any]) -> None:
    plain = made.rows._seat

    def seat(row: int, sequence: Any) -> None:
        if sequence.seq_id == 1 and sequence.num_generated == 4:
            raise Injected("bad knobs")
        plain(row, sequence)

    made.rows._seat = seat  # type: ignore[method-assign]
    answers = run_all(made)
    assert answers[1][3:] == ("error", 20, "a step broke off: Injected: bad knobs")
    assert answers[1][0] == expected[1][0][:4]
    assert [*answers[:1], *answers[2:]] == [*expected[:1], *expected[2:]]
    assert (made.stats.num_faults, made.stats.num_failed) == (2, 1)


def test_a_program_that_never_works_ends_those_it_is_for_and_the_next_request_is_served(made: Engine, expected: list[Any]) -> None:
    prompts, params = requests()
    plain = made.parts.programs.decode.run

    def broken(*_: Any) -> Any:
        raise Injected("no device")

    object.__setattr__(made.parts.programs.decode, "run", broken)
    answers = tiny.run(made, prompts, params)
    assert {answer.error for answer in answers} == {"a step broke off: Injected: no device"}
    object.__setattr__(made.parts.programs.decode, "run", plain)
    assert run_all(made) == expected


def test_the_parked_keep_their_images_through_a_fault() -> None:
    wish = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with tiny.engine(scheduler__rows=2, pool__tokens=64) as made:
        prompts = [tiny.prompt(24, seed) for seed in range(2)]
        expected = list(map(tiny.content, tiny.alone(made, prompts, [wish] * 2)))
        first, second = (made.submit(prompt, wish) for prompt in prompts)
        while made.scheduler.state(second.seq_id) is not State.PARKED:
            made.step()
        image, stored = made.scheduler.image(second.seq_id), tiny.image(made, second.seq_id)
        assert image
        break_once(made.parts.programs.decode, "run", after=0, late=True)
        made.step()
        assert made.scheduler.image(second.seq_id) == image and tiny.image(made, second.seq_id) == stored
        assert made.scheduler.state(first.seq_id) is State.PARKED and made.scheduler.image(first.seq_id) == ()
        assert [tiny.content(first.result()), tiny.content(second.result())] == expected
        assert (first.result().num_parks, second.result().num_parks) == (1, 1)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", ["plan", "commit", "rows", "decode", "poll"])
def test_an_interrupt_comes_out_and_the_engine_goes_on(made: Engine, expected: list[Any], place: str, late: bool) -> None:
    prompts, params = requests()
    owner, name = PLACES[place](made)
    break_once(owner, name, after=9, late=late, error=KeyboardInterrupt)
    handles = [made.submit(prompt, wish) for prompt, wish in zip(prompts, params, strict=True)]
    with pytest.raises(KeyboardInterrupt):
        tiny.settle(made)
    assert [tiny.content(handle.result()) for handle in handles] == expected


def test_a_fault_that_cannot_be_made_good_says_to_close_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Engine(tiny.config())
    handle = made.submit(tiny.prompt(8), SamplingParams(max_tokens=4))
    break_once(made.parts.programs.prefill, "run", after=0, late=True)
    monkeypatch.setattr("jaxkv.recover.allocate", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        made.step()
    with pytest.raises(JaxkvError, match=r"a step broke off \(Fault\) and could not be made good; close the engine and make a new one"):
        made.step()
    made.close()
    assert handle.completion is not None and handle.completion.finish_reason == "cancelled"


def test_a_fault_is_told_by_its_kind_and_place_and_never_in_its_words(made: Engine, caplog: pytest.LogCaptureFixture) -> None:
    break_once(made.scheduler, "plan", after=2)
    run_all(made)
    (line,) = [record.getMessage() for record in caplog.records if "fault" in record.getMessage()]
    assert "Injected in test_engine_faults.py, line " in line and "injected" not in line.replace("Injected", "")


def test_a_new_pool_is_finite() -> None:
    with tiny.engine() as made:
        break_once(made.parts.programs.prefill, "run", after=0, late=True)
        handle = made.submit(tiny.prompt(8), SamplingParams(max_tokens=2, ignore_eos=True))
        made.step()
        assert all(not np.asarray(array).any() for layer in made.parts.pool.arrays for array in layer)
        handle.result()
