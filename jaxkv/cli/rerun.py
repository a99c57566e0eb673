"""`jaxkv rerun MANIFEST`: a run once more, and whether the same came out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse


@dataclass(frozen=True)
class Args:
    """Make a run of a sweep again. Exit codes: 0 the same outputs_sha256, 1 another, with what differs, 2 it cannot be made again."""

    manifest: Annotated[Positional[Path], arg(help="a run's manifest.json, or its folder")]
    output: Annotated[Path | None, arg(metavar="DIR", help="keep the new run here")] = None


def run(words: Sequence[str]) -> int:
    """Run, compare, tell."""
    args = parse(Args, "rerun", words)
    from jaxkv.sweep.rerun import rerun

    found = rerun(args.manifest, args.output)
    if found.is_same:
        print(f"the same: outputs_sha256 {found.outputs_sha256}")
    else:
        print(f"not the same: outputs_sha256 was {found.before_sha256}, now {found.outputs_sha256}")
        if found.first is not None:
            print(f"first in: {found.first}")
    for line in found.differences:
        print(f"{'beside that, ' if found.is_same else ''}{line}")
    if not found.is_same and not found.differences:
        print("nothing that is recorded of version, machine and model differs")
    return 0 if found.is_same else 1
