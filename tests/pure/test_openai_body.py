"""Bodies of requests: what is read, what is refused and in which words."""

import json
from typing import Any

import pytest

from jaxkv.errors import ConfigError, RequestError
from jaxkv.openai import BodyReader, Endpoint, ParsedBody, derive_seed
from jaxkv.request import SamplingParams
from jaxkv.testing import ByteTokenizer

CHAT, COMPLETION = Endpoint.CHAT, Endpoint.COMPLETION
HELLO = [{"role": "user", "content": "hi"}]


def read(endpoint: Endpoint, body: dict[str, Any], *, tokenizer: ByteTokenizer | None = ByteTokenizer(), **defaults: Any) -> ParsedBody:  # noqa: B008
    return BodyReader(tokenizer, 257, defaults).read(endpoint, body, 5)


def chat(**fields: Any) -> ParsedBody:
    return read(CHAT, {"messages": HELLO, **fields})


def complete(**fields: Any) -> ParsedBody:
    return read(COMPLETION, {"prompt": "hi", **fields})


def refusal(endpoint: Endpoint, body: dict[str, Any], **more: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read(endpoint, body, **more)
    assert "\n" not in str(caught.value)
    assert caught.value.param is not None
    return str(caught.value)


def test_a_chat_is_rendered_by_the_template_and_runs_to_a_stop_or_the_limit() -> None:
    parsed = chat()
    assert parsed.prompts == [list(b"user: hi\nassistant: ")]
    assert parsed.params == SamplingParams(seed=5)
    assert parsed.params.max_tokens is None


def test_a_completion_makes_sixteen_tokens_unless_told() -> None:
    assert complete().params.max_tokens == 16
    assert complete(max_tokens=3).params.max_tokens == 3
    assert complete(max_completion_tokens=4).params.max_tokens == 4


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [104, 105], [[104, 105]]])
def test_a_prompt_is_a_string_a_list_of_one_token_ids_or_a_list_of_one_such(prompt: Any) -> None:
    assert read(COMPLETION, {"prompt": prompt}).prompts == [[104, 105]]


def test_every_supported_field_reaches_the_parameters() -> None:
    fields = {"max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**64 - 1}
    more = {"stop": ["a", "b"], "stop_token_ids": [4], "ignore_eos": True, "presence_penalty": -2, "frequency_penalty": 2}
    last = {"repetition_penalty": 1.5, "logit_bias": {"256": -100}, "priority": -3}
    last |= {"n": 3, "cache_prompt": False, "cache_salt": "mine", "return_cached_tokens": True}
    parsed = chat(**fields, **more, **last, logprobs=True, top_logprobs=20, return_token_ids=True, model="m")
    assert parsed.params == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=18446744073709551615, stop=("a", "b"),
        stop_token_ids=(4,), ignore_eos=True, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5,
        logit_bias={256: -100.0}, logprobs=20, n=3, cache_prompt=False, cache_salt="mine", priority=-3,
    )  # fmt: skip
    assert parsed.return_cached_tokens
    assert (parsed.return_token_ids, parsed.model, parsed.unknown) == (True, "m", frozenset())


def test_null_is_the_same_as_absent() -> None:
    nulls = dict.fromkeys(["max_tokens", "temperature", "stop", "seed", "logprobs", "top_logprobs", "tools", "n", "logit_bias", "prompt"])
    assert chat(**nulls) == chat()


def test_logprobs_are_a_flag_for_chats_and_a_number_for_completions() -> None:
    assert [chat(logprobs=True).params.logprobs, chat(logprobs=False).params.logprobs, complete(logprobs=3).params.logprobs] == [0, None, 3]


def test_parts_of_type_text_are_lines_of_one_content() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read(CHAT, {"messages": [{"role": "user", "content": parts}]}).prompts == [list(b"user: one\ntwo\nassistant: ")]


def test_fields_nobody_knows_are_named_and_left_aside() -> None:
    parsed = read(CHAT, {"messages": [{"role": "user", "content": "hi", "mood": 1}], "colour": "red", "user": "me", "metadata": {}})
    assert parsed.unknown == {"colour", "messages[].mood"}


