"""Makes docs/assets/demo.svg: a frame out of the middle of a real run of the demo, the one with the most sequences parked and running.

.venv/bin/python docs/assets/picture.py [CONFIG] [--section.field VALUE ...]
"""

import io
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxkv.config import load_config, split_overrides
from jaxkv.demo.chats import Chat, with_pool
from jaxkv.demo.frame import AWAY, Frame, take_frame
from jaxkv.demo.play import play_together
from jaxkv.demo.run import prepare
from jaxkv.demo.view import draw
from jaxkv.engine import Engine
from jaxkv.live import Handle

WIDTH = 100
EVERY_S = 0.5


class Album:
    """Takes a frame twice a second."""

    def __init__(self, chats: Sequence[Chat], needed_pages: int) -> None:
        self._chats, self._needed = chats, needed_pages
        self._start = self._last = time.perf_counter()
        self.frames: list[Frame] = []

    def __call__(self, engine: Engine, handles: Sequence[Handle]) -> None:
        """After every step."""
        now = time.perf_counter()
        if now - self._last > EVERY_S:
            self._last = now
            self.frames.append(take_frame(engine, self._chats, handles, self._needed, now - self._start))


def merit(frame: Frame) -> tuple[int, int, int]:
    """How much there is to see."""
    states = [row.state for row in frame.rows]
    num_away = sum(state in AWAY for state in states)
    return min(num_away, 3), len({*states}), frame.num_tokens


def as_svg(frame: Frame) -> str:
    """The frame as rich draws it, without the fonts that it would load from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(draw(frame, WIDTH))
    svg = console.export_svg(title="jaxkv demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")


def main(words: Sequence[str]) -> None:
    """Run the crowded part of the demo and keep the best frame."""
    overrides, rest = split_overrides(words)
    config = load_config(rest[0] if rest else "configs/quickstart.yaml", overrides)
    chats, sizes = prepare(config)
    album = Album(chats, sizes.needed)
    with Engine(with_pool(config, sizes.crowded_tokens)) as engine:
        play_together(engine, chats, album)
    best = max(album.frames, key=merit)
    Path(__file__).with_name("demo.svg").write_text(as_svg(best), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
