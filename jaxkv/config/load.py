"""From a YAML file and command-line overrides to a checked `Config`, or to one clear line about what is wrong.

Knows no field by name: what there is comes from `sections`. What a file says wins over the defaults, an override over the file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxkv.config.fields import Field, all_fields, nearest, yaml_word
from jaxkv.config.sections import Config
from jaxkv.errors import ConfigError


def load_config(source: str | Path | Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Config:
    """Read and check a configuration; raise ConfigError with one clear line.

    `source` is a YAML file or the same content as nested dicts. `overrides` are values by dotted name (`{"pool.tokens": 640}`) or words of
    a command line (`["--pool.tokens", "640"]`).
    """
    where = f" in {source}" if isinstance(source, str | Path) else ""
    data = _read(Path(source)) if isinstance(source, str | Path) else _copied(source or {})
    values: Mapping[str, Any]
    if isinstance(overrides, Mapping):
        values = {canonical(name): value for name, value in overrides.items()}
    else:
        values, rest = split_overrides(overrides)
        if rest:
            raise ConfigError(f"{rest[0]!r} is no override: write --section.field VALUE")
    for name, value in values.items():
        section, _, key = name.partition(".")
        _section(data, section)[key] = value
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        unknown_first = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        lines = dict.fromkeys(_line(details, values, where) for details in unknown_first)  # a union reports each of its arms
        raise ConfigError("; ".join(lines)) from None


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
    """A word of the command line as the field would have it in a file: text stays as it is where text is allowed."""
    if text == "null" and field.takes_null:
        return None
    words = {str(word) for arm in field.arms if get_origin(arm) is Literal for word in get_args(arm)}
    if field.takes_text or text in words:
        return text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _read(path: Path) -> dict[str, Any]:
    """The content of a YAML file as nested dicts."""
    path = path.expanduser()
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{path} is not valid YAML: {where}{getattr(error, 'problem', None) or error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold sections such as `model:` and `pool:`, got a {type(data).__name__}")
    return _copied(data)


def _copied(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sections as dicts of our own, so that overrides never reach the caller's; an empty section is an empty dict."""
    return {str(name): dict(part) if isinstance(part, Mapping) else {} if part is None else part for name, part in data.items()}


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    part = data.setdefault(name, {})
    if not isinstance(part, dict):
        raise ConfigError(f"{name} must hold fields such as `{_names_in(name)[0]}: VALUE`, got {part!r}")
    return part


def _names_in(section: str) -> list[str]:
    return [name.partition(".")[2] for name in all_fields() if name.startswith(section + ".")]


def _line(details: ErrorDetails, overrides: Mapping[str, Any], where: str) -> str:
    """One of pydantic's errors as: what is wrong, got versus allowed, what to write instead."""
    location = [str(part) for part in details["loc"]]
    name = ".".join(location[:2])  # a third part would be the arm of a union
    where = "" if name in overrides else where
    if details["type"] == "extra_forbidden":
        return _unknown(name) + where
    if details["type"] == "missing":
        name = name if "." in name else next(known for known in all_fields() if known.startswith(name + "."))
        return f"{name} is missing{where}: {all_fields()[name].description}"
    if not location or details["type"] == "value_error":  # a section or the whole does not agree with itself
        return details["msg"].removeprefix("Value error, ") + where
    if name in all_fields():
        return f"{name}: got {_shown(details, name, overrides)}, allowed: {all_fields()[name].allowed}{where}"
    return f"{name} must hold fields such as `{_names_in(name)[0]}: VALUE`, got {details['input']!r}{where}"


def _shown(details: ErrorDetails, name: str, overrides: Mapping[str, Any]) -> str:
    value = overrides.get(name, details["input"])
    return repr(value) if isinstance(value, str) else yaml_word(value)


def _unknown(name: str) -> str:
    """`unknown field x; nearest valid name: y`."""
    sections = list(Config.model_fields)
    kind, names = ("field", list(all_fields())) if "." in name else ("section", sections)
    best = nearest(name, names) or (nearest(name, all_fields()) if kind == "section" else None)
    hint = f"nearest valid name: {best}" if best else f"valid sections: {', '.join(sections)}"
    return f"unknown {kind} {name!r}, {hint}"


class _Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key written twice and reads 1e-3 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of `node`; raise where one key stands twice."""
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


_Loader.yaml_implicit_resolvers = dict(yaml.SafeLoader.yaml_implicit_resolvers)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