@pytest.mark.parametrize(("asked", "means"), [(-1, 0), (0, 0), (7, 7), (2**31 - 1, 2**31 - 1), (2**31, 0), (10**30, 0)])
def test_a_top_k_beyond_every_vocabulary_is_off(asked: int, means: int) -> None:
    assert chat(top_k=asked).params.top_k == means


def test_fields_that_ask_for_nothing_are_fine() -> None:
    fine = {"n": 1, "stream": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "echo": False, "best_of": 1}
    assert chat(**fine) == chat()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", 3, "temperature: got 3, allowed: a number from 0 to 2"),
        ("temperature", "hot", 'temperature: got "hot", allowed: a number from 0 to 2'),
        ("temperature", True, "temperature: got true, allowed: a number from 0 to 2"),
        ("top_p", 0, "top_p: got 0, allowed: a number above 0 to 1"),
        ("top_k", -2, "top_k: got -2, allowed: a whole number from 0 (0 or -1 is off)"),
        ("min_p", 1.5, "min_p: got 1.5, allowed: a number from 0 to 1"),
        ("seed", -1, "seed: got -1, allowed: a whole number from 0 to 18446744073709551615"),
        ("seed", 2**64, "seed: got 18446744073709551616, allowed: a whole number from 0 to 18446744073709551615"),
        ("max_tokens", 0, "max_tokens: got 0, allowed: a whole number from 1"),
        ("max_tokens", 2.5, "max_tokens: got 2.5, allowed: a whole number from 1"),
        ("min_tokens", 17, "min_tokens: got 17, allowed: at most max_tokens, which is 16"),
        ("stop", ["a"] * 17, None),
        ("stop", "", 'stop: got "", allowed: a string or a list of at most 16 strings, none empty'),
        ("stop", 5, "stop: got 5, allowed: a string or a list of at most 16 strings, none empty"),
        ("stop_token_ids", [257], "stop_token_ids[0]: got 257, allowed: a whole number from 0 to 256 (the vocabulary)"),
        ("ignore_eos", 1, "ignore_eos: got 1, allowed: true or false"),
        ("presence_penalty", 2.1, "presence_penalty: got 2.1, allowed: a number from -2 to 2"),
        ("frequency_penalty", -3, "frequency_penalty: got -3, allowed: a number from -2 to 2"),
        ("repetition_penalty", 0, "repetition_penalty: got 0, allowed: a number from 0.01 to 100"),
        ("repetition_penalty", 1e300, "repetition_penalty: got 1e+300, allowed: a number from 0.01 to 100"),
        ("logit_bias", {"257": 1}, 'logit_bias key: got "257", allowed: a token id from 0 to 256 (the vocabulary) as a string'),
        ("logit_bias", {"-1": 1}, 'logit_bias key: got "-1", allowed: a token id from 0 to 256 (the vocabulary) as a string'),
        ("logit_bias", {"7": 101}, 'logit_bias["7"]: got 101, allowed: a number from -100 to 100'),
        ("logit_bias", {str(i): 0 for i in range(301)}, None),
        ("logprobs", 21, "logprobs: got 21, allowed: a whole number from 0 to 20"),
        ("logprobs", True, "logprobs: got true, allowed: a whole number from 0 to 20"),
        ("top_logprobs", 2, "top_logprobs: belongs to chats; a completion has logprobs, a number from 0 to 20"),
        ("return_token_ids", "yes", 'return_token_ids: got "yes", allowed: true or false'),
        ("priority", 1.5, "priority: got 1.5, allowed: a whole number from -2147483648 to 2147483647 (lower is served first)"),
        ("priority", "1", 'priority: got "1", allowed: a whole number from -2147483648 to 2147483647 (lower is served first)'),
        ("priority", True, "priority: got true, allowed: a whole number from -2147483648 to 2147483647 (lower is served first)"),
        ("priority", 2**31, None),
        ("service_tier", 5, "service_tier: got 5, allowed: a string"),
        ("model", 5, "model: got 5, allowed: a string"),
        ("n", 0, "n: got 0, allowed: a whole number from 1 to 128"),
        ("n", 129, "n: got 129, allowed: a whole number from 1 to 128"),
        ("n", 1.0, "n: got 1.0, allowed: a whole number from 1 to 128"),
        ("cache_prompt", 0, "cache_prompt: got 0, allowed: true or false"),
        ("cache_salt", 7, "cache_salt: got 7, allowed: a string"),
        ("return_cached_tokens", "yes", 'return_cached_tokens: got "yes", allowed: true or false'),
        ("best_of", 2, "best_of: got 2, which is not supported; leave it out or 1"),
        ("echo", "yes", 'echo: got "yes", allowed: true or false'),
        ("skip_special_tokens", 0, "skip_special_tokens: got 0, allowed: true or false"),
        ("suffix", "x", 'suffix: got "x", which is not supported; leave it out or ""'),
        ("stream", True, "stream: got true, which is not supported; leave it out or false"),
        ("prompt", "", "prompt: is empty; a prompt needs at least one token"),
        ("prompt", [], "prompt: got [], allowed: a string, a list of strings, a list of token ids or a list of such lists, not empty"),
        ("prompt", [[]], "prompt[0]: is empty; a prompt needs at least one token"),
        ("prompt", ["a", "b"], "prompt: got a list of 2 prompts, allowed: 1; give each its own request"),
        ("prompt", [1, 257], "prompt[1]: got 257, allowed: a whole number from 0 to 256 (the vocabulary)"),
        ("prompt", [1, "a"], 'prompt[1]: got "a", allowed: a whole number from 0 to 256 (the vocabulary)'),
        ("prompt", [{}], "prompt[0]: got {}, allowed: a string or a list of token ids"),
        ("prompt", "\ud800", "prompt: holds half of a surrogate pair, which is no character"),
        ("prompt", None, "prompt: is missing, /v1/completions needs it"),
        ("messages", HELLO, "messages: does not belong to /v1/completions, which has prompt"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_what_was_got_and_what_is_allowed(field: str, value: Any, message: str | None) -> None:
    said = refusal(COMPLETION, {"prompt": "hi", field: value})
    assert said == message or (message is None and said.startswith(f"{field}: got "))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logprobs", 1, "logprobs: got 1, allowed: true or false"),
        ("top_logprobs", 2, "top_logprobs: needs logprobs: true"),
        ("top_logprobs", 21, "top_logprobs: got 21, allowed: a whole number from 0 to 20"),
        ("messages", [], "messages: got [], allowed: a list of at least one message"),
        ("messages", None, "messages: is missing, /v1/chat/completions needs it"),
        ("messages", [5], "messages[0]: got 5, allowed: an object with role and content"),
        ("messages", [{"role": "pope", "content": ""}], 'messages[0].role: got "pope", allowed: system, developer, user, assistant, tool'),
        ("messages", [{"role": "user", "content": "", "audio": {}, "function_call": {"name": "f"}}], None),
        ("messages", [{"role": "user"}], "messages[0].content: got null, allowed: a string or a list of parts of type text"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], None),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_served_as_written_is_refused(field: str, value: Any, message: str | None) -> None:
    said = refusal(CHAT, {"messages": HELLO, field: value})
    assert said == message or (message is None and said.startswith(field))


