"""What the package promises before it is built: names, light imports, extras, exact versions."""

import ast
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

import jaxkv
from jaxkv.errors import JaxkvError
from jaxkv.extras import require_extra

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
LOCK = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]


def test_every_package_folder_is_listed_by_name():
    found = {"jaxkv"}
    for folder, subfolders, files in os.walk(ROOT / "jaxkv", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        if "__init__.py" in files:
            found.add(Path(folder).relative_to(ROOT).as_posix().replace("/", "."))
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_models_and_scheduler_are_links_to_the_folders_beside_the_package():
    for name in ("models", "scheduler"):
        assert (ROOT / "jaxkv" / name).is_symlink() and (ROOT / "jaxkv" / name).resolve() == ROOT / name


@pytest.mark.parametrize("module", ["jaxkv", "jaxkv.scheduler", "jaxkv.request", "jaxkv.errors"])
def test_a_light_import_stays_light(run_python, module):
    heavy = "{'jax', 'jaxlib', 'flax', 'numpy', 'pydantic', 'yaml', 'rich', 'tyro'}"
    assert run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]\n"


def test_the_command_line_starts_without_jax(run_python):
    source = (
        "import sys; from jaxkv.cli.main import main; code = main(['--version']); print(code, 'jax' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run_python(source) == f"jaxkv {jaxkv.__version__}\n0 False False\n"


def test_public_names_come_when_asked_for():
    assert jaxkv.load_config({"model": {"path": "x"}}).model.path == "x"
    assert jaxkv.SamplingParams().temperature == 1.0
    assert set(jaxkv.__all__) <= set(dir(jaxkv))
    with pytest.raises(AttributeError, match="module 'jaxkv' has no attribute 'nonsense'"):
        _ = jaxkv.nonsense


def test_a_missing_extra_is_named_with_the_command_that_brings_it():
    with pytest.raises(JaxkvError) as error:
        require_extra("plots", "no_such_package.pyplot")
    assert str(error.value) == "this needs the package no_such_package.pyplot, which is not installed: pip install 'jaxkv[plots]'"
    assert require_extra("plots", "json") is __import__("json")


def test_a_package_that_is_there_but_broken_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        require_extra("plots", "half_there")


def test_the_extras_are_those_that_are_promised():
    assert set(PYPROJECT["project"]["optional-dependencies"]) == {
        *("server", "structured", "plots", "peers", "clients", "cuda12", "cuda13", "tpu", "dev"),
    }


def test_the_lock_holds_exact_versions_and_no_address():
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in LOCK), LOCK
    locked = {line.partition("==")[0] for line in LOCK}
    wanted = [*PYPROJECT["project"]["dependencies"], *EXTRAS["dev"], *EXTRAS["server"]]
    assert {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in wanted} <= locked


def test_everything_imported_is_a_dependency_or_asked_for_by_its_extra():
    distribution = {"yaml": "pyyaml", "orbax": "orbax-checkpoint", "pydantic_core": "pydantic", "ml_dtypes": "ml-dtypes"}
    core = {re.split(r"[<>=]", requirement)[0] for requirement in PYPROJECT["project"]["dependencies"]}
    server = {*core, "starlette", "h11"} | {re.split(r"[<>=]", need)[0].replace("-", "_") for need in EXTRAS["server"]}
    for path in [path for folder in ("jaxkv", "models", "scheduler") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for root in {name.partition(".")[0] for name in names} - {"jaxkv"} - sys.stdlib_module_names:
                is_server = (ROOT / "jaxkv" / "serve") in path.parents
                assert distribution.get(root, root) in (server if is_server else core), f"{path} imports {root}"


def test_every_dependency_has_a_lower_bound_and_every_core_one_an_upper():
    for requirement in PYPROJECT["project"]["dependencies"]:
        assert re.fullmatch(r"[a-z0-9-]+>=[0-9.]+,<[0-9.]+", requirement), requirement
    for extra in PYPROJECT["project"]["optional-dependencies"].values():
        assert all(">=" in requirement for requirement in extra), extra
