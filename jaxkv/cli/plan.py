"""`jaxkv plan CONFIG`: what a model and its pool take, from its config.json alone: no weights, no device."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, arg

from jaxkv.cli.arguments import parse_with_overrides
from jaxkv.config import load_config
from jaxkv.errors import ConfigError

if TYPE_CHECKING:
    from jaxkv.sizing import Sizing


@dataclass(frozen=True)
class Args:
    """Print parameters, bytes per token and per sequence, the pool, what fits, and what a park takes. Loads no weights."""

    config: Annotated[Positional[Path], arg(help="a configuration, such as configs/gpu.yaml")]
    shape: Annotated[Path | None, arg(metavar="FILE", help="a model's config.json; default: that of model.path")] = None
    memory_gib: Annotated[float | None, arg(metavar="GIB", help="memory of one device; needed where pool.tokens is null")] = None
    link_gb_s: Annotated[float, arg(help="bandwidth between one device and host memory, in 10^9 bytes a second")] = 16.0
    tokens: Annotated[int | None, arg(metavar="N", help="length of the sequence that is parked; default: model.max_len")] = None
    backend: Annotated[str, arg(metavar="NAME", help="where it is to run: cpu, gpu or tpu; decides what `auto` types are")] = "gpu"
    json: Annotated[bool, arg(help="one JSON object instead of the table")] = False


def run(words: Sequence[str]) -> int:
    """Read, count, print."""
    args, overrides = parse_with_overrides(Args, "plan", words)
    config = load_config(args.config, overrides)
    check(args)
    from jaxkv.models import check_mesh
    from jaxkv.sizing import GIB, measure, read_shape

    model = read_shape(config, args.shape)
    check_mesh(model, config.mesh.tensor)
    memory = None if args.memory_gib is None else int(args.memory_gib * GIB)
    found = measure(config, model, args.backend, memory, args.link_gb_s, args.tokens)
    print(json.dumps(found.to_dict(), indent=2) if args.json else text(found))
    return 0


def check(args: Args) -> None:
    """Refuse what no device or link is."""
    for name, value in (("--memory-gib", args.memory_gib), ("--link-gb-s", args.link_gb_s), ("--tokens", args.tokens)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{name}: got {value}, allowed: more than 0")
    if args.backend not in ("cpu", "gpu", "tpu"):
        raise ConfigError(f"--backend: got {args.backend!r}, allowed: cpu | gpu | tpu")


def text(found: "Sizing") -> str:
    """One figure a line."""
    return "\n".join(f"{name:<26} {value}" for name, value in lines(found))


def lines(found: "Sizing") -> list[tuple[str, str]]:
    """Name and value, for people."""
    each = f", {size(found.weight_bytes_per_device)} on each of {found.devices} devices" if found.devices > 1 else ""
    shown = [
        ("model", f"{found.model_type} in {found.dtype}" + f", weights in {found.weight_dtype}" * (found.weight_dtype != found.dtype)),
        ("parameters", f"{found.num_parameters:,}"),
        ("weights", size(found.weight_bytes) + each),
        ("KV bytes per token", f"{found.kv_bytes_per_token:,} ({found.kv_dtype})"),
        ("state bytes per sequence", f"{found.state_bytes_per_sequence:,}"),
        *([] if found.window is None else [("window", found.window)]),
    ]
    if found.pool_tokens is None or found.pool_bytes is None or found.bytes_per_device is None:
        shown.append(("pool", "pool.tokens is null, so the device's memory decides: give --memory-gib"))
    else:
        shown.append(("pool", f"{found.pool_tokens:,} tokens, {size(found.pool_bytes)}"))
        shown.append(("in use on a device", f"{size(found.bytes_per_device)}: weights, pool, states of all rows, staging"))
        if found.memory_bytes_per_device is not None:
            word = "yes" if found.fits else f"no, {size(found.bytes_per_device - found.memory_bytes_per_device)} are missing"
            shown.append((f"fits {size(found.memory_bytes_per_device)}", word))
        shown.append((f"at {found.sequence_tokens:,} tokens each", f"{found.sequences_in_pool} sequences in the pool at once"))
    budget = "no limit" if found.images_in_host_budget is None else f"{found.images_in_host_budget} in scheduler.host_budget_mib"
    shown.append((f"image of {found.sequence_tokens:,} tokens", f"{size(found.image_bytes)}; {budget}"))
    shown.append(("park or restore", f"{found.park_s * 1e3:.1f} ms at {found.link_gb_per_s:g} GB/s"))
    return shown


def size(number: int) -> str:
    """Bytes as GiB, MiB or KiB."""
    for unit, letter in ((2**30, "GiB"), (2**20, "MiB")):
        if abs(number) >= unit:
            return f"{number / unit:.2f} {letter}"
    return f"{number / 2**10:.1f} KiB"
