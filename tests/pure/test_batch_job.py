"""A batch job from input to output and summary, on a stand-in engine."""

import gzip
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from jaxkv.batch import run_batch
from jaxkv.batch.lines import LineError, parse_line
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.testing import FakeEngine
from tests.pure.batch_jobs import config, entries, line, run, write


def test_every_line_gets_an_answer_in_the_batch_format(tmp_path: Path) -> None:
    write(
        tmp_path / "in.jsonl",
        line("a", "hi"),
        {**line("b"), "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "yo"}]}},
    )
    ran = run(tmp_path, make=lambda: FakeEngine(answers={"hi": "hello", "user: yo\nassistant: ": "yes"}))
    assert ran.code == 0
    a, b = ran.by_id["a"], ran.by_id["b"]
    assert a.keys() == {"id", "custom_id", "response", "error", "jaxkv"}
    assert (a["error"], a["response"]["status_code"]) == (None, 200)
    assert a["response"]["body"]["choices"][0]["text"] == "hello"
    assert b["response"]["body"]["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
    assert a["response"]["body"]["usage"] == {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert a["response"]["body"]["seed"] == 11381658363930578919


def test_a_list_of_prompts_gets_a_choice_for_each(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("two", max_tokens=3) | {"body": {"prompt": ["hi", "yo!"], "max_tokens": 3}})
    ran = run(tmp_path, make=lambda: FakeEngine(answers={"hi": "abcdef", "yo!": "ghijkl"}))
    body = ran.by_id["two"]["response"]["body"]
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "abc"), (1, "ghi")]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert (ran.summary["prompt_tokens"], ran.summary["generated_tokens"], ran.summary["num_completed"]) == (5, 6, 1)


def test_a_line_may_ask_how_likely_its_prompt_is_and_for_nothing_more(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("score", "hey", echo=True, logprobs=0, max_tokens=0), line("after", "abc", max_tokens=2))
    ran = run(tmp_path, make=lambda: FakeEngine(answers={"abc": "xyz"}))
    body = ran.by_id["score"]["response"]["body"]
    assert body["choices"][0]["text"] == "hey" and body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert (ran.texts["after"], ran.summary["generated_tokens"], ran.code) == ("xy", 2, 0)
    assert "nothing is missing" in run(tmp_path).said


def test_one_refused_prompt_of_a_list_makes_the_line_an_error_and_leaves_nothing_running(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {**line("two"), "body": {"prompt": ["hi", "x" * 500]}}, line("one"))
    ran = run(tmp_path, make=lambda: FakeEngine(capacity=100))
    assert ran.code == 3
    assert [entry[:2] for entry in ran.errors] == [("two", "invalid_request")]
    assert ran.texts.keys() == {"one"}
    assert ran.engines[0].is_idle


def test_bad_lines_become_error_lines_and_the_job_goes_on(tmp_path: Path) -> None:
    write(
        tmp_path / "in.jsonl",
        line("good"),
        "{broken",
        "[1]",
        '{"custom_id": "nan", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "temperature": NaN}}',
        {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}},
        line(5),
        line("good", "again"),
        {**line("get"), "method": "GET"},
        {**line("url"), "url": "/v1/embeddings"},
        {**line("body"), "body": "x"},
        line("wrong", temperature=9),
        "",
        line("last"),
    )
    ran = run(tmp_path)
    assert ran.code == 3
    assert ran.texts.keys() == {"good", "last"}
    where = f"{tmp_path}/in.jsonl"
    assert [(e["custom_id"], e["error"]["line"], e["error"]["code"]) for e in ran.entries if e["error"]] == [
        (None, f"{where}:2", "invalid_json"),
        (None, f"{where}:3", "invalid_line"),
        (None, f"{where}:4", "invalid_json"),
        (None, f"{where}:5", "missing_custom_id"),
        (None, f"{where}:6", "invalid_custom_id"),
        ("good", f"{where}:7", "duplicate_custom_id"),
        ("get", f"{where}:8", "invalid_method"),
        ("url", f"{where}:9", "invalid_url"),
        ("body", f"{where}:10", "invalid_body"),
        ("wrong", f"{where}:11", "invalid_request"),
    ]
    assert [message for _, _, message in ran.errors] == [
        "the line is not valid JSON: Expecting property name enclosed in double quotes, at character 2",
        "the line: got [1], allowed: an object with custom_id, method, url and body",
        "the line is not valid JSON: NaN is no JSON number",
        "custom_id: is missing, every line needs one of its own",
        "custom_id: got 5, allowed: a string that is not empty",
        'custom_id: "good" was used by an earlier line',
        'method: got "GET", allowed: POST',
        'url: got "/v1/embeddings", allowed: /v1/chat/completions or /v1/completions',
        'body: got "x", allowed: an object',
        "temperature: got 9, allowed: a number from 0 to 2",
    ]
    assert (ran.summary["num_requests"], ran.summary["num_completed"], ran.summary["num_failed"]) == (12, 2, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{{"custom_id": {"1" * 5000}}}', "the line has a number of too many digits"),
        ("[" * 100_000, "the line is nested too deeply"),
        ('{"custom_id": Infinity}', "the line is not valid JSON: Infinity is no JSON number"),
    ],
)
def test_what_a_line_cannot_hold_is_told_in_words_of_ours(text, message):
    with pytest.raises(LineError) as told:
        parse_line(text.encode(), set())
    assert (told.value.code, str(told.value)) == ("invalid_json", message)


