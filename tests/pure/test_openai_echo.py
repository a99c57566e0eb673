"""A prompt given back before its answer, and the logprobs of its own tokens."""

from typing import Any

import pytest

from jaxkv.errors import RequestError
from jaxkv.openai import BodyReader, Endpoint, Frame, ParsedBody, build_answer
from jaxkv.openai.chunks import ChoicePieces
from jaxkv.openai.echo import make_echo
from jaxkv.request import Completion, SamplingParams, TokenLogprobs
from jaxkv.testing import ByteTokenizer, FakeEngine

COMPLETION = Endpoint.COMPLETION
END = 256  # the byte tokenizer's one special token, "<end>"


def read(**fields: Any) -> ParsedBody:
    return BodyReader(ByteTokenizer(), 257, {}, 4).read(COMPLETION, fields, 5)


def answer(engine: FakeEngine, **fields: Any) -> dict[str, Any]:
    """The body of a request's answer from an engine that makes things up."""
    body = BodyReader(engine.tokenizer, 257, {}, 4).read(COMPLETION, fields, 5)
    completions = [handle.result() for prompt in body.prompts for handle in engine.submit_group(prompt, body.params).choices]
    return build_answer(body, completions, Frame("x", 1, "m", "fp"), engine.tokenizer)


def lm_eval_reads(answer: dict[str, Any], context_lens: list[int]) -> list[tuple[float, bool]]:
    """What lm-eval's `local-completions` makes of an answer: the sum over the continuation, and whether it is the greedy one."""
    found = []
    for choice, length in zip(sorted(answer["choices"], key=lambda choice: choice["index"]), context_lens, strict=True):
        logprobs, tops = (choice["logprobs"][name][length:-1] for name in ("token_logprobs", "top_logprobs"))
        found.append((sum(logprobs), all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))))
    return found


def test_echo_with_logprobs_asks_the_engine_for_those_of_the_prompt() -> None:
    parsed = read(prompt="hi", echo=True, logprobs=3)
    assert (parsed.params.logprobs, parsed.params.prompt_logprobs, parsed.texts) == (3, 3, ("hi",))
    assert read(prompt="hi", echo=True).params.prompt_logprobs is None
    assert read(prompt="hi", logprobs=3).params.prompt_logprobs is None
    assert read(prompt="hi", echo=False).texts == ()


def test_with_echo_an_answer_of_no_tokens_may_be_asked_for() -> None:
    assert read(prompt="hi", echo=True, max_tokens=0).params.max_tokens == 0
    with pytest.raises(RequestError, match="max_tokens: got 0, allowed: a whole number from 1"):
        read(prompt="hi", max_tokens=0)
    with pytest.raises(RequestError, match="max_tokens: got -1, allowed: a whole number from 0"):
        read(prompt="hi", echo=True, max_tokens=-1)


def test_each_prompt_keeps_the_text_it_came_as() -> None:
    assert read(prompt=["ab", [99, 100]], echo=True).texts == ("ab", None)
    assert read(prompt=[99, 100], echo=True).texts == (None,)


def test_a_chat_has_no_echo() -> None:
    with pytest.raises(RequestError, match="echo: got true, which belongs to completions; leave it out or false"):
        BodyReader(ByteTokenizer(), 257, {}).read(Endpoint.CHAT, {"messages": [{"role": "user", "content": "hi"}], "echo": True}, 5)


def test_the_prompt_stands_before_the_answer_and_its_first_token_has_no_logprob() -> None:
    found = answer(FakeEngine(answers={"hé": "ab"}), prompt="hé", max_tokens=2, echo=True, logprobs=1)
    assert found["choices"][0] == {
        "index": 0,
        "text": "héab",
        "logprobs": {
            "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "a", "b"],
            "token_logprobs": [None, -0.25, -0.25, -0.5, -0.5],
            "top_logprobs": [None, {"bytes:\\xc3": -0.25}, {"bytes:\\xa9": -0.25}, {"a": -0.5}, {"b": -0.5}],
            "text_offset": [0, 1, 1, 2, 3],
        },
        "finish_reason": "length",
    }
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_with_no_tokens_asked_for_only_the_prompt_comes_back() -> None:
    found = answer(FakeEngine(), prompt="hi", max_tokens=0, echo=True, logprobs=0)
    assert found["choices"][0]["text"] == "hi"
    assert found["choices"][0]["logprobs"] == {
        "tokens": ["h", "i"],
        "token_logprobs": [None, -0.25],
        "top_logprobs": None,
        "text_offset": [0, 1],
    }
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


