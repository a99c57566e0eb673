"""Templates in the styles of public models, with the text that transformers 5 makes of them."""

from datetime import datetime
from typing import Any

import pytest

from jaxkv.models import ModelError, chat

TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " Is 1 < 2 & 'so'? "},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?\n"},
]

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}\
{% else %}{{ raise_exception('Only user and assistant roles!') }}\
{% endif %}{% endfor %}"""

BLOCKS = """
    {% for message in messages %}
    {# a comment leaves nothing #}
        {% if message.role == 'system' %}
            {% continue %}
        {% endif %}
  {{ loop.index0 }}:{{ message.role }}
        {% if message.role == 'assistant' %}
            {% break %}
        {% endif %}
    {% endfor %}
    {% generation %}
end
    {% endgeneration %}
"""

SCOPES = """{% set a = 1 %}{% for m in messages %}{% generation %}{% set a = 2 %}\
{{ loop.index }}{{ a }}{% endgeneration %}{{ a }} {% endfor %}"""

NAMESPACE = """{% set ns = namespace(last=-1) %}{% for m in messages %}\
{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{{ ns.last }}{{ '|' }}\
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ '|' }}{{ messages[-1].content.rstrip('\\n') }}\
{{ '|' }}{{ messages[0].get('name', 'nobody') }}{{ '|' }}{{ messages[0]['missing'] is defined }}"""


def render(template: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    usual = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "add_generation_prompt": True}
    return chat.render(template, messages, **{**usual, **variables})


@pytest.mark.parametrize(
    ("template", "messages", "variables", "expected"),
    [
        (
            *(CHATML, TALK, {}),
            "<|im_start|>system\nBe brief. <|im_end|>\n<|im_start|>user\n Is 1 < 2 & 'so'? <|im_end|>\n"
            "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nWhy?\n<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            *(CHATML, TALK[1:2], {"add_generation_prompt": False}),
            "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n Is 1 < 2 & 'so'? <|im_end|>\n",
        ),
        (
            *(LLAMA_3, TALK, {"date_string": "1 Jan 2025"}),
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 1 Jan 2025\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nIs 1 < 2 & 'so'?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            *(GEMMA, TALK[1:], {}),
            "<s><start_of_turn>user\nIs 1 < 2 & 'so'?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
            "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (MISTRAL, TALK[1:], {}, "<s>[INST]  Is 1 < 2 & 'so'?  [/INST]Yes.</s>[INST] Why?\n [/INST]"),
        (BLOCKS, TALK, {}, "\n  1:user\n  2:assistant\nend\n"),
        (SCOPES, TALK, {}, "121 221 321 421 "),
        (NAMESPACE, TALK, {}, "3|2|Why?|nobody|False"),
        ("{{ messages[1] | tojson }}", TALK, {}, """{"role": "user", "content": " Is 1 < 2 & 'so'? "}"""),
        ("{{ {'b': 'é', 'a': [1]} | tojson(indent=2) }}", TALK, {}, '{\n  "b": "é",\n  "a": [\n    1\n  ]\n}'),
        ("{{ {'b': 'é', 'a': none} | tojson(ensure_ascii=true, sort_keys=true) }}", TALK, {}, '{"a": null, "b": "\\u00e9"}'),
        ("{{ documents is none }} {{ tools is none }} {{ nothing is defined }}[{{ nothing }}]", TALK, {}, "True True False[]"),
        ("{% if thinking is defined and not thinking %}<think></think>{% endif %}", TALK, {"thinking": False}, "<think></think>"),
    ],
    ids=[
        *("chatml", "chatml alone", "llama 3", "gemma", "mistral", "blocks", "scopes", "namespace"),
        *("json", "indented", "ascii", "names", "variables"),
    ],
)  # fmt: skip
def test_a_template_renders_as_transformers_renders_it(
    template: str, messages: list[dict[str, Any]], variables: dict[str, Any], expected: str
) -> None:
    assert render(template, messages, **variables) == expected


def test_a_template_may_ask_for_the_date() -> None:
    before = datetime.now()
    said = render(LLAMA_3, TALK)
    assert any(f"Today Date: {day:%d %b %Y}\n" in said for day in (before, datetime.now()))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (TALK, "System role not supported"),
        (TALK[2:], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([*TALK[1:2], *TALK[1:2]], "Conversation roles must alternate user/assistant/user/assistant/..."),
    ],
)
def test_what_a_template_refuses_it_refuses_in_its_own_words(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        render(GEMMA, messages)
    assert str(caught.value) == f"the chat template cannot render these messages: {reason}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_can_neither_change_what_it_is_given_nor_look_behind_it(template: str) -> None:
    with pytest.raises(ModelError, match="the chat template cannot render these messages"):
        render(template, [{"role": "user", "content": "hi"}])
