"""The texts of a workload: files, or rows of tables put through a template. Knows no model and no tokenizer.

    *.txt, *.md    one prompt each; the columns are `prompt` and `text`, both the whole text
    *.csv          one prompt a row; the first line names the columns
    *.jsonl        one prompt a line, an object whose names are the columns

A template such as `{question} Answer with {choice_a} or {choice_b}.` is filled from each row; without one the column `prompt` is taken.
"""

import csv
import glob
import hashlib
import io
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxkv.errors import ConfigError

TEXTS, TABLES = (".txt", ".md"), (".csv", ".jsonl")
PLAIN = "{prompt}"
Row = tuple[str, Mapping[str, Any]]  # where it stands, its columns


def read_prompts(files: Sequence[str], template: str | None) -> list[str]:
    """Every prompt of the files, in order; ConfigError for a file, a row or a template that gives none."""
    wanted = template_columns(PLAIN if template is None else template)
    found = []
    for path in find_files(files):
        for where, row in read_rows(path):
            if missing := [name for name in wanted if name not in row]:
                raise ConfigError(
                    f"workload.{'template' if template else 'prompts'}: {where} has no column {missing[0]!r}; it has {', '.join(row)}"
                )
            found.append(fill(PLAIN if template is None else template, row))
            if not found[-1].strip():
                raise ConfigError(f"workload.prompts: {where} gives an empty prompt; take it out")
    if not found:
        raise ConfigError(f"workload.prompts: {', '.join(files)} hold no prompt")
    return found


def prompts_sha256(prompts: Sequence[str]) -> str:
    """Over all prompts, in order."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()


def find_files(names: Sequence[str]) -> list[Path]:
    """Paths and globs as files, in order of their names within a glob."""
    found = []
    for name in names:
        paths = (
            [Path(name).expanduser()] if not glob.has_magic(name) else [Path(p) for p in sorted(glob.glob(str(Path(name).expanduser())))]
        )
        if not paths:
            raise ConfigError(f"workload.prompts: no file matches {name}")
        for path in paths:
            if path.suffix not in TEXTS + TABLES:
                raise ConfigError(f"workload.prompts: {path}: allowed are files that end in {', '.join(TEXTS + TABLES)}")
            found.append(path)
    return found


def template_columns(template: str) -> list[str]:
    """The columns that a template names; ConfigError where it is none."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError(f"workload.template: {error}, in {template!r}; a brace that is meant is written twice") from None
    names = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name or form or conversion:
            raise ConfigError(f"workload.template: got {template!r}, allowed in braces: the name of a column, such as {{question}}")
        names.append(name)
    if not names:
        raise ConfigError(f"workload.template: {template!r} names no column, so every prompt would be the same; write one in braces")
    return names


def fill(template: str, row: Mapping[str, Any]) -> str:
    """The template with the row's values; nothing in a value is taken for a template."""
    return "".join(text + ("" if name is None else _word(row[name])) for text, name, _, _ in string.Formatter().parse(template))


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, each with where it stands."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.prompts: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if path.suffix in TEXTS:
        yield str(path), {"prompt": text, "text": text}
    elif path.suffix == ".csv":
        yield from _csv_rows(path, text)
    else:
        yield from _json_rows(path, text)


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or ()
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ConfigError(f"workload.prompts: {where} has another number of columns than the first line, which names {len(names)}")
            yield where, row
    except csv.Error as error:
        raise ConfigError(f"workload.prompts: {path}, line {reader.line_num + 1}: {error}") from None


def _json_rows(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"workload.prompts: {where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"workload.prompts: {where} must hold an object, got a {type(row).__name__}")
        yield where, row


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
