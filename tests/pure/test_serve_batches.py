"""/v1/batches: files of requests answered beside everything else, by the rules of `jaxkv batch`, across restarts of the server."""

import asyncio
import io
import json
import re

import pytest

from jaxkv.batch import run_batch
from jaxkv.serve import batch_record, batch_run, batches
from jaxkv.serve.batch_record import BatchRecord
from jaxkv.testing import FakeEngine
from tests.serving import ServedFake, client_of, config, site, until

BATCHES, FILES, COMPLETION = "/v1/batches", "/v1/files", "/v1/completions"
BOSS = {"authorization": "Bearer boss"}
LONG = {"max_tokens": 3000, "ignore_eos": True}


def line(custom_id, url=COMPLETION, **body):
    body = {"prompt": f"say {custom_id}", **body} if url == COMPLETION else body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def run(talk, tmp_path, engine=None, **settings):
    """Run `talk(http, engine, site)` beside a server that keeps files."""
    engine = engine or ServedFake(step_s=0.001)

    async def go():
        kept = {"files_dir": str(tmp_path / "kept"), **settings}
        async with site(engine, operator_keys=("boss",), **kept) as made, client_of(made) as http, asyncio.timeout(20):
            return await talk(http, engine, made)

    return asyncio.run(go())


async def upload(http, lines):
    content = b"".join((entry if isinstance(entry, bytes) else json.dumps(entry).encode()) + b"\n" for entry in lines)
    return (await http.post(FILES, files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})).json()["id"]


async def begin(http, lines, endpoint=COMPLETION, **fields):
    body = {"input_file_id": await upload(http, lines), "endpoint": endpoint, "completion_window": "24h", **fields}
    found = await http.post(BATCHES, json=body)
    assert found.status_code == 200, found.text
    return found.json()


async def ended(http, batch_id):
    while (found := (await http.get(f"{BATCHES}/{batch_id}")).json())["status"] not in batch_record.ENDED:
        await asyncio.sleep(0.005)
    return found


async def lines_of(http, file_id):
    return [json.loads(text) for text in (await http.get(f"{FILES}/{file_id}/content")).text.splitlines()]


