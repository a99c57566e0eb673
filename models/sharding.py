"""How parameters are split over a mesh with one axis, "tensor". Knows names of parameters only through a family's rule."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec

from jaxkv.models.config import ModelConfig
from jaxkv.models.errors import ModelError

AXIS = "tensor"
Side = Literal["in", "out"]
_LAYOUTS: dict[str, tuple[Side, ...]] = {
    "weight": ("out", "in"),
    "kernel": ("in", "out"),
    "table": ("out", "in"),  # a table goes to logits
    "bias": ("out",),
    "channel_scale": ("out",),
}


def by_rule(split: Mapping[str, Side], path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec:
    """The spec of a parameter: split on the side its layer is listed with, where that divides, else replicated.

    Heads and feed-forward always divide (`check_mesh`, `spread`); a vocabulary may not.
    """
    layer, _, kind = path.rpartition(".")
    side = next((side for ending, side in split.items() if layer == ending or layer.endswith("." + ending)), None)
    layout = _LAYOUTS.get(kind, ())
    if side not in layout or num_shards == 1:
        return PartitionSpec()
    axis = len(shape) - len(layout) + layout.index(side)  # experts are stacked along an axis of their own, the first
    if shape[axis] % num_shards:
        return PartitionSpec()
    return PartitionSpec(*(AXIS if i == axis else None for i in range(len(shape))))


def split_dims(config: ModelConfig) -> dict[str, int]:
    """Everything that is split but the kv heads, in words, and its size: a mesh must divide all of it."""
    dims = {f"{config.num_heads} query heads": config.num_heads, f"feed-forward dim {config.ffn_dim}": config.ffn_dim}
    if experts := config.experts:
        dims |= {f"{experts.ffn_dim} of its experts": experts.ffn_dim, f"{experts.shared_dim} of the shared one": experts.shared_dim}
    if config.recurrent:
        dims |= config.recurrent.split_dims
    return {words: dim for words, dim in dims.items() if dim}


def allowed_meshes(config: ModelConfig) -> list[int]:
    """The device counts this model can be split over. 4 query heads and 2 kv heads: over 4 too, where each kv head is on two devices."""
    dims, heads = split_dims(config).values(), config.num_kv_heads
    return [n for n in range(1, min(dims) + 1) if all(dim % n == 0 for dim in dims) and not (heads and heads % n and n % heads)]


def check_mesh(config: ModelConfig, num_shards: int) -> None:
    """Refuse a mesh that does not fit the heads or the feed-forward dim, naming what would."""
    allowed = allowed_meshes(config)
    if num_shards not in allowed:
        *most, last = split_dims(config)
        what = f"{', '.join(most)} and {last}" if most else last
        heads = f", and divide its {config.num_kv_heads} kv heads or be a multiple of them" if config.num_kv_heads else ""
        raise ModelError(f"mesh.tensor = {num_shards} must divide this model's {what}{heads}; allowed: {', '.join(map(str, allowed))}")


# kv heads that are fewer than the devices


def kv_copies(config: ModelConfig, num_shards: int) -> int:
    """On how many devices each kv head is, so that each device has one: 2 of 4 devices where there are two."""
    return max(1, num_shards // config.num_kv_heads) if config.page_layers else 1


def about_copies(config: ModelConfig, num_shards: int) -> list[str]:
    """What is to be said once where there are fewer kv heads than devices."""
    copies, heads = kv_copies(config, num_shards), config.num_kv_heads
    if copies == 1:
        return []
    return [
        f"mesh.tensor = {num_shards} is more than this model's {heads} kv heads: each is on {copies} devices, so that the pool and parked "
        f"images take {copies} times as many bytes as on {heads}"
    ]


def spread(config: ModelConfig, num_shards: int) -> ModelConfig:
    """The model with as many kv heads as devices, copies next to each other, so that query head i still reads the head it did:

    4 query heads, 2 kv heads A and B      i // 2: A A B B
    over 4 devices A A B B                 i // 1: A A B B
    """
    return replace(config, num_kv_heads=config.num_kv_heads * kv_copies(config, num_shards))


def spread_heads(config: ModelConfig, num_shards: int, path: str, array: np.ndarray) -> np.ndarray:
    """A parameter [out, ...] of `config` as that of the spread model."""
    copies, parts = kv_copies(config, num_shards), path.split(".")
    has_kv = parts[-3:-1] in (["attn", "k"], ["attn", "v"]) and (parts[0] != "layers" or int(parts[1]) in config.page_layers)
    if copies == 1 or not has_kv:
        return array
    heads = array.reshape(config.num_kv_heads, config.head_dim, *array.shape[1:])
    return heads.repeat(copies, axis=0).reshape(-1, *array.shape[1:])
