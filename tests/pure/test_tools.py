"""Tools in bodies, prompts and answers: what is read, what is refused and in which words, what a template sees, what a client is told."""

import json

import pytest

from jaxkv.constraint import Constraint
from jaxkv.errors import RequestError
from jaxkv.models import tokenizer as models_tokenizer
from jaxkv.openai import BodyReader, Endpoint, Frame, ParsedBody, build_answer
from jaxkv.openai.chunks import ChoicePieces
from jaxkv.openai.tool_grammar import constrain
from jaxkv.openai.tools import ToolUse
from jaxkv.request import Completion, SamplingParams, TokenLogprobs
from jaxkv.testing import ByteTokenizer

HELLO = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
FRAME = Frame("x-1", 1700000000, "served", "fp_1")

# As Qwen2.5's, in fewer words.
HERMES = (
    "{%- if tools %}{{- '<|im_start|>tools' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role }}{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}"
    '{%- for call in m.tool_calls %}{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


class HermesTokenizer(models_tokenizer.ByteTokenizer):
    chat_templates = {"default": HERMES}  # noqa: RUF012


def read(body, *, tokenizer=ByteTokenizer(), endpoint=Endpoint.CHAT):  # noqa: B008
    return BodyReader(tokenizer, 257, {}).read(endpoint, body, 5)


def prompt(body, tokenizer=ByteTokenizer()):  # noqa: B008
    return tokenizer.decode(read(body, tokenizer=tokenizer).prompts[0], False)


def refusal(body, **more):
    with pytest.raises(RequestError) as caught:
        read(body, **more)
    assert "\n" not in str(caught.value) and caught.value.param
    return str(caught.value)


def function(**fields):
    return [{"type": "function", "function": {"name": "f", **fields}}]


def test_tools_are_read_with_how_they_may_be_used():
    body = {"messages": HELLO, "tools": [WEATHER, NOW]}
    assert read(body).tool_use == ToolUse((WEATHER, NOW))
    assert read(body | {"tool_choice": "auto", "parallel_tool_calls": False}).tool_use == ToolUse((WEATHER, NOW), is_parallel=False)
    assert read(body | {"tool_choice": None, "parallel_tool_calls": None}).tool_use == ToolUse((WEATHER, NOW))


def test_a_choice_that_forces_a_call_puts_a_grammar_before_whatever_form_the_content_should_have():
    body = {"messages": HELLO, "tools": [WEATHER, NOW], "response_format": {"type": "json_object"}}
    required = read(body | {"tool_choice": "required"})
    named = read(body | {"tool_choice": {"type": "function", "function": {"name": "now"}}})
    assert required.tool_use == ToolUse((WEATHER, NOW), is_required=True)
    assert named.tool_use == ToolUse((WEATHER, NOW), named="now")
    assert required.params.constraint == constrain(required.tool_use, None) != named.params.constraint
    assert read(body).params.constraint == constrain(ToolUse((WEATHER, NOW)), Constraint("json_object"))
    assert read(body | {"tool_choice": "none"}).params.constraint == Constraint("json_object")
    assert read({"messages": HELLO, "tools": [WEATHER]}).params.constraint is None


def test_without_tools_or_with_the_choice_of_none_the_prompt_has_none_and_nothing_is_called():
    plain = read({"messages": HELLO})
    assert plain.tool_use is None
    assert read({"messages": HELLO, "tools": [WEATHER], "tool_choice": "none"}) == plain
    assert read({"messages": HELLO, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}) == plain


def test_strict_is_read_and_kept_out_of_the_definition_that_the_model_sees():
    body = {"messages": HELLO, "tools": [*function(strict=True), *function(name="g", strict=False)]}
    assert read(body).tool_use == ToolUse((*function(), *function(name="g")), strict=frozenset({"f"}))


def test_keys_that_nobody_knows_are_named_and_left_aside():
    tools = [{"type": "function", "function": {"name": "f", "mood": 1}, "colour": 2}]
    parsed = read({"messages": HELLO, "tools": tools})
    assert parsed.unknown == {"tools[].colour", "tools[].function.mood"} and parsed.tool_use.tools == tuple(function())


def nested(depth):
    return {"type": "object"} if depth == 1 else {"properties": nested(depth - 1)}


NAMES = "allowed: 1 to 64 of the letters a to z and A to Z, digits, _, - and ."
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "tools: got {}, allowed: a list of at most 128 functions"),
        ({"tools": [WEATHER] * 129}, "tools: got 129, allowed: at most 128; offer fewer at a time"),
        ({"tools": [5]}, 'tools[0]: got 5, allowed: an object such as {"type": "function", "function": {"name": "..."}}'),
        ({"tools": [{}]}, 'tools[0].type: got null, allowed: "function"'),
        ({"tools": [{"type": "custom"}]}, 'tools[0].type: got "custom", allowed: "function"'),
        ({"tools": [{"type": "function"}]}, 'tools[0].function: got null, allowed: an object such as {"name": "...", "parameters": {...}}'),
        ({"tools": function(name="")}, f'tools[0].function.name: got "", {NAMES}'),
        ({"tools": function(name="a b")}, f'tools[0].function.name: got "a b", {NAMES}'),
        ({"tools": function(name="a\n")}, f'tools[0].function.name: got "a\\n", {NAMES}'),
        ({"tools": function(name=["f"])}, f'tools[0].function.name: got ["f"], {NAMES}'),
        ({"tools": [NOW, NOW]}, 'tools[1].function.name: got "now" a second time; give each tool a name of its own'),
        ({"tools": function(description=5)}, "tools[0].function.description: got 5, allowed: a string"),
        ({"tools": function(strict="yes")}, 'tools[0].function.strict: got "yes", allowed: true or false'),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters: got [], allowed: a JSON schema of type object"),
        (
            {"tools": function(parameters={"type": "string"})},
            'tools[0].function.parameters.type: got "string", allowed: "object": arguments have names',
        ),
        (
            {"tools": function(parameters=nested(65))},
            "tools[0].function.parameters: is nested more than 64 deep; define parts of it under $defs",
        ),
        (
            {"tools": function(parameters={"title": "\ud800"})},
            "tools[0].function.parameters: holds half of a surrogate pair, which is no character",
        ),
        (
            {"tools": function(description="x" * 2**18)},
            "tools: got 262210 bytes of JSON, allowed: at most 262144; offer fewer or smaller ones",
        ),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: got 1, allowed: true or false"),
        ({"tools": [NOW], "tool_choice": "any"}, f'tool_choice: got "any", allowed: {CHOICES}'),
        ({"tools": [NOW], "tool_choice": ["auto"]}, f'tool_choice: got ["auto"], allowed: {CHOICES}'),
        ({"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}, f'tool_choice: got {{"type": "allowed_tools"}}, allowed: {CHOICES}'),
        ({"tool_choice": "required"}, 'tool_choice: got "required" without tools; offer some or leave it out'),
        (
            {"tools": [NOW, WEATHER], "tool_choice": {"type": "function", "function": {"name": "then"}}},
            'tool_choice.function.name: got "then", allowed: one of the tools, which are now, weather',
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "function"}},
            "tool_choice.function.name: got null, allowed: one of the tools, which are now",
        ),
    ],
)
def test_tools_that_cannot_be_served_as_written_are_refused(fields, message):
    assert refusal({"messages": HELLO, **fields}) == message


