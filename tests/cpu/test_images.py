"""Images that stay in host memory, on the real engine: fewer bytes move, and no byte of an answer changes."""

from dataclasses import replace
from typing import Any

import pytest

from jaxkv.request import SamplingParams
from jaxkv.scheduler import Scheduler
from tests.cpu import tiny

PROMPTS = [tiny.prompt(n, seed=n) for n in (21, 9, 30)]
PARAMS = [SamplingParams(max_tokens=40, temperature=0.8, seed=i, logprobs=2, ignore_eos=True) for i in range(3)]
CHUNK = 2 * 4 * 3 * 2 * 2 * 16 * 4  # pages x tokens x layers x (K, V) x kv heads x head dim x float32


def crowd(**fields: Any) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    with tiny.engine(transfer__chunk_pages=2, **fields) as made:
        found = [tiny.content(answer) for answer in tiny.run(made, PROMPTS, PARAMS)]
        assert made.parts.transfer.stored == {}
        return found, made.summary()


@pytest.fixture(scope="module")
def never_parked() -> list[tuple[Any, ...]]:
    return crowd(pool__tokens=512)[0]


@pytest.mark.parametrize("mode", ["direct", "staged", "hold"])
def test_what_is_kept_is_not_copied_again_and_every_answer_is_the_same(never_parked: list[tuple[Any, ...]], mode: str) -> None:
    fields = {"debug__park_every": 3, "pool__tokens": 512, "transfer__mode": mode, "pool__prefix_cache": False}
    kept, with_kept = crowd(**fields)
    copied, without = crowd(scheduler__keep_images=False, **fields)
    assert kept == copied == never_parked
    assert with_kept["num_parks"] == without["num_parks"] > 30
    assert with_kept["bytes_to_device"] == without["bytes_to_device"] == without["bytes_to_host"]
    assert with_kept["bytes_to_host"] == without["bytes_to_host"] - with_kept["kept_bytes_saved"]
    assert with_kept["kept_bytes_saved"] == with_kept["num_kept_hits"] * CHUNK > without["bytes_to_host"] // 2
    assert without["num_kept_hits"] == 0


def test_a_budget_of_little_more_than_one_image_holds_and_changes_no_byte(never_parked: list[tuple[Any, ...]]) -> None:
    with tiny.engine(transfer__chunk_pages=2, pool__tokens=512, debug__park_every=3) as made:
        budget = 11 * CHUNK
        made.scheduler = Scheduler(replace(made.scheduler.config, host_budget_bytes=budget), on_drop=made.parts.transfer.discard)
        assert [tiny.content(answer) for answer in tiny.run(made, PROMPTS, PARAMS)] == never_parked
        counters = made.scheduler.counters
        assert counters.num_kept_hits > 0
        assert counters.host_bytes_peak == budget


def test_images_kept_under_pressure_change_no_byte(never_parked: list[tuple[Any, ...]]) -> None:
    found, summary = crowd(pool__tokens=80)
    assert found == never_parked
    assert summary["num_parks_pressure"] > 0


def test_one_whose_kept_image_is_damaged_is_computed_again_to_the_byte(never_parked: list[tuple[Any, ...]]) -> None:
    with tiny.engine(transfer__chunk_pages=2, pool__tokens=512, pool__prefix_cache=False, debug__copy_delay_steps=1) as made:
        handles = [made.submit(prompt, wish) for prompt, wish in zip(PROMPTS, PARAMS, strict=True)]
        for num_tokens in (3, 8):
            tiny.step_to(made, handles[0], num_tokens)
            assert made.scheduler.park(0) == ""
            while not tiny.image(made, 0):
                made.step()
        first = tiny.image(made, 0)[0]
        first.checksum ^= 1  # copied by the first park, read by the second return
        assert [tiny.content(handle.result()) for handle in handles] == never_parked
        assert made.summary()["num_replayed_tokens"] > 0
