"""Loads: what is drawn, traces, prompts from files and templates, bodies, parts of a job, and the command."""

import csv
import itertools
import json
import math
import statistics
from pathlib import Path

import pytest

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.errors import ConfigError
from jaxkv.openai import BodyReader, Endpoint
from jaxkv.testing import ByteTokenizer
from jaxkv.workload import Request, Shard, draw, read_trace
from jaxkv.workload.bodies import make_calls
from jaxkv.workload.prompts import read_prompts
from tests.pure.batch_jobs import line, run, write

MODEL = {"model": {"path": "x"}}


# What is drawn


def workload(**fields):
    return load_config(MODEL, {f"workload.{name}": value for name, value in fields.items()}).workload


def test_a_seed_gives_the_same_requests_and_another_others():
    section = workload(kind="poisson", num_requests=50)
    assert draw(section, 3) == draw(section, 3) != draw(section, 4)
    assert draw(section, 3)[0] == Request(0.0, 180, 1578, 1578)  # on every machine


def test_lengths_stay_when_arrivals_change():
    plain, late = (draw(workload(kind=kind, num_requests=20), 1) for kind in ("uniform", "poisson"))
    assert [(r.prompt_len, r.answer_len) for r in plain] == [(r.prompt_len, r.answer_len) for r in late]
    assert {r.arrival_s for r in plain} == {0.0} and len({r.arrival_s for r in late}) == 20


def test_uniform_lengths_reach_from_the_shortest_to_the_longest():
    found = draw(workload(num_requests=3000, prompt_len_min=3, prompt_len_max=9, answer_len_min=1, answer_len_max=100), 0)
    assert {r.prompt_len for r in found} == {3, 4, 5, 6, 7, 8, 9}
    assert (min(r.answer_len for r in found), max(r.answer_len for r in found)) == (1, 100)
    assert statistics.mean(r.answer_len for r in found) == pytest.approx(50.5, abs=2)


def test_a_heavy_tail_is_mostly_short_and_sometimes_very_long():
    lengths = [r.answer_len for r in draw(workload(kind="heavy", num_requests=3000, answer_len_min=10, answer_len_max=4000), 0)]
    assert statistics.median(lengths) == pytest.approx(20, abs=2)  # a tail of index 1: half are below twice the shortest
    assert min(lengths) == 10 and 1000 < max(lengths) <= 4000
    assert sum(length > 100 for length in lengths) / 3000 == pytest.approx(0.0975, abs=0.02)


def test_lognormal_lengths_lie_around_the_geometric_middle():
    found = draw(workload(lengths="lognormal", num_requests=3000, answer_len_min=100, answer_len_max=1600), 0)
    lengths = [r.answer_len for r in found]
    assert statistics.median(lengths) == pytest.approx(400, rel=0.05)
    assert min(lengths) >= 100 and max(lengths) <= 1600
    assert sum(200 <= length <= 800 for length in lengths) / 3000 == pytest.approx(0.68, abs=0.03)  # one standard deviation


def test_a_load_may_be_patient_and_so_may_be_one_request_of_a_trace(tmp_path):
    assert all(r.patient for r in draw(workload(patient=True), 0))
    assert not any(r.patient for r in draw(workload(), 0))
    path = tmp_path / "load.jsonl"
    path.write_text(Request(0.0, 5, 6, 6).to_line() + Request(1.0, 5, 6, 6, patient=True).to_line())
    assert [r.patient for r in draw(workload(kind="measured", trace=str(path)), 0)] == [False, True]


def test_fixed_lengths_are_the_longest():
    assert draw(workload(lengths="fixed", num_requests=2), 0) == (Request(0.0, 512, 4096, 4096),) * 2


