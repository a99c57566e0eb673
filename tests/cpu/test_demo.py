"""The demo from end to end with the small fixture: what it prints is what happened."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxkv.config import Config
from jaxkv.demo.chats import QUESTIONS, choose_sizes, make_chats, with_pool
from jaxkv.demo.frame import ChatRow, Frame
from jaxkv.demo.play import Played, num_identical, play_together
from jaxkv.demo.run import EXIT_BROKEN, EXIT_DONE, conclude, prepare, run_ample, run_crowded, run_demo
from jaxkv.demo.table import Results, first_difference
from jaxkv.demo.view import draw, printable, tail
from jaxkv.demo.watch import events, summary_line, watch
from jaxkv.engine import Engine
from jaxkv.models import ByteTokenizer
from jaxkv.models.tokenizer import TokenizerBase
from jaxkv.request import Completion
from jaxkv.testing import ByteTokenizer as PlainTokenizer
from tests.cpu.tiny import config

NUM = len(QUESTIONS)


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def story() -> tuple[Results, str]:
    """One run of the demo: its results and all it printed before the table."""
    console = plain_console()
    chats, sizes = prepare(config())
    crowded, alone, summary = run_crowded(console, config(), chats, sizes)
    ample, ample_summary = run_ample(console, config(), chats, sizes, crowded.num_tokens)
    return Results(crowded, alone, ample, summary, ample_summary, sizes), printed(console)


def table_of(results: Results) -> tuple[int, dict[str, str]]:
    """The exit code, and the printed table as name and value."""
    console = plain_console()
    chats, _ = prepare(config())
    code = conclude(console, chats, results)
    return code, {name.strip(): value for name, _, value in (line.partition(": ") for line in printed(console).splitlines())}


def test_all_chats_complete_and_every_byte_is_that_of_an_uncrowded_run(story):
    results, _ = story
    assert results.is_good
    assert (results.crowded.num_completed, results.num_identical, results.num_identical_alone) == (NUM, NUM, NUM)
    assert results.summary["num_parks"] > 0 and results.summary["num_parks"] == results.summary["num_restores"]
    assert results.ample_summary["num_parks"] == 0 and results.ample_summary["pool_tokens"] == results.sizes.needed_tokens


def test_the_table_says_what_happened(story):
    results, text = story
    code, table = table_of(results)
    assert code == EXIT_DONE
    assert table["chats completed"] == f"{NUM} of {NUM}"
    parks, returns = (len(re.findall(pattern, text)) for pattern in (r": \d+ pages to host memory", r" is back, at \d+ tokens"))
    assert table["parks, restores"] == f"{parks}, {returns}"
    assert table["bytes identical to an uncrowded run"] == f"{NUM} of {NUM}"
    assert table["and one after another"] == f"{NUM} of {NUM}"
    assert table["kind of host memory, most held"].startswith("pinned_host, ")
    assert table["compilations after the start"] == "0"
    longest = max(c.pause_s for c in results.crowded.completions)
    assert float(table["longest pause of a chat"].split()[0]) <= longest + 0.06
    assert float(table["tokens per second"]) == pytest.approx(results.crowded.num_tokens / results.crowded.wall_s, abs=0.06)


def test_the_pool_is_about_a_third_of_what_the_chats_need(story):
    results, _ = story
    assert results.summary["pool_tokens"] == results.sizes.crowded_tokens
    assert 0.3 < results.sizes.crowded / results.sizes.needed < 0.37


def test_an_answer_that_differs_is_told_loudly_and_ends_with_1(story):
    results, _ = story
    wrong = replace(results.ample.completions[2], token_ids=[*results.ample.completions[2].token_ids[:-1], 5])
    ample = Played([*results.ample.completions[:2], wrong, *results.ample.completions[3:]], results.ample.wall_s)
    console = Console(file=io.StringIO(), width=100, highlight=False)
    chats, _ = prepare(config())
    assert conclude(console, chats, replace(results, ample=ample)) == EXIT_BROKEN
    text = " ".join(printed(console).split())
    assert f"{NUM - 1} of {NUM} NOT IDENTICAL" in text
    at = len(wrong.token_ids) - 1
    assert (
        f"chat 3 (Blue sky) differs in the crowded pool: token {at} is {results.crowded.completions[2].token_ids[-1]} instead of 5" in text
    )
    assert "This must never happen: crowding changed an answer." in text


def test_a_chat_that_failed_is_told_with_its_reason(story):
    results, _ = story
    failed = replace(results.crowded.completions[0], finish_reason="error", error="the pool is full and nobody can go on")
    crowded = Played([failed, *results.crowded.completions[1:]], results.crowded.wall_s)
    console = plain_console()
    assert conclude(console, prepare(config())[0], replace(results, crowded=crowded)) == EXIT_BROKEN
    text = " ".join(printed(console).split())
    assert f"{NUM - 1} of {NUM}" in text
    assert "chat 1 (Poem) failed in the crowded pool: the pool is full and nobody can go on" in text
    assert "Not every chat completed, for the reasons above; those that did are identical." in text


def test_on_a_terminal_of_80_columns_no_name_in_the_table_is_broken(story):
    results, _ = story
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    assert conclude(console, prepare(config())[0], results) == EXIT_DONE
    assert re.search(rf"│ bytes identical to an uncrowded run +│ {NUM} of {NUM} +│$", printed(console), re.MULTILINE)
    assert {len(line) for line in printed(console).splitlines() if line.startswith(("│", "╭", "╰"))} == {80}


def test_a_logprob_that_differs_in_its_last_bit_is_a_difference(story):
    results, _ = story
    got = results.crowded.completions[0]
    assert got.logprobs is not None
    moved = replace(got, logprobs=[replace(got.logprobs[0], logprob=got.logprobs[0].logprob * (1 + 2**-23)), *got.logprobs[1:]])
    assert num_identical(Played([got], 1.0), Played([moved], 1.0)) == 0
    assert first_difference(moved, got) == "in logprobs"
    assert first_difference(got, replace(got)) is None


def test_the_whole_demo_runs_and_fits_into_80_columns():
    console = plain_console()
    assert run_demo(config(), console) == EXIT_DONE
    text = printed(console)
    assert "pool.tokens is 64; for these chats the demo takes" in " ".join(text.split())
    assert all(heading in text for heading in ("Starting", "All at once", "Answers", "What it took"))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_the_live_view_is_drawn_on_a_terminal():
    console = Console(file=io.StringIO(), width=80, height=30, force_terminal=True, color_system="truecolor")
    chats, sizes = prepare(config())
    with Engine(with_pool(config(), sizes.crowded_tokens)) as engine, watch(console, chats, sizes.needed) as on_step:
        play_together(engine, chats, on_step)
    text = printed(console)
    assert f"{NUM}/{NUM} done" in re.sub(r"\x1b\[[^m]*m", "", text)
    assert "pages of 4 tokens" in text


def interrupted(folder: Path, source: str, after: str | None = None, wait_s: float = 0.0) -> str:
    """Run the demo by `source`, nothing being compiled yet; press Ctrl-C once, `wait_s` after a line with `after`. What it printed."""
    env = {**os.environ, "JAXKV_CACHE": str(folder), "JAX_COMPILATION_CACHE_DIR": str(folder)}
    (folder / "tiny.yaml").write_text(config().to_yaml())
    command = [sys.executable, "-u", "-c", source, "demo", str(folder / "tiny.yaml")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        lines: list[str] = []
        while after is not None and after not in (lines or [""])[-1]:
            assert run.poll() is None
            lines.append(run.stdout.readline())
        time.sleep(wait_s)
        if after is not None:
            run.send_signal(signal.SIGINT)
        out, said = run.communicate(timeout=120)
    assert (run.returncode, said.splitlines()[-1]) == (130, "jaxkv: interrupted")
    return "".join(lines) + out


COMMAND = "from jaxkv.cli.main import console; console()"


@pytest.mark.parametrize(("after", "wait_s"), [("Starting", 0.0), ("Starting", 0.7), ("Starting", 1.4), ("All at once", 0.0)])
def test_one_interrupt_ends_the_demo_with_130_whenever_it_comes(tmp_path: Path, after: str, wait_s: float) -> None:
    assert "What it took" not in interrupted(tmp_path, COMMAND, after, wait_s)


# Ctrl-C pressed in a finaliser, so that Python always drops it, when a function of ours is called for the nth time.
DROPPED = """
import signal
import jaxkv.{module} as module
class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        print("not reached")
calls = 0
def pressed(*args, **kwargs):
    global calls
    calls += 1
    if calls == {nth}:
        Dropped()
    return plain(*args, **kwargs)