def test_without_logprobs_the_text_alone_comes_back() -> None:
    found = answer(FakeEngine(answers={"hi": "ab"}), prompt=["hi", [104, 105]], max_tokens=1, echo=True, n=2)
    assert [(choice["text"], choice["logprobs"]) for choice in found["choices"]] == [("hia", None)] * 4


def test_lm_eval_finds_what_it_looks_for() -> None:
    prompts = [list(b"context one"), list(b"ctx two")]
    request = {"model": "m", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    found = answer(FakeEngine(), **request)
    assert [len(choice["logprobs"]["tokens"]) for choice in found["choices"]] == [12, 8]
    assert lm_eval_reads(found, [7, 3]) == [(-1.0, True), (-1.0, True)]


def test_a_prompt_of_token_ids_comes_back_with_special_tokens_spelled_out() -> None:
    echo = make_echo([104, END, 105], None, ByteTokenizer())
    assert (echo.text, echo.offsets) == ("h<end>i", [0, 1, 6])


def test_a_special_token_that_the_tokenizer_added_is_not_in_the_text() -> None:
    echo = make_echo([END, 104, 105], "hi", ByteTokenizer())
    assert (echo.text, echo.offsets) == ("hi", [0, 0, 1])
    spelled = make_echo([END, 104], "<end>h", ByteTokenizer())
    assert (spelled.text, spelled.offsets) == ("<end>h", [0, 5])


def test_without_a_tokenizer_there_are_logprobs_and_no_text() -> None:
    found = answer(FakeEngine(has_tokenizer=False), prompt=[7, 8], max_tokens=0, echo=True, logprobs=1)
    assert found["choices"][0]["text"] == ""
    assert found["choices"][0]["logprobs"] == {
        "tokens": ["token_id:7", "token_id:8"],
        "token_logprobs": [None, -0.25],
        "top_logprobs": [None, {"token_id:8": -0.25}],
        "text_offset": [0, 0],
    }


def test_the_first_piece_of_a_stream_has_the_prompt_and_the_others_do_not() -> None:
    pieces = ChoicePieces(0, read(prompt="hi", echo=True, logprobs=0), ByteTokenizer())
    (first,) = pieces.add("a", [97], [TokenLogprobs(97, -0.5)], is_last=False, prompt_logprobs=[None, TokenLogprobs(105, -0.25)])
    assert first["text"] == "hia"
    assert first["logprobs"]["token_logprobs"] == [None, -0.25, -0.5] and first["logprobs"]["text_offset"] == [0, 1, 2]
    (second,) = pieces.add("b", [98], [TokenLogprobs(98, -0.5)], is_last=True)
    assert second["text"] == "b"
    assert second["logprobs"]["token_logprobs"] == [-0.5] and second["logprobs"]["text_offset"] == [3]


def test_special_tokens_are_in_the_text_only_where_asked_for() -> None:
    said = []
    for skip in (True, False):
        params = SamplingParams(max_tokens=3, ignore_eos=True, skip_special_tokens=skip)
        output = FakeEngine().submit_group([104], params).choices[0]._output
        for token_id in (97, END, 98):
            output.accept(token_id)
        said.append(output.text)
    assert said == ["ab", "a<end>b"]


def test_offsets_count_special_tokens_where_they_are_in_the_text() -> None:
    entries = [TokenLogprobs(token_id, -0.5) for token_id in (97, END, 98)]
    for skip, offsets in ((True, [0, 1, 1]), (False, [0, 1, 6])):
        params = SamplingParams(logprobs=0, skip_special_tokens=skip)
        completion = Completion([97, END, 98], "", "length", 1, 0, logprobs=entries)
        found = build_answer(ParsedBody(COMPLETION, [[1]], params), [completion], Frame("x", 1, "m", "fp"), ByteTokenizer())
        assert found["choices"][0]["logprobs"]["text_offset"] == offsets
