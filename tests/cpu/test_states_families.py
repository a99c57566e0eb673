"""The families with recurrent layers on the real engine, in both precisions: nothing that happens to a sequence changes its bytes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxkv.engine import Engine
from tests.cpu import tiny
from tests.cpu.checkpoints import FIXTURES
from tests.cpu.test_models_families import RECURRENT
from tests.cpu.test_states import RULES, requests

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
    tiny.renew(made, **changes)
    assert list(map(tiny.content, tiny.run(made, *requests()))) == expected
    assert made.scheduler.counters.num_parks >= least_parks // 2


MESH = """
from dataclasses import replace
from jaxkv.request import SamplingParams
from tests.cpu import tiny
from tests.cpu.test_states import requests

ENGINE = dict(model__path={path!r}, mesh__tensor=2)
with tiny.engine(**ENGINE) as made:
    parts = made.parts
    for arrays, layer in zip(parts.pool.states, parts.layout.states, strict=True):
        for array, one in zip(arrays, layer, strict=True):
            shape = [parts.layout.rows, *one.shape]
            if one.split is not None:
                shape[1 + one.split] //= 2
            assert array.addressable_shards[0].data.shape == tuple(shape), (array.shape, shape)
    assert any(one.split is not None for layer in parts.layout.states for one in layer)
    alone = [tiny.content(c) for c in tiny.alone(made, *requests())]
    assert [tiny.content(c) for c in tiny.run(made, *requests())] == alone
    choices = SamplingParams(n=5, max_tokens=9, temperature=0.9, seed=7, ignore_eos=True, logprobs=2)
    together = made.submit_group(tiny.prompt(21), choices).result()
    each = [made.submit(tiny.prompt(21), replace(choices, n=1), choice=choice).result() for choice in range(5)]
    assert list(map(tiny.content, together)) == list(map(tiny.content, each))
    assert made.scheduler.counters.num_forks == 4
for fields in (dict(debug__park_every=3), dict(debug__park_every=3, transfer__mode="staged")):
    with tiny.engine(**ENGINE, **fields) as made:
        assert [tiny.content(c) for c in tiny.run(made, *requests())] == alone
        assert made.scheduler.counters.num_parks_copied > 30
print("exact")
"""


@pytest.mark.parametrize("name", ["qwen3_5", "mamba", "mamba2"])
def test_two_devices_split_the_states_as_the_model_says_and_park_exactly(run_python: Callable[..., str], name: str) -> None:
    assert run_python(MESH.format(path=str(FIXTURES / name)), devices=2) == "exact\n"