plain, module.{name} = module.{name}, pressed
"""


@pytest.mark.parametrize(
    ("name", "nth", "not_any_more"),
    [
        ("startup.probe_host_memory", 1, "All at once"),
        ("programs.jit_recipe", 2, "All at once"),
        ("startup.warm_up", 1, "All at once"),
        ("engine.take_step", 9, "Answers"),
    ],
)
def test_an_interrupt_that_python_drops_ends_the_demo_all_the_same(tmp_path: Path, name: str, nth: int, not_any_more: str) -> None:
    module, _, function = name.partition(".")
    source = DROPPED.format(module=module, name=function, nth=nth)
    out = interrupted(tmp_path, source + COMMAND)
    assert "Starting" in out and not_any_more not in out and "not reached" not in out


# The chats and the pool


def sizes_for(**fields: object) -> tuple[int, int, str | None]:
    made = Config.model_validate({**config().model_dump(), "pool": {"page_size": 16, **fields}, "scheduler": {"prefill_chunk": 64}})
    sizes = choose_sizes(make_chats(None, 320, 512), made)
    return sizes.crowded, sizes.needed, sizes.note


def test_a_tight_pool_is_taken_as_it_is_configured():
    crowded, needed, note = sizes_for(tokens=768)
    assert (crowded, note) == (48, None)
    assert needed > 2 * 48


@pytest.mark.parametrize("tokens", [64, 100_000])
def test_a_pool_that_shows_nothing_or_holds_too_little_is_replaced_and_that_is_said(tokens):
    crowded, needed, note = sizes_for(tokens=tokens)
    assert crowded == round(needed / 3)
    assert note is not None and note.startswith(f"pool.tokens is {tokens}; for these chats the demo takes {16 * crowded}, ")


def test_without_a_configured_pool_it_is_a_third():
    crowded, needed, note = sizes_for()
    assert (crowded, note) == (round(needed / 3), None)


def test_the_pool_holds_the_largest_chat_and_a_prompt_chunk():
    made = config(scheduler__prefill_chunk=32)
    one = make_chats(None, 320, 128)[:1]
    assert choose_sizes(one, made).crowded == one[0].num_pages(4)
    short = [replace(one[0], prompt_ids=(1, 2), params=replace(one[0].params, max_tokens=2))]
    assert choose_sizes(short, made).crowded == 8


def test_chats_fit_a_short_model():
    for max_len in (2, 3, 40, 128):
        for chat in make_chats(None, 320, max_len):
            assert chat.params.max_tokens is not None and chat.params.max_tokens >= 1
            assert len(chat.prompt_ids) + chat.params.max_tokens - 1 <= max_len


class NoTemplate(ByteTokenizer):
    chat_templates: dict[str, str] = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("tokenizer", "start"),
    [(ByteTokenizer(), [256, *b"user\n"]), (NoTemplate(), [*b"Write"]), (PlainTokenizer(), [*b"user: "])],
)
def test_prompts_are_chats_where_the_model_knows_chats_and_plain_where_not(tokenizer: TokenizerBase, start: list[int]):
    assert list(make_chats(tokenizer, 320, 4096)[0].prompt_ids[: len(start)]) == start


def test_the_uncrowded_engine_parks_for_no_other_reason():
    made = with_pool(config(debug__park_every=2), 400, is_plain=True)
    assert (made.pool.tokens, made.pool.page_size, made.debug.park_every) == (400, 4, 0)
    assert with_pool(config(debug__park_every=2), 400).debug.park_every == 2


# The picture


def frame(**fields: object) -> Frame:
    rows = (
        ChatRow(1, "Haiku", "running", 12, 160, 3, 0, 1, "A light in the storm\nturns"),
        ChatRow(2, "Pancakes", "parked", 7, 210, 0, 4, 2, "Two eggs"),
        ChatRow(3, "Robot", "waiting", 0, 220, 0, 0, 0, ""),
    )
    made = Frame(rows, (1, 1, None, 1), 16, 12, 3, 2, 2**20, 2.0)
    return replace(made, **fields)  # type: ignore[arg-type]


def drawn(made: Frame, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(draw(made, width))
    return printed(console)


def test_every_page_shows_its_owner_and_every_image_is_seen():
    text = drawn(frame())
    assert "│ pool    1 1 · 1 " in text
    assert "│ parked  2 2 2 2 " in text
    assert "4 pages of 16 tokens; the chats need 12" in text and "3 in use, 1 free" in text
    assert re.search(r"2 Pancakes +parked +7/210 +\(4\) +2 Two eggs", text)
    assert "0/3 done · 19 tokens · 9.5 tokens/s · 3 parks · 2 restores · 1 MiB parked" in text


@pytest.mark.parametrize("width", [60, 80, 110])
@pytest.mark.parametrize("num_pages", [1, 48, 100_000])
def test_the_picture_fits_any_width_and_stays_small(width, num_pages):
    text = drawn(frame(owners=(1,) * num_pages, needed_pages=3 * num_pages), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) <= 20


def test_a_text_shows_its_end_in_one_line():
    assert tail("short", 10) == "short"
    assert tail("one two\nthree four", 10) == "…hree four"
    assert tail("日本語日本語日本語", 8) == "…日本語"


def test_nothing_a_model_says_controls_the_terminal():
    assert printable("a\x1b[31mb\tc\nd") == "a [31mb c\nd"


def test_events_tell_parks_returns_and_ends():
    parked = ChatRow(2, "Pancakes", "parking", 7, 210, 0, 4, 1, "")
    running = replace(parked, state="running", image_pages=0, num_pages=4, num_parks=0)
    back = replace(running, num_parks=1, num_generated=8)
    done = replace(back, state="done", num_generated=9, num_pages=0)
    assert list(events(running, parked)) == ["parked after 7 tokens: 4 pages to host memory"]
    assert list(events(parked, back)) == ["is back, at 8 tokens"]
    assert list(events(back, done)) == ["done: 9 tokens, 1 park"]
    assert list(events(running, running)) == []


def test_a_line_sums_up_a_frame():
    assert summary_line(frame()) == "1 running, 1 parked, 1 waiting, 0 done; 1/4 pages free; 19 tokens, 9.5/s"


def test_content_compares_everything_that_is_promised():
    one = Completion([1, 2], "ab", "stop", 3, 0)
    for other in (
        replace(one, token_ids=[1, 3]),
        replace(one, text="ac"),
        replace(one, finish_reason="length"),
        replace(one, prompt_tokens=4),
    ):
        assert num_identical(Played([one], 1.0), Played([other], 1.0)) == 0
    assert num_identical(Played([one], 1.0), Played([replace(one, num_parks=3, pause_s=2.0, e2e_s=9.0)], 1.0)) == 1
