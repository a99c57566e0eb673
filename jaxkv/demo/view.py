"""Draws frames: the pool and the host memory page by page, a row per chat, a line of counters.

Pure: a frame in, something that rich can print out.
"""

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxkv.demo.frame import AWAY, ChatRow, Frame

MIB = 2**20
COLORS = ("#e69f00", "#56b4e9", "#2dbe8d", "#f0e442", "#e8743b", "#e39bc9", "#a99bf0", "#b8b8b8")  # apart also for the colour-blind
STATES = {
    "running": "bold green",
    "prompt": "green",
    "parking": "yellow",
    "parked": "bold yellow",
    "restoring": "cyan",
    "replaying": "cyan",
    "waiting": "dim",
    "done": "dim",
    "failed": "bold red",
}
MAX_LINES = 4  # of cells, for the pool and for the host memory


def draw(frame: Frame, width: int) -> RenderableType:
    """The whole live view, for a screen of so many columns."""
    return Group(draw_pool(frame, width), draw_chats(frame, width), draw_counters(frame))


def draw_pool(frame: Frame, width: int) -> Panel:
    """Every page as a cell with the number and colour of the chat that holds it; below it the images of those that are parked."""
    inner = width - 14
    most = MAX_LINES * (inner // 2)
    per_cell = max(1, -(-max(len(frame.owners), frame.needed_pages) // most))
    images = [row.number for row in frame.rows if row.state in AWAY for _ in range(row.image_pages)]
    room = max(frame.needed_pages - len(frame.owners), len(images))  # kept free for images, so that nothing jumps
    columns = 2 * max(balanced(len(frame.owners), per_cell, inner), balanced(room, per_cell, inner))
    picture = Table.grid(padding=(0, 1))
    picture.add_column(style="bold", no_wrap=True, width=7)
    picture.add_column(no_wrap=True)
    picture.add_row("pool", cells(frame.owners, per_cell, columns, len(frame.owners)))
    picture.add_row("", "")
    picture.add_row("parked", cells(images, per_cell, columns, room, free=" "))
    used = len(frame.owners) - frame.num_free
    unit = f"{frame.page_size} tokens" if per_cell == 1 else f"{frame.page_size} tokens, {per_cell} to a cell"
    title = f"{len(frame.owners)} pages of {unit}; the chats need {frame.needed_pages}"
    return Panel(picture, title=title, subtitle=f"{used} in use, {frame.num_free} free", box=box.ROUNDED, width=width, padding=(0, 1))


def balanced(num_pages: int, per_cell: int, width: int) -> int:
    """Cells per line, so that the lines are about equally long: 48 cells where 43 fit in a line make two lines of 24."""
    num_cells = -(-num_pages // per_cell)
    num_lines = max(1, -(-num_cells // (width // 2)))
    return -(-num_cells // num_lines)


def cells(owners: Sequence[int | None], per_cell: int, width: int, room: int, free: str = "·") -> Text:
    """Two columns a cell, `per_cell` pages each, in lines of `width` columns; filled up to what `room` pages take."""
    shown = list(owners[::per_cell])
    total = -(-room // per_cell)
    shown += [None] * (total - len(shown))
    per_line, text = width // 2, Text()
    for index, owner in enumerate(shown):
        if index and index % per_line == 0:
            text.append("\n")
        if owner is None:
            text.append(f"{free} ", "dim")
        else:
            text.append(f"{owner} ", f"#101010 on {color(owner)}")
    return text


def color(number: int) -> str:
    """The colour of a chat."""
    return COLORS[(number - 1) % len(COLORS)]


def draw_chats(frame: Frame, width: int) -> Table:
    """A row per chat, with the end of what it has said so far."""
    table = Table(box=None, width=width, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", width=2, justify="right")
    table.add_column("chat", width=9, no_wrap=True)
    table.add_column("state", width=9, no_wrap=True)
    for name, columns in (("tokens", 7), ("pages", 5), ("parks", 5)):
        table.add_column(name, width=columns, justify="right", no_wrap=True)
    table.add_column("says", no_wrap=True, ratio=1)
    for row in frame.rows:
        table.add_row(*draw_row(row, width - 46))
    return table


def draw_row(row: ChatRow, columns: int) -> tuple[RenderableType, ...]:
    """The cells of one chat; pages in brackets are those of its image."""
    pages = f"({row.image_pages})" if row.state in AWAY and row.image_pages else str(row.num_pages)
    return (
        Text(f"{row.number} ", f"#101010 on {color(row.number)}"),
        row.title,
        Text(row.state, STATES[row.state]),
        f"{row.num_generated}/{row.max_tokens}",
        pages,
        str(row.num_parks),
        Text(tail(row.text, columns), "dim" if row.state in AWAY else "", no_wrap=True),
    )


def tail(text: str, columns: int) -> str:
    """The end of a text in one line of so many columns, wide characters counted twice."""
    line = Text(" ".join(printable(text).split()))
    if line.cell_len <= columns:
        return line.plain
    while line.cell_len > columns - 1:
        line = line[max(1, (line.cell_len - columns) // 2) :]
    return "…" + line.plain


def printable(text: str) -> str:
    """A model may say anything; control characters do not reach the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def draw_counters(frame: Frame) -> Text:
    """One line of totals."""
    parts = (
        f"{frame.num_done}/{len(frame.rows)} done",
        f"{frame.num_tokens} tokens",
        f"{frame.tokens_per_s:.1f} tokens/s",
        f"{frame.num_parks} parks",
        f"{frame.num_restores} restores",
        f"{frame.host_bytes / MIB:.0f} MiB parked",
    )
    return Text(" · ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")
