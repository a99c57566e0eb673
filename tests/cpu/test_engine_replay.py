"""A sequence without an image is computed again to the byte: logprobs, text, usage and finish reason, in both precisions."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.models.tokenizer import ByteTokenizer
from jaxkv.request import SamplingParams
from jaxkv.scheduler import State
from tests.cpu import tiny
from tests.cpu.test_engine_exact import requests


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bare(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine with no host memory for images."""
    with tiny.engine(model__dtype=request.param, scheduler__host_budget_mib=0) as made:
        yield made


def step_until(made: Engine, seq_id: int, state: State) -> None:
    while made.scheduler.state(seq_id) is not state:
        made.step()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_replay_at_any_single_step_changes_nothing(bare: Engine, which: int) -> None:
    """One request (5, 33 or 8 prompt tokens, 24 generated; sampled, with top_k and top_p, with penalties), dropped once before step k."""
    prompts, params = requests()
    subject, wish = [(prompts[0], params[1]), (prompts[3], params[3]), (prompts[2], params[2])][which]
    expected = tiny.content(tiny.run(bare, [subject], [wish])[0])
    num_dropped_at = 0
    for k in range(1, 29):
        neighbour = bare.submit(tiny.prompt(6, k), SamplingParams(max_tokens=20, temperature=1.0, seed=k, ignore_eos=True))
        handle = bare.submit(subject, wish)
        for _ in range(k):
            bare.step()
        num_dropped_at += bare.scheduler.park(handle.seq_id) == "" if not handle.done else 0
        done = handle.result()
        assert tiny.content(done) == expected, f"dropped before step {k}"
        neighbour.cancel()
        tiny.settle(bare)
    assert num_dropped_at >= 24
    counters = bare.scheduler.counters
    assert counters.num_parks_dropped >= num_dropped_at - 1 and counters.num_replayed_tokens > 24 * 5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_mix_without_host_memory_equals_each_request_alone(bare: Engine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [tiny.prompt(int(length), seed) for length in rng.integers(1, 40, 8)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(12, 25)), temperature=float(rng.choice([0, 0.8])), seed=i, logprobs=2, ignore_eos=True,
            frequency_penalty=float(rng.choice([0, 0.5])), stop_token_ids=(i,), top_k=5 * i,
        )
        for i in range(8)
    ]  # fmt: skip
    alone = tiny.alone(bare, prompts, params)
    before, bytes_before = bare.scheduler.counters.num_parks_dropped, bare.parts.transfer.stats.bytes_to_host
    crowded = tiny.run(bare, prompts, params)
    assert list(map(tiny.content, crowded)) == list(map(tiny.content, alone))
    assert bare.scheduler.counters.num_parks_dropped > before and bare.parts.transfer.stats.bytes_to_host == bytes_before


def test_nothing_is_emitted_and_nothing_counted_twice_while_a_sequence_is_replayed(bare: Engine) -> None:
    """Prompt 3, parked after 50 generated: 3 + 50 - 1 cells to compute again, and the next token is the 51st."""
    wish = SamplingParams(max_tokens=60, temperature=0.8, seed=5, logprobs=2, ignore_eos=True)
    expected = tiny.content(tiny.run(bare, [tiny.prompt(3)], [wish])[0])
    seen: list[int] = []
    handle = bare.submit(tiny.prompt(3), wish, on_token=lambda _, token: seen.append(token))
    tiny.step_to(bare, handle, 50)
    before = bare.summary()
    assert bare.scheduler.park(handle.seq_id) == ""
    step_until(bare, handle.seq_id, State.REPLAYING)
    assert bare.status().sequences[0].state == handle.stats.state == "replaying"
    step_until(bare, handle.seq_id, State.DECODING)
    after = bare.summary()
    assert len(seen) == len(handle.token_ids) == 50
    assert after["num_replayed_tokens"] - before["num_replayed_tokens"] == 52
    assert after["num_parks_dropped"] - before["num_parks_dropped"] == 1
    assert [after[name] for name in ("generated_tokens", "prompt_tokens")] == [
        before[name] for name in ("generated_tokens", "prompt_tokens")
    ]
    bare.step()
    assert len(seen) == 51
    assert tiny.content(handle.result()) == expected and seen == expected[0]


