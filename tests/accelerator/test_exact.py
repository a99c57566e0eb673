"""What the CPU was measured to keep to the last bit, measured again on a GPU or TPU: `make test-accelerator`.

A row that fails here is a promise that this backend breaks: it must be mended, or said in the start-up banner.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.pool import pool_sharding
from jaxkv.request import SamplingParams
from jaxkv.startup import make_mesh
from jaxkv.transfer import probe_host_memory
from tests import exactness
from tests.cpu import tiny

DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=DTYPES)
def roomy(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with tiny.engine(model__dtype=request.param, **exactness.ROOMY) as made:
        assert made.parts.mesh.devices.flat[0].platform != "cpu"
        assert made.parts.layout.storage == request.param  # cells of their own kind, not words
        yield made


@pytest.fixture(scope="module", params=DTYPES)
def expected(request: pytest.FixtureRequest) -> tuple[str, list[tuple[Any, ...]]]:
    with tiny.engine(model__dtype=request.param, **exactness.ROOMY) as made:
        return request.param, exactness.answers_alone(made)


def test_neighbours_and_row_change_nothing(roomy: Engine) -> None:
    exactness.neighbours_and_row_change_nothing(roomy)


def test_placement_changes_nothing(roomy: Engine) -> None:
    exactness.placement_changes_nothing(roomy)


def test_a_park_at_any_step_changes_nothing(roomy: Engine) -> None:
    exactness.a_park_at_any_step_changes_nothing(roomy)


def test_images_are_pinned_and_polls_do_not_wait(roomy: Engine) -> None:
    exactness.images_are_pinned_and_polls_do_not_wait(roomy)


def test_the_start_up_probe_finds_pinned_memory_and_a_poll_that_does_not_wait() -> None:
    found = probe_host_memory(pool_sharding(make_mesh(1)))
    assert (found.kind, found.why_blocking) == ("pinned_host", None)


def test_a_poll_comes_back_long_before_a_large_copy_does() -> None:
    """256 MiB to the host take milliseconds, a poll takes microseconds."""
    device = pool_sharding(make_mesh(1))
    source = jax.block_until_ready(jax.device_put(np.ones((1, 1, 2**13, 2**13), np.float32), device))
    copy = jax.device_put(source, device.with_memory_kind("pinned_host"))
    start = time.perf_counter()
    ready = copy.is_ready()
    polled_s = time.perf_counter() - start
    copy.block_until_ready()
    took_s = time.perf_counter() - start
    assert not ready
    assert polled_s < 0.1 * took_s


@pytest.mark.parametrize("delay", [0, 1, 7])
@pytest.mark.parametrize("mode", ["staged", "hold"])
def test_many_parks_change_nothing(expected: tuple[str, list[tuple[Any, ...]]], mode: str, delay: int) -> None:
    dtype, answers = expected
    fields = {"model__dtype": dtype, "transfer__mode": mode, "debug__copy_delay_steps": delay}
    exactness.many_parks_change_nothing(answers, debug__park_every=2, **fields)
    exactness.many_parks_change_nothing(answers, pool__tokens=40, **fields)


def test_blocking_copies_change_nothing(expected: tuple[str, list[tuple[Any, ...]]]) -> None:
    dtype, answers = expected
    exactness.many_parks_change_nothing(answers, model__dtype=dtype, debug__park_every=3, transfer__blocking=True)


def test_chunk_cuts_change_nothing(expected: tuple[str, list[tuple[Any, ...]]]) -> None:
    dtype, answers = expected
    exactness.chunk_cuts_change_nothing(answers, model__dtype=dtype, **exactness.ROOMY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restart_changes_nothing(dtype: str) -> None:
    exactness.a_restart_changes_nothing(model__dtype=dtype)


def test_the_fixtures_greedy_tokens_are_the_references_in_float32() -> None:
    reference = np.load(tiny.LLAMA / "reference.npz")
    with tiny.engine(model__dtype="float32", **exactness.ROOMY) as made:
        for i in (0, 1):
            params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
            found = tiny.run(made, [reference[f"input_ids_{i}"].tolist()], params)
            assert found[0].token_ids == reference[f"greedy_{i}"].tolist()


def test_whole_runs_compile_nothing_after_the_warm_up(roomy: Engine) -> None:
    prompts, params = (list(x) for x in zip(*[*exactness.subjects(), *exactness.crowd(5, 3)], strict=True))
    tiny.run(roomy, prompts, params)
    assert roomy.num_compiles_after_warmup == 0


@pytest.mark.weights
def test_smollm2_through_a_pool_that_is_too_small_answers_as_an_ample_one(smollm2: object) -> None:
    """The real weights in the checkpoint's own precision: four prompts of 100 tokens, 32 tokens each, half of the pool they need."""
    prompts = [np.random.default_rng(i).integers(3, 40_000, 100).tolist() for i in range(4)]
    params = [SamplingParams(max_tokens=32, temperature=0.8 * (i % 2), seed=i, ignore_eos=True, logprobs=2) for i in range(4)]
    seen = []
    for tokens in (1024, 272):
        fields = {"model__path": str(smollm2), "model__max_len": 512, "pool__tokens": tokens, "pool__page_size": 16}
        with tiny.engine(**fields, scheduler__prefill_chunk=64) as made:
            seen.append([tiny.content(completion) for completion in tiny.run(made, prompts, params)])
            assert (made.scheduler.counters.num_parks > 0) == (tokens == 272)
    assert seen[0] == seen[1]
