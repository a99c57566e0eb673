"""Log lines, trace files and the guard around listeners, without an engine."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxkv.cli.main import main
from jaxkv.config import load_config
from jaxkv.errors import ConfigError
from jaxkv.observe.events import Event, JsonFormatter, TextFormatter, utc, word
from jaxkv.observe.log import LogObserver, logger, logging_to, tell_stages, without_answer
from jaxkv.observe.observers import Observers
from jaxkv.observe.trace_file import TraceFile
from jaxkv.scheduler import Chunk, Note, Plan

PARK = Event("park", {"seq_id": 3, "name": "a b", "why": "pressure", "took_ms": 1.25, "ended": None})


def record(message, level=logging.INFO, exc_info=None, created=1.5):
    made = logging.LogRecord("jaxkv", level, "f.py", 1, message, (), exc_info)
    made.created = created
    return made


def section(**fields):
    return load_config({"model": {"path": "x"}, "log": fields}).log


@pytest.fixture
def lines(tmp_path):
    """The lines that the logger writes at level debug, as dicts."""
    file = tmp_path / "log.jsonl"
    with logging_to(section(level="debug", json=True, file=str(file))):
        yield lambda: [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_for_people_has_time_level_event_and_fields():
    assert TextFormatter().format(record(PARK)) == '1970-01-01T00:00:01.500Z INFO park seq_id=3 name="a b" why=pressure took_ms=1.2'


def test_a_line_for_programs_is_one_object_without_what_is_not_known():
    assert json.loads(JsonFormatter().format(record(PARK, logging.WARNING))) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "event": "park",
        "seq_id": 3,
        "name": "a b",
        "why": "pressure",
        "took_ms": 1.25,
    }


def test_a_plain_message_and_a_traceback_are_one_json_line_too():
    try:
        raise ValueError("x")
    except ValueError:
        line = JsonFormatter().format(record("two\nlines", exc_info=sys.exc_info()))
    assert "\n" not in line
    found = json.loads(line)
    assert (found["event"], found["message"]) == ("message", "two\nlines")
    assert found["traceback"].endswith("ValueError: x")


@pytest.mark.parametrize(
    ("value", "text"),
    [("q-1", "q-1"), ("a b", '"a b"'), ("a=b", '"a=b"'), ("", '""'), ("x\nERROR y", '"x\\nERROR y"'), (7, "7"), (0.04, "0.0"), ("ä", "ä")],
)
def test_a_value_never_breaks_the_line_it_stands_in(value, text):
    assert word(value) == text


def test_times_are_utc_to_the_millisecond():
    assert utc(1.0) == "1970-01-01T00:00:01.000Z"
    assert utc(86399.9994) == "1970-01-01T23:59:59.999Z"


def test_nothing_is_installed_before_somebody_asks_and_all_is_put_back(tmp_path):
    before = (list(logger.handlers), logger.level, logger.propagate)
    with logging_to(section(file=str(tmp_path / "log"))):
        assert len(logger.handlers) == len(before[0]) + 1
    assert (list(logger.handlers), logger.level, logger.propagate) == before


def test_the_level_decides_what_is_written(tmp_path, capsys):
    with logging_to(section()):
        logger.info(PARK)
        logger.warning(PARK)
    assert capsys.readouterr().err.count("park") == 1


def test_a_log_file_that_cannot_be_written_is_one_line(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"log.file: .*none/log cannot be written: No such file or directory"),
        logging_to(section(file=str(tmp_path / "none" / "log"))),
    ):
        pass


def test_lines_go_to_whatever_standard_error_is_at_that_moment(capsys, monkeypatch):
    with logging_to(section(level="info")):
        assert capsys.readouterr().err == ""
        logger.info(PARK)
    assert "park seq_id=3" in capsys.readouterr().err


def test_start_up_stages_are_told_to_both(lines):
    heard = []
    tell_stages(lambda name, seconds: heard.append((name, seconds)))("compile", 1.5)
    tell_stages(None)("read", 0.25)
    assert heard == [("compile", 1.5)]
    assert [(line["event"], line["stage"], line["took_ms"]) for line in lines()] == [("start", "compile", 1500.0), ("start", "read", 250.0)]


class FakeScheduler:
    """Says what it is told to."""

    def __init__(self):
        self.states = {}

    def state(self, seq_id):
        return self.states[seq_id]


@pytest.fixture
def engine():
    live = SimpleNamespace(seq_id=3, name="sky", num_generated=5, num_parks=1, submitted_s=0.0)
    return SimpleNamespace(scheduler=FakeScheduler(), live=lambda seq_id: live if seq_id == 3 else None)


CHUNK = Chunk(3, 1, 0, (1, 2), 7)
ORDER = Plan(0, park=(CHUNK,), notes=(Note("park", 3, "forced", 20, 2, 4096),))


def test_a_park_and_a_restore_are_one_line_each_with_who_why_how_much_and_how_long(lines, engine):
    observer = LogObserver()
    engine.scheduler.states[3] = "parking"
    observer.on_plan(engine, Plan(0, notes=ORDER.notes), 1.0)
    observer.on_plan(engine, Plan(1, park=(CHUNK,)), 1.25)
    assert lines() == []
    engine.scheduler.states[3] = "parked"
    observer.on_landed(engine, SimpleNamespace(parked=[CHUNK], restored=[]), 1.5)
    engine.scheduler.states[3] = "restoring"
    observer.on_plan(engine, Plan(2, restore=(CHUNK,), notes=(Note("restore", 3, "", 20, 3, 4096),)), 4.0)
    engine.scheduler.states[3] = "decoding"
    observer.on_landed(engine, SimpleNamespace(parked=[], restored=[CHUNK]), 4.5)
    sizes = {"seq_id": 3, "name": "sky", "why": "forced", "num_tokens": 20, "num_pages": 2, "image_bytes": 4096}
    found = [{key: value for key, value in line.items() if key not in ("time", "level")} for line in lines()]
    assert found == [
        {"event": "park", **sizes, "took_ms": 250.0, "waited_ms": 250.0},
        {"event": "restore", **sizes, "took_ms": 500.0, "waited_ms": 3000.0},
    ]


def test_one_that_ends_while_it_leaves_is_told_of_all_the_same(lines, engine):
    observer = LogObserver()
    engine.scheduler.states[3] = "parking"
    observer.on_plan(engine, ORDER, 1.0)
    observer.on_end(engine, engine.live(3), "cancelled", None, 1.5)
    assert [(line["event"], line.get("ended")) for line in lines()] == [("park", "cancelled"), ("end", None)]


def test_one_with_nothing_to_copy_is_away_at_once(lines, engine):
    observer = LogObserver()
    engine.scheduler.states[3] = "parked"
    observer.on_plan(engine, Plan(0, notes=(Note("park", 3, "pressure", 0, 0, 0),)), 1.0)
    engine.scheduler.states[3] = "prefilling"
    observer.on_plan(engine, Plan(1, notes=(Note("restore", 3, "", 0, 1, 0),)), 2.0)
    assert [(line["event"], line["num_pages"]) for line in lines()] == [("park", 0), ("restore", 0)]


def test_a_refused_park_is_a_warning_and_a_failure_an_error(lines, engine):
    observer = LogObserver()
    observer.on_plan(engine, Plan(0, notes=(Note("park_refused", 3, "no room", 20, 2, 4096),)), 1.0)
    observer.on_end(engine, engine.live(3), "error", "its image is damaged", 1.5)
    first, second = lines()
    assert (first["event"], first["level"], first["reason"], first["image_bytes"]) == ("park_refused", "warning", "no room", 4096)
    assert (second["event"], second["level"], second["reason"], second["name"]) == ("failed", "error", "its image is damaged", "sky")


def test_what_a_callback_said_may_quote_an_answer_so_only_its_type_is_told():
    assert without_answer("the token could not be taken: KeyError: 'my secret'") == "the token could not be taken: KeyError"
    assert without_answer("a copy was not done after 60.0 s: raise it") == "a copy was not done after 60.0 s: raise it"


def test_a_listener_that_raises_stops_nobody_and_is_named_once_without_its_words(lines):
    heard = []

    class Bad:
        def on_plan(self, *facts):
            raise ValueError("my secret")

    observers = Observers(Bad(), SimpleNamespace(on_plan=lambda *facts: heard.append(facts)), object())
    observers.tell("on_plan", 1, 2)
    observers.tell("on_plan", 3, 4)
    assert heard == [(1, 2), (3, 4)]
    assert [line["message"] for line in lines()] == ["Bad.on_plan raised ValueError, told once; the engine goes on"]


def test_a_log_handler_that_raises_does_not_reach_the_engine(engine):
    class Broken(logging.Handler):
        def handle(self, record):
            raise OSError("disk full")

    handler = Broken()
    logger.addHandler(handler)
    try:
        Observers(LogObserver()).tell("on_end", engine, engine.live(3), "error", "x", 1.0)
    finally:
        logger.removeHandler(handler)


def test_a_listener_that_was_taken_away_hears_nothing():
    heard = []
    listener = SimpleNamespace(on_step=heard.append)
    observers = Observers()
    observers.add(listener)
    observers.tell("on_step", 1)
    observers.remove(listener)
    observers.remove(listener)
    observers.tell("on_step", 2)
    assert heard == [1]


def test_a_closed_trace_file_is_json_and_an_unfinished_one_lacks_the_bracket_only(tmp_path):
    out = TraceFile(tmp_path / "t.json")
    out.name_track(1, 2, 'a "b"\n')
    out.add("B", "x", 10.0, pid=1, tid=2)
    out.add("E", "x", 10.5, pid=1, tid=2)
    out.flush(10.5)
    text = (tmp_path / "t.json").read_text()
    assert [event["ph"] for event in json.loads(text + "]")] == ["M", "M", "B", "E"]
    out.add("C", "n", 11.0, pid=1, args={"a": 1})
    out.close()
    out.close()
    out.add("C", "n", 12.0, pid=1, args={"a": 1})
    events = json.loads((tmp_path / "t.json").read_text())
    assert events[0]["args"] == {"name": 'a "b"\n'}
    assert [event["ts"] for event in events if event["ph"] != "M"] == [0.0, 500000.0, 1000000.0]


def test_a_trace_file_keeps_no_more_than_a_moment_in_memory(tmp_path):
    out = TraceFile(tmp_path / "t.json")
    for i in range(5000):
        out.add("C", "n", 10.0 + i * 1e-6, pid=1, args={"a": i})
        assert out._num_bytes < 2**16 + 200
    assert (tmp_path / "t.json").stat().st_size > 2**17
    out.close()
    assert len(json.loads((tmp_path / "t.json").read_text())) == 5000


def test_a_trace_file_is_not_made_before_there_is_something_in_it(tmp_path):
    (tmp_path / "old.json").write_text("old")
    TraceFile(tmp_path / "old.json").close()
    assert (tmp_path / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("name", "message"), [("", "it is a folder; name a file"), ("none/t.json", "name a file in a folder that is there")]
)
def test_a_trace_file_that_cannot_be_is_refused_at_once(tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        TraceFile(tmp_path / name)


def test_a_full_disk_ends_the_trace_and_says_so_once():
    out = TraceFile("/dev/full")
    out.add("C", "n", 1.0, pid=1, args={})
    with pytest.raises(OSError, match="No space"):
        out.flush(1.0)
    out.add("C", "n", 2.0, pid=1, args={})
    out.close()


@pytest.mark.parametrize(
    "words", [["--timeline", "o.jsonl"], ["--timeline", "o.jsonl.job.json"], ["--timeline", "in.jsonl"], ["--log.file", "o.jsonl"]]
)
def test_the_timeline_and_the_log_are_never_written_over_the_jobs_own_files(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("model: {path: x}\n")
    assert main(["batch", "c.yaml", "--input", "in.jsonl", "--output", "o.jsonl", *words]) == 2
    flag = words[0].removeprefix("--") if "log" in words[0] else words[0]
    assert capsys.readouterr().err == f"jaxkv: error: {flag} {words[1]}: is another file of this job; choose a file of its own\n"
