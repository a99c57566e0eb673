"""A configuration for people and editors: every value with where it came from, and a JSON schema. Knows no field by name."""

from typing import Any

import yaml

from jaxkv.config.files import BASE
from jaxkv.config.load import DEFAULT, Resolved
from jaxkv.config.sections import Config

COMMENT_AT = 33  # characters before a comment, where the value leaves room


def show(resolved: Resolved, only_set: bool = False) -> str:
    """A YAML file that loads to the same configuration, with the origin of each value beside it. `only_set` leaves the defaults out."""
    lines = []
    for section, fields in resolved.config.to_dict().items():
        shown = [(name, value) for name, value in fields.items() if not only_set or resolved.origins[f"{section}.{name}"] != DEFAULT]
        lines += [f"{section}:"] if shown else []
        for name, value in shown:
            lines.append(f"  {name}: {as_yaml(value)}".ljust(COMMENT_AT - 2) + f"  # {resolved.origins[f'{section}.{name}']}")
    return "\n".join(lines) + "\n"


def as_yaml(value: Any) -> str:
    """A value on one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).removesuffix("\n").removesuffix("\n...")


def schema() -> dict[str, Any]:
    """A JSON schema of the files, for editors. Nothing is required, since a value may come from `base` or elsewhere."""
    found = Config.model_json_schema()
    for part in [found, *found["$defs"].values()]:
        part.pop("required", None)
    base = {"type": "string", "minLength": 1, "description": "another configuration, whose values hold where this one says nothing"}
    found["properties"] = {BASE: base, **found["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "A configuration of jaxkv"}
