"""From a YAML file, the environment and command-line overrides to a checked `Config`, or to one clear line about what is wrong.

Knows no field by name: what there is comes from `sections`. What wins, from the weakest: the defaults, the file's `base` and its own, the
file, `JAXKV_SECTION__FIELD` in the environment, the command line. A field is replaced whole, also one that is a list or holds names.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxkv.config.fields import Field, all_fields, nearest, yaml_word
from jaxkv.config.files import copied, parse_word, read_chain
from jaxkv.config.sections import Config
from jaxkv.errors import ConfigError

DEFAULT, COMMAND_LINE = "default", "command line"
VARIABLE = re.compile(r"JAXKV_([A-Z0-9]+)__([A-Z0-9_]+)")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and for each field by dotted name where its value came from."""

    config: Config
    origins: Mapping[str, str]


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """Read and check a configuration; raise ConfigError with one clear line.

    `source` is a YAML file or the same content as nested dicts. `overrides` are values by dotted name (`{"pool.tokens": 640}`) or words of
    a command line (`["--pool.tokens", "640"]`). The environment counts for a file only: dicts are taken as they are.
    """
    return resolve_config(source, overrides).config


def resolve_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Resolved:
    """The same, and where each value came from. `environ` stands in for the environment, `{}` for none."""
    layers = _Layers()
    if isinstance(source, str | Path):
        for name, data in read_chain(Path(source)):
            layers.add(data, name)
        for variable, dotted, text in _variables(os.environ if environ is None else environ):
            layers.set(dotted, _value(all_fields()[dotted], text), variable)
    else:
        layers.add(copied(source or {}), "")
    for dotted, value in _override_values(overrides).items():
        layers.set(dotted, value, COMMAND_LINE)
    where = str(source) if isinstance(source, str | Path) else ""
    try:
        config = Config.model_validate(layers.data)
    except ValidationError as error:
        unknown_first = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        lines = dict.fromkeys(_line(details, layers, where) for details in unknown_first)  # a union reports each of its arms
        raise ConfigError("; ".join(lines)) from None
    return Resolved(config, {name: layers.origins.get(name, DEFAULT) for name in all_fields()})


@dataclass(slots=True)
class _Layers:
    """Values that lie over each other, and where each came from, by field or by section."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def add(self, data: Mapping[str, Any], origin: str) -> None:
        """Sections over those that are there; what is none is kept, to be refused."""
        for section, part in data.items():
            below = self.data.get(section)
            if isinstance(part, dict) and isinstance(below, dict):
                below.update(part)
            else:
                self.data[section] = part
            names = [f"{section}.{name}" for name in part] if isinstance(part, dict) else []
            self.origins |= dict.fromkeys([section, *names], origin)

    def set(self, dotted: str, value: Any, origin: str) -> None:
        """One field over what is there."""
        section, _, key = dotted.partition(".")
        part = self.data.setdefault(section, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{section} must hold fields such as `{_names_in(section)[0]}: VALUE`, got {part!r}")
        part[key] = value
        self.origins[dotted] = origin

    def where(self, name: str, otherwise: str) -> str:
        """` in FILE`, ` in JAXKV_POOL__TOKENS`, or nothing for the command line and for dicts."""
        origin = self.origins.get(name, otherwise)
        return f" in {origin}" if origin and origin != COMMAND_LINE else ""


def _variables(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(variable, dotted name, text) for each JAXKV_SECTION__FIELD; one that names no field is an error."""
    found = []
    for variable, text in sorted(environ.items()):
        if match := VARIABLE.fullmatch(variable):
            dotted = f"{match[1]}.{match[2]}".lower()
            if dotted not in all_fields():
                raise ConfigError(f"{_unknown(dotted)} in the environment variable {variable}")
            found.append((variable, dotted, text))
    return found


def _override_values(overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    if isinstance(overrides, Mapping):
        return {canonical(name): value for name, value in overrides.items()}
    values, rest = split_overrides(overrides)
    if rest:
        raise ConfigError(f"{rest[0]!r} is no override: write --section.field VALUE")
    return values


def split_overrides(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take `--section.field VALUE` and `--section.field=VALUE` out of a command line: (values by dotted name, the other words in order)."""
    values: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, has_value, text = word.partition("=")
        if not re.fullmatch(r"--[A-Za-z][\w-]*\.[\w.-]+", name):
            rest.append(word)
            continue
        field = all_fields()[canonical(name[2:])]
        if not has_value:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(f"{name} needs a value: {field.allowed}")
            text = queue.pop(0)
        values[field.name] = _value(field, text)
    return values, rest


def canonical(name: str) -> str:
    """The dotted name of a field, dashes or underscores; raise ConfigError with the nearest valid name for one that is not there."""
    dotted = name.replace("-", "_")
    if dotted not in all_fields():
        raise ConfigError(_unknown(dotted))
    return dotted


def _value(field: Field, text: str) -> Any:
    """A word of the command line or the environment as the field would have it in a file: text stays as it is where text is allowed."""
    if text == "null" and field.takes_null:
        return None
    words = {str(word) for arm in field.arms if get_origin(arm) is Literal for word in get_args(arm)}
    if field.takes_text or text in words:
        return text
    return parse_word(text)


def _names_in(section: str) -> list[str]:
    return [name.partition(".")[2] for name in all_fields() if name.startswith(section + ".")]


def _line(details: ErrorDetails, layers: _Layers, source: str) -> str:
    """One of pydantic's errors as: what is wrong, got versus allowed, what to write instead."""
    location = [str(part) for part in details["loc"]]
    name = ".".join(location[:2])  # a third part would be the arm of a union
    where = layers.where(name, source)
    if details["type"] == "extra_forbidden":
        return _unknown(name) + where
    if details["type"] == "missing":
        name = name if "." in name else next(known for known in all_fields() if known.startswith(name + "."))
        return f"{name} is missing{layers.where('', source)}: {all_fields()[name].description}"
    if not location or details["type"] == "value_error":  # a section or the whole does not agree with itself
        return details["msg"].removeprefix("Value error, ") + layers.where("", source)
    if name in all_fields():
        return f"{name}: got {_shown(details, name, layers)}, allowed: {all_fields()[name].allowed}{where}"
    return f"{name} must hold fields such as `{_names_in(name)[0]}: VALUE`, got {details['input']!r}{where}"


def _shown(details: ErrorDetails, name: str, layers: _Layers) -> str:
    section, _, key = name.partition(".")
    value = layers.data[section][key] if layers.origins.get(name) == COMMAND_LINE else details["input"]
    return repr(value) if isinstance(value, str) else yaml_word(value)


def _unknown(name: str) -> str:
    """`unknown field x; nearest valid name: y`."""
    sections = list(Config.model_fields)
    kind, names = ("field", list(all_fields())) if "." in name else ("section", sections)
    best = nearest(name, names) or (nearest(name, all_fields()) if kind == "section" else None)
    hint = f"nearest valid name: {best}" if best else f"valid sections: {', '.join(sections)}"
    return f"unknown {kind} {name!r}, {hint}"
