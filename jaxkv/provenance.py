"""Where something was measured and of what: the machine, the installed versions, whether the checkout was changed. Runs nothing; no JAX."""

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxkv.config.budget import available_memory_bytes


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
