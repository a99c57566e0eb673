"""The stand-ins behave like what they stand in for."""

from jaxkv.request import SamplingParams
from jaxkv.testing import ByteTokenizer, FakeEngine


def test_the_same_prompt_and_seed_give_the_same_answer_whoever_else_is_there() -> None:
    params = SamplingParams(seed=3)
    alone = FakeEngine().generate(["hello"], params)[0]
    crowded = FakeEngine(rows=1).generate(["a", "hello", "b"], params)[1]
    assert (alone.token_ids, alone.text, alone.finish_reason) == (crowded.token_ids, crowded.text, "stop")
    assert FakeEngine().generate(["hello"], SamplingParams(seed=4))[0].token_ids != alone.token_ids


def test_a_handle_gives_its_tokens_as_they_are_made_and_calls_back() -> None:
    heard: list[int] = []
    with FakeEngine(answers={"q": "yes"}) as engine:
        handle = engine.submit(list(b"q"), SamplingParams(), on_token=lambda _, token_id: heard.append(token_id))
        assert list(handle) == heard == [121, 101, 115, 256]
        assert handle.result().text == "yes"
        assert engine.is_idle


def test_cancelling_ends_a_request_at_once_and_again_does_nothing() -> None:
    engine = FakeEngine(answers={"q": "yes"})
    handle = engine.submit(list(b"q"), SamplingParams())
    engine.step()
    handle.cancel()
    handle.cancel()
    assert handle.completion is not None
    assert (handle.completion.finish_reason, handle.completion.text, engine.is_idle) == ("cancelled", "y", True)


def test_the_byte_tokenizer_gives_back_what_it_was_given() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([*tokenizer.encode("né😀"), 256]) == "né😀"
    assert tokenizer.decode([256], skip_special_tokens=False) == "<end>"
