"""How many bytes of host memory parked sequences may hold. Knows the machine's memory, nothing of what is stored in it."""

from pathlib import Path

from jaxkv.config.sections import Config

MIB = 2**20
AUTO_MIB = 8192


def resolve_host_budget(config: Config, available_bytes: int | None) -> tuple[int | None, str | None]:
    """The host budget in bytes (None: no limit) and, where the asked one was too large, a message that says so.

    `available_bytes` is the machine's available memory, None where it is unknown: then nothing is clamped.
    """
    asked = config.scheduler.host_budget_mib
    if asked is None:
        return None, None
    most = None if available_bytes is None else available_bytes // 2
    wanted = (AUTO_MIB if asked == "auto" else asked) * MIB
    if most is None or wanted <= most:
        return wanted, None
    if asked == "auto":
        return most, None
    half = f"half of the available {available_bytes // MIB} MiB" if available_bytes is not None else ""
    return most, f"scheduler.host_budget_mib: {asked} is more than {half}, using {most // MIB}; null sets no limit"


def available_memory_bytes(proc: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory a new program could take, in bytes: the kernel's estimate, less where a container's limit leaves less; None if untold."""
    found = [value for value in (_meminfo(proc), _cgroup_left(cgroup)) if value is not None]
    return min(found, default=None)


def _meminfo(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _cgroup_left(folder: Path) -> int | None:
    try:
        limit, used = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text().strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None
