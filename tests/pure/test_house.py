"""The rules of the house that no linter knows: one dangerous idea, one file; imports go one way."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = (ROOT / "jaxkv" / "models", ROOT / "jaxkv" / "scheduler")


def sources(*folders: str) -> list[Path]:
    """Every source file of the folders, those behind the links in jaxkv/ once."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not any(link in path.parents for link in LINKS)]


def nodes(path: Path) -> Iterator[ast.AST]:
    """The syntax of a file without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.walk(tree)


def imports(path: Path) -> set[str]:
    """The full names of the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dotted(node: ast.AST) -> str:
    """`jax.random.key` for the expression that says it, else an empty string or a part of it."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def says(path: Path, *names: str) -> set[str]:
    """Which of the names a file uses: as an attribute, an imported name, a keyword or a string."""
    used: set[str] = set()
    for node in nodes(path):
        used.add(dotted(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value)
        if isinstance(node, ast.keyword) and node.arg:
            used.add(node.arg + "=")
    used |= imports(path)
    return {name for name in names if any(use == name or use.endswith("." + name) or use.startswith(name + ".") for use in used)}


def users(names: tuple[str, ...], *folders: str) -> dict[str, set[str]]:
    """The files of the folders that use any of the names."""
    found = {path.relative_to(ROOT).as_posix(): says(path, *names) for path in sources(*folders)}
    return {path: used for path, used in found.items() if used}


def test_there_is_something_to_look_at():
    assert len(sources("jaxkv")) > 10 and len(sources("models")) > 5 and len(sources("scheduler")) > 5
    assert users(("jax.jit",), "jaxkv"), "nobody compiles anything: this file no longer sees what it looks for"


def test_memory_kinds_are_the_transfers_business():
    names = ("pinned_host", "unpinned_host", "with_memory_kind", "memory_kind=")
    assert set(users(names, "jaxkv", "models", "scheduler")) <= {"jaxkv/transfer.py"}


def test_programs_are_compiled_in_one_place():
    names = ("jax.jit", "nnx.jit", "jax.pmap", "pjit")
    assert set(users(names, "jaxkv", "models", "scheduler")) <= {"jaxkv/programs.py"}


def test_random_keys_are_made_in_sampling_and_by_a_models_initialisers():
    assert set(users(("jax.random",), "jaxkv", "scheduler")) <= {"jaxkv/sampling.py"}


def test_threads_live_in_the_service_and_where_programs_are_read_ahead():
    found = users(("threading", "concurrent.futures", "_thread"), "jaxkv", "models", "scheduler")
    assert set(found) == {"jaxkv/serve/service.py", "jaxkv/program_store.py"}


def test_event_loops_live_in_the_server_only():
    found = users(("asyncio",), "jaxkv", "models", "scheduler")
    assert {path for path in found if not path.startswith("jaxkv/serve/") and path != "jaxkv/cli/serve.py"} == set()


def test_checkpoint_key_names_stand_in_the_loaders_only():
    marks = ("self_attn", "attn_q.weight", "embed_tokens", "token_embd", "lm_head")
    for path in sources("jaxkv", "models"):
        texts = {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        if not path.name.startswith("load_"):
            assert not [text for text in texts if any(mark in text for mark in marks)], path


def test_the_scheduler_imports_the_standard_library_and_itself():
    for path in sources("scheduler"):
        roots = {name for name in imports(path) if name.partition(".")[0] not in sys.stdlib_module_names}
        assert all(name.startswith("jaxkv.scheduler.") for name in roots), (path, roots)


def test_the_models_import_nothing_else_of_ours():
    for path in sources("models"):
        ours = {name for name in imports(path) if name.partition(".")[0] == "jaxkv"}
        assert all(name.startswith("jaxkv.models.") for name in ours), (path, ours)


def test_every_file_says_what_it_owns():
    for path in sources("jaxkv", "models", "scheduler", "benchmarks"):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        assert text and len(text) > 20, f"{path} has no docstring"


@pytest.mark.parametrize("name", ["models", "scheduler"])
def test_no_test_folder_takes_the_name_of_a_package(name):
    assert [path for path in (ROOT / "tests").rglob(name) if path.is_dir() and "fixtures" not in path.parts] == []


def test_text_files_name_no_place_on_somebodys_machine():
    marks = ("/home/", "/root/", "/Users/", "/work/")
    for path in [*sources("jaxkv", "models", "scheduler", "benchmarks"), *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert not [mark for mark in marks if mark in text], path
