"""What must be known of a run to make it again, and to see why it came out otherwise: versions, commit, inputs, machine. Runs nothing."""

import os
import platform
import shlex
import sys
from functools import cache
from typing import Any

from jaxkv import __version__
from jaxkv.provenance import has_changes, machine, versions
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
