"""The web page: which files there are, what they may load and reach, and how they are served. What it does is tests/browser's."""

import asyncio
import re
from pathlib import Path

import pytest

from jaxkv.serve.static import POLICY, page_files
from tests.serving import client

FOLDER = Path(__file__).parents[2] / "jaxkv" / "serve" / "page"
SCRIPTS = sorted(FOLDER.glob("*.js"))


def ask(path, method="GET", headers=None, **settings):
    async def go():
        async with client(**settings) as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(go())


def test_the_page_is_these_files():
    paths = {"/", *(f"/page/{name}" for name in ("page.css", "icon.svg", "api.js", "chat.js", "format.js", "main.js", "pool.js"))}
    assert set(page_files()) == paths
    assert {path.name for path in FOLDER.iterdir()} == {path.removeprefix("/page/") if path != "/" else "index.html" for path in paths}


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "text/html"), ("/page/main.js", "text/javascript"), ("/page/page.css", "text/css"), ("/page/icon.svg", "image/svg+xml")],
)
def test_each_file_is_served_under_a_strict_policy(path, kind):
    found = ask(path)
    assert found.status_code == 200 and found.headers["content-type"].split(";")[0] == kind
    assert found.headers["content-security-policy"] == POLICY
    assert found.headers["x-content-type-options"] == "nosniff" and found.headers["referrer-policy"] == "no-referrer"
    assert found.headers["x-frame-options"] == "DENY" and found.headers["cache-control"] == "no-cache"
    again = ask(path, headers={"if-none-match": found.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_policy_lets_nothing_in_but_this_servers_own_files():
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert {rules.pop(name) for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert rules == {
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }


def test_the_page_loads_its_own_files_and_nothing_from_elsewhere():
    text = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:src|href)="([^"]+)"', text)) - {"#chats"}
    named |= {name for script in SCRIPTS for name in re.findall(r'from "([^"]+)"', script.read_text())}
    assert named == set(page_files()) - {"/"}
    for path in FOLDER.iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[\w.]+\w/?[\w/]*", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert addresses == set() and "@import" not in path.read_text() and "url(" not in path.read_text(), path
    assert "style=" not in text and "<style" not in text and not re.search(r"\son\w+=", text) and not re.search(r"<script[^>]*>[^<]", text)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.name for script in SCRIPTS])
def test_no_script_makes_markup_or_code_of_a_text(script):
    names = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser", "srcdoc", "javascript:")
    assert [name for name in names if name in script.read_text()] == []


def test_the_page_needs_no_key_but_everything_it_asks_for_does():
    assert ask("/", keys=("one",)).status_code == ask("/page/main.js", keys=("one",)).status_code == 200
    for path in ("/pool", "/props", "/slots", "/page", "/page/"):
        assert ask(path, keys=("one",)).status_code == 401
    assert ask("/pool", keys=("one",), headers={"authorization": "Bearer one"}).status_code == 200


@pytest.mark.parametrize("path", ["/page/index.html", "/page/../gate.py", "/page/%2e%2e/gate.py", "/page//etc/passwd", "/page/none.js"])
def test_a_request_names_no_file(path):
    assert ask(path).json()["error"]["code"] == "not_found"


def test_the_page_can_be_turned_off():
    for path in ("/", "/page/main.js"):
        assert ask(path, page=False).json()["error"]["message"] == f"there is nothing at GET {path}"
        assert ask(path, page=False, keys=("one",)).status_code == 401


def test_other_methods_are_refused():
    assert ask("/", "POST").json()["error"]["message"] == "/ does not answer to POST; allowed: GET"


def test_one_look_at_the_pool_has_what_the_picture_needs_and_no_text():
    found = ask("/pool")
    pool = found.json()
    assert isinstance(pool.pop("clock_s"), float)
    assert pool == {
        "page_size": 16,
        "pages": {"total": 10, "free": 10, "cached": 0, "leaving": 0},
        "pool_bytes": 10_000,
        "host_bytes": 0,
        "host_budget_bytes": None,
        "rows": {"busy": 0, "total": 8},
        "parked": 0,
        "waiting": 0,
        "copies": {"to_host": 0, "to_device": 0},
        "generated_tokens": 0,
        "num_parks": 0,
        "num_restores": 0,
        "sequences": [],
    }
