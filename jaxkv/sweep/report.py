"""A sweep as one page of HTML that needs nothing else: tables, pictures inside it, what the runs were made with. Runs nothing."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from jaxkv.simulate.table import COLUMNS, ONLY_WHERE_ANY, mean, spread
from jaxkv.sweep.folder import RUNS, RunFolder, read_sweep
from jaxkv.sweep.results import CaseResults, Row, by_case, warnings

MADE_WITH = (
    "command",
    "jaxkv_version",
    "commit",
    "uncommitted_changes",
    "system_fingerprint",
    "devices",
    "machine",
    "versions",
    "xla_flags",
)
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:.85rem;margin:1rem 0;display:block;overflow-x:auto}
th,td{padding:.25rem .6rem;border-bottom:1px solid #ddd}
td{text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}td small{color:#777}img{max-width:100%;margin:.5rem 0}
.bad{color:#a00}pre{background:#f6f6f6;padding:1rem;overflow:auto;font-size:.8rem}"""


def build_report(folder: Path, rows: Sequence[Row], pictures: Iterable[Path]) -> str:
    """The page. `pictures` are SVG files, put into it."""
    sweep, cases = read_sweep(folder), by_case(rows)
    failed = [row for row in rows if row["status"] == "failed"]
    parts = [f"<h1>{escape(folder.resolve().name)}</h1>", f"<p>{escape(lead(sweep, rows, failed))}</p>"]
    parts += [f'<p class="bad">{escape(line)}</p>' for line in warnings(rows)]
    parts += [f'<p class="bad">failed: {escape(str(row["run"]))}: {escape(row["error"])}</p>' for row in failed]
    parts += ["<h2>By case</h2>", "<p>Means over the runs of a case; below them, small, the least and the most.</p>", case_table(cases)]
    parts += [picture(path) for path in pictures]
    parts += ["<h2>Every run</h2>", run_table(rows), "<h2>Made with</h2>", made_with(folder, cases)]
    parts += ["<h2>Configuration</h2>", f"<pre>{escape(yaml.safe_dump(sweep['config'], sort_keys=False))}</pre>"]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(folder.resolve().name)}</title>'
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head><body>\n{body}\n</body></html>\n'


def lead(sweep: dict[str, Any], rows: Sequence[Row], failed: Sequence[Row]) -> str:
    """What this is, in a sentence."""
    where = "simulated, seconds of the simulated clock" if sweep["kind"] == "simulated" else "on the engine, seconds of the clock"
    return f"{len(rows) - len(failed)} runs {where}; model {sweep['config']['model']['path']}" + (
        f"; {len(failed)} failed" if failed else ""
    )


def case_table(cases: Sequence[CaseResults]) -> str:
    """Means, and the reach of the runs."""
    names = [name for name, (figure, _) in COLUMNS.items() if name not in ONLY_WHERE_ANY or any(mean(case, figure) for case in cases)]
    lines = []
    for case in cases:
        cells = []
        for name in names:
            figure, form = COLUMNS[name]
            low, high = spread(case, figure)
            cells.append(f"{mean(case, figure):{form}}<br><small>{low:{form}} to {high:{form}}</small>")
        lines.append([escape(case.name), str(len(case.results)), *cells])
    return html_table(["case", "runs", *names], lines)


def run_table(rows: Sequence[Row]) -> str:
    """A line for each."""
    shown = ("makespan_s", "tokens_per_s", "longest_wait_s", "longest_pause_s", "num_parks", "num_finished")
    lines = []
    for row in rows:
        figures = [f"{row[name]:.6g}" if name in row else "" for name in shown]
        digest = escape(str(row["outputs_sha256"])[:12]) if row["status"] == "finished" else "failed"
        lines.append([escape(str(row["run"])), str(row["seed"]), str(row["repeat"]), *figures, digest])
    return html_table(["run", "seed", "repeat", *shown, "outputs_sha256"], lines)


def made_with(folder: Path, cases: Sequence[CaseResults]) -> str:
    """What the manifest of the first run says."""
    if not cases:
        return "<p>no run is finished</p>"
    manifest = RunFolder(folder / RUNS / cases[0].runs[0]).manifest() or {}
    found = {name: manifest[name] for name in MADE_WITH if manifest.get(name) not in (None, "")}
    return f"<pre>{escape(yaml.safe_dump(found, sort_keys=False))}</pre>"


def picture(path: Path) -> str:
    """An SVG inside the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{escape(path.stem.capitalize())}</h2><img alt="{escape(path.stem)}" src="data:image/svg+xml;base64,{data}">'


def html_table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
