"""Which tokens may come: forms, where they may end, words that never come, and what is refused."""

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from jaxkv.bad_words import BadWords, Spellings
from jaxkv.constraint import MAX_DEPTH, Constraint, nesting
from jaxkv.errors import JaxkvError, RequestError
from jaxkv.guide import Guide
from jaxkv.guides import Guides
from jaxkv.masks import all_tokens, allow, forbid, is_allowed
from jaxkv.output import Output
from jaxkv.request import SamplingParams
from jaxkv.testing import EOS_ID, NUM_IDS, ByteTokenizer

GUIDES = Guides(ByteTokenizer(), NUM_IDS, (EOS_ID,))


def guide(kind: str = "", text: str = "", ends: tuple[int, ...] = (EOS_ID,), **params: Any) -> Guide:
    constraint = Constraint(kind, text) if kind else None
    found = GUIDES.start(SamplingParams(constraint=constraint, **params), ends)
    assert found is not None
    return found


def allowed(made: Guide) -> str:
    """The bytes that may come, in order, and $ for the end."""
    ids = [token_id for token_id in range(NUM_IDS) if is_allowed(made.mask, token_id)]
    return "".join("$" if token_id == EOS_ID else chr(token_id) for token_id in ids)


def say(made: Guide, text: str) -> Guide:
    for byte in text.encode():
        made.advance(byte)
    return made


def refusal(kind: str = "", text: str = "", ends: tuple[int, ...] = (EOS_ID,), **params: Any) -> str:
    with pytest.raises(RequestError) as caught:
        guide(kind, text, ends, **params)
    assert "\n" not in str(caught.value) and caught.value.param == ("constraint" if kind else "bad_words")
    return str(caught.value)


# Forms


def test_a_regular_expression_allows_what_goes_on_with_it_and_the_end_where_it_may_end() -> None:
    made = guide("regex", "ab|[xy]+")
    assert allowed(made) == "axy"
    assert allowed(say(made, "x")) == "xy$"
    assert not made.is_complete
    assert allowed(say(guide("regex", "ab|[xy]+"), "a")) == "b"


def test_a_form_is_complete_when_nothing_can_follow() -> None:
    made = say(guide("regex", "ab|[xy]+"), "ab")
    assert made.is_complete and allowed(made) == "$"
    assert say(guide("choice", '["no", "nobody"]'), "no").is_complete is False
    assert say(guide("choice", '["no", "nobody"]'), "nobody").is_complete


def test_choices_may_hold_any_character() -> None:
    choices = ['a "b" \\', "é\n", "/x*", "日本 \x00-~#"]
    for choice in choices:
        assert say(guide("choice", json.dumps(choices)), choice).is_complete


def test_a_grammar_in_larks_dialect_may_hold_a_schema() -> None:
    made = guide("grammar", 'start: "<" body ">"\nbody: %json {"type": "integer", "minimum": 5, "maximum": 7}')
    assert allowed(say(made, "<")) == "567"
    assert say(made, "6>").is_complete


def test_the_end_of_text_is_no_part_of_a_form_even_where_any_text_may_come() -> None:
    assert EOS_ID not in np.flatnonzero(np.unpackbits(guide("regex", "[^a]*b").mask.view(np.uint8), bitorder="little"))


def random_text(kind: str, text: str, seed: int) -> str:
    """What a model without any sense would say, turning towards the end after 40 tokens."""
    draw, made, output = random.Random(seed), guide(kind, text), Output(ByteTokenizer(), (EOS_ID,), SamplingParams(), 400)
    output.guide = made
    while output.finish_reason is None:
        may = [token_id for token_id in range(NUM_IDS) if is_allowed(made.mask, token_id)]
        closing = [token_id for token_id in may if token_id in b'"}]0' or token_id == EOS_ID]
        output.accept(draw.choice(closing if closing and len(output.token_ids) > 40 else may))
    assert output.finish_reason == "stop"
    return output.text


