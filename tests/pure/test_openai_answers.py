"""Answers: the objects that OpenAI's clients expect."""

import json
import math
from typing import Any

import pytest

from jaxkv.openai import Endpoint, Frame, ParsedBody, build_answer, error_body
from jaxkv.openai.logprobs import token_text
from jaxkv.request import Completion, SamplingParams, TokenLogprobs
from jaxkv.testing import ByteTokenizer

FRAME = Frame("x-1", 1700000000, "served", "fp_1")
EURO = [TokenLogprobs(byte, -0.5, ((byte, -0.5), (97, -1.5))) for byte in "a€".encode()]


def answer(endpoint: Endpoint, completion: Completion, *, tokenizer: ByteTokenizer | None = ByteTokenizer(), **more: Any) -> dict[str, Any]:  # noqa: B008
    body = ParsedBody(endpoint, [[1, 2]], SamplingParams(logprobs=more.pop("logprobs", None)), **more.pop("body", {}))
    return build_answer(body, [completion], FRAME, tokenizer, **more)


def done(**more: Any) -> Completion:
    return Completion([97, 98], "ab", "stop", prompt_tokens=2, seed=7, **more)


def test_a_chat_answer_is_a_chat_completion_with_seed_and_fingerprint() -> None:
    assert answer(Endpoint.CHAT, done()) == {
        "id": "x-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "served",
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
        "seed": 7,
    }


def test_a_completion_answer_is_a_text_completion() -> None:
    found = answer(Endpoint.COMPLETION, done())
    assert found["object"] == "text_completion"
    assert found["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}]


def test_token_ids_stand_beside_the_text_where_asked_for_and_always_without_a_tokenizer() -> None:
    assert answer(Endpoint.CHAT, done(), body={"return_token_ids": True})["choices"][0]["token_ids"] == [97, 98]
    assert answer(Endpoint.COMPLETION, done(), tokenizer=None)["choices"][0]["token_ids"] == [97, 98]


def test_the_model_of_the_body_is_given_back() -> None:
    assert answer(Endpoint.CHAT, done(), body={"model": "mine"})["model"] == "mine"


def test_cached_tokens_stand_in_the_usage_only_where_asked_for() -> None:
    assert "prompt_tokens_details" not in answer(Endpoint.CHAT, done(cached_tokens=16))["usage"]
    usage = answer(Endpoint.CHAT, done(cached_tokens=16), body={"return_cached_tokens": True})["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


def test_an_answer_that_the_pool_may_end_says_where() -> None:
    assert answer(Endpoint.CHAT, done(), truncates_at=65)["jaxkv"] == {"truncates_at": 65}


def test_the_logprobs_of_a_chat_carry_bytes_and_alternatives() -> None:
    content = answer(Endpoint.CHAT, done(logprobs=EURO[1:2]), logprobs=2)["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "bytes:\\xe2",
            "logprob": -0.5,
            "bytes": [226],
            "top_logprobs": [
                {"token": "bytes:\\xe2", "logprob": -0.5, "bytes": [226]},
                {"token": "a", "logprob": -1.5, "bytes": [97]},
            ],
        }
    ]


def test_the_logprobs_of_a_completion_are_parallel_lists_with_offsets_into_the_text() -> None:
    found = answer(Endpoint.COMPLETION, done(logprobs=[*EURO, TokenLogprobs(98, -2.0)]), logprobs=2)["choices"][0]["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"]
    assert found["token_logprobs"] == [-0.5, -0.5, -0.5, -0.5, -2.0]
    assert found["text_offset"] == [0, 1, 1, 1, 2]
    assert found["top_logprobs"][1] == {"bytes:\\xe2": -0.5, "a": -1.5}
    assert found["top_logprobs"][4] == {"b": -2.0}


def test_logprobs_zero_of_a_completion_has_no_alternatives() -> None:
    assert answer(Endpoint.COMPLETION, done(logprobs=EURO), logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
def test_a_logprob_that_json_cannot_spell_is_written_as_the_least_one(logprob: float) -> None:
    found = answer(Endpoint.CHAT, done(logprobs=[TokenLogprobs(97, logprob)]), logprobs=0)
    assert found["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    json.dumps(found, allow_nan=False)


def test_a_token_without_a_tokenizer_is_named_by_its_id() -> None:
    assert token_text(7, None) == "token_id:7"
    content = answer(Endpoint.CHAT, done(logprobs=EURO[:1]), tokenizer=None, logprobs=0)["choices"][0]["logprobs"]["content"]
    assert (content[0]["token"], content[0]["bytes"]) == ("token_id:97", None)


def test_an_error_body_has_message_type_param_and_code() -> None:
    assert error_body("no", "invalid_request") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": None, "code": "invalid_request"}
    }