def test_lines_that_are_not_utf8_or_too_deep_or_hold_half_a_character_are_errors(tmp_path: Path) -> None:
    deep = b'{"custom_id": ' + b"[" * 200_000
    half = b'{"custom_id": "\\ud800", "method": "POST"}'
    (tmp_path / "in.jsonl").write_bytes(b"\xff\xfe\n" + deep + b"\n" + half + b"\n")
    ran = run(tmp_path)
    assert [code for _, code, _ in ran.errors] == ["invalid_json", "invalid_json", "invalid_custom_id"]
    assert ran.errors[0][2] == "the line is not UTF-8: byte 1 is 0xff"
    assert ran.errors[2][2] == "custom_id: holds half of a surrogate pair, which is no character"


def test_a_request_that_cannot_fit_or_fails_in_the_engine_is_an_error_line(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("big", "x" * 65), line("bad", "boom"), line("fine"))
    ran = run(tmp_path, make=lambda: FakeEngine(capacity=64, failing=["boom"]))
    assert ran.code == 3
    assert ran.errors == [
        ("big", "invalid_request", "the prompt needs 65 tokens, the pool has 64: raise pool.tokens"),
        ("bad", "engine_error", "made to fail"),
    ]
    assert [ran.by_id[name]["response"]["status_code"] for name in ("big", "bad", "fine")] == [400, 500, 200]