@pytest.mark.parametrize("seed", range(10))
def test_random_tokens_under_a_schema_are_an_object_of_that_schema(seed: int) -> None:
    properties = {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 150}}
    schema = {"type": "object", "properties": {**properties, "ok": {"type": "boolean"}}, "required": ["name", "age", "ok"]}
    found = json.loads(random_text("json_schema", json.dumps(schema | {"additionalProperties": False}), seed))
    assert list(found) == ["name", "age", "ok"]
    assert len(found["name"]) <= 5 and 0 <= found["age"] <= 150 and found["ok"] in (True, False)


@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_under_json_object_are_an_object(seed: int) -> None:
    assert isinstance(json.loads(random_text("json_object", "", seed)), dict)


def test_blanks_between_the_parts_of_json_are_one_space_or_one_indented_line() -> None:
    assert "\n" in allowed(say(guide("json_object"), "{")) and " " in allowed(say(guide("json_object"), "{"))
    assert allowed(say(guide("json_object"), "{ ")) == '"}'
    assert allowed(say(guide("json_object"), "{\n" + " " * 24)) == '"}'


def test_an_object_may_have_a_thousand_optional_keys() -> None:
    schema = {"type": "object", "properties": {f"key{i}": {"type": "integer"} for i in range(1000)}}
    assert "0" in allowed(say(guide("json_schema", json.dumps(schema)), '{"key500": 7, "key999":'))


# Ends


def test_below_min_tokens_a_form_goes_on_where_it_can_and_is_complete_where_it_cannot() -> None:
    made = say(guide("regex", "[xy]+", min_tokens=3), "xy")
    assert allowed(made) == "xy" and not made.is_complete
    assert allowed(say(made, "x")) == "xy$"
    assert say(guide("regex", "ab", min_tokens=9), "ab").is_complete


def test_without_end_tokens_a_form_ends_only_where_it_is_complete() -> None:
    assert allowed(say(guide("regex", "[xy]+", ends=()), "x")) == "xy"
    made = say(guide("regex", "xy?", ends=()), "xy")
    assert made.is_complete and allowed(made) == ""


def test_a_stop_token_that_is_text_may_come_where_the_form_can_end_and_where_it_is_part_of_it() -> None:
    assert allowed(say(guide("regex", "[xy]+", ends=(ord("."), EOS_ID)), "x")) == ".xy$"
    assert allowed(guide("regex", "[x.]y", ends=(ord("."), EOS_ID))) == ".x"


def test_output_ends_with_stop_when_the_form_is_complete_and_with_length_when_it_is_cut() -> None:
    for limit, reason, text in ((9, "stop", "abc"), (3, "stop", "abc"), (2, "length", "ab")):
        output = Output(ByteTokenizer(), (EOS_ID,), SamplingParams(), limit, guide("regex", "abc"))
        reasons = [output.accept(byte) for byte in text.encode()]
        assert (reasons, output.text) == ([*[None] * (len(text) - 1), reason], text)


def test_a_complete_form_ends_the_answer_below_min_tokens() -> None:
    output = Output(ByteTokenizer(), (EOS_ID,), SamplingParams(min_tokens=5), 9, guide("regex", "ab", min_tokens=5))
    assert [output.accept(97), output.accept(98)] == [None, "stop"]


# Bad words


def test_a_bad_word_never_comes_however_its_tokens_are_cut() -> None:
    made = guide(bad_words=("rain", "no"))
    assert len(allowed(made)) == NUM_IDS
    assert "n" not in allowed(say(made, "a trai"))
    assert "o" not in allowed(say(guide(bad_words=("rain", "no")), "rn"))


def test_a_bad_word_of_one_token_is_never_allowed() -> None:
    assert "e" not in allowed(guide(bad_words=("e",))) and "b" in allowed(guide(bad_words=("e",)))


def test_tokens_that_hold_begin_or_end_a_bad_word_are_found_in_a_vocabulary_of_pieces() -> None:
    pieces = [b"rain", b"ra", b"in", b"ink", b"train", b"tr", b"ain", b"i", b"n", b""]
    words = BadWords(["rain"], Spellings(pieces))
    assert [piece for i, piece in enumerate(pieces) if not is_allowed(words.mask, i)] == [b"rain", b"train"]
    assert sorted(pieces[i] for i in words.completing(b"tra")) == [b"in", b"ink"]
    assert sorted(pieces[i] for i in words.completing(b"r")) == [b"ain"]
    assert sorted(pieces[i] for i in words.completing(b"rai")) == [b"n"]
    assert words.tail(b"abtr", 7) == b"btri"


