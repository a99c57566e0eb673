"""/v1/files: what clients store, under names of the server's own, in one folder and within a quota."""

import asyncio
import json
import os
import re

import pytest

from jaxkv.errors import ConfigError
from jaxkv.serve.batches import Batches
from jaxkv.serve.files import FileStore
from tests.serving import client, config

FILES = "/v1/files"


def run(talk, tmp_path, **settings):
    async def go():
        async with client(files_dir=str(tmp_path / "kept"), **settings) as http, asyncio.timeout(20):
            return await talk(http)

    return asyncio.run(go())


def form(content=b"one\n", name="in.jsonl", **fields):
    return {"files": {"file": (name, content)}, "data": {"purpose": "batch", **fields}}


def error(response):
    return response.status_code, response.json()["error"]["code"], response.json()["error"]["message"]


def test_a_file_is_stored_listed_read_and_deleted(tmp_path):
    async def talk(http):
        made = (await http.post(FILES, **form(b"some\nlines\n"))).json()
        assert re.fullmatch(r"file-[0-9a-f]{24}", made["id"])
        assert {**made, "id": "", "created_at": 0} == {
            "id": "",
            "object": "file",
            "bytes": 11,
            "created_at": 0,
            "expires_at": None,
            "filename": "in.jsonl",
            "purpose": "batch",
            "status": "processed",
            "status_details": None,
        }
        assert (await http.get(f"{FILES}/{made['id']}")).json() == made
        listed = (await http.get(FILES)).json()
        assert listed == {"object": "list", "data": [made], "first_id": made["id"], "last_id": made["id"], "has_more": False}
        content = await http.get(f"{FILES}/{made['id']}/content")
        assert content.content == b"some\nlines\n" and content.headers["content-type"] == "application/octet-stream"
        deleted = (await http.delete(f"{FILES}/{made['id']}")).json()
        assert deleted == {"id": made["id"], "object": "file", "deleted": True}
        gone = (404, "file_not_found", f"there is no file {made['id']}; GET /v1/files lists them")
        assert error(await http.get(f"{FILES}/{made['id']}/content")) == gone == error(await http.delete(f"{FILES}/{made['id']}"))
        assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]

    run(talk, tmp_path)


@pytest.mark.parametrize("range_", ["bytes=0-1", "bytes=5-1", "bytes=99-", "bytes=", "lines=1-2", "bytes=0-1,3-4"])
def test_a_range_is_passed_over_whether_it_is_one_or_not(range_, tmp_path):
    async def talk(http):
        made = (await http.post(FILES, **form(b"some\nlines\n"))).json()
        return await http.get(f"{FILES}/{made['id']}/content", headers={"range": range_})

    found = run(talk, tmp_path)
    assert (found.status_code, found.content) == (200, b"some\nlines\n") and "accept-ranges" not in found.headers


def test_lists_come_in_pages(tmp_path):
    async def talk(http):
        made = [(await http.post(FILES, **form(name=f"{index}"))).json()["id"] for index in range(5)]
        oldest = [file["id"] for file in (await http.get(f"{FILES}?order=asc")).json()["data"]]
        assert sorted(oldest) == sorted(made)
        first = (await http.get(f"{FILES}?order=asc&limit=2")).json()
        assert ([file["id"] for file in first["data"]], first["has_more"]) == (oldest[:2], True)
        last = (await http.get(f"{FILES}?order=asc&limit=3&after={first['last_id']}")).json()
        assert ([file["id"] for file in last["data"]], last["has_more"]) == (oldest[2:], False)
        newest = (await http.get(f"{FILES}?purpose=batch")).json()["data"]
        assert [file["id"] for file in newest] == oldest[::-1]
        assert (await http.get(f"{FILES}?purpose=batch_output")).json()["data"] == []

    run(talk, tmp_path)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "limit: got '0', allowed: a whole number from 1 to 10000"),
        ("limit=x", "limit: got 'x', allowed: a whole number from 1 to 10000"),
        ("order=up", "order: got 'up', allowed: asc or desc"),
        ("after=file-1", "after: there is nothing with the id 'file-1' in this list"),
    ],
)
def test_a_page_that_is_none_is_refused(query, message, tmp_path):
    assert run(lambda http: http.get(f"{FILES}?{query}"), tmp_path).json()["error"]["message"] == message