def test_bystanders_of_a_replay_change_nothing_and_lose_no_step(bare: Engine) -> None:
    prompts, params = requests()
    expected = tiny.content(tiny.run(bare, [prompts[2]], [params[2]])[0])
    other = bare.submit(prompts[1], params[1])
    tiny.step_to(bare, other, 10)
    handle = bare.submit(prompts[2], params[2])
    tiny.step_to(bare, handle, 3)
    bare.scheduler.park(other.seq_id)
    tokens = len(handle.token_ids)
    for step in range(1, 9):
        bare.step()
        assert len(handle.token_ids) == tokens + step
    assert bare.scheduler.state(other.seq_id) is State.REPLAYING
    assert tiny.content(handle.result()) == expected
    other.cancel()
    tiny.settle(bare)


def test_with_a_budget_for_one_image_the_second_is_replayed_and_the_budget_holds() -> None:
    """Images take 0.75 MiB each, padding included, and 1 MiB is allowed: who finds it taken is dropped."""
    prompts, params = requests()
    fields: dict[str, Any] = {"pool__page_size": 16, "pool__tokens": 128, "transfer__chunk_pages": 64, "scheduler__rows": 4}
    with tiny.engine(**fields, scheduler__host_budget_mib=1, debug__park_every=5) as made:
        alone = tiny.alone(made, prompts, params)
        crowded = tiny.run(made, prompts, params)
        summary = made.summary()
    assert list(map(tiny.content, crowded)) == list(map(tiny.content, alone))
    assert summary["host_bytes_peak"] == 3 * 2**18
    assert summary["num_parks_copied"] > 0 and summary["num_parks_dropped"] > 0
    assert summary["num_parks"] == summary["num_parks_copied"] + summary["num_parks_dropped"]


def test_a_damaged_image_is_replayed_and_the_next_owner_of_its_pages_notices_nothing(caplog: pytest.LogCaptureFixture) -> None:
    wish = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    with tiny.engine(debug__copy_delay_steps=1, pool__prefix_cache=False) as made:
        expected = [tiny.content(answer) for answer in tiny.alone(made, [tiny.prompt(8), tiny.prompt(9)], [wish] * 2)]
        bad, good = made.submit(tiny.prompt(8), wish), made.submit(tiny.prompt(9), wish)
        tiny.step_to(made, bad, 4)
        made.scheduler.park(bad.seq_id)
        made.step()
        chunk = tiny.image(made, bad.seq_id)[0]
        k, v = chunk.pages[0]
        flipped = np.array(k)
        flipped.reshape(-1).view(np.uint32)[5] ^= 1 << 3
        chunk.pages[0] = (jax.device_put(flipped, k.sharding), v)
        assert [tiny.content(good.result()), tiny.content(bad.result())] == expected[::-1]
        assert (made.summary()["num_losses"], made.summary()["num_replayed_tokens"], bad.result().num_parks) == (1, 11, 2)
        (line,) = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
        assert "a parked image came back damaged: checksum 0x" in line
        assert tiny.content(tiny.run(made, [tiny.prompt(8)], wish)[0]) == expected[0]


def test_a_stop_string_and_a_character_cut_in_two_by_a_replay_come_out_as_alone() -> None:
    """One byte a token, dropped after every one: the detokenizer's and the stop strings' buffers stay with the request."""
    free = SamplingParams(max_tokens=40, temperature=1.0, seed=4, ignore_eos=True, logprobs=1)
    tokenizer = ByteTokenizer([f"<{i}>" for i in range(tiny.VOCAB - 256)])
    seen: list[list[Any]] = []
    for every in (0, 1):
        with tiny.engine(scheduler__host_budget_mib=0, debug__park_every=every, pool__tokens=128) as made:
            object.__setattr__(made.parts.checkpoint, "tokenizer", tokenizer)
            text = tiny.run(made, [tiny.prompt(8)], free)[0].text
            stop = text[11:14]
            wishes = [free, replace(free, stop=(stop,)), replace(free, stop=(stop + "never",))]
            seen.append(list(map(tiny.content, tiny.run(made, [tiny.prompt(8)] * 3, wishes))))
            assert (made.scheduler.counters.num_parks_dropped > 60) == bool(every)
    expected = seen[0]
    assert seen[1] == expected
    assert [content[3] for content in expected] == ["length", "stop", "length"]
    assert expected[1][1] == text[: text.index(stop)] and "\ufffd" in text