def test_a_batch_answers_as_the_command_does_and_tells_how_it_went(tmp_path):
    lines = [line(f"r{index}", max_tokens=20, temperature=1.0) for index in range(12)]
    lines += [line("two", prompt=["ab", "cd"], n=2), line("bad", temperature=9), line("other", model="large")]
    lines.append(line("urgent", priority=-3))

    async def talk(http, engine, made):
        batch = await begin(http, lines, metadata={"who": "me"})
        assert re.fullmatch(r"batch_[0-9a-f]{24}", batch["id"]) and batch["status"] == "validating"
        assert batch["expires_at"] - batch["created_at"] == 86400
        found = await ended(http, batch["id"])
        return found, await lines_of(http, found["output_file_id"]), await lines_of(http, found["error_file_id"]), engine

    found, answers, faults, engine = run(talk, tmp_path)
    assert (found["object"], found["status"], found["endpoint"], found["model"]) == ("batch", "completed", COMPLETION, "small")
    assert found["request_counts"] == {"total": 16, "completed": 14, "failed": 2} and found["errors"] is None
    assert found["metadata"] == {"who": "me"} and found["completion_window"] == "24h"
    times = [found[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
    assert times == sorted(times) and found["cancelled_at"] is found["failed_at"] is None
    assert {fault["custom_id"]: (fault["error"]["code"], fault["error"]["message"]) for fault in faults} == {
        "bad": ("invalid_request", "temperature: got 9, allowed: a number from 0 to 2"),
        "other": ("model_not_found", "model: got 'large', this server has 'small'"),
    }
    assert str(tmp_path) not in json.dumps(faults)
    assert len(answers) == 14 and {answer["error"] for answer in answers} == {None}
    priorities = [handle._params.priority for handle in engine.handles.values()]
    assert sorted(priorities) == [-3, *[10] * 16]

    (tmp_path / "in.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    plain = tmp_path / "out.jsonl"
    run_batch(FakeEngine(), config(), [str(tmp_path / "in.jsonl")], plain, stderr=io.StringIO())
    by_command = {entry["custom_id"]: entry for entry in map(json.loads, plain.read_text().splitlines())}
    assert all(entry["jaxkv"] == by_command[entry["custom_id"]]["jaxkv"] for entry in answers)
    assert [choices(entry) for entry in answers] == [choices(by_command[entry["custom_id"]]) for entry in answers]


def choices(entry):
    body = entry["response"]["body"]
    return body["choices"], body["usage"], body["seed"]


def test_files_of_a_batch_are_listed_and_its_input_stays_while_it_is_needed(tmp_path):
    async def talk(http, engine, made):
        batch = await begin(http, [line("a", **LONG)])
        await until(lambda: engine.num_live == 1)
        refused = await http.delete(f"{FILES}/{batch['input_file_id']}")
        await http.post(f"{BATCHES}/{batch['id']}/cancel")
        await ended(http, batch["id"])
        second = await ended(http, (await begin(http, [line("b")]))["id"])
        outputs = (await http.get(f"{FILES}?purpose=batch_output")).json()["data"]
        gone = await http.delete(f"{FILES}/{batch['input_file_id']}")
        return batch, refused.json()["error"], second, outputs, gone.status_code

    batch, refused, second, outputs, gone = run(talk, tmp_path)
    assert refused["code"] == "file_in_use" and gone == 200
    message = f"the file {batch['input_file_id']} is the input of {batch['id']}, which is not done; wait for it or cancel it first"
    assert refused["message"] == message
    assert [(file["id"], file["filename"]) for file in outputs] == [(second["output_file_id"], f"{second['id']}_output.jsonl")]
    assert second["error_file_id"] is None


@pytest.mark.parametrize(
    ("lines", "faults"),
    [
        ([line("a"), b"no json"], [("invalid_json", 2)]),
        ([line("a"), line("b"), line("a")], [("duplicate_custom_id", 3)]),
        ([{"method": "POST", "url": COMPLETION, "body": {}}], [("missing_custom_id", 1)]),
        ([line("a", url="/v1/chat/completions", messages=[])], [("mismatched_endpoint", 1)]),
        ([b" "], [("empty_file", None)]),
        ([line("x" * 10, prompt="y" * 2**20)], [("line_too_long", 1)]),
        ([b"x"] * 30, [("invalid_json", number) for number in range(1, 21)]),
        ([line(str(index)) for index in range(6)], [("too_many_lines", None)]),
    ],
    ids=lambda value: value[0][0] if isinstance(value[0], tuple) else "",
)
def test_an_input_that_is_none_fails_the_batch_before_anything_is_run(lines, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_run, "MAX_LINES", 5 if faults[0][0] == "too_many_lines" else 100)

    async def talk(http, engine, made):
        found = await ended(http, (await begin(http, lines))["id"])
        assert engine.handles == {}
        return found

    found = run(talk, tmp_path, max_body_mib=1)
    assert found["status"] == "failed" and found["failed_at"] and found["output_file_id"] is None
    assert [(fault["code"], fault["line"]) for fault in found["errors"]["data"]] == faults
    if faults[0][0] == "mismatched_endpoint":
        assert found["errors"]["data"][0]["message"] == "url: got /v1/chat/completions, the batch is for /v1/completions"
    if faults[0][0] == "line_too_long":
        allowed = "allowed: at most 1 MiB (server.max_body_mib)"
        assert re.fullmatch(rf"the line has \d+ bytes, {re.escape(allowed)}", found["errors"]["data"][0]["message"])
    if faults[0][0] == "too_many_lines":
        assert found["errors"]["data"][0]["message"] == "the input has 6 lines, at most 5 are taken; make several batches of it"
    if faults[0][0] == "empty_file":
        assert found["errors"]["data"][0]["message"] == "the input has no line"


def test_a_batch_that_is_cancelled_keeps_the_answers_it_has(tmp_path):
    async def talk(http, engine, made):
        batch = await begin(http, [line("quick", max_tokens=2), line("slow", **LONG)])
        await until(lambda: made.batches.get(batch["id"]).counts["completed"] == 1)
        asked = (await http.post(f"{BATCHES}/{batch['id']}/cancel")).json()
        found = await ended(http, batch["id"])
        await until(lambda: engine.num_live == 0)
        again = await http.post(f"{BATCHES}/{batch['id']}/cancel")
        return asked, found, await lines_of(http, found["output_file_id"]), again

    asked, found, answers, again = run(talk, tmp_path)
    assert asked["status"] == "cancelling" and asked["cancelling_at"]
    assert found["status"] == "cancelled" and found["cancelled_at"] and found["error_file_id"] is None
    assert found["request_counts"] == {"total": 2, "completed": 1, "failed": 0}
    assert [answer["custom_id"] for answer in answers] == ["quick"]
    message = f"the batch {found['id']} is cancelled, so it cannot be cancelled"
    assert (again.status_code, again.json()["error"]["message"]) == (400, message)


def test_batches_go_on_beside_each_other_and_take_turns(tmp_path):
    async def talk(http, engine, made):
        long = await begin(http, [line(f"a{index}", **LONG) for index in range(3)] + [line(f"b{index}") for index in range(40)])
        await until(lambda: engine.num_live == 4)  # the window: the short ones of the first take turns behind the long ones
        short = await ended(http, (await begin(http, [line(f"c{index}") for index in range(4)]))["id"])
        state = (await http.get(f"{BATCHES}/{long['id']}")).json()
        await http.post(f"{BATCHES}/{long['id']}/cancel")
        return short, state, await ended(http, long["id"])

    short, state, long = run(talk, tmp_path, ServedFake(rows=8, step_s=0.001), max_waiting=8)
    assert short["status"] == "completed" and short["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    assert state["status"] == "in_progress" and 0 < state["request_counts"]["completed"] < 40
    assert long["status"] == "cancelled"


def test_more_batches_than_are_worked_on_at_a_time_wait_and_one_that_waits_may_be_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MAX_TOGETHER", 1)

    async def talk(http, engine, made):
        first = await begin(http, [line("a", **LONG)])
        second = await begin(http, [line("b")])
        third = await begin(http, [line("c")])
        await until(lambda: engine.num_live == 1)
        await http.post(f"{BATCHES}/{second['id']}/cancel")
        await http.post(f"{BATCHES}/{first['id']}/cancel")
        found = [await ended(http, batch["id"]) for batch in (first, second, third)]
        listed = (await http.get(f"{BATCHES}?limit=2")).json()
        rest = (await http.get(f"{BATCHES}?after={listed['last_id']}")).json()
        return found, listed, rest

    found, listed, rest = run(talk, tmp_path)
    assert [batch["status"] for batch in found] == ["cancelled", "cancelled", "completed"]
    assert found[1]["in_progress_at"] is None, "it never began"
    assert listed["has_more"] and not rest["has_more"]
    assert {batch["id"] for batch in [*listed["data"], *rest["data"]]} == {batch["id"] for batch in found}


def test_a_batch_takes_a_bounded_number_of_sequences_and_waits_where_the_line_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_run, "RETRY_S", 0.01)

    async def talk(http, engine, made):
        batch = await begin(http, [line(str(index), max_tokens=8) for index in range(30)])
        while (found := (await http.get(f"{BATCHES}/{batch['id']}")).json())["status"] != "completed":
            one = await http.post(COMPLETION, json={"prompt": "me", "max_tokens": 3})
            assert one.status_code == 200
        return found["request_counts"], engine.num_live_peak

    counts, peak = run(talk, tmp_path, ServedFake(rows=2, step_s=0.001), max_waiting=4)
    assert counts == {"total": 30, "completed": 30, "failed": 0}
    assert peak <= 3


def test_what_the_engine_cannot_finish_or_an_operator_ends_is_an_error_line(tmp_path):
    async def talk(http, engine, made):
        batch = await begin(http, [line("broken", prompt="fail"), line("ended", **LONG), line("long", prompt="x" * 5000), line("fine")])
        await until(lambda: any(handle._params.max_tokens == 3000 for handle in engine.handles.values()))
        slow = next(handle for handle in engine.handles.values() if handle._params.max_tokens == 3000)
        await http.post(f"/slots/{slow.seq_id}?action=cancel", headers=BOSS)
        found = await ended(http, batch["id"])
        return found, await lines_of(http, found["error_file_id"])

    found, faults = run(talk, tmp_path, ServedFake(step_s=0.002, failing=["fail"]))
    assert found["request_counts"] == {"total": 4, "completed": 1, "failed": 3} and found["status"] == "completed"
    assert {fault["custom_id"]: (fault["error"]["code"], fault["error"]["message"]) for fault in faults} == {
        "broken": ("engine_error", "the engine could not finish this request; the server's log has the reason"),
        "ended": ("engine_error", "the request was cancelled by the server's operator"),
        "long": ("invalid_request", "the prompt needs 5000 tokens, the pool has 4096: raise pool.tokens"),
    }


def test_a_batch_goes_on_after_a_restart_and_does_nothing_twice(tmp_path):
    lines = [line(f"r{index}", max_tokens=5) for index in range(8)] + [line("slow", max_tokens=400, ignore_eos=True)]

    async def start(http, engine, made):
        batch = await begin(http, lines)
        await until(lambda: made.batches.get(batch["id"]).counts["completed"] == 8)
        return batch["id"]

    batch_id = run(start, tmp_path)
    (record,) = (tmp_path / "kept").glob("batch_*.json")
    assert json.loads(record.read_text())["status"] == "in_progress"
    with next((tmp_path / "kept").glob(f"{json.loads(record.read_text())['output_id']}.content")).open("ab") as output:
        output.write(b'{"torn')

    async def go_on(http, engine, made):
        found = await ended(http, batch_id)
        return found, await lines_of(http, found["output_file_id"]), len(engine.handles)

    found, answers, num_asked = run(go_on, tmp_path)
    assert found["status"] == "completed" and found["request_counts"] == {"total": 9, "completed": 9, "failed": 0}
    assert num_asked == 1, "the lines that were done are not asked again"
    assert sorted(answer["custom_id"] for answer in answers) == sorted(entry["custom_id"] for entry in lines)


@pytest.mark.parametrize(("status", "ending", "becomes"), [("finalizing", "completed", "completed"), ("cancelling", None, "cancelled")])
def test_an_end_that_a_kill_broke_off_is_made_up_for(status, ending, becomes, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    record = BatchRecord("batch_" + "1" * 24, "file-" + "2" * 24, COMPLETION, "small", "file-" + "3" * 24, "file-" + "4" * 24)
    record.status, record.ending = status, ending
    record.save(folder)
    (folder / f"{record.output_id}.content").write_text('{"custom_id": "a"}\n')
    (folder / f"{record.error_id}.content").write_text("")

    async def talk(http, engine, made):
        found = await ended(http, record.id)
        return found, (await http.get(f"{FILES}/{found['output_file_id']}/content")).text

    found, content = run(talk, tmp_path)
    assert (found["status"], found["error_file_id"], content) == (becomes, None, '{"custom_id": "a"}\n')
    assert not (folder / f"{record.error_id}.content").exists()


def test_another_model_does_not_go_on_with_a_batch(tmp_path):
    async def start(http, engine, made):
        batch = await begin(http, [line("quick", max_tokens=2), line("slow", **LONG)])
        await until(lambda: made.batches.get(batch["id"]).counts["completed"] == 1)
        return batch["id"]

    async def go_on(http, engine, made):
        return await ended(http, batch_id)

    batch_id = run(start, tmp_path)
    found = run(go_on, tmp_path, ServedFake(fingerprint="fp_other"))
    assert found["status"] == "failed" and found["output_file_id"], "what was done stays"
    (fault,) = found["errors"]["data"]
    told = "the server has another model or other settings than when this batch began; create it again"
    assert (fault["code"], fault["message"]) == ("other_settings", told)


def test_a_batch_that_outlives_its_window_expires_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_record, "WINDOW_S", 1)

    async def talk(http, engine, made):
        batch = await begin(http, [line("quick", max_tokens=2), line("slow", **LONG), line("slower", **LONG)])
        found = await ended(http, batch["id"])
        await until(lambda: engine.num_live == 0)
        return found, await lines_of(http, found["output_file_id"]), await lines_of(http, found["error_file_id"])

    found, answers, faults = run(talk, tmp_path)
    assert found["status"] == "expired" and found["expired_at"]
    assert found["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    assert [answer["custom_id"] for answer in answers] == ["quick"]
    told = ("batch_expired", "the request was not answered before the completion window ended")
    assert {fault["custom_id"]: (fault["error"]["code"], fault["error"]["message"]) for fault in faults} == {"slow": told, "slower": told}


def test_a_batch_waits_while_the_server_sleeps(tmp_path):
    async def talk(http, engine, made):
        batch = await begin(http, [line("a", max_tokens=150, ignore_eos=True)])
        await until(lambda: engine.num_live == 1)
        await http.post("/sleep?level=2", headers=BOSS)
        asleep = (await http.get(f"{BATCHES}/{batch['id']}")).json()
        another = await begin(http, [line("b")])
        await http.post("/wake", headers=BOSS)
        return asleep, await ended(http, batch["id"]), await ended(http, another["id"])

    asleep, *found = run(talk, tmp_path)
    assert asleep["status"] == "in_progress" and asleep["request_counts"]["failed"] == 0
    assert [batch["request_counts"] for batch in found] == [{"total": 1, "completed": 1, "failed": 0}] * 2


def test_a_batch_whose_answers_find_no_room_fails_and_keeps_those_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_run, "_ROOM_EVERY_S", 0.0)
    lines = [line(str(index), max_tokens=4000, ignore_eos=True, logprobs=20) for index in range(3)]

    async def talk(http, engine, made):
        return await ended(http, (await begin(http, lines))["id"])

    found = run(talk, tmp_path, ServedFake(), max_file_mib=1, files_quota_mib=1)
    assert found["status"] == "failed" and found["output_file_id"]
    (fault,) = found["errors"]["data"]
    assert fault["code"] == "files_full" and fault["message"].startswith("the files here may take 1 MiB together")


def test_a_fault_of_the_servers_own_ends_one_batch_and_shows_no_path(tmp_path, monkeypatch):
    def break_off(*args):
        raise OSError(5, "broken disk", str(tmp_path))

    async def talk(http, engine, made):
        with monkeypatch.context() as patched:
            patched.setattr(batch_run.AnswerWriter, "answer", break_off)
            first = await ended(http, (await begin(http, [line("a"), line("b")]))["id"])
        return first, await ended(http, (await begin(http, [line("c")]))["id"])

    first, second = run(talk, tmp_path)
    assert [batch["status"] for batch in (first, second)] == ["failed", "completed"]
    assert first["errors"]["data"][0]["message"] == "something went wrong in the server; its log has more"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"endpoint": "/v1/embeddings"}, 'endpoint: got "/v1/embeddings", allowed: /v1/chat/completions or /v1/completions'),
        ({"completion_window": "1h"}, 'completion_window: got "1h", allowed: 24h'),
        ({"input_file_id": 5}, "input_file_id: got 5, allowed: a string"),
        ({"metadata": 5}, "metadata: got 5, allowed: an object of at most 16 pairs"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata: got 17 pairs, allowed: an object of at most 16 pairs"),
        (
            {"metadata": {"a": 1}},
            'metadata: got {"a": 1}, allowed: strings, the key of at most 64 characters and the value of at most 512',
        ),
        (
            {"output_expires_after": {"seconds": 1}},
            "output_expires_after: is not supported here, allowed: completion_window, endpoint, input_file_id, metadata; leave it out",
        ),
    ],
)
def test_a_body_that_is_wrong_is_refused(changed, message, tmp_path):
    async def talk(http, engine, made):
        body = {"input_file_id": "file-1", "endpoint": COMPLETION, "completion_window": "24h", **changed}
        return await http.post(BATCHES, json=body)

    found = run(talk, tmp_path)
    assert (found.status_code, found.json()["error"]["message"]) == (400, message)