ONLY = "is not supported here, allowed: file and purpose; leave it out"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (form(purpose="vision"), 'purpose: got "vision", allowed: batch'),
        ({"files": {"file": ("a", b"x")}}, "purpose: got null, allowed: batch"),
        ({"data": {"purpose": "batch"}, "files": {"other": ("a", b"x")}}, f"other: {ONLY}"),
        (form(**{"expires_after[seconds]": "3600"}), f"expires_after[seconds]: {ONLY}"),
        ({"files": {"file": (None, b"x"), "purpose": (None, b"batch")}}, "file: is missing, or has no filename"),
        (form(b""), "file: is empty; a batch has at least one line"),
        (form(b"\x1f\x8b\x08zip"), "file: is compressed; send its lines as they are"),
        ({"json": {"purpose": "batch"}}, "file: send it as multipart/form-data, with a field purpose that says batch"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}},
         "the body is no form that can be read: Missing boundary in multipart."),
    ],
)  # fmt: skip
def test_what_is_no_file_for_a_batch_is_refused_and_leaves_nothing(sent, message, tmp_path):
    found = run(lambda http: http.post(FILES, **sent), tmp_path)
    assert error(found) == (400, "invalid_request", message)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


def test_a_file_that_is_too_large_is_refused_before_it_is_read_or_while(tmp_path):
    async def talk(http):
        async def parts():
            yield b"--x\r\ncontent-disposition: form-data; name=file; filename=a\r\n\r\n"
            for _ in range(40):
                yield b"y" * 2**16

        headers = {"content-type": "multipart/form-data; boundary=x"}
        just = await http.post(FILES, **form(b"x" * (2**20 + 1)))
        told = await http.post(FILES, **form(b"x" * (2**21 + 1)))
        flowing = await http.post(FILES, content=parts(), headers=headers)
        fits = await http.post(FILES, **form(b"x" * 2**20))
        return just, told, flowing, fits

    *refused, fits = run(talk, tmp_path, max_file_mib=1)
    message = "the body is larger than 1 MiB, the most this server reads (server.max_file_mib)"
    assert [error(found) for found in refused] == [(413, "body_too_large", message)] * 3
    assert fits.status_code == 200
    assert len(list((tmp_path / "kept").glob("*.content*"))) == 1


def test_all_files_together_have_a_limit(tmp_path):
    async def talk(http):
        found = [await http.post(FILES, **form(b"x" * 2**19)) for _ in range(2)]
        await http.delete(f"{FILES}/{found[0].json()['id']}")
        return [*found, await http.post(FILES, **form(b"x" * 2**18))]

    first, second, third = run(talk, tmp_path, max_file_mib=1, files_quota_mib=1)
    assert first.status_code == third.status_code == 200
    told = "the files here may take 1 MiB together (server.files_quota_mib); delete some first (DELETE /v1/files/ID)"
    assert error(second) == (413, "files_full", told)


def test_without_a_folder_every_route_says_what_turns_them_on():
    async def go():
        async with client() as http:
            paths = [FILES, f"{FILES}/x", f"{FILES}/x/content", "/v1/batches", "/v1/batches/x"]
            found = [await http.get(path) for path in paths]
            found += [await http.post(FILES, **form()), await http.post("/v1/batches", json={}), await http.delete(f"{FILES}/x")]
            return {error(response) for response in found}

    message = "this server keeps no files, so there are no batches; its server.files_dir turns both on"
    assert asyncio.run(go()) == {(404, "files_off", message)}


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..\\..\\secret", "", "\x00", "a" * 400])
def test_no_name_of_a_client_is_ever_a_name_on_disk(name, tmp_path):
    (tmp_path / "secret").write_text("hidden")

    async def talk(http):
        made = (await http.post(FILES, **form(name=name or "x"))).json()
        found = [
            await http.get(f"{FILES}/{bad}/content")
            for bad in ("..%2Fsecret", "../secret", "%2e%2e%2fsecret", ".lock", made["id"] + ".json")
        ]
        return made, found

    made, found = run(talk, tmp_path)
    assert "/" not in made["filename"] and "\\" not in made["filename"] and len(made["filename"]) <= 255
    assert {response.status_code for response in found} == {404}
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {".lock", f"{made['id']}.content", f"{made['id']}.json"}


