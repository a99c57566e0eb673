"""The fields of a body that demand something of the answer's text: the spellings of OpenAI and vLLM, and what is refused."""

import json
from typing import Any

import pytest

from jaxkv.constraint import Constraint
from jaxkv.errors import RequestError
from jaxkv.openai import BodyReader, Endpoint
from jaxkv.request import SamplingParams
from jaxkv.testing import ByteTokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def read(**fields: Any) -> SamplingParams:
    return BodyReader(ByteTokenizer(), 257, {}).read(Endpoint.COMPLETION, {"prompt": "hi", **fields}, 0).params


def refusal(**fields: Any) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    return str(caught.value), caught.value.param


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("response_format", {"type": "json_object"}, "json_object", ""),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        (
            *("response_format", {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": SCHEMA}}),
            *("json_schema", json.dumps(SCHEMA)),
        ),
        ("regex", "a+", "regex", "a+"),
        ("grammar", 'start: "a"', "grammar", 'start: "a"'),
        ("structured_outputs", {"json": SCHEMA, "regex": None}, "json_schema", json.dumps(SCHEMA)),
        ("structured_outputs", {"regex": "a+"}, "regex", "a+"),
        ("structured_outputs", {"choice": ["yes", "no"]}, "choice", '["yes", "no"]'),
        ("structured_outputs", {"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ("structured_outputs", {"json_object": True}, "json_object", ""),
        ("guided_json", SCHEMA, "json_schema", json.dumps(SCHEMA)),
        ("guided_json", json.dumps(SCHEMA), "json_schema", json.dumps(SCHEMA)),
        ("guided_regex", "a+", "regex", "a+"),
        ("guided_grammar", 'start: "a"', "grammar", 'start: "a"'),
        ("guided_choice", ["yes", "no"], "choice", '["yes", "no"]'),
    ],
)
def test_every_spelling_becomes_one_constraint_that_knows_its_field(field: str, value: Any, kind: str, text: str) -> None:
    found = read(**{field: value}).constraint
    assert found == Constraint(kind, text)
    assert found.param == field


def test_text_null_and_false_demand_nothing() -> None:
    nothing: dict[str, Any] = {
        "response_format": {"type": "text"},
        "regex": None,
        "structured_outputs": {"json_object": False},
        "bad_words": [],
    }
    assert read(**nothing) == read()
    assert read(regex="a", response_format={"type": "text"}).constraint == Constraint("regex", "a")


def test_the_schema_of_a_response_format_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}
    found = read(response_format={"type": "json_schema", "json_schema": {"schema": schema}}).constraint
    assert found is not None and found.text.index('"b"') < found.text.index('"a"')


def test_bad_words_are_a_list_of_strings() -> None:
    assert read(bad_words=["rain", "é"]).bad_words == ("rain", "é")
    allowed = "allowed: a list of at most 100 strings of 1 to 100 characters"
    assert refusal(bad_words="rain") == (f'bad_words: got "rain", {allowed}', "bad_words")
    assert refusal(bad_words=[""]) == (f'bad_words: got [""], {allowed}', "bad_words")
    wrongs: list[Any] = [["a"] * 101, ["a" * 101], [5], {}]
    for wrong in wrongs:
        assert refusal(bad_words=wrong)[0].endswith(allowed)
    assert refusal(bad_words=["\ud800"])[0] == "bad_words: holds half of a surrogate pair, which is no character"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("response_format", "json", 'response_format: got "json", allowed: an object with "type": text, json_object or json_schema'),
        (
            *("response_format", {"type": "structural_tag"}),
            'response_format: got {"type": "structural_tag"}, allowed: an object with "type": text, json_object or json_schema',
        ),
        (
            *("response_format", {"type": "json_object", "schema": {}}),
            "response_format.schema: is not supported with type json_object; leave it out",
        ),
        (
            *("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
            'response_format.json_schema: got {"name": "x"}, allowed: an object such as {"name": "answer", "schema": {...}}',
        ),
        (
            *("response_format", {"type": "json_schema", "json_schema": {"schema": [1]}}),
            "response_format: got [1], allowed: a JSON schema, which is an object",
        ),
        ("regex", 5, "regex: got 5, allowed: a string"),
        ("regex", "", 'regex: got "", allowed: a string that is not empty'),
        ("grammar", ["a"], 'grammar: got ["a"], allowed: a string'),
        ("guided_choice", [], "guided_choice: got [], allowed: a list of strings, none empty"),
        ("guided_choice", ["a", 5], "guided_choice: got 5, allowed: a string"),
        ("structured_outputs", {}, "structured_outputs: got {}, allowed: an object with one of json, regex, choice, grammar, json_object"),
        (
            *("structured_outputs", {"json": {}, "regex": "a"}),
            'structured_outputs: got {"json": {}, "regex": "a"}, allowed: an object with one of json, regex, choice, grammar, json_object',
        ),
        (
            *("structured_outputs", {"structural_tag": "a"}),
            'structured_outputs: got {"structural_tag": "a"}, allowed: an object with one of json, regex, choice, grammar, json_object',
        ),
        (
            *("structured_outputs", {"json_object": "yes"}),
            'structured_outputs: got {"json_object": "yes"}, allowed: json_object: true or false',
        ),
    ],
)
def test_what_is_no_such_field_is_refused_with_what_is_allowed(field: str, value: Any, message: str) -> None:
    said, param = refusal(**{field: value})
    assert said == message
    assert param is not None and param.startswith(field)


def test_an_answer_has_one_form() -> None:
    assert refusal(regex="a", response_format={"type": "json_object"}) == (
        "response_format: stands beside regex, and an answer has one form; give one of them",
        "response_format",
    )


def test_a_schema_deeper_than_python_goes_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"a": schema}
    assert refusal(guided_json=schema) == ("guided_json: the schema is nested too deeply", "guided_json")
