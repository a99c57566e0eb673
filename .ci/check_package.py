"""Packages jaxkv as for a release and uses it as a stranger would: sdist, wheel from the sdist, a fresh environment, another folder.

The environment sees the locked dependencies of the one this runs in, but not its jaxkv. Beside the stranger's script lie a models.py and a
scheduler.py of their own, which must be theirs to import.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys
import jaxkv, jaxkv.scheduler
heavy = {"jax", "jaxlib", "flax", "numpy", "pydantic"} & set(sys.modules)
assert not heavy, f"import jaxkv.scheduler brought in {heavy}"
import models, scheduler
assert models.mine and scheduler.mine, "the stranger's own modules are hidden"
import jaxkv.models
assert jaxkv.models is not models
from importlib.resources import files
page = {file.name for file in (files("jaxkv.serve") / "page").iterdir()}
assert {"index.html", "page.css", "main.js", "icon.svg"} <= page, f"the web page lacks files: {page}"
assert jaxkv.load_config({"model": {"path": "x"}}).scheduler.rows == 8
assert jaxkv.__file__.startswith(sys.prefix), f"not the installed package: {jaxkv.__file__}"
"""


def main() -> None:
    """Build, install, use; the first failure raises."""
    with tempfile.TemporaryDirectory(prefix="jaxkv-package-") as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        python = environment(folder / "venv")
        run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
        stranger = folder / "elsewhere"
        stranger.mkdir()
        for module in ("models", "scheduler"):
            (stranger / f"{module}.py").write_text("mine = True\n")
        (stranger / "script.py").write_text(SCRIPT)
        run(str(python), "script.py", cwd=stranger)
        run(str(python.parent / "jaxkv"), "--version", cwd=stranger)
        run(str(python), "-m", "jaxkv", "--help", cwd=stranger)
    print("package: sdist, wheel, installed command and imports work")


def build(folder: Path) -> Path:
    """The wheel, made from the sdist as an index would have it."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment(folder: Path) -> Path:
    """A new environment whose Python also sees this one's packages, but none of its editable installs."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    site = subprocess.check_output([str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True).strip()
    Path(site, "locked.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command; show what it said and stop when it fails."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\npackage: {' '.join(command)} failed with exit code {done.returncode}")


if __name__ == "__main__":
    main()
