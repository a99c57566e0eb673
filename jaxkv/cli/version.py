"""`jaxkv version`: what to put into a bug report. Imports none of what it reports on."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from jaxkv import __version__
from jaxkv.cli.arguments import parse

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "gguf", "safetensors", "tokenizers", "pydantic")


@dataclass(frozen=True)
class Args:
    """Print the versions of jaxkv, of Python and of the packages that answers may depend on."""


def run(words: Sequence[str]) -> int:
    """Print one `name version` a line."""
    parse(Args, "version", words)
    print(f"jaxkv {__version__}\npython {platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        print(f"{package} {_version(package)}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