def test_the_depth_and_size_allowed_are_allowed():
    assert read({"messages": HELLO, "tools": function(parameters=nested(64))}).tool_use is not None
    assert read({"messages": HELLO, "tools": function(name="n" * 64, description="x" * (2**18 - 200))}).tool_use is not None


def test_a_long_list_of_names_is_cut_in_a_message():
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(7)]
    said = refusal({"messages": HELLO, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "x"}}})
    assert said == 'tool_choice.function.name: got "x", allowed: one of the tools, which are t0, t1, t2, t3, t4 and 2 more'


def test_a_completion_calls_no_tools():
    assert (
        refusal({"prompt": "a", "tools": [NOW]}, endpoint=Endpoint.COMPLETION)
        == "tools: does not belong to /v1/completions; chats can call tools"
    )
    said = refusal({"prompt": "a", "tool_choice": "required"}, endpoint=Endpoint.COMPLETION)
    assert said == "tool_choice: does not belong to /v1/completions; chats can call tools"
    asks_for_nothing = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True}
    assert read({"prompt": "a", **asks_for_nothing}, endpoint=Endpoint.COMPLETION).tool_use is None


def talk(**more):
    return [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain", **more},
    ]


def calling(**fields):
    return [*HELLO, {"role": "assistant", "tool_calls": [CALL | fields]}]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (talk(tool_call_id=None), "messages[2].tool_call_id: got null, allowed: a string"),
        (
            talk(tool_call_id="call_2"),
            'messages[2].tool_call_id: got "call_2", which no message before it called; keep the message with its tool_calls',
        ),
        (talk(content=None), "messages[2].content: got null, allowed: a string or a list of parts of type text"),
        ([{**HELLO[0], "tool_calls": [CALL]}], "messages[0].tool_calls: belong to messages of the assistant, this is one of the user"),
        ([{**HELLO[0], "tool_call_id": "a"}], "messages[0].tool_call_id: belongs to messages of a tool, this is one of the user"),
        ([{**HELLO[0], "function_call": {"name": "f"}}], "messages[0].function_call: is not supported; use tool_calls"),
        ([{**HELLO[0], "audio": {"id": "a"}}], "messages[0].audio: is not supported"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], 'messages[0].tool_calls: got {"a": 1}, allowed: a list of at most 128 calls'),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]: got 5, allowed: an object with id, type and function"),
        (calling(id=None), "messages[1].tool_calls[0].id: got null, allowed: a string"),
        (calling(type="custom"), 'messages[1].tool_calls[0].type: got "custom", allowed: "function"'),
        (calling(function=None), "messages[1].tool_calls[0].function: got null, allowed: an object with name and arguments"),
        (calling(function={"arguments": "{}"}), "messages[1].tool_calls[0].function.name: got null, allowed: a string"),
        *(
            (
                calling(function={"name": "f", "arguments": arguments}),
                f"messages[1].tool_calls[0].function.arguments: got {json.dumps(arguments)}, allowed: a JSON object as a string",
            )
            for arguments in ("{", "[]", '{"a": "\\ud800"}', "null")
        ),
        (calling(function={"name": "f", "arguments": {}}), "messages[1].tool_calls[0].function.arguments: got {}, allowed: a string"),
    ],
)
def test_calls_and_results_that_cannot_be_read_are_refused(messages, message):
    assert refusal({"messages": messages}) == message


