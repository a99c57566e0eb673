"""`jaxkv config show | check | schema`: a configuration as it is resolved, checked, or described for an editor."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import Config
from jaxkv.config.axes import combinations
from jaxkv.config.fields import nearest
from jaxkv.config.load import load_config, resolve_config
from jaxkv.config.show import schema, show
from jaxkv.errors import ConfigError, JaxkvError
from jaxkv.workload.draw import draw


@dataclass(frozen=True)
class Show:
    """Print a configuration as it is resolved: a YAML file of its own, with where each value came from."""

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/quickstart.yaml")]
    only_set: Annotated[bool, arg(help="leave out what has its default")] = False


@dataclass(frozen=True)
class Check:
    """Validate configurations, the axes of their sweeps and the files of their loads.

    Exit code 0 when all are good, 2 with a line for each that is not.
    """

    configs: Annotated[Positional[tuple[Path, ...]], arg(metavar="CONFIG ...", help="configurations")]


@dataclass(frozen=True)
class Schema:
    """Print a JSON schema of configurations, for editors that complete and check YAML files."""


def run(words: Sequence[str]) -> int:
    """One of the three."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0 if words else 2
    name, *rest = words
    if name not in PARTS:
        best = nearest(name, PARTS)
        raise ConfigError(f"unknown command 'config {name}', " + (f"did you mean '{best}'?" if best else f"there are {', '.join(PARTS)}"))
    return PARTS[name](rest)


def run_show(words: Sequence[str]) -> int:
    """Print the resolved configuration."""
    args, overrides = parse_with_overrides(Show, "config show", words)
    sys.stdout.write(show(resolve_config(args.config, overrides), args.only_set))
    return 0


def run_check(words: Sequence[str]) -> int:
    """Validate all, tell of each."""
    args, overrides = parse_with_overrides(Check, "config check", words)
    if not args.configs:
        raise ConfigError("config check needs a configuration, such as configs/quickstart.yaml")
    code = 0
    for path in args.configs:
        try:
            check(load_config(path, overrides))
            print(f"{path}: good")
        except JaxkvError as error:
            code = error.exit_code
            print(f"jaxkv: error: {path}: {error}", file=sys.stderr)
    return code


def check(config: Config) -> None:
    """What is wrong beyond single fields: axes that contradict each other, values that no case may have, prompts that are not there."""
    draw(config.workload, config.workload.seed)
    base = config.to_dict() | {"sweep": {}}
    for values in combinations(config.sweep):
        load_config(base, values)


def run_schema(words: Sequence[str]) -> int:
    """Print the schema."""
    parse_with_overrides(Schema, "config schema", words)
    print(json.dumps(schema(), indent=2))
    return 0


PARTS = {"show": run_show, "check": run_check, "schema": run_schema}
HELP = """usage: jaxkv config show|check|schema ...

  show CONFIG       the configuration as it is resolved, with where each value came from
  check CONFIG ...  validate: exit code 0 when all are good, 2 with a line for each that is not
  schema            a JSON schema, for editors

Values come from, the last one wins: the defaults, `base:` of a file, the file, JAXKV_SECTION__FIELD in the environment,
--section.field VALUE."""
