"""Output: tokens in, text and an end out."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.output import Output
from jaxkv.request import SamplingParams, TokenLogprobs
from jaxkv.testing import EOS_ID, ByteTokenizer


def fold(text: bytes | list[int], *, limit: int = 1000, **params: Any) -> tuple[Output, list[str]]:
    """Feed bytes one by one until the end; the output and its deltas."""
    output = Output(ByteTokenizer(), (EOS_ID,), SamplingParams(**params), limit)
    deltas = []
    for token_id in text:
        reason = output.accept(token_id)
        deltas.append(output.take_delta())
        if reason is not None:
            break
    return output, deltas


def test_a_stop_string_spread_over_three_tokens_is_cut_and_never_shown() -> None:
    output, deltas = fold(b"ab###cd", stop=("###",))
    assert (output.text, output.finish_reason, output.token_ids) == ("ab", "stop", list(b"ab###"))
    assert deltas == ["a", "b", "", "", ""]


def test_text_that_only_began_like_a_stop_string_is_flushed_when_it_stops_matching() -> None:
    _, deltas = fold(b"a##b", stop=("###",))
    assert deltas == ["a", "", "", "##b"]


def test_text_held_back_is_flushed_at_the_end() -> None:
    output, deltas = fold(b"a##", stop=("###",), limit=3)
    assert (output.text, output.finish_reason) == ("a##", "length")
    assert deltas == ["a", "", "##"]


def test_text_held_back_is_flushed_when_the_caller_ends_the_sequence() -> None:
    output, _ = fold(b"a##", stop=("###",))
    assert output.text == "a"
    assert output.finish("cancelled") == "cancelled"
    assert (output.text, output.take_delta()) == ("a##", "##")


def test_a_stop_string_that_overlaps_its_own_beginning_is_found() -> None:
    output, _ = fold(b"xaab aaab", stop=("aaab",))
    assert output.text == "xaab "


class WordTokenizer(ByteTokenizer):
    """Token 0 is a whole sentence, the rest are bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"one two three" if token_id == 0 else super().token_bytes(token_id)


def test_the_stop_string_that_begins_first_in_the_text_wins() -> None:
    output = Output(WordTokenizer(), (), SamplingParams(stop=("three", "two", "wo th")), 9)
    assert output.accept(0) == "stop"
    assert output.text == "one "


def test_a_four_byte_character_over_four_tokens_comes_whole() -> None:
    _, deltas = fold("a😀b".encode())
    assert deltas == ["a", "", "", "", "😀", "b"]


def test_an_output_that_ends_inside_a_character_shows_one_replacement_character() -> None:
    output, deltas = fold("a😀".encode(), limit=3)
    assert (output.text, deltas) == ("a\ufffd", ["a", "", "\ufffd"])


def test_the_end_of_text_counts_as_a_token_and_is_not_in_the_text() -> None:
    output, _ = fold([97, EOS_ID, 98])
    assert (output.text, output.token_ids, output.finish_reason) == ("a", [97, EOS_ID], "stop")


def test_a_stop_token_ends_the_sequence_and_is_not_in_the_text() -> None:
    output, _ = fold(b"abc", stop_token_ids=(98,))
    assert (output.text, output.token_ids, output.finish_reason) == ("a", [97, 98], "stop")


def test_ignore_eos_ignores_the_end_of_text_but_not_stop_tokens() -> None:
    output, _ = fold([97, EOS_ID, 98, 99], ignore_eos=True, stop_token_ids=(99,))
    assert (output.text, output.token_ids) == ("ab", [97, EOS_ID, 98, 99])


def test_a_stop_at_the_last_possible_token_is_a_stop() -> None:
    assert fold(b"ab", stop=("b",), limit=2)[0].finish_reason == "stop"
    assert fold([97, EOS_ID], limit=2)[0].finish_reason == "stop"
    assert fold(b"ab", limit=2)[0].finish_reason == "length"


def test_no_stop_fires_before_min_tokens() -> None:
    output, _ = fold(b"a##b#####", stop=("##",), min_tokens=6)
    assert (output.text, output.token_ids, output.finish_reason) == ("a##b", list(b"a##b##"), "stop")
    output, _ = fold([97, EOS_ID, 98, EOS_ID], min_tokens=3)
    assert output.token_ids == [97, EOS_ID, 98, EOS_ID]


def test_a_stop_string_complete_before_min_tokens_stays_in_the_text() -> None:
    output, deltas = fold(b"ab##cd", stop=("##",), min_tokens=5, limit=6)
    assert (output.text, "".join(deltas), output.finish_reason) == ("ab##cd", "ab##cd", "length")


def test_without_a_tokenizer_there_is_no_text_and_the_ids_are_kept() -> None:
    output = Output(None, (7,), SamplingParams(), 9)
    assert [output.accept(token_id) for token_id in (5, 6, 7)] == [None, None, "stop"]
    assert (output.text, output.take_delta(), output.token_ids) == ("", "", [5, 6, 7])


def test_logprobs_are_kept_once_per_token_where_asked_for() -> None:
    entry = TokenLogprobs(97, -0.5)
    asked = Output(ByteTokenizer(), (), SamplingParams(logprobs=0), 9)
    asked.accept(97, entry)
    assert asked.logprobs == [entry]
    assert Output(ByteTokenizer(), (), SamplingParams(), 9).logprobs is None


def test_a_token_after_the_end_is_our_own_mistake() -> None:
    output, _ = fold(b"ab", limit=1)
    with pytest.raises(AssertionError, match="after the end"):
        output.accept(98)


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit: got 0"):
        Output(None, (), SamplingParams(), 0)


def slow(text: str, stops: list[str]) -> str | None:
    """The obvious way: grow the text by one character and look; the text before the stop, None without one."""
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return None


@settings(max_examples=300, deadline=None)
@given(st.text("ab😀é", max_size=24), st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=4), st.integers(0, 2**32))
def test_deltas_concatenate_to_the_text_and_leak_nothing_of_a_stop_string(text: str, stops: list[str], seed: int) -> None:
    output = Output(ByteTokenizer(), (), SamplingParams(stop=tuple(stops)), 10_000)
    often, deltas = random.Random(seed), []
    for token_id in text.encode():
        if output.accept(token_id) is not None:
            break
        if often.random() < 0.7:
            deltas.append(output.take_delta())
    if output.finish_reason is None:
        output.finish("length")
    expected = slow(text, stops)
    assert output.text == (text if expected is None else expected)
    assert output.finish_reason == ("length" if expected is None else "stop")
    assert "".join(deltas) + output.take_delta() == output.text
    assert not any(stop in output.text for stop in stops)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=30), st.integers(1, 30))
def test_any_bytes_give_the_text_that_decoding_them_at_once_gives(raw: bytes, limit: int) -> None:
    output, deltas = fold(raw, limit=limit)
    if output.finish_reason is None:
        output.finish("length")
    kept = raw[:limit]
    assert output.text == "".join(deltas) + output.take_delta() == kept.decode(errors="replace")
