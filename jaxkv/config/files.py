"""Reads the YAML of a configuration, with the files it is based on. Knows no field.

`base: other.yaml` at the top of a file names another one, beside it, whose values hold wherever this one says nothing; and so on.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxkv.errors import ConfigError

BASE = "base"


def read_chain(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The sections of a file and of those it is based on, the most basic first, each with the file's name as it was reached."""
    found: list[tuple[str, dict[str, Any]]] = []
    names, seen = [str(path)], [path.expanduser().resolve()]
    while True:
        data = read_yaml(Path(names[-1]))
        base = data.pop(BASE, None)
        found.append((names[-1], data))
        if base is None:
            return found[::-1]
        if not isinstance(base, str) or not base:
            raise ConfigError(f"base: got {base!r}, allowed: the name of another configuration, such as other.yaml, in {names[-1]}")
        following = Path(base).expanduser() if Path(base).expanduser().is_absolute() else Path(names[-1]).parent / base
        names.append(str(following))
        if following.resolve() in seen:
            raise ConfigError(f"base: the files are based on each other: {' -> '.join(names)}; take one of these lines out")
        seen.append(following.resolve())


def read_yaml(path: Path) -> dict[str, Any]:
    """The content of a YAML file as nested dicts."""
    path = path.expanduser()
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader)
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
    return copied(data)


def parse_word(text: str) -> Any:
    """A value as a file would have it: 640, null, [1, 2], smallest."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return text


def copied(data: Mapping[str, Any]) -> dict[str, Any]:
    """The sections as dicts of our own, so that overrides never reach the caller's; an empty section is an empty dict."""
    return {str(name): dict(part) if isinstance(part, Mapping) else {} if part is None else part for name, part in data.items()}


class Loader(yaml.SafeLoader):
    """YAML's safe loader that refuses a key written twice and reads 1e-3 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of `node`; raise where one key stands twice."""
        seen = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} stands twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


Loader.yaml_implicit_resolvers = dict(yaml.SafeLoader.yaml_implicit_resolvers)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