def test_arrivals_are_staggered_poisson_or_in_bursts():
    def times(**fields):
        return [r.arrival_s for r in draw(workload(num_requests=4000, every_s=2.0, **fields), 0)]

    assert times(arrivals="staggered")[:3] == [0.0, 2.0, 4.0]
    gaps = [b - a for a, b in itertools.pairwise(times(kind="poisson"))]
    assert statistics.mean(gaps) == pytest.approx(2.0, rel=0.05) and statistics.stdev(gaps) == pytest.approx(2.0, rel=0.1)
    bursts = times(kind="bursty", burst=5)
    assert len(set(bursts)) == 800 and all(len(set(bursts[i : i + 5])) == 1 for i in range(0, 4000, 5))
    assert math.isclose(bursts[-1] / 799, 2.0, rel_tol=0.15)


def test_priorities_and_limits_are_drawn_beside_the_lengths():
    found = draw(workload(num_requests=100, priorities=[-10, 0], max_tokens=3000), 0)
    assert {r.priority for r in found} == {-10, 0}
    assert all(r.max_tokens == max(3000, r.answer_len) for r in found) and {r.answer_len for r in found} != {3000}


def test_groups_and_callers_that_leave_are_drawn_beside_the_lengths():
    found = draw(workload(num_requests=2000, choices=[1, 4], cancels=0.25, answer_len_min=1), 0)
    assert [(r.prompt_len, r.answer_len) for r in found] == [
        (r.prompt_len, r.answer_len) for r in draw(workload(num_requests=2000, answer_len_min=1), 0)
    ]
    assert {r.n for r in found} == {1, 4}
    leaving = [r for r in found if r.cancel_after is not None]
    assert len(leaving) / 2000 == pytest.approx(0.25, abs=0.03)
    assert all(1 <= r.cancel_after < r.answer_len and r.is_cancelled and r.ends_after == r.cancel_after for r in leaving)
    assert statistics.mean(r.cancel_after / r.answer_len for r in leaving) == pytest.approx(0.5, abs=0.05)
    assert all(
        r.cancel_after is None for r in draw(workload(num_requests=50, cancels=1, lengths="fixed", answer_len_min=1, answer_len_max=1), 0)
    )


# Traces


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        Request(2.5, 10, 20, 30, -1, 4, 7).to_line(),
        "\n",
        '{"arrival_s": 1, "prompt_tokens": 4, "generated_tokens": 5, "user": "x"}\n',
    ]
    path.write_text("".join(lines))
    assert read_trace(path) == [Request(1.0, 4, 5, 5, 0), Request(2.5, 10, 20, 30, -1, 4, 7)]
    section = load_config(MODEL, {"workload.kind": "measured", "workload.trace": str(path)}).workload
    assert draw(section, 0) == draw(section, 9) == tuple(read_trace(path))
    mixed = load_config(MODEL, {"workload.lengths": "trace", "workload.arrivals": "staggered", "workload.trace": str(path)}).workload
    assert [(r.arrival_s, r.prompt_len) for r in draw(mixed, 0)] == [(0.0, 4), (3.0, 10)]


GOOD = '{"arrival_s": 0, "prompt_tokens": 4, "generated_tokens": 5}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "got a list, a trace has one object a line, such as"),
        ('{"prompt_tokens": 4, "generated_tokens": 5}', "arrival_s: got nothing, allowed: a number >= 0"),
        ('{"arrival_s": -1, "prompt_tokens": 4, "generated_tokens": 5}', "arrival_s: got -1, allowed: a number >= 0"),
        ('{"arrival_s": NaN, "prompt_tokens": 4, "generated_tokens": 5}', "arrival_s: got NaN, allowed: a number >= 0"),
        ("[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
        (f'{{"arrival_s": {10**400}, "prompt_tokens": 4, "generated_tokens": 5}}', f"arrival_s: got {10**400}, allowed: a number >= 0"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "generated_tokens": 5}', "prompt_tokens: got 0, allowed: an integer >= 1"),
        ('{"arrival_s": 0, "prompt_tokens": 1.5, "generated_tokens": 5}', "prompt_tokens: got 1.5, allowed: an integer >= 1"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "generated_tokens": true}', "generated_tokens: got true, allowed: an integer >= 1"),
        (GOOD.replace("}", ', "priority": "high"}'), 'priority: got "high", allowed: an integer'),
        (GOOD.replace("}", ', "patient": 1}'), "patient: got 1, allowed: true or false"),
        (GOOD.replace("}", ', "n": 0}'), "n: got 0, allowed: an integer >= 1"),
        (GOOD.replace("}", ', "cancel_after": 0}'), "cancel_after: got 0, allowed: an integer >= 1"),
        (GOOD.replace("}", ', "max_tokens": null}'), "max_tokens: got null, allowed: an integer >= 1"),
    ],
)
def test_a_trace_line_that_cannot_be_read_is_named_by_its_number(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}, line 3: {message}")


