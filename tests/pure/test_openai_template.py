"""What a request says about its chat template."""

from typing import Any

import pytest

from jaxkv.errors import RequestError
from jaxkv.openai import BodyReader, Endpoint
from jaxkv.openai.template import RESERVED, TemplateWish, read_template_wish, render_wish
from jaxkv.testing import ByteTokenizer

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Once upon "}]


def plain(messages: list[dict[str, Any]], add_generation_prompt: bool = True, tools: Any = None, **variables: Any) -> str:
    """A template that keeps contents as they are."""
    text = "".join(f"<{m['role']}>{m['content']}</>" for m in messages)
    return text + ("<assistant>" if add_generation_prompt else "") + "".join(f"[{name}={value}]" for name, value in variables.items())


def trimming(messages: list[dict[str, Any]], add_generation_prompt: bool = True, tools: Any = None) -> str:
    """A template that trims them."""
    return plain([{**m, "content": m["content"].strip()} for m in messages], add_generation_prompt)


def refusal(**fields: Any) -> str:
    with pytest.raises(RequestError) as caught:
        read_template_wish(fields)
    return str(caught.value)


def test_by_default_an_answer_is_begun() -> None:
    assert read_template_wish({}) == TemplateWish(True, False, {})
    assert render_wish(plain, HELLO, None, TemplateWish()) == "<user>hi</><assistant>Once upon </><assistant>"
    assert render_wish(plain, HELLO, None, read_template_wish({"add_generation_prompt": False})) == "<user>hi</><assistant>Once upon </>"


def test_variables_reach_the_template() -> None:
    wish = read_template_wish({"chat_template_kwargs": {"enable_thinking": False}})
    assert render_wish(plain, HELLO[:1], None, wish) == "<user>hi</><assistant>[enable_thinking=False]"


def test_who_goes_on_with_the_last_message_gets_it_open_and_no_other_begun() -> None:
    wish = read_template_wish({"continue_final_message": True})
    assert wish == TemplateWish(False, True, {})
    assert render_wish(plain, HELLO, None, wish) == "<user>hi</><assistant>Once upon "


def test_a_template_that_trims_leaves_no_blank_at_the_end() -> None:
    assert render_wish(trimming, HELLO, None, TemplateWish(False, True)) == "<user>hi</><assistant>Once upon"


def test_a_template_that_leaves_the_last_message_out_cannot_be_gone_on_with() -> None:
    with pytest.raises(ValueError, match="the template does not write out the last message's content"):
        render_wish(lambda messages, begins, tools: "nothing", HELLO, None, TemplateWish(False, True))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_what_a_message_thought_reaches_the_template_by_the_names_that_templates_read(name: str) -> None:
    seen: list[Any] = []

    class Tokenizer(ByteTokenizer):
        def render_chat(self, messages: Any, *args: Any, **variables: Any) -> str:
            seen.extend(messages)
            return "x"

    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes.", name: "Hm."}]
    parsed = BodyReader(Tokenizer(), 257, {}).read(Endpoint.CHAT, {"messages": talk}, 0)
    thought = {"thinking": "Hm.", "reasoning_content": "Hm.", name: "Hm."}
    assert parsed.unknown == frozenset()
    assert seen == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Yes.", **thought}]
    with pytest.raises(RequestError) as caught:
        BodyReader(Tokenizer(), 257, {}).read(Endpoint.CHAT, {"messages": [{**talk[1], name: 5}]}, 0)
    assert str(caught.value) == f"messages[0].{name}: got 5, allowed: a string"


def test_a_completion_has_no_template_to_say_anything_about() -> None:
    body = {"prompt": "hi", "chat_template_kwargs": {"a": 1}}
    assert BodyReader(ByteTokenizer(), 257, {}).read(Endpoint.COMPLETION, body, 0).unknown == {"chat_template_kwargs"}
    chat = {"messages": HELLO, "chat_template_kwargs": {"a": 1}}
    assert BodyReader(ByteTokenizer(), 257, {}).read(Endpoint.CHAT, chat, 0).unknown == set()


def test_a_last_message_without_text_cannot_be_gone_on_with() -> None:
    with pytest.raises(ValueError, match="the last message has no content to go on with"):
        render_wish(plain, [{"role": "assistant", "content": None}], None, TemplateWish(False, True))


@pytest.mark.parametrize("name", RESERVED)
def test_what_the_server_itself_gives_the_template_cannot_be_given(name: str) -> None:
    said = refusal(chat_template_kwargs={name: 1})
    assert said.startswith(
        f"chat_template_kwargs: got {name}, which the server itself gives the template; allowed: names other than messages, "
    )


def test_wrong_values_are_refused() -> None:
    assert refusal(chat_template_kwargs=[1]) == ('chat_template_kwargs: got [1], allowed: an object such as {"enable_thinking": false}')
    assert refusal(add_generation_prompt=1) == "add_generation_prompt: got 1, allowed: true or false"
    assert refusal(continue_final_message="yes") == 'continue_final_message: got "yes", allowed: true or false'
    assert refusal(continue_final_message=True, add_generation_prompt=True) == (
        "continue_final_message: got true beside add_generation_prompt true; an answer either goes on or begins, give one of them"
    )
