"""Reads one subcommand's words with tyro, after taking out the configuration's own `--section.field VALUE`. Knows no subcommand."""

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from jaxkv.config import split_overrides
from jaxkv.config.fields import all_fields

Args = TypeVar("Args")


def parse(kind: type[Args], command: str, words: Sequence[str]) -> Args:
    """The arguments of a command that takes no configuration."""
    return tyro.cli(kind, prog=f"jaxkv {command}", args=list(words), config=(tyro.conf.FlagCreatePairsOff,))


def parse_with_overrides(kind: type[Args], command: str, words: Sequence[str]) -> tuple[Args, dict[str, Any]]:
    """The arguments of a command that takes a configuration, and the fields set on the command line."""
    if {"-h", "--help"} & set(words):
        try:
            parse(kind, command, ["--help"])  # prints and raises SystemExit
        finally:
            print(fields_help())
    overrides, rest = split_overrides(words)
    return parse(kind, command, rest), overrides


def fields_help() -> str:
    """Every field of the configuration with what it may be, its default and what it means."""
    lines = ["", "Any field of the configuration can be set as --section.field VALUE (dashes or underscores):", ""]
    for field in all_fields().values():
        default = field.default if field.default == "required" else f"default: {field.default}"
        lines.append(f"  --{field.name.replace('_', '-')}  ({field.allowed}; {default})")
        lines.append(f"      {field.description}")
    return "\n".join(lines)