def test_two_different_lengths_are_refused() -> None:
    said = refusal(CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6})
    assert said == "max_tokens: got 5 beside max_completion_tokens 6; give one of them"
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, 0),
        ({"priority": 3}, 3),
        ({"priority": -(2**31)}, -2147483648),
        ({"service_tier": "priority"}, -10),
        ({"service_tier": "flex"}, 10),
        ({"service_tier": "auto"}, 0),
        ({"service_tier": "scale"}, 0),
        ({"service_tier": "default", "priority": 4}, 4),
        ({"service_tier": "flex", "priority": 10}, 10),
        ({"service_tier": None, "priority": None}, 0),
    ],
)
def test_a_priority_is_a_number_or_a_tier_that_stands_for_one(fields: dict[str, Any], priority: int) -> None:
    assert chat(**fields).params.priority == complete(**fields).params.priority == priority
    assert chat(**fields).unknown == frozenset()


def test_a_tier_and_another_priority_beside_it_are_refused() -> None:
    said = refusal(CHAT, {"messages": HELLO, "service_tier": "flex", "priority": 0})
    assert said == 'priority: got 0 beside service_tier "flex", which is 10; give one of them'


def test_numbers_that_json_can_spell_and_arithmetic_cannot_are_refused() -> None:
    assert (
        refusal(COMPLETION, {"prompt": "hi", "temperature": json.loads("1e999")})
        == "temperature: got Infinity, allowed: a number from 0 to 2"
    )
    assert refusal(COMPLETION, {"prompt": "hi", "temperature": 10**400}).startswith("temperature: got 1000")


