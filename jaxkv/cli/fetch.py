"""`jaxkv fetch NAME`: a known model into the cache folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse
from jaxkv.fetch import KNOWN_MODELS, cache_folder, fetch


@dataclass(frozen=True)
class Args:
    """Download a known model, check it, and keep it in the cache folder. Doing it again is quick."""

    name: Annotated[Positional[str], arg(metavar="NAME", help=f"one of: {', '.join(KNOWN_MODELS)}")]
    cache_dir: Annotated[
        str | None, arg(metavar="DIR", help="folder to keep it in; default: $JAXKV_CACHE, else the user's cache folder")
    ] = None


def run(words: Sequence[str]) -> int:
    """Fetch and print where the file is."""
    args = parse(Args, "fetch", words)
    print(fetch_with_bar(args.name, cache_folder(args.cache_dir)))
    return 0


def fetch_with_bar(name: str, folder: Path) -> Path:
    """Fetch with a progress bar where the error stream is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"unpacking {name}", total=None, visible=False)
        return fetch(name, folder, lambda done, total: bar.update(task, completed=done, total=total, visible=True))
