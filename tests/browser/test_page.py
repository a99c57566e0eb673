"""The web page in a real browser, over an engine that needs no model: chats, a pause that ends, keys; on a desk and on a phone."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.serving import ServedFake, listening
from tests.webdriver import browser

pytestmark = pytest.mark.browser
ENTER = "\ue007"
SIZES = {"desk": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844, "is_phone": True, "scheme": "dark"}}


@pytest.fixture(scope="module")
def window():
    with browser() as made:
        yield made


@pytest.fixture(params=SIZES)
def size(request):
    return request.param


def visit(window, talk, *, size="desk", engine=None, **settings):
    """Run `talk(engine)` beside a server whose page the window shows; nothing may be complained of, and nothing may stick out."""

    async def go():
        served = engine or ServedFake(rows=8, step_s=0.02)
        async with listening(served, **settings) as (_, url):
            await asyncio.to_thread(run, served, url)

    def run(served, url):
        window.complaints()
        window.open(f"{url}/", **SIZES[size])
        talk(served)
        keep(window, talk.__name__, size)
        assert window.run("return document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the window"
        assert [line for line in window.complaints() if "401" not in line] == []
        window.open("about:blank")

    asyncio.run(go())


def keep(window, name, size):
    """A screenshot, where somebody wants to look at them."""
    if folder := os.environ.get("JAXKV_SCREENSHOTS"):
        window.picture(Path(folder) / f"{name}-{size}.png")


def is_up(window):
    return window.text("#link") == "small, 4,096 tokens of pool"


def test_a_chat_is_answered_and_remembered(window, size):
    engine = ServedFake(answers={"user: hello\nassistant: ": "good day", "user: hello\nassistant: good day\nuser: more\nassistant: ": "no"})

    def chats(_):
        window.until(lambda: is_up(window))
        window.type(".chat textarea", f"hello{ENTER}")
        window.until(lambda: window.text(".state") == "done")
        assert window.texts(".entry") == ["hello", "good day", "said all: 9 tokens"]
        window.type(".chat textarea", "more")
        window.click(".send")
        window.until(lambda: window.texts(".model") == ["good day", "no"] and window.text(".state") == "done")

    visit(window, chats, size=size, engine=engine)


def test_one_of_eight_chats_pauses_and_goes_on_while_the_others_run(window, size):
    def eight(engine):
        window.until(lambda: is_up(window))
        window.run("document.querySelector('#endless').checked = true")
        window.click("#eight")
        window.until(lambda: window.texts(".state") == ["running"] * 8 and window.text("#busy") == "8")
        third = next(handle for handle in engine.handles.values() if b"robot" in bytes(handle._prompt))
        engine.parked.add(third.seq_id)
        window.until(lambda: any(state.startswith("parked 1.") for state in window.texts(".state")))
        states = window.texts(".state")
        assert [index for index, state in enumerate(states) if state.startswith("parked")] == [2] and states.count("running") == 7
        assert window.text("#parked") == "1" and window.text("#news") == "Chat 3 is parked"
        away = window.until(lambda: window.texts("tbody td.away"))
        assert len(away) == 1 and away[0].startswith("held")
        is_cut = "const list = document.querySelector('.scroll'); return list.scrollHeight > list.clientHeight"
        assert not window.run(is_cut), "a parked chat may be among those that do not show"
        length = len(window.texts(".model")[2])
        others = [len(text) for text in window.texts(".model")]
        keep(window, "parked", size)
        window.until(lambda: sum(len(text) > before for text, before in zip(window.texts(".model"), others, strict=True)) == 7)
        assert len(window.texts(".model")[2]) == length
        engine.parked.clear()
        window.until(lambda: window.texts(".state") == ["running"] * 8)
        window.until(lambda: len(window.texts(".model")[2]) > length)
        assert window.text("#news") == "Chat 3 goes on"
        window.click("#stop-all")
        window.until(lambda: window.texts(".state") == ["stopped"] * 8)
        assert "parked once for " in window.texts(".sum")[2] and "parked" not in window.texts(".sum")[0]
        window.until(lambda: engine.num_live == 0)
        window.until(lambda: window.text("#busy") == "0")

    visit(window, eight, size=size)


def test_one_chat_is_stopped_alone_and_closed(window):
    def stops(engine):
        window.until(lambda: is_up(window))
        window.run("document.querySelector('#endless').checked = true")
        window.type(".chat textarea", f"one{ENTER}")
        window.click("#new")
        window.type(".chat:nth-child(2) textarea", f"two{ENTER}")
        window.until(lambda: window.texts(".state") == ["running"] * 2)
        window.click(".chat:nth-child(2) .stop")
        window.until(lambda: window.texts(".state") == ["running", "stopped"] and engine.num_live == 1)
        window.click(".chat .close")
        window.until(lambda: window.texts("h3") == ["Chat 2"] and engine.num_live == 0)

    visit(window, stops)


def test_as_many_chats_run_as_the_browser_has_connections_and_the_others_wait(window):
    def many(engine):
        window.until(lambda: is_up(window))
        window.run(
            "document.querySelector('#endless').checked = true; for (let i = 0; i < 4; i += 1) document.querySelector('#new').click()"
        )
        for number in range(1, 5):
            window.type(f".chat:nth-child({number}) textarea", f"hello{ENTER}")
        window.click("#eight")
        window.until(lambda: window.texts(".state")[:10] == ["running"] * 10 and window.text("#busy") == "10")
        assert all(state.startswith("waiting") for state in window.texts(".state")[10:]) and engine.num_live == 10
        window.click(".chat:nth-child(11) .stop")
        window.until(lambda: window.texts(".state")[10] == "stopped")
        window.click(".chat .stop")
        window.until(lambda: window.texts(".state")[11] == "running" and engine.num_live == 10)
        window.click("#stop-all")
        window.until(lambda: set(window.texts(".state")) == {"stopped"} and engine.num_live == 0)

    visit(window, many, engine=ServedFake(rows=16, step_s=0.02))


def test_options_go_with_the_request(window):
    seen = []

    class Listening(ServedFake):
        def submit_group(self, prompt, params, **kwargs):
            seen.append(params)
            return super().submit_group(prompt, params, **kwargs)

    def options(_):
        window.until(lambda: is_up(window))
        window.click(".options summary")
        for name, value in (("max-tokens", "7"), ("temperature", "0.5"), ("seed", "11")):
            window.type(f"#{name}", value)
        window.click("#endless")
        window.type(".chat textarea", f"hello{ENTER}")
        window.until(lambda: window.text(".state") == "done")
        assert window.text(".sum") == "as long as allowed: 7 tokens"

    visit(window, options, engine=Listening())
    (params,) = seen
    assert (params.max_tokens, params.temperature, params.seed, params.ignore_eos) == (7, 0.5, 11, True)


def test_a_key_is_asked_for_and_kept_in_the_tab_only(window):
    def keys(_):
        window.until(lambda: window.text("#link") == "a key is needed")
        window.type("#key", f"wrong{ENTER}")
        window.until(lambda: window.text("#key-note") == "The server does not know this key. Try another.")
        window.type("#key", f"right{ENTER}")
        window.until(lambda: is_up(window))
        window.type(".chat textarea", f"hello{ENTER}")
        window.until(lambda: window.text(".state") == "done")
        assert window.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]

    visit(window, keys, keys=("right",))


def test_what_a_model_says_is_text_and_nothing_else(window):
    said = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script><b>&lt;"
    engine = ServedFake(answers={"user: hello\nassistant: ": said})

    def markup(_):
        window.until(lambda: is_up(window))
        window.type(".chat textarea", f"hello{ENTER}")
        window.until(lambda: window.text(".state") == "done")
        assert (
            window.text(".model") == said
            and window.run("return document.querySelector('.said').querySelectorAll('img, b, script').length") == 0
        )
        assert window.run("return document.title") == "small · jaxkv"

    visit(window, markup, engine=engine)


def test_an_error_is_shown_in_the_servers_words_and_the_chat_goes_on(window):
    engine = ServedFake(failing=["user: bad\nassistant: "])

    def errors(_):
        window.until(lambda: is_up(window))
        window.type(".chat textarea", f"bad{ENTER}")
        window.until(lambda: window.text(".state") == "failed")
        assert window.text(".wrong") == "the engine could not finish this request; the server's log has the reason"
        window.type(".chat textarea", f"good{ENTER}")
        window.until(lambda: window.text(".state") == "done")

    visit(window, errors, engine=engine)


def test_everything_can_be_reached_and_has_a_name(window):
    def names(_):
        window.until(lambda: is_up(window))
        nameless = """return [...document.querySelectorAll('button, input, textarea, canvas[role], [role=log], [tabindex="0"]')]
            .filter((one) => !(one.innerText || one.ariaLabel || one.labels?.length)).map((one) => one.outerHTML)"""
        assert window.run(nameless) == []
        assert window.run("return document.documentElement.lang") == "en"
        levels = window.run("return [...document.querySelectorAll('h1, h2, h3')].map((one) => one.tagName)")
        assert levels == ["H1", "H2", "H2", "H3"]
        assert window.run("return document.getElementById('pages').ariaLabel") == "Nobody holds a page"

    visit(window, names)
