"""Speculation where sequences have a state: after a step it is that behind the last token that counts, whatever was guessed behind it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.request import Completion
from tests.cpu import averages, tiny
from tests.cpu.checkpoints import FIXTURES
from tests.cpu.test_models_families import RECURRENT
from tests.cpu.test_speculate import NUM_DRAFT, Oracle, answers_of, at_random, contents, requests, reset

FAMILIES = [f"{name} {dtype}" for name in RECURRENT for dtype in ("float32", "bfloat16")]
MODELS = ["hybrid float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("pure bfloat16", *FAMILIES))]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    name, dtype = request.param.split()
    with averages.family():
        shapes = {"hybrid": (3, (0, 2)), "pure": (2, (0, 1))}
        folder = averages.write_checkpoint(tmp_path_factory.mktemp(name), *shapes[name]) if name in shapes else FIXTURES / name
        with tiny.engine(model__path=str(folder), model__dtype=dtype, speculate__kind="ngram", speculate__num_draft=NUM_DRAFT) as engine:
            yield engine


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Completion]:
    reset(made, rejects=True)
    return tiny.alone(made, *requests())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="crowded"),
        pytest.param({"park_every": 1}, id="parked at every step"),
        pytest.param({"park_every": 3, "host_budget_bytes": 0}, id="computed again every 3 tokens"),
    ],
)
@pytest.mark.parametrize(
    "spoils",
    [
        pytest.param(lambda seq_id, place: False, id="all true", marks=pytest.mark.slow),
        pytest.param(at_random, id="some true"),
        pytest.param(lambda seq_id, place: True, id="none true", marks=pytest.mark.slow),
    ],
)
def test_every_request_equals_itself_alone_without_a_guess(
    made: Engine, expected: list[Completion], changes: dict[str, Any], spoils: Callable[[int, int], bool]
) -> None:
    reset(made, Oracle(answers_of(expected), spoils), **changes)
    assert contents(tiny.run(made, *requests())) == contents(expected)


def test_the_state_after_a_step_does_not_depend_on_what_was_guessed(made: Engine, expected: list[Completion]) -> None:
    """At equal numbers of tokens, whatever came true on the way there, the slot's bytes are the same."""
    prompts, params = requests()
    by_length: dict[int, list[list[np.ndarray]]] = {}
    for spoils in (lambda seq_id, place: True, at_random, lambda seq_id, place: False, lambda seq_id, place: place % 3 == 0):
        reset(made, Oracle(answers_of(expected), spoils))
        handle = made.submit(prompts[3], params[3])
        while not handle.done:
            made.step()
            if handle.token_ids and not handle.done:
                slots = [np.array(array)[0] for layer in made.parts.pool.states for array in layer]
                by_length.setdefault(len(handle.token_ids), []).append(slots)
        tiny.settle(made)
    assert sum(len(found) > 1 for found in by_length.values()) >= 10
    for first, *others in by_length.values():
        assert all(np.array_equal(one, two) for other in others for one, two in zip(first, other, strict=True))
