"""What an answer's bytes depend on beside the request, as one short hash. Never the pool's size, a budget or a policy."""

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jaxlib.version
from jax.sharding import Mesh

from jaxkv.attention import BLOCK_TOKENS
from jaxkv.models import Checkpoint, CheckpointInfo
from jaxkv.pool import PoolLayout
from jaxkv.processor import cpu_identity
from jaxkv.programs import HEAD_TILE, Shapes

KERNELS = f"paged-blocks-{BLOCK_TOKENS}/head-tile-{HEAD_TILE}/2"  # the last number rises whenever the arithmetic changes


def fingerprint_facts(
    checkpoint: Checkpoint, dtype: str, weight_dtype: str | None, layout: PoolLayout, shapes: Shapes, mesh: Mesh
) -> dict[str, Any]:
    """Everything that is hashed, by name. The same weights read with another rope, end-of-text id or tokenizer are another model."""
    return {
        "weights_sha256": checkpoint.weights_sha256,
        "tokenizer_sha256": None if checkpoint.tokenizer is None else checkpoint.tokenizer.sha256(),
        **early_facts(checkpoint, dtype, weight_dtype, layout, shapes, mesh),
    }


def early_facts(
    model: Checkpoint | CheckpointInfo, dtype: str, weight_dtype: str | None, layout: PoolLayout, shapes: Shapes, mesh: Mesh
) -> dict[str, Any]:
    """Those that are known before weights are read."""
    device = mesh.devices.flat[0]
    return {
        "model": model.config.to_json(),
        "eos_ids": sorted(model.eos_ids),
        "dtype": dtype,
        "weight_dtype": weight_dtype or dtype,
        "kv_dtype": layout.dtype,
        "backend": device.platform,
        "device_kind": device.device_kind,
        "cpu": cpu_identity() if device.platform == "cpu" else None,
        "jaxlib": jaxlib.version.__version__,
        "jax": jax.__version__,
        "llguidance": installed_version("llguidance"),
        "xla_flags": " ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
        "rows": shapes.rows,
        "prefill_chunk": shapes.chunk,
        "page_size": layout.page_size,
        "max_len": shapes.max_len,
        "mesh": mesh.size,
        "speculation": speculation(model, layout, shapes),
        "kernels": KERNELS,
    }


def speculation(model: Checkpoint | CheckpointInfo, layout: PoolLayout, shapes: Shapes) -> dict[str, Any] | None:
    """How many columns are checked, and whether a draft head is part of the programs; what is guessed changes no byte."""
    has_head = layout.num_layers + len(layout.states) > model.config.num_layers
    return None if shapes.num_columns == 1 else {"num_draft": shapes.num_columns - 1, "has_head": has_head}


def installed_version(package: str) -> str | None:
    """The version of a package that need not be there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint(facts: dict[str, Any]) -> str:
    """Sixteen hexadecimal digits of SHA-256 over the facts as JSON with sorted keys."""
    return "fp_" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
