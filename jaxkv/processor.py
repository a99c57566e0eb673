"""Which processor this is, as far as bytes and compiled programs depend on it. Knows nothing of JAX."""

import hashlib
import platform
from pathlib import Path


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name and a hash of the instruction set, e.g. `AMD EPYC 9654/5f2c...`; the machine's name where that is not told."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return f"{platform.machine()}/{platform.processor()}"
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = " ".join(sorted((facts.get("flags") or facts.get("Features") or "").split()))
    return f"{facts.get('model name', platform.machine())}/{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
