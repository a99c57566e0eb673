"""Answers of a demanded form on the tiny engine: bytes as alone, whatever is parked or replayed, and nothing compiled."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from jaxkv.constraint import Constraint
from jaxkv.engine import Engine
from jaxkv.errors import RequestError
from jaxkv.models.tokenizer import ByteTokenizer
from jaxkv.request import Completion, SamplingParams
from tests.cpu import tiny

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
NUMBER = Constraint("regex", "[a-z]{3,6}-[0-9]{2,4}")
VERSE = Constraint("grammar", 'start: line ("/" line)*\nline: /[ab]{2,5}/')


def speaking(**fields: Any) -> Any:
    """A tiny engine whose tokens are bytes, and special ones beyond them."""
    return tiny.engine(**{"pool__tokens": 256, **fields})


def give_bytes(made: Engine) -> Engine:
    object.__setattr__(made.parts.checkpoint, "tokenizer", ByteTokenizer([f"<{i}>" for i in range(tiny.VOCAB - 256)]))
    return made


@pytest.fixture(scope="module")
def ample() -> Iterator[Engine]:
    with speaking() as made:
        yield give_bytes(made)


def wishes() -> list[SamplingParams]:
    """A mixture, some of whom demand nothing; 11 sequences."""
    schema = Constraint("json_schema", json.dumps(SCHEMA))
    return [
        SamplingParams(constraint=schema, temperature=1.0, seed=3, logprobs=2, n=2),
        SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True, logprobs=1, frequency_penalty=0.5),
        SamplingParams(constraint=NUMBER, temperature=1.2, seed=4, n=3, top_k=40),
        SamplingParams(constraint=Constraint("choice", '["yes", "no, never"]'), temperature=0, min_tokens=30),
        SamplingParams(constraint=VERSE, temperature=1.0, seed=5, max_tokens=26, min_tokens=20, stop=("aab",)),
        SamplingParams(bad_words=("e", "ab"), temperature=1.0, seed=6, max_tokens=20, ignore_eos=True),
        SamplingParams(constraint=Constraint("json_object"), temperature=1.0, seed=7, max_tokens=24, bad_words=("{}",)),
        SamplingParams(max_tokens=20, temperature=0, ignore_eos=True),
    ]


def prompts() -> list[list[int]]:
    return [tiny.prompt(3 + 4 * i, i) for i in range(len(wishes()))]


@pytest.fixture(scope="module")
def expected(ample: Engine) -> list[list[tuple[Any, ...]]]:
    """What each request says alone in an ample pool."""
    before = ample.scheduler.counters.num_parks
    found = [list(map(tiny.content, tiny.run(ample, [p], [q]))) for p, q in zip(prompts(), wishes(), strict=True)]
    assert ample.scheduler.counters.num_parks == before
    return found


def test_answers_have_their_form(ample: Engine) -> None:
    for prompt, wish in zip(prompts(), wishes(), strict=True):
        for answer in tiny.run(ample, [prompt], [wish]):
            check_form(wish, answer)


def check_form(wish: SamplingParams, answer: Completion) -> None:
    text, kind = answer.text, wish.constraint.kind if wish.constraint else ""
    assert not any(word in text for word in wish.bad_words)
    if kind == "json_schema":
        found = json.loads(text)
        assert list(found) == ["name", "n"] and len(found["name"]) <= 6 and 0 <= found["n"] <= 999
    if kind == "regex":
        assert re.fullmatch("[a-z]{3,6}-[0-9]{2,4}", text)
    if kind == "choice":
        assert text in ("yes", "no, never")
    assert answer.finish_reason == ("length" if kind in ("", "json_object") else "stop")


@pytest.mark.parametrize("fields", [{"debug__park_every": 3}, {"debug__park_every": 3, "scheduler__host_budget_mib": 0}])
def test_crowded_parked_every_three_tokens_or_replayed_they_say_what_they_say_alone(
    expected: list[list[tuple[Any, ...]]], fields: dict[str, Any]
) -> None:
    with speaking(**fields) as made:
        found = list(map(tiny.content, tiny.run(give_bytes(made), prompts(), wishes())))
        assert made.scheduler.counters.num_parks > 60
        assert (made.scheduler.counters.num_parks_dropped > 60) == ("scheduler__host_budget_mib" in fields)
    assert found == [content for contents in expected for content in contents]


def test_choices_of_one_request_each_have_a_state_of_their_own(expected: list[list[tuple[Any, ...]]]) -> None:
    texts = [content[1] for content in expected[2]]
    assert len(set(texts)) == 3


def test_logprobs_are_of_the_models_own_distribution_and_so_may_be_of_a_token_that_the_form_forbids(ample: Engine) -> None:
    wish = SamplingParams(constraint=NUMBER, temperature=0, logprobs=1)
    free = SamplingParams(max_tokens=1, temperature=0, logprobs=1, ignore_eos=True)
    (answer,), (first,) = tiny.run(ample, [tiny.prompt(9)], [wish]), tiny.run(ample, [tiny.prompt(9)], [free])
    assert answer.logprobs is not None and first.logprobs is not None
    assert answer.logprobs[0].top == first.logprobs[0].top
    assert answer.logprobs[0].top[0][0] not in range(ord("a"), ord("z") + 1)
    assert answer.logprobs[0].logprob < answer.logprobs[0].top[0][1]


def test_a_form_that_is_cut_ends_with_length_and_one_that_is_complete_with_stop_even_below_min_tokens(ample: Engine) -> None:
    cut = SamplingParams(constraint=Constraint("regex", "a{20}"), max_tokens=5)
    whole = SamplingParams(constraint=Constraint("regex", "a{5}"), max_tokens=5, min_tokens=5)
    early = SamplingParams(constraint=Constraint("regex", "a{5}"), min_tokens=40)
    answers = tiny.run(ample, [tiny.prompt(4)] * 3, [cut, whole, early])
    assert [(answer.text, answer.finish_reason) for answer in answers] == [("aaaaa", "length"), ("aaaaa", "stop"), ("aaaaa", "stop")]


def test_a_context_that_shifts_goes_on_with_its_form(ample: Engine) -> None:
    wish = SamplingParams(constraint=Constraint("regex", "(ab|cd)*"), max_tokens=60, context_shift=True, context_len=24, ignore_eos=True)
    (answer,) = tiny.run(ample, [tiny.prompt(9)], [wish])
    assert re.fullmatch("(ab|cd){30}", answer.text)


def test_where_bias_forbids_all_that_may_come_that_request_alone_ends_with_an_error(ample: Engine) -> None:
    stuck = SamplingParams(constraint=Constraint("regex", "[ab]{3}"), logit_bias={97: float("-inf"), 98: float("-inf")})
    other = SamplingParams(constraint=NUMBER, temperature=0)
    (alone,) = tiny.run(ample, [tiny.prompt(7)], [other])
    broken, beside = tiny.run(ample, [tiny.prompt(4), tiny.prompt(7)], [stuck, other])
    assert broken.finish_reason == "error"
    assert broken.error == ("the token could not be taken: JaxkvError: token 0 may not come here, but logit_bias forbids all that may")
    assert tiny.content(beside) == tiny.content(alone)


def test_what_cannot_be_had_is_refused_and_leaves_nothing_behind(ample: Engine) -> None:
    with pytest.raises(RequestError, match=r"^constraint: .*unclosed group"):
        ample.submit_group(tiny.prompt(4), SamplingParams(constraint=Constraint("regex", "(a"), n=3))
    assert ample.is_idle and ample.num_compiles_after_warmup == 0
