"""The checks that tests/accelerator runs on a device, on the CPU: what they ask is what the CPU keeps."""

from collections.abc import Iterator

import pytest

from jaxkv.engine import Engine
from tests import exactness
from tests.cpu import tiny


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def roomy(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tiny.engine(model__dtype=request.param, **exactness.ROOMY) as made:
        yield made


def test_neighbours_and_row_change_nothing(roomy: Engine) -> None:
    exactness.neighbours_and_row_change_nothing(roomy)


def test_placement_changes_nothing(roomy: Engine) -> None:
    exactness.placement_changes_nothing(roomy)


def test_a_park_at_any_step_changes_nothing(roomy: Engine) -> None:
    exactness.a_park_at_any_step_changes_nothing(roomy, every=3)  # every single one: test_engine_exact


def test_images_are_pinned_and_polls_do_not_wait(roomy: Engine) -> None:
    exactness.images_are_pinned_and_polls_do_not_wait(roomy)


@pytest.mark.parametrize("mode", ["direct", "staged", "hold"])
def test_many_parks_change_nothing(roomy: Engine, mode: str) -> None:
    dtype, expected = roomy.config.model.dtype, exactness.answers_alone(roomy)
    exactness.many_parks_change_nothing(expected, model__dtype=dtype, transfer__mode=mode, debug__park_every=2, **exactness.ROOMY)


def test_chunk_cuts_change_nothing(roomy: Engine) -> None:
    exactness.chunk_cuts_change_nothing(exactness.answers_alone(roomy), model__dtype=roomy.config.model.dtype, **exactness.ROOMY)


def test_a_restart_changes_nothing(roomy: Engine) -> None:
    exactness.a_restart_changes_nothing(model__dtype=roomy.config.model.dtype, **exactness.ROOMY)