def test_random_tokens_never_hold_a_bad_word_while_the_pieces_of_it_come_often() -> None:
    pieces = [b"a", b"b", b"ab", b"ba", b"aab", b"c"]
    spellings = Spellings(pieces)
    words = ["aba", "cc", "bb"]
    seen = ""
    for seed in range(200):
        draw, made = random.Random(seed), Guide(None, BadWords(words, spellings), (), 0, len(pieces))
        text = ""
        while len(text) < 30 and (may := [i for i in range(len(pieces)) if is_allowed(made.mask, i)]):
            token_id = draw.choice(may)
            made.advance(token_id)
            text += pieces[token_id].decode()
        assert not any(word in text for word in words), text
        seen += text + " "
    assert all(part in seen for part in ("aab", "ca", "bab", "bc"))


def test_bad_words_hold_within_a_form() -> None:
    made = guide("regex", "(yes|no) sir", bad_words=("no", "es "))
    assert allowed(made) == "ny"
    assert say(made, "yes").is_stuck
    assert made.reason == "no token may come next: all that could is forbidden"


def test_an_answer_that_can_neither_go_on_nor_end_is_an_error() -> None:
    output = Output(ByteTokenizer(), (EOS_ID,), SamplingParams(), 9, guide("regex", "no", bad_words=("no",)))
    with pytest.raises(JaxkvError, match="no token may come next: all that could is forbidden"):
        output.accept(ord("n"))


def test_a_token_that_may_not_come_is_an_error_since_only_a_bias_can_have_brought_it() -> None:
    with pytest.raises(JaxkvError, match="token 98 may not come here, but logit_bias forbids all that may"):
        guide("regex", "a+").advance(98)


# Sequences


def test_each_sequence_has_a_state_of_its_own() -> None:
    params = SamplingParams(constraint=Constraint("regex", "ab|[xy]+"))
    one, two = GUIDES.start(params, (EOS_ID,)), GUIDES.start(params, (EOS_ID,))
    assert one is not None and two is not None
    say(one, "a")
    assert (allowed(one), allowed(two)) == ("b", "axy")
    assert allowed(say(two, "xy")) == "xy$"
    assert allowed(guide("regex", "ab|[xy]+")) == "axy"


def test_who_demands_nothing_has_no_guide() -> None:
    assert GUIDES.start(SamplingParams(), (EOS_ID,)) is None


def test_masks_are_bits_of_32_in_a_word() -> None:
    mask = all_tokens(70)
    assert mask.tolist() == [2**32 - 1, 2**32 - 1, 0b111111]
    forbid(mask, np.array([0, 31, 64, 64]))
    assert mask.tolist() == [2**31 - 2, 2**32 - 1, 0b111110]
    allow(mask, np.array([31, 69]))
    assert mask.tolist() == [2**32 - 2, 2**32 - 1, 0b111110]


# Tokenizers


class Spaced(ByteTokenizer):
    """Writes a space before every text, and has a token for two letters."""

    vocab_size = NUM_IDS + 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(f" {text}".encode())

    def token_bytes(self, token_id: int) -> bytes:
        return b"ab" if token_id == NUM_IDS else super().token_bytes(token_id)


def test_a_tokenizer_that_writes_a_space_before_texts_puts_none_into_a_form() -> None:
    guides = Guides(Spaced(), NUM_IDS + 1, (EOS_ID,))
    made = guides.start(SamplingParams(constraint=Constraint("regex", "abab!")), (EOS_ID,))
    assert made is not None
    for token_id in (NUM_IDS, NUM_IDS, ord("!")):
        assert [i for i in range(NUM_IDS + 1) if is_allowed(made.mask, i)] == [token_id]
        made.advance(token_id)
    assert made.is_complete


