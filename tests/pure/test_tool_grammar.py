"""Grammars for calls: what may come where, and that the parser finds what they let through."""

import pytest

from jaxkv.constraint import Constraint
from jaxkv.errors import RequestError
from jaxkv.guides import Guides
from jaxkv.masks import is_allowed
from jaxkv.openai.tool_calls import Arguments, Begin, CallParser, Content
from jaxkv.openai.tool_grammar import constrain
from jaxkv.openai.tools import ToolUse
from jaxkv.request import SamplingParams
from jaxkv.testing import EOS_ID, NUM_IDS, ByteTokenizer

GUIDES = Guides(ByteTokenizer(), NUM_IDS, (EOS_ID,))
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rome"]}, "days": {"type": "integer"}}, "required": ["city"]}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name} | ({} if parameters is None else {"parameters": parameters})}


TOOLS = (tool("weather", CITY), tool("now"))
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def guide(form=None, tools=TOOLS, **how):
    return GUIDES.start(SamplingParams(constraint=constrain(ToolUse(tools, **how), form)), (EOS_ID,))


def follow(made, text):
    """The bytes that may come after `text`, in order, and $ for the end; "all" for very many."""
    for byte in text.encode():
        made.advance(byte)
    ids = [token_id for token_id in range(NUM_IDS) if is_allowed(made.mask, token_id)]
    return "all" if len(ids) > 100 else "".join("$" if token_id == EOS_ID else chr(token_id) for token_id in ids)


def test_a_required_call_is_all_of_the_answer_and_more_may_follow():
    made = guide(is_required=True)
    assert follow(made, "") == "<"
    assert follow(made, '<tool_call>\n{"name": "') == "nw"
    assert follow(made, 'weather", "arguments": ') == "{"
    assert follow(made, '{"') == "c"
    assert follow(made, 'city": ') == '"'
    assert follow(made, '"Ulm"') == ",}"
    assert follow(made, ', "days": 2') == "0123456789}"
    assert follow(made, "}}\n</tool_call>") == "\n$"
    assert follow(made, f"\n{NOW}") == "\n$"


def test_one_call_and_no_more_where_calls_may_not_be_parallel():
    made = guide(is_required=True, is_parallel=False)
    assert follow(made, NOW) == "$" and made.is_complete


def test_the_named_tool_is_called_once():
    made = guide(named="now")
    assert follow(made, '<tool_call>\n{"name": "') == "n"
    assert follow(made, NOW.removeprefix('<tool_call>\n{"name": "')) == "$" and made.is_complete


def test_a_tool_without_parameters_has_no_arguments_and_one_with_them_no_others():
    assert follow(guide(named="now"), '<tool_call>\n{"name": "now", "arguments": {') == "}"
    open_one = {"properties": {"a": {"type": "null"}}, "additionalProperties": True}
    assert follow(guide(tools=(tool("f", open_one),), named="f"), '<tool_call>\n{"name": "f", "arguments": {"') == "all"


def test_parameters_may_refer_to_their_own_definitions():
    tree = {"properties": {"left": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    parameters = {"type": "object", "$ref": "#/$defs/tree", "$defs": {"tree": tree}}
    made = guide(tools=(tool("f", parameters), tool("g", parameters)), named="g")
    assert follow(made, '<tool_call>\n{"name": "g", "arguments": {"left": {"left": {') == '"}'


def test_nothing_is_demanded_of_an_answer_that_may_call_and_need_not():
    assert constrain(ToolUse(TOOLS), None) is None


def test_strict_tools_leave_the_text_free_until_a_call_begins():
    made = guide(strict=frozenset({"weather"}))
    assert follow(made, "Well, <tool_cal") == "all"
    assert follow(made, "l>") == "\n"
    assert follow(made, '\n{"name": "weather", "arguments": {"city": ') == '"'
    assert follow(made, '"Rome"}}\n</tool_call>') == "all"
    assert follow(made, f" and {NOW}") == "all"
    assert not made.is_complete


def test_strict_tools_whose_calls_may_not_be_parallel_end_the_answer_with_the_first():
    made = guide(strict=frozenset({"now"}), is_parallel=False)
    assert follow(made, f"So: {NOW}") == "$" and made.is_complete
    assert follow(guide(strict=frozenset({"now"}), is_parallel=False), "no <call>") == "all"


def test_beside_json_an_answer_is_that_or_calls():
    form = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": false}')
    assert follow(guide(form), "") == "<{"
    assert follow(guide(form), '{"a": null}') == "$"
    assert follow(guide(form), WEATHER) == "\n$"
    assert follow(guide(Constraint("json_object")), '{"x": 1}') == "$"
    assert follow(guide(form, is_required=True), "") == "<"


def test_only_json_may_stand_beside_tools():
    with pytest.raises(RequestError) as error:
        constrain(ToolUse(TOOLS), Constraint("regex", "a+", "guided_regex"))
    assert str(error.value) == 'guided_regex: stands beside tools, which only JSON may; leave it out, or say tool_choice: "none"'
    assert error.value.param == "guided_regex"
    with pytest.raises(RequestError, match="response_format: the schema is no JSON"):
        constrain(ToolUse(TOOLS), Constraint("json_schema", "{", "response_format"))


def test_a_schema_that_is_not_understood_is_an_error_for_strict_tools_and_where_it_makes_no_sense():
    odd = (tool("f", {"properties": {"a": {"type": "string", "format": "odd"}}}),)
    assert follow(guide(tools=odd, named="f"), '<tool_call>\n{"name": "f", "arguments": {"') == "a"
    with pytest.raises(RequestError, match=r"tools: .*Unknown format: odd") as error:
        guide(tools=odd, strict=frozenset({"f"}))
    assert error.value.param == "tools"
    with pytest.raises(RequestError, match=r"tools: .*Invalid type: strng"):
        guide(tools=(tool("f", {"properties": {"a": {"type": "strng"}}}),), named="f")


def test_a_grammar_that_would_be_too_long_is_refused():
    long = {"properties": {"a": {"const": "x" * 2**16}}}
    with pytest.raises(RequestError, match=r"tools: got \d+ bytes, allowed: at most 65536"):
        guide(tools=(tool("f", long),), named="f")


@pytest.mark.parametrize("how", [{"is_required": True}, {"strict": frozenset({"now"})}])
def test_the_parser_finds_what_a_grammar_lets_through(how):
    made, parser = guide(**how), CallParser({"weather", "now"}, is_guided=True)
    parts = []
    for char in f"{WEATHER}\n{NOW}":
        follow(made, char)
        parts += parser.feed(char)
    parts += parser.finish()
    assert not any(isinstance(part, Content) for part in parts)
    assert [part for part in parts if isinstance(part, Begin)] == [Begin(0, "weather"), Begin(1, "now")]
    assert "".join(part.text for part in parts if isinstance(part, Arguments)) == '{"city": "Ulm"}{}'
    assert len(parts) > 10