def test_calls_are_not_gone_on_with():
    said = refusal({"messages": talk()[:2], "continue_final_message": True})
    assert said == "continue_final_message: got true, but the last message has tool_calls, which are whole; leave it out"


def test_a_template_that_knows_tools_gets_definitions_calls_and_results_as_transformers_gives_them():
    assert prompt({"messages": talk(), "tools": [WEATHER, NOW]}, HermesTokenizer()) == (
        "<|im_start|>tools\n"
        '{"type": "function", "function": {"name": "weather", "description": "How it is", "parameters": {"type": "object", '
        '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}\n'
        '{"type": "function", "function": {"name": "now"}}<|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_template_sees_ids_names_and_content_that_is_null():
    seen = []

    class Spy(HermesTokenizer):
        def render_chat(self, messages, add_generation_prompt=True, tools=None, **_):
            seen.append((messages, tools))
            return "x"

    read({"messages": talk(name="weather"), "tools": [NOW]}, tokenizer=Spy())
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    result = {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "call_1"}
    assert seen == [([*HELLO, {"role": "assistant", "tool_calls": [call]}, result], [NOW])]
    read({"messages": HELLO}, tokenizer=Spy())
    assert seen[1] == (HELLO, None)


def test_a_template_that_knows_no_tools_gets_them_as_text():
    two = [{**CALL, "id": "a"}, {"id": "b", "function": {"name": "now", "arguments": ""}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "Looking.", "tool_calls": two},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
    assert prompt({"messages": messages, "tools": [NOW]}) == (
        "system: Be brief.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "now"}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n'
        "user: hi\n"
        'assistant: Looking.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        "user: <tool_response>\nrain\n</tool_response>\n<tool_response>\nnoon\n</tool_response>\n"
        "assistant: "
    )


def test_without_a_system_message_the_definitions_are_one():
    assert prompt({"messages": HELLO, "tools": [NOW]}).startswith("system: # Tools\n\nYou may")
    assert prompt({"messages": talk()}).startswith("user: hi\nassistant: <tool_call>\n")


@pytest.mark.parametrize(
    ("templates", "knows"),
    [
        ({"default": "{% for t in tools %}{% endfor %}"}, True),
        ({"default": "{% if not tools is defined %}{% set tools = none %}{% endif %}"}, True),
        ({"default": "{% for m in messages %}{{ m['tools'] }} tools {% endfor %}"}, False),
        ({"default": "", "tool_use": "x"}, True),
        ({}, False),
    ],
)
def test_a_template_knows_tools_if_it_looks_at_them(templates, knows):
    made = models_tokenizer.ByteTokenizer()
    made.chat_templates = templates
    assert made.knows_tools is knows


def test_a_template_that_is_no_template_is_an_error_of_that_request():
    made = models_tokenizer.ByteTokenizer()
    made.chat_templates = {"default": "{% if %}"}
    said = refusal({"messages": HELLO}, tokenizer=made)
    assert said.startswith("messages: the chat template refused them: the chat template cannot be read: Expected an expression")


TEXT = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "K"}}\n</tool_call>\n<tool_call>\n{"name": "now"}\n</tool_call>'


