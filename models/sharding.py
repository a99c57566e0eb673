"""How parameters are split over a mesh with one axis, "tensor". Knows names of parameters only through a family's rule."""

from collections.abc import Mapping
from typing import Literal

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
}


def by_rule(split: Mapping[str, Side], path: str, shape: tuple[int, ...], num_shards: int) -> PartitionSpec:
    """The spec of a parameter: split on the side its layer is listed with, where that divides, else replicated.

    Heads and feed-forward always divide (`check_mesh`); a vocabulary may not.
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
    """Everything that is split, in words, and its size: a mesh must divide all of it."""
    heads, groups, ffn_dim = config.num_heads, config.num_kv_heads, config.ffn_dim
    dims = {f"{heads} query heads": heads, f"{groups} kv heads": groups, f"feed-forward dim {ffn_dim}": ffn_dim}
    if experts := config.experts:
        dims |= {f"{experts.ffn_dim} of its experts": experts.ffn_dim, f"{experts.shared_dim} of the shared one": experts.shared_dim}
    if config.recurrent:
        dims |= config.recurrent.split_dims
    return {words: dim for words, dim in dims.items() if dim}


def allowed_meshes(config: ModelConfig) -> list[int]:
    """The device counts this model can be split over."""
    dims = split_dims(config).values()
    return [n for n in range(1, min(dims) + 1) if all(dim % n == 0 for dim in dims)]


def check_mesh(config: ModelConfig, num_shards: int) -> None:
    """Refuse a mesh that does not divide the heads or the feed-forward dim, naming what would."""
    allowed = allowed_meshes(config)
    if num_shards not in allowed:
        *most, last = split_dims(config)
        what = f"{', '.join(most)} and {last}" if most else last
        raise ModelError(f"mesh.tensor = {num_shards} must divide this model's {what}; allowed: {', '.join(map(str, allowed))}")