def in_charset(charset, filename=r"a\ud800.jsonl", field="purpose"):
    """A form that says what its names are written in."""
    content = f'--x\r\ncontent-disposition: form-data; name="file"; filename="{filename}"\r\n\r\n{{}}\r\n--x\r\n'
    content += f'content-disposition: form-data; name="{field}"\r\n\r\nbatch\r\n--x--\r\n'
    return {"content": content.encode(), "headers": {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}}


def test_names_that_no_text_can_spell_are_no_fault_of_ours(tmp_path):
    async def talk(http):
        made = await http.post(FILES, **in_charset("unicode_escape"))
        refused = await http.post(FILES, **in_charset("unicode_escape", field=r"\udfff"))
        return made, refused, await http.post(FILES, **in_charset("undefined")), await http.get(FILES)

    made, refused, unread, listed = run(talk, tmp_path)
    assert made.json()["filename"] == listed.json()["data"][0]["filename"] == "a?.jsonl"
    assert error(refused) == (400, "invalid_request", f"?: {ONLY}") and refused.json()["error"]["param"] == "?"
    assert error(unread)[2] == "the body is no form that can be read: its names are not in the charset that it says"


def test_a_restart_knows_the_files_and_removes_what_a_kill_left(tmp_path):
    folder = tmp_path / "kept"
    made = run(lambda http: http.post(FILES, **form(b"kept\n")), tmp_path).json()
    (folder / f"file-{'a' * 24}.content.part").write_text("half")
    (folder / f"file-{'b' * 24}.content").write_text("unknown")
    (folder / "mine.txt").write_text("not the server's")
    (folder / f"file-{'c' * 24}.json").write_text("{")
    outside = tmp_path / "outside"
    outside.write_text("hidden")
    facts = {**json.loads((folder / f"{made['id']}.json").read_text()), "id": f"file-{'d' * 24}"}
    (folder / f"{facts['id']}.json").write_text(json.dumps(facts))
    os.symlink(outside, folder / f"{facts['id']}.content")

    async def talk(http):
        listed = (await http.get(FILES)).json()["data"]
        return listed, (await http.get(f"{FILES}/{made['id']}/content")).content

    assert run(talk, tmp_path) == ([made], b"kept\n")
    left = {path.name for path in folder.iterdir()}
    assert not left & {f"file-{'a' * 24}.content.part", f"file-{'b' * 24}.content"} and "mine.txt" in left
    assert outside.read_text() == "hidden"


def test_a_folder_is_one_servers_at_a_time(tmp_path):
    store = FileStore(tmp_path, 1)
    with pytest.raises(ConfigError) as found:
        FileStore(tmp_path, 1)
    assert str(found.value) == f"server.files_dir: {tmp_path} is another server's; choose another folder"
    store.close()
    FileStore(tmp_path, 1).close()


def test_a_folder_that_cannot_be_one_is_told_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as found:
        FileStore(tmp_path / "file" / "below", 1)
    assert str(found.value) == f"server.files_dir: {tmp_path}/file/below cannot be used: Not a directory; choose another folder"
    with pytest.raises(ConfigError) as found:
        Batches.open(config(files_dir=str(tmp_path), files_quota_mib=50))
    told = "server.max_file_mib: got 100, more than server.files_quota_mib, which is 50; lower it or raise the other"
    assert str(found.value) == told


def test_files_need_a_key_where_everything_does(tmp_path):
    async def go():
        async with client(keys=("one",), files_dir=str(tmp_path)) as http:
            return (await http.get(FILES)).status_code, (await http.get(FILES, headers={"authorization": "Bearer one"})).status_code

    assert asyncio.run(go()) == (401, 200)
