"""A flat view of the configuration's fields, by dotted name: for messages, help and overrides. Knows nothing of values in use."""

import difflib
import types
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxkv.config.section import Section
from jaxkv.config.sections import Config

_WORDS = {int: "integer", float: "number", bool: "true | false", str: "text", type(None): "null"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its dotted name, what it may be, its default as YAML would write it, and its description."""

    name: str
    allowed: str
    default: str
    description: str
    arms: tuple[Any, ...]  # the types of its union, without Annotated

    @property
    def takes_null(self) -> bool:
        """Whether null is a value of its own."""
        return type(None) in self.arms

    @property
    def takes_text(self) -> bool:
        """Whether any text is a value."""
        return str in self.arms


@cache
def all_fields() -> dict[str, Field]:
    """Every field by its dotted name, in the order of the file."""
    found = {}
    for section, holder in Config.model_fields.items():
        assert isinstance(holder.annotation, type) and issubclass(holder.annotation, Section)
        for name, info in holder.annotation.model_fields.items():
            dotted = f"{section}.{name}"
            found[dotted] = _describe(dotted, info)
    return found


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that `name` most likely stands for: the same last part in another section, or a close spelling."""
    names = list(names)
    tails = {known.rpartition(".")[2]: known for known in names}
    tail = name.rpartition(".")[2]
    if tail in tails:
        return difflib.get_close_matches(name, [known for known in names if known.endswith(tail)], n=1, cutoff=0)[0]
    for wanted, known in ((name, {n: n for n in names}), (tail, tails)):
        if close := difflib.get_close_matches(wanted, list(known), n=1, cutoff=0.7):
            return known[close[0]]
    return None


def _describe(dotted: str, info: FieldInfo) -> Field:
    arms = list(_arms(info.annotation, info.metadata))
    allowed = " | ".join(_spell(arm, metadata) for arm, metadata in arms)
    default = "required" if info.is_required() else yaml_word(info.default)
    return Field(dotted, allowed, default, info.description or "", tuple(arm for arm, _ in arms))


def _arms(annotation: Any, metadata: Iterable[Any]) -> Iterable[tuple[Any, list[Any]]]:
    """The members of a union with the bounds that hold for each: int | None with ge=1 gives (int, [Ge(1)]), (None, [])."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from _arms(inner, [*metadata, *(m for extra in more for m in getattr(extra, "metadata", [extra]))])
    elif get_origin(annotation) in (Union, types.UnionType):
        for arm in get_args(annotation):
            yield from _arms(arm, metadata)
    else:
        yield annotation, list(metadata)


def _spell(arm: Any, metadata: list[Any]) -> str:
    """A type and its bounds in words: `integer >= 1`, `smallest | largest`, `list of text`."""
    if get_origin(arm) is Literal:
        return " | ".join(map(str, get_args(arm)))
    if get_origin(arm) is tuple:
        return "list of " + " | ".join(_spell(kind, bounds) for kind, bounds in _arms(get_args(arm)[0], []))
    if get_origin(arm) is dict:
        return "token ids with a number each" if get_args(arm)[1] is float else "field names with a list of values each"
    bounds = [f"{sign} {getattr(m, key)}" for m in metadata for key, sign in _BOUNDS if hasattr(m, key)] if arm in (int, float) else []
    return " ".join([_WORDS.get(arm, str(arm)), " and ".join(bounds)]).rstrip()


def yaml_word(value: Any) -> str:
    """A value as YAML would write it, text in quotes left out."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_word, value))}]"
    return str(value)
