"""Calls in an answer's text: what is one, what is content, and that it makes no difference where the text is cut."""

import random

import pytest

from jaxkv.openai.tool_calls import Arguments, Begin, CallParser, Content

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parse(pieces, **how):
    """Content and calls of a text that comes in `pieces`."""
    parser, content, calls = CallParser({"f", "g"}, **how), "", []
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, Begin):
            assert part.index == len(calls)
            calls.append((part.name, ""))
        else:
            assert part.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    assert parser.num_calls == len(calls) or how.get("is_guided")
    return content, calls


TEXTS = [
    ("plain text, with < and <tool and a space ", "plain text, with < and <tool and a space ", []),
    (" \n", " \n", []),
    (CALL, "", [("f", '{"a": 1}')]),
    (f"\n {CALL}\n\n", "", [("f", '{"a": 1}')]),
    (f"Let me look. \n{CALL}", "Let me look.", [("f", '{"a": 1}')]),
    (f"{CALL}\n{CALL}", "", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    (f"one {CALL} two {CALL} three", "one two three", [("f", '{"a": 1}'), ("f", '{"a": 1}')]),
    ('<tool_call>{"arguments":{"b":[{}, "x"]} , "name" :"g"}</tool_call>', "", [("g", '{"b":[{}, "x"]}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call> } \\" \\\\"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call> } \\" \\\\"}')],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": "h\u00e9 \\ud800"}}</tool_call>', "", [("f", '{"a": "h\u00e9 \\ud800"}')]),
    ('<tool_call>{"\\u006eame": "f", "arguments": {}, "id": 7}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}\n</tool_c', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call>', "", [("f", "{}"), ("g", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}} and so on', " and so on", [("f", "{}")]),
]

MALFORMED = [
    '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": "one\ntwo"}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {]}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 200 + "1" + "}" * 201 + "</tool_call>",
    '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
    '<tool_call>{"name": ["f"]}</tool_call>',
    "<tool_call>f(1)</tool_call>",
    "so  <tool_call></tool_call> ",
    'so  <tool_call>\n{"name": "f", "argum',
    "well \n<tool_ca",
    "</tool_call>",
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS)
def test_a_call_is_taken_out_of_the_text(text, content, calls):
    assert parse([text]) == (content, calls)


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_call_is_content_as_it_was_written(text):
    assert parse([text]) == (text, [])


@pytest.mark.parametrize("text", [*(text for text, _, _ in TEXTS), *(text for text in MALFORMED if len(text) < 200)])
@pytest.mark.parametrize("is_guided", [False, True])
@pytest.mark.parametrize("is_parallel", [False, True])
def test_every_cut_of_a_text_gives_the_same(text, is_guided, is_parallel):
    how = {"is_guided": is_guided, "is_parallel": is_parallel}
    whole = parse([text], **how)
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], **how) == whole
    assert parse(list(text), **how) == whole


def test_random_texts_in_random_pieces_give_the_same_as_whole_ones():
    bits = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', "{", "}", '"', "\\", " ", "\n", "a", '{"a": 1}', "<", "[", CALL]
    rng = random.Random(7)
    num_calls = 0
    for _ in range(400):
        text = "".join(rng.choices(bits, k=rng.randrange(12)))
        pieces, at = [], 0
        while at < len(text):
            pieces.append(text[at : (at := at + rng.randrange(1, 9))])
        for is_guided in (False, True):
            assert parse(pieces, is_guided=is_guided) == parse([text], is_guided=is_guided), text
        num_calls += len(parse([text])[1])
    assert num_calls > 50


def test_content_is_given_before_a_call_and_no_part_of_a_marker_with_it():
    parser = CallParser({"f"})
    assert parser.feed("Let me see.\n<") == [Content("Let me see.")]
    assert parser.feed("tool_call") == []
    assert parser.feed('>{"name": "f", "arguments": {"a"') == []
    assert parser.feed(": 1}}") == [Begin(0, "f"), Arguments(0, '{"a": 1}')]
    assert parser.feed("</tool_call>") == parser.finish() == []


def test_a_marker_that_was_none_after_all_is_given_when_that_is_certain():
    parser = CallParser({"f"})
    assert parser.feed("a <tool") == [Content("a")]
    assert parser.feed("s") == [Content(" <tools")]
    assert parser.feed("<tool_call> x") == [Content("<tool_call> "), Content("x")]


def test_the_arguments_of_a_guided_call_come_as_they_grow():
    parser = CallParser({"f"}, is_guided=True)
    assert parser.feed('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.feed('{"a') == [Begin(0, "f"), Arguments(0, '{"a')]
    assert parser.feed('": {}') == [Arguments(0, '": {}')]
    assert parser.feed("}}\n</tool_call>") == [Arguments(0, "}")]
    assert parser.finish() == []


def test_a_guided_call_that_is_cut_off_keeps_the_arguments_it_has():
    assert parse(['<tool_call>\n{"name": "f", "arguments": {"a": "tru'], is_guided=True) == ("", [("f", '{"a": "tru')])


def test_only_the_first_of_calls_that_may_not_be_parallel_counts_and_nothing_follows_it():
    assert parse([f"first {CALL}\n{CALL} more"], is_parallel=False) == ("first", [("f", '{"a": 1}')])


def test_a_long_text_with_many_markers_takes_no_long_time():
    assert parse(['<tool_call>{"a": "' * 20_000])[1] == []
    assert parse(["<tool_call>" * 20_000])[1] == []
