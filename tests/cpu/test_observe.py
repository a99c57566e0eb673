"""Looking inside a real engine: its log lines, timeline, profile and list of programs, none of which changes an answer."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxkv.cli.main import main
from jaxkv.engine import Engine
from jaxkv.errors import ConfigError
from jaxkv.observe.events import Event
from jaxkv.observe.profile import profiled
from jaxkv.observe.record import TraceRecorder
from jaxkv.observe.timeline import ENGINE, ROWS, SEQUENCES, Timeline
from jaxkv.request import SamplingParams
from jaxkv.workload.trace import read_trace
from tests.cpu import tiny

GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


def crowd(made: Engine) -> list[Any]:
    """Six named requests through a pool that holds about two of them; what they answer."""
    handles = [made.submit(tiny.prompt(12, seed), GREEDY, name=f"q{seed}") for seed in range(6)]
    return [tiny.content(handle.result()) for handle in handles]


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    with tiny.engine() as made:
        return crowd(made)


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """What the engine logs from now on, as dicts."""
    found: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.msg, Event):
                found.append({"event": record.msg.name, **record.msg.fields})

    handler = Collect()
    logger = logging.getLogger("jaxkv")
    caplog.set_level(logging.DEBUG, logger="jaxkv")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_every_park_and_restore_has_its_line_and_none_holds_a_prompt(plain, events):
    with tiny.engine() as made:
        assert crowd(made) == plain
        tiny.settle(made)
        parks = [event for event in events if event["event"] == "park"]
        restores = [event for event in events if event["event"] == "restore"]
        assert len(parks) == made.scheduler.counters.num_parks > 0
        assert len(restores) == made.scheduler.counters.num_restores > 0
    for event in (*parks, *restores):
        assert event["why"] == "pressure" and event["name"] == f"q{event['seq_id']}"
        assert event["num_pages"] == -(-event["num_tokens"] // 4)
        assert event["took_ms"] >= 0 and event["waited_ms"] >= 0
    assert {event["stage"] for event in events if event["event"] == "start"} >= {"check", "compile", "warm up"}
    allowed = {
        "event",
        "stage",
        "seq_id",
        "name",
        "why",
        "num_tokens",
        "num_pages",
        "image_bytes",
        "kept_bytes",
        "took_ms",
        "waited_ms",
        "reason",
    }
    assert set().union(*events) <= allowed | {"prompt_tokens", "max_tokens", "generated_tokens", "num_parks"}


def test_forced_parks_and_last_resorts_say_so(events):
    with tiny.engine(debug__park_every=8, pool__tokens=256) as made:
        crowd(made)
        tiny.settle(made)
    assert {event["why"] for event in events if event["event"] == "park"} == {"forced"}
    events.clear()
    with tiny.engine(debug__planner=False) as made:
        crowd(made)
        tiny.settle(made)
    assert {event["why"] for event in events if event["event"] == "park"} == {"last_resort"}


def test_without_host_memory_drops_and_replays_have_their_lines_and_refusals_are_told_once_a_park(plain, events):
    with tiny.engine(scheduler__host_budget_mib=0) as made:
        assert crowd(made) == plain
        tiny.settle(made)
    drops, replays = ([event for event in events if event["event"] == name] for name in ("drop", "replay"))
    assert len(drops) == made.scheduler.counters.num_parks_dropped == len(replays) > 0
    assert [event["num_tokens"] for event in drops] == [event["num_tokens"] for event in replays]
    assert all(event["image_bytes"] == 0 and event["why"] == "pressure" and event["took_ms"] >= 0 for event in (*drops, *replays))
    events.clear()
    with tiny.engine(scheduler__host_budget_mib=0, scheduler__over_budget="wait", debug__park_every=1) as made:
        assert crowd(made) == plain
        tiny.settle(made)
        counters = made.scheduler.counters
    refused = [event for event in events if event["event"] == "park_refused"]
    assert 0 < len(refused) == counters.num_parks_refused <= len(plain) + counters.num_parks


def test_a_listener_that_always_raises_changes_no_byte(plain):
    class Bad:
        def __getattr__(self, name: str) -> Any:
            raise ValueError(name) if not name.startswith("on_") else AttributeError(name)

        def on_plan(self, *_: Any) -> None:
            raise ValueError

        on_landed = on_step = on_end = on_submit = on_plan

    with tiny.engine() as made:
        made.observers.add(Bad())
        assert crowd(made) == plain


@pytest.fixture(scope="module")
def timeline(plain, tmp_path_factory) -> list[dict[str, Any]]:
    """The events of a crowded run, after looking that it changed nothing."""
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    with tiny.engine() as made, Timeline(path) as listener:
        made.observers.add(listener)
        assert crowd(made) == plain
        tiny.settle(made)
    return json.loads(path.read_text())


def slices(events: list[dict[str, Any]], pid: int) -> dict[int, list[tuple[str, float, float]]]:
    """Name, begin and end of every slice by track; fails where a slice is closed that is not the open one, or left open."""
    found: dict[int, list[tuple[str, float, float]]] = defaultdict(list)
    opened: dict[int, tuple[str, float]] = {}
    for event in events:
        if event.get("pid") == pid and event["ph"] == "B":
            assert event["tid"] not in opened, "a track holds one slice at a time"
            opened[event["tid"]] = event["name"], event["ts"]
        elif event.get("pid") == pid and event["ph"] == "E":
            name, began = opened.pop(event["tid"])
            assert name == event["name"] and began <= event["ts"]
            found[event["tid"]].append((name, began, event["ts"]))
    assert not opened
    return found


def test_a_sequences_track_shows_its_states_in_a_row(timeline):
    followers = {
        "waiting": {"prefilling"},
        "prefilling": {"decoding", "parking"},
        "decoding": {"parking"},
        "parking": {"parked", "restoring"},
        "parked": {"restoring"},
        "restoring": {"prefilling", "decoding"},
    }
    tracks = slices(timeline, SEQUENCES)
    assert sorted(tracks) == [1, 2, 3, 4, 5, 6]
    seen = set()
    for states in tracks.values():
        assert states[0][0] == "waiting"
        for before, after in pairwise(states):
            assert after[0] in followers[before[0]] and after[1] == before[2]
        seen |= {name for name, _, _ in states}
    assert seen >= {"waiting", "prefilling", "decoding", "parking", "restoring"}


def test_a_rows_track_shows_whose_it_is_and_tracks_have_names(timeline):
    tracks = slices(timeline, ROWS)
    assert set(tracks) <= {1, 2, 3, 4}
    assert {name for row in tracks.values() for name, _, _ in row} == {f"seq {i} q{i}" for i in range(6)}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in timeline if e["name"] == "thread_name"}
    assert named[ROWS, 1] == "row 0" and named[SEQUENCES, 6] == "seq 5 q5"


def test_counters_tell_pages_and_host_bytes_and_end_at_nothing(timeline):
    counters: dict[str, list[dict[str, int]]] = defaultdict(list)
    for event in timeline:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert all(value["used"] + value["free"] == 16 for value in counters["pool pages"])
    assert counters["pool pages"][-1] == {"used": 0, "free": 16}
    assert max(value["used"] for value in counters["pool pages"]) > 12
    assert max(value["held"] for value in counters["host bytes"]) > 0 and counters["host bytes"][-1] == {"held": 0}
    assert set(counters["pages by row"][0]) == {"row 0", "row 1", "row 2", "row 3"}


def test_every_copy_that_leaves_arrives(timeline):
    begun = {(e["name"], e["id"]) for e in timeline if e["ph"] == "b"}
    ended = {(e["name"], e["id"]) for e in timeline if e["ph"] == "e"}
    assert begun == ended and {name for name, _ in begun} == {"copy to host", "copy to device"}


def test_steps_are_named_after_what_they_compute(timeline):
    steps = [event for event in timeline if event["ph"] == "X" and event["pid"] == ENGINE]
    assert {"prefill 8", "prefill 4", "decode 1"} <= {event["name"] for event in steps}
    assert all(event["dur"] > 0 for event in steps)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.2 for a, b in pairwise(steps))


def test_a_profile_names_every_part_of_a_step_and_a_second_one_can_follow(plain, tmp_path):
    with tiny.engine() as made:
        with profiled(made, tmp_path / "a"):
            assert crowd(made) == plain
        assert made.phases.on is False
        crowd(made)
        with profiled(made, tmp_path / "b"):
            made.submit(tiny.prompt(4), GREEDY).result()
    for folder in ("a", "b"):
        [trace] = (tmp_path / folder / "plugins" / "profile").glob("*/*.xplane.pb")
        names = trace.read_bytes()
        for name in (b"step", b"land", b"plan", b"move", b"prefill", b"decode", b"collect"):
            assert name in names, name


def test_phases_cost_nothing_when_off():
    from jaxkv.observe.phases import Phases

    phases = Phases()
    assert phases("land") is phases("plan") is phases.step(3)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(tiny.config().to_dict()))
    return path


def test_a_batch_job_writes_timeline_profile_and_log(config_file, tmp_path, capsys):
    body = {"prompt": tiny.prompt(12), "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    lines = [{"custom_id": f"id {i}", "method": "POST", "url": "/v1/completions", "body": body} for i in range(5)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {name: str(tmp_path / name) for name in ("out.jsonl", "t.json", "profile", "log.jsonl")}
    words = ["batch", str(config_file), "--input", str(tmp_path / "in.jsonl"), "--output", files["out.jsonl"]]
    words += ["--timeline", files["t.json"], "--profile", files["profile"]]
    assert main([*words, "--log.level", "info", "--log.json", "true", "--log.file", files["log.jsonl"]]) == 0
    logged = [json.loads(line) for line in Path(files["log.jsonl"]).read_text().splitlines()]
    assert {line["name"] for line in logged if line["event"] == "park"} <= {f"id {i}" for i in range(5)}
    assert any(line["event"] == "restore" for line in logged)
    titles = [event["args"]["name"] for event in json.loads(Path(files["t.json"]).read_text()) if event["name"] == "thread_name"]
    assert "seq 4 id 4" in titles
    assert list(Path(files["profile"]).glob("plugins/profile/*/*.xplane.pb"))
    assert "start: compile" not in capsys.readouterr().err


def test_the_list_of_programs_is_what_the_engine_compiles(config_file, capsys):
    assert main(["programs", str(config_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["dtype"], found["pool_tokens"]) == ("llama", "float32", 64)
    assert [program["name"] for program in found["programs"]] == ["prefill", "decode", "gather", "scatter", "copy", "rotate"]
    with tiny.engine() as made:
        for listed, compiled in zip(found["programs"], made.parts.programs.all(), strict=True):
            assert (listed["name"], listed["temp_bytes"], listed["flops"]) == (compiled.name, compiled.temp_bytes, compiled.flops)
    scatter = found["programs"][3]
    assert [argument["name"] for argument in scatter["arguments"]] == ["pool", "pages", "ids"]
    assert scatter["arguments"][0] == {"name": "pool", "shapes": ["6 x float32[17,2,4,16]"], "num_bytes": 6 * 17 * 2 * 4 * 16 * 4}
    assert scatter["aliased_bytes"] == 6 * 17 * 2 * 4 * 16 * 4
    assert all(program["compile_s"] > 0 for program in found["programs"])


def test_the_table_of_programs_fits_a_page_and_needs_no_weights(config_file, capsys, monkeypatch):
    import jaxkv.models.checkpoint

    monkeypatch.setattr(jaxkv.models.checkpoint, "load_checkpoint", None)
    assert main(["programs", str(config_file), "--transfer.mode", "hold", "--scheduler.rows", "2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama in float32 on 1 x ") and "scatter" in out and "FLOPs" in out
    assert max(map(len, out.splitlines())) <= 140


def test_a_profile_folder_that_cannot_be_is_one_line_before_a_model_is_loaded(config_file, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5]}}) + "\n"
    )
    (tmp_path / "file").write_text("")
    words = ["batch", str(config_file), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "o.jsonl")]
    assert main([*words, "--profile", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err == f"jaxkv: error: {tmp_path / 'file'} cannot be a folder for a profile: File exists\n"
    assert main([*words, "--timeline", str(tmp_path)]) == 2
    assert "is a folder; name a file" in capsys.readouterr().err


def test_a_recorded_load_says_when_and_how_long_and_nothing_that_was_said(plain, tmp_path):
    path = tmp_path / "load.jsonl"
    with TraceRecorder(path) as recorder, tiny.engine() as made:
        made.observers.add(recorder)
        assert crowd(made) == plain
        made.submit(tiny.prompt(5), GREEDY).cancel()
        made.submit(tiny.prompt(5), SamplingParams(temperature=0, ignore_eos=True, priority=-2, patient=True)).result()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 7  # the cancelled one has no length of its own
    assert all(set(line) == {"arrival_s", "prompt_tokens", "generated_tokens", "max_tokens", "priority"} for line in lines[:6])
    requests = read_trace(path)
    assert [(r.prompt_len, r.answer_len, r.max_tokens) for r in requests] == [*[(12, 20, 20)] * 6, (5, 60, 124)]
    assert [(r.priority, r.patient) for r in requests] == [(0, False)] * 6 + [(-2, True)]
    assert requests[0].arrival_s == 0 and requests[6].arrival_s > requests[5].arrival_s > 0


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"^cannot write the trace .*x: Is a directory$"):
        (tmp_path / "x").mkdir()
        TraceRecorder(tmp_path / "x")
