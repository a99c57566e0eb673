"""What is printed after the runs: the answers and the table of what it took. Knows no engine, only its summary."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxkv.demo.chats import Chat, Sizes
from jaxkv.demo.frame import ids_as_text
from jaxkv.demo.play import Played, content, num_identical
from jaxkv.demo.view import MIB, color, printable
from jaxkv.request import Completion

ANSWER_LINES = 5


@dataclass(frozen=True, slots=True)
class Results:
    """The same eight chats three times, and the engines' own numbers right after."""

    crowded: Played
    alone: Played  # one after another, in the crowded pool
    ample: Played
    summary: Mapping[str, Any]  # after the crowded run
    ample_summary: Mapping[str, Any]
    sizes: Sizes

    @property
    def num_identical(self) -> int:
        """Answers that are the same to the last bit, crowded and with an ample pool."""
        return num_identical(self.crowded, self.ample)

    @property
    def num_identical_alone(self) -> int:
        """The same for one after another."""
        return num_identical(self.alone, self.ample)

    @property
    def num_differing(self) -> int:
        """Answers that came to an end and are not the same, in either way of running them in the crowded pool."""
        pairs = [
            (got, wanted)
            for played in (self.crowded, self.alone)
            for got, wanted in zip(played.completions, self.ample.completions, strict=True)
        ]
        return sum(got.error is None and content(got) != content(wanted) for got, wanted in pairs)

    @property
    def is_good(self) -> bool:
        """Whether the promises held: every chat completed, every byte the same."""
        num = len(self.crowded.completions)
        return self.crowded.num_completed == self.num_identical == self.num_identical_alone == num


def answer_panel(chat: Chat, completion: Completion, console: Console, width: int) -> Panel:
    """The beginning of one answer."""
    body = Text(
        printable(completion.error or completion.text or ids_as_text(completion.token_ids)).strip(), style="red" if completion.error else ""
    )
    lines = [line for line in body.wrap(console, width - 4) if line.plain.strip()]
    shown = Text("\n").join(lines[:ANSWER_LINES])
    if len(lines) > ANSWER_LINES:
        shown.append(" …", "dim")
    heading = Text.assemble((f" {chat.number} ", f"#101010 on {color(chat.number)}"), " ", (f"{chat.title} ", "bold"))
    parks = f"{completion.num_parks} {'park' if completion.num_parks == 1 else 'parks'}"
    end = f"{len(completion.token_ids)} tokens, {parks}, {completion.pause_s:.1f} s away"
    return Panel(shown, title=heading, title_align="left", subtitle=Text(end, "dim"), subtitle_align="right", box=box.ROUNDED, width=width)


def print_results(console: Console, results: Results, width: int) -> None:
    """What it took, line by line: a table on a terminal, `name: value` elsewhere."""
    if not console.is_terminal:
        for name, value, _ in lines(results):
            console.print(f"{name}: {value}", markup=False, soft_wrap=True)
        return
    table = Table(box=box.ROUNDED, show_header=False, width=min(width, 90), padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", ratio=1)
    for name, value, is_good in lines(results):
        table.add_row(name, Text(value, {None: "", True: "bold green", False: "bold white on red"}[is_good]))
    console.print(table)


def lines(results: Results) -> Iterator[tuple[str, str, bool | None]]:
    """Name, value, and for those that are promises whether it was kept."""
    crowded, alone, ample, summary, sizes = results.crowded, results.alone, results.ample, results.summary, results.sizes
    num = len(crowded.completions)
    yield "chats completed", f"{crowded.num_completed} of {num}", crowded.num_completed == num
    yield "pool", f"{sizes.crowded_tokens} tokens, where the chats need {sizes.needed_tokens}", None
    yield "parks, restores", f"{summary['num_parks']}, {summary['num_restores']}", None
    yield "moved to host memory, back", f"{mib(summary['bytes_to_host'])}, {mib(summary['bytes_to_device'])}", None
    kinds = ", ".join(summary["image_memory_kinds"]) or "none"
    yield "kind of host memory, most held", f"{kinds}, {mib(summary['host_bytes_peak'])}", None
    yield "longest pause of a chat", f"{summary['longest_pause_s']:.1f} s", None
    gap = summary["token_gap_ms"]
    if gap["p50"] is not None:
        yield "gap between tokens, half and longest", f"{gap['p50']:.0f} ms, {gap['max']:.0f} ms (pauses apart)", None
    yield "tokens per second", f"{crowded.tokens_per_s:.1f}", None
    times = crowded.tokens_per_s / alone.tokens_per_s if alone.tokens_per_s else 0.0
    yield "  one after another, same pool", f"{alone.tokens_per_s:.1f}, together is {times:.2f} times as fast", None
    yield "  uncrowded, all eight at once", f"{ample.tokens_per_s:.1f} with {sizes.needed_tokens} tokens of pool", None
    compiles = summary["num_compiles_after_warmup"]
    yield "compilations after the start", str(compiles), compiles == 0
    yield "bytes identical to an uncrowded run", verdict(results.num_identical, num), results.num_identical == num
    yield "  and one after another", verdict(results.num_identical_alone, num), results.num_identical_alone == num


def verdict(num_same: int, num: int) -> str:
    """How many of how many, and loudly when not all."""
    return f"{num_same} of {num}" + ("" if num_same == num else "  NOT IDENTICAL")


def mib(num_bytes: int) -> str:
    """Bytes as MiB."""
    return f"{num_bytes / MIB:.1f} MiB"


def differences(chats: Sequence[Chat], results: Results) -> Iterator[str]:
    """A line for each chat that did not complete, or whose answer differs from the uncrowded one."""
    for name, played in (("in the crowded pool", results.crowded), ("one after another", results.alone)):
        for chat, got, wanted in zip(chats, played.completions, results.ample.completions, strict=True):
            if got.error is not None:
                yield f"chat {chat.number} ({chat.title}) failed {name}: {got.error}"
            elif (at := first_difference(got, wanted)) is not None:
                yield f"chat {chat.number} ({chat.title}) differs {name}: {at}"


def first_difference(got: Completion, wanted: Completion) -> str | None:
    """Where two answers part, in words; None when they are the same."""
    for index, (a, b) in enumerate(zip(got.token_ids, wanted.token_ids, strict=False)):
        if a != b:
            return f"token {index} is {a} instead of {b}"
    parts = ("token_ids", "text", "logprobs", "finish_reason", "prompt_tokens", "error")
    unlike = [part for part in parts if getattr(got, part) != getattr(wanted, part)]
    return f"in {', '.join(unlike)}" if unlike else None