def test_a_value_that_is_nested_too_deeply_to_be_shown_is_refused_all_the_same() -> None:
    deep: list[Any] = []
    for _ in range(200_000):  # deeper than any Python allows
        deep = [deep]
    said = refusal(COMPLETION, {"prompt": "hi", "temperature": deep})
    assert said == "temperature: got something nested very deeply, allowed: a number from 0 to 2"


def test_without_a_tokenizer_only_token_ids_work() -> None:
    assert read(COMPLETION, {"prompt": [1, 2]}, tokenizer=None).prompts == [[1, 2]]
    reason = "this model has no tokenizer, so only prompts of token ids work"
    assert refusal(CHAT, {"messages": HELLO}, tokenizer=None) == f"messages: {reason}"
    assert refusal(COMPLETION, {"prompt": "hi"}, tokenizer=None) == f"prompt: got a string, but {reason}"
    said = refusal(COMPLETION, {"prompt": [1], "stop": "a"}, tokenizer=None)
    assert said == "stop: this model has no tokenizer, so there is no text to look in; use stop_token_ids"


def test_a_template_that_refuses_is_an_error_of_that_request() -> None:
    class Strict(ByteTokenizer):
        def render_chat(self, *_: Any, **__: Any) -> str:
            raise ValueError("roles must alternate")

    assert refusal(CHAT, {"messages": HELLO}, tokenizer=Strict()) == "messages: the chat template refused them: roles must alternate"


def test_defaults_fill_absent_and_null_fields_and_a_body_wins() -> None:
    parsed = read(CHAT, {"messages": HELLO, "temperature": None, "top_p": 0.5}, temperature=0.0, top_p=0.9, max_tokens=7, stop=("x",))
    assert parsed.params == SamplingParams(temperature=0.0, top_p=0.5, max_tokens=7, stop=("x",), seed=5)


def test_a_default_length_does_not_stand_against_a_given_one() -> None:
    assert read(CHAT, {"messages": HELLO, "max_completion_tokens": 3}, max_tokens=7).params.max_tokens == 3


def test_a_default_for_logprobs_means_the_same_for_both_endpoints() -> None:
    assert read(CHAT, {"messages": HELLO}, logprobs=True, top_logprobs=3).params.logprobs == 3
    assert read(COMPLETION, {"prompt": "hi"}, logprobs=True, top_logprobs=3).params.logprobs == 3
    assert read(CHAT, {"messages": HELLO}, logprobs=4).params.logprobs == 4
    assert read(CHAT, {"messages": HELLO, "logprobs": False}, logprobs=True, top_logprobs=3).params.logprobs is None


def test_a_default_that_cannot_work_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"request\.logit_bias key: got \"999\", allowed: a token id from 0 to 256"):
        BodyReader(ByteTokenizer(), 257, {"logit_bias": {"999": 1.0}}).check_defaults()
    BodyReader(None, 257, {"temperature": 0.5}).check_defaults()


def test_a_derived_seed_is_the_first_eight_bytes_of_sha256_over_run_seed_and_custom_id() -> None:
    assert derive_seed(0, "a") == 11381658363930578919  # sha256 of "0:a" begins 9df3c5fab8ef8fe7
    assert derive_seed(1, "a") != derive_seed(0, "a")


def test_roles_and_names_reach_the_template_as_they_are() -> None:
    seen: list[Any] = []

    class Spy(ByteTokenizer):
        def render_chat(self, messages: list[dict[str, Any]], *_: Any, **__: Any) -> str:
            seen.extend(messages)
            return "x"

    read(CHAT, {"messages": [{"role": "developer", "content": "be", "name": "n"}, *HELLO]}, tokenizer=Spy())
    assert seen == [{"role": "developer", "content": "be", "name": "n"}, {"role": "user", "content": "hi"}]


def test_long_refusals_say_the_same_things() -> None:
    said = refusal(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert said == 'messages[0].content[0].type: got "image_url", which is not supported; allowed: text'
    said = refusal(CHAT, {"messages": HELLO, "logit_bias": {str(i): 0 for i in range(301)}})
    assert said == "logit_bias: got an object of 301 entries, allowed: an object of at most 300 token ids with a number each"
