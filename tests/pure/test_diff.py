"""Comparing the outputs of two jobs."""

import io
from pathlib import Path
from typing import Any

import pytest

from jaxkv.diff import diff_files, run_diff
from jaxkv.errors import ConfigError
from tests.pure.batch_jobs import write


def entry(custom_id: str | None, text: str = "hello", ids: list[int] | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop"} | ({} if ids is None else {"token_ids": ids})
    body = {
        "id": more.pop("id", "x"),
        "created": more.pop("created", 1),
        "choices": [choice | more.pop("choice", {})],
        "usage": {"completion_tokens": 3},
        "seed": 1,
    }
    response = {"status_code": 200, "request_id": "r", "body": body | more.pop("body", {})}
    return {"id": "y", "custom_id": custom_id, "response": response, "error": None, **more}


def failed(custom_id: str | None, message: str, code: str = "invalid_request", place: int = 1) -> dict[str, Any]:
    error = {"code": code, "message": message}
    return {"id": "y", "custom_id": custom_id, "response": {"status_code": 400, "body": {}}, "error": error, "jaxkv": {"line": place}}


def compare(folder: Path, a: list[Any], b: list[Any]) -> tuple[Any, str, int]:
    left, right = write(folder / "a.jsonl", *a), write(folder / "b.jsonl", *b)
    out = io.StringIO()
    code = run_diff(left, right, out)
    return diff_files(left, right), out.getvalue(), code


def test_equal_answers_in_any_order_are_identical_whatever_their_ids_and_times(tmp_path: Path) -> None:
    a = [entry("1"), entry("2", "x"), failed(None, "broken", "invalid_json", 3)]
    b = [failed(None, "broken", "invalid_json", 3), entry("2", "x", id="z", created=9, body={"model": "m"}), entry("1")]
    result, said, code = compare(tmp_path, a, b)
    assert (result.num_identical, result.is_identical, code) == (3, True, 0)
    assert said == "3 identical, 0 different, 0 missing on one side\n"


def first(folder: Path, a: dict[str, Any], b: dict[str, Any]) -> str:
    result, said, code = compare(folder, [a, entry("same")], [b, entry("same")])
    assert (result.num_identical, len(result.different), code) == (1, 1, 1)
    assert f"{result.different[0].key}: {result.different[0].what}\n" in said
    return str(result.different[0].what)


def test_the_first_differing_token_is_shown_where_ids_are_there(tmp_path: Path) -> None:
    assert first(tmp_path, entry("1", ids=[5, 6, 7, 8]), entry("1", "other", ids=[5, 6, 9, 8])) == "token 2 is 7 / 9, after [5, 6]"
    assert first(tmp_path, entry("1", ids=[5, 6]), entry("1", ids=[5, 6, 9])) == "token 2 is the end / 9, after [5, 6]"


def test_without_ids_the_first_differing_character_is_shown_with_what_is_around_it(tmp_path: Path) -> None:
    said = first(tmp_path, entry("1", "the quick brown fox"), entry("1", "the quick green fox"))
    assert said == 'character 10 of the text is the first to differ: "the quick brown fox" / "the quick green fox"'


def test_ids_that_only_one_side_asked_for_are_no_difference(tmp_path: Path) -> None:
    assert compare(tmp_path, [entry("1", ids=[5])], [entry("1")])[2] == 0


def test_other_parts_that_differ_are_named(tmp_path: Path) -> None:
    a, b = entry("1"), entry("1", choice={"finish_reason": "length"})
    assert first(tmp_path, a, b) == 'choices[0].finish_reason is "stop" / "length"'
    assert first(tmp_path, a, entry("1", body={"usage": {"completion_tokens": 4}})) == "usage.completion_tokens is 3 / 4"
    assert first(tmp_path, a, entry("1", body={"seed": 2})) == "seed is 1 / 2"
    logprobs = [{"logprobs": {"tokens": ["a", "b"], "token_logprobs": [-1.0, value]}} for value in (-2.0, -2.5)]
    said = first(tmp_path, entry("1", choice=logprobs[0]), entry("1", choice=logprobs[1]))
    assert said == "choices[0].logprobs.token_logprobs[1] is -2.0 / -2.5"


def test_equal_text_of_other_tokens_is_a_difference(tmp_path: Path) -> None:
    a, b = (entry("1", jaxkv={"line": 1, "token_ids_sha256": digest}) for digest in ("aa", "bb"))
    assert first(tmp_path, a, b) == "the token ids differ under equal text; with return_token_ids the files would say where"


def test_an_error_on_one_side_is_a_difference(tmp_path: Path) -> None:
    assert first(tmp_path, entry("1"), failed("1", "too long")) == 'an answer / error "too long"'
    assert compare(tmp_path, [failed("1", "too long")], [failed("1", "too long")])[2] == 0


def test_answers_missing_on_either_side_are_listed(tmp_path: Path) -> None:
    result, said, code = compare(tmp_path, [entry("1"), entry("2")], [entry("2"), entry("3")])
    assert (result.only_a, result.only_b, code) == (["1"], ["3"], 1)
    assert said == "only in the first: 1\nonly in the second: 3\n1 identical, 0 different, 2 missing on one side\n"


def test_other_fingerprints_are_mentioned_only_where_answers_differ(tmp_path: Path) -> None:
    a, b = (entry("1", text, body={"system_fingerprint": name}) for text, name in (("x", "fp_1"), ("y", "fp_2")))
    assert "the fingerprints differ, so the answers may: fp_1 and fp_2\n" in compare(tmp_path, [a], [b])[1]
    same = entry("1", "x", body={"system_fingerprint": "fp_2"})
    assert compare(tmp_path, [a], [same])[1:] == ("1 identical, 0 different, 0 missing on one side\n", 0)


def test_many_differences_are_shown_in_part_and_counted_in_full(tmp_path: Path) -> None:
    _, said, _ = compare(tmp_path, [entry(str(n), "a") for n in range(25)], [entry(str(n), "b") for n in range(25)])
    assert said.count("first to differ") == 20
    assert said.endswith("... and 5 more\n0 identical, 25 different, 0 missing on one side\n")


def test_a_file_that_is_none_is_one_clear_error(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", entry("1"))
    with pytest.raises(ConfigError, match=r"no\.jsonl cannot be read: No such file or directory"):
        diff_files(good, tmp_path / "no.jsonl")
    with pytest.raises(ConfigError, match=r"b\.jsonl, line 1: is no line of a batch job's output"):
        diff_files(good, write(tmp_path / "b.jsonl", {"custom_id": "1"}))