def body(**fields):
    return ParsedBody(Endpoint.CHAT, [[1, 2]], SamplingParams(seed=7, **fields), tool_use=ToolUse((WEATHER, NOW)))


def choice(text, finish_reason="stop", index=0):
    completions = [Completion([97], text, finish_reason, prompt_tokens=2, seed=7) for _ in range(index + 1)]
    return build_answer(body(n=index + 1), completions, FRAME, ByteTokenizer())["choices"][index]


def test_an_answer_with_calls_tells_them_and_ends_because_of_them():
    found = choice(TEXT)
    ids = [call.pop("id") for call in found["message"]["tool_calls"]]
    assert found["message"] == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "K"}'}},
            {"type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    assert found["finish_reason"] == "tool_calls"
    assert len(set(ids)) == 2


def test_the_content_beside_nothing_but_calls_is_null_and_a_text_without_calls_is_content():
    assert choice(TEXT.removeprefix("Well.\n"))["message"]["content"] is None
    assert choice("")["message"] == {"role": "assistant", "content": ""}
    assert choice("so\n") == {
        "index": 0,
        "message": {"role": "assistant", "content": "so\n"},
        "logprobs": None,
        "finish_reason": "stop",
    }


def test_an_answer_that_is_cut_off_ends_by_length_with_the_calls_that_are_whole():
    found = choice(TEXT.removesuffix('"}\n</tool_call>'), "length")
    assert found["finish_reason"] == "length"
    assert len(found["message"]["tool_calls"]) == 1
    assert found["message"]["content"] == 'Well.\n<tool_call>\n{"name": "now'


def test_the_ids_of_calls_depend_on_prompt_seed_and_place_alone():
    ids = [call["id"] for index in range(2) for call in choice(TEXT, index=index)["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert ids[0] == "call_067d937fe8b75037c09988b0"  # sha256 of "7:0:0:1,2"


def pieces(texts, **fields):
    made, found = ChoicePieces(0, body(**fields), ByteTokenizer()), []
    for index, text in enumerate(texts):
        logprobs = [TokenLogprobs(97, -0.5)] if "logprobs" in fields else []
        found += made.add(text, [97], logprobs, is_last=index == len(texts) - 1)
    return found, made


def test_a_stream_tells_content_then_name_then_arguments():
    found, made = pieces(["Well.", "\n<tool_c", *TEXT.removeprefix("Well.\n<tool_c")])
    deltas = [piece["delta"] for piece in found]
    names = [call.pop("id") for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert deltas == [
        {"content": "Well."},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "K"}'}}]},
        {"tool_calls": [{"index": 1, "type": "function", "function": {"name": "now", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]
    assert names == [call["id"] for call in choice(TEXT)["message"]["tool_calls"]]
    assert [made.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]


def test_every_token_of_a_stream_with_calls_is_told_once():
    texts = list(TEXT)
    found, _ = pieces(texts, logprobs=0)
    assert sum(len(piece["logprobs"]["content"]) for piece in found) == len(texts)
