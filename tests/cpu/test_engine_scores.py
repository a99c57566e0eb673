"""The logprobs of a prompt's own tokens on the engine: what they are, each once, the same bits whatever happens meanwhile."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.engine import Engine
from jaxkv.models import dense_logits
from jaxkv.request import SamplingParams
from tests.cpu import tiny

LONG = tiny.prompt(100)
WISH = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2, prompt_logprobs=2)


@pytest.fixture(scope="module")
def roomy() -> Iterator[Engine]:
    with tiny.engine(pool__tokens=512) as made:
        yield made


def test_they_are_the_dense_references_and_the_first_is_none(roomy: Engine) -> None:
    (done,) = tiny.run(roomy, [LONG], [WISH])
    expected = np.asarray(jax.nn.log_softmax(dense_logits(roomy.parts.checkpoint.model, jnp.asarray(LONG, jnp.int32)), axis=-1))
    assert done.prompt_logprobs is not None and done.prompt_logprobs[0] is None
    rest = [entry for entry in done.prompt_logprobs if entry is not None]
    assert [entry.token_id for entry in rest] == LONG[1:]
    for at, entry in enumerate(rest):
        assert abs(entry.logprob - expected[at, entry.token_id]) < 1e-4
        best = np.argsort(-expected[at])[:2]
        assert [token_id for token_id, _ in entry.top] == best.tolist()
        assert np.abs(np.array([logprob for _, logprob in entry.top]) - expected[at, best]).max() < 1e-4
        if entry.token_id == entry.top[0][0]:
            assert entry.logprob == entry.top[0][1]  # lm-eval looks for this very equality


def test_a_likeliest_token_has_the_bits_of_the_first_alternative(roomy: Engine) -> None:
    """The greedy answer as part of a prompt: the same tokens, now scored."""
    (said,) = tiny.run(roomy, [tiny.prompt(5)], [SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)])
    (done,) = tiny.run(roomy, [tiny.prompt(5) + said.token_ids], [WISH])
    entries = [entry for entry in (done.prompt_logprobs or [])[5:] if entry is not None]
    assert len(entries) == 40
    assert all(entry.logprob == entry.top[0][1] for entry in entries)


def test_parked_after_the_second_chunk_and_at_the_fifth_token_each_is_there_once(roomy: Engine) -> None:
    expected = tiny.content(tiny.run(roomy, [LONG], [WISH])[0])
    handle = roomy.submit(LONG, WISH)
    while roomy.scheduler.snapshot().sequences[0].num_cells < 16:
        roomy.step()
    assert roomy.scheduler.park(handle.seq_id) == ""
    tiny.step_to(roomy, handle, 5)
    assert roomy.scheduler.park(handle.seq_id) == ""
    done = handle.result()
    assert done.num_parks == 2
    assert done.prompt_logprobs is not None and done.logprobs is not None
    assert len([entry for entry in done.prompt_logprobs if entry is not None]) == 99 and done.prompt_logprobs[0] is None
    assert len(done.logprobs) == len(done.token_ids) == 9
    assert tiny.content(done) == expected
    tiny.settle(roomy)


def test_dropped_and_computed_again_each_is_there_once(roomy: Engine) -> None:
    """No image may be held, so every park is a replay of the prompt."""
    expected = tiny.content(tiny.run(roomy, [LONG], [WISH])[0])
    with tiny.engine(pool__tokens=512, scheduler__host_budget_mib=0, debug__park_every=24) as made:
        done = tiny.run(made, [LONG], [WISH])[0]
        assert made.scheduler.counters.num_replayed_tokens > 100
    assert tiny.content(done) == expected


def test_pages_that_others_left_in_the_pool_are_not_read(roomy: Engine) -> None:
    (plain,) = tiny.run(roomy, [LONG], [SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2)])
    (again,) = tiny.run(roomy, [LONG], [SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=2)])
    assert again.cached_tokens > 0 and again.prompt_logprobs is None
    (scored,) = tiny.run(roomy, [LONG], [WISH])
    assert scored.cached_tokens == 0 and len(scored.prompt_logprobs or []) == 100
    assert (scored.token_ids, scored.logprobs) == (plain.token_ids, plain.logprobs)


def test_every_choice_has_them(roomy: Engine) -> None:
    group = roomy.submit_group(tiny.prompt(21), SamplingParams(max_tokens=3, seed=5, n=2, prompt_logprobs=1))
    first, second = group.result()
    assert first.prompt_logprobs == second.prompt_logprobs and len(first.prompt_logprobs or []) == 21
    tiny.settle(roomy)


def test_without_alternatives_the_logprobs_are_the_same(roomy: Engine) -> None:
    some, none = (
        tiny.run(roomy, [tiny.prompt(20)], [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=count)])[0].prompt_logprobs or []
        for count in (20, 0)
    )
    assert [entry and entry.logprob for entry in some] == [entry and entry.logprob for entry in none]
    assert [entry and len(entry.top) for entry in none] == [None] + [0] * 19
    assert [entry and len(entry.top) for entry in some] == [None] + [20] * 19


def test_a_prompt_of_one_token_has_nothing_to_report(roomy: Engine) -> None:
    (done,) = tiny.run(roomy, [[5]], [WISH])
    assert done.prompt_logprobs == [None] and len(done.token_ids) == 9


def test_a_request_for_no_tokens_reads_its_prompt_beside_others(roomy: Engine) -> None:
    bystander = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    wish = SamplingParams(max_tokens=0, logprobs=1, prompt_logprobs=1)
    expected = tiny.content(tiny.run(roomy, [tiny.prompt(7)], [bystander])[0])
    with_answer = tiny.run(roomy, [LONG], [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)])[0]
    other, silent = tiny.run(roomy, [tiny.prompt(7), LONG], [bystander, wish])
    assert tiny.content(other) == expected
    assert (silent.token_ids, silent.text, silent.finish_reason, silent.logprobs) == ([], "", "length", [])
    assert silent.prompt_logprobs == with_answer.prompt_logprobs
    assert silent.ttft_s is None and silent.prompt_tokens == 100


def test_a_request_for_no_tokens_may_fill_the_pool() -> None:
    with tiny.engine() as made:
        assert tiny.run(made, [tiny.prompt(64)], [SamplingParams(max_tokens=0)])[0].finish_reason == "length"