def test_an_answer_that_the_pool_ends_says_so(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", "x" * 60, max_tokens=50, ignore_eos=True))
    body = run(tmp_path, make=lambda: FakeEngine(capacity=64)).by_id["a"]["response"]["body"]
    assert body["jaxkv"] == {"truncates_at": 5}
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (5, "length")


def test_without_a_tokenizer_token_ids_go_in_and_come_out(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", {**line("ids"), "body": {"prompt": [1, 2], "max_tokens": 3}}, line("text"))
    ran = run(tmp_path, make=lambda: FakeEngine(has_tokenizer=False))
    choice = ran.by_id["ids"]["response"]["body"]["choices"][0]
    assert (choice["text"], len(choice["token_ids"])) == ("", 3)
    assert ran.errors == [
        ("text", "invalid_request", "prompt: got a string, but this model has no tokenizer, so only prompts of token ids work")
    ]


def test_input_may_be_several_files_globs_gzip_and_standard_input(tmp_path: Path) -> None:
    write(tmp_path / "one.jsonl", line("a"))
    write(tmp_path / "part-2.jsonl", line("c"))
    write(tmp_path / "part-1.jsonl", line("b"))
    (tmp_path / "z.jsonl.gz").write_bytes(gzip.compress(json.dumps(line("d")).encode() + b"\n\n" + json.dumps(line("e")).encode()))
    stdin = io.BytesIO(b"\xef\xbb\xbf" + json.dumps(line("f")).encode() + b"\nbroken\n")
    names: list[str | Path] = [tmp_path / "one.jsonl", tmp_path / "part-*.jsonl", tmp_path / "z.jsonl.gz", "-"]
    ran = run(tmp_path, *names, make=lambda: FakeEngine(rows=1), stdin=stdin)
    assert list(ran.texts) == ["a", "b", "c", "d", "e", "f"]
    assert [e["error"]["line"] for e in ran.entries if e["error"]] == ["<stdin>:2"]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    assert run(tmp_path, tmp_path / "in.jsonl", tmp_path / "*n.jsonl").code == 0


def test_an_empty_input_is_a_job_with_nothing_to_do(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl")
    ran = run(tmp_path)
    assert (ran.code, ran.entries, ran.summary["num_requests"]) == (0, [], 0)
    assert ran.summary["ttft_s"] == {"p50": None, "p99": None}


def test_lines_come_in_the_order_in_which_they_finish(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("long", "1"), line("short", "2"))
    ran = run(tmp_path, make=lambda: FakeEngine(answers={"1": "abcdefgh", "2": "ab"}))
    assert [entry["custom_id"] for entry in ran.entries] == ["short", "long"]


def test_each_line_is_in_the_file_as_soon_as_it_is_finished(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *(line(str(n)) for n in range(8)))
    sizes: list[int] = []
    run(tmp_path, make=lambda: FakeEngine(rows=1, on_step=lambda engine: sizes.append(len(entries(tmp_path / "out.jsonl")))))
    assert sizes == sorted(sizes)
    assert sizes[-1] == 7  # the eighth ends in the last step


def test_a_long_input_streams_with_a_bounded_number_of_requests_in_the_engine(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", *(line(str(n), max_tokens=1) for n in range(300)))
    ran = run(tmp_path, settings=config(scheduler__rows=2))
    assert (ran.summary["num_completed"], ran.engines[0].num_live_peak) == (300, 16)


def test_unknown_fields_are_named_once_with_a_count(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", colour=1), line("b", colour=2), {**line("c"), "extra": 1})
    ran = run(tmp_path)
    assert ran.said.count("colour") == 1
    assert "warning: unknown field colour was left aside in 2 lines" in ran.said
    assert ran.summary["unknown_fields"] == {"colour": 2, "extra (outside body)": 1}


def test_defaults_of_the_configuration_apply_to_absent_fields(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", ignore_eos=True), line("b", ignore_eos=True, max_tokens=2))
    ran = run(tmp_path, settings=config(request__max_tokens=5, request__return_token_ids=True))
    assert {name: len(e["response"]["body"]["choices"][0]["token_ids"]) for name, e in ran.by_id.items()} == {"a": 5, "b": 2}


def test_a_default_the_model_cannot_honour_stops_the_job_before_its_first_line(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    with pytest.raises(ConfigError, match=r"request\.max_tokens: got 0, allowed: a whole number from 1"):
        run(tmp_path, settings=config(request__max_tokens=0))


def test_the_seed_of_a_line_depends_on_run_seed_and_custom_id(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), line("b", seed=3))
    seeds = {name: e["response"]["body"]["seed"] for name, e in run(tmp_path, settings=config(run__seed=1)).by_id.items()}
    assert seeds == {"a": int.from_bytes(hashlib.sha256(b"1:a").digest()[:8], "big"), "b": 3}


def test_answers_never_show_where_the_model_lies(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    ran = run(tmp_path, settings=config(model__path="/secret/place/tiny.gguf"))
    assert ran.by_id["a"]["response"]["body"]["model"] == "tiny"


def test_the_summary_counts_tokens_and_digests_the_token_ids_by_custom_id(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("b", "2"), line("a", "1"), line("x", temperature=9))
    summary = run(tmp_path, make=lambda: FakeEngine(answers={"1": "AB", "2": "C"})).summary
    a, b = hashlib.sha256(b"65,66,256").hexdigest(), hashlib.sha256(b"67,256").hexdigest()
    assert summary["outputs_sha256"] == hashlib.sha256(f'"a" {a}\n"b" {b}\n'.encode()).hexdigest()
    assert (summary["prompt_tokens"], summary["generated_tokens"]) == (2, 5)
    assert summary["ttft_s"].keys() == summary["e2e_s"].keys() == {"p50", "p99"}
    assert (summary["num_parks"], summary["system_fingerprint"], summary["config"]["model"]["path"]) == (0, "fp_fake", "fake")
    assert summary["wall_s"] > 0
    assert summary["generated_tokens_per_s"] > 0


def test_plain_lines_tell_the_progress_where_nobody_looks(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"), "broken")
    assert "batch: 2/2 finished (1 failed), 0 running, 0 parked, 0.0 tokens/s\n" in run(tmp_path).said


def test_a_bar_tells_the_progress_on_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    write(tmp_path / "in.jsonl", line("a"))
    stream = Terminal()
    assert run_batch(FakeEngine, config(), [str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", stderr=stream) == 0
    assert "1/1" in stream.getvalue()


def test_an_engine_that_is_handed_over_stays_open_and_one_that_is_built_is_closed(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    engine = FakeEngine()
    run_batch(engine, config(), [str(tmp_path / "in.jsonl")], tmp_path / "mine.jsonl", stderr=io.StringIO())
    assert (engine.is_closed, run(tmp_path).engines[0].is_closed) == (False, True)


def test_paths_that_cannot_work_are_refused_before_an_engine_is_built(tmp_path: Path) -> None:
    good = write(tmp_path / "in.jsonl", line("a"))
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"x" * 1000)[:-9])
    out, s = tmp_path / "o.jsonl", tmp_path / "s.json"
    cases: list[tuple[list[Any], Path, Path, str]] = [
        ([], out, s, "--input: got none"),
        (["-", "-"], out, s, "--input: got - more than once"),
        ([tmp_path / "no.jsonl"], out, s, f"--input {tmp_path}/no.jsonl: there is no such file"),
        ([tmp_path / "no*.jsonl"], out, s, f"--input {tmp_path}/no\\*.jsonl: no file matches"),
        ([tmp_path], out, s, "is a folder; name files, such as"),
        ([tmp_path / "bad.gz"], out, s, f"--input {tmp_path}/bad.gz: is a broken gzip file"),
        ([good], tmp_path / "no" / "o.jsonl", s, f"--output {tmp_path}/no/o.jsonl: there is no folder {tmp_path}/no"),
        ([good], tmp_path, s, "is a folder, a file is needed"),
        ([good], good, s, "is also an input; choose another file"),
        ([good], out, good, "is also an input; choose another file"),
        ([good], out, out, "is the job's own output; choose another file"),
        ([good], Path("/dev/null"), s, "must be a regular file"),
    ]
    for inputs, output, summary, message in cases:
        with pytest.raises(JaxkvError, match=message) as caught:
            run_batch(lambda: pytest.fail("built"), config(), [str(name) for name in inputs], output, summary, stdin=io.BytesIO())
        assert caught.value.exit_code == 2
    assert entries(good) == [line("a")]


def test_n_choices_stand_in_one_answer_and_the_prompt_counts_once(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", "hello", n=3, max_tokens=5, ignore_eos=True, seed=1), line("b", ["x", "yz"], n=2, max_tokens=2))
    ran = run(tmp_path)
    a, b = (ran.by_id[name]["response"]["body"] for name in "ab")
    assert [choice["index"] for choice in a["choices"]] == [0, 1, 2]
    assert len({choice["text"] for choice in a["choices"]}) == 3
    assert a["usage"] == {"prompt_tokens": 5, "completion_tokens": 15, "total_tokens": 20}
    assert len(b["choices"]) == 4 and b["usage"]["prompt_tokens"] == 3
    assert ran.summary["num_requests"] == 2
    assert run(tmp_path).said == "batch: nothing is missing, so no model is loaded\n" + ran.said.splitlines(keepends=True)[-1]
