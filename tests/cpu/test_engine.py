"""What callers of the engine can rely on beside exactness: sizes, ends, faults, and that nothing leaks."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.errors import ConfigError, JaxkvError, RequestError
from jaxkv.guard import RecompileError
from jaxkv.live import Handle
from jaxkv.request import SamplingParams
from tests.cpu import tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with tiny.engine() as made:
        yield made


def greedy(num: int) -> SamplingParams:
    return SamplingParams(max_tokens=num, temperature=0, ignore_eos=True)


def test_the_fixture_gives_its_reference_tokens_and_logprobs_for_both_prompts() -> None:
    """Prompts of 7 and 83 tokens, 32 generated each, parked every 3 tokens."""
    reference = np.load(tiny.LLAMA / "reference.npz")
    wish = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True, logprobs=20)
    with tiny.engine(pool__tokens=512, debug__park_every=3) as made:
        answers = tiny.run(made, [reference[f"input_ids_{i}"].tolist() for i in (0, 1)], wish)
    for i, answer in enumerate(answers):
        assert answer.num_parks >= 10
        assert answer.token_ids == reference[f"greedy_{i}"].tolist()
        expected = jax.nn.log_softmax(reference[f"step_logits_{i}"], axis=-1)
        assert answer.logprobs is not None
        for step, found in enumerate(answer.logprobs):
            assert found.logprob == pytest.approx(float(expected[step, found.token_id]), abs=2e-4)
            assert [value for _, value in found.top] == pytest.approx([float(expected[step, token]) for token, _ in found.top], abs=2e-4)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_exactly_as_many_tokens_as_asked(shared: Engine, num: int) -> None:
    steps = shared.stats.num_decode_steps
    answer = tiny.run(shared, [tiny.prompt(8)], greedy(num))[0]
    assert len(answer.token_ids) == num
    assert answer.finish_reason == "length"
    assert shared.stats.num_decode_steps - steps == num - 1


def test_a_prompt_that_fills_the_pool_gets_one_token_and_one_more_is_refused_with_both_numbers(shared: Engine) -> None:
    assert shared.capacity == 64
    handle = shared.submit(tiny.prompt(64), greedy(5))
    assert handle.will_truncate_at == 1
    bystander = shared.submit(tiny.prompt(8), greedy(8))
    assert len(handle.result().token_ids) == 1
    assert handle.result().finish_reason == "length"
    assert len(bystander.result().token_ids) == 8
    with pytest.raises(RequestError, match=r"65.*64"):
        shared.submit(tiny.prompt(65), greedy(1))
    tiny.settle(shared)


def test_a_lone_request_that_outgrows_the_pool_ends_by_length_and_says_so_before(shared: Engine) -> None:
    handle = shared.submit(tiny.prompt(20), greedy(100))
    assert handle.will_truncate_at == 45
    assert len(handle.result().token_ids) == 45
    assert handle.result().finish_reason == "length"
    assert len(tiny.run(shared, [tiny.prompt(9)], greedy(4))[0].token_ids) == 4


def test_without_max_tokens_it_runs_to_a_stop_or_the_limit(shared: Engine) -> None:
    handle = shared.submit(tiny.prompt(20), SamplingParams(temperature=0, ignore_eos=True))
    assert handle.will_truncate_at == 45
    assert len(handle.result().token_ids) == 45


def test_wrong_requests_are_refused_with_the_field_and_both_values(shared: Engine) -> None:
    wrong = [
        ([], GREEDY, "prompt: got 0 tokens"),
        ([5, 320], GREEDY, "prompt: got token id 320, allowed: 0 to 319"),
        ([5], SamplingParams(max_tokens=-1), "max_tokens: got -1, allowed: at least 0"),
        ([5], SamplingParams(top_k=2**31), "top_k: got 2147483648, allowed: 0 to 2147483647"),
        ([5], SamplingParams(temperature=math.nan), "temperature: got nan, allowed: 0.0 to 1000000.0"),
        ([5], SamplingParams(repetition_penalty=0), "repetition_penalty: got 0, allowed: 0.01 to 100.0"),
        ([5], SamplingParams(logit_bias={3: math.inf}), "logit_bias: got inf, allowed: a number or minus infinity"),
        ([5], SamplingParams(stop_token_ids=(-1,)), "stop_token_ids: got -1, allowed: 0 to 319"),
        ([5], SamplingParams(logprobs=21), "logprobs: got 21, allowed: 0 to 20"),
        ([5], SamplingParams(prompt_logprobs=-1), "prompt_logprobs: got -1, allowed: 0 to 20"),
        ([5], SamplingParams(logit_bias=dict.fromkeys(range(301), 1.0)), "logit_bias: got 301 entries, allowed: at most 300"),
        ([5], SamplingParams(stop_token_ids=tuple(range(40))), "stop_token_ids: got 40 with the model's own, allowed: at most 32"),
    ]
    for prompt, params, message in wrong:
        with pytest.raises(RequestError, match=message):
            shared.submit(prompt, params)
    assert shared.is_idle


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5, 5.5]], r"prompt: got 5\.5 at place 1, allowed: token ids, which are whole numbers"),
        ([[None]], r"prompt: got None at place 0, allowed: token ids"),
        ([["a"]], r"prompt: got 'a' at place 0, allowed: token ids"),
        ([np.array([5.0])], r"prompt: got np\.float64\(5\.0\) at place 0, allowed: token ids"),
        ([None], r"prompt: got NoneType, allowed: a list of token ids"),
        ([7], r"prompt: got int, allowed: a list of token ids"),
        ([b"abc"], r"prompt: got bytes, allowed: a list of token ids"),
        ("text", r"prompts: got one text, allowed: a list of prompts; put it in brackets"),
    ],
)
def test_what_is_no_row_of_token_ids_is_refused(shared: Engine, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        shared.generate(prompts, GREEDY)
    assert shared.is_idle


def test_numpys_whole_numbers_are_token_ids(shared: Engine) -> None:
    prompts: list[Any] = [[5, 6], np.array([5, 6])]
    plain, numpys = (tiny.run(shared, [ids], greedy(3))[0].token_ids for ids in prompts)
    assert plain == numpys


def test_a_refused_prompt_among_many_leaves_none_of_them_behind(shared: Engine) -> None:
    with pytest.raises(RequestError, match="prompt: got 0 tokens"):
        shared.generate([tiny.prompt(8), []], GREEDY)
    assert shared.is_idle


def test_iterating_a_handle_gives_the_tokens_one_by_one_while_others_run_too(shared: Engine) -> None:
    other = shared.submit(tiny.prompt(9), greedy(10))
    handle = shared.submit(tiny.prompt(8), greedy(10))
    assert list(handle) == handle.result().token_ids
    assert len(other.token_ids) > 0
    assert list(other) == other.result().token_ids
    tiny.settle(shared)


def test_a_callback_hears_every_token_and_may_cancel(shared: Engine) -> None:
    heard: list[int] = []

    def listen(handle: Handle, token_id: int) -> None:
        heard.append(token_id)
        if len(heard) == 3:
            handle.cancel()

    handle = shared.submit(tiny.prompt(8), GREEDY, on_token=listen)
    answer = handle.result()
    assert answer.finish_reason == "cancelled"
    assert answer.token_ids == heard and len(heard) == 3
    tiny.settle(shared)


def test_a_callback_that_raises_ends_its_own_request_alone(shared: Engine) -> None:
    expected = tiny.run(shared, [tiny.prompt(9)], GREEDY)[0]

    def fail(handle: Handle, token_id: int) -> None:
        raise ValueError("no")

    bad, good = shared.submit(tiny.prompt(8), GREEDY, on_token=fail), shared.submit(tiny.prompt(9), GREEDY)
    assert tiny.content(good.result()) == tiny.content(expected)
    answer = bad.result()
    assert answer.finish_reason == "error"
    assert answer.error == "the token could not be taken: ValueError: no"
    tiny.settle(shared)


def test_leaving_in_any_state_gives_everything_back_and_changes_nobody_else() -> None:
    """Eight requests; two are waiting, parked, prefilling or decoding when they leave, with copies in flight."""
    prompts = [tiny.prompt(4 + 5 * i) for i in range(8)]
    with tiny.engine(debug__copy_delay_steps=3) as made:
        expected = [tiny.content(answer) for answer in tiny.alone(made, prompts, [GREEDY] * 8)]
    for first in range(1, 30, 4):
        with tiny.engine(debug__copy_delay_steps=3, debug__park_seed=first) as made:
            handles = [made.submit(prompt, GREEDY) for prompt in prompts]
            for _ in range(first):
                made.step()
            leaving = [(first + 3 * i) % 8 for i in range(3)]
            for i in leaving:
                handles[i].cancel()
                assert handles[i].done
            for i, handle in enumerate(handles):
                answer = handle.result()
                if i not in leaving or answer.finish_reason != "cancelled":
                    assert tiny.content(answer) == expected[i]


def test_cancelling_twice_or_after_the_end_does_nothing(shared: Engine) -> None:
    handle = shared.submit(tiny.prompt(8), GREEDY)
    answer = handle.result()
    handle.cancel()
    assert handle.result() is answer
    assert answer.finish_reason == "length"


def test_a_compilation_in_a_step_raises_and_is_counted() -> None:
    made = Engine(tiny.config())
    handle = made.submit(tiny.prompt(8), GREEDY, on_token=lambda *_: None)
    plain = made.parts.transfer.poll

    def compile_something(step: int) -> object:
        jax.jit(lambda x: x * 3 + 1)(np.arange(17, dtype=np.float32))
        return plain(step)

    made.parts.transfer.poll = compile_something  # type: ignore[method-assign, assignment]
    with pytest.raises(RecompileError, match="1 compilation, 0 allowed"):
        made.step()
    assert made.num_compiles_after_warmup == 1
    made.parts.transfer.poll = plain  # type: ignore[method-assign]
    assert len(handle.result().token_ids) == 12
    made.close()


@pytest.mark.parametrize(("part", "reason"), [("_gather", "could not be moved"), ("_scatter", "could not be put back")])
@pytest.mark.parametrize("mode", ["direct", "staged", "hold"])
def test_a_copy_that_cannot_be_made_is_replayed_and_leaks_nothing(part: str, reason: str, mode: str, caplog: Any) -> None:
    """Images of three chunks; the second chunk of the first park or return raises. That books and bytes are in order is checked by tiny."""
    wish = greedy(20)
    prompts = [tiny.prompt(40), tiny.prompt(9)]
    with tiny.engine(pool__tokens=128, pool__prefix_cache=False, transfer__mode=mode) as made:
        expected = [tiny.content(answer) for answer in tiny.alone(made, prompts, [wish] * 2)]
        plain, calls = getattr(made.parts.pool, part), 0

        def fail_once(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise RuntimeError("out of memory")
            return plain(*arguments)

        setattr(made.parts.pool, part, fail_once)
        bad, good = (made.submit(prompt, wish) for prompt in prompts)
        tiny.step_to(made, bad, 3)
        made.scheduler.park(bad.seq_id)
        assert tiny.content(good.result()) == expected[1]
        assert tiny.content(bad.result()) == expected[0]
        (line,) = [record.getMessage() for record in caplog.records if "lost" in record.getMessage()]
        assert f"its pages {reason}: out of memory" in line
        tiny.settle(made)
        assert not tiny.image(made, bad.seq_id)
        summary = made.summary()
        # Prompt 40 and 3 or, where the plan had been made, 4 tokens.
        assert (summary["num_losses"], summary["num_failed"]) == (1, 0) and summary["num_replayed_tokens"] in (42, 43)


def test_a_callback_that_takes_a_step_ends_its_own_request_alone(shared: Engine) -> None:
    answer = shared.submit(tiny.prompt(8), GREEDY, on_token=lambda *_: shared.step()).result()
    assert answer.error == "the token could not be taken: JaxkvError: a step is being taken; a callback may not take another"
    assert len(tiny.run(shared, [tiny.prompt(9)], GREEDY)[0].token_ids) == 12


def test_a_handle_tells_where_its_request_is(shared: Engine) -> None:
    handle = shared.submit(tiny.prompt(20, 77), GREEDY)
    assert (handle.stats.state, handle.stats.num_tokens, handle.stats.ttft_s) == ("waiting", 0, None)
    shared.step()
    assert handle.stats.state == "prefilling"
    tiny.step_to(shared, handle, 3)
    assert (handle.stats.state, handle.stats.num_tokens) == ("decoding", 3)
    handle.result()
    assert (handle.stats.state, handle.stats.num_tokens) == ("length", 12)


def test_the_first_message_says_what_runs_where(shared: Engine) -> None:
    assert shared.messages[0] == (
        "llama in float32 on 1 x cpu; pool of 64 tokens (16 pages of 4, 0 MiB); parked images go to pinned_host memory"
    )


def test_a_closed_engine_says_so() -> None:
    made = Engine(tiny.config())
    made.close()
    made.close()
    with pytest.raises(JaxkvError, match="the engine is closed"):
        made.submit([5], GREEDY)


def test_what_cannot_work_is_refused_before_anything_is_loaded() -> None:
    wrong = [
        ({"model__max_len": 4096}, "model.max_len: got 4096, the model goes to 512"),
        ({"transfer__chunk_pages": 100_000}, "transfer.staging_mib: got 64, one chunk of 100000 pages takes"),
        ({"mesh__tensor": 2}, "mesh.tensor: got 2, but there are 1 cpu devices"),
        ({"pool__tokens": 10**12}, "pool.tokens: got 1000000000000, which takes"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Engine(tiny.config(**settings))


def test_without_pool_tokens_the_pool_takes_what_all_rows_could_fill() -> None:
    with Engine(tiny.config(pool__tokens=None)) as made:
        assert made.capacity == 4 * 128


def test_stop_ids_end_an_answer_and_min_tokens_keeps_them_away(shared: Engine) -> None:
    plain = tiny.run(shared, [tiny.prompt(8)], greedy(20))[0].token_ids
    stop = plain[4]
    first = plain.index(stop)
    stopped = tiny.run(shared, [tiny.prompt(8)], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == plain[: first + 1]
    assert stopped.finish_reason == "stop"
    later = SamplingParams(max_tokens=20, min_tokens=10, temperature=0, ignore_eos=True, stop_token_ids=(stop,))
    kept = tiny.run(shared, [tiny.prompt(8)], later)[0]
    assert stop not in kept.token_ids[:10]
    assert kept.token_ids[:first] == plain[:first]


def test_logit_bias_forces_and_forbids_a_token(shared: Engine) -> None:
    forced = tiny.run(shared, [tiny.prompt(8)], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logit_bias={17: 100.0}))[0]
    assert forced.token_ids == [17] * 5


def test_the_summary_counts_what_happened() -> None:
    with tiny.engine(pool__prefix_cache=False) as made:
        tiny.run(made, [tiny.prompt(20, i) for i in range(6)], greedy(24))
        summary = made.summary()
    chunk_bytes = 4 * 4 * 3 * 2 * 2 * 16 * 4  # pages x tokens x layers x (K, V) x kv heads x head dim x float32
    assert summary["num_requests"] == summary["num_completed"] == 6
    assert summary["num_failed"] == summary["num_last_resorts"] == summary["num_compiles_after_warmup"] == 0
    assert summary["prompt_tokens"] == 120
    assert summary["generated_tokens"] == 144
    assert summary["num_parks"] == summary["num_restores"] > 0
    assert summary["bytes_to_host"] == summary["bytes_to_device"]
    assert summary["bytes_to_host"] % chunk_bytes == 0
    assert summary["host_bytes_peak"] >= chunk_bytes
    assert summary["host_bytes_end"] == 0
    assert summary["pool_pages"] == summary["pool_pages_free_end"] == 16
    assert 0 < summary["pool_use_at_park"] <= 1
    assert 1 <= summary["rows_busy_mean"] <= 4
    assert summary["image_memory_kinds"] == ["pinned_host"]
    for name in ("token_gap_ms", "ttft_s", "e2e_s"):
        assert summary[name]["p50"] <= summary[name]["p99"]
    assert summary["longest_pause_s"] > 0
