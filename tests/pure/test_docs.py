"""What the documents point at is there: links, files, make targets, commands, fields and exit codes."""

import re
from pathlib import Path

import pytest

from jaxkv.cli.main import COMMANDS
from jaxkv.config.fields import all_fields
from jaxkv.config.sections import Config

ROOT = Path(__file__).parents[2]
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deploy" / "README.md"]
FOLDERS = ("jaxkv", "scheduler", "models", "configs", "docs", "deploy", "tests", ".ci")


def names(paths: list[Path]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for path in paths]


def test_there_are_documents():
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/batch.md"} <= {*names(DOCS)}


@pytest.mark.parametrize("path", DOCS, ids=names(DOCS))
def test_links_lead_somewhere(path: Path):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=names(DOCS))
def test_files_named_in_the_text_are_there(path: Path):
    named = re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*)`", path.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("path", DOCS, ids=names(DOCS))
def test_make_targets_commands_and_fields_exist(path: Path):
    text = path.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spans = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?:make|\.venv/bin/jaxkv|jaxkv) .*$", text, re.MULTILINE)
    for span in spans:
        if made := re.match(r"make ([a-z-]+)", span):
            assert made[1] in targets, span
        if called := re.match(r"(?:\.venv/bin/)?jaxkv ([a-z]+)", span):
            assert called[1] in COMMANDS, span
        if field := re.fullmatch(rf"((?:{'|'.join(Config.model_fields)})\.\w+)", span):
            is_file_or_call = any((ROOT / folder / span).exists() for folder in ("", *FOLDERS)) or span.endswith(".py")
            assert field[1] in all_fields() or is_file_or_call or hasattr_in_scheduler(span), span


def hasattr_in_scheduler(span: str) -> bool:
    """`scheduler.plan` and the like are methods, not fields."""
    from jaxkv.scheduler import Scheduler

    owner, _, name = span.partition(".")
    return owner == "scheduler" and hasattr(Scheduler, name)


def test_the_summary_table_names_what_there_is():
    source = "".join((ROOT / "jaxkv" / name).read_text() for name in ("summary.py", "batch/summary.py"))
    written = set(re.findall(r'^ +"(\w+)": ', source, re.MULTILINE))
    text = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8").partition("## The summary")[2]
    told = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert written == told


def test_the_picture_loads_nothing_from_elsewhere():
    svg = (ROOT / "docs" / "assets" / "demo.svg").read_text(encoding="utf-8")
    addresses = {match for match in re.findall(r"https?://[^\"')\s]+", svg) if not match.startswith("http://www.w3.org/")}
    assert addresses - {"https://www.textualize.io"} == set()
    assert "font-face" not in svg
    assert "parked" in svg