def test_a_vocabulary_may_be_a_multiple_of_32_and_larger_than_the_tokenizers() -> None:
    class Padded(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"" if token_id > EOS_ID else super().token_bytes(token_id)

    for vocab_size in (288, 300, 320):
        made = Guides(Padded(), vocab_size, (EOS_ID,)).start(SamplingParams(constraint=Constraint("regex", "ab?")), (EOS_ID,))
        assert made is not None
        assert len(made.mask) == -(-vocab_size // 32)
        made.advance(ord("a"))
        assert [i for i in range(vocab_size) if is_allowed(made.mask, i)] == [ord("b"), EOS_ID]


# Refusals


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("verse", "", "constraint: got the kind 'verse', allowed: json_object, json_schema, regex, grammar, choice"),
        ("regex", "a" * 65537, "constraint: got 65537 bytes, allowed: at most 65536"),
        ("regex", "(" * 65 + "a" + ")" * 65, "constraint: got brackets 65 deep, allowed: at most 64"),
        ("json_schema", "", "constraint: the schema is no JSON: Expecting value: line 1 column 1 (char 0)"),
        ("json_schema", f'{{"const": {"1" * 5000}}}', "constraint: the schema has a number of too many digits"),
        ("json_schema", "[]", "constraint: the schema is a list, allowed: an object"),
        ("choice", '["a", ""]', "constraint: allowed: a list of strings, none empty"),
        ("choice", "{", "constraint: allowed: a list of strings, none empty"),
        ("choice", json.dumps(["a"] * 1001), "constraint: got 1001 choices, allowed: at most 1000"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused(kind: str, text: str, message: str) -> None:
    assert refusal(kind, text) == message


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("json_schema", '{"type": "array", "uniqueItems": true}', r"Unimplemented keys: .*uniqueItems"),
        ("json_schema", '{"type": "strin"}', "strin"),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}', "http"),
        ("json_schema", '{"$ref": "file:///etc/hostname"}', "file"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 2}', "minimum"),
        ("json_schema", '{"const": "\\ud800"}', "constraint: unexpected end of hex escape"),
        ("regex", "a\ud800", "surrogates not allowed"),
        ("json_schema", '{"$ref": "#"}', "constraint: no text has this form"),
        ("regex", "(a", r'^constraint: at 1\(8\): invalid regex "\(a" \(in regex\): regex parse error: unclosed group$'),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "start: nobody", "nobody"),
        ("grammar", "what is this", ""),
    ],
)
def test_what_no_grammar_can_be_made_of_is_refused_in_one_line(kind: str, text: str, part: str) -> None:
    said = refusal(kind, text)
    assert re.search(part, said), said


def test_a_grammar_that_costs_too_much_is_refused() -> None:
    parts = [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(10)]} for i in range(12)]
    assert refusal("json_schema", json.dumps({"allOf": parts})) == "constraint: schema too large"
    assert "exceed the maximum number" in refusal("regex", "a" + "*" * 300)


def test_a_form_that_only_bad_words_or_min_tokens_contradict_is_refused_at_the_door() -> None:
    assert refusal("regex", "a+", bad_words=("a",)) == (
        "constraint: the answer could not even begin: no token may come next: all that could is forbidden"
    )
    assert refusal("regex", "", min_tokens=1).startswith("constraint: the answer could not even begin")
    assert refusal("regex", "", ends=()).startswith("constraint: the answer could not even begin")


def test_a_model_without_a_tokenizer_knows_no_text() -> None:
    for params in (SamplingParams(constraint=Constraint("json_object", param="response_format")), SamplingParams(bad_words=("a",))):
        with pytest.raises(RequestError, match="this model has no tokenizer, so nobody knows what its tokens say"):
            Guides(None, NUM_IDS, ()).prepare(params)


def test_without_the_package_a_constraint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    guides = Guides(ByteTokenizer(), NUM_IDS, (EOS_ID,))
    with pytest.raises(RequestError) as caught:
        guides.prepare(SamplingParams(constraint=Constraint("json_object", param="response_format")))
    assert str(caught.value) == (
        "response_format: this needs the package llguidance, which is not installed: pip install 'jaxkv[structured]'"
    )
    assert guides.start(SamplingParams(bad_words=("a",)), ()) is not None


def test_brackets_are_counted_as_deep_as_they_stand_open() -> None:
    assert [nesting(text) for text in ("", "a(b[c])", ")(", "(" * 70, "()()()")] == [0, 2, 1, 70, 1]
    assert MAX_DEPTH == 64
