"""The demo from its first line to its exit code: fetch, size, run crowded, show the answers, run twice more, compare."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxkv.cli.fetch import fetch_with_bar
from jaxkv.config import Config
from jaxkv.demo.chats import Chat, Sizes, choose_sizes, make_chats, with_pool
from jaxkv.demo.play import Played, play_alone, play_together
from jaxkv.demo.table import Results, answer_panel, differences, print_results
from jaxkv.demo.watch import MAX_WIDTH, bar, watch
from jaxkv.engine import Engine
from jaxkv.fetch import KNOWN_MODELS, cache_folder, known_path, resolve_model_path
from jaxkv.models import inspect_checkpoint, load_tokenizer
from jaxkv.startup import choose_shapes

EXIT_DONE, EXIT_BROKEN = 0, 1
# What the start does after each of its stages, in words.
AFTER = {"check": "reading the weights", "hash": "compiling the programs (kept for the next time)", "compile": "running each program once"}


def run_demo(config: Config, console: Console | None = None) -> int:
    """Run it; 0 when all chats completed and every byte was the same, else 1. What a user must change raises JaxkvError or ModelError."""
    console = console or make_console()
    chats, sizes = prepare(config)
    introduce(console, config, chats, sizes)
    crowded, alone, summary = run_crowded(console, config, chats, sizes)
    ample, ample_summary = run_ample(console, config, chats, sizes, crowded.num_tokens)
    results = Results(crowded, alone, ample, summary, ample_summary, sizes)
    return conclude(console, chats, results)


def make_console() -> Console:
    """Standard output; a character that its encoding lacks becomes a question mark and not an error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def prepare(config: Config) -> tuple[list[Chat], Sizes]:
    """The model's file, fetched where it is a known one; what the chats are in its tokens; how big the pools must be."""
    folder, name = cache_folder(config.run.cache_dir), config.model.path
    if name in KNOWN_MODELS and known_path(name, folder) is None:
        fetch_with_bar(name, folder)
    path = resolve_model_path(name, folder)
    info = inspect_checkpoint(path)
    shapes = choose_shapes(config, info.config)
    chats = make_chats(load_tokenizer(info), info.config.vocab_size, shapes.max_len)
    return chats, choose_sizes(chats, config)


def introduce(console: Console, config: Config, chats: Sequence[Chat], sizes: Sizes) -> None:
    """What is about to happen, in a few lines."""
    say(
        console,
        f"{len(chats)} chats with {config.model.path}, all at once. At full length they need {sizes.needed_tokens} tokens of KV pool, and "
        f"there are {sizes.crowded_tokens}: whoever does not fit is parked in host memory and comes back later. Nobody is ended for it, "
        "and no answer changes by a byte, which is checked at the end.",
    )
    if sizes.note:
        say(console, sizes.note, "yellow")


def run_crowded(console: Console, config: Config, chats: Sequence[Chat], sizes: Sizes) -> tuple[Played, Played, dict[str, Any]]:
    """The small pool: all at once, then one after another in the same engine. The summary is that of the first."""
    with start(console, with_pool(config, sizes.crowded_tokens), is_first=True) as engine:
        with watch(console, chats, sizes.needed) as on_step:
            crowded = play_together(engine, chats, on_step)
        settle(engine)
        summary = engine.summary()
        show_answers(console, chats, crowded)
        heading(console, "The same chats twice more, to compare")
        with bar(console, "one after another, same pool", crowded.num_tokens) as on_step:
            alone = play_alone(engine, chats, on_step)
    return crowded, alone, summary


def run_ample(console: Console, config: Config, chats: Sequence[Chat], sizes: Sizes, num_tokens: int) -> tuple[Played, dict[str, Any]]:
    """A second engine whose pool holds all of them at full length: what the answers are when nobody ever waits."""
    with start(console, with_pool(config, sizes.needed_tokens, is_plain=True), is_first=False) as engine:
        with bar(console, "uncrowded, an ample pool", num_tokens) as on_step:
            ample = play_together(engine, chats, on_step)
        settle(engine)
        return ample, engine.summary()


def start(console: Console, config: Config, *, is_first: bool) -> Engine:
    """An engine, with what its start took and what it has to say."""
    begin, took = time.perf_counter(), []
    if is_first:
        heading(console, "Starting")
    with console.status("starting") as status:

        def on_stage(name: str, seconds: float) -> None:
            took.append(f"{name} {seconds:.1f}")
            if name in AFTER:
                status.update(AFTER[name])

        engine = Engine(config, on_stage=on_stage)
    if is_first:
        say(console, f"{time.perf_counter() - begin:.1f} s: {', '.join(took)}", "dim")
        for message in engine.messages:
            say(console, message, "yellow")
        heading(console, "All at once")
    return engine


def settle(engine: Engine) -> None:
    """Let the last copies land, so that the numbers are those of a quiet engine."""
    while not engine.is_idle:
        engine.step()


def show_answers(console: Console, chats: Sequence[Chat], played: Played) -> None:
    """Every question with the beginning of its answer."""
    heading(console, "Answers")
    for chat, completion in zip(chats, played.completions, strict=True):
        console.print(answer_panel(chat, completion, console, width(console)))


def conclude(console: Console, chats: Sequence[Chat], results: Results) -> int:
    """The table, and the exit code."""
    heading(console, "What it took")
    print_results(console, results, width(console))
    if results.is_good:
        return EXIT_DONE
    for line in differences(chats, results):
        say(console, line, "bold red")
    if results.num_differing:
        say(console, "This must never happen: crowding changed an answer. Please report it with this output.", "bold white on red")
    else:
        say(console, "Not every chat completed, for the reasons above; those that did are identical.", "bold red")
    return EXIT_BROKEN


def heading(console: Console, text: str) -> None:
    """A line of its own."""
    console.print()
    console.print(Text(text, "bold"))


def say(console: Console, text: str, style: str = "") -> None:
    """A paragraph no wider than the rest; model names and messages are never read as markup."""
    console.print(Text(text, style), width=width(console))


def width(console: Console) -> int:
    """Columns that the demo uses."""
    return min(MAX_WIDTH, console.width)