def test_a_trace_that_is_not_there_or_empty_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the trace .*none.jsonl: No such file or directory$"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match=r"empty.jsonl holds no request: record one with `jaxkv batch --record-trace FILE`$"):
        read_trace(tmp_path / "empty.jsonl")


# Prompts from files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model: {path: x}\nworkload: {num_requests: 3, answer_len_min: 2, answer_len_max: 9, prompt_len_min: 2}\n")
    with Path("q.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["question", "n", "prompt"], ["why, oh why?", "1", "first"], ["two\nlines", "2", "second"]])
    Path("q.jsonl").write_text('{"question": "how {so}?", "n": 3, "more": [1, null]}\n\n{"question": "ümlaut", "n": 4, "more": true}\n')
    Path("a.txt").write_text("all of\nit")
    Path("b.md").write_text("# b")
    return tmp_path


def test_prompts_are_files_rows_or_templates_filled_from_rows(folder):
    assert read_prompts(["a.txt", "b.md", "q.csv"], None) == ["all of\nit", "# b", "first", "second"]
    assert read_prompts(["q.csv"], "{n}: {question} {{x}}") == ["1: why, oh why? {x}", "2: two\nlines {x}"]
    assert read_prompts(["q.jsonl"], "{question}{more}") == ["how {so}?[1, null]", "ümlauttrue"]
    assert read_prompts(["*.txt", "*.md"], "<{text}>") == ["<all of\nit>", "<# b>"]


@pytest.mark.parametrize(
    ("files", "template", "message"),
    [
        (["q.csv"], "{questin}", "workload.template: q.csv, line 2 has no column 'questin'; it has question, n, prompt"),
        (["q.jsonl"], None, "workload.prompts: q.jsonl, line 1 has no column 'prompt'; it has question, n, more"),
        (["q.csv"], "{question!r}", "workload.template: got '{question!r}', allowed in braces: the name of a column, such as {question}"),
        (["q.csv"], "{}", "workload.template: got '{}', allowed in braces: the name of a column, such as {question}"),
        (["q.csv"], "{n", "workload.template: expected '}' before end of string, in '{n'; a brace that is meant is written twice"),
        (["q.csv"], "hello", "workload.template: 'hello' names no column, so every prompt would be the same; write one in braces"),
        (["none.csv"], None, "workload.prompts: cannot read none.csv: No such file or directory"),
        (["n*.csv"], None, "workload.prompts: no file matches n*.csv"),
        (["c.yaml"], None, "workload.prompts: c.yaml: allowed are files that end in .txt, .md, .csv, .jsonl"),
        (["bad.jsonl"], None, "workload.prompts: bad.jsonl, line 2 is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (["list.jsonl"], None, "workload.prompts: list.jsonl, line 1 must hold an object, got a list"),
        (["short.csv"], None, "workload.prompts: short.csv, line 3 has another number of columns than the first line, which names 2"),
        (["torn.csv"], None, "workload.prompts: torn.csv, line 2: unexpected end of data"),
        (["bytes.txt"], None, "workload.prompts: cannot read bytes.txt: 'utf-8' codec can't decode byte 0xff in position 0: "
         "invalid start byte"),
        (["blank.txt"], None, "workload.prompts: blank.txt gives an empty prompt; take it out"),
        (["empty.csv", "empty.jsonl"], None, "workload.prompts: empty.csv, empty.jsonl hold no prompt"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_read_are_one_line(folder, files, template, message):
    Path("bad.jsonl").write_text('{"prompt": "x"}\nx\n')
    Path("list.jsonl").write_text("[1]\n")
    Path("short.csv").write_text("prompt,b\n1,2\n3\n")
    Path("torn.csv").write_text('prompt,b\n"1,2\n')
    Path("bytes.txt").write_bytes(b"\xff\xfe")
    Path("blank.txt").write_text(" \n")
    Path("empty.csv").write_text("prompt\n")
    Path("empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError) as error:
        read_prompts(files, template)
    assert str(error.value) == message


def test_prompts_of_files_take_turns_and_count_a_token_for_four_bytes(folder):
    found = draw(workload(prompts="*.md", num_requests=3), 0)
    assert [(r.text, r.prompt_len) for r in found] == [("# b", 1)] * 3
    found = draw(workload(prompts=["a.txt", "b.md"], num_requests=3), 0)
    assert [(r.text, r.prompt_len) for r in found] == [("all of\nit", 3), ("# b", 1), ("all of\nit", 3)]
    assert [r.answer_len for r in found] == [r.answer_len for r in draw(workload(num_requests=3), 0)]


def test_a_template_without_files_is_refused():
    with pytest.raises(ConfigError) as error:
        workload(template="{x}")
    assert str(error.value) == "workload.template: is there, but workload.prompts names no file with rows to fill it from"


# Bodies


def calls(vocab=300, seed=0, **fields):
    return make_calls(load_config(MODEL, {name.replace("__", "."): value for name, value in fields.items()}), vocab, seed)


def test_bodies_are_the_same_for_the_same_seed_and_ids_are_no_special_ones():
    one, again, other = calls(), calls(), calls(seed=1)
    assert one == again and [call.body["prompt"] for call in one] != [call.body["prompt"] for call in other]
    assert [call.custom_id for call in one] == [f"request-{i:06d}" for i in range(8)]
    ids = {token_id for call in one for token_id in call.body["prompt"]}
    assert min(ids) >= 18 and max(ids) < 300  # a sixteenth is left out
    assert [len(call.body["prompt"]) for call in one] == [call.request.prompt_len for call in one]
    assert all(call.body["max_tokens"] == call.request.answer_len and call.body["ignore_eos"] is True for call in one)
    assert len({call.body["seed"] for call in one}) == 8


def test_prompts_may_begin_alike():
    found = calls(workload__shared_prefix_len=70)
    beginnings = {tuple(call.body["prompt"][:64]) for call in found}
    assert len(beginnings) == 1 and len({tuple(call.body["prompt"][70:75]) for call in found if len(call.body["prompt"]) > 80}) > 1


def test_every_body_is_one_that_the_engine_takes(folder):
    fields = {"workload__choices": [2], "workload__priorities": [-3], "request__temperature": 0.5, "request__seed": 4}
    reader = BodyReader(ByteTokenizer(), 300, {"temperature": 0.5, "seed": 4})
    for call in calls(**fields):
        params = reader.read(Endpoint(call.url), call.body, 0).params
        assert (params.n, params.priority, params.temperature, params.seed, params.ignore_eos) == (2, -3, 0.5, 4, True)
    (chat, *_), (plain, *_) = (calls(workload__prompts=["a.txt"], workload__chat=chat, request__ignore_eos=False) for chat in (True, False))
    assert (chat.url, chat.body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "all of\nit"}])
    assert (plain.url, plain.body["prompt"], "ignore_eos" in plain.body) == ("/v1/completions", "all of\nit", False)
    assert reader.read(Endpoint(chat.url), chat.body, 0).prompts == [list(b"user: all of\nit\nassistant: ")]


# Parts of a job


def test_all_parts_together_are_the_whole_and_no_two_overlap():
    for count in (1, 2, 3, 7):
        parts = [Shard(index, count) for index in range(1, count + 1)]
        assert sorted(i for part in parts for i in range(1, 12) if part.takes(i)) == list(range(1, 12))
        assert [part.num_of(11) for part in parts] == [sum(part.takes(i) for i in range(1, 12)) for part in parts]
    assert Shard(5, 9).num_of(3) == 0 and str(Shard.parse("2/3")) == "2/3"


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/2", "1/2/3"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(ConfigError) as error:
        Shard.parse(text)
    assert str(error.value) == f"--shard: got {text!r}, allowed: i/n with 1 <= i <= n, such as 2/3"


def test_the_parts_of_a_batch_job_answer_each_line_once(tmp_path):
    write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(7)), line("r2"))
    whole = run(tmp_path)
    found = []
    for index in (1, 2, 3):
        (tmp_path / "out.jsonl").unlink()
        (tmp_path / "out.jsonl.job.json").unlink()
        part = run(tmp_path, shard=Shard(index, 3))
        found += part.entries
        assert run(tmp_path, shard=Shard(index, 3)).engines == []  # nothing is missing
    assert sorted(entry["custom_id"] for entry in found) == sorted(entry["custom_id"] for entry in whole.entries)
    texts = {e["custom_id"]: e["response"]["body"]["choices"][0]["text"] for e in found if e["error"] is None}
    assert texts == whole.texts and len(texts) == 7  # the second r2 is an error, though the first is in another part


def test_another_part_into_the_same_output_is_refused(tmp_path):
    write(tmp_path / "in.jsonl", *(line(f"r{i}") for i in range(4)))
    run(tmp_path, shard=Shard(1, 2))
    with pytest.raises(ConfigError, match=r"was begun by another job: its part of the input \(1/2, now 2/2\)\. Choose"):
        run(tmp_path, shard=Shard(2, 2))
    with pytest.raises(ConfigError, match=r"was begun by another job: its part of the input \(1/2, now all\)\. Choose"):
        run(tmp_path)


# The command


def test_a_load_is_written_as_a_batch_file_and_as_a_trace(folder, capsys):
    assert main(["workload", "c.yaml", "--output", "in.jsonl", "--trace", "t.jsonl", "--vocab-size", "400"]) == 0
    lines = [json.loads(text) for text in Path("in.jsonl").read_text().splitlines()]
    assert [entry["custom_id"] for entry in lines] == ["request-000000", "request-000001", "request-000002"]
    section = load_config("c.yaml").workload
    assert read_trace(Path("t.jsonl")) == list(draw(section, 0))
    assert [len(entry["body"]["prompt"]) for entry in lines] == [request.prompt_len for request in draw(section, 0)]
    assert main(["workload", "c.yaml", "--output", "part.jsonl", "--shard", "2/2", "--vocab-size", "400"]) == 0
    assert Path("part.jsonl").read_text() == Path("in.jsonl").read_text().splitlines(keepends=True)[1]
    assert capsys.readouterr().out == ""
    assert main(["workload", "c.yaml", "--workload.lengths", "fixed"]) == 0
    assert capsys.readouterr().out == "3 requests, 1536 prompt tokens, 27 answer tokens, the last arrival after 0.0 s\n"
    assert main(["workload", "c.yaml", "--shard", "5/5"]) == 0
    assert capsys.readouterr().out == "0 requests\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "no/in.jsonl"], "--output no/in.jsonl: there is no folder no"),
        (["--vocab-size", "1", "--output", "in.jsonl"], "--vocab-size: got 1, allowed: 2 or more"),
        (["--shard", "3/2"], "--shard: got '3/2', allowed: i/n with 1 <= i <= n, such as 2/3"),
        (["--workload.prompts", "[q.csv]", "--workload.template", "{questin}"],
         "workload.template: q.csv, line 2 has no column 'questin'; it has question, n, prompt"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_one_line(folder, capsys, words, message):
    assert main(["workload", "c.yaml", *words]) == 2
    assert capsys.readouterr() == ("", f"jaxkv: error: {message}\n")
