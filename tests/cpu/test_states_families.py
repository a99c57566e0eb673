"""The families with recurrent layers on the real engine, in both precisions: nothing that happens to a sequence changes its bytes."""

from collections.abc import Iterator
from typing import Any

import pytest

from jaxkv.engine import Engine
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES
from tests.cpu.test_models_families import RECURRENT
from tests.cpu.test_states import RULES, requests, reset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[f"{name} {dtype}" for name in RECURRENT for dtype in ("float32", "bfloat16")])
def made(request: pytest.FixtureRequest) -> Iterator[Engine]:
    name, dtype = request.param.split()
    with tiny.engine(model__path=str(FIXTURES / name), model__dtype=dtype) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(made: Engine) -> list[Any]:
    return list(map(tiny.content, tiny.alone(made, *requests())))


@pytest.mark.parametrize(("changes", "least_parks"), RULES)
def test_every_request_equals_itself_alone(made: Engine, expected: list[Any], changes: dict[str, Any], least_parks: int) -> None:
    reset(made, **changes)
    assert list(map(tiny.content, tiny.run(made, *requests()))) == expected
    assert made.scheduler.counters.num_parks >= least_parks // 2
