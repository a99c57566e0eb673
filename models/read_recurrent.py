"""The recurrent layers that a Hugging Face config.json speaks of. Knows no tensor names."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from jaxkv.models.config import Recurrent, check_num_layers, read_count
from jaxkv.models.errors import ModelError

FULL, LINEAR = "full_attention", "linear_attention"
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
INFINITY = (float("inf"), {"__float__": "Infinity"})  # in either spelling
PURE = ("mamba", "mamba2")  # without any attention


def read_recurrent(data: Mapping[str, Any], where: str) -> Recurrent | None:
    """Which layers keep a state, and its dimensions; None in a family where none does."""
    model_type = data["model_type"]
    if model_type in HYBRIDS:
        return _read_delta(data, where)
    return {"mamba": _read_mamba, "mamba2": _read_mamba2}[model_type](data, where) if model_type in PURE else None


def _read_delta(data: Mapping[str, Any], where: str) -> Recurrent:
    """`layer_types` says which layers they are, else all but every `full_attention_interval`-th."""
    count = partial(read_count, data, where)
    num_layers, interval = count("num_hidden_layers"), count("full_attention_interval", 4)
    check_num_layers(num_layers)
    kinds = data.get("layer_types") or [LINEAR if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {FULL, LINEAR}:
        raise ModelError(f"{where}: layer_types must say {FULL!r} or {LINEAR!r} for each of {num_layers} layers, got {kinds}")
    num_heads, num_groups = count("linear_num_value_heads"), count("linear_num_key_heads")
    _check_shared(num_heads, num_groups, where, "linear_num_value_heads", "linear_num_key_heads")
    return Recurrent(
        kind="delta",
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR),
        num_heads=num_heads,
        head_dim=count("linear_value_head_dim"),
        num_groups=num_groups,
        state_dim=count("linear_key_head_dim"),
        conv_len=count("linear_conv_kernel_dim", 4),
    )


def _read_mamba(data: Mapping[str, Any], where: str) -> Recurrent:
    count = partial(read_count, data, where)
    hidden, rank = count("hidden_size"), data.get("time_step_rank")
    return Recurrent(
        kind="mamba",
        num_heads=1,
        head_dim=count("intermediate_size", count("expand", 2) * hidden),
        num_groups=1,
        step_rank=-(-hidden // 16) if rank == "auto" else count("time_step_rank", -(-hidden // 16)),
        **_common(data, where),
    )


def _read_mamba2(data: Mapping[str, Any], where: str) -> Recurrent:
    count = partial(read_count, data, where)
    inner, num_heads, head_dim = count("expand", 2) * count("hidden_size"), count("num_heads"), count("head_dim")
    if num_heads * head_dim != inner:
        raise ModelError(f"{where}: num_heads * head_dim must be expand * hidden_size = {inner}, got {num_heads} * {head_dim}")
    if (limit := data.get("time_step_limit")) and (limit[0] != 0 or limit[1] not in INFINITY):
        raise ModelError(f"{where}: time_step_limit = {limit} is not supported for 'mamba2', only [0, Infinity]")
    num_groups = count("n_groups", 1)
    _check_shared(num_heads, num_groups, where, "num_heads", "n_groups")
    return Recurrent(kind="mamba2", num_heads=num_heads, head_dim=head_dim, num_groups=num_groups, **_common(data, where))


def _common(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What both kinds of Mamba say in the same words."""
    count = partial(read_count, data, where)
    num_layers = count("num_hidden_layers")
    check_num_layers(num_layers)
    return {
        "layers": tuple(range(num_layers)),
        "state_dim": count("state_size"),
        "conv_len": count("conv_kernel", 4),
        "conv_bias": bool(data.get("use_conv_bias", True)),
        "bias": bool(data.get("use_bias", False)),
    }


def _check_shared(num_heads: int, num_groups: int, where: str, heads: str, groups: str) -> None:
    if num_heads % num_groups:
        raise ModelError(f"{where}: {groups} must divide {heads} = {num_heads}, got {num_groups}")
