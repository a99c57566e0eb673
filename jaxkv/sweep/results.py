"""The figures of a sweep in files and on the terminal: results.jsonl and results.csv, one line for each run. Runs nothing, draws nothing.

Units are in the names: `_s` seconds, `_ms` milliseconds, `_bytes`, `_per_s`; counts begin with `num_`.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxkv.batch.write import write_whole
from jaxkv.config.axes import case_name
from jaxkv.errors import ConfigError
from jaxkv.simulate.result import Result
from jaxkv.simulate.table import make_table
from jaxkv.sweep.folder import SweepFolder, read_sweep
from jaxkv.sweep.matrix import SCHEMA_VERSION, Run

RESULTS, TABLE = "results.jsonl", "results.csv"
FIGURES = tuple(field.name for field in fields(Result))
FIRST = ("schema_version", "kind", "case", "seed", "repeat", "run", "status", "commit", "system_fingerprint", "outputs_sha256")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CaseResults:
    """A case with the results of its finished runs, in the order of rounds."""

    values: Mapping[str, Any]
    results: tuple[Result, ...]
    runs: tuple[str, ...]  # the names of their folders

    @property
    def name(self) -> str:
        """`victim smallest, resume head`."""
        return case_name(self.values)


def collect(folder: SweepFolder, runs: Sequence[Run]) -> list[Row]:
    """A row for each run that is finished or failed, in the order of the runs."""
    rows = []
    for run in runs:
        of = folder.of(run)
        manifest = of.manifest()
        if manifest is None or manifest["key"] != run.key or manifest["status"] == "started":
            continue
        if manifest["status"] == "finished" and not of.is_whole():
            continue
        row = {name: manifest.get(name) for name in FIRST} | {"case": dict(run.values), "run": of.path.name}
        if manifest["status"] == "finished":
            row |= {name: value for name, value in of.summary().items() if name != "schema_version"}
        else:
            row["error"] = manifest["error"]
        rows.append(row)
    return rows


def write_results(folder: Path, rows: Sequence[Row]) -> None:
    """Both files, each at once."""
    write_whole(folder / RESULTS, "".join(json.dumps(row) + "\n" for row in rows))
    flat = [flatten(row) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    write_whole(folder / TABLE, out.getvalue())


def flatten(row: Mapping[str, Any]) -> Row:
    """A row without nesting: `scheduler.victim` for what makes the case, `ttft_s.p50` for a figure of several."""
    found: Row = {}
    for name, value in row.items():
        if name == "case":
            found |= {field: json.dumps(part) if isinstance(part, list | dict) else part for field, part in value.items()}
        elif isinstance(value, dict):
            found |= {f"{name}.{part}": number for part, number in value.items()}
        else:
            found[name] = value
    return found


def read_results(folder: Path) -> list[Row]:
    """The rows of a sweep's folder; ConfigError for a folder that is none, of another version, or without results."""
    read_sweep(folder)
    try:
        lines = (folder / RESULTS).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot read {RESULTS}: {error.strerror or error}; `jaxkv sweep` writes it") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{folder / RESULTS}, line {number}: is not JSON: {error}") from None
        if row.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{folder / RESULTS}, line {number}: its schema_version is {row.get('schema_version')}, this one reads {SCHEMA_VERSION}"
            )
        rows.append(row)
    return rows


def by_case(rows: Iterable[Row]) -> list[CaseResults]:
    """The finished runs by case."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "finished":
            cases.setdefault(json.dumps(row["case"]), []).append(row)
    return [
        CaseResults(
            found[0]["case"], tuple(Result(**{name: row[name] for name in FIGURES}) for row in found), tuple(row["run"] for row in found)
        )
        for found in cases.values()
    ]


def table(rows: Sequence[Row]) -> Table:
    """The means by case; there is at least one finished run."""
    cases = by_case(rows)
    num = max(len(case.results) for case in cases)
    clock = "the simulated clock" if rows[0]["kind"] == "simulated" else "the clock"
    return make_table(cases, f"means over {num} {'run' if num == 1 else 'runs'} of each case, seconds of {clock}")


def warnings(rows: Sequence[Row]) -> list[str]:
    """What makes rows hard to compare."""
    commits = sorted({str(row["commit"])[:12] for row in rows})
    prints = sorted({str(row["system_fingerprint"]) for row in rows if row["status"] == "finished"})
    found = []
    if len(commits) > 1:
        found.append(f"these runs are of {len(commits)} commits: {', '.join(commits)}")
    if len(prints) > 1:
        found.append(f"these runs have {len(prints)} fingerprints, so their answers need not be the same bytes: {', '.join(prints)}")
    return found