def test_what_is_not_there_is_not_found(tmp_path):
    async def talk(http, engine, made):
        body = {"input_file_id": "../../secret", "endpoint": COMPLETION, "completion_window": "24h"}
        found = [await http.post(BATCHES, json=body), await http.get(f"{BATCHES}/batch_1"), await http.post(f"{BATCHES}/x/cancel")]
        return [(response.status_code, response.json()["error"]["message"]) for response in found]

    assert run(talk, tmp_path) == [
        (404, "there is no file ../../secret; GET /v1/files lists them"),
        (404, "there is no batch batch_1; GET /v1/batches lists them"),
        (404, "there is no batch x; GET /v1/batches lists them"),
    ]


def test_no_more_batches_are_taken_than_can_be_remembered(tmp_path, monkeypatch):
    from jaxkv.serve import batches

    monkeypatch.setattr(batches, "MAX_OPEN", 1)
    monkeypatch.setattr(batches, "MAX_KEPT", 1)

    async def talk(http, engine, made):
        first = await begin(http, [line("a", **LONG)])
        body = {"input_file_id": first["input_file_id"], "endpoint": COMPLETION, "completion_window": "24h"}
        full = await http.post(BATCHES, json=body)
        await http.post(f"{BATCHES}/{first['id']}/cancel")
        await ended(http, first["id"])
        made.batches.get(first["id"]).times["created"] -= 10
        second = (await http.post(BATCHES, json={**body, "input_file_id": await upload(http, [line("b")])})).json()
        return full, [batch["id"] for batch in (await http.get(BATCHES)).json()["data"]] == [second["id"]]

    full, is_forgotten = run(talk, tmp_path)
    assert (full.status_code, full.json()["error"]["message"]) == (
        429,
        "1 batches are not done yet, the most this server takes; wait for one",
    )
    assert full.headers["retry-after"] == "60" and is_forgotten
