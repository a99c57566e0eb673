"""What a model is called in answers. Knows no engine."""

from pathlib import Path


def served_name(path: str) -> str:
    """The last part of its path without `.gguf`, never a path of this machine."""
    return Path(path).name.removesuffix(".gguf") or path
