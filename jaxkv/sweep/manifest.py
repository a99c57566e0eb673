"""What must be known of a run to make it again, and to see why it came out otherwise: versions, commit, inputs, machine. Runs nothing."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxkv import __version__
from jaxkv.config.budget import available_memory_bytes
from jaxkv.summary import commit
from jaxkv.sweep.folder import kind_of
from jaxkv.sweep.matrix import SCHEMA_VERSION, Run, config_sha256, input_sha256

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "tokenizers", "llguidance", "pydantic")


def new_manifest(run: Run) -> dict[str, Any]:
    """All that is known before it begins."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "started",
        "kind": kind_of(run.is_simulated),
        "key": run.key,
        "case": dict(run.values),
        "seed": run.seed,
        "repeat": run.repeat,
        "config_sha256": config_sha256(run.config),
        "input_sha256": input_sha256(run.config),
        "jaxkv_version": __version__,
        **code(),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "machine": machine(),
        "command": shlex.join(sys.argv),
    }


@cache
def code() -> dict[str, Any]:
    """What runs: asked once, since it cannot change under a process that has it loaded."""
    return {"commit": commit(), "uncommitted_changes": has_changes(), "versions": versions(PACKAGES)}


def machine() -> dict[str, Any]:
    """The machine without its accelerators, and how busy it was."""
    memory = available_memory_bytes()
    return {
        "cpu": next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "available_memory_mib": None if memory is None else memory // 2**20,
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
    }


def has_changes() -> bool | None:
    """Whether the checkout differs from its commit; None outside of one."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"]
        return bool(subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip())
    except (OSError, subprocess.SubprocessError):
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Those of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
